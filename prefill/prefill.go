// SPDX-License-Identifier: Apache-2.0

// Package prefill runs prefill legs: it has one worker compute the prompt of a request, and makes
// the body with which another worker receives the computed blocks and generates the response. The
// workers move the blocks themselves.
//
// There are three protocols, by the engine of both workers:
//
//	vllm    The prefill request has kv_transfer_params. The object of this name in its answer goes
//	        into the decode request as it is.
//	sglang  Both requests have the same bootstrap_host, bootstrap_port and bootstrap_room. They run
//	        at once, and the workers find each other by these.
//	trtllm  The prefill request has disaggregated_params of the type context_only. The object of
//	        this name in its answer goes into the decode request with the type generation_only.
//
// A [Client] may be used by any number of goroutines.
package prefill

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/router"
)

// Client runs prefill legs.
type Client struct {
	HTTP   *http.Client // follows no redirects and uses no proxies
	Router Router
}

// Router learns the results of prefill requests; see the methods of [router.Router].
type Router interface {
	Served(id string, r router.Response) (moved bool, avoided []router.Avoided)
	FirstToken(id string, by router.Sign) bool
	Free(id string) bool
}

// Leg is the prefill of one request.
type Leg struct {
	Path   string      // of the client's request
	Header http.Header // of the prefill request, beside its content type and its rank
	// Body is the client's, which [openai.Parse] accepted, and Prompts the number of prompts
	// in it. Body is not changed.
	Body    []byte
	Prompts int
}

// The outcomes of legs, beside the reasons of [legError].
const (
	served  = "served"
	second  = "second" // the second prefill worker computed the prompt
	batch   = "batch"  // the engine cannot hand over several prompts
	unknown = "engine" // the engine has no protocol
	Left    = "left"   // ctx ended
)

// Do runs the prefill leg of a decision: at the worker of d, and if that fails at the second choice. A worker that does
// not answer in half of the time until the deadline has failed, if there is a second choice.
// It returns the decode request's body as soon as that request may be sent, nil if the leg failed,
// and the outcome. done is called once, when neither Do nor a prefill request needs a body any more:
// with SGLang after Do has returned.
func (c *Client) Do(ctx context.Context, d *router.Decision, l Leg, deadline time.Time, done func()) (decode []byte, outcome string) {
	r := &run{
		Client: c, Leg: l,
		id: d.ID, bootstrap: d.Bootstrap, protocol: &engine.Of(d.Engine).Prefill,
		deadline: deadline, done: done,
	}
	r.users.Store(1)
	defer r.release()
	switch {
	case !r.protocol.Known():
		return nil, unknown
	case l.Prompts > 1 && !r.protocol.Lists:
		return nil, batch
	}
	outcome = served
	r.nameRank(d.NameRank, d.Worker)
	hasSecond := d.Second.Address.IsValid()
	if hasSecond && !r.protocol.AtOnce() { // a worker that hangs leaves time for the second one
		r.deadline = deadline.Add(-time.Until(deadline) / 2)
	}
	decode, err := r.try(ctx, target{d.Address, d.Host})
	if hasSecond && mayRetry(err) && time.Now().Before(deadline) {
		outcome, r.deadline = second, deadline
		r.nameRank(d.Second.NameRank, d.Second.Worker)
		decode, err = r.try(ctx, target{d.Second.Address, d.Second.Host})
	}
	switch f, failed := errors.AsType[legError](err); {
	case failed:
		return nil, f.reason
	case err != nil:
		return nil, Left
	}
	return decode, outcome
}
