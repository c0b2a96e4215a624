// SPDX-License-Identifier: Apache-2.0

// Package kubetest is an API server of Kubernetes for tests: it lists, pages and watches objects in memory as
// kube-apiserver 1.33 and 1.34 do, over HTTPS with HTTP/2, and it has their faults.
//
// Its answers have the form of those that tools/kubernetes-answers.py recorded from kube-apiserver 1.34.4, and from the
// same server while it emulated 1.33; a test compares them. [Server.Replay] serves a recording itself. The server does
// not stream lists, as 1.33.
//
// The methods of a [Server] may be called by any number of goroutines.
package kubetest

import (
	"cmp"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Server is an API server.
type Server struct {
	URL       string
	CAFile    string // of its certificate
	TokenFile string // with the token that it accepts

	t    testing.TB
	gate *gate

	mu sync.Mutex
	// mu guards the fields below.
	changed *sync.Cond // of mu
	token   string
	version int
	oldest  int                       // the versions from which a watch can continue begin here
	objects map[string]map[string]any // by path of the resource, and namespace/name
	events  []event
	broken  int                         // grows when all watches end
	abrupt  bool                        // they end without a bookmark
	running int                         // watches
	refuse  func(path, verb string) int // status of the answer; 0 = it is not refused
	lists   int
	pages   int
	replay  *replay // answers instead of the objects; nil = none
}

type event struct {
	path    string
	version int
	kind    string
	object  map[string]any
	before  map[string]any // the object before a change
}

// New starts a server, which ends with the test.
func New(t testing.TB) *Server {
	s := &Server{t: t, token: "token-1", version: 100, objects: make(map[string]map[string]any), gate: newGate()}
	s.changed = sync.NewCond(&s.mu)
	h := httptest.NewUnstartedServer(s)
	h.Listener = listener{h.Listener, s.gate}
	h.EnableHTTP2 = true
	h.Config.ErrorLog = nil
	h.StartTLS()
	dir := t.TempDir()
	s.URL, s.CAFile, s.TokenFile = h.URL, filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token")
	s.write(s.CAFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.Certificate().Raw}))
	s.write(s.TokenFile, []byte(s.token+"\n"))
	t.Cleanup(func() {
		s.gate.open()
		s.EndWatches()
		h.CloseClientConnections()
		h.Close()
	})
	return s
}

func (s *Server) write(file string, text []byte) {
	if err := os.WriteFile(file, text, 0o600); err != nil {
		s.t.Error(err)
	}
}

// Put adds or changes the object of a resource's path, such as /api/v1/namespaces/default/pods. The object is JSON
// with metadata.name; the server sets the namespace and the version.
func (s *Server) Put(path, object string) {
	var o map[string]any
	if err := json.Unmarshal([]byte(object), &o); err != nil {
		s.t.Fatalf("kubetest: %v in %s", err, object)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	at, meta := resourceOf(path), metadata(o)
	meta["namespace"], meta["resourceVersion"] = at.namespace, strconv.Itoa(s.version)
	o["kind"], o["apiVersion"] = at.kind, at.version
	if s.objects[path] == nil {
		s.objects[path] = make(map[string]any)
	}
	kind, key := "ADDED", fmt.Sprint(meta["name"])
	before, _ := s.objects[path][key].(map[string]any)
	if before != nil {
		kind = "MODIFIED"
	}
	s.objects[path][key] = o
	s.add(event{path, s.version, kind, o, before})
}

// Delete removes an object.
func (s *Server) Delete(path, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[path][name].(map[string]any)
	if !ok {
		s.t.Fatalf("kubetest: there is no %s at %s", name, path)
	}
	s.version++
	o = maps.Clone(o)
	o["metadata"] = maps.Clone(metadata(o))
	metadata(o)["resourceVersion"] = strconv.Itoa(s.version)
	delete(s.objects[path], name)
	s.add(event{path, s.version, "DELETED", o, nil})
}

func (s *Server) add(e event) {
	s.events = append(s.events, e)
	s.changed.Broadcast()
}

// EndWatches ends all watches as after their time: with a bookmark.
func (s *Server) EndWatches() { s.end(false) }

func (s *Server) end(abrupt bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken++
	s.abrupt = abrupt
	s.changed.Broadcast()
}

// Watches returns the number of watches that run.
func (s *Server) Watches() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running
}

