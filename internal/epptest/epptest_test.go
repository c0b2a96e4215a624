// SPDX-License-Identifier: Apache-2.0

package epptest_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
)

var (
	addr      = flag.String("addr", "", "`host:port` of the endpoint picker; without, kvroute's own is started")
	model     = flag.String("model", "m", "`name` of a model that it knows")
	endpoints = flag.String("endpoints", "10.0.0.1:8000,10.0.0.2:8000,10.0.0.3:8000", "its `endpoints`: ip:port, at least two, separated by commas")
)

// hooks enables the tests of the features that the extension's own conformance tests require.
var hooks = flag.Bool("hooks", true, "also test the hooks of the conformance tests, which not every picker has (kvroute: with --allow-direct)")

// patience is far above the time that a picker needs.
const patience = time.Minute

// picker connects to the picker under test. own is its router if it is kvroute's.
func picker(t *testing.T) (conn *grpc.ClientConn, own *router.Router) {
	t.Helper()
	at := *addr
	if at == "" {
		own = ownRouter(t, strings.Split(*endpoints, ","))
		// A decision on a busy machine must not fail open here.
		s, err := extproc.New(extproc.Config{EndpointPicker: true, AllowDirect: true, DecisionTimeout: patience}, own)
		if err != nil {
			t.Fatal(err)
		}
		g := grpc.NewServer(s.ServerOptions()...)
		s.Register(g)
		h := health.NewServer()
		for _, name := range []string{"liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"} {
			h.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
		}
		healthpb.RegisterHealthServer(g, h)
		at = serve(t, g)
	}
	conn, err := grpc.NewClient(at, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn, own
}

func serve(t *testing.T, g *grpc.Server) (at string) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- g.Serve(l) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func ownRouter(t *testing.T, at []string) *router.Router {
	t.Helper()
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for i, a := range at {
		if err := r.SetWorker(router.WorkerInfo{ID: uint64(i + 1), Address: netip.MustParseAddrPort(a), Models: []string{*model}, BlockSize: 16}); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func areEndpoints(list []string) bool {
	for _, e := range list {
		if !slices.Contains(strings.Split(*endpoints, ","), e) {
			return false
		}
	}
	return len(list) > 0
}

func open(t *testing.T, conn *grpc.ClientConn) *stream {
	t.Helper()
	s, err := openStream(t.Context(), conn, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func chat(content string) string {
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}],"max_tokens":8}`, *model, content)
}

// post sends a chat in parts of the given size, and returns the pick.
func post(t *testing.T, s *stream, body string, size int, more ...string) *pick {
	t.Helper()
	must(t, s.Headers(false, append([]string{":method", "POST", ":path", "/v1/chat/completions", "content-type", "application/json"}, more...)...))
	for rest := body; ; {
		n := min(size, len(rest))
		must(t, s.Body(rest[:n], n == len(rest)))
		if rest = rest[n:]; rest == "" {
			break
		}
	}
	p, err := s.Pick(true, false)
	must(t, err)
	return p
}

func routedTo(t *testing.T, p *pick) {
	t.Helper()
	if p.Status != 0 || p.Header == "" || p.Header != p.Metadata || !areEndpoints(p.Endpoints()) {
		t.Fatalf("status %d %s: header %q, metadata %q; want the same in both, of %s", p.Status, p.Error, p.Header, p.Metadata, *endpoints)
	}
}

func TestTheChoiceIsInHeaderAndMetadata(t *testing.T) {
	conn, _ := picker(t)
	for _, size := range []int{10, 1 << 20} {
		s := open(t, conn)
		body := chat("hello")
		p := post(t, s, body, size)
		routedTo(t, p)
		if p.Body != body {
			t.Errorf("the body comes back as %q", p.Body)
		}
	}
}

func TestALargeBodyComesBackInChunks(t *testing.T) {
	conn, _ := picker(t)
	body := chat(strings.Repeat("many words ", 100_000))
	p := post(t, open(t, conn), body, 60_000)
	routedTo(t, p)
	if p.Body != body || p.Chunks < 2 {
		t.Errorf("%d of %d bytes come back, in %d chunks", len(p.Body), len(body), p.Chunks)
	}
}

func TestTheResponsePasses(t *testing.T) {
	conn, _ := picker(t)
	s := open(t, conn)
	p := post(t, s, chat("hello"), 1<<20)
	routedTo(t, p)
	_, err := s.Respond(p.Endpoints()[0], ":status", "200", "content-type", "text/event-stream", "set-cookie", "a", "set-cookie", "b")
	must(t, err)
	// P3: the ends of events are not the ends of chunks.
	events := "data: {\"choices\":[]}\n\ndata: {\"usage\":{\"prompt_tokens\":5}}\n\ndata: [DONE]\n\n"
	for i := 0; i < len(events); i += 7 {
		part := events[i:min(i+7, len(events))]
		back, err := s.RespondBody(part, false)
		must(t, err)
		if back != part {
			t.Fatalf("%q comes back as %q", part, back)
		}
	}
	must(t, s.RespondTrailers())
}

func subsetOf(list ...any) *structpb.Value {
	v, err := structpb.NewList(list)
	if err != nil {
		panic(err)
	}
	return structpb.NewListValue(v)
}

// P6: an endpoint is identified with its port.
func TestTheSubsetHintIsObeyed(t *testing.T) {
	conn, _ := picker(t)
	all := strings.Split(*endpoints, ",")
	only := all[len(all)-1]
	host, _, _ := strings.Cut(only, ":")
	sameHost := 0
	for _, e := range all {
		if strings.HasPrefix(e, host+":") {
			sameHost++
		}
	}
	for name, hint := range map[string]*structpb.Value{
		"a list": subsetOf(only), "text": structpb.NewStringValue(only), "spaces": structpb.NewStringValue(" 192.0.2.1:1 , " + only),
	} {
		for range 5 {
			s := open(t, conn)
			s.Subset = hint
			p := post(t, s, chat("hello"), 1<<20)
			routedTo(t, p)
			if p.Header != only {
				t.Errorf("%s: picked %s, allowed is %s", name, p.Header, only)
			}
		}
	}
	if sameHost == 1 {
		s := open(t, conn)
		s.Subset = structpb.NewStringValue(host)
		if p := post(t, s, chat("hello"), 1<<20); p.Header != only {
			t.Errorf("without a port: picked %s, allowed is %s", p.Header, only)
		}
	}
	for name, hint := range map[string]*structpb.Value{
		"another port": structpb.NewStringValue(host + ":9"), "nobody": subsetOf("192.0.2.1:1"), "empty": subsetOf(), "no address": structpb.NewStringValue("x"),
	} {
		s := open(t, conn)
		s.Subset = hint
		refused(t, name, post(t, s, chat("hello"), 1<<20), 503)
	}
}

// refused checks that a refusal gives its reason in JSON and in a header.
func refused(t *testing.T, name string, p *pick, status int) {
	t.Helper()
	var text map[string]any
	if p.Status != status || json.Unmarshal([]byte(p.Error), &text) != nil {
		t.Errorf("%s: status %d with %q, header %q; want %d with JSON", name, p.Status, p.Error, p.Header, status)
	}
	reasons := 0
	for h := range p.Headers {
		if strings.Contains(h, "reason") {
			reasons++
		}
	}
	if reasons == 0 {
		t.Errorf("%s: no header tells the reason: %v", name, p.Headers)
	}
}

// P6: the hint also applies to requests without a body.
func TestRequestsWithoutBody(t *testing.T) {
	conn, _ := picker(t)
	s := open(t, conn)
	must(t, s.Headers(true, ":method", "GET", ":path", "/v1/models"))
	p, err := s.Pick(false, false)
	must(t, err)
	routedTo(t, p)

	s = open(t, conn)
	s.Subset = subsetOf()
	must(t, s.Headers(true, ":method", "GET", ":path", "/v1/models"))
	p, err = s.Pick(false, false)
	must(t, err)
	refused(t, "no endpoint", p, 503)
}

// Requests to unknown paths are routed, with their bodies.
func TestUnknownPaths(t *testing.T) {
	conn, _ := picker(t)
	s := open(t, conn)
	must(t, s.Headers(false, ":method", "POST", ":path", "/a/path/of/others"))
	must(t, s.Body("half ", false))
	must(t, s.Body("whole", true))
	p, err := s.Pick(true, false)
	must(t, err)
	routedTo(t, p)
	if p.Body != "half whole" {
		t.Errorf("the body comes back as %q", p.Body)
	}
}

// P1: trailers may end a body.
func TestABodyThatEndsByTrailers(t *testing.T) {
	conn, _ := picker(t)
	s := open(t, conn)
	must(t, s.Headers(false, ":method", "POST", ":path", "/v1/chat/completions"))
	must(t, s.Body(chat("hello"), false))
	must(t, s.Trailers())
	p, err := s.Pick(true, true)
	must(t, err)
	routedTo(t, p)
	if p.Body != chat("hello") {
		t.Errorf("the body comes back as %q", p.Body)
	}
}

// P2: a picker leaves the request's own headers unchanged. P4: a client cannot set the picker's
// headers.
func TestHeaders(t *testing.T) {
	conn, _ := picker(t)
	forged := []string{
		destinationKey, "192.0.2.1:1", subsetKey, "192.0.2.1:1", servedKey, "192.0.2.1:1",
		"x-gateway-inference-objective", "all", "x-gateway-inference-fairness-id", "me", "x-gateway-model-name-rewrite", "other",
	}
	own := []string{"authorization", "Bearer x", "x-multi", "one", "x-multi", "two", "cookie", "a=b", "content-length", "9"}
	p := post(t, open(t, conn), chat("hello"), 1<<20, append(forged, own...)...)
	routedTo(t, p)
	for name := range p.Set {
		if slices.Contains(own, name) && name != "content-length" {
			t.Errorf("the request's own %s is set again", name)
		}
	}
	for i := 0; i < len(forged); i += 2 {
		if !slices.Contains(p.Removed, forged[i]) && p.Set[forged[i]] == "" {
			t.Errorf("the client's %s reaches the worker", forged[i])
		}
	}
}

// P7: a second end of the body has no effect.
func TestASecondEndOfTheBody(t *testing.T) {
	conn, _ := picker(t)
	s := open(t, conn)
	p := post(t, s, chat(strings.Repeat("long ", 300_000)), 60_000)
	routedTo(t, p)
	must(t, s.Body("", true))
	set, err := s.Respond(p.Endpoints()[0], ":status", "200", "content-type", "application/json")
	if err != nil {
		t.Fatalf("after a second end the response's headers are answered with %v, %v", set, err)
	}
}

func TestAClientsMistakeIsNoCrash(t *testing.T) {
	conn, _ := picker(t)
	p := post(t, open(t, conn), `{"model":`, 1<<20)
	var text map[string]any
	if p.Status != 400 || json.Unmarshal([]byte(p.Error), &text) != nil {
		t.Errorf("status %d with %q, want 400 with JSON", p.Status, p.Error)
	}
	routedTo(t, post(t, open(t, conn), chat("still there?"), 1<<20))
}

func TestHealthServices(t *testing.T) {
	conn, _ := picker(t)
	for _, name := range []string{"", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"} {
		resp, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
		if err != nil || resp.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("service %q: %v, %v", name, resp.GetStatus(), err)
		}
	}
}

// The load is booked at the endpoint that served the request; kvroute's own router reports it.
func TestLoadFollowsTheEndpointThatServed(t *testing.T) {
	conn, own := picker(t)
	s := open(t, conn)
	p := post(t, s, chat("hello"), 1<<20)
	routedTo(t, p)
	if len(p.Endpoints()) < 2 {
		t.Fatalf("no fallback in %q", p.Header)
	}
	served := p.Endpoints()[1]
	_, err := s.Respond(served, ":status", "200", "content-type", "text/event-stream")
	must(t, err)
	if own == nil {
		return // the load of another picker is not visible
	}
	for _, w := range own.Workers() {
		if want := w.Address.String() == served; (w.ActiveRequests == 1) != want {
			t.Errorf("%v has %d requests; %s served", w.Address, w.ActiveRequests, served)
		}
	}
}

// The features that the conformance tests require.
func TestConformanceHooks(t *testing.T) {
	if !*hooks {
		t.Skip("not asked for")
	}
	conn, _ := picker(t)
	want := strings.Split(*endpoints, ",")[1]
	for range 4 {
		s := open(t, conn)
		p := post(t, s, chat("hello"), 1<<20, "test-epp-endpoint-selection", want)
		routedTo(t, p)
		if p.Endpoints()[0] != want {
			t.Errorf("picked %s, the test asks for %s", p.Header, want)
		}
		set, err := s.Respond(want, ":status", "200")
		must(t, err)
		if set["x-conformance-test-served-endpoint"] != want {
			t.Errorf("the response says %v", set)
		}
	}
}

// The fallbacks of a choice are also endpoints that the hint allows, and no endpoint is listed
// twice.
func TestFallbacksAreInTheSubset(t *testing.T) {
	conn, _ := picker(t)
	all := strings.Split(*endpoints, ",")
	for i := range all {
		allowed := []string{all[i], all[(i+1)%len(all)]}
		for range 5 {
			s := open(t, conn)
			s.Subset = subsetOf(allowed[0], allowed[1])
			p := post(t, s, chat(fmt.Sprint("hello ", i)), 1<<20)
			routedTo(t, p)
			seen := map[string]bool{}
			for _, e := range p.Endpoints() {
				if seen[e] || !slices.Contains(allowed, e) {
					t.Errorf("picked %s, allowed are %v, each once", p.Header, allowed)
				}
				seen[e] = true
			}
		}
		s := open(t, conn)
		s.Subset = subsetOf(all[i])
		p := post(t, s, chat("alone"), 1<<20)
		if routedTo(t, p); p.Header != all[i] {
			t.Errorf("picked %s, allowed is %s alone", p.Header, all[i])
		}
	}
}
