// SPDX-License-Identifier: Apache-2.0

// Command peer-llmd measures one shape on the in-memory index of llm-d-kv-cache and
// prints the figure. The shapes are those of bench/parts/index.go, where they are
// described; make bench-peers runs both in turn.
package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"k8s.io/apimachinery/pkg/util/sets"
)

const (
	batch    = 32
	sequence = 512
	pairs    = 1 << 20
)

// index is the peer's index with what it scores by.
type index struct {
	blocks kvblock.Index
	scorer kvcache.KVBlockScorer
}

func open() (*index, error) {
	blocks, err := kvblock.NewInMemoryIndex(&kvblock.InMemoryIndexConfig{Size: 1e8, PodCacheSize: 1024})
	if err != nil {
		return nil, err
	}
	scorer, err := kvcache.NewKVBlockScorer(kvcache.DefaultKVBlockScorerConfig())
	return &index{blocks, scorer}, err
}

func mix(v uint64) uint64 {
	v += 0x9E3779B97F4A7C15
	v = (v ^ v>>30) * 0xBF58476D1CE4E5B9
	v = (v ^ v>>27) * 0x94D049BB133111EB
	return v ^ v>>31
}

// keys are the hashes of a sequence; here the peer's are chained, so each is one of
// a whole prefix.
func keys(number, blocks int) []kvblock.BlockHash {
	out := make([]kvblock.BlockHash, blocks)
	for i := range out {
		out[i] = kvblock.BlockHash(mix(uint64(number)<<20 | uint64(i)))
	}
	return out
}

// store puts a sequence into the index in events of 32 blocks.
func (x *index) store(worker int, sequence []kvblock.BlockHash) error {
	pod := []kvblock.PodEntry{{PodIdentifier: "10.0.0." + strconv.Itoa(worker) + ":8000", DeviceTier: "gpu"}}
	for part := range slices.Chunk(sequence, batch) {
		if err := x.blocks.Add(context.Background(), part, part, pod); err != nil {
			return err
		}
	}
	return nil
}

func (x *index) match(sequence []kvblock.BlockHash) (map[string]float64, error) {
	found, err := x.blocks.Lookup(context.Background(), sequence, sets.New[string]())
	if err != nil {
		return nil, err
	}
	return x.scorer.Score(context.Background(), sequence, found)
}

func fullPath(workers int) (*index, []kvblock.BlockHash, error) {
	x, err := open()
	if err != nil {
		return nil, nil, err
	}
	prompt := keys(0, sequence)
	for w := range workers {
		if err := x.store(w, prompt); err != nil {
			return nil, nil, err
		}
	}
	scores, err := x.match(prompt)
	if err == nil && (len(scores) != workers || scores["10.0.0.0:8000"] < sequence/2) {
		err = fmt.Errorf("%d workers match, want %d", len(scores), workers)
	}
	return x, prompt, err
}

// matchTime returns the median time of a match in µs.
func matchTime(workers int) (float64, error) {
	x, prompt, err := fullPath(workers)
	if err != nil {
		return 0, err
	}
	times := make([]time.Duration, 50)
	for i := range times {
		start := time.Now()
		if _, err := x.match(prompt); err != nil {
			return 0, err
		}
		times[i] = time.Since(start)
	}
	slices.Sort(times)
	return float64(times[len(times)/2].Nanoseconds()) / 1e3, nil
}

func matchAllocations() (float64, error) {
	x, prompt, err := fullPath(64)
	if err != nil {
		return 0, err
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 10 {
		if _, err := x.match(prompt); err != nil {
			return 0, err
		}
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / 10, nil
}

func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// fill returns the bytes a (block, worker) pair and millions of blocks stored a
// second, with each sequence on so many of 64 workers.
func fill(sharers int) (bytes, rate float64, err error) {
	x, err := open()
	if err != nil {
		return 0, 0, err
	}
	before := heap()
	start := time.Now()
	for n := range pairs / sequence / sharers {
		k := keys(n, sequence)
		for w := range sharers {
			if err := x.store((n+w)%64, k); err != nil {
				return 0, 0, err
			}
		}
	}
	took := time.Since(start)
	bytes = (heap() - before) / pairs
	runtime.KeepAlive(x)
	return bytes, pairs / took.Seconds() / 1e6, nil
}

func measure(shape string) (value float64, err error) {
	switch shape {
	case "match-4-agree":
		return matchTime(4)
	case "match-64-agree":
		return matchTime(64)
	case "match-512-agree":
		return matchTime(512)
	case "match-allocations":
		return matchAllocations()
	case "apply-unique":
		_, value, err = fill(1)
	case "apply-shared-agree":
		_, value, err = fill(64)
	case "bytes-unshared":
		value, _, err = fill(1)
	case "bytes-shared-agree":
		value, _, err = fill(64)
	default:
		err = fmt.Errorf("%q is no shape that this peer has", shape)
	}
	return value, err
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: peer-llmd SHAPE")
		os.Exit(2)
	}
	value, err := measure(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "peer-llmd:", err)
		os.Exit(1)
	}
	fmt.Println(value)
}
