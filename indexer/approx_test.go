// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
)

func at(seconds float64) time.Time {
	return time.Unix(1_000_000, int64(seconds*1e9))
}

// spell returns the hashes of a prompt of one-letter blocks.
func spell(letters string) (local, sequence []uint64) {
	for _, l := range letters {
		local = append(local, uint64(l)*0x9E3779B97F4A7C15)
	}
	return local, indexer.AppendSequenceHashes(nil, local)
}

func overlaps(a *indexer.Approx, now time.Time, letters string, workers int) []int32 {
	_, sequence := spell(letters)
	dst := make([]int32, workers)
	a.Match(now, dst, sequence)
	return dst
}

func insert(a *indexer.Approx, now time.Time, worker int, letters string) uint64 {
	_, sequence := spell(letters)
	stamp, _ := a.Insert(now, worker, 1, sequence)
	return stamp
}

func newApprox(c indexer.ApproxConfig, limits ...int) *indexer.Approx {
	a := indexer.NewApprox(c)
	for worker, limit := range limits {
		a.Begin(worker, 1, limit)
	}
	return a
}

// A prediction expires at the first step of 100 ms that is 120 s after its last use.
func TestApproxLifetime(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0, 0)
	insert(a, at(10.03), 0, "abc")
	insert(a, at(10.03), 1, "abx")
	insert(a, at(60), 1, "ab") // this does not extend the life of x
	for _, c := range []struct {
		at   float64
		want []int32
	}{
		{10.03, []int32{3, 2}},
		{130.09, []int32{3, 2}},
		{130.1, []int32{0, 2}},
		{179.99, []int32{0, 2}},
		{180, []int32{0, 0}},
	} {
		if got := overlaps(a, at(c.at), "abc", 2); !slices.Equal(got, c.want) {
			t.Errorf("at %v s: overlap %v, want %v", c.at, got, c.want)
		}
	}
	if n := a.Blocks(); n != 0 {
		t.Errorf("%d blocks are left after all have died", n)
	}
}

// The size of a worker's cache limits its predictions: the least recently used are
// removed, ends first.
func TestApproxLimit(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 4)
	insert(a, at(0), 0, "abc")
	insert(a, at(1), 0, "xy") // removes c
	if got := []int32{overlaps(a, at(1), "abc", 1)[0], overlaps(a, at(1), "xy", 1)[0]}; !slices.Equal(got, []int32{2, 2}) {
		t.Errorf("overlaps %v of abc and xy, want 2 and 2", got)
	}
	insert(a, at(2), 0, "123456") // keeps its first four blocks
	if got := []int32{overlaps(a, at(2), "123456", 1)[0], overlaps(a, at(2), "abc", 1)[0]}; !slices.Equal(got, []int32{4, 0}) {
		t.Errorf("overlaps %v of 123456 and abc, want 4 and 0", got)
	}
	a.Begin(0, 1, 2)
	if got := overlaps(a, at(2), "123456", 1)[0]; got != 2 {
		t.Errorf("overlap %d after the limit became 2, want 2", got)
	}

	small := newApprox(indexer.ApproxConfig{MaxBlocks: 3}, 0, 0)
	insert(small, at(0), 0, "ab")
	insert(small, at(1), 1, "cd")
	if n := small.Blocks(); n != 3 {
		t.Errorf("%d blocks with room for 3", n)
	}
}

// Withdraw removes only blocks that no other request used.
func TestApproxWithdraw(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0)
	insert(a, at(0), 0, "ab")
	stamp := insert(a, at(1), 0, "abcd")
	_, sequence := spell("abcd")
	a.Withdraw(0, 2, stamp, sequence[3]) // of another worker
	if got := overlaps(a, at(1), "abcd", 1)[0]; got != 4 {
		t.Fatalf("a withdrawal of another generation left %d blocks of 4", got)
	}
	a.Withdraw(0, 1, stamp, sequence[3])
	if got := overlaps(a, at(1), "abcd", 1)[0]; got != 2 {
		t.Errorf("after the withdrawal %d blocks count, want the 2 that were there before", got)
	}
	stamp = insert(a, at(2), 0, "abcd")
	insert(a, at(3), 0, "abc")
	a.Withdraw(0, 1, stamp, sequence[3])
	if got := overlaps(a, at(3), "abcd", 1)[0]; got != 3 {
		t.Errorf("after the withdrawal %d blocks count, want the 3 that another request used since", got)
	}
}

