// SPDX-License-Identifier: Apache-2.0

package slots_test

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// at returns a time of the test, in seconds.
func at(seconds float64) time.Time {
	return time.Unix(1000, 0).Add(time.Duration(seconds * float64(time.Second)))
}

// Beyond the limit of a replica its blocks are counted and not stored, until its other requests end. Other replicas
// have limits of their own.
func TestAReplicaStoresLimitedBlocks(t *testing.T) {
	var s slots.Table
	const requests = 9
	const size = slots.MostReplicaBlocks / (requests - 1)
	prompts := make([][]uint64, requests+1)
	for i := range prompts {
		prompts[i] = make([]uint64, size)
		for k := range prompts[i] {
			prompts[i][k] = uint64(i*size + k + 1)
		}
	}
	add := func(i int, replica uint64) {
		s.Add(at(0), fmt.Sprint(i), &slots.Booking{Blocks: prompts[i], Replica: replica})
	}
	for i := range requests {
		add(i, 7)
	}
	add(requests, 8)
	if n := s.Load(0).Blocks; n != (requests+1)*size {
		t.Errorf("%d blocks are active, want those of all requests: %d", n, (requests+1)*size)
	}
	for i, stored := range []bool{0: true, requests - 2: true, requests - 1: false, requests: true} {
		if n := s.AdditionalBlocks(0, prompts[i]); stored != (n == 0) && (i == 0 || i >= requests-2) {
			t.Errorf("request %d: %d of its %d blocks are unknown", i, n, size)
		}
	}
	s.Free("0")
	s.Free(fmt.Sprint(requests - 1))
	if add(requests-1, 7); s.AdditionalBlocks(0, prompts[requests-1]) != 0 {
		t.Error("the blocks are not stored although another request has ended")
	}
	for i := range requests + 1 {
		s.Free(fmt.Sprint(i))
	}
	if l := s.Load(0); l != (slots.Load{}) {
		t.Errorf("at the end the load is %+v", l)
	}
}

func TestSharedPrefixCountsOnce(t *testing.T) {
	var s slots.Table
	const w70, w71, w8 = 0, 1, 2
	for id, b := range map[string]slots.Booking{
		"a": {Worker: w70, Blocks: []uint64{11, 22, 33}},
		"b": {Worker: w70, Blocks: []uint64{11, 22, 44}},
		"c": {Worker: w71, Blocks: []uint64{11, 22, 55}},
	} {
		s.Add(at(0), id, &b)
	}
	prompt := []uint64{11, 22, 33, 66}
	for worker, want := range []struct{ active, potential int }{{4, 5}, {3, 5}, {0, 4}} {
		active := s.Load(worker).Blocks
		if got := active + s.AdditionalBlocks(worker, prompt); active != want.active || got != want.potential {
			t.Errorf("worker %d: active %d, potential %d; want %d and %d", worker, active, got, want.active, want.potential)
		}
	}
	s.Free("b")
	if got := s.Load(w70).Blocks; got != 3 {
		t.Errorf("after b is free: %d active blocks, want 3", got)
	}
}

func TestPrefillIsPendingUntilTheFirstToken(t *testing.T) {
	var s slots.Table
	check := func(after string, pend, blocks int) {
		t.Helper()
		if l := s.Load(0); l.PendTokens != pend || l.Blocks != blocks {
			t.Errorf("after %s: %d pending tokens, %d blocks; want %d and %d", after, l.PendTokens, l.Blocks, pend, blocks)
		}
	}
	s.Add(at(0), "a", &slots.Booking{Blocks: []uint64{1, 2}, PromptTokens: 48})
	s.Add(at(0), "b", &slots.Booking{Blocks: []uint64{1, 3}, PromptTokens: 48, CachedTokens: 32})
	check("both came", 64, 3)
	if !s.MarkPrefillCompleted(at(1), "a") || s.MarkPrefillCompleted(at(1), "a") {
		t.Error("a's first token must have an effect once")
	}
	check("a's first token", 16, 3)
	if l := s.Load(0); l.Waiting != 1 || l.DecodeTokens != 48 {
		t.Errorf("%d wait and %d tokens are held, want 1 and 48", l.Waiting, l.DecodeTokens)
	}
	s.Free("b")
	check("b ended", 0, 2)
	if !s.Free("a") || s.Free("a") {
		t.Error("a's end must have an effect once")
	}
	check("a ended", 0, 0)
	if s.MarkPrefillCompleted(at(1), "a") {
		t.Error("a first token after the end must have no effect")
	}
}

