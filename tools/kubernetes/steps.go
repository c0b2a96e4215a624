// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

const release, namespace = "kvroute", "llm"

// workers is a Deployment of simulated engines behind a headless Service. Its pods get no new requests while they
// end, and responses in progress have 20 s.
const workers = `
apiVersion: v1
kind: Namespace
metadata: {name: llm}
---
apiVersion: v1
kind: Service
metadata: {name: vllm, namespace: llm}
spec:
  clusterIP: None
  selector: {app: vllm}
  ports: [{name: http, port: 8000}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm, namespace: llm}
spec:
  replicas: 3
  selector: {matchLabels: {app: vllm}}
  template:
    metadata: {labels: {app: vllm}}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 60
      containers:
      - name: vllm
        image: kvroute
        args: [engine, --name=$(POD_NAME), "--listen=0.0.0.0:8000", --kv-events=zmq, "--kv-events-endpoint=tcp://0.0.0.0:5557", "--kv-events-replay-endpoint=tcp://0.0.0.0:5657", --nats-url=]
        env: [{name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
        ports: [{name: http, containerPort: 8000}]
        readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 1}
        lifecycle: {preStop: {sleep: {seconds: 20}}}
`

// values has the workers by the name of their Service.
const values = `
image: {repository: kvroute}
config: {decision-headers: true}
workers:
- name: vllm
  address: vllm.llm.svc.cluster.local:8000
  models: [sim]
  model_card: kvroute-sim
  block_size: 16
  metrics: {}
  events: {transport: zmq, endpoint: "tcp://*:5557", replay: "tcp://*:5657"}
`

// install installs or upgrades the release, and waits until its Deployments are there.
func (e *env) install(ctx context.Context, text string, args ...string) error {
	file := filepath.Join(e.dir, "values.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	args = append([]string{
		"upgrade", release, filepath.Join(e.tree, "deploy/helm/kvroute"), "--install", "--namespace",
		namespace, "--values", file,
	}, args...)
	if _, err := e.helm(ctx, args...); err != nil {
		return err
	}
	return e.settled(ctx, namespace)
}

// underLoad runs the steps while clients send requests to an address, and removes the release afterwards.
func (e *env) underLoad(ctx context.Context, t *tally, url string, list []step) error {
	load := startLoad(ctx, t, url)
	if err := e.steps(ctx, t, list); err != nil {
		return err
	}
	if err := load.end(); err != nil {
		return err
	}
	return e.uninstall(ctx)
}

// uninstall removes the release, and fails if an object of it stays.
func (e *env) uninstall(ctx context.Context) error {
	if _, err := e.helm(ctx, "uninstall", release, "--namespace", namespace); err != nil {
		return err
	}
	selector := meta.ListOptions{LabelSelector: "app.kubernetes.io/instance=" + release}
	return await(ctx, func() string {
		for _, r := range []schema.GroupVersionResource{
			{Version: "v1", Resource: "pods"},
			{Version: "v1", Resource: "services"},
			{Version: "v1", Resource: "configmaps"},
			{Version: "v1", Resource: "secrets"},
			{Version: "v1", Resource: "serviceaccounts"},
			{Group: "apps", Version: "v1", Resource: "deployments"},
			{Group: "policy", Version: "v1", Resource: "poddisruptionbudgets"},
			{Group: "networking.k8s.io", Version: "v1", Resource: "networkpolicies"},
			{
				Group:   "rbac.authorization.k8s.io",
				Version: "v1", Resource: "roles",
			},
		} {
			list, err := e.objects.Resource(r).Namespace(namespace).List(ctx, selector)
			if err != nil {
				return err.Error()
			}
			if len(list.Items) > 0 {
				return fmt.Sprintf("%d %s are left, as %s", len(list.Items), r.Resource, list.Items[0].GetName())
			}
		}
		return ""
	})
}

// settled waits until each Deployment of a namespace has its pods, all of the newest template and ready, and no other
// pod ends.
func (e *env) settled(ctx context.Context, namespace string) error {
	var problems []string
	err := awaitFor(ctx, 3*time.Minute, func() string {
		if problems = append(problems, e.kubelet.takeProblems()...); len(problems) > 0 {
			return ""
		}
		list, err := e.client.AppsV1().Deployments(namespace).List(ctx, meta.ListOptions{})
		if err != nil {
			return err.Error()
		}
		for i := range list.Items {
			d := &list.Items[i]
			s := d.Status
			if s.ObservedGeneration < d.Generation || s.UpdatedReplicas != *d.Spec.Replicas ||
				s.ReadyReplicas != *d.Spec.Replicas || s.Replicas != *d.Spec.Replicas {
				return fmt.Sprintf("%s has %d pods, %d of the newest template and %d ready, want %d", d.Name, s.Replicas,
					s.UpdatedReplicas, s.ReadyReplicas, *d.Spec.Replicas)
			}
		}
		pods, err := e.client.CoreV1().Pods(namespace).List(ctx, meta.ListOptions{})
		if err != nil {
			return err.Error()
		}
		for i := range pods.Items {
			if pods.Items[i].DeletionTimestamp != nil {
				return pods.Items[i].Name + " ends"
			}
		}
		return ""
	})
	if len(problems) > 0 {
		return fmt.Errorf("pods: %s", strings.Join(problems, "; "))
	}
	return err
}

