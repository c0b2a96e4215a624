// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
)

// within is a deadline that only a fault exceeds.
const within = time.Minute

// feed is an open stream of /v1/live.
type feed struct {
	t     *testing.T
	resp  *http.Response
	lines *bufio.Reader
}

// openFeed opens a stream. The server has a client of its own, so that goleak sees no idle connection.
func openFeed(t *testing.T, s *httptest.Server) *feed {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "GET", s.URL+"/v1/live", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "text/event-stream")
	resp, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return &feed{t, resp, bufio.NewReader(resp.Body)}
}

// next returns the next event.
func (f *feed) next() (name, data string) {
	f.t.Helper()
	var lines []string
	for len(lines) == 0 || lines[len(lines)-1] != "" {
		line, err := f.lines.ReadString('\n')
		if err != nil {
			f.t.Fatalf("after %q: %v", lines, err)
		}
		lines = append(lines, strings.TrimSuffix(line, "\n"))
	}
	name, isName := strings.CutPrefix(lines[0], "event: ")
	data, isData := strings.CutPrefix(lines[1], "data: ")
	if len(lines) != 3 || !isName || !isData || !json.Valid([]byte(data)) {
		f.t.Fatalf("the event is %q", lines)
	}
	return name, data
}

// until returns the events up to the first one of a name.
func (f *feed) until(last string) map[string]string {
	f.t.Helper()
	events := map[string]string{}
	for events[last] == "" {
		name, data := f.next()
		if events[name] != "" {
			f.t.Fatalf("a state has two events %s", name)
		}
		events[name] = data
	}
	return events
}

// field returns a field of the JSON that a path answers with.
func field(t *testing.T, h http.Handler, path, name string) string {
	t.Helper()
	_, body := get(t, h, path)
	var all map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &all); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return string(all[name])
}

// recorder is a recorder with a clock of its own.
type recorder struct {
	*outcomes.Recorder
	now atomic.Pointer[time.Time]
}

func newOutcomes(t *testing.T) *recorder {
	t.Helper()
	o := new(recorder)
	o.now.Store(new(time.UnixMilli(1_000_000_000)))
	var err error
	if o.Recorder, err = outcomes.New(nil, func() time.Time { return *o.now.Load() }); err != nil {
		t.Fatal(err)
	}
	return o
}

// finish ends a number of requests, and then their sample.
func (o *recorder) finish(n int) {
	for range n {
		now := *o.now.Load()
		out := router.Outcome{Arrival: router.Arrival{Began: now.Add(-time.Second)}, Status: 200}
		out.Model, out.PromptTokens, out.Freed = "m", 100, now
		o.Finished(out)
	}
	o.now.Store(new(o.now.Load().Add(2 * time.Second)))
}

func decide(t *testing.T, r *router.Router, id string) {
	t.Helper()
	if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: []uint32{1, 2, 3, 4}}); err != nil {
		t.Fatal(err)
	}
}

// The sections are what the other paths answer with, and only those that have changed are sent again.
func TestLive(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	start := time.Now()
	r := newRouter(t, 2, func() time.Time { return start }) // nothing expires
	decide(t, r, "a")
	o := newOutcomes(t)
	o.finish(7)
	o.finish(1)
	ticks := make(chan time.Time)
	conf := api.Hurried(api.Config{
		Router: r, Metrics: http.NotFoundHandler(), Scope: "n/c/e", Replica: func() api.Replica { return api.Replica{RouterID: 7} },
		Outcomes: o.Recorder,
	}, ticks, within)
	h := api.New(conf)
	s := httptest.NewServer(h)
	defer s.Close()
	f := openFeed(t, s)
	defer f.resp.Body.Close()
	if kind := f.resp.Header.Get("Content-Type"); f.resp.StatusCode != 200 || kind != "text/event-stream" {
		t.Errorf("status %d, type %s", f.resp.StatusCode, kind)
	}
	first := f.until("history")
	checkSections(t, h, first)
	if _, there := first["prefixes"]; there || !strings.HasPrefix(first["totals"], `{"requests":8,`) || !strings.Contains(first["history"], `"requests":7`) {
		t.Errorf("the first state is %v", first)
	}

	decide(t, r, "b")
	o.finish(2)
	ticks <- time.Time{}
	second := f.until("history")
	checkSections(t, h, second)
	var samples []outcomes.Sample
	if err := json.Unmarshal([]byte(second["history"]), &samples); err != nil || len(samples) != 1 || samples[0].Requests != 2 {
		t.Errorf("the new samples are %s, %v", second["history"], err)
	}
	if second["models"] != "" || second["worker_charts"] != "" || !strings.Contains(second["decisions"], `"id":"b"`) {
		t.Errorf("the second state is %v", second)
	}

	// A stream that begins later gets all, one that is there only what is new.
	late := openFeed(t, s)
	defer late.resp.Body.Close()
	if all := late.until("history"); len(all) != 9 || all["models"] != first["models"] || strings.Count(all["history"], "time_ms") != 3 {
		t.Errorf("a later stream begins with %v", all)
	}
	time.Sleep(2 * time.Millisecond) // the clock of "replica" is in ms
	ticks <- time.Time{}
	for _, each := range []*feed{f, late} {
		if name, data := each.next(); name != "replica" {
			t.Errorf("nothing but the clock has changed, and %s is sent: %s", name, data)
		}
	}
}

