// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
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

// Envoy gets an id that its observer skips if the router infers the first token. That needs an Envoy which reads the id
// so, and a response that nothing else reads.
func TestInferredRequests(t *testing.T) {
	infers := []string{"x-dynamo-infers", "true"}
	for _, c := range []struct {
		name     string
		conf     extproc.Config
		metadata []string
		may      bool
	}{
		{"an Envoy with the matcher", extproc.Config{}, infers, true},
		{"another Envoy", extproc.Config{}, nil, false},
		{"headers are the first token", extproc.Config{FirstToken: extproc.FirstTokenResponseHeaders}, infers, false},
		{"all in the sample", extproc.Config{ObserveShare: 1}, infers, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, c.conf)
				h.router.will(func(_ context.Context, req router.Request) (router.Decision, error) {
					d := chosen
					d.Inferred = req.MayInfer && req.Represents == 0
					return d, nil
				})
				request := chat(hello)
				request.Metadata = c.metadata
				x := h.Do(request)
				asked := h.router.asked[0]
				if asked.MayInfer != c.may || asked.Represents != int(c.conf.ObserveShare) {
					t.Errorf("may be inferred: %v, represents %d", asked.MayInfer, asked.Represents)
				}
				want := asked.ID
				if c.may && c.conf.ObserveShare == 0 {
					want += "-inferred"
				}
				if got := x.Header["x-dynamo-request-id"]; got != want {
					t.Errorf("Envoy gets the id %q, want %q", got, want)
				}
				h.router.newCalls()
				x.Respond(200, "content-type", "text/event-stream")
				x.End()
				synctest.Wait()
				if calls := h.router.newCalls(); !slices.Contains(calls, "free") {
					t.Errorf("calls at the end: %q", calls)
				}
			})
		})
	}
}

// The requests of the sample stand for all requests.
func TestObserveShare(t *testing.T) {
	for _, c := range []struct{ audits, observes, sampled float64 }{{0, 0, 0}, {0, .3, .3}, {.1, .05, .1}, {1, .3, 1}} {
		const n = 20_000
		sampled, sum := extproc.Sampled(c.audits, c.observes, n)
		if got := float64(sampled) / n; got < c.sampled*.9 || got > c.sampled*1.1 {
			t.Errorf("%+v: %v of the requests are in the sample", c, got)
		}
		if got := float64(sum) / n; c.sampled > 0 && (got < .9 || got > 1.1) {
			t.Errorf("%+v: the sample stands for %v of the requests", c, got)
		}
	}
}
