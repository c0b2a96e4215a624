// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
)

// Each wrong prediction has the cause that the engine's events show. What they do not show is unknown.
func TestCausesOfWrongPredictions(t *testing.T) {
	t.Parallel()
	prompt := make([]uint32, 13)
	for i := range prompt {
		prompt[i] = uint32(i)
	}
	stored := func(group int, kind string, hashes ...uint64) engines.EngineEvent {
		return engines.EngineEvent{
			Kind: engines.EngineStored, Group: group, Spec: kind, BlockSize: 4, Tokens: prompt[:4*len(hashes)], Hashes: hashes, Usable: len(hashes),
		}
	}
	at := events.RankName{WorkerID: 1}
	state := func(hash uint64) engines.EngineEvent {
		return engines.EngineEvent{Kind: engines.EngineStored, Group: 1, Spec: "mamba", BlockSize: 4, Hashes: []uint64{hash}}
	}
	gone := engines.EngineEvent{Kind: engines.EngineRemoved, Group: 1, Hashes: []uint64{3}}
	for _, c := range []struct {
		during            []engines.EngineEvent
		predicted, cached int
		cause             string
	}{
		{[]engines.EngineEvent{gone}, 12, 8, causeEvicted},
		{[]engines.EngineEvent{gone}, 12, 4, "unknown"},
		{nil, 12, 8, "unknown"},
		{nil, 8, 12, causeLate},
		{nil, 4, 12, "unknown"},
		{nil, 4, 8, "unknown"},
		{nil, 12, 13, causeBoundary},
		{nil, 8, 13, "unknown"},
	} {
		l, seen := newLedger(), causes{now: witness{block: 4}, before: witness{block: 4}}
		add := func(evs ...engines.EngineEvent) {
			l.with(at, func(a *account) { a.batches = append(a.batches, engines.EngineBatch{Events: evs}) })
		}
		add(stored(0, "full_attention", 1, 2, 3), state(2))
		seen.begin(l, at)
		add(state(3))
		seen.begin(l, at)
		add(c.during...)
		cause, known := seen.name(l, at, prompt, c.predicted, c.cached)
		if !strings.HasPrefix(cause, c.cause) || known != (c.cause != "unknown") {
			t.Errorf("%d predicted and %d cached: %s, known %v; want %s", c.predicted, c.cached, cause, known, c.cause)
		}
	}
	// An engine that starts again has nothing of before.
	l, seen := newLedger(), causes{now: witness{block: 4}, before: witness{block: 4}}
	l.with(at, func(a *account) {
		a.batches = []engines.EngineBatch{{Events: []engines.EngineEvent{stored(0, "full_attention", 1, 2, 3), state(3)}}}
	})
	if seen.begin(l, at); seen.now.hit(prompt) != 12 {
		t.Errorf("a hit of %d tokens, want 12", seen.now.hit(prompt))
	}
	l.forget(at)
	if seen.begin(l, at); seen.now.hit(prompt) != 0 {
		t.Errorf("a hit of %d tokens after a restart, want 0", seen.now.hit(prompt))
	}
}
