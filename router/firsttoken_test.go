// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// signs counts the first tokens by their source.
func signs(t *testing.T, reader *sdkmetric.ManualReader) map[string]int64 {
	t.Helper()
	return counts(t, reader, "kvroute.router.first_tokens", "source")
}

// counts reads a counter by one of its labels.
func counts(t *testing.T, reader *sdkmetric.ManualReader, name, label string) map[string]int64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	got := map[string]int64{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if sum, ok := m.Data.(metricdata.Sum[int64]); ok && m.Name == name {
				for _, p := range sum.DataPoints {
					value, _ := p.Attributes.Value(attribute.Key(label))
					got[value.AsString()] += p.Value
				}
			}
		}
	}
	return got
}

// long is a prompt of n tokens that shares no beginning with another id's prompt.
func long(id string, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(id[i%len(id)])<<8 + uint32(len(id))
	}
	return tokens
}

// If first tokens are not observed, they are inferred in order and by rate, once per
// request, and explained. A first token that is reported later still counts.
func TestFirstTokensAreInferred(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader := sdkmetric.NewManualReader()
		r := newRouter(t, router.Config{
			InferFirstTokens: true, Sessions: router.SessionConfig{TTL: time.Hour},
			Meter: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("test"),
		}, 1)
		book := func(id string, unseen bool) {
			t.Helper()
			if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Owned: true, Model: "m", Tokens: long(id, 1000), Unseen: unseen, Session: id}); err != nil {
				t.Fatal(err)
			}
		}
		check := func(id string, by router.Sign, pend int) {
			t.Helper()
			d, ok := r.Decision(id)
			if got := r.Workers()[0].PendTokens; !ok || d.FirstTokenBy != by || d.FirstToken.IsZero() != (by == "" || id == "again") || got != pend {
				t.Errorf("%s: first token %v by %q, %d tokens pending; want %q and %d", id, d.FirstToken, d.FirstTokenBy, got, by, pend)
			}
		}
		for i := range 6 {
			a, b := fmt.Sprint("silent", i), fmt.Sprint("seen", i)
			book(a, true)
			book(b, false)
			time.Sleep(200 * time.Millisecond)
			if !r.FirstToken(b, router.SignObserver) {
				t.Fatal("a first token has no effect")
			}
			check(a, router.SignOrder, 0)
			check(b, router.SignObserver, 0)
		}
		if rate := r.Workers()[0].PrefillRate; rate < 9_900 || rate > 10_100 {
			t.Errorf("rate %v, want 10,000", rate)
		}
		book("due", true)
		time.Sleep(50 * time.Millisecond)
		r.Tick()
		check("due", "", 1000)
		time.Sleep(60 * time.Millisecond)
		r.Tick()
		check("due", router.SignRate, 0)
		// The late report is new for the request's session, but for no other request.
		if !r.FirstToken("due", router.SignEnd) || r.FirstToken("due", router.SignEnd) {
			t.Error("a first token that was inferred and then reported must have an effect once")
		}
		check("due", router.SignEnd, 0)
		book("again", false)
		r.Free("again")
		check("again", router.SignEnd, 0)
		book("lost", false)
		r.Abandon("lost")
		check("lost", "", 0)
		want := map[string]int64{"order": 6, "observer": 6, "rate": 1, "end": 1}
		if got := signs(t, reader); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("first tokens %v, want %v", got, want)
		}
	})
}

// A reported first token binds a session; an inferred one does not.
func TestInferenceBindsNoSession(t *testing.T) {
	r := newRouter(t, router.Config{InferFirstTokens: true, Sessions: router.SessionConfig{TTL: time.Hour}}, 1)
	for _, id := range []string{"a", "b"} {
		decided(t, r, id, "abcd", func(q *router.Request) { q.Session = id })
	}
	reason := func(session string) router.Reason {
		id := "of " + session
		defer r.Free(id)
		return decided(t, r, id, "abcd", func(q *router.Request) { q.Session = session }).Reason
	}
	r.MarkPrefillCompleted("b")
	if got := reason("a"); got == router.ReasonSession {
		t.Errorf("a's session is bound by b's first token")
	}
	if got := reason("b"); got != router.ReasonSession {
		t.Errorf("b's session is not bound: %s", got)
	}
	if !r.MarkPrefillCompleted("a") || reason("a") != router.ReasonSession {
		t.Errorf("a's session is not bound by its own first token")
	}
}

