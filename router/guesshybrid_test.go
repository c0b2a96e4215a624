// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// Before the events of a request arrive, a hybrid worker counts for the last boundary of its prompt, and for the
// place where it left an earlier prompt. It counts for no other place.
func TestPredictionsOfHybridWorkers(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read, PredictTTL: 10 * time.Second}, 1)
	w := router.Worker{ID: 1}
	state := &indexer.Shape{Block: 8, Full: 8, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsState, Block: 8}}}
	r.ApplyEvent(w, indexer.Event{Kind: indexer.Shaped, Shape: state})
	if got := r.Workers()[0].Hybrid; got != "known" {
		t.Errorf("with a group of states hybrid is %q", got)
	}
	n := 0
	send := func(letters string) string {
		n++
		id := fmt.Sprint(n)
		book(t, r, id, letters)
		return id
	}
	expect := func(when string, blocks map[string]int) {
		t.Helper()
		for letters, want := range blocks {
			if _, got := decide(t, r, letters); got != want {
				t.Errorf("%s, %s: %d blocks, want %d", when, letters, got, want)
			}
		}
	}
	// The last token is always computed, so the state of the last block is not kept.
	r.MarkPrefillCompleted(send("abcdefgh"))
	expect("after a prompt", map[string]int{"abcdefgh": 7, "abcdefghij": 7, "abcdefgx": 7, "abcdefg": 0, "abcdefx": 0, "abcd": 0})
	id := send("abcdxy")
	r.AddOutputTokens(id, 16)
	expect("after its first sharer", map[string]int{"abcdzz": 4, "abcdz": 4, "abcd": 0, "abcdxyzz": 5, "abcx": 0, "abcdefgh": 7})
	r.Abandon(id)
	expect("after the sharer was abandoned", map[string]int{"abcdzz": 0, "abcdxyzz": 0, "abcdefgh": 7})

	// An event of a side group that drops a block ends what is predicted behind it. Here events have named a to d.
	send("abcdxy")
	store(r, w, "abcd")
	local := indexer.AppendLocalHashes(nil, prompt("abcd"), 8, indexer.Seed("", ""))
	fourth := indexer.AppendSequenceHashes(nil, local)[3] + 1
	expect("before the state is dropped", map[string]int{"abcdzz": 4, "abcdefgh": 7})
	r.ApplyEvent(w, indexer.Event{Kind: indexer.SideRemoved, Group: 1, Externals: []uint64{fourth}})
	expect("after the state was dropped", map[string]int{"abcdzz": 0, "abcdefgh": 0})

	send("klmnop")
	c.pass(11 * time.Second)
	expect("without an event", map[string]int{"klmnopq": 0})
	send("klmnop")
	state.Full, state.Sides[0].Block = 16, 16
	r.ApplyEvent(w, indexer.Event{Kind: indexer.Shaped, Shape: state})
	expect("with other boundaries", map[string]int{"klmnopq": 0})
	send("klmnopq")
	expect("with blocks of two", map[string]int{"klmnopqr": 6, "klmno": 0})
	state.Sides[0].Needs = indexer.NeedsUnknown
	r.ApplyEvent(w, indexer.Event{Kind: indexer.Shaped, Shape: state})
	send("klmnopq")
	expect("with an unknown rule", map[string]int{"klmnopqr": 0})
	r.ApplyEvent(w, indexer.Event{Kind: indexer.Shaped, Shape: &indexer.Shape{Block: 8, Full: 16}})
	send("klmnopq")
	expect("without side groups", map[string]int{"klmnopqr": 6, "klmnox": 4, "klm": 2})
}

// Events do not name the size of a chunk: the model's card does. Without it a chunk has no end.
func TestChunksOfTheModel(t *testing.T) {
	shape := &indexer.Shape{Block: 8, Full: 8, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsChunk, Block: 8}}}
	local := indexer.AppendLocalHashes(nil, prompt("abcde"), 8, indexer.Seed("", ""))
	sequence := indexer.AppendSequenceHashes(nil, local)
	for chunk, want := range map[int]int{0: 0, 16: 5, 40: 5, 24: 3} {
		r := newRouter(t, router.Config{Cards: []router.Card{{Name: "m", Chunk: chunk}}}, 1)
		w := router.Worker{ID: 1}
		r.ApplyEvent(w, indexer.Event{Kind: indexer.Shaped, Shape: shape})
		store(r, w, "abcde")
		side := indexer.Event{Kind: indexer.SideStored, Group: 1, Shape: shape, Externals: []uint64{sequence[4] + 1}}
		r.ApplyEvent(w, side)
		if _, got := decide(t, r, "abcdex"); got != want {
			t.Errorf("chunks of %d tokens: %d blocks, want %d", chunk, got, want)
		}
	}
	if shape.Sides[0].Tokens != 0 {
		t.Error("the event's shape was changed")
	}
}

// A request is decided before the events of the one before it. With predictions more of the hits of vLLM's cache
// manager are right, and none is too high.
func TestPredictedHitsOfVLLM(t *testing.T) {
	for _, c := range []struct {
		name  string
		block int
		most  int // exact hits of 21 without predictions
	}{{"swa1024_b16_default", 16, 13}, {"mamba_b528_default", 528, 15}, {"full_swa_mamba", 16, 13}} {
		runs := managerRuns(t, c.name)
		if runs == nil {
			return
		}
		for ttl, want := range map[time.Duration]int{-1: c.most, time.Hour: len(runs)} {
			r := newRouter(t, router.Config{Scoring: classic(1), PredictTTL: ttl}, 0)
			info := worker(1)
			info.BlockSize = c.block
			set(t, r, info)
			engine, right := engines.NewEngine(engines.EngineOptions{BlockSize: c.block}), 0
			var late []string // the events of the request before
			for i, l := range runs {
				d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(i), Model: "m", Tokens: l.tokens(t)})
				if err != nil {
					t.Fatal(err)
				}
				switch got := min(d.CachedTokens, (d.PromptTokens-1)/c.block*c.block); {
				case got == l.Cached:
					right++
				case got > l.Cached:
					t.Errorf("%s, %s: %d tokens, want %d", c.name, l.Note, got, l.Cached)
				}
				r.Free(d.ID)
				applyPayloads(t, r, engine, late)
				if late = l.Payloads; i == 0 { // they tell the shape, without which the worker counts as a plain one
					applyPayloads(t, r, engine, late)
					late = nil
				}
			}
			if right != want {
				t.Errorf("%s, predictions for %v: %d of %d hits are right, want %d", c.name, ttl, right, len(runs), want)
			}
		}
	}
}
