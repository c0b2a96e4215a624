// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/kube"
	"github.com/kvroute/kvroute/internal/kubetest"
)

const path = "/api/v1/namespaces/models/pods"

type pod struct {
	kube.Object
	Status struct {
		PodIP string `json:"podIP"`
	} `json:"status"`
}

func podText(name, uid, ip string) string {
	return fmt.Sprintf(`{"metadata":{"name":%q,"uid":%q,"labels":{"app":"vllm"}},"status":{"podIP":%q}}`, name, uid, ip)
}

// follower runs a set against a server.
type follower struct {
	t    *testing.T
	set  *kube.Set[pod]
	wake chan struct{}
	log  *fixtures.Log

	mu sync.Mutex
	// mu guards the field below.
	counts map[string]int
}

func pods() kube.Resource {
	return kube.Resource{Version: "v1", Name: "pods", Namespace: "models", Selector: "app=vllm"}
}

func follow(t *testing.T, s *kubetest.Server, r kube.Resource, change func(*kube.Config)) *follower {
	f := &follower{t: t, wake: make(chan struct{}, 1), log: &fixtures.Log{}, counts: map[string]int{}}
	conf := kube.Config{Server: s.URL, CAFile: s.CAFile, TokenFile: s.TokenFile, Log: slog.New(slog.NewTextHandler(f.log, nil))}
	if change != nil {
		change(&conf)
	}
	client, err := kube.New(conf)
	if err != nil {
		t.Fatal(err)
	}
	f.set = kube.NewSet[pod](client, r, kube.SetConfig[pod]{
		Changed: func() {
			select {
			case f.wake <- struct{}{}:
			default:
			}
		},
		Count: func(event string) {
			f.mu.Lock()
			f.counts[event]++
			f.mu.Unlock()
		},
	})
	f.set.Fast(10 * time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.set.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return f
}

func (f *follower) count(event string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts[event]
}

// until waits for a condition.
func (f *follower) until(what string, is func() bool) {
	f.t.Helper()
	limit := time.After(30 * time.Second)
	for !is() {
		select {
		case <-f.wake:
		case <-time.After(5 * time.Millisecond):
		case <-limit:
			f.t.Fatalf("no %s after 30s: %s, %+v\n%s", what, f.names(), f.set.State(), f.log)
		}
	}
}

// names returns the known pods, as name=ip.
func (f *follower) names() string {
	all, _ := f.set.All()
	var list []string
	for key, p := range all {
		list = append(list, strings.TrimPrefix(key, "models/")+"="+p.Status.PodIP)
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// knows waits until these pods are known.
func (f *follower) knows(want string) {
	f.t.Helper()
	f.until("pods "+want, func() bool { return f.names() == want })
}

// fails waits until the state has an error with a text.
func (f *follower) fails(text string) {
	f.t.Helper()
	f.until("error "+text, func() bool { err := f.set.State().Err; return err != nil && strings.Contains(err.Error(), text) })
}

func (f *follower) works() {
	f.t.Helper()
	f.until("working watch", func() bool { st := f.set.State(); return st.Listed && st.Err == nil })
}

func TestASetFollowsTheObjects(t *testing.T) {
	s := kubetest.New(t)
	s.Put(path, podText("a", "1", "10.0.0.1"))
	s.Put(path, `{"metadata":{"name":"other","labels":{"app":"web"}}}`)
	f := follow(t, s, pods(), nil)
	f.knows("a=10.0.0.1")
	s.Put(path, podText("b", "2", "10.0.0.2"))
	f.knows("a=10.0.0.1 b=10.0.0.2")
	s.Put(path, podText("a", "1", "10.0.0.3"))
	f.knows("a=10.0.0.3 b=10.0.0.2")
	s.Delete(path, "a")
	f.knows("b=10.0.0.2")
	s.EndWatches()
	s.Put(path, podText("c", "3", "10.0.0.4"))
	f.knows("b=10.0.0.2 c=10.0.0.4")
	if lists, _ := s.Lists(); lists != 1 {
		t.Errorf("%d lists, want 1: a watch that ends continues from its version", lists)
	}
}

// After a restart the server knows no history, and it refuses requests for a moment although the rule is there.
func TestARestartOfTheServerLosesNothing(t *testing.T) {
	s := kubetest.New(t)
	s.Put(path, podText("a", "1", "10.0.0.1"))
	s.Put(path, podText("b", "2", "10.0.0.2"))
	f := follow(t, s, pods(), nil)
	f.knows("a=10.0.0.1 b=10.0.0.2")
	f.works()
	before, _ := f.set.All()

	s.Refuse(func(string, string) int { return http.StatusForbidden })
	f.fails("status 403")
	s.Delete(path, "b")
	s.Put(path, podText("c", "3", "10.0.0.3"))
	if got := f.names(); got != "a=10.0.0.1 b=10.0.0.2" {
		t.Errorf("while the server refuses requests, %s is known, want what was known before", got)
	}
	s.Restart()
	s.Refuse(nil)
	f.knows("a=10.0.0.1 c=10.0.0.3")
	f.works()
	after, _ := f.set.All()
	if before["models/a"] != after["models/a"] {
		t.Error("the unchanged object has another pointer")
	}
	if !strings.Contains(f.log.String(), "Kubernetes can be read again") {
		t.Errorf("the log does not say that the API works again:\n%s", f.log)
	}
}

func TestAnOldVersionIsListedAgainAtOnce(t *testing.T) {
	s := kubetest.New(t)
	s.Put(path, podText("a", "1", "10.0.0.1"))
	f := follow(t, s, pods(), nil)
	f.knows("a=10.0.0.1")
	f.works()
	s.Put(path, podText("b", "2", "10.0.0.2"))
	f.knows("a=10.0.0.1 b=10.0.0.2")
	s.Restart()
	f.until("second list", func() bool { lists, _ := s.Lists(); return lists == 2 })
	f.works()
	if f.count("expired") == 0 || f.count("failure") != 0 {
		t.Errorf("%d expired versions and %d failures, want some and none", f.count("expired"), f.count("failure"))
	}
}

func TestAHungServerIsNoticed(t *testing.T) {
	s := kubetest.New(t)
	s.Put(path, podText("a", "1", "10.0.0.1"))
	f := follow(t, s, pods(), func(c *kube.Config) { c.Pings(200*time.Millisecond, 200*time.Millisecond) })
	f.knows("a=10.0.0.1")
	f.works()
	s.Hang()
	f.until("error of the hung watch", func() bool { return f.set.State().Err != nil })
	if got := f.names(); got != "a=10.0.0.1" {
		t.Errorf("while the server hangs, %q is known, want the pod", got)
	}
	s.Put(path, podText("b", "2", "10.0.0.2"))
	s.Continue()
	f.knows("a=10.0.0.1 b=10.0.0.2")
	f.works()
}

func TestARenewedTokenIsUsed(t *testing.T) {
	s := kubetest.New(t)
	s.Put(path, podText("a", "1", "10.0.0.1"))
	f := follow(t, s, pods(), nil)
	f.knows("a=10.0.0.1")
	f.until("watch", func() bool { return s.Watches() > 0 })
	s.RenewToken()
	s.EndWatches()
	s.Put(path, podText("b", "2", "10.0.0.2"))
	f.knows("a=10.0.0.1 b=10.0.0.2")
	if n := f.count("failure"); n != 0 {
		t.Errorf("%d failures, want none\n%s", n, f.log)
	}
}

// A list in pages is complete, and one whose pages expire is read without pages.
func TestPages(t *testing.T) {
	s := kubetest.New(t)
	want := map[string]bool{}
	for i := range 1203 {
		name := fmt.Sprintf("pod-%04d", i)
		s.Put(path, podText(name, name, fmt.Sprintf("10.0.%d.%d", i/200, i%200+1)))
		want["models/"+name] = true
	}
	var once sync.Once
	s.Refuse(func(_, verb string) int {
		code := 0
		if _, pages := s.LockedLists(); verb == "list" && pages == 2 {
			once.Do(func() { code = http.StatusGone })
		}
		return code
	})
	f := follow(t, s, pods(), nil)
	f.works()
	all, _ := f.set.All()
	got := map[string]bool{}
	for key := range all {
		got[key] = true
	}
	if !maps.Equal(got, want) {
		t.Errorf("%d objects are known, want %d", len(got), len(want))
	}
	if lists, pages := s.Lists(); lists != 2 || pages != 3 {
		t.Errorf("%d lists with %d pages, want 2 with 3: two pages, then all objects in one", lists, pages)
	}
	s.Restart()
	f.until("list in pages", func() bool { _, pages := s.Lists(); return pages == 6 })
}

func TestAMissingRuleIsNamed(t *testing.T) {
	pool := kube.Resource{Group: "inference.networking.k8s.io", Version: "v1", Name: "inferencepools", Namespace: "models", Object: "llm"}
	everywhere := kube.Resource{Version: "v1", Name: "pods"}
	for _, c := range []struct {
		r      kube.Resource
		verb   string
		status int
		want   string
	}{
		{pods(), "list", 403, `list pods in namespace models: status 403: pods is forbidden: User "system:serviceaccount:models:kvroute" cannot list resource "pods" in API group "" in the namespace "models"; ` +
			`kvroute's service account needs a Role in namespace models with the rule {apiGroups: [""], resources: [pods], verbs: [list, watch]}`},
		{pods(), "watch", 403, `watch pods in namespace models: status 403`},
		{everywhere, "list", 403, `needs a ClusterRole with the rule {apiGroups: [""], resources: [pods], verbs: [list, watch]}`},
		{pool, "list", 403, `rule {apiGroups: ["inference.networking.k8s.io"], resources: [inferencepools], resourceNames: [llm], verbs: [list, watch]}`},
		{pool, "list", 404, `the server has no resource inferencepools of inference.networking.k8s.io/v1: install its CustomResourceDefinition`},
		{pods(), "list", 401, `the server does not accept the token in `},
	} {
		s := kubetest.New(t)
		s.Put(path, podText("a", "1", "10.0.0.1"))
		s.Refuse(func(_, verb string) int {
			if verb == c.verb {
				return c.status
			}
			return 0
		})
		f := follow(t, s, c.r, nil)
		f.fails(c.want)
		if f.until("log", func() bool { return strings.Contains(f.log.String(), "Kubernetes cannot be read") }); c.verb == "watch" {
			f.knows("a=10.0.0.1") // a list works
		}
	}
}

// An answer that is wrong JSON, too large or unfinished changes nothing that is known.
func TestWrongAnswersChangeNothing(t *testing.T) {
	const list = `{"kind":"PodList","metadata":{"resourceVersion":"7"},"items":[` + `{"metadata":{"name":"a","namespace":"models"},"status":{"podIP":"10.0.0.1"}}]}`
	for name, c := range map[string]struct{ list, watch, want string }{
		"no JSON":             {"<html>", "", "invalid character"},
		"a list of no kind":   {`{}`, "", "no list of objects"},
		"an unfinished list":  {list[:len(list)-4], "", "unexpected EOF"},
		"a wrong type":        {`{"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"name":7}}]}`, "", "cannot unmarshal"},
		"items of no array":   {`{"metadata":{"resourceVersion":"7"},"items":{}}`, "", "items is not an array"},
		"a large object":      {`{"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"name":"` + strings.Repeat("x", 9<<20) + `"}}]}`, "", "more than 8388608 bytes"},
		"no events":           {list, `[]`, "cannot unmarshal"},
		"an unfinished event": {list, `{"type":"DELETED","object":{"metadata":{"name":"a"`, "unexpected EOF"},
		"an unknown error":    {list, `{"type":"ERROR","object":{"code":500,"message":"boom"}}`, "status 500: boom"},
		"no version":          {list, `{"type":"DELETED","object":{"metadata":{"name":"a","namespace":"models"}}}`, "without resourceVersion"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int32
			h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				answer := c.list
				if r.URL.Query().Get("watch") != "" {
					answer = c.watch
				}
				asked.Add(1)
				_, _ = w.Write([]byte(answer)) // the client may have gone
			}))
			defer h.Close()
			f := follow(t, &kubetest.Server{URL: h.URL}, pods(), nil)
			f.fails(c.want)
			want := ""
			if c.watch != "" {
				want = "a=10.0.0.1"
			}
			if f.knows(want); c.watch == "" && f.set.State().Listed {
				t.Error("the set counts as listed")
			}
		})
	}
}

