// SPDX-License-Identifier: Apache-2.0

package prefill

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// run is a leg under way.
type run struct {
	*Client
	Leg
	id, bootstrap string // of the leg's decision
	protocol      *engine.Prefill
	deadline      time.Time

	users atomic.Int32 // Do, and the prefill request of SGLang
	done  func()       // called when there are no users any more
}

// HeaderRank names a rank to a worker whose ranks share an address.
const HeaderRank = "X-Data-Parallel-Rank"

// nameRank sets the rank of the next prefill request, or removes it. Earlier prefill requests have ended.
func (r *run) nameRank(named bool, w router.Worker) {
	if r.Header.Del(HeaderRank); named {
		r.Header.Set(HeaderRank, fmt.Sprint(w.DPRank))
	}
}

func (r *run) release() {
	if r.users.Add(-1) == 0 {
		r.done()
	}
}

// legError is why a prefill request failed.
type legError struct {
	// reason is "unreachable", "timeout", "status", "no_parameters" or "too_large".
	reason string
	status int // of the worker's answer; 0 = it sent none
}

// Error implements error.
func (e legError) Error() string { return "prefill: " + e.reason }

// mayRetry says whether another prefill worker may succeed after an error.
func mayRetry(err error) bool {
	f, failed := errors.AsType[legError](err)
	return failed && (f.status < 400 || f.status >= 500 || f.status == http.StatusTooManyRequests)
}

// target is a prefill worker. host is the Host header of requests to it; empty = its address.
type target struct {
	address netip.AddrPort
	host    string
}

// try sends the prefill request to a worker, and returns the decode request's body when that request
// may be sent. The error is a [legError], or that of ctx.
func (r *run) try(ctx context.Context, to target) (decode []byte, err error) {
	if r.protocol.AtOnce() {
		return r.tryAtOnce(ctx, to)
	}
	answer, err := r.post(ctx, to, openai.Edit(r.Body, prefillMembers(r.protocol)...), nil)
	if err == nil {
		if decode = decodeBody(r.protocol, r.Body, answer); decode == nil {
			err = legError{reason: "no_parameters"}
		}
	}
	r.report(to, err)
	return decode, err
}

// tryAtOnce is try for engines whose two requests have the same body and run at once.
func (r *run) tryAtOnce(ctx context.Context, to target) (decode []byte, err error) {
	decode = bytes.Join(openai.Edit(r.Body, bootstrapMembers(r.protocol, r.bootstrap, to.address, r.Prompts)...), nil)
	sent, ended := make(chan struct{}), make(chan error, 1)
	r.users.Add(1)
	go func() { // ends with ctx or at the deadline
		defer r.release()
		_, err := r.post(ctx, to, [][]byte{decode}, sync.OnceFunc(func() { close(sent) }))
		r.report(to, err)
		ended <- err
	}()
	select {
	case <-sent:
		return decode, nil
	case err = <-ended:
		return decode, err
	}
}

// report tells the router how a prefill request ended. If it succeeded, its slot is free.
func (r *run) report(to target, err error) {
	resp := router.Response{Address: to.address, Asked: 1, Status: http.StatusOK}
	if err != nil {
		f, failed := errors.AsType[legError](err)
		if !failed {
			return // the client left, and its request's end frees the slot
		}
		resp.Status, resp.Late = f.status, f.reason == lateReason
		resp.Local = f.status == 0 && !resp.Late
	}
	r.Router.Served(r.id, resp)
	if err == nil {
		r.Router.FirstToken(r.id, router.SignTold)
		r.Router.Free(r.id)
	}
}

// lateReason is the reason of a leg whose prefill took too long.
const lateReason = "timeout"

var errTimeout = errors.New("the prefill took too long")

// post sends a request, whose body is in pieces, to a prefill worker and returns the answer. sent,
// unless nil, is called when the connection has taken the request, each time that it is sent.
func (r *run) post(ctx context.Context, to target, pieces [][]byte, sent func()) ([]byte, error) {
	timed, cancel := context.WithDeadlineCause(ctx, r.deadline, errTimeout)
	defer cancel()
	if sent != nil {
		timed = httptrace.WithClientTrace(timed, &httptrace.ClientTrace{WroteRequest: func(i httptrace.WroteRequestInfo) {
			if i.Err == nil {
				sent()
			}
		}})
	}
	answer, err := r.exchange(timed, to, pieces)
	switch {
	case err == nil:
		return answer, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(context.Cause(timed), errTimeout):
		return nil, legError{reason: lateReason}
	}
	return nil, err
}

// maxAnswer bounds the answer of a prefill worker. The list of a long prompt's blocks has some ten
// thousand numbers.
const maxAnswer = 1 << 20

// exchange sends a request and reads its answer. The error is a [legError].
func (r *run) exchange(ctx context.Context, to target, pieces [][]byte) ([]byte, error) {
	// A connection that the worker has closed meanwhile is no failure: the request is sent again.
	body := func() (io.ReadCloser, error) { b := net.Buffers(slices.Clone(pieces)); return io.NopCloser(&b), nil }
	first, _ := body()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+to.address.String()+r.Path, first)
	if err != nil {
		return nil, legError{reason: "unreachable"}
	}
	req.Host = to.host
	req.GetBody = body
	for _, p := range pieces {
		req.ContentLength += int64(len(p))
	}
	maps.Copy(req.Header, r.Header)
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.HTTP.Do(req)
	if err != nil {
		return nil, legError{reason: "unreachable"}
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, legError{reason: "status", status: resp.StatusCode}
	}
	if r.protocol.AtOnce() { // the whole response, of which nothing is needed
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return nil, legError{reason: "unreachable"}
		}
		return nil, nil
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, legError{reason: "unreachable"}
	case len(answer) > maxAnswer:
		return nil, legError{reason: "too_large"}
	}
	return answer, nil
}
