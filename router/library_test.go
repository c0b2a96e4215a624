// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// Loads include what each worker would have to do: blocks that two requests share count
// once.
func TestPotentialLoads(t *testing.T) {
	r := newRouter(t, router.Config{}, 0)
	w := worker(7)
	w.DPSize = 2
	set(t, r, w)
	set(t, r, worker(8))
	for id, on := range map[string]router.Worker{"a abc": {ID: 7}, "b abd": {ID: 7}, "c abe": {ID: 7, DPRank: 1}} {
		id, letters, _ := strings.Cut(id, " ")
		if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt(letters), Pinned: &on}); err != nil {
			t.Fatal(err)
		}
	}
	store(r, router.Worker{ID: 8}, "abcx")
	check := func(want ...string) {
		t.Helper()
		loads, err := r.PotentialLoads(t.Context(), router.Request{ID: "ignored", Model: "m", Tokens: prompt("abcf")})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range loads {
			got = append(got, fmt.Sprint(l.ID, ".", l.DPRank, ": ", l.PotentialPrefillTokens, " tokens, ", l.PotentialDecodeBlocks, " blocks, ", l.ActiveRequests, " requests, ", l.OverlapBlocks, " held"))
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	check("7.0: 80 tokens, 5 blocks, 2 requests, 0 held", "7.1: 56 tokens, 5 blocks, 1 requests, 0 held", "8.0: 8 tokens, 4 blocks, 0 requests, 3 held")
	r.Free("b")
	check("7.0: 56 tokens, 4 blocks, 1 requests, 0 held", "7.1: 56 tokens, 5 blocks, 1 requests, 0 held", "8.0: 8 tokens, 4 blocks, 0 requests, 3 held")

	loads, err := r.PotentialLoads(t.Context(), router.Request{Model: "m", Tokens: prompt("a"), Allowed: []router.Worker{{ID: 8}}})
	if err != nil || len(loads) != 1 || loads[0].EstimatedTTFT <= 0 {
		t.Errorf("one allowed: %+v, %v", loads, err)
	}
	for want, req := range map[error]router.Request{
		router.ErrUnknownModel:  {Model: "x"},
		router.ErrNoWorkers:     {Model: "m", Allowed: []router.Worker{}},
		router.ErrPinnedUnknown: {Model: "m", Pinned: &router.Worker{ID: 1}},
		router.ErrBadOverride:   {Model: "m", Override: &scorer.Override{Alpha: new(-1.)}},
	} {
		if got, err := r.PotentialLoads(t.Context(), req); !errors.Is(err, want) {
			t.Errorf("%+v, %v; want %v", got, err, want)
		}
	}
}

// A caller with its own rule looks at all workers first and then names one. Mode "direct"
// must allow both.
func TestPotentialLoadsInModeDirect(t *testing.T) {
	r := newRouter(t, router.Config{Mode: router.Direct}, 3)
	store(r, router.Worker{ID: 2}, "AB")
	loads, err := r.PotentialLoads(t.Context(), router.Request{Model: "m", Tokens: prompt("ABC")})
	if err != nil || len(loads) != 3 || loads[1].OverlapBlocks != 2 {
		t.Fatalf("%+v, %v", loads, err)
	}
	if d, err := r.BestWorker(t.Context(), router.Request{ID: "r", Model: "m", Tokens: prompt("ABC"), Pinned: &loads[1].Worker}); err != nil || d.Worker.ID != 2 {
		t.Errorf("%v, %v", d.Worker, err)
	}
	if _, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABC")}); !errors.Is(err, router.ErrPinMissing) {
		t.Errorf("no worker is named: %v", err)
	}
	if _, err := newRouter(t, router.Config{Mode: router.Direct}, 0).PotentialLoads(t.Context(), router.Request{Model: "m"}); !errors.Is(err, router.ErrNoWorkers) {
		t.Errorf("of none: %v", err)
	}
}

