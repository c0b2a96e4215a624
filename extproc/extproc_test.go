// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
	promptchat "github.com/kvroute/kvroute/tokenizer/chat"
)

// The router that cmd passes in.
var _ extproc.Router = (*router.Router)(nil)

// The router gets the spans of the body as they stand there.
func TestRouterIsAskedForWhatTheBodySays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		for _, c := range []struct {
			path, body string
			want       router.Request
		}{
			{
				"/v1/chat/completions?x=1", `{"tools":[{"a": 1}],"model":"m/1", "messages" : [ {"content":"h\u00e9"} ],"stream":true}`,
				router.Request{Model: "m/1", Prompt: router.Prompt{Path: promptchat.PathChat, Messages: []byte(`[ {"content":"h\u00e9"} ]`), Tools: []byte(`[{"a": 1}]`)}},
			},
			{
				"/v1/completions", `{"model":"m","prompt":["a","b"],"cache_salt":"s"}`,
				router.Request{Model: "m", Prompt: router.Prompt{Path: promptchat.PathCompletions, Prompt: []byte(`["a","b"]`)}, Salt: "s", Unseen: true},
			},
		} {
			x := h.Do(envoytest.Request{Path: c.path, Body: []byte(c.body)})
			got := h.router.asked[len(h.router.asked)-1]
			if got.ID != x.Header["x-dynamo-request-id"] {
				t.Errorf("asked for id %q, told Envoy %q", got.ID, x.Header["x-dynamo-request-id"])
			}
			if !got.Owned || got.Waiting == nil || !got.WantSecond {
				t.Errorf("owned: %v, told when it has to wait: %v, second choice wanted: %v", got.Owned, got.Waiting != nil, got.WantSecond)
			}
			if a := got.Arrival; a.Began.IsZero() || a.BodyAt.Before(a.Began) {
				t.Errorf("arrival %+v", a)
			}
			got.ID, got.Owned, got.Waiting, got.WantSecond, got.DecisionTimeout, got.QueueWait, got.Arrival = "", false, nil, false, 0, 0, router.Arrival{}
			if got.Labels.Operation == "" {
				t.Error("the request's operation is unknown")
			}
			got.Labels.Operation, got.Prefix = "", 0
			c.want.Prompt.Body = []byte(c.body)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", c.path, diff)
			}
			x.End()
		}
	})
}

// Each of many requests at a time gets its own worker, and none leaves a slot.
func TestManyStreamsAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{DecisionHeaders: true})
		h.router.will(func(_ context.Context, req router.Request) (router.Decision, error) {
			var n byte
			if _, err := fmt.Sscan(req.Model, &n); err != nil {
				return router.Decision{}, err
			}
			return router.Decision{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, n}), 80), Worker: router.Worker{ID: uint64(n)}}, nil
		})
		var all sync.WaitGroup
		for n := range 200 {
			all.Go(func() {
				x := h.Do(chat(fmt.Sprintf(`{"model":"%d","messages":[%q]}`, n, strings.Repeat("x", 10_000))))
				if got, want := x.Header["x-dynamo-worker"], fmt.Sprintf("10.0.0.%d:80", n); got != want {
					t.Errorf("routed to %q, want %q", got, want)
				}
				o := x.Observe()
				o.Respond(200, "content-type", "text/event-stream")
				o.Chunk([]byte("data: 1\n\n"), false)
				if got := x.Respond(200)["x-dynamo-worker-instance-id"]; got != fmt.Sprint(n) {
					t.Errorf("the client is told worker %q, want %d", got, n)
				}
				if n%2 == 0 {
					x.End()
				} else {
					x.Reset()
				}
			})
		}
		all.Wait()
		synctest.Wait()
		if got := h.router.taken(); got != 0 {
			t.Errorf("%d slots are left", got)
		}
		if n := h.count(t, "kvroute.extproc.stream.ends", "main", "responding"); n != 200 {
			t.Errorf("%d streams counted, want 200", n)
		}
	})
}

