// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"fmt"
	"iter"
)

// Chunk is a piece of a response.
type Chunk struct {
	Data   []byte
	Tokens int // of output in it; 0 if unknown
}

// Dispatch sends a request to the worker of its decision and yields the response
// piece by piece. An error ends it. It must end soon after ctx.
type Dispatch func(ctx context.Context, req Request, d Decision) iter.Seq2[Chunk, error]

// Generate routes a request, which needs an ID, sends it by dispatch and yields
// the response. It keeps the account: the first chunk that is not empty is the
// first token, and the slot is given back however the loop ends: with the
// response, with an error, which is the last that is yielded, when the consumer
// stops, or with ctx.
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
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		for c, err := range dispatch(ctx, req, d) {
			if err != nil {
				yield(Chunk{}, fmt.Errorf("router: worker %d: %w", d.Worker.ID, err))
				return
			}
			if len(c.Data) > 0 && !served {
				served = true
				r.MarkPrefillCompleted(req.ID)
			}
			if c.Tokens > 0 {
				r.AddOutputTokens(req.ID, c.Tokens)
			}
			if !yield(c, nil) {
				return
			}
		}
		served = true // to its end, if without a word
	}
}