func TestEffectivePrefill(t *testing.T) {
	for _, c := range []struct {
		b    slots.Booking
		want int
	}{
		{slots.Booking{PromptTokens: 100, CachedTokens: 40}, 60},
		{slots.Booking{PromptTokens: 100, CachedTokens: 120}, 0},
		{slots.Booking{PromptTokens: 100, CachedTokens: 40, PrefillUntracked: true}, 0},
		{slots.Booking{PromptTokens: -5}, 0},
	} {
		var s slots.Table
		s.Add(at(0), "a", &c.b)
		if got := s.Load(0).PendTokens; got != c.want {
			t.Errorf("%+v: %d pending, want %d", c.b, got, c.want)
		}
	}
}

func TestOutputFillsBlocks(t *testing.T) {
	for _, c := range []struct {
		prompt int
		blocks []uint64
		want   map[int]int // output tokens -> blocks
	}{
		{30, []uint64{1}, map[int]int{0: 1, 2: 1, 3: 2, 18: 2, 19: 3}},
		{64, []uint64{1, 2, 3, 4}, map[int]int{0: 4, 1: 5, 16: 5, 17: 6}},
	} {
		var s slots.Table
		s.Add(at(0), "a", &slots.Booking{Blocks: c.blocks, PromptTokens: c.prompt, BlockSize: 16})
		out := 0
		for _, to := range slices.Sorted(maps.Keys(c.want)) {
			s.AddOutputTokens(at(0), "a", to-out)
			out = to
			if got := s.Load(0).Blocks; got != c.want[to] {
				t.Errorf("prompt %d, output %d: %d blocks, want %d", c.prompt, to, got, c.want[to])
			}
		}
		if s.AddOutputTokens(at(0), "nobody", 99) {
			t.Error("output of an unknown id must have no effect")
		}
		s.AddOutputTokens(at(0), "a", -99)
		s.Free("a")
		if got := s.Load(0); got != (slots.Load{}) {
			t.Errorf("after the end: %+v", got)
		}
	}
	var s slots.Table
	s.Add(at(0), "a", &slots.Booking{Blocks: []uint64{1}, PromptTokens: 30})
	if s.AddOutputTokens(at(0), "a", 99); s.Load(0).Blocks != 1 {
		t.Error("without a block size output fills no blocks")
	}
}

func TestExpectedOutputWeighsOwnBlocks(t *testing.T) {
	var s slots.Table
	s.Add(at(0), "x", &slots.Booking{Blocks: []uint64{1, 2}, PromptTokens: 32, BlockSize: 16})
	s.Add(at(0), "y", &slots.Booking{Blocks: []uint64{1, 2, 3, 4}, PromptTokens: 64, BlockSize: 16, ExpectedOutput: 32})
	for _, c := range []struct {
		more, want int
		what       string
	}{
		{0, 4, "nothing yet"},
		{16, 4, "2 + 2·.5 + 1·.5 = 3.5"},
		{8, 3, "2 + 2·.25 + 2·.25 = 3"},
		{8, 2, "the expected end"},
		{800, 2, "beyond it"},
	} {
		s.AddOutputTokens(at(0), "y", c.more)
		if got := s.Load(0).Blocks; got != c.want {
			t.Errorf("%s: %d blocks, want %d", c.what, got, c.want)
		}
	}
	s.Free("x") // blocks 1 and 2 belong to y alone now
	if got := s.Load(0).Blocks; got != 0 {
		t.Errorf("alone at its end: %d blocks, want 0", got)
	}
	s.Free("y")
	if got := s.Load(0); got != (slots.Load{}) {
		t.Errorf("after the end: %+v", got)
	}
}

func TestReuse(t *testing.T) {
	for noReuse, want := range map[bool]int{false: 4, true: 8} {
		var s slots.Table
		b := slots.Booking{Blocks: []uint64{1, 2, 3, 4}, PromptTokens: 64, NoReuse: noReuse}
		s.Add(at(0), "a", &b)
		s.Add(at(0), "b", &b)
		if got := s.Load(0).Blocks; got != want {
			t.Errorf("two equal prompts, no re-use %v: %d blocks, want %d", noReuse, got, want)
		}
		s.Free("a")
		s.Free("b")
		if got := s.Load(0); got != (slots.Load{}) {
			t.Errorf("after the end: %+v", got)
		}
	}
}

