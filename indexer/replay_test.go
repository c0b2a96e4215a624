// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// These tests count the block hits of recorded traces on workers with plain LRU caches,
// as whole numbers. The caches are simulated; their stores and removals reach an index as
// events, and the index determines the hits.

// hits is the expected number of found blocks if the requests of a trace go to the
// workers in turn.
type hits struct {
	workers, capacity int // capacity of each worker; 0 is unlimited
	want              int
}

func TestHitRatesOfTraces(t *testing.T) {
	for _, c := range []struct {
		trace  string
		blocks int
		hits   []hits
	}{
		{"dynamo_mooncake_trace_1000.jsonl.gz", 19_686, []hits{
			{1, 0, 7_479},
			{8, 1_000, 5_625},
			{8, 2_000, 5_730},
			{8, 10_000, 5_730},
			{1, 8_000, 7_355},
			{1, 16_000, 7_479},
			{1, 80_000, 7_479},
			{1, 1_000, 5_565},
			{1, 2_000, 5_646},
			{1, 10_000, 7_453},
		}},
		{"mooncake_synthetic.jsonl.gz", 121_877, []hits{
			{1, 0, 77_953},
			{8, 1_000, 7_831},
			{8, 2_000, 13_055},
			{8, 10_000, 27_505},
			{1, 8_000, 45_493},
			{1, 16_000, 64_581},
			{1, 80_000, 77_953},
			{1, 1_000, 10_252},
			{1, 2_000, 17_839},
			{1, 10_000, 51_669},
		}},
		{"mooncake_conversation.jsonl.gz", 288_500, []hits{
			{1, 0, 105_710},
			{8, 1_000, 17_669},
			{8, 2_000, 22_969},
			{8, 10_000, 36_463},
			{1, 8_000, 51_368},
			{1, 16_000, 75_791},
			{1, 80_000, 104_305},
			{1, 1_000, 12_847},
			{1, 2_000, 15_665},
			{1, 10_000, 61_046},
		}},
		{"cc_weka_sessions.jsonl.gz", 10_608_487, []hits{
			{1, 80_000, 10_152_557},
			{1, 0, 10_174_440},
			{8, 10_000, 1_830_311},
		}},
	} {
		t.Run(c.trace, func(t *testing.T) {
			t.Parallel()
			path := fixtures.Need(t, "traces", c.trace)
			if testing.Short() || raceSlows > 1 && c.blocks > 100_000 { // this test has no concurrency to check
				c.hits = c.hits[:1]
			}
			var requests [][]int32
			var err error
			if strings.HasPrefix(c.trace, "cc_") {
				requests, err = readSessions(path)
			} else {
				requests, err = readTrace(path)
			}
			if err != nil {
				t.Fatal(err)
			}
			blocks := 0
			for _, r := range requests {
				blocks += len(r)
			}
			if blocks != c.blocks {
				t.Errorf("%d blocks, want %d", blocks, c.blocks)
			}
			for _, h := range c.hits {
				got, err := replay(requests, h.workers, h.capacity)
				if err != nil {
					t.Fatalf("%+v: %v", h, err)
				}
				if got != h.want {
					t.Errorf("%d workers of %d blocks: %d of %d blocks hit, want %d", h.workers, h.capacity, got, blocks, h.want)
				}
			}
		})
	}
}

// Hits of a synthetic trace are also counted by a cache that is a plain list. This covers
// the measure where the recorded traces are not available.
func TestHitRatesOfAMadeUpTrace(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 12))
	var requests [][]int32
	next := int32(0)
	for range 400 { // conversations continue, branch and begin
		var r []int32
		if len(requests) > 0 && rng.IntN(5) > 0 {
			before := requests[rng.IntN(len(requests))]
			r = slices.Clone(before[:rng.IntN(len(before)+1)])
		}
		for range 1 + rng.IntN(40) {
			r = append(r, next)
			next++
		}
		requests = append(requests, r)
	}
	for _, c := range []hits{{1, 0, 0}, {1, 200, 0}, {4, 0, 0}, {4, 100, 0}, {4, 1000, 0}} {
		caches := make([][]int32, c.workers) // most recently used last
		want := 0
		for i, r := range requests {
			cache := &caches[i%c.workers]
			hit := 0
			for hit < len(r) && slices.Contains(*cache, r[hit]) {
				hit++
			}
			want += hit
			for _, b := range slices.Backward(r) {
				*cache = append(slices.DeleteFunc(*cache, func(other int32) bool { return other == b }), b)
			}
			if c.capacity > 0 {
				*cache = (*cache)[max(0, len(*cache)-c.capacity):]
			}
		}
		got, err := replay(requests, c.workers, c.capacity)
		if err != nil || got != want || want == 0 {
			t.Errorf("%d workers of %d blocks: %d blocks hit, want %d, %v", c.workers, c.capacity, got, want, err)
		}
	}
}

