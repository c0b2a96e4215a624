// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/router"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The worker that a fakeRouter chooses unless told otherwise, and the one in its place.
var chosen = router.Decision{
	Worker:        router.Worker{ID: 1<<63 + 5},
	Address:       netip.MustParseAddrPort("10.0.0.7:8000"),
	OverlapBlocks: 12,
	Reason:        router.ReasonKV,
	Second:        second,
}

var second = router.Second{Worker: router.Worker{ID: 9}, Address: netip.MustParseAddrPort("10.0.0.9:8000")}

// fakeRouter makes the decisions that a test sets and fails the test if it is misused: an id
// used twice, a slot freed twice or never, a slot of nobody's freed.
type fakeRouter struct {
	t *testing.T

	mu sync.Mutex
	// mu guards the fields below.
	decide func(ctx context.Context, req router.Request) (router.Decision, error) // nil for chosen
	slots  map[string]bool                                                        // true as long as taken
	// queries lets requests come without an id; such a one books nothing.
	queries bool
	given   map[string]router.Worker // by id
	givers  map[string]bool          // requests that Giver was called for
	calls   []string
	asked   []router.Request
}

func newRouter(t *testing.T) *fakeRouter {
	r := &fakeRouter{t: t, slots: make(map[string]bool), given: make(map[string]router.Worker), givers: make(map[string]bool)}
	t.Cleanup(func() {
		for id, taken := range r.slots {
			if taken {
				t.Errorf("the slot of %s was never freed", id)
			}
		}
	})
	return r
}

func (r *fakeRouter) BestWorker(ctx context.Context, req router.Request) (router.Decision, error) {
	r.mu.Lock()
	decide := r.decide
	if req.ID == "" && r.queries {
		r.mu.Unlock()
		ctx, cancel := limited(ctx, &req)
		defer cancel()
		return decide(ctx, req)
	}
	_, used := r.slots[req.ID]
	if req.ID == "" || used {
		r.t.Errorf("BestWorker called with id %q, used before: %v", req.ID, used)
	}
	// Taken already here, for a panic may come after the booking.
	r.slots[req.ID] = true
	if !req.Owned {
		r.t.Error("the request is not owned")
	}
	r.calls = append(r.calls, fmt.Sprintf("best worker for model %q, salt %q", req.Model, req.Salt)+steered(&req))
	r.asked = append(r.asked, req)
	r.mu.Unlock()
	ctx, cancel := limited(ctx, &req)
	defer cancel()
	d, err := chosen, error(nil)
	if decide != nil {
		d, err = decide(ctx, req)
	}
	if !req.WantSecond {
		d.Second = router.Second{}
	}
	if err != nil {
		r.mu.Lock()
		r.slots[req.ID] = false
		r.mu.Unlock()
	}
	return d, err
}

// limited returns a context that ends as a router's decision does: with the time for the
// decision, or once the request says that it waits, with the time for that.
func limited(ctx context.Context, req *router.Request) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(req.DecisionTimeout, func() { cancel(router.ErrDecisionTimeout) })
	if waiting := req.Waiting; waiting != nil {
		limit := req.QueueWait
		req.Waiting = func(split bool) {
			timer.Stop()
			timer = time.AfterFunc(limit, func() { cancel(router.ErrTooLate) })
			waiting(split)
		}
	}
	return ctx, func() { timer.Stop(); cancel(nil) }
}

func (r *fakeRouter) FirstToken(id string, by router.Sign) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, "first token by "+string(by))
	return r.slots[id]
}

func (r *fakeRouter) Free(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.slots[id] {
		r.t.Errorf("Free called with id %q, which has no slot", id)
	}
	r.slots[id] = false
	r.calls = append(r.calls, "free")
	return true
}

func (r *fakeRouter) Abandon(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.slots[id] {
		r.t.Errorf("Abandon called with id %q, which has no slot", id)
	}
	r.slots[id] = false
	r.calls = append(r.calls, "abandon")
	return true
}