// checkSections compares the sections with the other paths of the API.
func checkSections(t *testing.T, h http.Handler, events map[string]string) {
	t.Helper()
	for name, data := range events {
		var want string
		switch name {
		case "left":
			want = field(t, h, "/v1/workers", name)
		case "workers", "models":
			want = field(t, h, "/v1/"+name, name)
		case "replica":
			_, ready := get(t, h, "/readyz")
			if !strings.Contains(data, `"ready":`+strings.TrimSpace(ready)) || !strings.Contains(data, `"router_id":7`) {
				t.Errorf("replica is %s", data)
			}
			continue
		case "decisions":
			var all []api.Decision
			if err := json.Unmarshal([]byte(field(t, h, "/v1/decisions?limit=50", name)), &all); err != nil {
				t.Fatal(err)
			}
			for i := range all {
				all[i].Candidates, all[i].SettingsText, all[i].ModeText = nil, "", ""
			}
			text, err := json.Marshal(all)
			if err != nil {
				t.Fatal(err)
			}
			want = string(text)
		default:
			continue
		}
		if data != want {
			t.Errorf("%s is\n%s, want\n%s", name, data, want)
		}
	}
}

// Without the header Accept the answer is one object.
func TestLiveOnce(t *testing.T) {
	conf := api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler(), Prefixes: func() any { return []int{} }, Outcomes: newOutcomes(t).Recorder}
	h := api.New(conf)
	_, body := get(t, h, "/v1/live")
	var all map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &all); err != nil || len(all) != 10 || string(all["history"]) != "[]" || string(all["prefixes"]) != "[]" {
		t.Errorf("%v: %s", err, body)
	}
	if want := field(t, h, "/v1/workers", "workers"); string(all["workers"]) != want {
		t.Errorf("workers is %s, want %s", all["workers"], want)
	}
}

// More dashboards than kvroute serves get an error. When they have left, others get in.
func TestLiveBoundsItsStreams(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	s := httptest.NewServer(api.New(api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler()}))
	defer s.Close()
	const most = 256
	for range 2 {
		var open []*feed
		for i := range most + 44 {
			f := openFeed(t, s)
			if i < most {
				f.until("models")
				open = append(open, f)
				continue
			}
			text, err := io.ReadAll(f.resp.Body)
			if err != nil || f.resp.StatusCode != 503 || f.resp.Header.Get("Retry-After") == "" || !bytes.Contains(text, []byte("256 streams of /v1/live are open")) {
				t.Fatalf("stream %d: status %d, %v: %s", i+1, f.resp.StatusCode, err, text)
			}
			_ = f.resp.Body.Close() // it was read
		}
		for _, f := range open {
			_ = f.resp.Body.Close() // ends the stream
		}
		awaitPlace(t, s)
	}
}

