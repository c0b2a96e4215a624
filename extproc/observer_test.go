// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
)

// Envoy cuts a response into pieces where it likes. The first token is noticed
// with the piece that has the first byte of the first event's data.
func TestFirstEventIsFoundHoweverItIsCut(t *testing.T) {
	const before = ": a comment with data: in it\r\n\r\nevent: start\nretry: 10\ndata:\n\ndatas: no\n\nid\ndata: "
	const stream = before + "{\"choices\":[]}\n\n"
	for _, eol := range []string{"\n", "\r\n", "\r"} {
		text := strings.ReplaceAll(strings.ReplaceAll(stream, "\r\n", "\n"), "\n", eol)
		first := strings.Index(text, "{")
		for cut := range len(text) {
			if got := pieces(text[:cut], text[cut:]); got != (cut <= first) {
				// Found in the second piece exactly if the first ends before it.
				t.Errorf("eol %q, cut at %d: found in the second piece: %v", eol, cut, got)
			}
		}
		if n := bytewise(text); n != first {
			t.Errorf("eol %q: byte by byte found at %d, want %d", eol, n, first)
		}
	}
}

// A stream of /v1/responses begins with events that say nothing but that it begins.
func TestEarlyEventsAreNoTokens(t *testing.T) {
	const before = "event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent:response.in_progress\nid: 1\ndata: {}\ndata: {}\n\n" +
		": response.queued\n\nevent: response.queued\ndata: {}\n\nevent: response.output_item.added_and_more_than_is_kept\ndata:   "
	for _, eol := range []string{"\n", "\r\n", "\r"} {
		text := strings.ReplaceAll(before+"{\"x\":1}\n\n", "\n", eol)
		first := strings.Index(text, "{\"x")
		if n := bytewise(text); n != first {
			t.Errorf("eol %q: byte by byte found at %d, want %d", eol, n, first)
		}
		for cut := range len(text) {
			if got := pieces(text[:cut], text[cut:]); got != (cut <= first) {
				t.Errorf("eol %q, cut at %d: found in the second piece: %v", eol, cut, got)
			}
		}
	}
	// Without names, as chats have it, or with others, the first one counts.
	for _, text := range []string{"data:" + strings.Repeat(" ", 100) + "x\n", "event: response\ndata: x\n", "event: response.created\n\ndata: x\n", "event: response.created.x\ndata: x\n"} {
		if n, want := bytewise(text), strings.LastIndex(text, "x\n"); n != want {
			t.Errorf("%q: found at %d, want %d", text, n, want)
		}
	}
}

// pieces reports whether the second piece, and not the first, has the event.
func pieces(a, b string) bool {
	f := extproc.NewFirstEvent()
	return !f([]byte(a)) && f([]byte(b))
}

func bytewise(text string) int {
	f := extproc.NewFirstEvent()
	for i := range len(text) {
		if f([]byte(text[i : i+1])) {
			return i
		}
	}
	return -1
}

// A line may be of any length; nothing of it is kept.
func TestLongLines(t *testing.T) {
	f := extproc.NewFirstEvent()
	comment := append([]byte(": "), make([]byte, 1<<20)...)
	if slices.ContainsFunc([][]byte{comment, comment, []byte("data: x\n")}, f) {
		t.Error("a comment was taken for an event")
	}
	if f([]byte("\ndata:")) || !f(slices.Repeat([]byte{'x'}, 1<<20)) {
		t.Error("a long event was not found")
	}
}

// The two streams of a request, as Envoy plays them at once.
func TestObserverMarksOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		x := h.Do(chat(hello))
		x.Respond(200, "content-type", "text/event-stream")
		o := x.Observe()
		o.Respond(200, "content-type", "text/event-stream")
		for _, c := range "data: {}\n\ndata: {}\n\n" {
			o.Chunk([]byte(string(c)), false) // Envoy's copies may come after we left
		}
		synctest.Wait()
		if !o.Ended() {
			t.Error("the observer stays after the first token")
		}
		x.End()
		want := []string{`best worker for model "m", salt ""`, "first token by observer", "free"}
		if diff := cmp.Diff(want, h.router.newCalls()); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
	})
}