func TestNewNamesWhatIsMissing(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := kube.New(kube.Config{}); err == nil || !strings.Contains(err.Error(), "only in a pod of Kubernetes") {
		t.Errorf("outside of a pod: %v", err)
	}
	if _, err := kube.New(kube.Config{Server: "10.0.0.1:443"}); err == nil || !strings.Contains(err.Error(), "want a URL as") {
		t.Errorf("a server without a scheme: %v", err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "::1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "1")
	client, err := kube.New(kube.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/var/run/secrets/kubernetes.io/serviceaccount/token"); err == nil {
		return // this test runs in a pod
	}
	set := kube.NewSet[pod](client, pods(), kube.SetConfig[pod]{})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = set.Run(ctx) })
	defer running.Wait()
	defer cancel()
	for set.State().Err == nil {
		<-time.After(time.Millisecond)
	}
	if err := set.State().Err; !strings.Contains(err.Error(), "automountServiceAccountToken: true") {
		t.Errorf("without a token: %v", err)
	}
}

func TestAnUnknownAuthorityIsAnError(t *testing.T) {
	s := kubetest.New(t)
	wrong := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(wrong, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := follow(t, s, pods(), func(c *kube.Config) { c.CAFile = wrong })
	f.fails("is not a PEM file with certificates")
	right, err := os.ReadFile(s.CAFile)
	if err == nil {
		err = os.WriteFile(wrong, right, 0o600) // Kubernetes replaces the file
	}
	if err != nil {
		t.Fatal(err)
	}
	f.works()
}
