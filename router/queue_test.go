// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// queued returns a router whose requests wait above one batch of 8 tokens.
func queued(t *testing.T, q router.QueueConfig, workers int) *router.Router {
	t.Helper()
	if q.Threshold == nil {
		q.Threshold = new(1.)
	}
	r := newRouter(t, router.Config{Queue: q}, 0)
	for id := range workers {
		w := worker(uint64(id + 1))
		w.MaxBatchedTokens = 8
		set(t, r, w)
	}
	return r
}

// line is a set of waiting requests and their results.
type line struct {
	r  *router.Router
	wg sync.WaitGroup

	mu    sync.Mutex
	order []string
	errs  map[string]error
}

// join sends a request, which is expected to wait.
func (l *line) join(ctx context.Context, t *testing.T, req router.Request) {
	t.Helper()
	waits := make(chan struct{})
	req.Model = "m"
	req.Waiting = func(split bool) { close(waits) }
	l.wg.Go(func() {
		_, err := l.r.BestWorker(ctx, req)
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.errs == nil {
			l.errs = make(map[string]error)
		}
		l.errs[req.ID] = err
		if err == nil {
			l.order = append(l.order, req.ID)
		}
	})
	synctest.Wait()
	select {
	case <-waits:
	default:
		t.Errorf("%s does not wait", req.ID)
	}
}

func (l *line) admitted() string {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.order, " ")
}

func (l *line) err(id string) error {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.errs[id]
}

// own returns the tokens of n blocks that no other request has.
func own(id string, n int) []uint32 {
	return prompt(strings.Repeat(id[:1], n))
}

func TestQueueThreshold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := queued(t, router.QueueConfig{Threshold: new(2.)}, 2)
		occupy(t, r, "a", 1, "AB", false) // 16 of 16 tokens
		occupy(t, r, "b", 2, "CD", false)
		occupy(t, r, "c", 1, "E", false) // 24 tokens
		if got, err := pick(t, r, router.Request{ID: "d", Tokens: prompt("F")}); err != nil || got != 2 {
			t.Errorf("at the threshold: worker %d, %v; want 2", got, err)
		}
		l := line{r: r}
		l.join(t.Context(), t, router.Request{ID: "e", Tokens: prompt("G")})
		// A request without a booking does not wait.
		if _, err := pick(t, r, router.Request{}); err != nil {
			t.Error(err)
		}
		r.MarkPrefillCompleted("c")
		if got := l.admitted(); got != "e" {
			t.Errorf("admitted %q", got)
		}
		if kept, _ := r.Decision("e"); kept.Worker.ID != 1 || kept.QueueTime != 0 {
			t.Errorf("%+v", kept)
		}
	})
}

// The policy sets the order. The end of a request, a first token, and a change of the
// fleet each let waiting requests proceed.
func TestQueueOrder(t *testing.T) {
	for policy, want := range map[slots.QueuePolicy]string{slots.FCFS: "D A B C", slots.LCFS: "D C B A", slots.WSPT: "D C B A"} {
		t.Run(string(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := queued(t, router.QueueConfig{Policy: policy}, 1)
				occupy(t, r, "x", 1, "XY", false)
				l := line{r: r}
				for _, q := range []router.Request{
					{ID: "A", Tokens: own("A", 8)}, {ID: "B", Tokens: own("B", 4)}, {ID: "C", Tokens: own("C", 2)}, {ID: "D", Tokens: own("D", 8), StrictPriority: 1},
				} {
					l.join(t.Context(), t, q)
					time.Sleep(time.Second)
				}
				for _, end := range []func(string) bool{r.Free, r.MarkPrefillCompleted, r.Abandon, r.MarkPrefillCompleted} {
					id := "x"
					if all := strings.Fields(l.admitted()); len(all) > 0 {
						id = all[len(all)-1]
					}
					end(id)
				}
				if got := l.admitted(); got != want {
					t.Errorf("admitted %q, want %q", got, want)
				}
			})
		})
	}
}

func TestQueueEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := queued(t, router.QueueConfig{Limit: 3}, 1)
		occupy(t, r, "x", 1, "XY", false)
		l := line{r: r}
		cause := errors.New("the client left")
		ctx, cancel := context.WithCancelCause(t.Context())
		l.join(ctx, t, router.Request{ID: "leaves"})
		l.join(t.Context(), t, router.Request{ID: "hurry", TTFTTarget: 500 * time.Millisecond})
		l.join(t.Context(), t, router.Request{ID: "stays"})
		if _, err := pick(t, r, router.Request{ID: "one too many"}); !errors.Is(err, router.ErrQueueFull) {
			t.Errorf("the fourth of three: %v", err)
		}
		cancel(cause)
		if err := l.err("leaves"); !errors.Is(err, cause) {
			t.Errorf("a caller that gave up: %v", err)
		}
		time.Sleep(499 * time.Millisecond)
		if err := l.err("hurry"); err != nil {
			t.Errorf("before its time: %v", err)
		}
		time.Sleep(time.Millisecond)
		if err := l.err("hurry"); !errors.Is(err, router.ErrTooLate) {
			t.Errorf("after its time: %v", err)
		}
		l.join(t.Context(), t, router.Request{ID: "again"})
		r.RemoveWorker(1)
		for _, id := range []string{"stays", "again"} {
			if err := l.err(id); !errors.Is(err, router.ErrNoWorkers) {
				t.Errorf("without workers, %s: %v", id, err)
			}
		}
		for _, id := range []string{"leaves", "hurry", "stays", "again"} {
			if r.Free(id) {
				t.Errorf("%s is still in flight", id)
			}
		}
		l.wg.Wait()
	})
}

// A pinned request waits for its worker only and delays no other request.
func TestQueueOfPins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := queued(t, router.QueueConfig{}, 2)
		occupy(t, r, "x", 1, "XY", false)
		l := line{r: r}
		l.join(t.Context(), t, router.Request{ID: "pinned", Pinned: &router.Worker{ID: 1}, StrictPriority: 9})
		if got, err := pick(t, r, router.Request{ID: "free", Tokens: prompt("PQ")}); err != nil || got != 2 {
			t.Errorf("another request: worker %d, %v; want 2", got, err)
		}
		r.Free("x")
		if got := l.admitted(); got != "pinned" {
			t.Errorf("admitted %q", got)
		}
		occupy(t, r, "y", 1, "XY", false)
		l.join(t.Context(), t, router.Request{ID: "orphan", Pinned: &router.Worker{ID: 1}})
		r.RemoveWorker(1)
		if err := l.err("orphan"); !errors.Is(err, router.ErrPinnedUnknown) {
			t.Errorf("the error after the worker left: %v", err)
		}
	})
}

// With the queue, a request waits while all workers are busy. The next tick notices that
// a report became stale.
func TestQueueOfTheBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conf := router.Config{Queue: router.QueueConfig{Threshold: new(9.)}, Thresholds: scorer.Thresholds{ActiveBlocks: new(.5)}}
		r := newRouter(t, conf, 0)
		w := worker(1)
		w.TotalKVBlocks = 10
		set(t, r, w)
		r.SetEngineLoad(router.Worker{ID: 1}, 6, time.Now())
		l := line{r: r}
		l.join(t.Context(), t, router.Request{ID: "a"})
		r.SetEngineLoad(router.Worker{ID: 1}, 5, time.Now())
		if got := l.admitted(); got != "a" {
			t.Errorf("after a better report: %q", got)
		}
		r.SetEngineLoad(router.Worker{ID: 1}, 7, time.Now())
		l.join(t.Context(), t, router.Request{ID: "b"})
		r.Tick()
		if got := l.admitted(); got != "a" {
			t.Errorf("the report still counts: %q", got)
		}
		time.Sleep(11 * time.Second)
		r.Tick()
		if got := l.admitted(); got != "a b" {
			t.Errorf("after the report's life: %q", got)
		}
		r.SetEngineLoad(router.Worker{ID: 1}, 7, time.Now())
		l.join(t.Context(), t, router.Request{ID: "c"})
		if _, err := r.SetThresholds("m", func(scorer.Thresholds) scorer.Thresholds { return scorer.Thresholds{} }); err != nil {
			t.Fatal(err)
		}
		if got := l.admitted(); got != "a b c" {
			t.Errorf("without a threshold: %q", got)
		}
	})
}

