// SPDX-License-Identifier: Apache-2.0

// Package helm tests deploy/helm/kvroute: Helm's linter accepts it, each rendered object has only fields
// of Kubernetes' types, and `kvroute config` accepts the rendered configuration.
package helm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gateway "github.com/envoyproxy/gateway/api/v1alpha1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	gatewayapi "sigs.k8s.io/gateway-api/apis/v1"
	sigsyaml "sigs.k8s.io/yaml"
)

const folder = "../../deploy/helm/kvroute"

// inferencePool has the fields of an InferencePool of inference.networking.k8s.io/v1 that a user may set.
type inferencePool struct {
	meta.TypeMeta   `json:",inline"`
	meta.ObjectMeta `json:"metadata"`
	Spec            struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts       []struct{ Number int32 } `json:"targetPorts"`
		EndpointPickerRef struct {
			Group, Kind, Name string
			Port              struct{ Number int32 } `json:"port"`
			FailureMode       string                 `json:"failureMode"`
		} `json:"endpointPickerRef"`
	} `json:"spec"`
}

// kinds returns a new object of a kind.
func kinds(kind string) any {
	return map[string]any{
		"HTTPRoute": new(gatewayapi.HTTPRoute), "HorizontalPodAutoscaler": new(autoscaling.HorizontalPodAutoscaler), "Ingress": new(networking.Ingress), "Role": new(rbac.Role), "RoleBinding": new(rbac.RoleBinding), "PrometheusRule": new(monitoring.PrometheusRule),
		"ConfigMap": new(core.ConfigMap), "Deployment": new(apps.Deployment), "EnvoyExtensionPolicy": new(gateway.EnvoyExtensionPolicy),
		"InferencePool": new(inferencePool), "NetworkPolicy": new(networking.NetworkPolicy), "PodDisruptionBudget": new(policy.PodDisruptionBudget),
		"Secret": new(core.Secret), "Service": new(core.Service), "ServiceAccount": new(core.ServiceAccount), "ServiceMonitor": new(monitoring.ServiceMonitor),
	}[kind]
}

const workers = `
workers:
- {name: vllm, address: "vllm.default.svc.cluster.local:8000", models: [m], engine: vllm, block_size: 16, health: {}, metrics: {}, events: {transport: zmq, endpoint: "tcp://*:5557", replay: "tcp://*:5657"}}
`

// everything turns all parts on.
const everything = workers + `
nats: {existingSecret: nats}
apiToken: {value: "0123456789abcdef"}
tls: {existingSecret: tls}
envoy:
  enabled: true
  bootstrap: "port_value: 8080, port_value: 9901, port_value: 9904"
  extraVolumes: [{name: tls, secret: {secretName: envoy}}]
  extraVolumeMounts: [{name: tls, mountPath: /tls}]
  extraEnv: [{name: A, value: b}]
  autoscaling: {enabled: true}
  service: {type: LoadBalancer, annotations: {a: b}}
  httpRoute: {enabled: true, parentRefs: [{name: gateway, namespace: gateways}], hostnames: [llm.example.com]}
  ingress: {enabled: true, className: nginx, hosts: [llm.example.com], tls: [{secretName: llm}], annotations: {a: b}}
  podAnnotations: {a: b}
  podLabels: {c: d}
  nodeSelector: {pool: cpu}
  tolerations: [{key: gpu, operator: Exists}]
  affinity: {podAntiAffinity: {}}
envoyGateway: {enabled: true, route: llm}
inferencePool: {enabled: true, selector: {app: vllm}}
autoscaling: {enabled: true}
tokenizers: {models: [{name: m, repository: a/b, revision: v1}, {name: Qwen/Qwen3-8B}], tokenSecret: hf}
tracing: {endpoint: "http://collector:4317", share: "0.1"}
extraEnv: [{name: A, value: b}]
extraEnvFrom: [{secretRef: {name: env}}]
prometheusRule: {enabled: true, labels: {release: prometheus}}
dashboard: {enabled: true}
serviceMonitor: {enabled: true, labels: {release: prometheus}}
networkPolicy: {envoyPeers: [{namespaceSelector: {}}], apiPeers: [{podSelector: {matchLabels: {app: prometheus}}}], egress: {enabled: true, rules: [{to: [{namespaceSelector: {}}]}]}}
imagePullSecrets: [{name: registry}]
extraArgs: [--log-level=debug]
extraVolumes: [{name: models, persistentVolumeClaim: {claimName: models}}]
extraVolumeMounts: [{name: models, mountPath: /models, readOnly: true}]
podAnnotations: {a: b}
podLabels: {c: d}
nodeSelector: {pool: cpu}
tolerations: [{key: gpu, operator: Exists}]
affinity: {podAntiAffinity: {}}
serviceAccount: {name: router, annotations: {e: f}}
config: {decision-headers: true, router-mode: kv, max-held-bytes: 1073741824}
`