func TestUntrackedBlocks(t *testing.T) {
	var s slots.Table
	s.Add(at(0), "a", &slots.Booking{Blocks: []uint64{1, 2}, PromptTokens: 32, BlockSize: 16, BlocksUntracked: true})
	s.AddOutputTokens(at(0), "a", 99)
	if got, want := s.Load(0), (slots.Load{Requests: 1, Waiting: 1, PendTokens: 32, WaitingTokens: 32}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestOddCallsChangeNothing(t *testing.T) {
	var s slots.Table
	s.Add(at(0), "a", &slots.Booking{Worker: 1, Blocks: []uint64{1}, PromptTokens: 16})
	before := s.Load(1)
	if s.Add(at(0), "a", &slots.Booking{Blocks: []uint64{9}, PromptTokens: 99}) {
		t.Error("a second slot for one id must be refused")
	}
	if s.Add(at(0), "x", &slots.Booking{Worker: -1}) {
		t.Error("a slot on no worker must be refused")
	}
	if s.MarkPrefillCompleted(at(0), "nobody") || s.Free("nobody") {
		t.Error("an unknown id must have no effect")
	}
	s.RemoveWorker(-1)
	s.RemoveWorker(99)
	s.RemoveReplica(0)
	s.RemoveReplica(5)
	if got := s.Load(1); got != before || s.Load(0) != (slots.Load{}) || s.Load(99) != (slots.Load{}) || s.Load(-1) != (slots.Load{}) {
		t.Errorf("load of worker 1 is %+v, want %+v; of others %+v %+v, want none", got, before, s.Load(0), s.Load(99))
	}
	for _, worker := range []int{-1, 0, 99} {
		if got := s.AdditionalBlocks(worker, []uint64{1, 2}); got != 2 {
			t.Errorf("worker %d has nothing: %d additional blocks, want 2", worker, got)
		}
	}
	s.RemoveWorker(1)
	if s.Len() != 0 || s.Load(1) != (slots.Load{}) {
		t.Errorf("after the worker left: %d slots, %+v", s.Len(), s.Load(1))
	}
}

func TestOwnerlessSlotsExpire(t *testing.T) {
	var s slots.Table
	s.Add(at(0), "stream", &slots.Booking{PromptTokens: 1, Owned: true})
	s.Add(at(0), "manual", &slots.Booking{PromptTokens: 1})
	s.Add(at(0), "lively", &slots.Booking{PromptTokens: 1})
	s.Add(at(0), "remote", &slots.Booking{PromptTokens: 1, Replica: 7})
	for _, c := range []struct {
		at   float64
		want int
	}{
		{0, 0},     // starts the interval of sweeps
		{299.9, 0}, // a sweep; nothing has expired
		{300, 0},   // too early for another sweep
		{329.9, 2}, // manual and remote expire
		{360, 0},
		{549, 0}, // lively was used at 250
		{579, 1},
		{10_000, 0},
	} {
		if c.at == 299.9 {
			s.MarkPrefillCompleted(at(250), "lively")
		}
		if got := s.Expire(at(c.at)); got != c.want {
			t.Errorf("at %v s: %d slots expire, want %d", c.at, got, c.want)
		}
	}
	if s.Len() != 1 || s.Load(0).Requests != 1 {
		t.Errorf("%d slots are left, want the stream's", s.Len())
	}
}

// The load of requests that were left stays until the worker answers anyone, or for 30 s.
func TestTheLoadOfALeftRequestStays(t *testing.T) {
	var s slots.Table
	s.InferFirstTokens()
	book := func(now float64, id string) {
		t.Helper()
		if !s.Add(at(now), id, &slots.Booking{PromptTokens: 48, Blocks: []uint64{1, 2, 3}, Owned: true}) {
			t.Fatalf("%s got no slot", id)
		}
	}
	check := func(what string, want slots.Load) {
		t.Helper()
		if got := s.Load(0); got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}
	one := slots.Load{Requests: 1, Waiting: 1, PendTokens: 48, Blocks: 3, WaitingTokens: 48, Left: 1, LeftTokens: 48}
	both := slots.Load{Requests: 2, Waiting: 2, PendTokens: 96, Blocks: 3, WaitingTokens: 96, Left: 1, LeftTokens: 48}
	book(0, "a")
	s.Leave(at(1), "a")
	check("a was left", one)
	if s.Len() != 0 || s.Free("a") || s.MarkPrefillCompleted(at(2), "a") {
		t.Error("the request that was left still has a slot")
	}
	s.Expire(at(30.9))
	check("29.9 s later", one)
	s.Expire(at(31)) // does not wait for the next sweep
	check("30 s later", slots.Load{})

	book(40, "a")
	s.Leave(at(41), "a")
	book(42, "a") // the same id
	check("another request", both)
	s.MarkPrefillCompleted(at(43), "a")
	check("the first token of the other request", slots.Load{Requests: 1, Blocks: 3, DecodeTokens: 48})
	if got := s.TakeInferred(); got != nil {
		t.Errorf("first tokens of left requests were inferred: %v", got)
	}
	if s.Leave(at(44), "a"); s.Load(0) != (slots.Load{}) {
		t.Error("a request that has its first token must leave no load")
	}

	book(50, "a")
	s.Leave(at(50), "a")
	s.Answered(0)
	check("an answer", slots.Load{})
	book(51, "a")
	s.Leave(at(51), "a")
	s.RemoveWorker(0)
	check("the worker was removed", slots.Load{})
	for i := range 3000 {
		id := fmt.Sprint(i)
		book(60, id)
		s.Leave(at(60), id)
	}
	if got := s.Load(0); got.Requests != 1024 || got.Left != 1024 {
		t.Errorf("%+v, want at most 1024 left", got)
	}
	s.Expire(at(90))
	check("all expired", slots.Load{})
	if left := s.Left(); left != 0 {
		t.Errorf("%d slots, nodes or ids are left", left)
	}
}

// The slots of a replica that left are dropped, and no others.
func TestRemoveReplica(t *testing.T) {
	var s slots.Table
	s.Add(at(70), "b", &slots.Booking{Blocks: []uint64{1}, PromptTokens: 16, Replica: 7})
	s.Add(at(70), "c", &slots.Booking{PromptTokens: 1})
	s.RemoveReplica(7)
	if s.Len() != 1 || s.Load(0).Requests != 1 {
		t.Errorf("%d slots after the replica left, want ours", s.Len())
	}
}

// chain returns the hashes of a prompt that branches at random. A hash stands for its
// block and all blocks before it, and is never 0.
func chain(rng *rand.Rand, most int) []uint64 {
	blocks, h := []uint64{}, uint64(1)
	for range rng.IntN(most + 1) {
		next := uint64(0)
		if rng.IntN(4) == 0 {
			next = 1
		}
		h = h*2 + next
		blocks = append(blocks, h)
	}
	return blocks
}

// slowSlots recomputes everything from the list of live slots.
type slowSlots map[string]*slowSlot

type slowSlot struct {
	slots.Booking
	completed bool
	out       int
	seen      time.Time

	reported bool
	estimate float64
	grown    time.Time

	left bool // its request was left at the time seen; its key is no id
}

// leave follows the definition of Leave: a waiting slot stays, without its id, owner and replica.
func (m slowSlots) leave(now time.Time, id, key string) {
	s := m[id]
	delete(m, id)
	if s != nil && !s.completed {
		s.left, s.seen, s.Owned, s.Replica = true, now, true, 0
		m[key] = s
	}
}

// answered follows the definition of Answered.
func (m slowSlots) answered(worker int) {
	maps.DeleteFunc(m, func(_ string, s *slowSlot) bool { return s.left && s.Worker == worker })
}

// requests is the number of slots that belong to a request.
func (m slowSlots) requests() (n int) {
	for _, s := range m {
		if !s.left {
			n++
		}
	}
	return n
}

// grow follows the definition of Grow: perSecond blocks a second since the first token,
// unless the output was reported.
func (m slowSlots) grow(now time.Time, worker int, perSecond float64) {
	for _, s := range m {
		if s.Worker != worker || !s.completed || s.reported {
			continue
		}
		s.estimate += now.Sub(s.grown).Seconds() * perSecond
		if s.ExpectedOutput > 0 {
			s.estimate = min(s.estimate, float64(s.ExpectedOutput))
		}
		s.out, s.grown = int(s.estimate), now
	}
}

func (m slowSlots) load(worker int) (l slots.Load) {
	users := map[uint64]int{}
	for _, s := range m {
		if s.Worker == worker && !s.BlocksUntracked && !s.NoReuse {
			for _, b := range s.Blocks {
				users[b]++
			}
		}
	}
	blocks := float64(len(users))
	for _, s := range m {
		if s.Worker != worker {
			continue
		}
		l.Requests++
		if s.left {
			l.Left++
			if !s.PrefillUntracked {
				l.LeftTokens += max(0, s.PromptTokens-s.CachedTokens)
			}
		}
		if s.completed {
			l.DecodeTokens += s.PromptTokens + s.out
		} else {
			l.Waiting++
			l.WaitingTokens += s.PromptTokens
			if !s.PrefillUntracked {
				l.PendTokens += max(0, s.PromptTokens-s.CachedTokens)
			}
		}
		if s.BlocksUntracked {
			continue
		}
		size := float64(s.BlockSize)
		output := math.Ceil(float64(s.PromptTokens+s.out)/size) - math.Ceil(float64(s.PromptTokens)/size)
		own := output
		if s.NoReuse {
			own += float64(len(s.Blocks))
			blocks += own
		} else {
			blocks += output
			for _, b := range s.Blocks {
				if users[b] == 1 {
					own++
				}
			}
		}
		if s.ExpectedOutput > 0 {
			f := max(0, 1-float64(s.out)/float64(s.ExpectedOutput))
			blocks -= (1 - f) * own
		}
	}
	l.Blocks = int(math.Round(blocks))
	return l
}

// bounds returns the bounds of a worker's active blocks.
func (m slowSlots) bounds(worker int) (most, sum int) {
	for _, s := range m {
		if s.Worker == worker && !s.BlocksUntracked {
			size := s.BlockSize
			n := len(s.Blocks) + (s.PromptTokens+s.out+size-1)/size - (s.PromptTokens+size-1)/size
			most, sum = max(most, n), sum+n
		}
	}
	return most, sum
}

func (m slowSlots) additional(worker int, blocks []uint64) int {
	longest := 0
	for _, s := range m {
		if s.Worker == worker && !s.BlocksUntracked && !s.NoReuse {
			k := 0
			for k < min(len(blocks), len(s.Blocks)) && blocks[k] == s.Blocks[k] {
				k++
			}
			longest = max(longest, k)
		}
	}
	return len(blocks) - longest
}

// Invariants 1 to 5 and 8: for random operations the slots agree with the slow model,
// which has only the list of live slots.
func TestSlotsEqualSlowModel(t *testing.T) {
	const workers = 3
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 1))
		expecting := seed%3 == 0
		var s slots.Table
		m := slowSlots{}
		now := at(0)
		fail := func(step int, format string, args ...any) {
			t.Helper()
			t.Fatalf("seed %d, step %d: %s", seed, step, fmt.Sprintf(format, args...))
		}
		for step := range 1500 {
			id := fmt.Sprint("r", rng.IntN(25))
			slot, exists := m[id]
			now = now.Add(time.Second)
			switch op := rng.IntN(100); {
			case op < 45:
				b := slots.Booking{
					Worker: rng.IntN(workers), Blocks: chain(rng, 12), CachedTokens: rng.IntN(60), BlockSize: 4,
					Owned: rng.IntN(2) == 0, Replica: uint64(rng.IntN(3)),
					BlocksUntracked: rng.IntN(10) == 0, PrefillUntracked: rng.IntN(10) == 0, NoReuse: rng.IntN(10) == 0,
				}
				b.PromptTokens = 4*len(b.Blocks) + rng.IntN(4)
				if expecting && rng.IntN(2) == 0 {
					b.ExpectedOutput = 1 << rng.IntN(5)
				}
				before, additional := s.Load(b.Worker), s.AdditionalBlocks(b.Worker, b.Blocks)
				if want := m.additional(b.Worker, b.Blocks); additional != want {
					fail(step, "%d additional blocks, want %d", additional, want)
				}
				if s.Add(now, id, &b) == exists {
					fail(step, "Add(%s) accepted %v, want %v", id, exists, !exists)
				}
				if exists {
					break
				}
				m[id] = &slowSlot{Booking: b, seen: now}
				m[id].Blocks = slices.Clone(b.Blocks)
				if got := s.Load(b.Worker).Blocks - before.Blocks; !expecting && !b.BlocksUntracked && !b.NoReuse && got != additional {
					fail(step, "adding %d raised the active blocks by %d, announced %d", b.Blocks, got, additional)
				}
				if rng.IntN(4) == 0 { // add, then free: leaves no trace
					s.Free(id)
					delete(m, id)
					if got := s.Load(b.Worker); got != before || s.AdditionalBlocks(b.Worker, b.Blocks) != additional {
						fail(step, "add and free leave %+v, want %+v", got, before)
					}
				}
				clear(b.Blocks) // the caller may reuse the slice
			case op < 60:
				if got, want := s.MarkPrefillCompleted(now, id), exists && !slot.completed; got != want {
					fail(step, "first token of %s was news: %v, want %v", id, got, want)
				}
				if exists && !slot.completed {
					slot.completed, slot.grown = true, now
					m.answered(slot.Worker)
				}
				if exists {
					slot.seen = now
				}
			case op < 75:
				k := rng.IntN(9)
				if got := s.AddOutputTokens(now, id, k); got != exists {
					fail(step, "output of %s was news: %v, want %v", id, got, exists)
				}
				if exists && k > 0 && !slot.reported {
					slot.reported, slot.out = true, 0
				}
				if exists {
					slot.out, slot.seen = slot.out+k, now
				}
			case op < 80:
				to, cached := rng.IntN(workers+1)-1, rng.IntN(60)
				want := exists && to >= 0 && to != slot.Worker
				if got := s.Move(now, id, to, cached); got != want {
					fail(step, "%s moved to %d: %v, want %v", id, to, got, want)
				}
				if want {
					slot.Worker, slot.CachedTokens, slot.seen = to, cached, now
				}
			case op < 85:
				w, perSecond := rng.IntN(workers+2)-1, rng.Float64()*20
				s.Grow(now, w, perSecond)
				m.grow(now, w, perSecond)
			case op < 92:
				if got := s.Free(id); got != exists {
					fail(step, "end of %s was news: %v, want %v", id, got, exists)
				}
				delete(m, id)
			case op < 95:
				if got := s.Leave(now, id); got.Existed != exists {
					fail(step, "leaving %s was news: %v, want %v", id, got.Existed, exists)
				}
				m.leave(now, id, fmt.Sprint("left ", step))
			case op < 96:
				w := rng.IntN(workers+2) - 1
				s.Answered(w)
				m.answered(w)
			case op < 97:
				w := rng.IntN(workers)
				s.RemoveWorker(w)
				maps.DeleteFunc(m, func(_ string, slot *slowSlot) bool { return slot.Worker == w })
			case op < 98:
				s.RemoveReplica(2)
				maps.DeleteFunc(m, func(_ string, slot *slowSlot) bool { return slot.Replica == 2 })
			default:
				now = now.Add(time.Duration(rng.IntN(200)+30) * time.Second)
				before := m.requests()
				maps.DeleteFunc(m, func(_ string, slot *slowSlot) bool {
					age := now.Sub(slot.seen)
					return !slot.Owned && age >= 300*time.Second || slot.left && age >= 30*time.Second
				})
				if got := s.Expire(now); got != before-m.requests() {
					fail(step, "%d slots expired, want %d", got, before-m.requests())
				}
			}
			for w := range workers {
				got := s.Load(w)
				if want := m.load(w); got != want {
					fail(step, "load of worker %d is %+v, want %+v", w, got, want)
				}
				if most, sum := m.bounds(w); !expecting && (got.Blocks < most || got.Blocks > sum) {
					fail(step, "worker %d has %d blocks, not between %d and %d", w, got.Blocks, most, sum)
				}
			}
			if s.Len() != m.requests() {
				fail(step, "%d slots, want %d", s.Len(), m.requests())
			}
			if broken := s.Broken(); broken != "" {
				fail(step, "%s", broken)
			}
		}
		for id := range m {
			s.Free(id)
		}
		for w := range workers {
			s.Answered(w)
			if got := s.Load(w); got != (slots.Load{}) {
				t.Fatalf("seed %d: worker %d has %+v after all requests ended", seed, w, got)
			}
		}
		if left := s.Left(); left != 0 {
			t.Fatalf("seed %d: %d slots, nodes or ids are left after all requests ended", seed, left)
		}
	}
}

