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
	"github.com/kvroute/kvroute/internal/zmtp"
)

const pollEvery = 100 * time.Millisecond

// poll asks TensorRT-LLM's server for its events until ctx ends. The server forgets events
// that it has returned, so it may have no other client.
func (r *rankSource) poll(ctx context.Context) {
	backoff := zmtp.Backoff{}
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
			if errors.Is(err, syscall.ECONNREFUSED) {
				r.do(r.ended)
			}
			backoff.Wait(ctx)
			continue
		}
		if away {
			backoff = zmtp.Backoff{}
			r.count(sourceConnected, 1)
			r.set(indexer.StateOK)
			r.unavailable(&r.noEvents, nil)
			r.log.Info("an engine returns events", "endpoint", r.at.url)
		}
		r.tick()
		if len(b.Events) > 0 || b.Drops != (Drops{}) {
			r.count(sourceLive, 1)
			r.do(func() { r.applyPolled(&b) })
			continue
		}
		bus.Wait(ctx, pollEvery)
	}
}

// ended forgets the blocks of an engine whose process has ended.
func (r *rankSource) ended() {
	if _, _, known := r.follower.Last(); known {
		r.follower.Restart()
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
	_, _, known := r.follower.Last()
	gaps := r.engine.gaps
	cleared := r.applyBatch(b)
	switch {
	case r.engine.gaps > gaps, !known && !cleared && len(b.Events) > 0 && b.Events[0].ID > 0:
		r.follower.Miss(time.Now(), indexer.StatePartial)
	case cleared:
		r.follower.Whole()
	}
	r.follower.Continue(0, 0)
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