// A prompt of a hybrid worker counts up to its end or its junction, and nowhere else. Both are withdrawn together.
func TestApproxEnds(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0, 4)
	_, sequence := spell("abcdefgh")
	whole := func(worker, blocks, junction int) (stamp uint64) {
		stamp, _ = a.InsertWhole(at(0), worker, 1, sequence[:blocks], junction)
		return stamp
	}
	ends := func(when string, want ...int) {
		t.Helper()
		for _, n := range want {
			if got := a.End(0, sequence[:n/10], 1); got != n%10 {
				t.Errorf("%s: %d of %d blocks count, want %d", when, got, n/10, n%10)
			}
		}
		if err := a.Check(); err != nil {
			t.Fatal(when, err)
		}
	}
	ends("empty", 80)
	first := whole(0, 6, 4)
	ends("inserted", 86, 66, 54, 44, 30)
	second := whole(0, 8, 4) // the junction is there already
	ends("inserted a longer one", 88, 76, 54)
	if got := a.End(0, sequence, 3); got != 6 {
		t.Errorf("%d blocks count at multiples of 3, want 6", got)
	}
	a.Withdraw(0, 1, second, sequence[7])
	ends("withdrew the longer one", 86, 54)
	a.Withdraw(0, 1, 0, sequence[5])
	ends("a stamp of 0 withdraws nothing", 86, 54)
	a.Withdraw(0, 1, first, sequence[5])
	ends("withdrew both", 80, 50)
	if a.Blocks() != 0 {
		t.Errorf("%d blocks are left", a.Blocks())
	}
	if whole(1, 5, 0) != 0 || a.End(1, sequence, 1)+a.End(7, sequence, 1) != 0 {
		t.Error("a prompt larger than the worker's cache counts")
	}
	whole(1, 4, 2)
	if whole(0, 6, 0); a.End(1, sequence, 1) != 4 || a.End(0, sequence[:5], 1) != 0 {
		t.Error("a worker's prompts count for another one")
	}
}

// unlearn applies a removal of the last block of a path by a worker. The index that has
// the path stores it in several nodes.
func unlearn(a *indexer.Approx, worker int, local []uint64) {
	x := indexer.New(indexer.Config{})
	ev := indexer.Event{Kind: indexer.Stored}
	for i, l := range local {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: uint64(i) + 1, Local: l})
	}
	x.Apply(worker, ev)
	for i := 0; i < len(local); i += 2 {
		x.Apply(worker, indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: uint64(i) + 1, Blocks: []indexer.Block{{External: uint64(i) + 100, Local: 1}}})
	}
	a.Forget(worker, x, []uint64{uint64(len(local)), 99})
}

func TestApproxForget(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0, 0)
	insert(a, at(0), 0, "abcd")
	insert(a, at(0), 0, "abx")
	insert(a, at(0), 1, "abcd")
	for _, path := range []string{"abc", "abcq", "q", "abcdefg", ""} {
		local, _ := spell(path)
		unlearn(a, 0, local)
	}
	if got := overlaps(a, at(1), "abcd", 2); !slices.Equal(got, []int32{2, 4}) {
		t.Errorf("overlaps %v after worker 0 lost c, want 2 and 4", got)
	}
	if got := overlaps(a, at(1), "abx", 2); !slices.Equal(got, []int32{3, 2}) {
		t.Errorf("overlaps %v with what is beside c, want 3 and 2", got)
	}
	a.Clear(1)
	if got := overlaps(a, at(1), "abcd", 2); !slices.Equal(got, []int32{2, 0}) {
		t.Errorf("overlaps %v after worker 1 was cleared, want 2 and 0", got)
	}
	a.Begin(0, 2, 0)
	if insert(a, at(1), 0, "ab"); overlaps(a, at(1), "ab", 1)[0] != 0 {
		t.Error("an insertion of the number's last owner counts for the next")
	}
}

