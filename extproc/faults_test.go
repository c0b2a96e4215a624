// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// However and whenever a request ends, its slot is freed once, at once.
func TestSlotIsFreedOnAnyEnd(t *testing.T) {
	steps := []struct {
		name string
		play func(h *harness) *envoytest.Exchange
		want int // slots taken before the end
	}{
		{"before the headers", func(h *harness) *envoytest.Exchange { return h.Begin(chat(hello)) }, 0},
		{"before the body", func(h *harness) *envoytest.Exchange {
			x := h.Begin(chat(hello))
			x.SendHeaders()
			x.Settle()
			return x
		}, 0},
		{"in the decision", func(h *harness) *envoytest.Exchange {
			h.router.will(until(nil))
			x := h.Begin(chat(hello))
			x.SendHeaders()
			x.Settle()
			x.SendBody()
			return x
		}, 1},
		{"in the queue", func(h *harness) *envoytest.Exchange {
			h.router.will(func(ctx context.Context, req router.Request) (router.Decision, error) {
				req.Waiting(false)
				return until(nil)(ctx, req)
			})
			x := h.Begin(chat(hello))
			x.SendHeaders()
			x.Settle()
			x.SendBody()
			return x
		}, 1},
		{"in prefill", func(h *harness) *envoytest.Exchange { return h.Do(chat(hello)) }, 1},
		{"in the response", func(h *harness) *envoytest.Exchange {
			x := h.Do(chat(hello))
			x.Respond(200)
			return x
		}, 1},
		{"after the trailers", func(h *harness) *envoytest.Exchange {
			x := h.Do(chat(hello))
			x.Respond(200)
			x.RespondTrailers()
			return x
		}, 1},
	}
	ends := map[string]func(h *harness, x *envoytest.Exchange){
		"graceful close": func(_ *harness, x *envoytest.Exchange) { x.End() },
		"reset":          func(_ *harness, x *envoytest.Exchange) { x.Reset() },
		"Envoy's death":  func(h *harness, _ *envoytest.Exchange) { h.Kill() },
	}
	for _, step := range steps {
		for how, end := range ends {
			if how == "graceful close" && step.name == "in the decision" {
				continue // only a receiver would notice it; the decision's time is short
			}
			t.Run(how+" "+step.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := newHarness(t, extproc.Config{})
					x := step.play(h)
					synctest.Wait()
					if got := h.router.taken(); got != step.want {
						t.Errorf("%d slots taken before the end, want %d", got, step.want)
					}
					start := time.Now()
					end(h, x)
					synctest.Wait()
					if got := h.router.taken(); got != 0 {
						t.Errorf("%d slots taken after the end", got)
					}
					if d := time.Since(start); d != 0 {
						t.Errorf("the end was noticed after %v", d)
					}
					if n := h.count(t, "kvroute.extproc.fail_open"); n != 0 {
						t.Errorf("%d requests failed open, want none: nobody waits for this one", n)
					}
					if n := h.count(t, "kvroute.extproc.streams"); n != 0 {
						t.Errorf("%d streams are counted as open", n)
					}
				})
			})
		}
	}
}

// The decision has a budget below Envoy's own; the client waits no longer.
func TestDecisionBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{DecisionTimeout: 300 * time.Millisecond})
		h.router.will(until(nil))
		start := time.Now()
		x := h.Do(chat(hello))
		if got := time.Since(start); got != 300*time.Millisecond || x.Left || x.Rerouted {
			t.Errorf("answered after %v, stream left: %v, routed anew: %v; want an empty answer after 300ms", got, x.Left, x.Rerouted)
		}
		if n := h.count(t, "kvroute.extproc.fail_open", "budget"); n != 1 {
			t.Errorf("%d requests counted, want 1", n)
		}
		x.End()
	})
}

// A worker without an address would leave a header that Envoy cannot use.
func TestWorkerWithoutAddressFailsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		h.router.will(func(context.Context, router.Request) (router.Decision, error) {
			return router.Decision{Address: netip.AddrPort{}}, nil
		})
		x := h.Do(chat(hello))
		if x.Rerouted || x.Left || h.router.taken() != 0 {
			t.Errorf("routed anew: %v, left: %v, slots: %d; want an empty answer and no slot", x.Rerouted, x.Left, h.router.taken())
		}
		x.End()
	})
}

