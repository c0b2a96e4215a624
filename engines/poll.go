// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"net/http"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
)

const (
	pollEvery = 100 * time.Millisecond
	// partialFor is how long a rank stays partial after earlier events were missed. After that
	// time, most blocks of those events are evicted.
	partialFor = 10 * time.Minute
)

// poll asks TensorRT-LLM's server for its events until ctx ends. The server forgets events
// that it has returned, so it may have no other client.
func (r *rankSource) poll(ctx context.Context) {
	wait := backoff{}
	copies := time.Now()
	for ctx.Err() == nil {
		if r.isMuted() { // the engine gives each event to one client only
			bus.Wait(ctx, time.Second)
			continue
		}
		b, err := r.pollOnce(ctx)
		away := r.current() == indexer.StateNone
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			if !away {
				r.count(sourceAway, 1)
				r.set(indexer.StateNone)
				r.unavailable(&r.noEvents, err)
				r.log.Warn("an engine does not return events any more", "endpoint", r.at.url, "err", err)
			}
			if errors.Is(err, syscall.ECONNREFUSED) && r.stream.hasLast {
				r.do(r.stream.restart) // its process has ended
			}
			wait.wait(ctx)
			continue
		}
		if away {
			wait = backoff{}
			r.count(sourceConnected, 1)
			r.set(indexer.StateOK)
			r.unavailable(&r.noEvents, nil)
			r.log.Info("an engine returns events", "endpoint", r.at.url)
		}
		if len(b.Events) > 0 || b.Drops != (Drops{}) {
			r.count(sourceLive, 1)
			r.do(func() { r.applyPolled(&b) })
			continue
		}
		r.do(func() {
			if r.stream.partial && !r.gap.IsZero() && time.Since(r.gap) >= partialFor {
				r.stream.whole()
			}
			if time.Since(copies) > rebuildEvery {
				copies = time.Now()
				r.copies.Store(int64(r.engine.Copies()))
			}
		})
		bus.Wait(ctx, pollEvery)
	}
}

func (r *rankSource) isMuted() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.muted
}

// applyPolled applies the events of an answer. Missing events cannot be requested: after a
// gap, and if another client received the first events, the rank is partial.
func (r *rankSource) applyPolled(b *EngineBatch) {
	if !r.stream.hasLast && len(b.Events) > 0 && b.Events[0].ID > 0 {
		r.stream.partial, r.gap = true, time.Now()
	}
	r.stream.hasLast = true
	gaps := r.engine.gaps
	switch cleared := r.applyBatch(b); {
	case r.engine.gaps > gaps:
		r.stream.partial, r.gap = true, time.Now()
	case cleared:
		r.stream.whole()
	}
}

func (r *rankSource) pollOnce(ctx context.Context) (EngineBatch, error) {
	ctx, cancel := context.WithTimeout(ctx, engineTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.at.url, http.NoBody)
	if err != nil {
		return EngineBatch{}, err
	}
	if r.worker.Endpoint == "" { // else it may be another server
		req.Host = r.worker.Host
	}
	body, err := reach.Read(r.s.conf.Client, req, maxAnswer)
	if err != nil {
		return EngineBatch{}, err
	}
	return decodeTRTLLM(body)
}