func (r *fakeRouter) Leave(id string, sent bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.slots[id] {
		r.t.Errorf("Leave called with id %q, which has no slot", id)
	}
	r.slots[id] = false
	call := "leave"
	if !sent {
		call = "leave before it was sent"
	}
	r.calls = append(r.calls, call)
	return true
}

func (r *fakeRouter) PrefillFailed(string) error { return nil }

func (r *fakeRouter) Giver(id string, at netip.AddrPort) (router.Worker, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.givers[id] = r.givers[id] || r.slots[id]
	if at == second.Address {
		return second.Worker, r.givers[id]
	}
	return chosen.Worker, r.givers[id]
}

func (r *fakeRouter) Gave(id string, by router.Worker) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, fmt.Sprintf("worker %d gave %q", by.ID, id))
	if _, bound := r.given[id]; !bound {
		r.given[id] = by
	}
	return r.given[id] == by
}

func (r *fakeRouter) Holder(_ context.Context, id string) (d router.Decision, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w, known := r.given[id]; known {
		d = router.Decision{Worker: w, Address: second.Address, Engine: "vllm", NameRank: w.DPRank > 0, Host: "w.example"}
	}
	return d, d.Address.IsValid()
}

func (r *fakeRouter) ReportUsage(_ string, u router.Usage) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, fmt.Sprintf("usage: %d prompt tokens, %d cached (reported: %v), %d output tokens, bad: %v", u.PromptTokens, u.CachedTokens, u.Cached, u.OutputTokens, u.Bad))
}

func (r *fakeRouter) Served(id string, resp router.Response) (moved bool, avoided []router.Avoided) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.slots[id] {
		r.t.Errorf("Served called with id %q, which has no slot", id)
	}
	if resp.Nowhere {
		r.calls = append(r.calls, fmt.Sprintf("served by no worker, status %d", resp.Status))
		return false, nil
	}
	if resp.Address.IsValid() || resp.Local {
		call := fmt.Sprintf("served by %v, status %d, local %v", resp.Address, resp.Status, resp.Local)
		if resp.Asked > 0 {
			call += fmt.Sprintf(", asked %d", resp.Asked)
		}
		if resp.RetryAfter != 0 {
			call += fmt.Sprintf(", retry after %v", resp.RetryAfter)
		}
		r.calls = append(r.calls, call)
	}
	return resp.Address == second.Address, nil
}

func (r *fakeRouter) Attempted(id string, resp router.Response) []router.Avoided {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, fmt.Sprintf("attempt of %q by %v, status %d, retry after %v", id, resp.Address, resp.Status, resp.RetryAfter))
	return nil
}

func (r *fakeRouter) BrokeOff(at netip.AddrPort) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, fmt.Sprintf("broken off by %v", at))
}

// will makes r decide by f from now on.
func (r *fakeRouter) will(f func(ctx context.Context, req router.Request) (router.Decision, error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.decide = f
}

// newCalls returns the calls since the last call of newCalls.
func (r *fakeRouter) newCalls() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	calls := r.calls
	r.calls = nil
	return calls
}

// taken returns the number of slots in use.
func (r *fakeRouter) taken() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, taken := range r.slots {
		if taken {
			n++
		}
	}
	return n
}

// errorAfter decides with an error, or by the context's end if that is earlier.
func errorAfter(d time.Duration, err error) func(context.Context, router.Request) (router.Decision, error) {
	return func(ctx context.Context, _ router.Request) (router.Decision, error) {
		select {
		case <-time.After(d):
			return router.Decision{}, err
		case <-ctx.Done():
			return router.Decision{}, fmt.Errorf("router: decide: %w", context.Cause(ctx))
		}
	}
}

