// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

func at(seconds float64) time.Time {
	return time.Unix(1_000_000, int64(seconds*1e9))
}

// spell gives the hashes of a prompt of one-letter blocks.
func spell(letters string) (local, sequence []uint64) {
	for _, l := range letters {
		local = append(local, uint64(l)*0x9E3779B97F4A7C15)
	}
	return local, indexer.AppendSequenceHashes(nil, local)
}

func overlaps(a *indexer.Approx, now time.Time, letters string, workers int) []int32 {
	local, _ := spell(letters)
	dst := make([]int32, workers)
	a.Match(now, dst, local)
	return dst
}

func insert(a *indexer.Approx, now time.Time, worker int, letters string) uint64 {
	local, sequence := spell(letters)
	return a.Insert(now, worker, 1, local, sequence)
}

func newApprox(c indexer.ApproxConfig, limits ...int) *indexer.Approx {
	a := indexer.NewApprox(c)
	for worker, limit := range limits {
		a.Begin(worker, 1, limit)
	}
	return a
}

// A life ends at the first step of 100 ms that is 120 s after the last use.
func TestApproxLifetime(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0, 0)
	insert(a, at(10.03), 0, "abc")
	insert(a, at(10.03), 1, "abx")
	insert(a, at(60), 1, "ab") // the life of x is not longer for that
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

// A worker's cache holds so many blocks: the longest unused ones go, ends first.
func TestApproxLimit(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 4)
	insert(a, at(0), 0, "abc")
	insert(a, at(1), 0, "xy") // c goes
	if got := []int32{overlaps(a, at(1), "abc", 1)[0], overlaps(a, at(1), "xy", 1)[0]}; !slices.Equal(got, []int32{2, 2}) {
		t.Errorf("overlaps %v of abc and xy, want 2 and 2", got)
	}
	insert(a, at(2), 0, "123456") // its leading four
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

// Withdrawn is what only the withdrawn request used.
func TestApproxWithdraw(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0)
	insert(a, at(0), 0, "ab")
	stamp := insert(a, at(1), 0, "abcd")
	_, sequence := spell("abcd")
	a.Withdraw(0, 2, stamp, sequence[3]) // of somebody else
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

