// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/extproc"
)

const usageEvent = "data: {\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":7}}\n\n"

// An audited request's observer stays to the end of the response; another one leaves at the first token.
func TestObserverReadsTheUsageOfAuditedRequests(t *testing.T) {
	for _, c := range []struct {
		share   float64
		content string
		want    []string
	}{
		{1, "text/event-stream", []string{"first token by observer", "usage: 100 prompt tokens, 0 cached (reported: false), 7 output tokens, bad: false"}},
		{1, "application/json", []string{"usage: 100 prompt tokens, 0 cached (reported: false), 7 output tokens, bad: false"}},
		{0, "text/event-stream", []string{"first token by observer"}},
		{0, "application/json", nil},
	} {
		t.Run(fmt.Sprintf("%v of %s", c.share, c.content), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, extproc.Config{AuditShare: c.share})
				x := h.Do(chat(hello))
				x.Respond(200, "content-type", "text/event-stream")
				h.router.newCalls()
				o := x.Observe()
				o.Respond(200, "content-type", c.content)
				o.Chunk([]byte("data: {}\n\n"), false)
				synctest.Wait()
				if o.Ended() == (c.share == 1) {
					t.Errorf("after the first token the observer has ended: %v", o.Ended())
				}
				o.Chunk([]byte(usageEvent[:20]), false)
				o.Chunk([]byte(usageEvent[20:]), false)
				o.Chunk(nil, true)
				synctest.Wait()
				if !o.Ended() {
					t.Error("the observer stays after the response")
				}
				if diff := cmp.Diff(c.want, h.router.newCalls()); diff != "" {
					t.Errorf("calls (-want +got):\n%s", diff)
				}
				x.End()
			})
		})
	}
}

// The share of audited requests is the configured one.
func TestAuditShare(t *testing.T) {
	for _, share := range []float64{0, .01, .3, 1} {
		const n = 20_000
		if got := float64(extproc.Audited(share, n)) / n; got < share*.7 || got > share*1.3 {
			t.Errorf("share %v: %v of the requests are audited", share, got)
		}
	}
}
