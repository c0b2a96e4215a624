// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

const (
	firstChecks  = 8      // requests of each model that are checked first
	laterChecks  = 10_000 // afterwards one request in so many is checked
	checkTimeout = 10 * time.Second
	mostChecks   = 30          // requests that are checked in a minute, of all models
	mostBody     = 1 << 20     // bytes of a body that is sent to a worker again
	recheckEvery = time.Minute // of models whose ids differed
	// driftAfter is how many checks in a row must find different ids in the first block
	// before the model is no longer tokenized. A single one may come from a worker that is
	// being replaced. So the first one is repeated at once, with another worker if there is one.
	driftAfter = 2
	// restartChecks is how many requests to a restarted worker are checked.
	restartChecks = 2
)

// verifier compares kvroute's ids of some requests with those that a worker without events makes of the client's own
// body, after the decision: events confirm the ids of the others, see package confirm. One goroutine, in run, asks one
// worker at a time. Requests that come while its queue is full are not checked.
//
// A model's verdict is Unchecked at first. Equal ids make it Agreed, different ids behind
// the first block Differs. Different ids in the first block, driftAfter times in a row,
// make it DriftSeen: the model is routed in text-block mode until a later check of the same
// prompt finds equal ids. A reloaded model is Unchecked again.
type verifier struct {
	log    *slog.Logger
	checks meter.Counter
	queue  chan router.Observation // copies
	client *http.Client
	again  time.Duration // between checks of a model that drifted
	// workers returns a model's workers.
	workers func(model string) []router.WorkerState
	// faults receives the faults of a worker.
	faults func(id uint64, faults []router.Fault)

	mu sync.Mutex
	// mu guards the fields below.
	observed  map[string]observed // by model
	restarted map[uint64]int      // checks that are due, by worker; at most maxRestarted workers
	minute    time.Time           // begin of a minute
	inMinute  int                 // checks in it
}

// maxRestarted limits the restarted workers that are remembered.
const maxRestarted = 4096

// expect checks the next requests to a worker, which may have restarted with other files.
func (v *verifier) expect(id uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.restarted) < maxRestarted {
		v.restarted[id] = restartChecks
	}
}

// observed counts the requests of a model since its card was loaded.
type observed struct {
	card *router.Card
	n    int
}

func newVerifier(
	log *slog.Logger, checks meter.Counter, client *http.Client, workers func(model string) []router.WorkerState,
) *verifier {
	return &verifier{
		log: log, checks: checks, queue: make(chan router.Observation, 16), observed: map[string]observed{},
		again: recheckEvery, workers: workers,
		client: client, faults: func(uint64, []router.Fault) {}, restarted: map[uint64]int{},
	}
}

// observe queues a request if it is to be checked. It does not block.
func (v *verifier) observe(o router.Observation) {
	if o.Group != "" || o.Events || len(o.Prompt.Body) > mostBody || idsPaths(o.Prompt, o.Card.Prompts) == nil {
		return
	}
	v.mu.Lock()
	before := v.observed[o.Model]
	if before.card != o.Card {
		before = observed{card: o.Card}
	}
	v.observed[o.Model] = observed{o.Card, before.n + 1}
	due := v.restarted[o.Worker.ID]
	if due > 1 {
		v.restarted[o.Worker.ID] = due - 1
	} else {
		delete(v.restarted, o.Worker.ID)
	}
	v.mu.Unlock()
	if before.n >= firstChecks && before.n%laterChecks != 0 && due == 0 || !v.mayCheck(time.Now()) {
		return
	}
	o.IDs = slices.Clone(o.IDs)
	o.Prompt = o.Prompt.Clone()
	select {
	case v.queue <- o:
	default: // run cannot keep up
	}
}

// mayCheck counts a check. It reports whether the minute has room for it.
func (v *verifier) mayCheck(now time.Time) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if now.Sub(v.minute) >= time.Minute {
		v.minute, v.inMinute = now, 0
	}
	v.inMinute++
	return v.inMinute <= mostChecks
}

// forget lets the requests of a model count from the beginning.
func (v *verifier) forget(model string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.observed, model)
}

// trial is what the checks of a model have found.
type trial struct {
	card    *router.Card
	wrong   int                // checks in a row that found different ids in the first block
	drifted router.Observation // the last check that found other ids
	differs map[uint64]bool    // the workers that make other ids: at most maxDiffering
}

// maxDiffering limits the workers of a model that have the fault token_ids.
const maxDiffering = 16

// run checks until ctx ends.
func (v *verifier) run(ctx context.Context) error {
	trials := map[string]*trial{} // by model
	again := time.NewTicker(v.again)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case o := <-v.queue:
			t := trials[o.Model]
			if t == nil || t.card != o.Card {
				if t != nil { // the faults are those of the card before the reload
					for id := range t.differs {
						v.faults(id, nil)
					}
				}
				t = &trial{card: o.Card, differs: map[uint64]bool{}}
				trials[o.Model] = t
			}
			v.check(ctx, t, o)
		case <-again.C:
			for model, t := range trials {
				if len(t.differs) > 0 || t.card.Prompts.Verdict() == tokenizer.DriftSeen {
					v.recheck(ctx, t)
				} else if len(v.workers(model)) == 0 {
					delete(trials, model)
					v.forget(model)
				}
			}
		}
	}
}

