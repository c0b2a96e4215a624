// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/kubetest"
	"github.com/kvroute/kvroute/internal/process"
)

const podsPath = "/api/v1/namespaces/models/pods"

// enginePod is a pod at an engine's address.
func enginePod(name, uid, host, ready string) string {
	return fmt.Sprintf(`{"metadata":{"name":%q,"uid":%q,"labels":{"app":"llm"}},"status":{"phase":"Running","podIP":%q,"conditions":[{"type":"Ready","status":%q,"message":"containers with unready status: [engine]"}]}}`,
		name, uid, host, ready)
}

// kvroute follows pods: their readiness, their identity, and the loss of the API.
func TestWorkersOfKubernetes(t *testing.T) {
	t.Parallel() // mostly waits
	e := spawn(t, "engine", "engine", "--listen", "127.0.0.1:0", "--nats-url", "", "--kv-events", "none", "--speed", "50")
	host, port, err := net.SplitHostPort(e.At.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	s := kubetest.New(t)
	s.Put(podsPath, enginePod("starts", "9", "127.0.0.9", "False"))
	s.Put(podsPath, enginePod("a", "1", host, "True"))
	file := writeFile(t, fmt.Sprintf("version: 1\nworker-networks: 127.0.0.0/8\nkubernetes:\n  server: %s\n  ca-file: %s\n  token-file: %s\n  namespace: models\n"+
		"  sources:\n  - {selector: app=llm, ports: [%s], worker: {models: [sim], block_size: 16, health: {interval: 10s}}}\n"+
		"  - {selector: tier=spare, ports: [%s], worker: {models: [sim], block_size: 16}, labels: {block-size: block}}\n", s.URL, s.CAFile, s.TokenFile, port, port))
	d := &demonstration{demo.Stack{Router: serveFile(t, file)}}
	state := func() string {
		var all []string
		for _, w := range workers(t, d) {
			all = append(all, fmt.Sprint(w.Name, " ", w.Health, " ", w.HealthCause, " ", w.Pod.Namespace, "/", w.Pod.Name, "/", w.Pod.UID))
		}
		return strings.Join(all, ", ")
	}
	is := func(want string) {
		t.Helper()
		eventually(t, "the workers are others than "+want, func() bool { return strings.HasPrefix(state(), want) })
	}
	is("models/a healthy  models/a/1")
	route := func() int {
		resp, _ := whole(t, http.MethodPost, "http://"+d.Router.At.HTTP+"/v1/best_worker", `{"model":"sim","token_ids":[1,2,3,4]}`, nil)
		return resp.StatusCode
	}
	if got := route(); got != http.StatusOK {
		t.Errorf("a request to the pod has status %d", got)
	}
	s.Put(podsPath, enginePod("a", "1", host, "False"))
	is("models/a not_ready its pod is not ready: containers with unready status: [engine] models/a/1")
	if got := route(); got != http.StatusServiceUnavailable {
		t.Errorf("a request while no pod is ready has status %d, want 503", got)
	}
	began := time.Now()
	s.Put(podsPath, enginePod("a", "1", host, "True"))
	is("models/a healthy  models/a/1")
	t.Logf("the pod got requests again after %v", time.Since(began)) // the next regular probe is due after 10 s
	s.Put(podsPath, enginePod("a", "2", host, "True"))
	is("models/a healthy  models/a/2")

	// items waits until what needs attention has items of kind kubernetes with these words, and returns them.
	items := func(words ...string) (found []attention.Item) {
		t.Helper()
		eventually(t, "no item has the words "+strings.Join(words, ", "), func() bool {
			found = slices.DeleteFunc(needs(t, d.Router), func(i attention.Item) bool { return i.What != "kubernetes" })
			text, err := json.Marshal(found)
			if err != nil {
				t.Fatal(err)
			}
			return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(string(text), w) })
		})
		return found
	}
	s.Put(podsPath, strings.Replace(enginePod("a", "2", host, "True"), `"labels":{`, `"annotations":{"block":"large"},"labels":{"tier":"spare",`, 1))
	if all := items("pods models/tier=spare: pod models/a: pods models/app=llm selects it, too, and counts", `its label block is \"large\", want a number of tokens`); len(all) != 1 || len(all[0].Also) != 1 || all[0].Level != attention.Note {
		t.Errorf("two problems of one source: %+v", all)
	}
	s.Put(podsPath, enginePod("a", "2", host, "True"))
	s.Refuse(func(_, verb string) int { return map[string]int{"watch": 403}[verb] })
	var ready struct {
		Status string
		Checks map[string]bool
	}
	eventually(t, "the check kubernetes does not fail", func() bool {
		err := process.GetJSON(t.Context(), "http://"+d.Router.At.HTTP+"/readyz", &ready)
		return err == nil && ready.Status == "degraded" && !ready.Checks["kubernetes"]
	})
	status, out, _ := runs(t, "doctor", "--url", "http://"+d.Router.At.HTTP)
	const want = `rule {apiGroups: [""], resources: [pods], verbs: [list, watch]}`
	if status != 1 || !strings.Contains(out, want) {
		t.Errorf("doctor exits with %d and does not name the missing rule %s:\n%s", status, want, out)
	}
	is("models/a healthy  models/a/2")
	refused := items("pods models/app=llm cannot be read since", "pods models/tier=spare cannot be read since")
	for _, i := range refused {
		if len(refused) != 2 || i.Level != attention.Fault || !strings.HasSuffix(i.Text, want) || !strings.Contains(out, i.Text) || i.Advice == "" || i.Since.IsZero() || !strings.HasSuffix(i.Docs, "/docs/troubleshooting.md#workers-in-kubernetes") {
			t.Errorf("doctor says\n%s\nand the item is %+v", out, i)
		}
	}
	if _, out, _ := runs(t, "top", "--once", "--url", "http://"+d.Router.At.HTTP); !strings.Contains(out, refused[0].Text) || strings.Contains(out, `the check "kubernetes" fails`) {
		t.Errorf("top says\n%s", out)
	}
	s.Refuse(func(string, string) int { return 503 })
	items("status 503")
	s.Refuse(nil)
	eventually(t, "the items stay", func() bool { return len(items()) == 0 })
	s.Delete(podsPath, "a")
	is("")
}

