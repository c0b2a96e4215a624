// SPDX-License-Identifier: Apache-2.0

package helm

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	sigsyaml "sigs.k8s.io/yaml"
)

// YAML reads these texts as numbers, booleans or null unless they are quoted.
var texts = []string{"123", "1e3", "on", "n", "true", "null", "~", "0x1f", "1_0"}

// eachText calls f with a function that replaces one text of the values, for each of them.
func eachText(path string, v any, f func(path string, set func(string))) {
	switch v := v.(type) {
	case map[string]any:
		for k, one := range v {
			if _, isText := one.(string); isText {
				f(path+"."+k, func(s string) { v[k] = s })
			}
			eachText(path+"."+k, one, f)
		}
	case []any:
		for i, one := range v {
			if _, isText := one.(string); isText {
				f(fmt.Sprint(path, ".", i), func(s string) { v[i] = s })
			}
			eachText(fmt.Sprint(path, ".", i), one, f)
		}
	}
}

// Each text of the values stays a text in the objects, whatever it looks like: render decodes the objects strictly.
func TestTextsStayTexts(t *testing.T) {
	all := everything + "topologySpreadKey: zone\nmodels: [{name: m, tokenizer: /m}]\n"
	number, refused := 0, 0
	eachText("", map[string]any(values(t, all)), func(string, func(string)) { number++ })
	for i := range number {
		// A fresh tree for each replacement, in the order of the map at hand.
		tree := map[string]any(values(t, all))
		var paths []string
		sets := map[string]func(string){}
		eachText("", tree, func(path string, set func(string)) { paths, sets[path] = append(paths, path), set })
		slices.Sort(paths)
		path, text := paths[i], texts[i%len(texts)]
		if strings.HasPrefix(path, ".config.") || strings.HasPrefix(path, ".workers.") || path == ".envoy.bootstrap" {
			continue // these are written by toYaml, or are a file
		}
		sets[path](text)
		data, err := sigsyaml.Marshal(tree)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := render(t, string(data)); err != nil {
			refused++
			if !strings.Contains(err.Error(), "values don't meet the specifications of the schema") {
				t.Errorf("%s=%s: %v", path, text, err)
			}
		}
	}
	if number < 50 || refused > number/4 {
		t.Errorf("%d texts, of which the schema refuses %d", number, refused)
	}
}

// All names are valid, whatever the release is called, and are those of the Services that the notes and Envoy name.
func TestNamesOfReleases(t *testing.T) {
	for release, want := range map[string]string{
		"llm": "llm-kvroute", "123": "kvroute-123-kvroute", "a.b": "a-b-kvroute", "1.kvroute": "kvroute-1-kvroute",
		strings.Repeat("a", 53): strings.Repeat("a", 42) + "-kvroute", "kvroute" + strings.Repeat("a",
			46): "kvroute" + strings.Repeat("a", 43),
	} {
		objects, notes, err := renderAs(t, release, everything)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			m := o.(meta.Object)
			if wrong := validation.IsDNS1123Subdomain(m.GetName()); len(wrong) > 0 && m.GetName() != "router" {
				t.Errorf("%s: %T %q: %v", release, o, m.GetName(), wrong)
			}
			if s, ok := o.(*core.Service); ok {
				if wrong := validation.IsDNS1035Label(s.Name); len(wrong) > 0 || !strings.HasPrefix(s.Name, want) {
					t.Errorf("%s: the Service %q: %v, want %s", release, s.Name, wrong, want)
				}
			}
			for k, v := range m.GetLabels() {
				if wrong := validation.IsValidLabelValue(v); len(wrong) > 0 {
					t.Errorf("%s: %s: the label %s=%q: %v", release, m.GetName(), k, v, wrong)
				}
			}
		}
		if !strings.Contains(notes, want+".llm.svc") {
			t.Errorf("%s: the notes do not name %s", release, want)
		}
	}
}