// Invariant 6: the same requests make the same load, whatever the order of their
// bookings, first tokens and ends.
func TestSlotsDoNotDependOnOrder(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 3))
		bookings := make([]slots.Booking, 30)
		for i := range bookings {
			bookings[i] = slots.Booking{
				Worker: rng.IntN(2), Blocks: chain(rng, 12), PromptTokens: rng.IntN(60), CachedTokens: rng.IntN(60),
				BlockSize: 4, ExpectedOutput: rng.IntN(40),
			}
		}
		var want [2]slots.Load
		for round := range 5 {
			var s slots.Table
			for _, i := range rng.Perm(len(bookings)) {
				s.Add(at(0), fmt.Sprint(i), &bookings[i])
			}
			for _, i := range rng.Perm(len(bookings)) {
				id := fmt.Sprint(i)
				switch i % 4 {
				case 0:
					s.MarkPrefillCompleted(at(0), id)
				case 1:
					s.Free(id)
				case 2:
					s.AddOutputTokens(at(0), id, i)
				}
			}
			got := [2]slots.Load{s.Load(0), s.Load(1)}
			if round == 0 {
				want = got
			} else if got != want {
				t.Fatalf("seed %d: %+v in another order, want %+v", seed, got, want)
			}
		}
	}
}

// Invariant 7: replicas that received each other's messages, in order for each sender,
// agree.
func TestReplicasConverge(t *testing.T) {
	type message func(s *slots.Table, sender uint64)
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 4))
		var replicas [3]slots.Table
		var inbox [3][3][]message // to, from
		pending := 0
		send := func(from int, m message) {
			m(&replicas[from], 0)
			for to := range replicas {
				if to != from {
					inbox[to][from] = append(inbox[to][from], m)
					pending++
				}
			}
		}
		live := [3][]string{}
		for step := 0; step < 600 || pending > 0; step++ {
			from := rng.IntN(3)
			if step >= 600 || rng.IntN(2) == 0 {
				to := rng.IntN(3)
				if queue := inbox[to][from]; len(queue) > 0 {
					queue[0](&replicas[to], uint64(from)+1)
					inbox[to][from] = queue[1:]
					pending--
				}
				continue
			}
			switch {
			case len(live[from]) == 0 || rng.IntN(3) == 0:
				id := fmt.Sprint(from, "/", step)
				b := slots.Booking{Worker: rng.IntN(2), Blocks: chain(rng, 8), PromptTokens: rng.IntN(60), CachedTokens: rng.IntN(60), BlockSize: 4}
				live[from] = append(live[from], id)
				send(from, func(s *slots.Table, sender uint64) {
					b := b
					b.Replica = sender
					s.Add(at(0), id, &b)
				})
			case rng.IntN(2) == 0:
				id := live[from][rng.IntN(len(live[from]))]
				send(from, func(s *slots.Table, _ uint64) { s.MarkPrefillCompleted(at(0), id) })
			default:
				i := rng.IntN(len(live[from]))
				id := live[from][i]
				live[from] = slices.Delete(live[from], i, i+1)
				send(from, func(s *slots.Table, _ uint64) { s.Free(id) })
			}
		}
		for w := range 2 {
			for i := range replicas {
				if got, want := replicas[i].Load(w), replicas[0].Load(w); got != want {
					t.Fatalf("seed %d: replica %d has %+v on worker %d, replica 0 has %+v", seed, i, got, w, want)
				}
			}
		}
	}
}