// A client may leave between the headers of a stream and its first token: the worker may hang, and its load stays. The
// observer sees that some time after the main stream has ended.
func TestClientLeavesAfterTheHeaders(t *testing.T) {
	const comment, event = ": ping\n\n", "data: {}\n\n"
	for name, c := range map[string]struct {
		after func(o *envoytest.Observer)
		want  []string // after the end of the main stream
	}{
		"no token":            {func(o *envoytest.Observer) { o.End() }, []string{"leave"}},
		"a comment":           {func(o *envoytest.Observer) { o.Chunk([]byte(comment), false); o.End() }, []string{"leave"}},
		"a token on its way":  {func(o *envoytest.Observer) { o.Chunk([]byte(event), true) }, []string{"first token by observer", "free"}},
		"an end on its way":   {func(o *envoytest.Observer) { o.Chunk(nil, true) }, []string{"free"}},
		"the observer leaves": {nil, []string{"free"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, extproc.Config{})
			x := h.Do(chat(hello))
			x.Respond(200, "content-type", "text/event-stream")
			o := x.Observe()
			o.Respond(200, "content-type", "text/event-stream")
			synctest.Wait()
			h.router.newCalls()
			x.End()
			synctest.Wait()
			if got := h.router.newCalls(); len(got) > 0 || h.router.taken() != 1 {
				t.Errorf("%s: before the observer's end: %v", name, got)
			}
			if c.after == nil {
				h.server.Drain()
			} else {
				c.after(o)
			}
			synctest.Wait()
			if diff := cmp.Diff(c.want, h.router.newCalls()); diff != "" {
				t.Errorf("%s: calls (-want +got):\n%s", name, diff)
			}
			o.End()
		})
	}
}

// The same if the response's body passes through the main stream, or if no observer can report the token.
func TestClientLeavesAfterTheHeadersWithoutObserver(t *testing.T) {
	const stream = "text/event-stream"
	for name, c := range map[string]struct {
		conf   extproc.Config
		duplex bool
		kind   string
		chunk  string
		last   bool
		want   string
	}{
		"no body yet":         {duplex: true, kind: stream, want: "leave"},
		"a comment":           {duplex: true, kind: stream, chunk: ": ping\n\n", want: "leave"},
		"a token":             {duplex: true, kind: stream, chunk: "data: {}\n\n", want: "free"},
		"the end":             {duplex: true, kind: stream, last: true, want: "free"},
		"no stream":           {duplex: true, kind: "text/html", want: "free"},
		"nobody observes":     {kind: stream, want: "free"},
		"the headers suffice": {conf: extproc.Config{FirstToken: extproc.FirstTokenResponseHeaders}, kind: stream, want: "free"},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, c.conf)
			req := chat(hello)
			if c.duplex {
				req.Mode = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
			}
			x := h.Do(req)
			x.Respond(200, "content-type", c.kind)
			if c.chunk != "" || c.last {
				x.Stray(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
					ResponseBody: &extprocv3.HttpBody{Body: []byte(c.chunk), EndOfStream: c.last},
				}})
				synctest.Wait()
			}
			x.Reset()
			synctest.Wait()
			if calls := h.router.newCalls(); calls[len(calls)-1] != c.want {
				t.Errorf("%s: calls %v, want %s", name, calls, c.want)
			}
		})
	}
}

// Streams without an id are of requests that were not routed; those with the id of
// another router are its business.
func TestObserverOfOthersLeavesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		for id, end := range map[string]string{
			"-": "unrouted", "": "unrouted",
			"0000000000000def-00": "elsewhere", "0000000000000abc": "elsewhere", "x": "elsewhere",
		} {
			before := h.count(t, "kvroute.extproc.stream.ends", "observer", end)
			o := h.Observe(id)
			synctest.Wait()
			if !o.Ended() {
				t.Errorf("id %q: the observer stays", id)
			}
			if h.count(t, "kvroute.extproc.stream.ends", "observer", end) != before+1 {
				t.Errorf("id %q: not counted as %s", id, end)
			}
		}
		if calls := h.router.newCalls(); len(calls) != 0 {
			t.Errorf("the router was asked: %q", calls)
		}
	})
}

// Where replicas tell each other of their requests, the first token of another one's is
// told to the router.
func TestObserverOfAReplicasRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{Synced: true})
		o := h.Observe("0000000000000def-00")
		o.Respond(200, "content-type", "text/event-stream")
		o.Chunk([]byte("data: {}\n\n"), false)
		synctest.Wait()
		if !o.Ended() {
			t.Error("the observer stays after the first token")
		}
		if diff := cmp.Diff([]string{"first token by observer"}, h.router.newCalls()); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
	})
}

// An observer that nothing happens on ends with its response, or with us.
func TestObserverEndsWithTheResponse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		x := h.Do(chat(hello))
		o := x.Observe()
		o.Respond(200, "content-type", "text/event-stream")
		synctest.Wait()
		if o.Ended() {
			t.Error("the observer left before the first token")
		}
		o.End()
		x.End()
		synctest.Wait()
		if n := h.count(t, "kvroute.extproc.stream.ends", "observer", "ended"); n != 1 {
			t.Errorf("%d counted, want 1", n)
		}
		if n := h.count(t, "kvroute.extproc.streams"); n != 0 {
			t.Errorf("%d streams are counted as open", n)
		}
	})
}

