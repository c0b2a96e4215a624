// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvroute/kvroute/extproc"
)

// While a large body is on its way, kvroute asks Envoy again and again for more time: it does not know when Envoy
// begins to send the body. It asks once more when the body has come.
func TestLargeBodiesGetMoreTime(t *testing.T) {
	large := `{"model":"m","messages":[1],"priority":1,"user":"` + strings.Repeat("x", 100<<10) + `"}`
	for name, c := range map[string]struct {
		body    string
		unsized bool
		asked   bool
	}{
		"large": {large, false, true}, "of unknown length": {hello, true, true}, "small": {hello, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, extproc.Config{DecisionTimeout: time.Second, MaxMessageTimeout: 50 * time.Second})
				r := chat(c.body)
				r.Unsized = c.unsized
				x := h.Begin(r)
				x.SendHeaders()
				x.Settle()
				time.Sleep(9*time.Second + 100*time.Millisecond)
				synctest.Wait()
				if n := x.Ignored(); n != 18 && c.asked || n != 0 && !c.asked {
					t.Errorf("asked %d times in 9 s, expected to ask: %v", n, c.asked)
				}
				if x.SendBody(); !x.Settle() {
					t.Error("no answer")
				}
				if want := c.body == large; (x.Patience == 50*time.Second) != want {
					t.Errorf("Envoy waits for %v for the answer", x.Patience)
				}
				x.End()
			})
		})
	}
}

// A stream that is evicted while its body comes is refused, because the body is not checked; a trusted one fails open.
func TestEvictedBodiesAreRefused(t *testing.T) {
	for _, trusted := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, extproc.Config{TrustOverrides: trusted, AllowDirect: trusted})
			small := h.Begin(chat(hello))
			small.SendHeaders()
			small.Settle()
			r := chat(hello)
			r.Unsized = true
			x := h.Begin(r)
			x.SendHeaders()
			x.Settle()
			synctest.Wait()
			h.server.Evict()
			synctest.Wait()
			if x.Settle() || (x.Refusal != nil && x.Refusal.Status == 503) == trusted || small.Ended() {
				t.Errorf("trusted %v: refusal %+v; the small body is evicted first: %v", trusted, x.Refusal, small.Ended())
			}
			small.End()
		})
	}
}