// Most blocks that workers remove were not predicted. Such removals cost only the
// comparison that finds where the two differ.
func TestForgettingWhatIsNotGuessedDoesNotAllocate(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0)
	x := indexer.New(indexer.Config{})
	local := make([]uint64, 512)
	for i := range local {
		local[i] = uint64(i) + 1
	}
	ev := named(0, local)
	x.Apply(0, ev)
	local[400] = 0
	a.Insert(at(0), 0, 1, indexer.AppendSequenceHashes(nil, local))
	last := []uint64{ev.Blocks[511].External}
	if n := testing.AllocsPerRun(100, func() { a.Forget(0, x, last) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if a.Forget(0, x, []uint64{ev.Blocks[399].External}); a.WorkerBlocks(0) != 399 {
		t.Errorf("%d blocks, want the 399 before the one forgotten", a.WorkerBlocks(0))
	}
}

// slowApprox is a model of Approx: lists of prompts that are searched linearly.
type slowApprox struct {
	limits []int
	lists  [][]*slowGuess // by worker, least recently used first
	stamp  int
}

type slowGuess struct {
	prompt string // as inserted
	left   string // part of prompt that was not cut off
	dies   int64  // in units of 100 ms
	stamp  int
}

func (m *slowApprox) insert(worker int, prompt string, dies int64) int {
	prompt = prompt[:min(len(prompt), m.limits[worker])]
	list := &m.lists[worker]
	if i := slices.IndexFunc(*list, func(g *slowGuess) bool { return g.prompt == prompt }); i >= 0 {
		g := (*list)[i]
		*list = slices.Delete(*list, i, i+1)
		if g.left == prompt {
			g.dies = dies
			*list = append(*list, g)
			return 0
		}
	}
	m.stamp++
	*list = append(*list, &slowGuess{prompt, prompt, dies, m.stamp})
	for over := len(m.blocks(worker)) - m.limits[worker]; over > 0; over = len(m.blocks(worker)) - m.limits[worker] {
		oldest := (*list)[0]
		rest := &slowApprox{lists: [][]*slowGuess{(*list)[1:]}}
		alone := len(m.blocks(worker)) - len(rest.blocks(0))
		oldest.left, oldest.stamp = oldest.left[:len(oldest.left)-min(over, alone)], -1
		if alone == 0 || oldest.left == "" {
			*list = (*list)[1:]
		}
	}
	return m.stamp
}

func (m *slowApprox) withdraw(worker int, prompt string, stamp int) {
	m.lists[worker] = slices.DeleteFunc(m.lists[worker], func(g *slowGuess) bool { return g.prompt == prompt && g.stamp == stamp })
}

func (m *slowApprox) forget(worker int, path string) {
	for _, g := range m.lists[worker] {
		if path != "" && strings.HasPrefix(g.left, path) {
			g.left, g.stamp = path[:len(path)-1], -1
		}
	}
	m.lists[worker] = slices.DeleteFunc(m.lists[worker], func(g *slowGuess) bool { return g.left == "" })
}

func (m *slowApprox) expire(now int64) {
	for w := range m.lists {
		m.lists[w] = slices.DeleteFunc(m.lists[w], func(g *slowGuess) bool { return g.dies <= now })
	}
}

// blocks returns the prefixes that are predicted.
func (m *slowApprox) blocks(worker int) map[string]bool {
	all := map[string]bool{}
	for _, g := range m.lists[worker] {
		for n := range len(g.left) {
			all[g.left[:n+1]] = true
		}
	}
	return all
}

func (m *slowApprox) match(worker int, prompt string) (n int32) {
	all := m.blocks(worker)
	for int(n) < len(prompt) && all[prompt[:n+1]] {
		n++
	}
	return n
}

// inLong returns long in `make test-long`, else short.
func inLong(long, short int) int {
	if fixtures.Long() {
		return long
	}
	return short
}

// After any sequence of operations the index equals the slow model.
func TestApproxModel(t *testing.T) {
	operations := inLong(20_000, 2_000)
	const workers, ttl = 3, 50 // ttl in units of 100 ms
	for seed := range uint64(5) {
		rng := rand.New(rand.NewPCG(seed, 1))
		m := &slowApprox{limits: []int{5, 12, 1000}, lists: make([][]*slowGuess, workers)}
		a := newApprox(indexer.ApproxConfig{TTL: 5 * time.Second}, m.limits...)
		type inserted struct {
			prompt       string
			worker, slow int
			fast, last   uint64
		}
		var recent []inserted
		now := int64(0)
		for op := range operations {
			now += rng.Int64N(3)
			clock := time.Unix(1_000_000, now*int64(100*time.Millisecond))
			m.expire(now)
			prompt := make([]byte, 1+rng.IntN(8))
			for i := range prompt {
				prompt[i] = "abc"[rng.IntN(3)]
			}
			worker := rng.IntN(workers)
			local, sequence := spell(string(prompt))
			switch rng.IntN(15) {
			case 0:
				m.lists[worker] = nil
				a.Clear(worker)
			case 1:
				if len(recent) > 0 {
					r := recent[rng.IntN(len(recent))]
					m.withdraw(r.worker, r.prompt, r.slow)
					a.Expire(clock)
					if r.fast > 0 {
						a.Withdraw(r.worker, 1, r.fast, r.last)
					}
				}
			case 2:
				a.Expire(clock)
				unlearn(a, worker, local)
				m.forget(worker, string(prompt))
			default:
				r := inserted{prompt: string(prompt[:min(len(prompt), m.limits[worker])]), worker: worker}
				r.slow = m.insert(worker, string(prompt), now+ttl)
				r.fast, r.last = a.Insert(clock, worker, 1, sequence)
				if (r.fast == 0) != (r.slow == 0) {
					t.Fatalf("seed %d, operation %d: stamp %d, want %d", seed, op, r.fast, r.slow)
				}
				if recent = append(recent, r); len(recent) > 8 {
					recent = recent[1:]
				}
			}
			got := overlaps(a, clock, string(prompt), workers)
			if err := a.Check(); err != nil {
				t.Fatalf("seed %d, operation %d: %v", seed, op, err)
			}
			for w := range workers {
				if want := m.match(w, string(prompt)); got[w] != want {
					t.Fatalf("seed %d, operation %d: worker %d overlaps %s by %d, want %d", seed, op, w, prompt, got[w], want)
				}
				if got, want := a.WorkerBlocks(w), len(m.blocks(w)); got != want {
					t.Fatalf("seed %d, operation %d: worker %d has %d blocks, want %d", seed, op, w, got, want)
				}
			}
		}
	}
}

// During concurrent inserts, withdrawals and clears, a match sees each prompt of a worker
// as a whole or not at all, and unchanged prompts as they are.
func TestApproxMatchesAmidChanges(t *testing.T) {
	const workers, rounds = 4, 2000
	a := newApprox(indexer.ApproxConfig{}, make([]int, workers)...)
	insert(a, at(0), 0, "abcdefgh")
	_, sequence := spell("abcdefghij")
	var changes sync.WaitGroup
	for w := 1; w < workers; w++ {
		changes.Go(func() {
			for i := range rounds {
				stamp, last := a.Insert(at(1), w, 1, sequence[:2*w+1])
				switch other := insert(a, at(1), w, "abX"); i % 3 {
				case 0:
					a.Withdraw(w, 1, stamp, last)
					_, branch := spell("abX")
					a.Withdraw(w, 1, other, branch[2])
				default:
					a.Clear(w)
				}
			}
		})
	}
	dst := make([]int32, workers)
	for range rounds {
		a.Match(at(1), dst, sequence)
		for w, got := range dst[1:] {
			if got != 0 && got != 2 && got != int32(2*w+3) {
				t.Fatalf("worker %d: %d blocks, want 0, the 2 of the other prompt, or %d", w+1, got, 2*w+3)
			}
		}
		if dst[0] != 8 {
			t.Fatalf("worker 0: %d blocks, want its 8", dst[0])
		}
	}
	changes.Wait()
	if err := a.Check(); err != nil || a.Blocks() != 8 {
		t.Errorf("%d blocks are left, want 8; %v", a.Blocks(), err)
	}
}

// A match does not allocate, however many workers and branches there are.
func TestApproxMatchDoesNotAllocate(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, make([]int, 300)...)
	_, sequence := spell("abcdefghijklmnopqrstuvwxyz")
	for w := range 300 {
		a.Insert(at(0), w, 1, sequence[:1+w%26])
	}
	dst := make([]int32, 280) // the caller wants 280 of the 300 workers
	if n := testing.AllocsPerRun(100, func() { a.Match(at(0), dst, sequence) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	for w, got := range dst {
		if got != int32(1+w%26) {
			t.Errorf("worker %d: %d blocks, want %d", w, got, 1+w%26)
		}
	}
}

// The allocations for a prompt do not depend on its known blocks.
func TestApproxAllocations(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0)
	local := make([]uint64, 4096)
	for i := range local {
		local[i] = uint64(i+1) * 0x9E3779B97F4A7C15
	}
	sequence := indexer.AppendSequenceHashes(nil, local)
	a.Insert(at(0), 0, 1, sequence)
	if n := testing.AllocsPerRun(100, func() { a.Insert(at(1), 0, 1, sequence) }); n != 0 {
		t.Errorf("%v allocations for a known prompt", n)
	}
	next := 0
	if n := testing.AllocsPerRun(100, func() {
		next++
		sequence[4095] = uint64(next) << 32
		a.Insert(at(1), 0, 1, sequence)
	}); n > 24 {
		t.Errorf("%v allocations for a prompt with one new block", n)
	}
}

// Move moves only blocks that no other request used; afterwards the whole prompt is
// predicted on the other worker.
func TestApproxMove(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0, 0)
	insert(a, at(0), 0, "ab")
	stamp := insert(a, at(1), 0, "abcd")
	_, sequence := spell("abcd")
	if moved, _ := a.Move(at(1), 0, 2, stamp, sequence[3], 1, 1); moved != 0 {
		t.Error("a move of another generation's")
	}
	moved, last := a.Move(at(1), 0, 1, stamp, sequence[3], 1, 1)
	if got := overlaps(a, at(1), "abcd", 2); moved == 0 || last != sequence[3] || got[0] != 2 || got[1] != 4 {
		t.Errorf("stamp %d, last %x, blocks %v, want 2 and 4", moved, last, got)
	}
	if again, _ := a.Move(at(1), 0, 1, stamp, sequence[3], 1, 1); again != 0 {
		t.Error("the insertion moved twice")
	}
	a.Withdraw(1, 1, moved, last)
	if got := overlaps(a, at(1), "abcd", 2); got[0] != 2 || got[1] != 0 {
		t.Errorf("after its withdrawal blocks %v, want 2 and 0", got)
	}
}

