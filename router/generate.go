// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/http"
	"syscall"
	"time"
)

// Chunk is a piece of a response.
type Chunk struct {
	Data   []byte
	Tokens int // of output in it; 0 if unknown
}

// StatusError is a worker's answer with another status than 200.
type StatusError struct {
	Status     int
	Body       []byte        // the answer's body, possibly truncated
	RetryAfter time.Duration // as of [Response]
}

// Error implements error.
func (e *StatusError) Error() string { return fmt.Sprintf("it answers with status %d", e.Status) }

// Dispatch sends a request to the worker of its decision and yields the response in pieces. The first piece, which
// may be empty, says that the worker answers with status 200. An error ends the response. An error before the first
// piece counts as a failure of the worker (see [Config.AvoidFailing]), unless ctx has ended or the error wraps
// [ErrNoWorkers]; a [StatusError] counts by its status. Dispatch must end soon after ctx.
type Dispatch func(ctx context.Context, req Request, d Decision) iter.Seq2[Chunk, error]

// Generate routes a request, which needs an ID, sends it by dispatch and yields the
// response. The first chunk that is not empty counts as the first token. The slot is freed
// when the loop ends: with the response, with an error, which is yielded last, when the
// consumer stops, or with ctx.
//
// If the request has WantSecond and its worker refuses it, Generate calls dispatch again, with the second choice as the
// worker of the decision, and then with the third one. A worker refuses a request if it accepts no connection, or
// answers with status 429 or 503.
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
		g := generation{Router: r, ctx: ctx, id: req.ID, asked: 1}
		defer g.free()
		worker, cancel := context.WithCancel(ctx)
		defer cancel()
		again, more := g.relay(&d, dispatch(worker, req, d), yield)
		for again {
			d = d.sentToNext()
			g.asked++
			again, more = g.relay(&d, dispatch(worker, req, d), yield)
		}
		g.answered = g.answered || more && ctx.Err() == nil // a response may be empty
	}
}

// generation is a request of [Router.Generate].
type generation struct {
	*Router
	ctx      context.Context //nolint:containedctx // of the call
	id       string
	asked    int      // workers that have been sent the request
	answered bool     // the worker answers
	first    bool     // the first token has come
	refusing []uint64 // workers that refused a connection
}

// served is [Router.Served], with the reason of the workers that gave no response.
func (g *generation) served(resp Response) {
	g.Served(g.id, resp)
	for _, id := range g.refusing {
		g.Unanswered(id, "connection refused")
	}
	g.refusing = nil
}

// relay yields the response of the worker of a decision. again says that the worker refused the request and that the
// next choice may take it. ended says that the response came to its end.
func (g *generation) relay(d *Decision, response iter.Seq2[Chunk, error], yield func(Chunk, error) bool) (again, ended bool) {
	for c, err := range response {
		if err != nil {
			if again = g.failed(d, err); !again {
				yield(Chunk{}, fmt.Errorf("router: worker %d: %w", d.Worker.ID, err))
			}
			return again, false
		}
		if !g.answered {
			g.answered = true
			g.served(Response{Address: d.Address, Asked: g.asked, Status: http.StatusOK})
		}
		if len(c.Data) > 0 && !g.first {
			g.first = true
			g.MarkPrefillCompleted(g.id)
		}
		if c.Tokens > 0 {
			g.AddOutputTokens(g.id, c.Tokens)
		}
		if !yield(c, nil) {
			return false, false
		}
	}
	return false, true
}

// failed notes that a worker gave no response, or broke it off. It reports whether the next choice may take the
// request.
func (g *generation) failed(d *Decision, err error) (again bool) {
	answer, hasStatus := errors.AsType[*StatusError](err)
	dial, isNet := errors.AsType[*net.OpError](err)
	resp := Response{Address: d.Address, Asked: g.asked, Local: true}
	if hasStatus {
		resp.Status, resp.RetryAfter, resp.Local = answer.Status, answer.RetryAfter, false
	}
	refused := isNet && dial.Op == "dial"
	if errors.Is(err, syscall.ECONNREFUSED) {
		g.refusing = append(g.refusing, d.Worker.ID)
	}
	switch {
	case g.ctx.Err() != nil, errors.Is(err, ErrNoWorkers):
		return false
	case g.answered:
		g.BrokeOff(d.Address)
		return false
	case MayBeRepeated(resp.Status):
		g.Attempted(g.id, resp)
		refused = true
	}
	if again = refused && d.Second.Address.IsValid(); !again { // else the answer of the next choice reports this one, too
		g.served(resp)
	}
	return again
}

// free frees the slot.
func (g *generation) free() {
	switch {
	case g.answered:
		g.Free(g.id)
	case g.ctx.Err() != nil:
		g.Leave(g.id, true)
	default:
		g.Abandon(g.id)
	}
}

// sentToNext returns the decision with the second choice as its worker, and the third one as its second. All choices
// have the engine and the prefill leg of the first.
func (d *Decision) sentToNext() Decision {
	s, to := &d.Second, *d
	to.Worker, to.WorkerName, to.Address, to.Host, to.NameRank = s.Worker, s.WorkerName, s.Address, s.Host, s.NameRank
	to.OverlapBlocks, to.LoweredBlocks, to.guessed = s.OverlapBlocks, s.LoweredBlocks, s.guessed
	to.Second, to.Third = d.Third, Second{}
	return to
}
