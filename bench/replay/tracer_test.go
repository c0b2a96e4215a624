// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
)

// deaf stands for a router that takes everything.
type deaf struct{}

func (deaf) BestWorker(context.Context, router.Request) (router.Decision, error) {
	return router.Decision{}, nil
}
func (deaf) FirstToken(string, router.Sign) bool                { return true }
func (deaf) Free(string) bool                                   { return true }
func (deaf) Abandon(string) bool                                { return true }
func (deaf) Leave(string, bool) bool                            { return true }
func (deaf) PrefillFailed(string) error                         { return nil }
func (deaf) ReportUsage(string, router.Usage)                   {}
func (deaf) Attempted(string, router.Response) []router.Avoided { return nil }
func (deaf) BrokeOff(netip.AddrPort)                            {}
func (deaf) Gave(string, router.Worker) bool                    { return true }
func (deaf) Holder(context.Context, string) (router.Decision, bool) {
	return router.Decision{}, false
}

func (deaf) Giver(string, netip.AddrPort) (router.Worker, bool) {
	return router.Worker{}, false
}

func (deaf) Served(string, router.Response) (moved bool, avoided []router.Avoided) {
	return false, nil
}

func newTestTracer(t *testing.T, name string) *Tracer {
	t.Helper()
	tr, err := NewTracer(TracerConfig{File: name, TPOT: time.Hour, Seed: 1, Log: slog.New(slog.DiscardHandler), Meter: noop.Meter{}})
	if err != nil {
		t.Fatal(err)
	}
	tr.Router = deaf{}
	return tr
}

func ids(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)
	}
	return out
}

func TestTraceIsReplayed(t *testing.T) {
	name := filepath.Join(t.TempDir(), "trace.jsonl")
	tr := newTestTracer(t, name)
	tr.Observe(router.Observation{ID: "a", IDs: ids(1024)})
	tr.Observe(router.Observation{ID: "b", IDs: ids(1100)})
	tr.Observe(router.Observation{ID: "c", IDs: append([]uint32{7}, ids(600)...)})
	tr.Observe(router.Observation{ID: "lost", IDs: ids(10)})
	for _, id := range []string{"c", "b", "a"} {
		tr.FirstToken(id, router.SignObserver)
		tr.Free(id)
		tr.Free(id) // as harmless as at the router
	}
	tr.Abandon("lost")
	if len(tr.flight) != 0 {
		t.Errorf("%d requests are still in flight", len(tr.flight))
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := tr.Run(ctx); err != nil {
		t.Fatal(err)
	}
	trace, err := LoadMooncake(name)
	if err != nil {
		t.Fatal(err)
	}
	h := trace.HitRate(1, 0)
	if len(trace.Requests) != 3 || h.Blocks != 2+3+2 || h.Hit != 2 {
		t.Errorf("%d requests, %d of %d blocks hit, want 3, 2 of 7", len(trace.Requests), h.Hit, h.Blocks)
	}
	var c Command
	fs := flag.NewFlagSet("replay", flag.ContinueOnError)
	c.Flags(fs)
	if err := fs.Parse([]string{"--trace", name, "--workers", "2", "--rule", "tokens", "--json", "-"}); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := c.Run(t.Context(), fs, &out, nil); err != nil || !strings.Contains(out.String(), `"requests": 3,`) {
		t.Errorf("replay: %v\n%s", err, out.String())
	}
}

func TestOutputIsWorkedOut(t *testing.T) {
	at := time.Unix(100, 0)
	e := traced{at: at, first: at.Add(time.Second)}
	e.end(at.Add(2*time.Second), 20*time.Millisecond)
	if e.line.TTFT != 1000 || e.line.Duration != 2000 || e.line.Output != 51 {
		t.Errorf("%+v, want a TTFT of 1,000 ms, 2,000 ms in all and 51 tokens", e.line)
	}
	e = traced{at: at}
	if e.end(at.Add(time.Second), time.Second); e.line.Output != 1 || e.line.TTFT != 1000 {
		t.Errorf("without a first token: %+v", e.line)
	}
}

func TestTraceRotatesAndIsBounded(t *testing.T) {
	name := filepath.Join(t.TempDir(), "trace.jsonl")
	tr := newTestTracer(t, name)
	tr.size = 500
	const most = traceQueue + 10
	for i := range most {
		id := fmt.Sprint(i)
		tr.Observe(router.Observation{ID: id, IDs: ids(8)})
		tr.Free(id)
	}
	if len(tr.queue) != traceQueue {
		t.Errorf("%d requests wait, want %d", len(tr.queue), traceQueue)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := tr.Run(ctx); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{name, name + ".1"} {
		trace, err := LoadMooncake(file)
		if err != nil || len(trace.Requests) > 5 {
			t.Errorf("%s: %v, %v", filepath.Base(file), trace, err)
		}
	}
}

func TestTraceThatCannotBeWritten(t *testing.T) {
	tr := newTestTracer(t, filepath.Join(t.TempDir(), "no", "folder"))
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := tr.Run(ctx); err != nil {
		t.Errorf("it stops the process: %v", err)
	}
}

// Requests that did not come through Envoy end where the tracer does not see it, so
// they are not begun either.
func TestTraceIsOfEnvoysRequests(t *testing.T) {
	tr := newTestTracer(t, filepath.Join(t.TempDir(), "trace.jsonl"))
	tr.conf.Prefix = extproc.IDPrefix(7)
	for i := range tracePending + 1 {
		tr.Observe(router.Observation{ID: fmt.Sprint("mine-", i), IDs: ids(1)})
	}
	tr.Observe(router.Observation{ID: extproc.IDPrefix(7) + "x", IDs: ids(10)})
	if len(tr.flight) != 1 {
		t.Errorf("%d requests are in flight, want Envoy's one", len(tr.flight))
	}
}
