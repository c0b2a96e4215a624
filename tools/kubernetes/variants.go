// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// variant is one way to install the chart.
type variant struct {
	name string
	what string // what it shows, for the output
	run  func(*env, context.Context, *tally) error
}

//nolint:gochecknoglobals // a table
var variants = []variant{
	{"default", "install, wait until ready, uninstall", func(e *env, ctx context.Context,
		_ *tally,
	) error {
		return e.cycle(ctx, values)
	}},
	{"api-tls", "the API with a certificate: probes over HTTPS", (*env).apiTLS},
	{"inference-pool", "an InferencePool with kvroute as its endpoint picker", func(e *env, ctx context.Context,
		_ *tally,
	) error {
		return e.cycle(ctx, values+"inferencePool: {enabled: true, selector: {app: vllm}}\n")
	}},
	{"discovery", "kvroute finds the pods by the API, with the chart's Role: scaling, a rollout of workers", (*env).discovery},
	{"encrypted", "Envoy and kvroute with certificates for each other: new certificates, rollouts, a killed pod", (*env).encrypted},
	{"own-envoy", "upgrade, rollouts, drain of the node, scaling, killed pods", (*env).ownEnvoy},
	{"envoy-gateway", "Envoy Gateway programs an Envoy: upgrade, rollout, scaling, killed pods", (*env).envoyGateway},
	{"gateway-override", "the same with endpoints that Envoy finds by names, and TLS to kvroute", (*env).endpointOverride},
}

// step is a fault, or a change of the cluster, under load.
type step struct {
	name string
	run  func() error
}

