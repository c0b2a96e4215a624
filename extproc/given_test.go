// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

func responses(more string) envoytest.Request {
	return envoytest.Request{Path: "/v1/responses", Body: fmt.Appendf(nil, `{"model":"m","input":"a"%s}`, more)}
}

// The observer reads the id in a response's beginning, however Envoy cuts it, and leaves then.
func TestTheObserverReadsGivenIDs(t *testing.T) {
	const (
		document = "application/json"
		events   = "text/event-stream; charset=utf-8"
		long     = `{"output":"`
	)
	none := func(n int) string { return long + strings.Repeat("x", n) + `","id":"resp_1"}` }
	for name, c := range map[string]struct {
		request              envoytest.Request
		media, body, outcome string
	}{
		"a document":                  {responses(""), document, `{"id":"resp_1","object":"response","usage":null}`, "bound"},
		"a stream":                    {responses(`,"stream":true`), events, "event: response.created\ndata: {\"response\":{\"id\":\"resp_1\",\"object\":\"response\"}}\n\n", "bound"},
		"a stream with comments":      {responses(`,"stream":true`), events, ": wait\r\n\r\nevent: response.created\r\ndata:\r\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\"}}\r\n\r\n", "bound"},
		"behind other events":         {responses(`,"stream":true`), events, "data: {\"type\":\"ping\",\"id\":\"z\"}\n\nevent: x\ndata: {\"item\":{\"id\":\"y\"}}\n\ndata: \"wait\"\n\ndata: {\"response\":{\"id\":\"resp_1\"}}\n\n", "bound"},
		"in two lines":                {responses(`,"stream":true`), events, "data: {\"response\":\r\ndata: {\"id\":\"resp_1\"}}\r\n\r\n", "bound"},
		"too far behind events":       {responses(`,"stream":true`), events, strings.Repeat("data: {}\n\n", 500) + "data: {\"response\":{\"id\":\"resp_1\"}}\n\n", "none"},
		"in half an event":            {responses(`,"stream":true`), events, "data: {\"response\":{\"id\":\"resp_", "none"},
		"a session":                   {envoytest.Request{Path: "/open_session", Body: []byte(`{"capacity_of_str_len":9}`)}, document, `"resp_1"`, "bound"},
		"behind other members":        {responses(""), document, none(3000), "bound"},
		"too far behind":              {responses(""), document, none(4096), "none"},
		"no id":                       {responses(""), document, `{"object":"response","usage":null}`, "none"},
		"an error in a stream":        {responses(""), events, "data: {\"error\":{\"id\":\"x\"}}\n\n", "none"},
		"a response that is not kept": {responses(`,"store":false`), document, `{"id":"resp_1"}`, ""},
		"a chat":                      {chat(hello), document, `{"id":"chatcmpl-1"}`, ""},
	} {
		for _, size := range []int{1, 7, 1 << 20} {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, extproc.Config{})
				x := h.Do(c.request)
				if gives := strings.HasSuffix(x.Header["x-dynamo-request-id"], "-gives"); gives != (c.outcome != "") {
					t.Fatalf("%s: the request's id is %s", name, x.Header["x-dynamo-request-id"])
				}
				o := x.Observe()
				o.Respond(200, "content-type", c.media)
				x.Respond(200, "content-type", c.media)
				synctest.Wait()
				h.router.newCalls()
				for at := 0; at < len(c.body); at += size {
					end := min(len(c.body), at+size)
					o.Chunk([]byte(c.body[at:end]), end == len(c.body))
				}
				synctest.Wait()
				if !o.Ended() {
					t.Errorf("%s in pieces of %d: the observer stays", name, size)
				}
				gave := strings.Join(h.router.newCalls(), ", ")
				if want := fmt.Sprintf("worker %d gave %q", chosen.Worker.ID, "resp_1"); (c.outcome == "bound") != strings.Contains(gave, want) {
					t.Errorf("%s in pieces of %d: %q", name, size, gave)
				}
				if c.outcome != "" && h.count(t, "kvroute.extproc.given.ids", c.outcome) != 1 {
					t.Errorf("%s in pieces of %d: not counted as %s", name, size, c.outcome)
				}
				x.End()
			})
		}
	}
}

// Only a worker's answer to a request of kvroute's binds an id.
func TestWhatGivesNoID(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		header []string
		ended  bool
	}{
		"an error":                              {404, []string{"content-type", "application/json"}, false},
		"an encoded response":                   {200, []string{"content-type", "application/json", "content-encoding", "gzip"}, false},
		"a request without response that ended": {200, []string{"content-type", "application/json"}, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, extproc.Config{})
			x := h.Do(responses(""))
			o := x.Observe()
			if c.ended {
				x.End()
				synctest.Wait()
			}
			o.Respond(c.status, c.header...)
			o.Chunk([]byte(`{"id":"resp_1"}`), true)
			synctest.Wait()
			if calls := strings.Join(h.router.newCalls(), ", "); strings.Contains(calls, "gave") || !o.Ended() {
				t.Errorf("%s: %s; the observer ended: %v", name, calls, o.Ended())
			}
			if !c.ended {
				x.End()
			}
		})
	}
}

