// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// The causes of a wrong prediction. With any other one, the check fails.
const (
	causeEvicted  = "evicted"     // the engine evicted a block that the prompt needs after the decision
	causeLate     = "events late" // kvroute did not have the events of the request before
	causeBoundary = "boundary"    // the engine's hit ends inside one of its blocks
)

// witness predicts a rank's cached tokens from the batches that the ledger received until a moment, without the kvroute
// that is tested.
type witness struct {
	of     *account
	block  int // tokens in a block of the engine
	engine *engines.Engine
	index  *indexer.Index
	has    int // batches of the account
}

// follow applies the batches of an account up to a number of them. The account of an engine that restarted is new.
func (w *witness) follow(a *account, until int) {
	if w.of != a {
		*w = witness{of: a, block: w.block, engine: engines.NewEngine(engines.EngineOptions{BlockSize: w.block}), index: indexer.New(indexer.Config{})}
	}
	for ; w.has < until; w.has++ {
		w.apply(a.batches[w.has].Events)
	}
}

func (w *witness) apply(evs []engines.EngineEvent) {
	out, _ := w.engine.Apply(&engines.EngineBatch{Events: evs})
	for _, ev := range out {
		w.index.Apply(0, ev.Event)
	}
}

// hit returns the tokens of a prompt that the rank can use.
func (w *witness) hit(prompt []uint32) int {
	m := indexer.Matches{Device: make([]int32, 1), Tokens: len(prompt)}
	w.index.FindMatches(&m, indexer.AppendLocalHashes(nil, prompt, w.block, indexer.Seed("", "")))
	return min(int(m.Device[0]), max(0, len(prompt)-1)/w.block) * w.block
}

// causes finds the cause of a wrong prediction of a request that ran alone.
type causes struct {
	now, before witness // of all batches until the request began, and until the request before it began
}

// begin notes that a request begins, after all events of the request before it.
func (c *causes) begin(l *ledger, at events.RankName) {
	l.with(at, func(a *account) {
		if c.now.of == a {
			c.before.follow(a, c.now.has)
		}
		c.now.follow(a, len(a.batches))
	})
}

// name names the cause of a wrong prediction, or says why none is known. The events of the request need not be there.
func (c *causes) name(l *ledger, at events.RankName, prompt []uint32, predicted, cached int) (cause string, known bool) {
	hit := c.now.hit(prompt)
	evicted := false
	l.with(at, func(a *account) {
		if c.now.of != a {
			return
		}
		after := witness{block: c.now.block}
		after.follow(a, c.now.has)
		for _, b := range a.batches[c.now.has:] {
			var gone []engines.EngineEvent
			for _, ev := range b.Events {
				if ev.Kind == engines.EngineRemoved {
					gone = append(gone, ev)
				}
			}
			after.apply(gone)
			evicted = evicted || after.hit(prompt) == cached
		}
	})
	switch {
	case cached%c.now.block != 0 && cached/c.now.block == predicted/c.now.block:
		return causeBoundary, true
	case hit == cached && c.before.of == c.now.of && c.before.hit(prompt) == predicted:
		return causeLate, true
	case hit == predicted && cached < hit && evicted:
		return causeEvicted, true
	}
	return fmt.Sprintf("unknown: the events until then say %d", hit), false
}