// The overlap of a request is counted again if it leaves the queue after ten seconds.
// Requests behind it stay behind it.
func TestQueueCountsOverlapAnew(t *testing.T) {
	for wait, want := range map[time.Duration]int{9 * time.Second: 0, 11 * time.Second: 3} {
		synctest.Test(t, func(t *testing.T) {
			r := queued(t, router.QueueConfig{}, 1)
			occupy(t, r, "x", 1, "XYZ", false)
			l := line{r: r}
			l.join(t.Context(), t, router.Request{ID: "a", Tokens: prompt("QRST")})
			l.join(t.Context(), t, router.Request{ID: "b", Tokens: prompt("abcd")})
			store(r, router.Worker{ID: 1}, "QRS")
			time.Sleep(wait)
			r.Free("x")
			got := l.admitted()
			kept, _ := r.Decision("a")
			if !strings.HasPrefix(got, "a") || kept.OverlapBlocks != want || kept.QueueTime != wait {
				t.Errorf("after %v: admitted %q, %d blocks after %v; want a, %d", wait, got, kept.OverlapBlocks, kept.QueueTime, want)
			}
			r.Free("a")
			if got := l.admitted(); got != "a b" {
				t.Errorf("admitted %q", got)
			}
		})
	}
}

// A panic in the caller's callback for waiting leaves nothing in the queue.
func TestQueueOfAPanic(t *testing.T) {
	r := queued(t, router.QueueConfig{}, 1)
	occupy(t, r, "x", 1, "XY", false)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic is lost")
			}
		}()
		_, _ = r.BestWorker(t.Context(), router.Request{ID: "p", Model: "m", Waiting: func(bool) { panic("no") }})
	}()
	if r.Free("p") {
		t.Error("the request is in flight")
	}
	r.Free("x")
	if got, err := pick(t, r, router.Request{ID: "p"}); err != nil || got != 1 {
		t.Errorf("worker %d, %v", got, err)
	}
}

