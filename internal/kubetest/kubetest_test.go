// SPDX-License-Identifier: Apache-2.0

package kubetest_test

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/internal/kubetest"
)

// form returns what a client can rely on in an answer: the status, the type of its content, and its JSON without the
// fields of the objects themselves, and with an N for each number of a version and an X for each token.
func form(t *testing.T, e *kubetest.Exchange) string {
	t.Helper()
	lines := []string{strings.Join([]string{http.StatusText(e.Status), e.Type}, " ")}
	for line := range strings.Lines(e.Body) {
		var value map[string]any
		if !strings.HasPrefix(line, "{") {
			lines = append(lines, strings.TrimSpace(line))
			continue
		}
		if err := json.Unmarshal([]byte(line), &value); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		for _, item := range items(value) {
			shorten(item)
		}
		if object, ok := value["object"].(map[string]any); ok {
			shorten(object)
		}
		text, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		// Near the end of its time a watch has one bookmark or two.
		if lines = append(lines, string(text)); strings.Contains(line, "BOOKMARK") {
			lines = slices.Compact(lines)
		}
	}
	text := strings.Join(lines, "\n")
	text = regexp.MustCompile(`"resourceVersion":"\d+"`).ReplaceAllString(text, `"resourceVersion":"N"`)
	text = regexp.MustCompile(`"continue":"[^"]+"`).ReplaceAllString(text, `"continue":"X"`)
	return regexp.MustCompile(`too old resource version: \d+ \(\d+\)`).ReplaceAllString(text, "too old resource version: N (N)")
}

func items(list map[string]any) (all []map[string]any) {
	values, _ := list["items"].([]any)
	for _, v := range values {
		object, _ := v.(map[string]any)
		all = append(all, object)
	}
	return all
}

// shorten removes all fields of an object but its kind, name and version.
func shorten(object map[string]any) {
	if object["kind"] == "Status" {
		return
	}
	for name := range object {
		if !slices.Contains([]string{"kind", "apiVersion", "metadata"}, name) {
			delete(object, name)
		}
	}
	meta, _ := object["metadata"].(map[string]any)
	for name := range meta {
		if name != "name" && name != "resourceVersion" {
			delete(meta, name)
		}
	}
}

// player sends the recorded requests to a server of this package, and compares the answers with the recorded ones.
type player struct {
	t      *testing.T
	server *kubetest.Server
	client *http.Client
	last   map[string]any // metadata of the last list, or of the last object of a watch
}

// send sends a request. The versions and tokens in its query are those of the last answer.
func (p *player) send(e *kubetest.Exchange) *kubetest.Exchange {
	query := url.Values{}
	for name, values := range e.Query {
		query[name] = slices.Clone(values)
	}
	for name, field := range map[string]string{"continue": "continue", "resourceVersion": "resourceVersion"} {
		if value, _ := p.last[field].(string); query.Has(name) {
			query.Set(name, value)
		}
	}
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, p.server.URL+e.Path+"?"+query.Encode(), nil)
	if err != nil {
		p.t.Fatal(err)
	}
	token, err := os.ReadFile(p.server.TokenFile)
	if err != nil {
		p.t.Fatal(err)
	}
	if e.Status == http.StatusUnauthorized {
		token = []byte("expired")
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	resp, err := p.client.Do(req)
	if err != nil {
		p.t.Error(err)
		return &kubetest.Exchange{}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Error(err)
	}
	lines := bytes.Split(bytes.TrimSpace(body), []byte("\n"))
	var value struct {
		Metadata map[string]any
		Object   struct{ Metadata map[string]any }
	}
	if json.Unmarshal(lines[len(lines)-1], &value) == nil && resp.StatusCode == http.StatusOK {
		if p.last = value.Metadata; p.last == nil {
			p.last = value.Object.Metadata
		}
	}
	return &kubetest.Exchange{Path: e.Path, Status: resp.StatusCode, Type: resp.Header.Get("Content-Type"), Body: string(body)}
}

// play sends the recorded requests of a path. changes are by the number of the request: those of a watch happen while it
// runs, the others before the request.
func (p *player) play(all []kubetest.Exchange, path string, changes map[int]func()) {
	number := -1
	for i := range all {
		e := &all[i]
		if e.Path != path || e.Query.Has("sendInitialEvents") { // this server streams no lists
			continue
		}
		number++
		change := changes[number]
		if change == nil {
			change = func() {}
		}
		var got *kubetest.Exchange
		if e.Query.Has("watch") && strings.Contains(e.Body, "BOOKMARK") {
			answer := make(chan *kubetest.Exchange)
			go func() { answer <- p.send(e) }()
			for limit := time.Now().Add(30 * time.Second); p.server.Watches() == 0; <-time.After(time.Millisecond) {
				if time.Now().After(limit) {
					p.t.Fatalf("watch %d of %s does not begin", number, path)
				}
			}
			change()
			p.server.EndWatches()
			got = <-answer
		} else {
			change()
			got = p.send(e)
		}
		if diff := cmp.Diff(form(p.t, e), form(p.t, got)); diff != "" {
			p.t.Errorf("request %d of %s has another answer than the recorded one (-):\n%s", number, path, diff)
		}
	}
}

// The server answers as the recorded ones do.
func TestAnswersAreThoseOfKubeAPIServer(t *testing.T) {
	const (
		pods  = "/api/v1/namespaces/models/pods"
		ends  = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
		pools = "/apis/inference.networking.k8s.io/v1/namespaces/models/inferencepools"
	)
	for _, name := range []string{"kube-apiserver-1.34", "kube-apiserver-1.33"} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.New(t)
			transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
			defer transport.CloseIdleConnections()
			p := &player{t: t, server: s, client: &http.Client{Transport: transport}}
			put := func(path, name, label string) {
				s.Put(path, `{"metadata":{"name":"`+name+`","labels":{`+label+`}}}`)
			}
			const llm, vllm = `"app":"llm"`, `"kubernetes.io/service-name":"vllm"`
			refuse := func(code int, verbs ...string) func() {
				return func() {
					s.Refuse(func(_, verb string) int {
						if strings.Contains(strings.Join(verbs, " "), verb) {
							return code
						}
						return 0
					})
				}
			}
			all := kubetest.Recorded(t, name)
			put(pods, "a", llm)
			put(pods, "b", llm)
			p.play(all, pods, map[int]func(){
				2: func() {
					put(pods, "a", llm)
					put(pods, "c", llm)
					put(pods, "c", `"app":"other"`)
					put(pods, "b", llm) // its deletion begins
				},
				3: s.Restart, 5: s.Restart,
				7: refuse(http.StatusForbidden, "watch"), 8: refuse(http.StatusForbidden, "list", "watch"), 9: refuse(0),
				13: func() {
					put(pods, "b", llm) // its grace period is over
					s.Delete(pods, "b")
				},
			})
			put(ends, "vllm-1", vllm)
			p.play(all, ends, map[int]func(){1: func() { put(ends, "vllm-1", vllm) }})
			p.play(all, pools, map[int]func(){
				0: refuse(http.StatusNotFound, "list", "watch"),
				1: func() {
					refuse(0)()
					put(pools, "llm", llm)
				},
				2: func() { s.Delete(pools, "llm") },
			})
		})
	}
}