// A worker that gives out the id of another worker's response is counted.
func TestAnIDGivenTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		h.router.given["resp_1"] = second.Worker
		x := h.Do(responses(""))
		o := x.Observe()
		o.Respond(200, "content-type", "application/json")
		o.Chunk([]byte(`{"id":"resp_1"}`), true)
		synctest.Wait()
		if h.count(t, "kvroute.extproc.given.ids", "kept") != 1 {
			t.Error("not counted")
		}
		x.End()
	})
}

// Where Envoy passes the response through the main stream, that stream reads the id.
func TestTheMainStreamReadsGivenIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		r := responses("")
		r.Mode = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
		x := h.Do(r)
		x.Respond(200, "content-type", "application/json")
		h.router.newCalls()
		x.Answer(`{"id":"re`, `sp_1"}`)
		if diff := cmp.Diff([]string{fmt.Sprintf("worker %d gave %q", chosen.Worker.ID, "resp_1")}, h.router.newCalls()); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
		x.End()
	})
}

// A request about a stored response goes to the worker that gave out its id: at the headers, without a slot.
func TestRequestsAboutAStoredResponse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		h.router.given["resp_1"] = router.Worker{ID: 9, DPRank: 2}
		for _, c := range []struct {
			method, path, body string
			held               bool
		}{
			{"GET", "/v1/responses/resp_1", "", true},
			{"GET", "/v1/responses/%72esp_1?stream=true", "", true},
			{"DELETE", "/v1/responses/resp_1", "", true},
			{"GET", "/v1/responses/resp_1/input_items", "", true},
			{"POST", "/v1/responses/resp_1/cancel", "", true},
			{"POST", "/v1/responses/resp_1/cancel", "{}", true},
			{"GET", "/v1/responses/resp_2", "", false},
			{"GET", "/v1/responses/resp_1/x", "", false},
			{"GET", "/v1/models/resp_1", "", false},
		} {
			r := envoytest.Request{Method: c.method, Path: c.path, Header: []string{"x-dynamo-worker", "10.9.9.9:1", "x-dynamo-dp-rank", "7"}}
			if c.body != "" {
				r.Body = []byte(c.body)
			}
			x := h.Do(r)
			want := ""
			if c.held {
				want = second.Address.String()
			}
			if x.Refusal != nil || x.Header["x-dynamo-worker"] != want || !x.Rerouted {
				t.Errorf("%s %s: refusal %v, to %q, rerouted %v", c.method, c.path, x.Refusal, x.Header["x-dynamo-worker"], x.Rerouted)
			}
			if _, steers := x.Header["x-dynamo-dp-rank"]; steers || c.held != (x.Header["x-data-parallel-rank"] == "2") || c.held != (x.Header["x-dynamo-worker-host"] == "w.example") {
				t.Errorf("%s %s: headers %v", c.method, c.path, x.Header)
			}
			x.Respond(200, "content-type", "application/json")
			x.End()
		}
		if n := h.count(t, "kvroute.extproc.held", "found"); n != 6 {
			t.Errorf("%d found, want 6", n)
		}
		if n := h.count(t, "kvroute.extproc.held", "unknown"); n != 1 {
			t.Errorf("%d unknown, want 1", n)
		}
		if calls := h.router.newCalls(); len(calls) != 0 {
			t.Errorf("a slot is taken: %q", calls)
		}
		// POST elsewhere below it is refused, so that no body passes unchecked.
		x := h.Do(envoytest.Request{Path: "/v1/responses/resp_1", Body: []byte("{}")})
		if x.Refusal == nil || x.Refusal.Status != 404 {
			t.Errorf("POST on a response: %+v", x.Refusal)
		}
	})
}

// The observer of a short response may come after the end of the request.
func TestALateObserverReadsTheID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		x := h.Do(responses(""))
		o := x.Observe()
		x.Respond(200, "content-type", "application/json")
		x.End()
		synctest.Wait()
		h.router.newCalls()
		o.Respond(200, "content-type", "application/json")
		o.Chunk([]byte(`{"id":"resp_1"}`), true)
		synctest.Wait()
		if diff := cmp.Diff([]string{fmt.Sprintf("worker %d gave %q", chosen.Worker.ID, "resp_1")}, h.router.newCalls()); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
	})
}