func values(t *testing.T, text string) chartutil.Values {
	t.Helper()
	v, err := chartutil.ReadValues([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// readme returns the values of the chart's README.
func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(text), "```yaml\n")
	block, _, found := strings.Cut(block, "```")
	if !found {
		t.Fatal("README.md has no values")
	}
	return block
}

func load(t *testing.T) *chart.Chart {
	t.Helper()
	log.SetOutput(io.Discard) // the loader logs each symbolic link
	c, err := loader.Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// render returns the chart's objects, and the notes.
func render(t *testing.T, text string) (objects []any, notes string, err error) {
	t.Helper()
	return renderAs(t, "kvroute", text)
}

func renderAs(t *testing.T, release, text string) (objects []any, notes string, err error) {
	t.Helper()
	c := load(t)
	v, err := chartutil.ToRenderValues(c, values(t, text), chartutil.ReleaseOptions{Name: release, Namespace: "llm", Revision: 1, IsInstall: true}, nil)
	if err != nil {
		return nil, "", err
	}
	files, err := engine.Render(c, v)
	if err != nil {
		return nil, "", err
	}
	for name, file := range files {
		if strings.HasSuffix(name, "NOTES.txt") {
			notes = file
			continue
		}
		for doc := range strings.SplitSeq("\n"+file, "\n---\n") {
			data, err := sigsyaml.YAMLToJSONStrict([]byte(doc))
			if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, doc)
			}
			if string(data) == "null" {
				continue
			}
			var kind meta.TypeMeta
			if err := json.Unmarshal(data, &kind); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			object := kinds(kind.Kind)
			if object == nil {
				t.Fatalf("%s: the kind %q has no type here", name, kind.Kind)
			}
			strict := json.NewDecoder(bytes.NewReader(data))
			strict.DisallowUnknownFields()
			if err := strict.Decode(object); err != nil {
				t.Errorf("%s: %s: %v\n%s", name, kind.Kind, err, doc)
			}
			objects = append(objects, object)
		}
	}
	return objects, notes, nil
}

func of[T any](t *testing.T, objects []any, name string) T {
	t.Helper()
	var all []string
	for _, o := range objects {
		m, _ := o.(meta.Object)
		all = append(all, fmt.Sprintf("%T %s", o, m.GetName()))
		if found, ok := o.(T); ok && m.GetName() == name {
			return found
		}
	}
	t.Fatalf("no %T %s among %v", *new(T), name, all)
	panic("unreachable")
}

func TestLint(t *testing.T) {
	for name, text := range map[string]string{"defaults": "{}", "everything": everything} {
		for _, m := range lint.AllWithKubeVersionAndSchemaValidation(folder, values(t, text), "llm", nil, false).Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %s: %v", name, m.Path, m.Err)
			}
		}
	}
}