// Where Envoy hands over the response's chunks, the main stream sees the first token
// itself: in an event with content, once. A stream of lines and an encoded one show it, too.
func TestTheMainStreamSeesTheFirstToken(t *testing.T) {
	for name, c := range map[string]struct {
		header []string
		chunks []string
		want   []string
	}{
		"events":       {[]string{"content-type", "text/event-stream"}, []string{": wait\n\nda", "ta: {}\n", "\ndata: {}\n\n"}, []string{"first token by observer"}},
		"no content":   {[]string{"content-type", "text/event-stream"}, []string{": data: x\n\n", "data:\n\n"}, nil},
		"a ping":       {[]string{"content-type", "text/event-stream"}, []string{"event: ping\ndata: {\"type\": \"ping\"}\n\n", "event: message_start\ndata: {}\n\n"}, []string{"first token by observer"}},
		"only a ping":  {[]string{"content-type", "text/event-stream"}, []string{"event: ping\ndata: {\"type\": \"ping\"}\n\n"}, nil},
		"lines":        {[]string{"content-type", "application/x-ndjson; charset=utf-8"}, []string{"\n", "{\"token\": 1}\n"}, []string{"first token by observer"}},
		"no line":      {[]string{"content-type", "application/x-ndjson"}, []string{"\n", " \n"}, nil},
		"encoded":      {[]string{"content-type", "text/event-stream", "content-encoding", "gzip"}, []string{"\x1f\x8b\b\x00\x00\x00\x00\x00\x00\xff", "\xaaVJ,(\xc8\x0e\xc8\x0e"}, []string{"first token by observer"}},
		"encoder only": {[]string{"content-type", "text/event-stream", "content-encoding", "gzip"}, []string{"\x1f\x8b\b\x00\x00\x00\x00\x00\x00\xff"}, nil},
		"text":         {[]string{"content-type", "text/plain; charset=utf-8"}, []string{"\n", " token"}, []string{"first token by observer"}},
		"empty text":   {[]string{"content-type", "text/plain"}, []string{" ", "\n", ""}, nil},
		"not a stream": {[]string{"content-type", "text/html"}, []string{"data: {}\n\n", ""}, nil},
		"whole text":   {[]string{"content-type", "text/plain", "content-length", "7"}, []string{"a token"}, nil},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, extproc.Config{})
			x := h.Do(streamed(false))
			x.Respond(200, c.header...)
			h.router.newCalls()
			if back := x.Answer(c.chunks...); back != strings.Join(c.chunks, "") {
				t.Errorf("%s: %q came back", name, back)
			}
			if diff := cmp.Diff(c.want, h.router.newCalls()); diff != "" {
				t.Errorf("%s: calls (-want +got):\n%s", name, diff)
			}
			x.End()
		})
	}
}

// Envoy Gateway can add no metadata to a stream: such an observer shows itself by its
// messages, and finds the request by a header that the main stream has set.
func TestObserverWithoutMetadata(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{ModeOverride: true})
		x := h.Do(chat(hello))
		seen := x.Respond(200, "content-type", "text/event-stream", "x-dynamo-request-id", "of the worker")
		observer := func() *envoytest.Exchange {
			o := h.Begin(envoytest.Request{})
			var m corev3.HeaderMap
			for name, value := range seen {
				m.Headers = append(m.Headers, &corev3.HeaderValue{Key: name, RawValue: []byte(value)})
			}
			o.Stray(&extprocv3.ProcessingRequest{ObservabilityMode: true, Request: &extprocv3.ProcessingRequest_ResponseHeaders{
				ResponseHeaders: &extprocv3.HttpHeaders{Headers: &m},
			}})
			return o
		}
		o := observer()
		synctest.Wait()
		if main, observers := h.count(t, "kvroute.extproc.streams", "main"), h.count(t, "kvroute.extproc.streams", "observer"); o.Ended() || main != 1 || observers != 1 {
			t.Errorf("%d main streams and %d observers are open, want one each", main, observers)
		}
		o.Stray(&extprocv3.ProcessingRequest{ObservabilityMode: true, Request: &extprocv3.ProcessingRequest_ResponseBody{
			ResponseBody: &extprocv3.HttpBody{Body: []byte("data: {}\n\n")},
		}})
		synctest.Wait()
		if !o.Ended() || h.count(t, "kvroute.extproc.stream.ends", "observer", "first_token") != 1 {
			t.Error("the observer does not end with the first token")
		}
		late := observer()
		synctest.Wait()
		h.server.Drain()
		synctest.Wait()
		if !late.Ended() || h.count(t, "kvroute.extproc.stream.ends", "observer", "draining") != 1 {
			t.Error("an observer does not end with the drain")
		}
		x.End()
		if diff := cmp.Diff([]string{`best worker for model "m", salt ""`, "first token by observer", "free"}, h.router.newCalls()); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
	})
}