// However a response ends, its slot is freed. The first chunk with content is the first
// token.
func TestGenerate(t *testing.T) {
	fault := errors.New("the worker is on fire")
	say := func(pieces ...string) router.Dispatch {
		return func(ctx context.Context, _ router.Request, d router.Decision) iter.Seq2[router.Chunk, error] {
			return func(yield func(router.Chunk, error) bool) {
				for _, p := range pieces {
					if p == "fault" {
						yield(router.Chunk{}, fault)
						return
					}
					if p == "wait" {
						<-ctx.Done()
						yield(router.Chunk{}, context.Cause(ctx))
						return
					}
					if !yield(router.Chunk{Data: []byte(strings.ReplaceAll(p, "w", fmt.Sprint(d.Worker.ID))), Tokens: len(p)}, nil) {
						return
					}
				}
			}
		}
	}
	left := errors.New("the client left")
	for _, c := range []struct {
		name  string
		by    router.Dispatch
		stop  int // chunks that the consumer reads before it stops
		text  string
		err   error
		first bool
		kept  bool // the prompt counts as cached afterwards
	}{
		{"to the end", say("", "w", "bc"), 9, "1bc", nil, true, true},
		{"nothing to say", say(), 9, "", nil, false, true},
		{"fault at once", say("fault"), 9, "", fault, false, false},
		{"fault in between", say("a", "fault"), 9, "a", fault, true, true},
		{"the consumer stops", say("a", "b", "c"), 2, "ab", nil, true, true},
		{"ctx ends", say("a", "wait"), 9, "a", left, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRouter(t, router.Config{PredictTTL: 1e12}, 1)
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			var text string
			var last error
			n := 0
			for chunk, err := range r.Generate(ctx, router.Request{ID: "g", Model: "m", Tokens: prompt("AB")}, c.by) {
				if last = err; err != nil {
					continue
				}
				if w := r.Workers()[0]; w.ActiveRequests != 1 || (w.PendTokens > 0) != (text+string(chunk.Data) == "") {
					t.Errorf("during %q: %+v", chunk.Data, w)
				}
				text += string(chunk.Data)
				if n++; n == c.stop {
					break
				}
				if errors.Is(c.err, left) {
					cancel(left)
				}
			}
			if text != c.text || !errors.Is(last, c.err) {
				t.Errorf("%q, %v; want %q, %v", text, last, c.text, c.err)
			}
			if w := r.Workers()[0]; w.ActiveRequests != 0 || w.PendTokens != 0 || r.Free("g") {
				t.Errorf("left behind: %+v", w)
			}
			if kept, _ := r.Decision("g"); kept.FirstToken.IsZero() == c.first {
				t.Errorf("first token: %v", kept.FirstToken)
			}
			d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("AB")})
			if err != nil || (d.OverlapBlocks > 0) != c.kept {
				t.Errorf("afterwards %d blocks count, %v", d.OverlapBlocks, err)
			}
		})
	}
	t.Run("a dispatch that panics", func(t *testing.T) {
		r := newRouter(t, router.Config{}, 1)
		func() {
			defer func() { _ = recover() }()
			for range r.Generate(t.Context(), router.Request{ID: "g", Model: "m"}, func(context.Context, router.Request, router.Decision) iter.Seq2[router.Chunk, error] { panic("no") }) {
				t.Error("a chunk")
			}
		}()
		if r.Free("g") {
			t.Error("the slot is taken")
		}
	})
	t.Run("ctx ends without a word", func(t *testing.T) {
		r := newRouter(t, router.Config{PredictTTL: 1e12}, 1)
		ctx, cancel := context.WithCancel(t.Context())
		for range r.Generate(ctx, router.Request{ID: "g", Model: "m", Tokens: prompt("AB")}, func(context.Context, router.Request, router.Decision) iter.Seq2[router.Chunk, error] {
			cancel()
			return func(func(router.Chunk, error) bool) {}
		}) {
			t.Error("a chunk")
		}
		if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("AB")}); err != nil || d.OverlapBlocks != 0 {
			t.Errorf("%d blocks count that no worker computed, %v", d.OverlapBlocks, err)
		}
		// The worker may hang: it keeps the load for a while, as behind a proxy.
		if w := r.Workers()[0]; w.LeftRequests != 1 || w.PendTokens == 0 || r.Free("g") {
			t.Errorf("the load of the request is gone: %+v", w)
		}
	})
	r := newRouter(t, router.Config{}, 0)
	for want, req := range map[error]router.Request{router.ErrBadRequest: {Model: "m"}, router.ErrNoWorkers: {ID: "g", Model: "m"}} {
		for _, err := range r.Generate(t.Context(), req, say("a")) {
			if !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
		}
	}
}

