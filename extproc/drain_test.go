// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// A drain waits for decisions and for nothing else, whatever clients and workers
// do. No real time passes here.
func TestDrainIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{DecisionTimeout: time.Second})

		uploading := h.Begin(chat(hello))
		uploading.SendHeaders()
		uploading.Settle()
		silent := h.Begin(chat(hello))
		routed, responding := h.Do(chat(hello)), h.Do(chat(hello))
		responding.Respond(200, "content-type", "text/event-stream")
		watching := responding.Observe()
		refused := h.Do(chat("{}"))

		h.router.will(until(nil))
		deciding := h.Begin(chat(hello))
		deciding.SendHeaders()
		deciding.Settle()
		deciding.SendBody()
		synctest.Wait()

		start := time.Now()
		h.server.Drain()
		synctest.Wait()
		if !uploading.Ended() || !silent.Ended() || !routed.Ended() || !responding.Ended() || !watching.Ended() || !refused.Ended() {
			t.Error("a stream without a decision in progress was not left at once")
		}
		if got := h.router.taken(); got != 1 {
			t.Errorf("%d slots are taken, want the one of the decision", got)
		}
		h.grpc.GracefulStop()
		if got := time.Since(start); got != time.Second {
			t.Errorf("drained after %v, want 1s, the decision's budget", got)
		}
		if !deciding.Settle() || deciding.Rerouted {
			t.Error("the decision in progress got no answer")
		}
		if n := h.count(t, "kvroute.extproc.fail_open", "draining"); n != 2 {
			t.Errorf("%d requests failed open by the drain, want those two without a decision", n)
		}
	})
}

// A decision that is made during a drain is used.
func TestDrainLetsADecisionFinish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		now := make(chan struct{})
		h.router.will(until(now))
		x := h.Begin(chat(hello))
		x.SendHeaders()
		x.Settle()
		x.SendBody()
		synctest.Wait()
		h.server.Drain()
		h.server.Drain() // a second one is harmless
		close(now)
		if !x.Settle() || !x.Rerouted {
			t.Error("the request was not routed")
		}
		synctest.Wait()
		if !x.Ended() || h.router.taken() != 0 {
			t.Errorf("stream ended: %v, %d slots taken; want the stream left and no slot", x.Ended(), h.router.taken())
		}
	})
}

// Before the fleet is known a request that no worker can take fails open, though the
// fleet becomes known while it is decided; afterwards it is refused.
func TestAFleetThatIsNotKnownYetRefusesNobody(t *testing.T) {
	for name, request := range map[string]envoytest.Request{"a chat": chat(hello), "of others": {Path: "/unknown", Body: []byte("x")}} {
		t.Run(name, func(t *testing.T) {
			var started atomic.Bool
			h := newHarness(t, extproc.Config{Started: started.Load, EndpointPicker: true})
			h.router.will(func(context.Context, router.Request) (router.Decision, error) {
				started.Store(true) // too late for this one
				return router.Decision{}, router.ErrNoWorkers
			})
			if x := h.Do(request); x.Refusal != nil || x.Header["x-dynamo-worker"] != "" {
				t.Errorf("refused with %+v, header %v, want neither", x.Refusal, x.Header)
			}
			if x := h.Do(request); x.Refusal == nil {
				t.Error("a request behind it is not refused")
			}
			if n := h.count(t, "kvroute.extproc.fail_open", "starting"); n != 1 {
				t.Errorf("%d requests failed open at the start, want one", n)
			}
		})
	}
}
