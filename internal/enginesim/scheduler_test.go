// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
)

// tokens returns a prompt of n tokens that begins like the other prompts of its topic.
func tokens(topic, n int) []uint32 { return span(topic*1_000_003, n) }

// span returns n token ids that count up.
func span(from, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(from + i)
	}
	return out
}

func newScheduler(preset string, blocks int) (*enginesim.Scheduler, *[]indexer.Event, *[]string) {
	var evs []indexer.Event
	var log []string
	m := enginesim.NewScheduler(preset, blocks, func(ev indexer.Event) { evs = append(evs, ev) }, func(id int, what string) {
		log = append(log, fmt.Sprint(id, " ", what))
	})
	return m, &evs, &log
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// The worked examples of the timing model.
func TestStepTimes(t *testing.T) {
	m, _, _ := newScheduler("32b-2xh100", 1<<20)
	m.Submit(1, tokens(1, 12_000), 1)
	for i, want := range []float64{400.393, 242.567} {
		if got := ms(m.Step()); math.Abs(got-want) > .001 {
			t.Errorf("step %d of a prompt of 12,000 tokens takes %.3f ms, want %.3f", i+1, got, want)
		}
	}
	if d := m.Step(); d != 0 {
		t.Errorf("an idle engine steps for %v", d)
	}
	for preset, want := range map[string]float64{"32b-2xh100": 400.4, "8b-1xh100": 172.7, "70b-4xh100": 582.5} {
		m, _, _ := newScheduler(preset, 1<<20)
		m.Submit(1, tokens(1, 8192), 1)
		if got := ms(m.Step()); math.Abs(got-want) > .05 {
			t.Errorf("%s: a step of 8,192 tokens takes %.2f ms, want %.1f", preset, got, want)
		}
	}
	// Eight concurrent decodes with about 80,000 tokens together.
	m, _, log := newScheduler("32b-2xh100", 1<<20)
	for i := range 8 {
		m.Submit(i, tokens(i, 9950), 200)
	}
	for ms(m.Step()) > 20 { // prefills
	}
	kv := 8 * 9950
	for _, l := range *log {
		if strings.HasSuffix(l, "token") {
			kv++
		}
	}
	if got, want := ms(m.Step()), 11+5.6e-5*float64(kv); math.Abs(got-want) > .001 || math.Abs(got-15.48) > .05 {
		t.Errorf("a step of eight decodes with %d tokens takes %.3f ms, want %.3f", kv, got, want)
	}
}

// Prefills share the step's budget in order of arrival, and each request ends with its own number
// of tokens.
func TestContinuousBatching(t *testing.T) {
	m, _, log := newScheduler("32b-2xh100", 1<<20)
	m.Submit(1, tokens(1, 6000), 3)
	m.Submit(2, tokens(2, 6000), 1)
	var first string
	for m.Step() > 0 {
		if first == "" {
			first = fmt.Sprint(*log)
		}
	}
	if first != "[1 admitted 2 admitted 1 token]" {
		t.Errorf("after the first step: %s", first)
	}
	want := []string{"1 admitted", "2 admitted", "1 token", "1 token", "2 token", "2 finished", "1 token", "1 finished"}
	if diff := cmp.Diff(want, *log); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Equal prompts that arrive at once are computed once, because each waits until the step has budget
// left for it. By then the blocks of the first prompt are cached.
func TestEqualPromptsAreComputedOnce(t *testing.T) {
	m, evs, log := newScheduler("32b-2xh100", 1<<20)
	const prompt = 20_000 // 1,250 blocks; the last one is computed for each request
	for i := range 8 {
		m.Submit(i, tokens(1, prompt), 2)
	}
	// A chunk, a chunk, the rest of the prompt and 16 tokens for each other request.
	for i, want := range []string{"[0 admitted]", "[0 admitted]", "[0 admitted 1 admitted 2 admitted 3 admitted 4 admitted 5 admitted 6 admitted 7 admitted " +
		"0 token 1 token 2 token 3 token 4 token 5 token 6 token 7 token]"} {
		m.Step()
		if got := fmt.Sprint(*log); got != want {
			t.Fatalf("after step %d: %s, want %s", i+1, got, want)
		}
	}
	for m.Step() > 0 {
	}
	if queries, hits := m.Looked(); queries != 8*prompt || queries-hits != prompt+7*16 {
		t.Errorf("%d of %d prompt tokens are computed, want %d", queries-hits, queries, prompt+7*16)
	}
	stored := 0
	for _, ev := range *evs {
		stored += len(ev.Blocks)
	}
	if stored != prompt/16 {
		t.Errorf("%d blocks are stored, want %d", stored, prompt/16)
	}
}

// The full blocks of a chunk are cached in the step that computes it. A request that is admitted
// later finds them, though the first request is not finished with its prompt.
func TestBlocksAreCachedChunkByChunk(t *testing.T) {
	m, evs, log := newScheduler("32b-2xh100", 1<<20)
	decoding := m.Submit(0, tokens(2, 15), 1000) // takes one token of each step
	m.Step()
	first := m.Submit(1, tokens(1, 20_000), 1)
	var stored []int
	for range 3 {
		before := len(*evs)
		m.Step()
		n := 0
		for _, ev := range (*evs)[before:] {
			n += len(ev.Blocks)
		}
		stored = append(stored, n)
	}
	// Chunks of 8,191, 8,191 and 3,618 tokens end within blocks 511, 1,023 and 1,250.
	if want := []int{511, 512, 227}; !slices.Equal(stored, want) {
		t.Errorf("steps store %d blocks, want %d", stored, want)
	}
	for i := 1; i < len(*evs); i++ {
		if above := (*evs)[i-1].Blocks; !(*evs)[i].HasParent || (*evs)[i].Parent != above[len(above)-1].External {
			t.Errorf("event %d does not follow the last block of event %d", i, i-1)
		}
	}
	if first.Cached() != 0 {
		t.Errorf("the first request finds %d of its own tokens in the cache", first.Cached())
	}

	// A prompt is aborted after its first chunk: its blocks stay cached.
	*log = nil
	half := m.Submit(2, tokens(3, 20_000), 1)
	m.Step()
	m.Abort(half)
	m.Step()
	same := m.Submit(3, tokens(3, 20_000), 1)
	m.Step()
	if same.Cached() != 511*16 {
		t.Errorf("%d tokens of the aborted prompt are cached, want %d", same.Cached(), 511*16)
	}
	m.Abort(decoding)
	for m.Step() > 0 {
	}
	if _, used, reserved := m.Blocks(); used != 0 || reserved != 0 {
		t.Errorf("%d blocks used, %d reserved", used, reserved)
	}
}

// A request's cached blocks are counted when it is first scheduled, not when it arrives.
func TestHitIsCountedAtTheFirstStep(t *testing.T) {
	m, _, log := newScheduler("32b-2xh100", 1<<20)
	m.Submit(1, tokens(1, 16_384), 1)
	second := m.Submit(2, tokens(1, 12_000), 1) // a prefix of the first prompt
	for range 2 {
		m.Step()
		if slices.Contains(*log, "2 admitted") {
			t.Fatal("a request is admitted to a step without budget")
		}
	}
	m.Step()
	if want := 11_984; second.Cached() != want { // the last block is computed
		t.Errorf("%d tokens are cached, want %d", second.Cached(), want)
	}
}

func TestPrefixCache(t *testing.T) {
	m, evs, _ := newScheduler("32b-2xh100", 100)
	run := func(topic, n int) int {
		r := m.Submit(0, tokens(topic, n), 1)
		for m.Step() > 0 {
		}
		return r.Cached()
	}
	for _, c := range []struct{ topic, n, cached int }{
		{1, 64, 0},   // four blocks, all new
		{1, 64, 48},  // all cached: the last token is computed, and so its block
		{1, 65, 64},  // the last token is behind the cached blocks
		{1, 200, 64}, // twelve blocks, four cached
		{1, 200, 192},
		{2, 15, 0},
		{2, 15, 0}, // less than a block is never cached
	} {
		if got := run(c.topic, c.n); got != c.cached {
			t.Errorf("prompt of %d tokens on topic %d: %d cached, want %d", c.n, c.topic, got, c.cached)
		}
	}
	if len(*evs) != 2 || len((*evs)[0].Blocks) != 4 || (*evs)[0].HasParent || len((*evs)[1].Blocks) != 8 || !(*evs)[1].HasParent || (*evs)[1].Parent != (*evs)[0].Blocks[3].External {
		t.Errorf("events %+v", *evs)
	}
	// A prompt that needs room evicts the last blocks of other prompts first.
	run(3, 16*92)
	if got := run(1, 200); got == 0 || got >= 192 {
		t.Errorf("%d tokens are cached after an eviction, want some: the tail goes first", got)
	}
	if cached, used, reserved := m.Blocks(); cached > 100 || used != 0 || reserved != 0 {
		t.Errorf("%d blocks cached, %d used, %d reserved", cached, used, reserved)
	}
}

// A request waits while the blocks of others leave no room for it. A request that is alone is
// admitted whatever it needs.
func TestCapacity(t *testing.T) {
	m, _, log := newScheduler("32b-2xh100", 20)
	m.Submit(1, tokens(1, 160), 100) // 10 blocks and 7 for its output
	m.Submit(2, tokens(2, 80), 1)
	m.Step()
	if fmt.Sprint(*log) != "[1 admitted 1 token]" {
		t.Fatalf("log %v, want 2 to wait", *log)
	}
	for m.Step() > 0 {
	}
	if last := (*log)[len(*log)-1]; last != "2 finished" {
		t.Errorf("the last thing was %s", last)
	}
}

// Random work checks the invariants: no block is in use at the end, the capacity is never
// exceeded, and the events replayed give the content of the cache.
func TestCacheInvariants(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 1))
		m, evs, log := newScheduler("8b-1xh100", 60)
		replayed, next := map[uint64]uint64{}, 0
		replay := func() {
			for _, ev := range (*evs)[next:] {
				if _, ok := replayed[ev.Parent]; ev.HasParent && !ok {
					t.Fatalf("seed %d: stored behind %d, which is not there", seed, ev.Parent)
				}
				for _, b := range ev.Blocks {
					if _, twice := replayed[b.External]; twice {
						t.Fatalf("seed %d: %d is stored twice", seed, b.External)
					}
					replayed[b.External] = b.Local
				}
				for _, e := range ev.Externals {
					if _, ok := replayed[e]; !ok {
						t.Fatalf("seed %d: %d is removed without having been stored", seed, e)
					}
					delete(replayed, e)
				}
			}
			next = len(*evs)
		}
		submitted, aborted := 0, 0
		var live []enginesim.Request
		for step := range 400 {
			if rng.IntN(2) == 0 && step < 300 {
				submitted++
				live = append(live, m.Submit(submitted, tokens(rng.IntN(4), 1+rng.IntN(300)), 1+rng.IntN(40)))
			}
			if rng.IntN(20) == 0 && len(live) > 0 {
				m.Abort(live[rng.IntN(len(live))]) // the request may have ended already
				aborted++
			}
			m.Step()
			replay()
			if diff := cmp.Diff(m.Externals(), replayed); diff != "" {
				t.Fatalf("seed %d, step %d: cache (-) and replayed events (+):\n%s", seed, step, diff)
			}
			if cached, used, reserved := m.Blocks(); reserved < 0 || cached+reserved > 60 && used < cached {
				t.Fatalf("seed %d, step %d: %d blocks cached, %d used, %d reserved", seed, step, cached, used, reserved)
			}
		}
		for m.Step() > 0 {
		}
		if _, used, reserved := m.Blocks(); used != 0 || reserved != 0 {
			t.Fatalf("seed %d: idle with %d blocks used and %d reserved", seed, used, reserved)
		}
		finished := 0
		for _, l := range *log {
			if strings.HasSuffix(l, "finished") {
				finished++
			}
		}
		if finished > submitted || finished < submitted-aborted {
			t.Fatalf("seed %d: %d of %d requests finished, %d aborted", seed, finished, submitted, aborted)
		}
	}
}

func TestAbort(t *testing.T) {
	m, _, log := newScheduler("32b-2xh100", 1000)
	running := m.Submit(1, tokens(1, 1600), 50)
	m.Step()
	waiting := m.Submit(2, tokens(2, 1600), 50)
	m.Abort(waiting)
	m.Abort(running)
	for m.Step() > 0 {
	}
	if slices.Contains(*log, "2 admitted") || slices.Contains(*log, "1 finished") {
		t.Errorf("log %v", *log)
	}
	if _, used, reserved := m.Blocks(); used != 0 || reserved != 0 {
		t.Errorf("%d blocks used, %d reserved", used, reserved)
	}
}