// Invariant 8: the inputs of a decision can be computed again from the state before its
// booking.
func TestCostIsThatBeforeTheBooking(t *testing.T) {
	settings := scorer.Defaults()
	rng := rand.New(rand.NewPCG(1, 5))
	var s slots.Table
	measure := func(r *scorer.Request, blocks []uint64) (costs [3]float64, chosen int) {
		var in [3]scorer.Input
		for w := range in {
			l := s.Load(w)
			in[w] = scorer.Input{PendTokens: l.PendTokens, ActiveRequests: l.Requests, ActiveBlocks: l.Blocks, AdditionalBlocks: s.AdditionalBlocks(w, blocks)}
		}
		chosen = settings.Choose(r, in[:], costs[:])
		return costs, chosen
	}
	for i := range 200 {
		blocks := chain(rng, 12)
		r := scorer.Request{PromptTokens: 4 * len(blocks), BlockSize: 4, U: scorer.Draw(1, uint64(i))}
		costs, chosen := measure(&r, blocks)
		id := fmt.Sprint(i)
		booking := slots.Booking{Worker: chosen, Blocks: blocks, PromptTokens: r.PromptTokens, BlockSize: 4}
		s.Add(at(0), id, &booking)
		s.Free(id)
		if again, other := measure(&r, blocks); again != costs || other != chosen {
			t.Fatalf("request %d: %v and worker %d after its booking was freed, want %v and %d", i, again, other, costs, chosen)
		}
		s.Add(at(0), id, &booking)
	}
}