// Restart ends all watches and forgets all events, as a server that starts again does: older versions get 410.
func (s *Server) Restart() {
	s.mu.Lock()
	s.version++
	s.oldest, s.events = s.version, nil
	s.mu.Unlock()
	s.end(true)
}

// Refuse makes the server answer with the statuses that a function returns for the path and the verb (list or watch)
// of a request; 0 serves the request. It ends all watches. nil serves all requests.
func (s *Server) Refuse(status func(path, verb string) int) {
	s.mu.Lock()
	s.refuse = status
	s.mu.Unlock()
	s.end(true)
}

// Hang makes the server read nothing from its connections until Continue, as a stopped process.
func (s *Server) Hang() { s.gate.close() }

// Continue ends Hang.
func (s *Server) Continue() { s.gate.open() }

// RenewToken replaces the token and its file. The old one gets 401.
func (s *Server) RenewToken() {
	s.mu.Lock()
	s.token += "-new"
	s.write(s.TokenFile, []byte(s.token+"\n"))
	s.mu.Unlock()
}

// Lists returns the number of lists and of their pages so far.
func (s *Server) Lists() (lists, pages int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lists, s.pages
}

// LockedLists is [Server.Lists] for a function that [Server.Refuse] calls.
func (s *Server) LockedLists() (lists, pages int) { return s.lists, s.pages }

// ServeHTTP answers a list or a watch.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query, verb := r.URL.Query(), "list"
	if query.Get("watch") != "" {
		verb = "watch"
	}
	s.mu.Lock()
	again := s.replay
	s.mu.Unlock()
	if again != nil {
		again.answer(w, r)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	refused := 0
	if s.refuse != nil {
		refused = s.refuse(r.URL.Path, verb)
	}
	switch {
	case r.Header.Get("Authorization") != "Bearer "+s.token:
		refusal(w, r, http.StatusUnauthorized, verb)
	case refused > 0:
		refusal(w, r, refused, verb)
	case query.Get("resourceVersion") != "" && verb == "list":
		status(w, http.StatusBadRequest, `{}`, "BadRequest", "kubetest: a list with a version has no pages", "")
	case verb == "list":
		s.list(w, r)
	default:
		s.watch(w, r)
	}
}

// list answers with a page. The continue token is a version and the key of the next object.
func (s *Server) list(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	version, after := s.version, ""
	if token := query.Get("continue"); token != "" {
		text, key, _ := strings.Cut(token, ":")
		version, _ = strconv.Atoi(text)
		if after = key; version < s.oldest {
			refusal(w, r, http.StatusGone, "list")
			return
		}
	} else {
		s.lists++
	}
	s.pages++
	limit, _ := strconv.Atoi(query.Get("limit"))
	limit = cmp.Or(limit, len(s.objects[r.URL.Path])+1)
	items, next, at := []any{}, "", resourceOf(r.URL.Path)
	for _, key := range slices.Sorted(maps.Keys(s.objects[r.URL.Path])) {
		if key <= after {
			continue
		}
		if len(items) == limit { // the rest may have no selected object
			next = fmt.Sprint(version, ":", fmt.Sprint(metadata(items[limit-1])["name"]))
			break
		}
		o, _ := s.objects[r.URL.Path][key].(map[string]any)
		if !selected(o, r) {
			continue
		}
		if !at.custom {
			o = maps.Clone(o)
			delete(o, "kind")
			delete(o, "apiVersion")
		}
		items = append(items, o)
	}
	w.Header().Set("Content-Type", "application/json")
	meta := map[string]any{"resourceVersion": strconv.Itoa(version)}
	if next != "" || at.custom {
		meta["continue"] = next
	}
	list := map[string]any{"kind": at.kind + "List", "apiVersion": at.version, "metadata": meta, "items": items}
	if err := json.NewEncoder(w).Encode(list); err != nil {
		s.t.Log("kubetest:", err) // the client has gone
	}
}

