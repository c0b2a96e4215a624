// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
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

// clusterManifests returns the manifests of examples/envoy-gateway for workers that come and go: the variant that
// reaches any address, with the Service of the workers as its pool. The chart has the policy that asks kvroute.
func (e *env) clusterManifests() (string, error) {
	change := strings.NewReplacer("namespace: default", "namespace: "+namespace, "default/llm/http",
		namespace+"/llm/http", "/default/kvroute/", "/"+namespace+"/kvroute/",
		"    - group: gateway.envoyproxy.io\n      kind: Backend\n      name: workers\n",
		"    - name: vllm\n      port: 8000\n")
	var all []string
	for _, file := range []string{"base.yaml", "original-destination.yaml"} {
		text, err := os.ReadFile(filepath.Join(e.tree, "examples/envoy-gateway", file))
		if err != nil {
			return "", err
		}
		for doc := range strings.SplitSeq(string(text), "\n---\n") {
			if !strings.Contains(doc, "kind: EnvoyExtensionPolicy") && !strings.Contains(doc, "kind: Backend\nmetadata:") {
				all = append(all, change.Replace(doc))
			}
		}
	}
	return strings.Join(all, "\n---\n"), nil
}

// gatewayValues are those of the variant original-destination.
const gatewayValues = values + "envoyGateway: {enabled: true, route: llm}\n"

// envoyGateway has Envoy Gateway program an Envoy with the chart's policy.
func (e *env) envoyGateway(ctx context.Context, t *tally) error {
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
	manifests, err := e.clusterManifests()
	if err != nil {
		return err
	}
	if err := e.applyText(ctx, gatewaySystem); err != nil {
		return err
	}
	if err := e.applyText(ctx, manifests); err != nil {
		return err
	}
	if err := e.install(ctx, gatewayValues, "--set", "config.second-choice=header"); err != nil {
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
	client := &http.Client{}
	if err := await(ctx, func() string {
		if decided, err := chat(client, url, "a first request", 8, false); err != nil || !decided {
			return fmt.Sprintf("no request is decided: %v", err)
		}
		return ""
	}); err != nil {
		return err
	}
	return e.underLoad(ctx, t, url, []step{
		{"upgrade with another setting of kvroute", func() error {
			return e.install(ctx, gatewayValues, "--set", "config.second-choice=header", "--set",
				"config.router-temperature=0.1")
		}},
		{"rollout of kvroute", func() error { return e.restart(ctx, "kvroute") }},
		{"more workers", func() error { return e.scale(ctx, "vllm", 5) }},
		{"fewer workers", func() error { return e.scale(ctx, "vllm", 3) }},
		{"a killed kvroute", func() error { return e.kill(ctx, "app.kubernetes.io/component=router") }},
	})
}