// Under concurrent load each request is admitted or refused, and nothing is left.
func TestQueueUnderLoad(t *testing.T) {
	r := queued(t, router.QueueConfig{Limit: 20}, 2)
	var wg sync.WaitGroup
	var mu sync.Mutex
	outcomes := map[string]int{}
	for g := range 40 {
		wg.Go(func() {
			for i := range 30 {
				id := fmt.Sprint(g, "-", i)
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+g%5)*time.Millisecond)
				req := router.Request{ID: id, Model: "m", Tokens: own(string(rune('A'+g)), 2), StrictPriority: g % 3}
				if g%7 == 0 {
					req.Pinned = &router.Worker{ID: uint64(1 + g%2)}
				}
				_, err := r.BestWorker(ctx, req)
				cancel()
				what := "admitted"
				switch {
				case err == nil:
					r.MarkPrefillCompleted(id)
					if !r.Free(id) {
						what = "lost"
					}
				case errors.Is(err, router.ErrQueueFull):
					what = "full"
				case errors.Is(err, context.DeadlineExceeded):
					what = "gave up"
				default:
					what = err.Error()
				}
				mu.Lock()
				outcomes[what]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for what := range outcomes {
		if !slices.Contains([]string{"admitted", "full", "gave up"}, what) {
			t.Error(what)
		}
	}
	if outcomes["admitted"] == 0 {
		t.Errorf("%v", outcomes)
	}
	for _, w := range r.Workers() {
		if w.ActiveRequests != 0 || w.PendTokens != 0 || w.ActiveBlocks != 0 {
			t.Errorf("left behind: %+v", w)
		}
	}
}

// A request that is freed while it waits holds nothing afterwards, whether or not its id
// was used again.
func TestQueueOfTheFreed(t *testing.T) {
	for _, again := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := queued(t, router.QueueConfig{Limit: 1}, 1) // its place is free as well
			occupy(t, r, "x", 1, "XY", false)
			l := line{r: r}
			l.join(t.Context(), t, router.Request{ID: "A", Tokens: own("A", 2)})
			if !r.Free("A") {
				t.Error("a waiting request cannot be freed")
			}
			second := line{r: r}
			if again {
				second.join(t.Context(), t, router.Request{ID: "A", Tokens: own("B", 2)})
			}
			// The freed request returns at once, not when there is room.
			if err := l.err("A"); !errors.Is(err, router.ErrFreed) {
				t.Errorf("the freed request ended with %v, want ErrFreed", err)
			}
			r.Free("x")
			if again {
				// Another request has taken the id. It gets the slot or must try again;
				// never are both admitted.
				if err := second.err("A"); err == nil && !r.Free("A") {
					t.Error("the second request of this id has lost its slot")
				}
			}
			for _, w := range r.Workers() {
				if w.ActiveRequests != 0 || w.PendTokens != 0 || w.ActiveBlocks != 0 {
					t.Errorf("left behind: %+v", w)
				}
			}
			if _, err := pick(t, r, router.Request{ID: "A", Tokens: prompt("F")}); err != nil {
				t.Errorf("the id cannot be used again: %v", err)
			}
		})
	}
}

// A request that is freed before it enters the queue does not wait either.
func TestFreedBeforeItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r *router.Router
		freed, busy := 0, false
		r = newRouter(t, router.Config{Queue: router.QueueConfig{Threshold: new(1.)}, Now: func() time.Time {
			if r != nil && !busy {
				busy = true // Free reads the clock, too
				if r.Free("A") {
					freed++
				}
				busy = false
			}
			return time.Now()
		}}, 0)
		w := worker(1)
		w.MaxBatchedTokens = 8
		set(t, r, w)
		occupy(t, r, "x", 1, "XY", false)
		ended := make(chan error, 1)
		go func() {
			_, err := r.BestWorker(t.Context(), router.Request{ID: "A", Model: "m", Tokens: own("A", 2)})
			ended <- err
		}()
		synctest.Wait()
		select {
		case err := <-ended:
			if !errors.Is(err, router.ErrFreed) || freed != 1 {
				t.Errorf("ended with %v, freed %d times; want ErrFreed", err, freed)
			}
		default:
			t.Error("a freed request waits")
			r.Free("x")
		}
	})
}

// A router whose costs ignore cached blocks keeps no index. A request that waits in its queue is admitted
// when a worker is free, without a count of cached blocks.
func TestQueueWithoutAnIndex(t *testing.T) {
	s := scorer.Defaults()
	s.OverlapCredit, s.Policy = 0, scorer.DynamoNewer
	if s.UsesOverlap() {
		t.Fatal("these settings use cached blocks")
	}
	r := newRouter(t, router.Config{Scoring: s, Queue: router.QueueConfig{Threshold: new(0.)}}, 0)
	w := worker(1)
	w.MaxBatchedTokens = 8
	set(t, r, w)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	waits := make(chan bool, 1)
	book(t, r, "first", "abcdefgh")
	done := make(chan error, 1)
	go func() {
		_, err := r.BestWorker(ctx, router.Request{ID: "second", Model: "m", Tokens: make([]uint32, 40), Waiting: func(bool) { waits <- true }})
		done <- err
	}()
	select {
	case <-waits:
	case err := <-done:
		t.Fatalf("the second request does not wait: %v", err)
	}
	r.Free("first")
	if err := <-done; err != nil {
		t.Error(err)
	}
}