// awaitPlace waits until all streams that were closed are released, so that as many get in again.
func awaitPlace(t *testing.T, s *httptest.Server) {
	t.Helper()
	var kept []*feed
	defer func() {
		for _, f := range kept {
			_ = f.resp.Body.Close() // ends the stream
		}
	}()
	for end := time.Now().Add(within); len(kept) < 256; {
		f := openFeed(t, s)
		if f.resp.StatusCode == 200 {
			kept = append(kept, f)
			continue
		}
		_ = f.resp.Body.Close() // an error
		if time.Now().After(end) {
			t.Fatalf("only %d streams get in again", len(kept))
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A client that does not read is disconnected, and the others still get each state.
func TestLiveCutsOffWhoDoesNotRead(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	large := strings.Repeat("x", 1<<20) // a few of these fill the buffers of a connection
	ticks := make(chan time.Time)
	var n atomic.Int64
	s := httptest.NewUnstartedServer(api.New(api.Hurried(api.Config{
		Router: newRouter(t, 1), Metrics: http.NotFoundHandler(),
		Prefixes: func() any { return []any{n.Load(), large} },
	}, ticks, 3*time.Second)))
	closed := make(chan string, 10)
	s.Config.ConnState = func(conn net.Conn, state http.ConnState) {
		if state == http.StateClosed {
			closed <- conn.RemoteAddr().String()
		}
	}
	s.Start()
	defer s.Close()
	conn, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /v1/live HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	reader := openFeed(t, s)
	defer reader.resp.Body.Close()
	reader.until("prefixes")
	for cut := false; !cut; {
		n.Add(1)
		for range 5 { // prefixes are read for each fifth state
			ticks <- time.Time{} // the encoder does not wait for a client
		}
		for name := ""; name != "prefixes"; {
			name, _ = reader.next()
		}
		select {
		case who := <-closed:
			if cut = true; who != conn.LocalAddr().String() {
				t.Errorf("%s is disconnected, not the client that does not read", who)
			}
		case <-time.After(10 * time.Millisecond): // its time is not over
		}
	}
}

// A server that stops does not wait for its dashboards.
func TestLiveEndsWithTheServer(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	draining := make(chan struct{})
	s := httptest.NewServer(api.New(api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler(), Draining: draining}))
	defer s.Close()
	f := openFeed(t, s)
	defer f.resp.Body.Close()
	f.until("models")
	close(draining)
	if _, err := io.Copy(io.Discard, f.lines); err != nil {
		t.Errorf("the stream ends with %v", err)
	}
}

// A worker that refuses a request is named at the next state of the stream, with cause, time and advice. It is still
// named after 10 minutes.
func TestLiveNamesADeadWorker(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var now atomic.Pointer[time.Time]
	now.Store(&start)
	clock := func() time.Time { return *now.Load() }
	r, err := router.New(router.Config{Now: clock, AvoidFailing: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for id := range uint64(2) {
		if err := r.SetWorker(router.WorkerInfo{ID: id + 1, Name: fmt.Sprint("w", id+1), Models: []string{"m"}, BlockSize: 4, Address: netip.MustParseAddrPort(fmt.Sprintf("10.0.0.%d:8000", id+1))}); err != nil {
			t.Fatal(err)
		}
	}
	ticks := make(chan time.Time)
	s := httptest.NewServer(api.New(api.Hurried(api.Config{
		Router: r, Metrics: http.NotFoundHandler(), Attention: attention.NewLog(attention.DocsOf("v1.0.0")), Now: clock,
	}, ticks, within)))
	defer s.Close()
	f := openFeed(t, s)
	defer f.resp.Body.Close()
	if first := f.until("events"); strings.Contains(first["attention"], `"worker"`) || first["events"] != "[]" {
		t.Errorf("in the beginning: %v", first)
	}
	d, err := r.BestWorker(t.Context(), router.Request{ID: "a", Model: "m", Tokens: []uint32{1}, Pinned: &router.Worker{ID: 2}})
	if err != nil {
		t.Fatal(err)
	}
	r.Served("a", router.Response{Address: d.Address, Local: true})
	r.Unanswered(2, "connection refused")
	r.Free("a")
	failed := clock()
	for _, passed := range []time.Duration{time.Second, 10 * time.Minute} {
		now.Store(new(failed.Add(passed)))
		ticks <- time.Time{}
		state := f.until("attention")
		var items []attention.Item
		err := json.Unmarshal([]byte(state["attention"]), &items)
		items = slices.DeleteFunc(items, func(i attention.Item) bool { return i.Kind != attention.OfWorker }) // the model has no tokenizer
		if err != nil || len(items) != 1 {
			t.Fatalf("%v: %s", err, state["attention"])
		}
		i := &items[0]
		if i.Name != "w2" || i.ID != 2 || i.Cause != "it gave no response: connection refused" || !i.Since.Equal(failed) || i.Advice == "" || !strings.HasPrefix(i.Docs, "https://github.com/kvroute/kvroute/blob/v1.0.0/docs/") {
			t.Errorf("after %v: %+v", passed, i)
		}
		if passed > time.Second {
			continue
		}
		var events []attention.Event
		if _, text := f.next(); json.Unmarshal([]byte(text), &events) != nil || len(events) != 1 || events[0].Text != "w2 refused a request: connection refused" || !events[0].Time.Equal(failed) {
			t.Errorf("events %+v", events)
		}
	}
}

// /v1/history has the spans by model and group.
func TestHistoryOfAModel(t *testing.T) {
	o := newOutcomes(t)
	o.finish(3)
	h := api.New(api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler(), Outcomes: o.Recorder})
	want := `{"span":"10m","step_ms":2000,"model":"m","group":"","series":[{"model":"m","group":""}],"samples":[{"time_ms":1000002000,"requests":3,"failed":0,"prompt_tokens":300,"cached_tokens":0,"mean_cached_tokens":0,"saved_ms":0,"rated":0,"ttft_ms":0,"ttft_p90_ms":0}]}`
	if status, body := get(t, h, "/v1/history?model=m"); status != 200 || strings.TrimSpace(body) != want {
		t.Errorf("%d %s\nwant %s", status, body, want)
	}
	for path, want := range map[string]int{"/v1/history": 200, "/v1/history?span=1h": 200, "/v1/history?span=24h&model=m": 200, "/v1/history?span=2h": 400, "/v1/history?model=x": 404, "/v1/history?model=m&group=g": 404} {
		if status, body := get(t, h, path); status != want {
			t.Errorf("%s: %d, want %d: %s", path, status, want, body)
		}
	}
}