// The same over a real socket, with a body of the largest size and one above it:
// no bubble, no buffer in memory.
func TestLoopback(t *testing.T) {
	const limit = 4 << 20
	h := newUnserved(t, extproc.Config{MaxBodyBytes: limit})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() { _ = h.grpc.Serve(l) }) // ends with Stop
	t.Cleanup(func() {
		h.grpc.Stop()
		serving.Wait()
	})
	link := envoytest.Dial(t, l.Addr().String())

	body := func(n int) string {
		const around = len(`{"model":"m","messages":[""]}`)
		return `{"model":"m","messages":["` + strings.Repeat("x", n-around) + `"]}`
	}
	x := link.Do(chat(body(limit)))
	if got := x.Header["x-dynamo-worker"]; got != chosen.Address.String() {
		t.Errorf("the largest body: routed to %q, want %v", got, chosen.Address)
	}
	x.Respond(200)
	x.End()
	if h.router.taken() != 0 {
		t.Error("a slot is left")
	}
	for _, size := range []int{limit + 1, 2 * limit} {
		r := chat(body(size))
		r.Unsized = true
		if x := link.Do(r); x.Refusal == nil || x.Refusal.Status != 413 {
			t.Errorf("a body of %d bytes: got %+v, want 413", size, x.Refusal)
		}
	}
}

func TestNewRefusesBadSettings(t *testing.T) {
	for _, c := range []struct {
		conf extproc.Config
		want string
	}{
		{extproc.Config{MaxBodyBytes: -1}, "extproc: MaxBodyBytes is -1"},
		{extproc.Config{DecisionTimeout: -1}, "extproc: DecisionTimeout is -1"},
		{extproc.Config{QueueWait: -1}, "extproc: QueueWait is -1"},
		{extproc.Config{OverloadStatus: 500}, "extproc: OverloadStatus is 500, want 429, 503 or 529"},
		{extproc.Config{MaxStreams: -5}, "extproc: MaxStreams is -5"},
		{extproc.Config{FirstToken: "maybe"}, `extproc: FirstToken is "maybe", want "observer" or "response-headers"`},
	} {
		if _, err := extproc.New(c.conf, newRouter(t)); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("got %v, want %s…", err, c.want)
		}
	}
	if _, err := extproc.New(extproc.Config{}, nil); err == nil {
		t.Error("a server without a router was made")
	}
	if _, err := extproc.New(extproc.Config{}, newRouter(t)); err != nil {
		t.Errorf("the zero Config: %v", err)
	}
}

// Filters that cannot be configured to stay to the end of the response are asked to.
func TestModeOverride(t *testing.T) {
	for _, on := range []bool{false, true} {
		h := newHarness(t, extproc.Config{ModeOverride: on})
		for name, r := range map[string]envoytest.Request{
			"a chat": chat(hello), "without a body": {Path: "/v1/chat/completions"}, "of others": {Method: "GET", Path: "/v1/models"},
			"cut off": {Path: "/v1/chat/completions", Body: []byte(hello), Mode: filterv3.ProcessingMode_BUFFERED_PARTIAL},
		} {
			x := h.Do(r)
			if (x.Mode != nil) != (on && x.Refusal == nil) {
				t.Errorf("%s: asked for %v", name, x.Mode)
			}
			if m := x.Mode; m != nil && (m.GetResponseHeaderMode() != filterv3.ProcessingMode_SEND || m.GetResponseTrailerMode() != filterv3.ProcessingMode_SEND ||
				m.GetRequestBodyMode() != max(r.Mode, filterv3.ProcessingMode_BUFFERED)) {
				t.Errorf("%s: asked for %v", name, m)
			}
			x.End()
		}
		for _, mode := range []filterv3.ProcessingMode_BodySendMode{filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED} {
			r := chat(hello)
			r.Mode = mode
			if x := h.Do(r); x.Mode != nil {
				t.Errorf("%v: asked for %v", mode, x.Mode)
			} else {
				x.End()
			}
		}
	}
}