func TestReadingSlotsDoesNotAllocate(t *testing.T) {
	var s slots.Table
	blocks := []uint64{1, 2, 3}
	b := slots.Booking{Blocks: blocks, PromptTokens: 16, BlockSize: 4}
	s.Add(at(0), "a", &b)
	s.Add(at(0), "b", &b)
	s.Free("b")
	if n := testing.AllocsPerRun(10, func() { s.Load(0); s.AdditionalBlocks(0, blocks) }); n != 0 {
		t.Errorf("reading makes %v allocations, want 0", n)
	}
	if n := testing.AllocsPerRun(10, func() { s.Add(at(0), "b", &b); s.Free("b") }); n != 0 {
		t.Errorf("a repeated booking makes %v allocations, want 0", n)
	}
	long := slots.Booking{Blocks: make([]uint64, 1<<16), PromptTokens: 1 << 20, BlockSize: 16}
	for i := range long.Blocks {
		long.Blocks[i] = uint64(i + 10)
	}
	if n := testing.AllocsPerRun(10, func() { s.Add(at(0), "b", &long); s.Free("b") }); n != 0 {
		t.Errorf("a repeated booking of a long prompt makes %v allocations, want 0", n)
	}
}

// BenchmarkSlots measures the project's target load: 20 shared prompts of 32 blocks, some
// own blocks behind each, 64 requests in flight on 4 workers.
func BenchmarkSlots(b *testing.B) {
	const inFlight = 64
	var s slots.Table
	rng := rand.New(rand.NewPCG(1, 6))
	bookings, ids := make([]slots.Booking, 1000), make([]string, 1000)
	for i := range bookings {
		prompt, blocks := rng.IntN(20), make([]uint64, 32+3+rng.IntN(10))
		for k := range blocks {
			blocks[k] = uint64(prompt<<20 + k)
			if k >= 32 {
				blocks[k] += uint64(i+1) << 32
			}
		}
		ids[i] = fmt.Sprint("request-", i)
		bookings[i] = slots.Booking{Blocks: blocks, PromptTokens: 16 * len(blocks), BlockSize: 16}
	}
	settings := scorer.Defaults()
	var in [4]scorer.Input
	var costs [4]float64
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if n >= inFlight {
			s.Free(ids[(n-inFlight)%1000])
		}
		booking := &bookings[n%1000]
		for w := range in {
			l := s.Load(w)
			in[w] = scorer.Input{PendTokens: l.PendTokens, ActiveRequests: l.Requests, ActiveBlocks: l.Blocks, AdditionalBlocks: s.AdditionalBlocks(w, booking.Blocks)}
		}
		r := scorer.Request{PromptTokens: booking.PromptTokens, BlockSize: 16, U: scorer.Draw(1, uint64(n))}
		booking.Worker = settings.Choose(&r, in[:], costs[:])
		s.Add(time.Time{}, ids[n%1000], booking)
	}
}

