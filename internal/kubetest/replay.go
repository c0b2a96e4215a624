// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"embed"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
)

//go:embed testdata
var recordings embed.FS

// Exchange is a request to a real kube-apiserver, and its answer.
type Exchange struct {
	Path   string
	Query  url.Values
	Status int
	Type   string // of the content
	Body   string
}

// recorded returns the exchanges of a recording in testdata, such as kube-apiserver-1.34, in their order.
// tools/kubernetes-answers.py made it.
func recorded(t testing.TB, name string) (all []Exchange) {
	t.Helper()
	text, err := recordings.ReadFile("testdata/" + name + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n\n") {
		if strings.HasPrefix(part, "#") {
			continue
		}
		request, answer, _ := strings.Cut(part, "\n")
		head, body, _ := strings.Cut(answer, "\n")
		code, kind, _ := strings.Cut(head, " ")
		u, err := url.Parse(strings.TrimPrefix(request, "GET "))
		if err != nil {
			t.Fatal(err)
		}
		e := Exchange{Path: u.Path, Query: u.Query(), Type: kind, Body: body + "\n"}
		if e.Status, err = strconv.Atoi(code); err != nil {
			t.Fatalf("kubetest: %s: the exchange %s has no status", name, request)
		}
		all = append(all, e)
	}
	return all
}

// Replay has the server answer from a recording in testdata, such as kube-apiserver-1.34. Each request gets the next answer
// of its path. The test fails if the request is another one than the recorded one: only the size of pages and the time of a
// watch may differ. The last watch of a path stays open. hold is called before each answer, and may wait until the test
// ends. Requests for streamed lists are left out, since kvroute sends none.
func (s *Server) Replay(recording string, hold func(*Exchange)) {
	again, all := &replay{t: s.t, hold: hold, next: make(map[string][]*Exchange)}, recorded(s.t, recording)
	for i := range all {
		if e := &all[i]; !e.Query.Has("sendInitialEvents") {
			again.next[e.Path] = append(again.next[e.Path], e)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replay = again
}

type replay struct {
	t    testing.TB
	hold func(*Exchange)

	mu sync.Mutex
	// mu guards the field below.
	next map[string][]*Exchange // by path
}

func (r *replay) answer(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	list := r.next[req.URL.Path]
	if len(list) > 0 {
		r.next[req.URL.Path] = list[1:]
	}
	r.mu.Unlock()
	if len(list) == 0 {
		r.t.Errorf("kubetest: a request after the last recorded one: %s", req.URL)
		return
	}
	e := list[0]
	if got, want := essential(req.URL.Query()), essential(e.Query); got != want {
		r.t.Errorf("kubetest: the request is\n%s, recorded is\n%s", got, want)
	}
	r.hold(e)
	w.Header().Set("Content-Type", e.Type)
	w.WriteHeader(e.Status)
	_, _ = io.WriteString(w, e.Body)          // the client may have gone
	_ = http.NewResponseController(w).Flush() // the same
	if len(list) == 1 && e.Query.Has("watch") {
		<-req.Context().Done()
	}
}

// essential returns a query without what may differ from the recorded one.
func essential(q url.Values) string {
	q.Del("timeoutSeconds")
	if q.Has("limit") {
		q.Set("limit", "some")
	}
	return q.Encode()
}