// check compares a request, and repeats the check at once if it is the first one that found other ids
// in the first block.
func (v *verifier) check(ctx context.Context, t *trial, o router.Observation) {
	at, ok := v.compare(ctx, o)
	if !ok {
		return
	}
	v.judge(t, o, at)
	if t.wrong != 1 {
		return
	}
	for _, w := range v.workers(o.Model) {
		if w.ID == o.Worker.ID {
			continue
		}
		again := o
		again.Worker, again.Address, again.Host = w.Worker, w.Address, w.Host
		if at, ok := v.compare(ctx, again); ok {
			v.judge(t, again, at)
			return
		}
	}
	v.expect(o.Worker.ID) // the next request there repeats the check
}

// fault sets or ends the fault of a worker.
func (v *verifier) fault(t *trial, o router.Observation, position int) {
	if position < 0 {
		if t.differs[o.Worker.ID] {
			delete(t.differs, o.Worker.ID)
			v.faults(o.Worker.ID, nil)
		}
		return
	}
	t.drifted = o
	if len(t.differs) >= maxDiffering && !t.differs[o.Worker.ID] {
		return
	}
	t.differs[o.Worker.ID] = true
	v.faults(o.Worker.ID, []router.Fault{{What: "token_ids", Text: fmt.Sprintf(
		"it makes other token ids than kvroute for model %s, from position %d on: compare the tokenizer in models with the engine's (kvroute tokenize)",
		o.Model, position)}})
}

// judge sets the model's verdict after a check. Position is that of the first id that
// differs, -1 if none does. If other workers' events confirm the ids, only the worker has a fault.
func (v *verifier) judge(t *trial, o router.Observation, position int) {
	prompts := o.Card.Prompts
	verdict := prompts.Verdict()
	if position < 0 || position >= o.BlockSize {
		t.wrong = 0
	} else {
		t.wrong++
	}
	if v.fault(t, o, position); o.Confirmed {
		t.wrong = 0
		return
	}
	switch {
	case verdict == tokenizer.DriftSeen: // only recheck changes that
	case t.wrong >= driftAfter:
		v.log.Error("model is routed in text-block mode: its worker makes other tokens", "model", o.Model,
			"worker", o.Worker.ID, "address", o.Address, "position", position)
		prompts.SetVerdict(tokenizer.DriftSeen)
	case position >= 0:
		prompts.SetVerdict(tokenizer.Differs)
	case verdict == tokenizer.Unchecked:
		prompts.SetVerdict(tokenizer.Agreed)
	}
}

// recheck repeats the last check that found other ids, with the workers that made them. If none of them
// answers, it asks another worker.
func (v *verifier) recheck(ctx context.Context, t *trial) {
	o := t.drifted
	p, err := o.Card.Prompts.Check(ctx, nil, o.Prompt, time.Now())
	if err != nil {
		return
	}
	o.IDs = p.IDs
	answered, drifts := false, false
	ask := func(w *router.WorkerState) (ok bool) {
		again := o
		again.Worker, again.Address, again.Host = w.Worker, w.Address, w.Host
		position, ok := v.compare(ctx, again)
		if ok {
			v.fault(t, again, position)
			answered, drifts = true, drifts || position >= 0 && position < o.BlockSize
		}
		return ok
	}
	workers := v.workers(o.Model)
	if !slices.ContainsFunc(workers, func(w router.WorkerState) bool { return w.ID == o.Worker.ID }) {
		workers = append([]router.WorkerState{{Worker: o.Worker, Address: o.Address, Host: o.Host}}, workers...)
	}
	for id := range t.differs {
		if !slices.ContainsFunc(workers, func(w router.WorkerState) bool { return w.ID == id }) {
			v.fault(t, router.Observation{Worker: router.Worker{ID: id}}, -1) // it left, or is not healthy
		}
	}
	for i := range workers {
		if t.differs[workers[i].ID] {
			ask(&workers[i])
		}
	}
	for i := range workers {
		if answered {
			break
		}
		ask(&workers[i])
	}
	if answered && !drifts && o.Card.Prompts.Verdict() == tokenizer.DriftSeen {
		v.log.Info("model is tokenized again: its worker makes the same tokens", "model", o.Model)
		t.wrong = 0
		// Not Agreed: ids that differed once are not sent to workers again.
		o.Card.Prompts.SetVerdict(tokenizer.Differs)
	}
}

// compare requests the ids of a prompt from its worker, and returns the position of the
// first id that differs, -1 if none does. ok is false if the worker did not answer.
func (v *verifier) compare(ctx context.Context, o router.Observation) (position int, ok bool) {
	outcome := "ok"
	defer func() { v.checks.Count(o.Model, outcome) }()
	asking, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	theirs, err := askIDs(asking, v.client, o.Host, "http://"+o.Address.String(), idsPaths(o.Prompt, o.Card.Prompts), o.Prompt.Body)
	if err != nil {
		outcome = "error"
		if status, ok := errors.AsType[reach.StatusError](err); ok && slices.Contains(unavailable, status.Status) {
			outcome = "unavailable" // the engine has none of the paths
		}
		v.log.Debug("a worker does not return token ids", "model", o.Model, "worker", o.Worker.ID,
			"address", o.Address, "err", err)
		return 0, false
	}
	if position = tokenizer.FirstDiff(o.IDs, theirs); position >= 0 {
		outcome = "different"
		v.log.Warn("a worker makes other tokens", "model", o.Model, "worker", o.Worker.ID, "address", o.Address,
			"position", position,
			"ours", around(o.IDs, position), "theirs", around(theirs, position))
	}
	return position, true
}
