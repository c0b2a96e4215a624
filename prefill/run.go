// SPDX-License-Identifier: Apache-2.0

package prefill

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Router learns what becomes of legs; see the methods of [router.Router].
type Router interface {
	Served(id string, r router.Response) (moved bool, avoided []router.Worker)
	FirstToken(id string, by router.Sign) bool
	Free(id string) bool
}

// The outcomes of legs, beside the reasons of [Error].
const (
	served  = "served"
	second  = "second" // the second prefill worker computed the prompt
	batch   = "batch"  // the engine cannot hand over several prompts
	unknown = "engine" // the engine has no protocol
	Left    = "left"   // ctx ended
)

// Do runs a prefill leg at the worker of its decision d, and if that fails at the second choice. It
// returns the decode request's body as soon as that request may be sent, nil if the leg failed, and
// the outcome. Do sets l.Address and l.Bootstrap. done is called once, when l.Body is no longer
// used: with SGLang after Do has returned.
func (c *Client) Do(ctx context.Context, d *router.Decision, l Leg, deadline time.Time, done func()) (decode []byte, outcome string) {
	running := false
	defer func() {
		if !running {
			done()
		}
	}()
	switch {
	case l.Engine != vllm && l.Engine != sglang && l.Engine != trtllm:
		return nil, unknown
	case l.Prompts > 1 && l.Engine != sglang:
		return nil, batch
	}
	l.Bootstrap = d.Bootstrap
	send := func(w router.Worker, at netip.AddrPort) ([]byte, error) {
		one := l
		one.Address, one.Header = at, maps.Clone(l.Header)
		if d.NameRank {
			one.Header.Set("X-Data-Parallel-Rank", strconv.FormatUint(uint64(w.DPRank), 10))
		}
		body, still, err := c.send(ctx, d.ID, one, deadline, done)
		running = still
		return body, err
	}
	outcome = served
	decode, err := send(d.Worker, d.Address)
	if mayRetry(err) && d.Second.Address.IsValid() {
		outcome = second
		decode, err = send(d.Second.Worker, d.Second.Address)
	}
	switch failure, failed := errors.AsType[*Error](err); {
	case failed:
		return nil, failure.Reason
	case err != nil:
		return nil, Left
	}
	return decode, outcome
}

// mayRetry says whether another prefill worker may succeed after an error.
func mayRetry(err error) bool {
	failure, failed := errors.AsType[*Error](err)
	return failed && failure.Reason != "timeout" && (failure.Status < 400 || failure.Status >= 500 || failure.Status == http.StatusTooManyRequests)
}

// send sends one prefill request and returns the decode request's body when that may be sent.
// running says that the prefill request goes on; done is then called at its end.
func (c *Client) send(ctx context.Context, id string, l Leg, deadline time.Time, done func()) (decode []byte, running bool, err error) {
	if decode = l.AtOnce(); decode == nil {
		decode, err = c.Run(ctx, &l, deadline)
		c.tell(id, l.Address, err)
		return decode, false, err
	}
	sent, ended := make(chan struct{}, 1), make(chan error, 1)
	l.Sent = func() {
		select {
		case sent <- struct{}{}:
		default: // the request is sent again on another connection
		}
	}
	goOn := make(chan bool, 1)
	go func() { // ends with ctx or at the deadline
		_, err := c.Run(ctx, &l, deadline)
		c.tell(id, l.Address, err)
		ended <- err
		if <-goOn {
			done()
		}
	}()
	select {
	case <-sent:
		goOn <- true
		return decode, true, nil
	case err = <-ended:
		goOn <- false
		return decode, false, err
	}
}

// tell tells the router how a prefill request ended. If it succeeded, its slot is free.
func (c *Client) tell(id string, at netip.AddrPort, err error) {
	r := router.Response{Address: at, Asked: 1, Status: http.StatusOK}
	if err != nil {
		failure, failed := errors.AsType[*Error](err)
		if !failed {
			return // the client left, and its request's end frees the slot
		}
		r.Status, r.Local = failure.Status, failure.Status == 0
	}
	c.Router.Served(id, r)
	if err == nil {
		c.Router.FirstToken(id, router.SignTold)
		c.Router.Free(id)
	}
}
