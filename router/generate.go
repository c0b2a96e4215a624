// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"iter"
)

// Chunk is a piece of a response.
type Chunk struct {
	Data   []byte
	Tokens int // of output in it; 0 if unknown
}

// StatusError is a worker's answer with another status than 200.
type StatusError struct {
	Status int
	Body   []byte // the answer's body, possibly truncated
}

// Error implements error.
func (e *StatusError) Error() string { return fmt.Sprintf("it answers with status %d", e.Status) }

// Dispatch sends a request to the worker of its decision and yields the response in pieces.
// An error ends the response. An error before the first piece counts as a failure of the worker
// (see [Config.AvoidFailing]), unless ctx has ended; a [StatusError] counts by its status.
// Dispatch must end soon after ctx.
type Dispatch func(ctx context.Context, req Request, d Decision) iter.Seq2[Chunk, error]

// Generate routes a request, which needs an ID, sends it by dispatch and yields the
// response. The first chunk that is not empty counts as the first token. The slot is freed
// when the loop ends: with the response, with an error, which is yielded last, when the
// consumer stops, or with ctx.
func (r *Router) Generate(ctx context.Context, req Request, dispatch Dispatch) iter.Seq2[Chunk, error] {
	return func(yield func(Chunk, error) bool) {
		if req.ID == "" {
			yield(Chunk{}, fmt.Errorf("router: %w: Generate needs an ID", ErrBadRequest))
			return
		}
		req.Owned = true
		d, err := r.BestWorker(ctx, req)
		if err != nil {
			yield(Chunk{}, err)
			return
		}
		served := false
		defer func() {
			if served {
				r.Free(req.ID)
			} else {
				r.Abandon(req.ID)
			}
		}()
		worker, cancel := context.WithCancel(ctx)
		defer cancel()
		for c, err := range dispatch(worker, req, d) {
			if err != nil {
				if !served && ctx.Err() == nil {
					r.failed(req.ID, &d, err)
				}
				yield(Chunk{}, fmt.Errorf("router: worker %d: %w", d.Worker.ID, err))
				return
			}
			if len(c.Data) > 0 && !served {
				served = true
				r.Served(req.ID, Response{Address: d.Address, Status: 200})
				r.MarkPrefillCompleted(req.ID)
			}
			if c.Tokens > 0 {
				r.AddOutputTokens(req.ID, c.Tokens)
			}
			if !yield(c, nil) {
				return
			}
		}
		served = served || ctx.Err() == nil // a response may be empty
	}
}

// failed notes that a worker gave no response.
func (r *Router) failed(id string, d *Decision, err error) {
	resp := Response{Address: d.Address, Local: true}
	if s, ok := errors.AsType[*StatusError](err); ok {
		resp.Status, resp.Local = s.Status, false
	}
	r.Served(id, resp)
}
