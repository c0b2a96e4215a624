// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

const (
	firstChecks  = 8      // requests of each class that are checked first
	laterChecks  = 10_000 // afterwards one request in so many is checked
	checkTimeout = 10 * time.Second
	mostChecks   = 30      // requests that are checked in a minute, of all models
	otherChecks  = 20      // of them those that are not among the first of a class
	ofOneWorker  = 10      // of them those of one worker
	mostBody     = 1 << 20 // bytes of a body that is sent to a worker again
	// restartChecks is how many requests to a new or restarted worker are checked: as many as can contradict it.
	restartChecks = 3
)

// verifier compares kvroute's ids of some requests with those that a worker without events makes of the client's own
// body, after the decision: events confirm the ids of the others. One goroutine, in run, asks one worker at a time.
// If its queue or the minute has no room, a later request is checked instead. A worker that does not answer is not
// asked again in the same minute, so it delays the other checks by one timeout. The verdict on what the verifier
// finds is that of package confirm.
type verifier struct {
	log    *slog.Logger
	checks meter.Counter
	queue  chan router.Observation // copies
	client *http.Client
	// answered judges a request by the ids of its worker, as [router.Router.Answered] does.
	answered func(o *router.Observation, theirs []uint32) (position int)

	mu sync.Mutex
	// mu guards the fields below.
	observed  map[string]*observed // by model; those without a card in the router any more stay until they are too many
	restarted map[uint64]int       // checks that are due, by worker; at most maxRestarted workers
	silent    map[uint64]bool      // workers whose last probe got no answer; at most maxRestarted
	minute    time.Time            // begin of a minute
	inMinute  int                  // checks in it
	ofWorker  map[uint64]int       // the same by worker
	failing   map[uint64]bool      // workers that did not answer in it
}

// maxRestarted limits the new, restarted and silent workers that are remembered, maxObserved the models.
const maxRestarted, maxObserved = 4096, 4096

// expect checks the next requests to a worker, which is new, or may have restarted with other files.
func (v *verifier) expect(id uint64) {
	if v == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.expectLocked(id)
}

func (v *verifier) expectLocked(id uint64) {
	if len(v.restarted) < maxRestarted {
		v.restarted[id] = restartChecks
	}
}

// probed notes whether a worker answered a probe. A worker that answers again may have restarted.
func (v *verifier) probed(id uint64, answered bool) {
	if v == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case !answered && len(v.silent) < maxRestarted:
		v.silent[id] = true
	case answered && v.silent[id]:
		delete(v.silent, id)
		v.expectLocked(id)
	}
}

// forget forgets a worker that left.
func (v *verifier) forget(id uint64) {
	if v == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.silent, id)
	delete(v.restarted, id)
}

// observed counts the requests of a model since its card was loaded, by class. Those that had to be checked, but were
// not, do not count.
type observed struct {
	card *router.Card
	n    [chat.Classes]int
}

func newVerifier(log *slog.Logger, checks meter.Counter, client *http.Client) *verifier {
	return &verifier{
		log: log, checks: checks, queue: make(chan router.Observation, 16), observed: map[string]*observed{}, client: client, restarted: map[uint64]int{}, silent: map[uint64]bool{},
		ofWorker: map[uint64]int{}, failing: map[uint64]bool{},
		answered: func(o *router.Observation, theirs []uint32) int { return tokenizer.FirstDiff(o.IDs, theirs) },
	}
}

// observe queues a request if it is to be checked. It does not block.
func (v *verifier) observe(o router.Observation) {
	if o.Card == nil || o.Group != "" || o.Events || len(o.Prompt.Body) > mostBody || !hasIDsPath(o.Prompt) {
		return
	}
	if engine.Of(o.Engine).Forwards {
		return // its address is that of a frontend, which returns no ids
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	n, restarted := v.countLocked(&o), v.restarted[o.Worker.ID]
	first := *n < firstChecks
	if !first && restarted == 0 && *n%laterChecks != 0 && !o.ByText && !o.Suspect {
		*n++
		return
	}
	if !v.hasRoomLocked(time.Now(), o.Worker.ID, first) {
		return
	}
	o.IDs = slices.Clone(o.IDs)
	o.Prompt = o.Prompt.Clone()
	select {
	case v.queue <- o:
	default: // run cannot keep up
		return
	}
	*n++
	v.inMinute++
	v.ofWorker[o.Worker.ID]++
	if restarted > 1 {
		v.restarted[o.Worker.ID] = restarted - 1
	} else {
		delete(v.restarted, o.Worker.ID)
	}
}

// countLocked returns the counter of a request's class.
func (v *verifier) countLocked(o *router.Observation) *int {
	seen := v.observed[o.Model]
	if seen == nil || seen.card != o.Card {
		if len(v.observed) >= maxObserved {
			clear(v.observed)
		}
		seen = &observed{card: o.Card}
		v.observed[o.Model] = seen
	}
	return &seen.n[o.Class]
}

// hasRoomLocked reports whether the minute has room for a check of a worker.
func (v *verifier) hasRoomLocked(now time.Time, worker uint64, first bool) bool {
	if now.Sub(v.minute) >= time.Minute {
		v.minute, v.inMinute = now, 0
		clear(v.ofWorker)
		clear(v.failing)
	}
	limit := mostChecks
	if !first {
		limit = otherChecks
	}
	return v.inMinute < limit && v.ofWorker[worker] < ofOneWorker && !v.failing[worker]
}

// failed notes that a worker did not answer a check: a later request of the class is checked instead.
func (v *verifier) failed(o *router.Observation) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failing[o.Worker.ID] = true
	if seen := v.observed[o.Model]; seen != nil && seen.card == o.Card && 0 < seen.n[o.Class] && seen.n[o.Class] <= firstChecks {
		seen.n[o.Class]--
	}
}

// run checks until ctx ends.
func (v *verifier) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case o := <-v.queue:
			v.mu.Lock()
			failing := v.failing[o.Worker.ID]
			v.mu.Unlock()
			if failing {
				v.failed(&o)
				continue
			}
			v.compare(ctx, o)
		}
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
		} else {
			v.failed(&o)
		}
		v.log.Debug("a worker does not return token ids", "model", o.Model, "worker", o.Worker.ID,
			"address", o.Address, "err", err)
		return 0, false
	}
	if position = v.answered(&o, theirs); position >= 0 {
		outcome = "different"
		v.log.Warn("a worker makes other tokens", "model", o.Model, "class", o.Class.String(), "worker", o.Worker.ID, "address", o.Address,
			"host", o.Host, "position", position, "ours", around(o.IDs, position), "theirs", around(theirs, position))
	}
	return position, true
}