// watch sends events until the client or a method of the server ends the watch.
func (s *Server) watch(w http.ResponseWriter, r *http.Request) {
	version, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.Header().Set("Content-Type", "application/json")
	if err != nil || version < s.oldest {
		fmt.Fprintf(w, `{"type":"ERROR","object":%s}`+"\n",
			statusText(http.StatusGone, `{}`, "Expired", fmt.Sprintf("too old resource version: %d (%d)", version, s.oldest), ""))
		return
	}
	out := http.NewResponseController(w)
	stop := make(chan struct{})
	defer close(stop)
	gone := r.Context().Done()
	ended := false
	go func() {
		select {
		case <-gone:
		case <-stop:
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		ended = true
		s.changed.Broadcast()
	}()
	s.running++
	defer func() { s.running-- }()
	broken := s.broken
	for sent := 0; ; {
		for ; sent < len(s.events); sent++ {
			e := s.events[sent]
			if e.path != r.URL.Path || e.version <= version {
				continue
			}
			kind, is, was := e.kind, selected(e.object, r), e.before != nil && selected(e.before, r)
			switch {
			case is && !was && kind == "MODIFIED":
				kind = "ADDED"
			case was && !is:
				kind = "DELETED"
			case !is:
				continue
			}
			s.send(w, kind, e.object)
		}
		if s.broken != broken {
			if at := resourceOf(r.URL.Path); !s.abrupt {
				s.send(w, "BOOKMARK", map[string]any{
					"kind": at.kind, "apiVersion": at.version, "metadata": map[string]any{"resourceVersion": strconv.Itoa(s.version)},
				})
			}
			return
		}
		_ = out.Flush() // the client has gone
		if s.changed.Wait(); ended {
			return
		}
	}
}

// send writes an event of a watch.
func (s *Server) send(w io.Writer, kind string, object map[string]any) {
	text, err := json.Marshal(map[string]any{"type": kind, "object": object})
	if err != nil {
		s.t.Error("kubetest:", err)
	}
	_, _ = w.Write(append(text, '\n')) // the client has gone
}

// selected says whether an object has the labels and the name that a request selects.
func selected(o map[string]any, r *http.Request) bool {
	meta := metadata(o)
	labels, _ := meta["labels"].(map[string]any)
	for part := range strings.SplitSeq(r.URL.Query().Get("labelSelector"), ",") {
		if name, value, ok := strings.Cut(part, "="); ok && labels[name] != value {
			return false
		}
	}
	name, ok := onlyName(r)
	return !ok || meta["name"] == name
}

// onlyName returns the name of the only object that a request selects.
func onlyName(r *http.Request) (name string, ok bool) {
	return strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
}

func metadata(o any) map[string]any {
	object, _ := o.(map[string]any)
	meta, _ := object["metadata"].(map[string]any)
	return meta
}

// gate lets connections be read while it is open.
type gate struct {
	mu sync.Mutex
	// mu guards the field below.
	shut chan struct{} // nil while open; closed when it opens
}

func newGate() *gate { return &gate{} }

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut == nil {
		g.shut = make(chan struct{})
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut != nil {
		close(g.shut)
		g.shut = nil
	}
}

func (g *gate) wait() {
	g.mu.Lock()
	shut := g.shut
	g.mu.Unlock()
	if shut != nil {
		<-shut
	}
}

type listener struct {
	net.Listener
	gate *gate
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return conn{c, l.gate}, nil
}

type conn struct {
	net.Conn
	gate *gate
}

// Read holds back what arrived while the gate was closed.
func (c conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.gate.wait()
	return n, err
}
