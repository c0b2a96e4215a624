// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// gatewaySystem runs Envoy Gateway as a pod. It makes a Deployment and a Service for each Gateway.
const gatewaySystem = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: envoy-gateway, namespace: envoy-gateway-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: envoy-gateway}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: envoy-gateway, namespace: envoy-gateway-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: envoy-gateway-config, namespace: envoy-gateway-system}
data:
  envoy-gateway.yaml: |
    apiVersion: gateway.envoyproxy.io/v1alpha1
    kind: EnvoyGateway
    gateway: {controllerName: gateway.envoyproxy.io/gatewayclass-controller}
    provider: {type: Kubernetes}
    extensionApis: {enableBackend: true, enableEnvoyPatchPolicy: true}
---
apiVersion: v1
kind: Service
metadata: {name: envoy-gateway, namespace: envoy-gateway-system, labels: {control-plane: envoy-gateway}}
spec:
  selector: {control-plane: envoy-gateway}
  ports:
  - {name: grpc, port: 18000}
  - {name: ratelimit, port: 18001}
  - {name: wasm, port: 18002}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: envoy-gateway, namespace: envoy-gateway-system, labels: {control-plane: envoy-gateway}}
spec:
  replicas: 1
  selector: {matchLabels: {control-plane: envoy-gateway}}
  template:
    metadata: {labels: {control-plane: envoy-gateway}}
    spec:
      serviceAccountName: envoy-gateway
      containers:
      - name: envoy-gateway
        image: docker.io/envoyproxy/gateway:v1.9.1
        command: [envoy-gateway]
        args: [server, --config-path=/config/envoy-gateway.yaml]
        env:
        - {name: ENVOY_GATEWAY_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
        - {name: KUBERNETES_CLUSTER_DOMAIN, value: cluster.local}
        readinessProbe: {httpGet: {path: /readyz, port: 8081}, periodSeconds: 1}
        volumeMounts:
        - {name: config, mountPath: /config}
        - {name: certs, mountPath: /certs}
      volumes:
      - {name: config, configMap: {name: envoy-gateway-config}}
      - {name: certs, secret: {secretName: envoy-gateway}}
`

// clusterManifests returns the manifests of examples/envoy-gateway for workers that come and go. original-destination
// gets the Service of the workers as its pool, endpoint-override its Backends with names. The chart has the policy that
// asks kvroute.
func (e *env) clusterManifests(variant string) (string, error) {
	change := []string{
		"namespace: default", "namespace: " + namespace, "default/llm/http", namespace + "/llm/http",
		"/default/kvroute/", "/" + namespace + "/kvroute/", ".default.svc", "." + namespace + ".svc",
	}
	files := []string{"base.yaml", variant + ".yaml"}
	if variant == override {
		files = append(files, variant+"-pods.yaml")
	} else {
		change = append(change, "    - group: gateway.envoyproxy.io\n      kind: Backend\n      name: workers\n",
			"    - name: vllm\n      port: 8000\n")
	}
	var all []string
	for i, file := range files {
		text, err := os.ReadFile(filepath.Join(e.tree, "examples/envoy-gateway", file))
		if err != nil {
			return "", err
		}
		for doc := range strings.SplitSeq(string(text), "\n---\n") {
			if i < 2 && (strings.Contains(doc, "kind: EnvoyExtensionPolicy") || strings.Contains(doc, "kind: Backend\nmetadata:")) {
				continue
			}
			all = append(all, strings.NewReplacer(change...).Replace(doc))
		}
	}
	return strings.Join(all, "\n---\n"), nil
}

const override = "endpoint-override"

// gatewayValues are those of both variants.
const gatewayValues = values + "envoyGateway: {enabled: true, route: llm}\n"

func (e *env) envoyGateway(ctx context.Context, t *tally) error {
	return e.gateway(ctx, t, "original-destination", "header")
}

// endpointOverride also has TLS between Envoy and kvroute.
func (e *env) endpointOverride(ctx context.Context, t *tally) error {
	return e.gateway(ctx, t, override, "list")
}

// gateway has Envoy Gateway program an Envoy with the chart's policy and a variant of the manifests.
func (e *env) gateway(ctx context.Context, t *tally, variant, second string) error {
	const system = "envoy-gateway-system"
	if err := e.applyText(ctx,
		workers+"---\napiVersion: v1\nkind: Namespace\nmetadata: {name: "+system+"}\n"); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(e.bin, "envoy-gateway"), "certgen", "--disable-topology-injector")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+e.kubeconfig, "ENVOY_GATEWAY_NAMESPACE="+system)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("envoy-gateway certgen: %w: %s", err, out)
	}
	manifests, err := e.clusterManifests(variant)
	if err != nil {
		return err
	}
	text := gatewayValues
	if variant == override {
		tls, err := e.encryptGateway(ctx)
		if err != nil {
			return err
		}
		text, manifests = text+tls, manifests+"\n---\n"+gatewayTLS
	}
	if err := e.applyText(ctx, gatewaySystem); err != nil {
		return err
	}
	if err := e.applyText(ctx, manifests); err != nil {
		return err
	}
	if err := e.install(ctx, text, "--set", "config.second-choice="+second); err != nil {
		return err
	}
	var url string
	if err := await(ctx, func() string {
		list, err := e.client.CoreV1().Services(system).List(ctx,
			meta.ListOptions{LabelSelector: "gateway.envoyproxy.io/owning-gateway-name=llm"})
		if err != nil || len(list.Items) == 0 {
			return fmt.Sprint("Envoy Gateway has made no Service: ", err)
		}
		url = fmt.Sprintf("http://%s:8080", list.Items[0].Spec.ClusterIP)
		return ""
	}); err != nil {
		return err
	}
	if err := e.settled(ctx, system); err != nil {
		return err
	}
	if err := e.decides(ctx, url); err != nil {
		return err
	}
	if err := e.underLoad(ctx, t, url, []step{
		{"upgrade with another setting of kvroute", func() error {
			return e.install(ctx, text, "--set", "config.second-choice="+second, "--set",
				"config.router-temperature=0.1")
		}},
		{"rollout of kvroute", func() error { return e.restart(ctx, "kvroute") }},
		{"more workers", func() error { return e.scale(ctx, "vllm", 5) }},
		{"fewer workers", func() error { return e.scale(ctx, "vllm", 3) }},
		{"a killed kvroute", func() error { return e.kill(ctx, "app.kubernetes.io/component=router") }},
	}); err != nil {
		return err
	}
	// The next variant has the same Gateway.
	rest := slices.DeleteFunc(strings.Split(manifests, "\n---\n"), func(doc string) bool { return strings.Contains(doc, "\nkind: Gateway") })
	return e.remove(ctx, strings.Join(rest, "\n---\n"))
}

// decides waits until kvroute decides a request.
func (e *env) decides(ctx context.Context, url string) error {
	client := &http.Client{}
	return await(ctx, func() string {
		if decided, err := chat(client, url, "a first request", 8, false); err != nil || !decided {
			return fmt.Sprintf("no request is decided: %v", err)
		}
		return ""
	})
}