// steered says what a request asks of its routing.
func steered(req *router.Request) (text string) {
	add := func(name string, value any, some bool) {
		if some {
			text += fmt.Sprintf(", %s %v", name, value)
		}
	}
	if req.Pinned != nil {
		add("pin", fmt.Sprint(*req.Pinned, " any rank: ", req.AnyRank), true)
	}
	if req.Prompt.Inexact != "" {
		text += ", " + req.Prompt.Inexact
	}
	add("session", req.Session, req.Session != "")
	add("held", req.Held, req.Held != "")
	add("final", true, req.SessionFinal)
	add("allowed", req.AllowedAddresses, req.AllowedAddresses != nil)
	add("priority", req.Priority, req.Priority != 0)
	add("strict", req.StrictPriority, req.StrictPriority != 0)
	add("target", req.TTFTTarget, req.TTFTTarget != 0)
	add("output", req.ExpectedOutput, req.ExpectedOutput != 0)
	add("required", req.RequiredTaints, req.RequiredTaints != nil)
	add("preferred", req.PreferredTaints, req.PreferredTaints != nil)
	if req.Override != nil {
		o, _ := json.Marshal(req.Override)
		add("override", string(o), true)
	}
	return text
}

// admittedAfter decides when a worker has become free.
func admittedAfter(d time.Duration) func(context.Context, router.Request) (router.Decision, error) {
	return func(ctx context.Context, _ router.Request) (router.Decision, error) {
		select {
		case <-time.After(d):
			return chosen, nil
		case <-ctx.Done():
			return router.Decision{}, fmt.Errorf("router: %w", context.Cause(ctx))
		}
	}
}

// until decides when c is closed, or not at all if the context ends before.
func until(c <-chan struct{}) func(context.Context, router.Request) (router.Decision, error) {
	return func(ctx context.Context, _ router.Request) (router.Decision, error) {
		select {
		case <-c:
			return chosen, nil
		case <-ctx.Done():
			return router.Decision{}, fmt.Errorf("router: decide: %w", context.Cause(ctx))
		}
	}
}

// harness is a served external processor with all that can be seen of it.
type harness struct {
	*envoytest.Link

	server *extproc.Server
	grpc   *grpc.Server
	router *fakeRouter
	log    *fixtures.Log
	reader *sdkmetric.ManualReader
}

func newHarness(t *testing.T, conf extproc.Config) *harness {
	t.Helper()
	h := newUnserved(t, conf)
	h.Link = envoytest.Serve(t, h.grpc)
	return h
}

func newUnserved(t *testing.T, conf extproc.Config) *harness {
	t.Helper()
	h := &harness{router: newRouter(t), log: new(fixtures.Log), reader: sdkmetric.NewManualReader()}
	conf.RouterID = 0xabc
	conf.Log = slog.New(slog.NewTextHandler(h.log, nil))
	conf.Meter = sdkmetric.NewMeterProvider(sdkmetric.WithReader(h.reader)).Meter("test")
	var err error
	if h.server, err = extproc.New(conf, h.router); err != nil {
		t.Fatal(err)
	}
	h.grpc = grpc.NewServer(h.server.ServerOptions()...)
	t.Cleanup(h.grpc.Stop)
	h.server.Register(h.grpc)
	return h
}

// count reads a counter, a gauge, or the number of values of a histogram: the sum of all whose labels have each of
// values.
func (h *harness) count(t *testing.T, name string, values ...string) (n int64) {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := h.reader.Collect(context.Background(), &all); err != nil {
		t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name != name {
				continue
			}
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					if hasValues(p.Attributes, values) {
						n += p.Value
					}
				}
			case metricdata.Histogram[float64]:
				for _, p := range data.DataPoints {
					if hasValues(p.Attributes, values) {
						n += int64(p.Count)
					}
				}
			case metricdata.Gauge[float64]:
				for _, p := range data.DataPoints {
					if hasValues(p.Attributes, values) {
						n += int64(p.Value)
					}
				}
			}
		}
	}
	return n
}

func hasValues(set attribute.Set, values []string) bool {
	have := map[string]bool{}
	for _, kv := range set.ToSlice() {
		have[kv.Value.String()] = true
	}
	for _, v := range values {
		if !have[v] {
			return false
		}
	}
	return true
}

var errOther = errors.New("something else")

func chat(body string) envoytest.Request {
	return envoytest.Request{Path: "/v1/chat/completions", Body: []byte(body)}
}

// hello is the body of a request that nothing is wrong with.
const hello = `{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}`
