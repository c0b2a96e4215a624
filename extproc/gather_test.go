// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
)

func part(body string, last bool) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
		RequestBody: &extprocv3.HttpBody{Body: []byte(body), EndOfStream: last},
	}}
}

func streamed(ahead bool) envoytest.Request {
	r := chat(hello)
	r.Mode, r.Ahead = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, false
	if ahead {
		r.Mode, r.Ahead = filterv3.ProcessingMode_STREAMED, true
	}
	return r
}

// Where Envoy waits for the answer to the headers, a client that is slow with its
// body is served without a decision before Envoy's patience ends.
func TestASlowBodyFailsOpenInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{DecisionTimeout: time.Second})
		x := h.Begin(streamed(true))
		x.SendHeaders()
		x.Send(part(hello[:5], false))
		start := time.Now()
		for _, what := range []string{"headers", "chunk"} {
			if !x.Settle() {
				t.Fatalf("the %s were not answered", what)
			}
		}
		if took := time.Since(start); took != time.Second || x.Rerouted {
			t.Errorf("answered after %v, rerouted: %v; want the decision's time and no", took, x.Rerouted)
		}
		x.Send(part(hello[5:], true))
		if !x.Settle() {
			t.Error("the rest of the body was not answered")
		}
		x.End()
		if n := h.count(t, "kvroute.extproc.fail_open", "budget"); n != 1 {
			t.Errorf("%d fail open for the budget, want 1", n)
		}
	})
}

// In full duplex the parts of a request and of its response are with us, so a drain
// gives them back, and what comes behind them, and leaves at the end.
func TestADrainGivesBackWhatItHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		x := h.Begin(streamed(false))
		x.SendHeaders()
		x.Stray(part(hello[:5], false))
		synctest.Wait()
		h.server.Drain()
		x.Settle()
		x.Settle()
		if string(x.Body) != hello[:5] || x.Ended() {
			t.Errorf("%q came back, ended: %v; want what was held, and no", x.Body, x.Ended())
		}
		x.Stray(part(hello[5:10], false))
		x.Settle()
		x.Stray(part(hello[10:], true))
		x.Settle()
		synctest.Wait()
		if string(x.Body) != hello || x.Ended() {
			t.Errorf("%q came back, ended: %v; want all of it, and no", x.Body, x.Ended())
		}
		x.Respond(200, "content-type", "text/event-stream")
		if back := x.Answer("data: 1\n\n", "data: 2\n\n"); back != "data: 1\n\ndata: 2\n\n" {
			t.Errorf("of the response came back %q", back)
		}
		x.End()
	})
}

// A body that comes in chunks has the same limit.
func TestALargeBodyInChunksIsRefused(t *testing.T) {
	for _, ahead := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, extproc.Config{MaxBodyBytes: 1000})
			x := h.Begin(streamed(ahead))
			x.SendHeaders()
			for range 3 {
				x.Stray(part(string(bytes.Repeat([]byte(" "), 400)), false))
			}
			x.Settle()
			if x.Refusal == nil || x.Refusal.Status != 413 {
				t.Errorf("ahead %v: refusal %+v, want status 413", ahead, x.Refusal)
			}
		})
	}
}

// A refusal is the last answer, however long Envoy keeps the stream.
func TestARefusalIsTheLastAnswer(t *testing.T) {
	for name, chunk := range map[string]*extprocv3.ProcessingRequest{
		"too large": part(string(bytes.Repeat([]byte(" "), 1200)), false),
		"no JSON":   part("?", true),
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, extproc.Config{MaxBodyBytes: 1000, DecisionTimeout: time.Second})
			x := h.Begin(streamed(true))
			x.SendHeaders()
			x.Stray(chunk)
			time.Sleep(3 * time.Second)
			if n := h.count(t, "kvroute.extproc.fail_open", "budget"); n != 0 {
				t.Errorf("%s: %d requests failed open behind their refusal", name, n)
			}
			x.Settle()
			if x.Refusal == nil {
				t.Errorf("%s: not refused", name)
			}
		})
	}
}