func TestApproxForget(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{Forgettable: true}, 0, 0)
	insert(a, at(0), 0, "abcd")
	insert(a, at(0), 1, "abcd")
	local, _ := spell("cz")
	a.Forget(0, local)
	if got := overlaps(a, at(1), "abcd", 2); !slices.Equal(got, []int32{2, 4}) {
		t.Errorf("overlaps %v after worker 0 lost c, want 2 and 4", got)
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

// A restored index dies when the saved one would have.
func TestApproxRestore(t *testing.T) {
	a := newApprox(indexer.ApproxConfig{}, 0)
	insert(a, at(0), 0, "abc")
	insert(a, at(50), 0, "abx")
	saved := a.Guesses(at(60), 0)

	b := newApprox(indexer.ApproxConfig{Forgettable: true}, 0)
	insert(b, at(70), 0, "q")
	for i := range saved {
		saved[i].Left -= 10 * time.Second
	}
	if n := b.Restore(at(70), 0, 1, saved); n != 4 {
		t.Errorf("%d blocks restored, want 4", n)
	}
	for _, c := range []struct {
		at   float64
		want string
	}{{70, "2 3 1"}, {119.9, "3 3 1"}, {120, "2 3 1"}, {169.9, "2 3 1"}, {170, "0 0 1"}, {190, "0 0 0"}} {
		if c.at == 70 {
			c.want = "3 3 1"
		}
		now := at(c.at)
		got := fmt.Sprint(overlaps(b, now, "abc", 1)[0], overlaps(b, now, "abx", 1)[0], overlaps(b, now, "q", 1)[0])
		if got != c.want {
			t.Errorf("at %v s: overlaps of abc, abx and q are %s, want %s", c.at, got, c.want)
		}
	}
	if n := b.Restore(at(200), 0, 1, []indexer.Guess{{Sequence: 1, Local: 1, Parent: 9, Left: time.Second}}); n != 0 {
		t.Error("a block without its parent was restored")
	}
	if n := b.Restore(at(200), 0, 7, saved); n != 0 {
		t.Error("blocks of another generation were restored")
	}
}

// slowApprox is what Approx must equal: a list of prefixes a worker, searched
// from one end to the other.
type slowApprox struct {
	limits []int
	lists  [][]slowGuess // by worker, the longest unused first
	stamp  int
}

type slowGuess struct {
	prefix string
	dies   int64 // in 100 ms
	stamp  int
	fresh  bool
}

func (m *slowApprox) insert(now int64, worker int, prompt string) int {
	m.expire(now)
	m.stamp++
	prompt = prompt[:min(len(prompt), m.limits[worker])]
	for n := len(prompt); n > 0; n-- {
		before := len(m.lists[worker])
		m.drop(worker, prompt[:n])
		m.lists[worker] = append(m.lists[worker], slowGuess{prompt[:n], now + 50, m.stamp, len(m.lists[worker]) == before})
	}
	if over := len(m.lists[worker]) - m.limits[worker]; over > 0 {
		m.lists[worker] = m.lists[worker][over:]
	}
	return m.stamp
}

func (m *slowApprox) drop(worker int, prefix string) {
	m.lists[worker] = slices.DeleteFunc(m.lists[worker], func(g slowGuess) bool { return g.prefix == prefix })
}

func (m *slowApprox) withdraw(worker int, prompt string, stamp int) {
	for ; prompt != ""; prompt = prompt[:len(prompt)-1] {
		if !slices.ContainsFunc(m.lists[worker], func(g slowGuess) bool { return g.prefix == prompt && g.stamp == stamp && g.fresh }) {
			return
		}
		m.drop(worker, prompt)
	}
}

func (m *slowApprox) expire(now int64) {
	for w := range m.lists {
		m.lists[w] = slices.DeleteFunc(m.lists[w], func(g slowGuess) bool { return g.dies <= now })
	}
}

func (m *slowApprox) match(worker int, prompt string) (n int32) {
	for ; int(n) < len(prompt); n++ {
		if !slices.ContainsFunc(m.lists[worker], func(g slowGuess) bool { return g.prefix == prompt[:n+1] }) {
			break
		}
	}
	return n
}

// After any sequence of operations the index equals the slow model.
func TestApproxModel(t *testing.T) {
	operations := 20_000
	if testing.Short() {
		operations = 2_000
	}
	const workers = 3
	for seed := range uint64(5) {
		rng := rand.New(rand.NewPCG(seed, 1))
		m := &slowApprox{limits: []int{5, 12, 1000}, lists: make([][]slowGuess, workers)}
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
			prompt := make([]byte, 1+rng.IntN(8))
			for i := range prompt {
				prompt[i] = "abc"[rng.IntN(3)]
			}
			worker := rng.IntN(workers)
			switch rng.IntN(12) {
			case 0:
				m.lists[worker] = nil
				a.Clear(worker)
			case 1:
				if len(recent) > 0 {
					r := recent[rng.IntN(len(recent))]
					m.expire(now)
					m.withdraw(r.worker, r.prompt, r.slow)
					a.Expire(clock)
					a.Withdraw(r.worker, 1, r.fast, r.last)
				}
			case 2: // to another process and back
				saved := a.Guesses(clock, worker)
				a.Clear(worker)
				a.Restore(clock, worker, 1, saved)
				m.expire(now)
				for i := range m.lists[worker] { // who inserted what is forgotten
					m.lists[worker][i].fresh = false
				}
			default:
				local, sequence := spell(string(prompt))
				r := inserted{prompt: string(prompt[:min(len(prompt), m.limits[worker])]), worker: worker, slow: m.insert(now, worker, string(prompt))}
				r.fast = a.Insert(clock, worker, 1, local, sequence)
				r.last = sequence[min(len(sequence), m.limits[worker])-1]
				if recent = append(recent, r); len(recent) > 8 {
					recent = recent[1:]
				}
			}
			m.expire(now)
			got := overlaps(a, clock, string(prompt), workers)
			for w := range workers {
				if want := m.match(w, string(prompt)); got[w] != want {
					t.Fatalf("seed %d, operation %d: worker %d overlaps %s by %d, want %d", seed, op, w, prompt, got[w], want)
				}
				if got, want := a.WorkerBlocks(w), len(m.lists[w]); got != want {
					t.Fatalf("seed %d, operation %d: worker %d has %d blocks, want %d", seed, op, w, got, want)
				}
			}
		}
	}
}