// steps runs the steps, and says during which of them requests failed.
func (e *env) steps(ctx context.Context, t *tally, all []step) error {
	for _, step := range all {
		before, begun := t.fault(), time.Now()
		if err := step.run(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		if n := t.failed(); n > before || e.verbose {
			fmt.Printf("  %s: %.0f s, %d failures\n", step.name, time.Since(begun).Seconds(), n-before)
		}
	}
	return nil
}

// cycle installs the chart, waits until its pods are ready, and removes it.
func (e *env) cycle(ctx context.Context, text string, args ...string) error {
	if err := e.applyText(ctx, workers); err != nil {
		return err
	}
	if err := e.install(ctx, text, args...); err != nil {
		return err
	}
	return e.uninstall(ctx)
}

// apiTLS runs kvroute with a certificate of its API.
func (e *env) apiTLS(ctx context.Context, _ *tally) error {
	if err := e.applyText(ctx, workers); err != nil {
		return err
	}
	var text [2][]byte
	for i, file := range []string{"apiserver.crt", "apiserver.key"} { // any certificate and key
		var err error
		if text[i], err = os.ReadFile(filepath.Join(e.dir, "certs", file)); err != nil {
			return err
		}
	}
	secret := &core.Secret{ObjectMeta: meta.ObjectMeta{Name: "api"}, Data: map[string][]byte{
		"tls.crt": text[0],
		"tls.key": text[1],
	}}
	if _, err := e.client.CoreV1().Secrets(namespace).Create(ctx, secret, meta.CreateOptions{}); err != nil {
		return err
	}
	return e.cycle(ctx, values+`
extraVolumes: [{name: api, secret: {secretName: api}}]
extraVolumeMounts: [{name: api, mountPath: /api, readOnly: true}]
`, "--set", "config.http-tls-cert=/api/tls.crt", "--set", "config.http-tls-key=/api/tls.key")
}

// optional turns on what needs definitions of custom resources.
const optional = `
envoy:
  enabled: true
  httpRoute: {enabled: true, parentRefs: [{name: some-gateway}]}
  ingress: {enabled: true, hosts: [llm.example.com]}
serviceMonitor: {enabled: true}
prometheusRule: {enabled: true}
dashboard: {enabled: true}
networkPolicy: {egress: {enabled: true}}
`

// ownEnvoy runs the chart's own Envoy.
func (e *env) ownEnvoy(ctx context.Context, t *tally) error {
	if err := e.applyText(ctx, workers); err != nil {
		return err
	}
	file, err := e.bootstrap(ctx)
	if err != nil {
		return err
	}
	own := values + optional
	if err := e.install(ctx, own, "--set-file", "envoy.bootstrap="+file); err != nil {
		return err
	}
	url, err := e.address(ctx, namespace, "kvroute-envoy")
	if err != nil {
		return err
	}
	return e.underLoad(ctx, t, url, []step{
		{"upgrade with another setting of kvroute", func() error {
			return e.install(ctx, own, "--set-file", "envoy.bootstrap="+file, "--set", "config.router-temperature=0.1")
		}},
		{"upgrade with another bootstrap", func() error {
			if file, err = e.bootstrap(ctx, "--max-connections", "30000"); err != nil {
				return err
			}
			return e.install(ctx, own, "--set-file", "envoy.bootstrap="+file)
		}},
		{"rollout of kvroute", func() error { return e.restart(ctx, "kvroute") }},
		{"rollout of Envoy", func() error { return e.restart(ctx, "kvroute-envoy") }},
		{"drain of the node", func() error { return e.drainNode(ctx) }},
		{"more replicas of kvroute", func() error { return e.scale(ctx, "kvroute", 4) }},
		{"fewer replicas of kvroute", func() error { return e.scale(ctx, "kvroute", 2) }},
		{"more workers", func() error { return e.scale(ctx, "vllm", 5) }},
		{"fewer workers", func() error { return e.scale(ctx, "vllm", 3) }},
		{"autoscalers for kvroute and the workers", func() error { return e.autoscale(ctx, own, file) }},
		{"a killed kvroute", func() error { return e.kill(ctx, "app.kubernetes.io/component=router") }},
	})
}

// autoscale turns the autoscaler on, and checks that an upgrade keeps the number of pods. It applies the examples for
// workers.
func (e *env) autoscale(ctx context.Context, own, bootstrap string) error {
	on := own + "autoscaling: {enabled: true}\n"
	if err := e.install(ctx, on, "--set-file", "envoy.bootstrap="+bootstrap); err != nil {
		return err
	}
	if err := e.scale(ctx, "kvroute", 3); err != nil {
		return err
	}
	if err := e.install(ctx, on, "--set-file", "envoy.bootstrap="+bootstrap, "--set",
		"config.router-temperature=0.2"); err != nil {
		return err
	}
	d, err := e.client.AppsV1().Deployments(namespace).Get(ctx, "kvroute", meta.GetOptions{})
	if err != nil {
		return err
	}
	if *d.Spec.Replicas != 3 {
		return fmt.Errorf("an upgrade set %d replicas, although an autoscaler had set 3", *d.Spec.Replicas)
	}
	for _, file := range []string{"hpa.yaml", "keda.yaml"} {
		text, err := os.ReadFile(filepath.Join(e.tree, "examples/autoscaling", file))
		if err != nil {
			return err
		}
		// Both files are for the same Deployment. The objects have no effect here, since there are no metrics.
		if err := e.applyText(ctx, strings.Replace(string(text), "metadata: {name: vllm}",
			"metadata: {name: vllm, namespace: llm}", 1)); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// discovery finds the workers by their labels. A pod that ends gets no new requests at once, so it needs no pause
// before it stops: requests in flight have the time of the workers' own preStop hook.
func (e *env) discovery(ctx context.Context, t *tally) error {
	if err := e.applyText(ctx, workers); err != nil {
		return err
	}
	file, err := e.bootstrap(ctx)
	if err != nil {
		return err
	}
	text, _, _ := strings.Cut(values, "workers:\n")
	text += `
kubernetes:
  sources:
  - selector: app=vllm
    ports: [8000]
    worker: {models: [sim], model_card: kvroute-sim, block_size: 16, metrics: {}, events: {transport: zmq, endpoint: "tcp://*:5557", replay: "tcp://*:5657"}}
envoy: {enabled: true}
`
	if err := e.install(ctx, text, "--set-file", "envoy.bootstrap="+file); err != nil {
		return err
	}
	url, err := e.address(ctx, namespace, "kvroute-envoy")
	if err != nil {
		return err
	}
	return e.underLoad(ctx, t, url, []step{
		{"more workers", func() error { return e.scale(ctx, "vllm", 5) }},
		{"fewer workers", func() error { return e.scale(ctx, "vllm", 2) }},
		{"rollout of workers", func() error { return e.restart(ctx, "vllm") }},
		{"rollout of kvroute", func() error { return e.restart(ctx, "kvroute") }},
	})
}