// Values that the API server would refuse, or that would be ignored, are refused with their names.
func TestValuesOfTheClusterThatCannotWork(t *testing.T) {
	for text, want := range map[string]string{
		"podAnnotations: {prometheus.io/port: 9003}":                              "podAnnotations",
		"podLabels: {app.kubernetes.io/component: x}":                             "app.kubernetes.io/component",
		"envoy: {podLabels: {helm.sh/chart: x}}":                                  "helm.sh/chart",
		"serviceMonitor: {labels: {app.kubernetes.io/name: x}}":                   "app.kubernetes.io/name",
		"extraVolumes: [{name: kvroute-tls}]":                                     "extraVolumes",
		"envoy: {extraVolumes: [{name: kvroute-tmp}]}":                            "extraVolumes",
		"inferencePool: {enabled: true}":                                          "inferencePool.selector",
		"inferencePool: {selector: {app: 1}}":                                     "selector",
		"tokenizers: {models: [{name: a b}]}":                                     "tokenizers",
		"tokenizers: {models: [{name: m, repository: ../x}]}":                     "repository",
		"tracing: {share: '2'}":                                                   "share",
		"envoy: {enabled: true, bootstrap: 'port_value: 8080, port_value: 9901'}": "--status 0.0.0.0:9904",
		"envoy: {enabled: true, bootstrap: 'port_value: 80801'}":                  "kvroute config envoy --",
		"envoy: {service: {type: ExternalName}}":                                  "type",
		"autoscaling: {minReplicas: 2}":                                           "minReplicas",
		"podDisruptionBudget: {maxUnavailable: some}":                             "maxUnavailable",
		"envoy: {enabled: true, bootstrap: 'port_value: 8080 port_value: 9901 port_value: 9904', httpRoute: {enabled: true}}": "parentRefs",
	} {
		if _, _, err := render(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that names %s", text, err, want)
		}
	}
	objects, _, err := render(t,
		"inferencePool: {enabled: true, selector: {llm-d.ai/model: qwen}}\nextraVolumes: [{name: tls, emptyDir: {}}]\ntls: {existingSecret: tls}")
	if err != nil {
		t.Fatal(err)
	}
	if got := of[*inferencePool](t, objects, "llm").Spec.Selector.MatchLabels; len(got) != 1 ||
		got["llm-d.ai/model"] != "qwen" {
		t.Errorf("the pool selects %v", got)
	}
}

// With an autoscaler the Deployments have no replicas, since each upgrade would reset their number.
func TestAutoscalersOwnTheReplicas(t *testing.T) {
	for _, on := range []bool{false, true} {
		objects, _, err := render(t, fmt.Sprintf(`
autoscaling: {enabled: %[1]v, maxReplicas: 1}
envoy: {enabled: true, bootstrap: "port_value: 8080, port_value: 9901, port_value: 9904", autoscaling: {enabled: %[1]v}}`, on))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"kvroute", "kvroute-envoy"} {
			if replicas := of[*apps.Deployment](t, objects, name).Spec.Replicas; (replicas == nil) != on {
				t.Errorf("autoscaling %v: %s has replicas %v", on, name, replicas)
			}
			if on {
				h := of[*autoscaling.HorizontalPodAutoscaler](t, objects, name).Spec
				if h.ScaleTargetRef.Name != name || *h.MinReplicas != 2 || h.MaxReplicas < 2 {
					t.Errorf("%s is scaled by %+v", name, h)
				}
			}
			p := of[*policy.PodDisruptionBudget](t, objects, name).Spec
			selector := labels.SelectorFromSet(p.Selector.MatchLabels)
			if !selector.Matches(labels.Set(of[*apps.Deployment](t, objects, name).Spec.Template.Labels)) ||
				p.UnhealthyPodEvictionPolicy == nil || *p.UnhealthyPodEvictionPolicy != policy.AlwaysAllow {
				t.Errorf("the budget of %s is %+v", name, p)
			}
		}
	}
}