// lru is a worker's cache of numbered blocks.
type lru struct {
	worker        int
	before, after []int32 // by block + 1; 0 is the ring's begin, followed by the most recently used
	held          []bool
	n, capacity   int
	x             *indexer.Index
	ev            indexer.Event
}

func newLRU(x *indexer.Index, worker, blocks, capacity int) *lru {
	return &lru{worker: worker, before: make([]int32, blocks+1), after: make([]int32, blocks+1), held: make([]bool, blocks+1), capacity: capacity, x: x}
}

func (l *lru) unlink(b int32) { l.after[l.before[b]], l.before[l.after[b]] = l.after[b], l.before[b] }

// use stores a request's blocks, last one first, and drops blocks above the capacity.
func (l *lru) use(request []int32) error {
	if err := l.store(request); err != nil {
		return err
	}
	for _, b := range slices.Backward(request) {
		b++
		if l.held[b] {
			l.unlink(b)
		} else {
			l.held[b] = true
			l.n++
		}
		next := l.after[0]
		l.after[b], l.before[b] = next, 0
		l.before[next], l.after[0] = b, b
	}
	var gone []uint64
	for ; l.capacity > 0 && l.n > l.capacity; l.n-- {
		b := l.before[0]
		l.unlink(b)
		l.held[b] = false
		gone = append(gone, l.external(b-1))
	}
	out := l.x.Apply(l.worker, indexer.Event{Kind: indexer.Removed, Externals: gone})
	if out.Removed != len(gone) {
		return fmt.Errorf("%d blocks dropped: %+v", len(gone), out)
	}
	return nil
}

func (l *lru) external(block int32) uint64 { return local(block) ^ uint64(l.worker)<<32 }

// local returns a block's local hash, derived from its number.
func local(block int32) uint64 { return indexer.NextSequenceHash(0, uint64(block)) }

// store applies the events of those of a request's blocks that are not held.
func (l *lru) store(request []int32) error {
	for i := 0; i < len(request); {
		if l.held[request[i]+1] {
			i++
			continue
		}
		l.ev = indexer.Event{Kind: indexer.Stored, Blocks: l.ev.Blocks[:0]}
		if i > 0 {
			l.ev.Parent, l.ev.HasParent = l.external(request[i-1]), true
		}
		for ; i < len(request) && !l.held[request[i]+1]; i++ {
			l.ev.Blocks = append(l.ev.Blocks, indexer.Block{External: l.external(request[i]), Local: local(request[i])})
		}
		if out := l.x.Apply(l.worker, l.ev); out.Stored != len(l.ev.Blocks) {
			return fmt.Errorf("%d blocks stored: %+v", len(l.ev.Blocks), out)
		}
	}
	return nil
}

// replay returns the number of block hits.
func replay(requests [][]int32, workers, capacity int) (hits int, err error) {
	blocks := 0
	for _, r := range requests {
		for _, b := range r {
			blocks = max(blocks, int(b)+1)
		}
	}
	x := indexer.New(indexer.Config{})
	caches := make([]*lru, workers)
	for w := range caches {
		caches[w] = newLRU(x, w, blocks, capacity)
	}
	counts := make([]int32, workers)
	var prompt []uint64
	for i, r := range requests {
		prompt = prompt[:0]
		for _, b := range r {
			prompt = append(prompt, local(b))
		}
		x.Match(counts, prompt)
		cache := caches[i%workers]
		hits += int(counts[cache.worker])
		if err := cache.use(r); err != nil {
			return 0, fmt.Errorf("request %d: %w", i, err)
		}
	}
	return hits, x.Check()
}