// A worker that fails to respond is avoided, as behind a proxy: it is idle and would
// otherwise get all requests.
func TestGenerateAvoidsWhoFails(t *testing.T) {
	refused := errors.New("connection refused")
	for name, c := range map[string]struct {
		err     error
		before  string // first chunk before the failure
		leave   bool
		n       int
		failing bool
	}{
		"refused":              {err: refused, n: 1, failing: true},
		"502":                  {err: &router.StatusError{Status: 502}, n: 5, failing: true},
		"500 once":             {err: &router.StatusError{Status: 500}, n: 4},
		"500 again and again":  {err: &router.StatusError{Status: 500}, n: 5, failing: true},
		"its client's mistake": {err: &router.StatusError{Status: 422}, n: 9},
		"in between":           {err: refused, before: "a", n: 3},
		"its client left":      {err: refused, leave: true, n: 3},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRouter(t, router.Config{AvoidFailing: time.Minute}, 2)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			by := func(context.Context, router.Request, router.Decision) iter.Seq2[router.Chunk, error] {
				return func(yield func(router.Chunk, error) bool) {
					if c.leave {
						cancel()
					}
					if c.before == "" || yield(router.Chunk{Data: []byte(c.before)}, nil) {
						yield(router.Chunk{}, fmt.Errorf("dispatch: %w", c.err))
					}
				}
			}
			for i := range c.n {
				for range r.Generate(ctx, router.Request{ID: fmt.Sprint(i), Model: "m", Client: uint64(1 + i), Pinned: &router.Worker{ID: 1}}, by) {
				}
			}
			if states := byID(t, r); states[1].Failing != c.failing || states[2].Failing || states[1].ActiveRequests != 0 {
				t.Errorf("failing %v, want %v: %+v", states[1].Failing, c.failing, states)
			}
		})
	}
	// A worker that answers errors to a sixth of its requests is not avoided.
	r := newRouter(t, router.Config{AvoidFailing: time.Minute}, 1)
	for i := range 60 {
		for range r.Generate(t.Context(), router.Request{ID: fmt.Sprint(i), Model: "m"}, func(context.Context, router.Request, router.Decision) iter.Seq2[router.Chunk, error] {
			return func(yield func(router.Chunk, error) bool) {
				if i%6 != 5 {
					yield(router.Chunk{Data: []byte("a")}, nil)
				} else {
					yield(router.Chunk{}, &router.StatusError{Status: 500})
				}
			}
		}) {
		}
	}
	if r.Workers()[0].Failing {
		t.Error("a worker that answers an error to every sixth request is avoided")
	}
}

// dumped is an event in the form of a dump.
type dumped struct {
	WorkerID uint64 `json:"worker_id"`
	Tier     string `json:"storage_tier"`
	Event    struct {
		ID   uint64 `json:"event_id"`
		Rank uint32 `json:"dp_rank"`
		Data struct {
			Stored struct {
				Parent *uint64 `json:"parent_hash"`
				Blocks []struct {
					External uint64 `json:"block_hash"`
					Local    uint64 `json:"tokens_hash"`
				} `json:"blocks"`
			} `json:"stored"`
		} `json:"data"`
	} `json:"event"`
}

func dump(t *testing.T, r *router.Router) (events []dumped) {
	t.Helper()
	var b bytes.Buffer
	if err := r.DumpEvents(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b.Bytes(), &events); err != nil {
		t.Fatalf("%v\n%s", err, b.String())
	}
	return events
}