// However a worker got past the registry: requests leave for the worker networks
// only.
func TestOnlyWorkerNetworksAreRoutedTo(t *testing.T) {
	for address, want := range map[string]bool{"10.0.0.7:8000": true, "[::ffff:10.0.0.7]:8000": true, "10.0.0.7:8001": false, "10.1.0.7:8000": false, "[::1]:80": false} {
		synctest.Test(t, func(t *testing.T) {
			networks, err := reach.Parse("10.0.0.0/24:8000")
			if err != nil {
				t.Fatal(err)
			}
			h := newHarness(t, extproc.Config{Networks: networks})
			h.router.will(func(context.Context, router.Request) (router.Decision, error) {
				return router.Decision{Address: netip.MustParseAddrPort(address)}, nil
			})
			x := h.Do(chat(hello))
			if x.Rerouted != want || h.router.taken() > 0 && !want {
				t.Errorf("%s: routed there: %v, slots: %d; want %v", address, x.Rerouted, h.router.taken(), want)
			}
			x.End()
		})
	}
}

// After a panic no unchecked body reaches a worker: it loses its fields that steer, or is refused.
func TestAPanicPassesNoUncheckedBody(t *testing.T) {
	broken := func(context.Context, router.Request) (router.Decision, error) { panic("a fault in the router") }
	for _, mode := range []filterv3.ProcessingMode_BodySendMode{filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED} {
		h := newHarness(t, extproc.Config{})
		h.router.will(broken)
		r := chat(steers)
		r.Mode, r.Chunk = mode, 50
		switch x := h.Do(r); {
		case mode == filterv3.ProcessingMode_STREAMED && (x.Refusal == nil || x.Refusal.Status != 400), mode != filterv3.ProcessingMode_STREAMED && string(x.Body) != cleaned:
			t.Errorf("%v: refusal %+v, the worker gets %s", mode, x.Refusal, x.Body)
		default:
			x.End()
		}
		if n := h.count(t, "kvroute.extproc.fail_open", "panic"); n != 1 {
			t.Errorf("%v: %d panics counted, want 1", mode, n)
		}
		h.router.will(nil)
	}
	// A cache that is not made panics.
	h := newHarness(t, extproc.Config{Bodies: openai.Reader{Known: new(tokenizer.Cache)}})
	if x := h.Do(chat(steers)); x.Refusal == nil || x.Refusal.Status != 503 || !strings.Contains(x.Refusal.Body, "router_failed") {
		t.Errorf("the check fails: refusal %+v", x.Refusal)
	}
}

// A panic in one request ends neither the server nor other streams.
func TestPanicHitsOneStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		other := h.Do(chat(hello))
		h.router.will(func(context.Context, router.Request) (router.Decision, error) { panic(strings.Repeat("x", 10_000)) })
		if x := h.Do(chat(hello)); !x.Left {
			t.Error("the stream of the panic goes on")
		}
		h.router.will(nil)
		if x := h.Do(chat(hello)); !x.Rerouted {
			t.Error("the next request was not routed")
		} else {
			x.End()
		}
		other.Respond(200)
		other.End()
		if n := h.count(t, "kvroute.extproc.fail_open", "panic"); n != 1 {
			t.Errorf("%d panics counted, want 1", n)
		}
		if log := h.log.String(); !strings.Contains(log, "level=ERROR") || strings.Contains(log, strings.Repeat("x", 300)) {
			t.Errorf("want one line with a bounded text, got %s", log)
		}
	})
}

// A fault that every request meets is logged once in a while, and then says how
// many there were.
func TestFailOpenIsLoggedAtABoundedRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		h.router.will(errorAfter(0, errOther))
		for range 2 {
			for range 50 {
				h.Do(chat(hello)).End()
			}
			time.Sleep(10 * time.Second)
		}
		log := h.log.String()
		if n := strings.Count(log, "\n"); n != 2 || !strings.Contains(log, "unlogged=0") || !strings.Contains(log, "unlogged=49") {
			t.Errorf("want two lines, the second with unlogged=49, got %d:\n%s", n, log)
		}
		if strings.Contains(log, "hello") {
			t.Error("the prompt is in the log")
		}
		if n := h.count(t, "kvroute.extproc.fail_open", "internal"); n != 100 {
			t.Errorf("%d requests counted, want 100", n)
		}
	})
}

// Above the bound requests go unrouted, which is better than not at all.
func TestStreamsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{MaxStreams: 2})
		a, b := h.Do(chat(hello)), h.Do(chat(hello))
		if x := h.Do(chat(hello)); !x.Left {
			t.Error("the third stream was served")
		}
		oa, ob := a.Observe(), b.Observe() // have a bound of their own
		synctest.Wait()
		oc := a.Observe()
		synctest.Wait()
		if oa.Ended() || ob.Ended() || !oc.Ended() {
			t.Errorf("observers ended: %v %v %v, want only the third", oa.Ended(), ob.Ended(), oc.Ended())
		}
		a.End()
		synctest.Wait()
		c := h.Do(chat(hello))
		if !c.Rerouted {
			t.Error("a stream was refused though another had ended")
		}
		b.End()
		c.End()
		oa.End()
		ob.End()
		if n := h.count(t, "kvroute.extproc.fail_open", "limit"); n != 1 {
			t.Errorf("%d requests counted, want 1", n)
		}
	})
}