// The monitors select the ports with metrics, and never the clients' port. Alerts and dashboard have the job's name.
func TestObservability(t *testing.T) {
	objects, _, err := renderAs(t, "prod", everything)
	if err != nil {
		t.Fatal(err)
	}
	for monitor, want := range map[string]string{
		"prod-kvroute":       "prod-kvroute",
		"prod-kvroute-envoy": "prod-kvroute-envoy-status",
	} {
		spec := of[*monitoring.ServiceMonitor](t, objects, monitor).Spec
		var scraped []string
		for _, o := range objects {
			if s, ok := o.(*core.Service); ok &&
				labels.SelectorFromSet(spec.Selector.MatchLabels).Matches(labels.Set(s.Labels)) {
				scraped = append(scraped, s.Name)
				if !slices.ContainsFunc(s.Spec.Ports, func(p core.ServicePort) bool { return p.Name == spec.Endpoints[0].Port }) {
					t.Errorf("%s: no port %s", s.Name, spec.Endpoints[0].Port)
				}
			}
		}
		if len(scraped) != 1 || scraped[0] != want {
			t.Errorf("%s scrapes %v, want %s", monitor, scraped, want)
		}
	}
	rules := of[*monitoring.PrometheusRule](t, objects, "prod-kvroute").Spec.Groups[0].Rules
	if got := rules[0].Expr.String(); len(rules) < 15 || got != `up{job="prod-kvroute"} == 0` {
		t.Errorf("%d rules; the first one is %s", len(rules), got)
	}
	dashboard := of[*core.ConfigMap](t, objects, "prod-kvroute-dashboard")
	text := dashboard.Data["prod-kvroute.json"]
	original, err := os.ReadFile("../../examples/observability/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	if dashboard.Labels["grafana_dashboard"] != "1" || strings.TrimSpace(strings.ReplaceAll(text, "prod-kvroute",
		"kvroute")) != strings.TrimSpace(string(original)) {
		t.Error("the dashboard is not that of examples/observability")
	}
	c := values(t, of[*core.ConfigMap](t, objects, "prod-kvroute").Data["kvroute.yaml"])
	if c["envoy-admin"] != "http://prod-kvroute-envoy-status.llm.svc:9904" {
		t.Errorf("envoy-admin is %v", c["envoy-admin"])
	}
}

// A change of a setting that needs a restart changes the pods; other changes do not.
func TestChecksumOfSettings(t *testing.T) {
	sum := func(text string) string {
		objects, _, err := render(t, text)
		if err != nil {
			t.Fatal(err)
		}
		return of[*apps.Deployment](t, objects, "kvroute").Spec.Template.Annotations["checksum/settings"]
	}
	for text, same := range map[string]bool{
		workers: true, "config: {log-level: debug, busy-threshold: 0.9}": true,
		"config: {router-mode: random}": false, `nats: {url: "nats://n:4222"}`: false,
	} {
		if (sum(text) == sum("{}")) != same {
			t.Errorf("%s: the checksum stays the same: %v, want %v", text, !same, same)
		}
	}
}

// Clusters such as OpenShift choose the user.
func TestUserOfTheCluster(t *testing.T) {
	objects, _, err := render(t,
		"runAsUser: 0\nenvoy: {enabled: true, runAsUser: 0, bootstrap: 'port_value: 8080 port_value: 9901 port_value: 9904'}")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kvroute", "kvroute-envoy"} {
		c := of[*apps.Deployment](t, objects, name).Spec.Template.Spec.SecurityContext
		if c.RunAsUser != nil || c.RunAsGroup != nil || c.FSGroup != nil || c.RunAsNonRoot == nil || !*c.RunAsNonRoot {
			t.Errorf("%s runs as %+v", name, c)
		}
	}
}