// A password in nats.url would be readable in a ConfigMap.
func TestAPasswordInTheURLIsRefused(t *testing.T) {
	for _, url := range []string{"nats://kvroute:secret@nats:4222", "nats://token@nats:4222", "nats://a:4222,nats://u:p@b:4222", "user:pass@host:4222", "token@host", "a:4222, u:p/w@b:4222"} {
		if _, _, err := render(t, fmt.Sprintf("nats: {url: %q}", url)); err == nil || !strings.Contains(err.Error(), "nats.existingSecret") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

// Each variant renders, has the promised objects, and a configuration that kvroute accepts.
func TestVariants(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "kvroute")
	build := exec.Command("go", "build", "-o", binary, "./cmd/kvroute")
	build.Dir, build.Stderr = "../..", os.Stderr
	if err := build.Run(); err != nil {
		t.Fatal(err)
	}
	type variant struct {
		values string
		kinds  map[string]int
	}
	variants := map[string]variant{
		"defaults": {"{}", map[string]int{"ConfigMap": 1, "Deployment": 1, "NetworkPolicy": 1, "PodDisruptionBudget": 1, "Service": 1, "ServiceAccount": 1}},
		"workers":  {workers + `nats: {url: "nats://nats:4222"}`, map[string]int{"ConfigMap": 1, "Deployment": 1, "NetworkPolicy": 1, "PodDisruptionBudget": 1, "Service": 1, "ServiceAccount": 1}},
		"README":   {readme(t), map[string]int{"ConfigMap": 1, "Deployment": 1, "NetworkPolicy": 1, "PodDisruptionBudget": 1, "Service": 1, "ServiceAccount": 1}},
		"bare":     {"networkPolicy: {enabled: false}\npodDisruptionBudget: {enabled: false}\nreplicas: 1", map[string]int{"ConfigMap": 1, "Deployment": 1, "Service": 1, "ServiceAccount": 1}},
		"everything": {everything, map[string]int{
			"ConfigMap": 3, "Deployment": 2, "NetworkPolicy": 1, "PodDisruptionBudget": 2, "Service": 3, "ServiceAccount": 1, "Secret": 1, "ServiceMonitor": 2, "EnvoyExtensionPolicy": 1, "InferencePool": 1,
			"HTTPRoute": 1, "HorizontalPodAutoscaler": 2, "Ingress": 1, "PrometheusRule": 1,
		}},
	}
	for _, file := range strings.Fields("dynamo-agg-router-kubernetes dynamo-deepseek-v32 llm-d-optimized-baseline llm-d-precise-prefix-cache-routing llm-d-pd-disaggregation") {
		text, err := os.ReadFile("../../examples/migrate/" + file + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		const bootstrap = `envoy: {bootstrap: "port_value: 8080, port_value: 9901, port_value: 9904", enabled: true}`
		variants[file] = variant{strings.Replace(string(text), "envoy: {enabled: true}", bootstrap, 1), map[string]int{
			"ConfigMap": 2, "Deployment": 2, "NetworkPolicy": 1, "PodDisruptionBudget": 2, "Role": 1, "RoleBinding": 1, "Service": 3, "ServiceAccount": 1,
		}}
	}
	for name, c := range variants {
		t.Run(name, func(t *testing.T) {
			objects, notes, err := render(t, c.values)
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]int{}
			for _, o := range objects {
				kind := fmt.Sprintf("%T", o)
				got[strings.ToUpper(kind[strings.LastIndex(kind, ".")+1:][:1])+kind[strings.LastIndex(kind, ".")+2:]]++
			}
			if fmt.Sprint(got) != fmt.Sprint(c.kinds) {
				t.Errorf("objects %v, want %v", got, c.kinds)
			}
			d := of[*apps.Deployment](t, objects, "kvroute")
			pod := d.Spec.Template
			for k, v := range d.Spec.Selector.MatchLabels {
				if pod.Labels[k] != v {
					t.Errorf("the pods have no label %s=%s", k, v)
				}
			}
			mounts, volumes := pod.Spec.Containers[0].VolumeMounts, pod.Spec.Volumes
			for _, c := range pod.Spec.InitContainers {
				mounts = append(mounts, c.VolumeMounts...)
			}
			if name == "everything" {
				envoy := of[*apps.Deployment](t, objects, "kvroute-envoy").Spec.Template.Spec
				mounts, volumes = append(mounts, envoy.Containers[0].VolumeMounts...), append(volumes, envoy.Volumes...)
				if !slices.ContainsFunc(mounts, func(m core.VolumeMount) bool { return m.MountPath == "/tls" }) {
					t.Error("Envoy has no file of its extra volume")
				}
			}
			for _, m := range mounts {
				if !slices.ContainsFunc(volumes, func(v core.Volume) bool { return v.Name == m.Name }) {
					t.Errorf("no volume %s", m.Name)
				}
			}
			s := of[*core.Service](t, objects, "kvroute")
			for _, p := range s.Spec.Ports {
				if !slices.ContainsFunc(pod.Spec.Containers[0].Ports, func(c core.ContainerPort) bool { return c.Name == p.TargetPort.StrVal }) {
					t.Errorf("no port %s", p.TargetPort.StrVal)
				}
			}
			if !strings.Contains(notes, "/readyz") || strings.Contains(notes, "WARNING") != (name == "defaults") {
				t.Errorf("notes: %s", notes)
			}
			accepted(t, binary, of[*core.ConfigMap](t, objects, "kvroute").Data["kvroute.yaml"])
		})
	}
}

// accepted has kvroute check a configuration. The files of secrets are not there, so their lines are replaced.
func accepted(t *testing.T, binary, text string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kvroute.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(binary, "config", "--config", file).CombinedOutput()
	if err != nil {
		t.Errorf("kvroute config: %v\n%s\n%s", err, out, text)
	}
}

// Values that cannot work are refused, with their names.
func TestWrongValues(t *testing.T) {
	for text, want := range map[string]string{
		"replicas: 0":                           "replicas",
		"replica: 2":                            "replica",
		"config: {http-address: '0.0.0.0:1'}":   "config",
		"apiToken: {value: short}":              "apiToken",
		"service: {extprocPort: 70000}":         "extprocPort",
		"image: {pullPolicy: Sometimes}":        "pullPolicy",
		"envoy: {enabled: true}":                "--set-file envoy.bootstrap",
		"terminationGracePeriodSeconds: -1":     "terminationGracePeriodSeconds",
		"envoyGateway: {enabled: yes, rout: a}": "rout",
	} {
		if _, _, err := render(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that names %s", text, err, want)
		}
	}
}

// The default network policy lets in the Envoys of the enabled integrations; a list of peers replaces it.
func TestNetworkPolicy(t *testing.T) {
	const own, gateway, all, other = `{"podSelector":{}}`, `{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"envoy-gateway-system"}}}`, `{"namespaceSelector":{}}`, `{"namespaceSelector":{"matchLabels":{"a":"b"}}}`
	for text, want := range map[string][2]string{
		"{}":                            {own, own},
		"envoyGateway: {enabled: true}": {own + "," + gateway, own},
		"inferencePool: {enabled: true, selector: {app: vllm}}":                                                    {own + "," + all, own},
		"envoyGateway: {enabled: true}\ninferencePool: {enabled: true, selector: {app: vllm}}":                     {own + "," + gateway + "," + all, own},
		"envoyGateway: {enabled: true}\nnetworkPolicy: {envoyPeers: [{namespaceSelector: {matchLabels: {a: b}}}]}": {other, own},
		"networkPolicy: {apiPeers: [{namespaceSelector: {matchLabels: {a: b}}}]}":                                  {own, other},
	} {
		objects, _, err := render(t, text)
		if err != nil {
			t.Fatal(err)
		}
		rules := of[*networking.NetworkPolicy](t, objects, "kvroute").Spec.Ingress
		if len(rules) != 2 || rules[0].Ports[0].Port.StrVal != "extproc" || rules[1].Ports[0].Port.StrVal != "http" {
			t.Fatalf("%s: rules %+v", text, rules)
		}
		for i, rule := range rules {
			if got, err := json.Marshal(rule.From); err != nil || string(got) != "["+want[i]+"]" {
				t.Errorf("%s: the port %s is open to %s, want %s", text, rule.Ports[0].Port, got, want[i])
			}
		}
	}
}

// With a certificate of the API, everything that the chart has read the API uses HTTPS.
func TestHTTPS(t *testing.T) {
	const on, https = "serviceMonitor: {enabled: true}\n", "config: {http-tls-cert: /tls/tls.crt, http-tls-key: /tls/tls.key}\n"
	for text, want := range map[string]struct{ scheme, tls, notes string }{
		on:         {"http", "null", "curl -s localhost:9003/readyz"},
		on + https: {"https", `{"ca":{},"cert":{},"insecureSkipVerify":true}`, "curl -sk https://localhost:9003/readyz"},
		https + "serviceMonitor: {enabled: true, tlsConfig: {serverName: kvroute}}": {"https", `{"ca":{},"cert":{},"serverName":"kvroute"}`, "curl -sk https://localhost:9003/readyz"},
	} {
		objects, notes, err := render(t, text)
		if err != nil {
			t.Fatal(err)
		}
		c := of[*apps.Deployment](t, objects, "kvroute").Spec.Template.Spec.Containers[0]
		for _, probe := range []*core.Probe{c.LivenessProbe, c.ReadinessProbe} {
			if string(probe.HTTPGet.Scheme) != strings.ToUpper(want.scheme) {
				t.Errorf("%s: the probe of %s has the scheme %q", text, probe.HTTPGet.Path, probe.HTTPGet.Scheme)
			}
		}
		var monitor map[string]any
		data, err := json.Marshal(of[*monitoring.ServiceMonitor](t, objects, "kvroute").Spec.Endpoints[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, &monitor); err != nil {
			t.Fatal(err)
		}
		if tls, err := json.Marshal(monitor["tlsConfig"]); err != nil || string(tls) != want.tls || monitor["scheme"] != want.scheme {
			t.Errorf("%s: the ServiceMonitor has the scheme %v and the tlsConfig %s", text, monitor["scheme"], tls)
		}
		if !strings.Contains(notes, want.notes) {
			t.Errorf("%s: the notes have no %q:\n%s", text, want.notes, notes)
		}
	}
}

// The notes send the API's token if there is one, from the Secret that has it.
func TestNotesSendTheToken(t *testing.T) {
	for text, secret := range map[string]string{"{}": "", "apiToken: {value: 0123456789abcdef}": "kvroute-api", "apiToken: {existingSecret: mine}": "mine"} {
		_, notes, err := render(t, text)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(notes, `/v1/workers -H "Authorization: Bearer $TOKEN"`); got != (secret != "") || got != strings.Contains(notes, "-n llm get secret "+secret+" -o ") {
			t.Errorf("%s: notes\n%s", text, notes)
		}
		if !strings.HasPrefix(notes, "kvroute ") || strings.Contains(notes, "\n\n\n") {
			t.Errorf("%s: the notes have empty lines:\n%q", text, notes)
		}
	}
}

// With TLS the Service does not announce h2c, which is HTTP/2 without TLS, and the README's policy for Envoy Gateway
// names the Service's port.
func TestServiceWithTLS(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(folder, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(text), "```yaml\napiVersion: gateway.networking.k8s.io/v1\n")
	block, _, _ = strings.Cut(block, "```")
	var tls gatewayapi.BackendTLSPolicy
	if err := sigsyaml.UnmarshalStrict([]byte(block), &tls); err != nil || len(tls.Spec.TargetRefs) != 1 {
		t.Fatalf("the README's BackendTLSPolicy: %v\n%s", err, block)
	}
	target := tls.Spec.TargetRefs[0]
	for text, want := range map[string]string{"envoyGateway: {enabled: true}": "kubernetes.io/h2c", "envoyGateway: {enabled: true}\ntls: {existingSecret: tls}": ""} {
		objects, _, err := render(t, text)
		if err != nil {
			t.Fatal(err)
		}
		port := of[*core.Service](t, objects, string(target.Name)).Spec.Ports[0]
		got := ""
		if port.AppProtocol != nil {
			got = *port.AppProtocol
		}
		if got != want || target.SectionName == nil || port.Name != string(*target.SectionName) {
			t.Errorf("%s: the port %s has the appProtocol %q, want %q; the policy names %+v", text, port.Name, got, want, target)
		}
	}
}