// Predictions need no goroutine: expired ones are removed by the next call.
func TestGuessesHaveNoGoroutines(t *testing.T) {
	before := runtime.NumGoroutine()
	a := newApprox(indexer.ApproxConfig{}, make([]int, 10)...)
	for n := range 20_000 {
		local := []uint64{uint64(n), uint64(n) + 1<<40, uint64(n) + 2<<40}
		a.Insert(at(float64(n)/1000), n%10, 1, indexer.AppendSequenceHashes(nil, local))
	}
	if n := runtime.NumGoroutine(); n > before || a.Blocks() != 60_000 {
		t.Errorf("%d goroutines for %d blocks, want no more than the %d of before", n, a.Blocks(), before)
	}
	a.Expire(at(130)) // predictions made up to second 10 have expired
	if n := a.Blocks(); n != 29_997 {
		t.Errorf("%d blocks are left after 120 s of the earlier half, want 29,997", n)
	}
}

// Predictions removed for lack of room are counted; expired ones are not.
func TestGuessesThatHaveNoRoomAreCounted(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{MaxBlocks: 10}, 4, 0)
	insert(a, at(0), 0, "abc")
	insert(a, at(1), 0, "xyz") // the worker has room for one more block
	if n := a.Evicted(); n != 2 {
		t.Errorf("%d blocks evicted, want 2 of the worker's first prompt", n)
	}
	insert(a, at(2), 1, "abcdefgh") // eight blocks, ten in total
	if n := a.Evicted(); n != 2+2 {
		t.Errorf("%d blocks evicted, want 2 more for the bound of all", n)
	}
	a.Begin(1, 1, 5)
	if n := a.Evicted(); n != 2+2+1 {
		t.Errorf("%d blocks evicted, want 1 more for a smaller cache", n)
	}
	a.Expire(at(200))
	if n := a.Evicted(); n != 5 || a.Blocks() != 0 {
		t.Errorf("%d blocks evicted, %d left after all have died", n, a.Blocks())
	}
}