func TestKubernetesSettings(t *testing.T) {
	for text, want := range map[string]string{
		"{server: a}":    `kubernetes.server is "a", want a URL as https://10.96.0.1:443`,
		"{namespace: a}": "kubernetes.sources: want at least one source of workers",
		"{sources: [{ports: [8000], worker: {models: [m]}}]}":                               "kubernetes.sources[0].selector: want exactly one of",
		"{sources: [{selector: a=b, ports: [0], worker: {models: [m]}}]}":                   "kubernetes.sources[0].ports[0] is 0, want 1 to 65535",
		"{sources: [{selector: a=b, ports: [80], worker: {modles: [m]}}]}":                  `worker has a field "modles", which no element has`,
		"{sources: [{selector: a=b, ports: [80], worker: {models: [m], dp_size: -1}}]}":     "dp_size is a number -1, want",
		"{sources: [{selector: a=b, port: 80, worker: {models: [m]}}]}":                     `there is no setting "port"`,
		"{sources: [{service: a, worker: {models: [m]}}]}":                                  "kubernetes.server is missing: the address of the API server is known only in a pod",
		"{server: \"https://127.0.0.1:1\", sources: [{service: a, worker: {models: [m]}}]}": "kubernetes.sources[0].namespace: want a namespace",
	} {
		status, _, err := runs(t, "serve", "--config", writeFile(t, "version: 1\nkubernetes: "+text+"\n"), "--http-address", "127.0.0.1:0", "--extproc-address", "127.0.0.1:0")
		if status == 0 || !strings.Contains(err, want) {
			t.Errorf("%s: status %d, %s, want %s", text, status, err, want)
		}
	}
}