// No first token is inferred for a worker that reorders requests, whether its record says
// so or its behaviour shows it.
func TestWorkersThatReorder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRouter(t, router.Config{InferFirstTokens: true}, 1)
		overtake := func(i int) (inferred bool) {
			a, b := fmt.Sprint("a", i), fmt.Sprint("b", i)
			decided(t, r, a, "abcd")
			decided(t, r, b, "bcde")
			time.Sleep(time.Second)
			r.MarkPrefillCompleted(b)
			d, _ := r.Decision(a)
			time.Sleep(time.Second)
			r.MarkPrefillCompleted(a)
			r.Free(a)
			r.Free(b)
			return d.FirstTokenBy == router.SignOrder
		}
		for i := range 4 {
			if !overtake(i) {
				t.Errorf("pair %d: nothing is inferred", i)
			}
		}
		if overtake(5) || !r.Workers()[0].Reorders {
			t.Error("order is inferred on a worker that reorders")
		}
		fresh := newRouter(t, router.Config{InferFirstTokens: true}, 0)
		w := worker(1)
		w.Reorders = true
		set(t, fresh, w)
		r = fresh
		if overtake(6) || !r.Workers()[0].Reorders {
			t.Error("order is inferred on a worker that is registered as reordering")
		}
	})
}

// A request that waits for room is admitted when a prefill should be done, without any
// report.
func TestInferenceAdmits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRouter(t, router.Config{InferFirstTokens: true, Queue: router.QueueConfig{Threshold: new(1.)}}, 0)
		w := worker(1)
		w.MaxBatchedTokens = 512
		set(t, r, w)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _ = r.Run(ctx) }()
		for i := range 5 {
			id := fmt.Sprint("seen", i)
			if _, err := r.BestWorker(ctx, router.Request{ID: id, Owned: true, Model: "m", Tokens: long(id, 1000)}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
			r.FirstToken(id, router.SignObserver)
		}
		if _, err := r.BestWorker(ctx, router.Request{ID: "silent", Owned: true, Model: "m", Tokens: long("silent", 10_000), Unseen: true}); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := r.BestWorker(ctx, router.Request{ID: "waits", Owned: true, Model: "m", Tokens: long("waits", 100)}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 900*time.Millisecond || took > 1200*time.Millisecond {
			t.Errorf("admitted after %v, want about 1 s", took)
		}
	})
}

// Each decision is counted with its reason, including decisions that follow an upper
// router's choice.
func TestEachReasonIsCounted(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	r := newRouter(t, router.Config{Meter: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("test")}, 2)
	for i, req := range []router.Request{{Preferred: &router.Worker{ID: 2}}, {Pinned: &router.Worker{ID: 1}}, {}} {
		req.ID, req.Model, req.Tokens = fmt.Sprint(i), "m", prompt("AB")
		if _, err := r.BestWorker(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	got := counts(t, reader, "kvroute.router.decisions", "reason")
	for _, reason := range []router.Reason{router.ReasonPreferred, router.ReasonPinned, router.ReasonLoad} {
		if got[string(reason)] != 1 {
			t.Errorf("%d decisions with the reason %s, want 1 of %v", got[string(reason)], reason, got)
		}
	}
}

// A request whose pinned worker is busy or unknown counts as refused for that reason, not because all
// workers are busy or gone.
func TestRefusalsOfPinsAreCounted(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	some := .5
	r := newRouter(t, router.Config{Meter: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("test"), Thresholds: scorer.Thresholds{ActiveBlocks: &some}}, 2)
	w := worker(3)
	w.TotalKVBlocks = 2
	set(t, r, w)
	occupy(t, r, "x", 3, "AB", true)
	for i := range 20 {
		for _, id := range []uint64{3, 9} {
			if _, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(id, " ", i), Model: "m", Tokens: prompt("AB"), Pinned: &router.Worker{ID: id}}); err == nil {
				t.Fatalf("worker %d takes a request", id)
			}
		}
	}
	if got := counts(t, reader, "kvroute.router.refusals", "reason"); got["pinned_busy"] != 20 || got["pinned_unknown"] != 20 {
		t.Errorf("refusals: %v", got)
	}
}