// lines calls each with every line of a compressed file.
func lines(path string, each func(line []byte) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	r := bufio.NewReader(z)
	for {
		line, err := r.ReadBytes('\n')
		if len(line) > 1 {
			if err := each(line); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func readTrace(path string) (requests [][]int32, err error) {
	err = lines(path, func(line []byte) error {
		var r struct {
			HashIDs []int32 `json:"hash_ids"`
		}
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		requests = append(requests, r.HashIDs)
		return nil
	})
	return requests, err
}

type sessionRequest struct {
	APITime   float64          `json:"api_time"`
	ThinkTime float64          `json:"think_time"`
	Kept      int              `json:"p"` // blocks kept from the previous request
	Runs      [][2]int32       `json:"h"` // numbers of the further blocks
	Requests  []sessionRequest // requests of a session within the session
	Prompt    []int32          `json:"-"`
}

// inlined appends requests, with those of inner sessions in their places.
func inlined(dst, requests []sessionRequest) []sessionRequest {
	var prompt []int32
	for _, r := range requests {
		if r.Requests != nil {
			dst = inlined(dst, r.Requests)
			continue
		}
		prompt = slices.Clip(prompt[:r.Kept])
		for _, run := range r.Runs {
			for i := range run[1] {
				prompt = append(prompt, run[0]+i)
			}
		}
		r.Prompt = prompt
		dst = append(dst, r)
	}
	return dst
}

// The users of the recorded sessions: the begin of each in milliseconds, and the sessions
// in the order in which users play them.
const (
	sessionRequests = 6000
	sessionStarts   = `26963 40130 11842 31571 40713 34761 58219 20161 37297 58469 41970 58050 4065 59258 14858 58020
		17453 1247 43277 9365 46731 23839 16216 10689 4405 46565 608 54760 47898 24668 41102 18220`
	sessionOrder = `201 97 370 197 600 612 217 513 482 196 596 576 556 119 311 283 92 694 544 650 572 659 438 324 121 545
		274 676 407 573 632 299 332 387 409 628 473 262 578 619 344 247 687 207 216 649 202 284 357 642 180 701 323 267
		73 674 348 83 429 212 434 476 266 425 178 142 175 265 537 455 374 127 397 242 251 271 683 422 115 77 3 338 74 103
		67 672 0 555 398 145 668 285 117 133 154 418 688 147 198 27 62 153 464 113 661 686 626 532 606 48 226 625 509`
)

func integers(s string) (out []int) {
	for f := range strings.FieldsSeq(s) {
		n, err := strconv.Atoi(f)
		if err != nil {
			panic(err)
		}
		out = append(out, n)
	}
	return out
}

// readSessions plays recorded sessions: 32 users, each with one session after the other.
func readSessions(path string) (requests [][]int32, err error) {
	var sessions [][]sessionRequest
	err = lines(path, func(line []byte) error {
		var s struct{ Requests []sessionRequest }
		err := json.Unmarshal(line, &s)
		sessions = append(sessions, s.Requests)
		return err
	})
	if err != nil {
		return nil, err
	}
	type user struct {
		number, at int // time of its next request in ms
		rest       []sessionRequest
	}
	order := integers(sessionOrder)
	blocks := int32(0) // blocks of all sessions begun
	begin := func() []sessionRequest {
		s := inlined(nil, sessions[order[0]])
		order = order[1:]
		top := int32(0)
		for i := range s {
			s[i].Prompt = slices.Clone(s[i].Prompt)
			for j, b := range s[i].Prompt {
				top = max(top, b+1)
				s[i].Prompt[j] = b + blocks // makes the blocks of each session distinct
			}
		}
		blocks += top
		return s
	}
	var users []user
	for i, at := range integers(sessionStarts) {
		users = append(users, user{i, at, begin()})
	}
	for len(requests) < sessionRequests {
		u := slices.MinFunc(users, func(a, b user) int { return cmp.Or(a.at-b.at, a.number-b.number) }).number
		next := users[u].rest[0]
		requests = append(requests, next.Prompt)
		api := int(math.Round(1000 * cmp.Or(next.APITime, 6)))
		if users[u].rest = users[u].rest[1:]; len(users[u].rest) == 0 {
			users[u].rest = begin()
			users[u].at += api + 5000
		} else {
			users[u].at += api + min(int(math.Round(1000*users[u].rest[0].ThinkTime)), 60_000)
		}
	}
	return requests, nil
}