// Another router that applies the events of a dump makes the same decisions.
func TestDumpEvents(t *testing.T) {
	if got := dump(t, newRouter(t, router.Config{}, 2)); len(got) != 0 {
		t.Errorf("an empty index: %+v", got)
	}
	if got := dump(t, newRouter(t, router.Config{Scoring: classic(0)}, 1)); len(got) != 0 {
		t.Errorf("no index: %+v", got)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	text := func() string {
		b := make([]byte, rnd.IntN(12)+1)
		for i := range b {
			b[i] = 'a' + byte(rnd.IntN(2))
		}
		return string(b)
	}
	lower := false
	for round := range 20 {
		r := newRouter(t, router.Config{}, 3)
		for range 40 {
			w, letters := router.Worker{ID: uint64(rnd.IntN(3) + 1)}, text()
			local := indexer.AppendLocalHashes(nil, prompt(letters), 8, indexer.Seed("", ""))
			sequence := indexer.AppendSequenceHashes(nil, local)
			switch n := len(local) - 1; rnd.IntN(8) {
			case 0, 1:
			case 2: // the following blocks are kept in host memory
				ev := indexer.Event{Kind: indexer.Stored, Tier: indexer.HostPinned, Blocks: []indexer.Block{{External: sequence[n] + 1, Local: local[n]}}}
				if n > 0 {
					ev.HasParent, ev.Parent = true, sequence[n-1]+1
				}
				r.ApplyEvent(w, ev)
				continue
			default:
				store(r, w, letters)
				continue
			}
			r.ApplyEvent(w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{sequence[len(sequence)-1] + 1}})
		}
		again := newRouter(t, router.Config{}, 3)
		seen := map[[2]uint64]bool{}
		for i, e := range dump(t, r) {
			stored := e.Event.Data.Stored
			if e.Event.ID != uint64(i) || e.Tier != "device" && e.Tier != "host_pinned" || len(stored.Blocks) == 0 {
				t.Fatalf("event %d: %+v", i, e)
			}
			if stored.Parent != nil && !seen[[2]uint64{e.WorkerID, *stored.Parent}] {
				t.Fatalf("round %d: event %d comes before its parent", round, i)
			}
			ev := indexer.Event{Kind: indexer.Stored}
			if e.Tier == "host_pinned" {
				ev.Tier, lower = indexer.HostPinned, true
			}
			if stored.Parent != nil {
				ev.HasParent, ev.Parent = true, *stored.Parent
			}
			for _, b := range stored.Blocks {
				seen[[2]uint64{e.WorkerID, b.External}] = true
				ev.Blocks = append(ev.Blocks, indexer.Block{External: b.External, Local: b.Local})
			}
			again.ApplyEvent(router.Worker{ID: e.WorkerID, DPRank: e.Event.Rank}, ev)
		}
		for range 200 {
			req := router.Request{Model: "m", Tokens: prompt(text()), Explain: true}
			a, err := r.BestWorker(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			b, err := again.BestWorker(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			for i := range a.Candidates {
				if a.Candidates[i].OverlapBlocks != b.Candidates[i].OverlapBlocks || a.Candidates[i].HostBlocks != b.Candidates[i].HostBlocks {
					t.Fatalf("round %d: worker %d has %d blocks of a prompt, %d after the dump", round, i+1, a.Candidates[i].OverlapBlocks, b.Candidates[i].OverlapBlocks)
				}
			}
		}
	}
	if !lower {
		t.Error("no dump had a block in host memory")
	}
}

type full struct{ room int }

func (f *full) Write(p []byte) (int, error) {
	if f.room -= len(p); f.room < 0 {
		return 0, errors.New("the disk is full")
	}
	return len(p), nil
}

func TestDumpEventsFails(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	store(r, router.Worker{ID: 1}, "ab")
	if err := r.DumpEvents(t.Context(), &full{10}); err == nil {
		t.Error("an error of the writer is lost")
	}
	d, ok := r.Dump(nil)
	if !ok {
		t.Fatal("the dump that failed was not ended")
	}
	defer d.Close()
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := r.DumpEvents(short, io.Discard); !errors.Is(err, router.ErrDumping) {
		t.Errorf("beside another dump: %v", err)
	}
}

// A worker cannot have more of a prompt cached than the prompt.
func TestPotentialLoadOfACachedPrompt(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	store(r, router.Worker{ID: 1}, "abcd")
	loads, err := r.PotentialLoads(t.Context(), router.Request{Model: "m", Tokens: prompt("abcd")})
	if err != nil || len(loads) != 1 || loads[0].PotentialPrefillTokens != 0 || loads[0].OverlapBlocks != 4 || loads[0].PotentialDecodeBlocks != 4 {
		t.Errorf("%+v, %v; want no tokens and 4 blocks of 4", loads, err)
	}
}

// A worker that refuses the connection of a request is named with that cause, whether another one serves the request or
// none does.
func TestGenerateNamesWhoRefuses(t *testing.T) {
	for _, serving := range []bool{true, false} {
		r := newRouter(t, router.Config{AvoidFailing: time.Minute}, 2)
		var refusing []uint64
		req := router.Request{ID: "g", Model: "m", Tokens: prompt("AB"), WantSecond: true}
		for range r.Generate(t.Context(), req, func(_ context.Context, _ router.Request, d router.Decision) iter.Seq2[router.Chunk, error] {
			return func(yield func(router.Chunk, error) bool) {
				if serving && len(refusing) > 0 {
					yield(router.Chunk{Data: []byte("a")}, nil)
					return
				}
				refusing = append(refusing, d.Worker.ID)
				yield(router.Chunk{}, fmt.Errorf("post: %w", &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}))
			}
		}) {
			_ = serving // the pieces of the response do not matter
		}
		if want := map[bool]int{true: 1, false: 2}[serving]; len(refusing) != want {
			t.Fatalf("%d workers were asked, want %d", len(refusing), want)
		}
		if w := byID(t, r)[refusing[0]]; w.AvoidedFor != "it gave no response: connection refused" {
			t.Errorf("another one serves: %v; the worker is avoided for %q", serving, w.AvoidedFor)
		}
	}
}

// A request that its worker refuses goes to the second choice, as behind a proxy.
func TestGenerateAsksTheSecondChoice(t *testing.T) {
	dial := fmt.Errorf("post: %w", &net.OpError{Op: "dial", Err: errors.New("connection refused")})
	for name, c := range map[string]struct {
		err, again error // of the first worker, and of the second
		before     bool  // the first worker fails after it has begun to answer
		one        bool  // the request wants no second choice
		asked      int
		failing    bool   // the first worker is avoided
		broke      uint64 // responses that it broke off, or did not give
	}{
		"refused":                     {err: dial, asked: 2, failing: true, broke: 1},
		"too many requests":           {err: &router.StatusError{Status: 429}, asked: 2, broke: 1},
		"unavailable":                 {err: &router.StatusError{Status: 503, RetryAfter: time.Second}, asked: 2, failing: true, broke: 1},
		"both refuse":                 {err: dial, again: dial, asked: 2, failing: true, broke: 1},
		"a fault":                     {err: &router.StatusError{Status: 502}, asked: 1, broke: 1},
		"a mistake of the client":     {err: &router.StatusError{Status: 400}, asked: 1},
		"reset after it was sent":     {err: &net.OpError{Op: "read", Err: errors.New("reset")}, asked: 1, failing: true, broke: 1},
		"refused, and no second":      {err: dial, one: true, asked: 1, failing: true, broke: 1},
		"after the first piece":       {err: dial, before: true, asked: 1, broke: 1},
		"no worker for the remainder": {err: fmt.Errorf("leg: %w", router.ErrNoWorkers), asked: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRouter(t, router.Config{AvoidFailing: time.Minute, Sessions: router.SessionConfig{TTL: time.Hour}}, 2)
			var asked []uint64
			var first router.Decision
			text, failed := "", false
			req := router.Request{ID: "g", Model: "m", Tokens: prompt("AB"), WantSecond: !c.one, Session: "s"}
			for chunk, err := range r.Generate(t.Context(), req, func(_ context.Context, _ router.Request, d router.Decision) iter.Seq2[router.Chunk, error] {
				asked = append(asked, d.Worker.ID)
				err := c.again
				if len(asked) == 1 {
					first, err = d, c.err
				}
				return func(yield func(router.Chunk, error) bool) {
					if (err == nil || c.before) && !yield(router.Chunk{}, nil) {
						return
					}
					if err != nil {
						yield(router.Chunk{}, err)
						return
					}
					if w := byID(t, r)[d.Worker.ID]; w.ActiveRequests != 1 || w.PendTokens == 0 {
						t.Errorf("the slot is not at worker %d, which answers: %+v", d.Worker.ID, w)
					}
					yield(router.Chunk{Data: []byte("a")}, nil)
				}
			}) {
				text, failed = text+string(chunk.Data), err != nil
			}
			if len(asked) != c.asked || c.asked == 2 && asked[0] == asked[1] {
				t.Errorf("asked %d, want %d workers", asked, c.asked)
			}
			if serves := c.asked == 2 && c.again == nil; failed == serves || (text == "a") != serves {
				t.Errorf("%q, failed: %v", text, failed)
			}
			states := byID(t, r)
			for _, w := range states {
				if w.ActiveRequests != 0 {
					t.Errorf("left behind: %+v", w)
				}
			}
			if w := states[first.Worker.ID]; w.Failing != c.failing || w.Failures != c.broke {
				t.Errorf("failing %v, %d failures; want %v, %d", w.Failing, w.Failures, c.failing, c.broke)
			}
			if !failed { // the session stays with the worker that served
				d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Session: "s"})
				if kept, _ := r.Decision("g"); err != nil || d.Worker.ID != asked[1] || d.Reason != router.ReasonSession || kept.Served != d.Address {
					t.Errorf("the session's next turn: %+v, %v", d, err)
				}
			}
		})
	}
}