// The init container downloads the files that exist, sends the token, and names what is wrong.
func TestTokenizersAreDownloaded(t *testing.T) {
	const token = "hf_0123456789"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch name := r.URL.Path; {
		case strings.HasPrefix(name, "/gated/") && r.Header.Get("Authorization") != "Bearer "+token:
			w.WriteHeader(http.StatusUnauthorized)
		case name == "/Qwen/Qwen3-8B/resolve/main/tokenizer.json", name == "/gated/m/resolve/v1/config.json":
			fmt.Fprint(w, name)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer server.Close()
	for _, c := range []struct{ models, token, want, file string }{
		{
			"[{name: Qwen/Qwen3-8B}, {name: g, repository: gated/m, revision: v1}]", token, "gated/m: config.json",
			"gated/m/config.json",
		},
		{"[{name: g, repository: gated/m, revision: v1}]", "", "tokenizers.tokenSecret", ""},
		{"[{name: Qwen/other}]", "", "Qwen/other: the revision main has none of the files", ""},
	} {
		objects, _, err := render(t, fmt.Sprintf("tokenizers: {endpoint: %q, models: %s, tokenSecret: %q}", server.URL,
			c.models, c.token))
		if err != nil {
			t.Fatal(err)
		}
		pod := of[*apps.Deployment](t, objects, "kvroute").Spec.Template.Spec
		init, folder := pod.InitContainers[0], t.TempDir()
		cmd := exec.CommandContext(t.Context(), init.Command[0], init.Command[1:]...)
		for _, e := range init.Env {
			if e.ValueFrom != nil {
				e.Value = e.ValueFrom.SecretKeyRef.Name // the token itself in this test
			}
			if e.Name == "FOLDER" {
				e.Value = folder
			}
			cmd.Env = append(cmd.Env, e.Name+"="+e.Value)
		}
		cmd.Env = append(cmd.Env, "PATH="+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if !strings.Contains(string(out), c.want) || (err == nil) != (c.file != "") {
			t.Errorf("%s: %v: %s, want %s", c.models, err, out, c.want)
		}
		if bytes.Contains(out, []byte(token)) {
			t.Errorf("the output has the token: %s", out)
		}
		if c.file == "" {
			continue
		}
		for _, file := range []string{c.file, "Qwen/Qwen3-8B/tokenizer.json"} {
			if _, err := os.Stat(filepath.Join(folder, file)); err != nil {
				t.Error(err)
			}
		}
		text := of[*core.ConfigMap](t, objects, "kvroute").Data["kvroute.yaml"]
		if !strings.Contains(text, "name: Qwen/Qwen3-8B\n  tokenizer: /tokenizers/Qwen/Qwen3-8B") || !strings.Contains(text,
			"name: g\n  tokenizer: /tokenizers/gated/m") {
			t.Errorf("the models are\n%s", text)
		}
	}
}

// kvroute may only list and watch what its sources need, in their namespaces, and has a token only then.
func TestRoles(t *testing.T) {
	const pods, slices, pools = "{[list watch] [] [pods] [] []}",
		"{[list watch] [discovery.k8s.io] [endpointslices] [] []}",
		"{[list watch] [inference.networking.k8s.io] [inferencepools] [%s] []}"
	for text, want := range map[string]map[string]string{
		"{}": {},
		"kubernetes: {sources: [{selector: app=vllm, ports: [8000]}]}":                                                     {"llm": "[" + pods + "]"},
		"kubernetes: {sources: [{service: vllm}]}":                                                                         {"llm": "[" + slices + "]"},
		"kubernetes: {namespace: gpu, sources: [{inference-pool: a}, {inference-pool: b}, {service: vllm, namespace: x}]}": {"gpu": "[" + pods + " " + fmt.Sprintf(pools, "a b") + "]", "x": "[" + slices + "]"},
		"serviceAccount: {rules: [{apiGroups: [nvidia.com], resources: [dynamoworkermetadatas], verbs: [list]}]}":          {"llm": "[{[list] [nvidia.com] [dynamoworkermetadatas] [] []}]"},
	} {
		objects, _, err := render(t, text)
		if err != nil {
			t.Fatal(err)
		}
		got, bound := map[string]string{}, 0
		for _, o := range objects {
			switch o := o.(type) {
			case *rbac.Role:
				got[o.Namespace] = fmt.Sprint(o.Rules)
			case *rbac.RoleBinding:
				if s := o.Subjects[0]; s.Name != "kvroute" || s.Namespace != "llm" || o.RoleRef.Name != "kvroute" {
					t.Errorf("%s: the binding is %+v", text, o)
				}
				bound++
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) || bound != len(want) {
			t.Errorf("%s: roles %v and %d bindings, want %v", text, got, bound, want)
		}
		pod := of[*apps.Deployment](t, objects, "kvroute").Spec.Template.Spec
		if *pod.AutomountServiceAccountToken != (len(want) > 0) {
			t.Errorf("%s: a token is mounted: %v", text, *pod.AutomountServiceAccountToken)
		}
	}
	for text, want := range map[string]string{
		"kubernetes: {sources: [{selector: app=vllm}]}":            "ports",
		"kubernetes: {sources: [{service: a, inference-pool: b}]}": "oneOf", "config: {kubernetes: {}}": "config",
	} {
		if _, _, err := render(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
