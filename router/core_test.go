// SPDX-License-Identifier: Apache-2.0

package router

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// When an ordinal is given to another worker, an overlap counted for the previous worker
// does not count for the new one.
func TestOverlapOfAnEarlierWorkerDoesNotCount(t *testing.T) {
	info := func(id uint64) *WorkerInfo {
		return &WorkerInfo{ID: id, Models: []string{"m"}, Address: netip.MustParseAddrPort("10.0.0.1:1"), BlockSize: 1, DPSize: 1}
	}
	settings := scorer.Defaults()
	settings.Policy = scorer.Dynamo
	c := newCore(&Config{Mode: KV, Scoring: settings, PrefillThroughput: 1}, 1)
	c.setWorker(info(1))
	in := &decisionInput{
		Request: &Request{}, prompt: prompt{tokens: 4},
		hashes:  hashes{sequence: []uint64{1, 2, 3, 4}},
		overlap: overlap{blocks: []int32{4}, version: c.changes},
	}
	var to result
	d := &to.decision
	if err := c.decide(time.Now(), in, look, 0, new(choices), &to); err != nil || d.OverlapBlocks != 4 {
		t.Fatalf("overlap %d, %v; want the 4 blocks that were counted", d.OverlapBlocks, err)
	}
	c.removeWorker(1)
	c.setWorker(info(2))
	to = result{}
	if err := c.decide(time.Now(), in, look, 0, new(choices), &to); err != nil || d.Worker.ID != 2 || d.OverlapBlocks != 0 {
		t.Errorf("worker %d with overlap %d, %v; want worker 2 with none", d.Worker.ID, d.OverlapBlocks, err)
	}
}

// coreOf returns a core with workers of a batch of 8 tokens, and a function that requests
// a decision.
func coreOf(t *testing.T, conf Config, workers int) (c *core, submit func(now time.Time, id string, tokens int, target time.Duration) (*waiter, Decision, error)) {
	t.Helper()
	conf, err := conf.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	made := newCore(&conf, 8)
	c = &made
	for id := range workers {
		c.setWorker(&WorkerInfo{ID: uint64(id) + 1, Models: []string{"m"}, Address: netip.MustParseAddrPort("10.0.0.1:1"), BlockSize: 8, DPSize: 1, MaxBatchedTokens: 8})
	}
	return c, func(now time.Time, id string, tokens int, target time.Duration) (*waiter, Decision, error) {
		in := &decisionInput{Request: &Request{ID: id, TTFTTarget: target}, prompt: prompt{tokens: tokens}, session: 7}
		to := new(result)
		w, err := c.submit(now, in, new(choices), to)
		return w, to.decision, err
	}
}

// A waiting request whose deadline has passed gets no room, even if no tick ran since the
// deadline.
func TestRoomIsNotForTheLate(t *testing.T) {
	c, submit := coreOf(t, Config{Queue: QueueConfig{Threshold: new(0.)}}, 1)
	now := time.Unix(1000, 0)
	if w, _, err := submit(now, "first", 9, 0); w != nil || err != nil {
		t.Fatal(w, err)
	}
	late, _, err := submit(now, "late", 9, time.Second)
	if err != nil || late == nil {
		t.Fatal(err)
	}
	next, _, err := submit(now, "next", 9, time.Hour)
	if err != nil || next == nil {
		t.Fatal(err)
	}
	c.slots.Finish(now, "first")
	c.pump(now.Add(time.Second))
	if len(c.woken) != 2 || !errors.Is(late.err, ErrTooLate) || next.err != nil || !next.done {
		t.Errorf("%d are woken; the late request: %v, the next one: %v", len(c.woken), late.err, next.err)
	}
	if _, taken := c.slots.Worker("late"); taken {
		t.Error("the late request has a slot")
	}
}

// The load of requests whose client left makes no later request wait or fail: the worker may be idle. It does
// so while the clients wait.
func TestLeftRequestsMakeNobodyWait(t *testing.T) {
	for name, conf := range map[string]Config{
		"queue":     {Queue: QueueConfig{Threshold: new(0.)}},
		"threshold": {Thresholds: Thresholds{PrefillTokens: new(1)}},
	} {
		c, submit := coreOf(t, conf, 1)
		*c.thresholds = conf.Thresholds
		now := time.Unix(1000, 0)
		if w, _, err := submit(now, "first", 9, 0); w != nil || err != nil {
			t.Fatal(name, w, err)
		}
		second, _, err := submit(now, "second", 9, time.Hour)
		if second == nil && err == nil || second != nil && second.done {
			t.Errorf("%s: the second request does not wait for the first one", name)
		}
		c.end(now, "first", endLeft)
		if l := c.slots.Load(0); l.PendTokens != 9 || l.Left != 1 {
			t.Fatalf("%s: %+v, want the load of the first request", name, l)
		}
		if second == nil {
			_, _, err = submit(now, "third", 9, 0)
		} else if c.pump(now); !second.done {
			err = errQueued
		}
		if err != nil {
			t.Errorf("%s: the load of the first request keeps the next one out: %v", name, err)
		}
	}
}

// A booking extends the life of its session before the first token: a session must not
// expire during a long prefill.
func TestABookingIsAUseOfItsSession(t *testing.T) {
	c, submit := coreOf(t, Config{Sessions: SessionConfig{TTL: time.Minute}}, 3)
	now := time.Unix(1000, 0)
	_, d, err := submit(now, "first", 9, 0)
	if err != nil {
		t.Fatal(err)
	}
	c.prefillCompleted(now, "first", 7, false, SignTold)
	for range 3 {
		now = now.Add(50 * time.Second)
		_, again, err := submit(now, now.String(), 9, 0)
		if err != nil || again.Worker != d.Worker || again.Reason != ReasonSession {
			t.Fatalf("worker %d, %s, %v; want %d by its session", again.Worker.ID, again.Reason, err, d.Worker.ID)
		}
	}
}

// A threshold that has no data is counted. Rules see which worker got the latest prompt
// without any cached block.
func TestWhatOnlyFewLookAt(t *testing.T) {
	c, submit := coreOf(t, Config{Thresholds: Thresholds{ActiveBlocks: new(.5), PrefillFraction: new(.5)}}, 3)
	now := time.Unix(1000, 0)
	if _, _, err := submit(now, "a", 4, 0); err != nil || c.skipped != 3 {
		t.Errorf("%d skipped, %v; want the blocks of 3 workers", c.skipped, err)
	}
	var seen [][]uint64
	_, submit = coreOf(t, Config{Rule: func(_ *scorer.Request, in []scorer.Input, _ []float64) int {
		var cold []uint64
		for i := range in {
			cold = append(cold, in[i].LastCold)
		}
		seen = append(seen, cold)
		return len(seen) % 2
	}}, 2)
	for _, id := range []string{"a", "b", "c"} {
		if _, _, err := submit(now, id, 4, 0); err != nil {
			t.Fatal(err)
		}
	}
	if want := [][]uint64{{0, 0}, {0, 1}, {2, 1}}; !reflect.DeepEqual(seen, want) {
		t.Errorf("the last cold requests: %v, want %v", seen, want)
	}
}