// scale sets the number of pods of a Deployment.
func (e *env) scale(ctx context.Context, name string, replicas int32) error {
	s, err := e.client.AppsV1().Deployments(namespace).GetScale(ctx, name, meta.GetOptions{})
	if err != nil {
		return err
	}
	s.Spec.Replicas = replicas
	if _, err := e.client.AppsV1().Deployments(namespace).UpdateScale(ctx, name, s, meta.UpdateOptions{}); err != nil {
		return err
	}
	return e.settled(ctx, namespace)
}

// restart replaces all pods of a Deployment, as kubectl rollout restart does.
func (e *env) restart(ctx context.Context, name string) error {
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`,
		time.Now().Format(time.RFC3339Nano))
	if _, err := e.client.AppsV1().Deployments(namespace).Patch(ctx, name, types.StrategicMergePatchType, []byte(patch),
		meta.PatchOptions{}); err != nil {
		return err
	}
	return e.settled(ctx, namespace)
}

// drainNode evicts all pods of the release, as kubectl drain does: the disruption budgets allow one at a time.
func (e *env) drainNode(ctx context.Context) error {
	pods, err := e.client.CoreV1().Pods(namespace).List(ctx,
		meta.ListOptions{LabelSelector: "app.kubernetes.io/instance=" + release})
	if err != nil {
		return err
	}
	waited := false
	for i := range pods.Items {
		eviction := &policy.Eviction{ObjectMeta: meta.ObjectMeta{Name: pods.Items[i].Name, Namespace: namespace}}
		err := await(ctx, func() string {
			err := e.client.PolicyV1().Evictions(namespace).Evict(ctx, eviction)
			waited = waited || errors.IsTooManyRequests(err)
			if err != nil && !errors.IsNotFound(err) {
				return err.Error()
			}
			return ""
		})
		if err != nil {
			return err
		}
	}
	if !waited {
		return fmt.Errorf("the disruption budgets let all %d pods be evicted at once", len(pods.Items))
	}
	return e.settled(ctx, namespace)
}

// kill removes one pod without a grace period: its processes get SIGKILL.
func (e *env) kill(ctx context.Context, selector string) error {
	pods, err := e.client.CoreV1().Pods(namespace).List(ctx, meta.ListOptions{LabelSelector: selector})
	if err != nil {
		return err
	}
	zero, killed := int64(0), pods.Items[0].Name
	if err := e.client.CoreV1().Pods(namespace).Delete(ctx, killed,
		meta.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		return err
	}
	if err := await(ctx, func() string {
		now, err := e.client.CoreV1().Pods(namespace).List(ctx, meta.ListOptions{LabelSelector: selector})
		if err != nil {
			return err.Error()
		}
		if len(now.Items) < len(pods.Items) {
			return killed + " is not replaced"
		}
		return ""
	}); err != nil {
		return err
	}
	return e.settled(ctx, namespace)
}

// address returns the URL of a Service with an address.
func (e *env) address(ctx context.Context, namespace, name string) (string, error) {
	var s *core.Service
	err := await(ctx, func() (text string) {
		var err error
		if s, err = e.client.CoreV1().Services(namespace).Get(ctx, name, meta.GetOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("http://%s:%d", s.Spec.ClusterIP, s.Spec.Ports[0].Port), nil
}

// bootstrap writes the output of kvroute config envoy to a file.
func (e *env) bootstrap(ctx context.Context, flags ...string) (string, error) {
	file := filepath.Join(e.dir, "envoy.yaml")
	out, err := exec.CommandContext(ctx, e.kvroute, append([]string{
		"config", "envoy", "--listen", "0.0.0.0:8080",
		"--status", "0.0.0.0:9904",
		"--extproc", "kvroute.llm.svc.cluster.local:9002", "--pool", "vllm.llm.svc.cluster.local:8000",
	},
		flags...)...).Output()
	if err != nil {
		return "", err
	}
	return file, os.WriteFile(file, out, 0o600)
}