// A client that leaves while its body comes has taken nothing.
func TestLeavingWhileGatheringBooksNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		x := h.Begin(streamed(false))
		x.SendHeaders()
		x.Stray(part(hello[:5], false))
		synctest.Wait()
		x.End()
		synctest.Wait()
		if calls := h.router.newCalls(); len(calls) != 0 || !x.Ended() {
			t.Errorf("the router was called: %v; ended: %v", calls, x.Ended())
		}
	})
}

// A body of any size comes back in parts that Envoy takes.
func TestALargeBodyComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		r := chat(`{"model":"m","messages":[{"role":"user","content":"` + string(bytes.Repeat([]byte("x"), 300_000)) + `"}]}`)
		r.Mode, r.Chunk = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, 150_000
		x := h.Do(r)
		if !bytes.Equal(x.Body, r.Body) || !x.Rerouted {
			t.Errorf("%d bytes of %d came back, rerouted: %v", len(x.Body), len(r.Body), x.Rerouted)
		}
		x.End()
	})
}

// Bodies that never end take a bounded room together. A request that finds none is given
// back to Envoy at once, and is counted; room that was given back is used again.
func TestUnfinishedBodiesTakeABoundedRoom(t *testing.T) {
	const budget, streams, chunk = 1 << 20, 20, 64 << 10
	for _, ahead := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, extproc.Config{MaxHeldBytes: budget, DecisionTimeout: time.Minute, TrustOverrides: true, AllowDirect: true})
			var all []*envoytest.Exchange
			for range streams {
				x := h.Begin(streamed(ahead))
				x.SendHeaders()
				for range 5 {
					if m := part(string(bytes.Repeat([]byte(" "), chunk)), false); ahead {
						x.Send(m) // is answered
					} else {
						x.Stray(m)
					}
				}
				all = append(all, x)
				synctest.Wait()
				if n := h.server.Held(); n > budget {
					t.Fatalf("ahead %v: %d bytes are held, the budget is %d", ahead, n, budget)
				}
			}
			// Three bodies of five chunks fit, and a chunk of a fourth.
			if n := h.count(t, "kvroute.extproc.fail_open", "held_bytes"); n != streams-3 {
				t.Errorf("ahead %v: %d requests fail open for want of room, want %d", ahead, n, streams-3)
			}
			x := all[streams-1]
			if !x.Settle() || x.Rerouted {
				t.Errorf("ahead %v: a request without room is not left to Envoy", ahead)
			}
			for _, x := range all {
				x.Reset()
			}
			synctest.Wait()
			if n := h.server.Held(); n != 0 {
				t.Errorf("ahead %v: %d bytes are held when all streams have ended", ahead, n)
			}
			x = h.Do(streamed(ahead))
			synctest.Wait() // the client may have the answer before the server has freed the body
			if x.Header["x-dynamo-worker"] == "" || h.server.Held() != 0 {
				t.Errorf("ahead %v: header %v, %d bytes are held behind the decision", ahead, x.Header, h.server.Held())
			}
			x.End()
		})
	}
}

// A body that comes as a whole counts for as long as its request waits for a decision.
func TestBodiesOfWaitingRequestsTakeABoundedRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{MaxHeldBytes: int64(2*len(hello) + 1)})
		now := make(chan struct{})
		h.router.will(until(now))
		var all []*envoytest.Exchange
		for range 3 {
			x := h.Begin(chat(hello))
			x.SendHeaders()
			x.Settle()
			x.SendBody()
			synctest.Wait()
			all = append(all, x)
		}
		close(now)
		for i, x := range all {
			x.Settle()
			if got := x.Header["x-dynamo-worker"] != ""; got != (i < 2) {
				t.Errorf("request %d is decided: %v", i, got)
			}
			x.End()
		}
		if n := h.count(t, "kvroute.extproc.fail_open", "held_bytes"); n != 1 || h.server.Held() != 0 {
			t.Errorf("%d requests fail open for want of room, want 1; %d bytes are held", n, h.server.Held())
		}
	})
}