// No sum overflows, whatever values callers pass for a request.
func TestEnormousRequests(t *testing.T) {
	var s slots.Table
	for i, id := range []string{"a", "b", "c", "d"} {
		s.Add(at(0), id, &slots.Booking{PromptTokens: math.MaxInt - i, CachedTokens: math.MinInt, BlockSize: 1, ExpectedOutput: math.MaxInt})
		s.MarkPrefillCompleted(at(1), id)
	}
	before := s.Load(0)
	for _, id := range []string{"a", "a", "b", "c"} {
		s.AddOutputTokens(at(2), id, math.MaxInt)
	}
	s.Grow(at(3), 0, math.MaxFloat64)
	l := s.Load(0)
	if before.DecodeTokens != 4*slots.MostTokens || l.DecodeTokens != 8*slots.MostTokens || l.Blocks < 0 || l.PendTokens != 0 {
		t.Errorf("before %+v, after %+v", before, l)
	}
	s.Add(at(4), "e", &slots.Booking{PromptTokens: math.MaxInt, CachedTokens: math.MinInt, BlockSize: 1})
	if l := s.Load(0); l.PendTokens != slots.MostTokens {
		t.Errorf("pending: %+v", l)
	}
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		s.Free(id)
	}
	if l := s.Load(0); l != (slots.Load{}) || s.Len() != 0 {
		t.Errorf("left over: %+v", l)
	}
}