// Message orders that no Envoy of ours sends. None may leave it waiting for an
// answer, and none may crash us.
func TestOddMessagesEndTheStream(t *testing.T) {
	headers := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{}}}
	for name, m := range map[string]*extprocv3.ProcessingRequest{
		"empty":            {},
		"body first":       {Request: &extprocv3.ProcessingRequest_RequestBody{}},
		"trailers first":   {Request: &extprocv3.ProcessingRequest_RequestTrailers{}},
		"response first":   {Request: &extprocv3.ProcessingRequest_ResponseHeaders{}},
		"response's body":  {Request: &extprocv3.ProcessingRequest_ResponseBody{}},
		"response's end":   {Request: &extprocv3.ProcessingRequest_ResponseTrailers{}},
		"headers of twice": headers,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, extproc.Config{})
				x := h.Begin(chat(hello))
				if m == headers {
					x.Send(m)
					x.Settle()
				}
				x.Send(m)
				if start := time.Now(); x.Settle() || !x.Left || time.Since(start) != 0 {
					t.Error("the stream was not left at once")
				}
			})
		})
	}
}

// An Envoy that sends the response's body, or headers in the older field, is
// answered as well.
func TestOtherConfigurationsOfEnvoy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{FirstToken: extproc.FirstTokenResponseHeaders})
		x := h.Begin(chat(hello))
		x.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":path", Value: "/v1/chat/completions"}, {Key: ":method", Value: "POST"}}},
		}}})
		x.Settle()
		if x.SendBody(); !x.Settle() || !x.Rerouted {
			t.Error("the request was not routed")
		}
		x.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{}}})
		if !x.Settle() {
			t.Error("headers without a status were not answered")
		}
		for range 3 {
			x.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte("x")}}})
			if !x.Settle() {
				t.Error("a piece of the response was not answered")
			}
		}
		o := x.Observe()
		o.Respond(200) // no content-type: no events
		synctest.Wait()
		if !o.Ended() {
			t.Error("the observer stays")
		}
		x.End()
	})
}

// A request may end by trailers without a body.
func TestTrailersWithoutBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		x := h.Begin(chat(""))
		x.SendHeaders()
		x.Settle()
		x.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}})
		if x.Settle() || x.Refusal == nil || x.Refusal.Status != 400 {
			t.Errorf("got %+v, want status 400", x.Refusal)
		}
	})
}

// Whatever a client says about routing, it neither steers its request nor speaks
// for another's, not even where the request fails open.
func TestClientCannotSteer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		forged := chat(hello)
		forged.Header = []string{"x-dynamo-worker", "169.254.169.254:80", "x-dynamo-worker-fallback", "169.254.169.254:80", "x-dynamo-request-id", "a"}

		x := h.Do(forged)
		if got := x.Header["x-dynamo-worker"]; got != chosen.Address.String() {
			t.Errorf("routed to %q, want %v", got, chosen.Address)
		}
		y := h.Do(forged)
		if a, b := x.Header["x-dynamo-request-id"], y.Header["x-dynamo-request-id"]; a == b || !requestID.MatchString(a) {
			t.Errorf("request ids %q and %q, want two of our own", a, b)
		}
		x.End()
		y.End()

		h.router.will(errorAfter(0, errOther))
		other := forged
		other.Path = "/v1/embeddings"
		for _, r := range []envoytest.Request{forged, other} {
			x := h.Do(r)
			for name := range x.Header {
				if strings.HasPrefix(name, "x-dynamo-") {
					t.Errorf("%s: the client's %s is still there", r.Path, name)
				}
			}
			if !x.Rerouted {
				t.Errorf("%s: the route by the client's header still stands", r.Path)
			}
			x.End()
		}
	})
}

// Refusals are for the client's mistakes, and name the model it asked for.
func TestLongModelNamesAreNotRepeatedInFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		h.router.will(errorAfter(0, router.ErrUnknownModel))
		x := h.Do(chat(fmt.Sprintf(`{"model":%q,"messages":[1]}`, strings.Repeat("é", 10_000))))
		if x.Refusal == nil || x.Refusal.Status != 404 || len(x.Refusal.Body) > 1000 {
			t.Errorf("got %+v, want a short 404", x.Refusal)
		}
	})
}
