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
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
)

// The engines with a protocol.
const (
	vllm   = "vllm"
	sglang = "sglang"
	trtllm = "trtllm"
)

// Leg is the prefill of one request.
type Leg struct {
	Engine  string         // of both workers
	Address netip.AddrPort // of the prefill worker's HTTP server
	// Bootstrap is the prefill worker's bootstrap server, host:port: for SGLang.
	Bootstrap string
	Path      string      // of the client's request
	Header    http.Header // of the prefill request, beside its content type

	// Body is the client's, which [openai.Parse] accepted, and Prompts the number of prompts
	// in it. Body is not changed.
	Body    []byte
	Prompts int
	// Sent, if not nil, is called when the worker's connection has taken the request.
	Sent func()

	room []openai.Member // SGLang's members for both requests
}

// AtOnce returns the decode request's body if both requests must run at once, nil otherwise. Call
// it before [Client.Run].
func (l *Leg) AtOnce() []byte {
	if l.Engine != sglang {
		return nil
	}
	host, port, err := net.SplitHostPort(l.Bootstrap)
	if err != nil {
		host, port = l.Address.Addr().String(), strconv.Itoa(defaultBootstrap)
	}
	value := func(one func() string) []byte {
		if l.Prompts <= 1 {
			return []byte(one())
		}
		list := []byte{'['}
		for range l.Prompts {
			list = append(append(list, one()...), ',')
		}
		list[len(list)-1] = ']'
		return list
	}
	l.room = []openai.Member{
		{Name: "bootstrap_host", Value: value(func() string { return strconv.Quote(host) })},
		{Name: "bootstrap_port", Value: value(func() string { return port })},
		// Nobody may guess it, and no two requests may have the same.
		{Name: "bootstrap_room", Value: value(func() string { return strconv.FormatUint(rand.Uint64()>>1, 10) })},
	}
	return bytes.Join(openai.Edit(l.Body, l.room...), nil)
}

// defaultBootstrap is the port of SGLang's bootstrap server if the worker registered none.
const defaultBootstrap = 8998

// Error is why a prefill leg failed.
type Error struct {
	// Reason is "unreachable", "timeout", "status", "no_parameters" or "too_large".
	Reason string
	Status int // of the prefill worker's answer; 0 = it sent none
	Err    error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Status > 0 {
		return fmt.Sprintf("prefill: %s: the worker answers with status %d", e.Reason, e.Status)
	}
	return fmt.Sprintf("prefill: %s: %v", e.Reason, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Client sends prefill requests.
type Client struct {
	// HTTP must follow no redirects and use no proxies.
	HTTP *http.Client
	// Router is for [Client.Do] only.
	Router Router
}

// maxAnswer bounds the answer of a prefill worker. The list of a long prompt's blocks has some ten
// thousand numbers.
const maxAnswer = 1 << 20

// Run sends the prefill request and returns the decode request's body; nil for a leg whose
// requests run at once, when its prefill has ended. The error is an [*Error], or that of ctx.
func (c *Client) Run(ctx context.Context, l *Leg, deadline time.Time) ([]byte, error) {
	timed, cancel := context.WithDeadlineCause(ctx, deadline, errTimeout)
	defer cancel()
	answer, err := c.post(timed, l, openai.Edit(l.Body, l.request()...))
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(context.Cause(timed), errTimeout):
		return nil, &Error{Reason: "timeout", Err: errTimeout}
	case err != nil:
		return nil, err
	}
	m, ok := l.parameters(answer)
	if !ok {
		return nil, &Error{Reason: "no_parameters", Err: errors.New("the answer has no parameters for the transfer")}
	}
	if m.Value == nil {
		return nil, nil
	}
	return bytes.Join(openai.Edit(l.Body, m), nil), nil
}

var errTimeout = errors.New("the prefill took too long")

// request returns the members that make the client's body a prefill request.
func (l *Leg) request() []openai.Member {
	if l.Engine == sglang {
		return l.room
	}
	members := []openai.Member{
		{Name: "stream", Value: []byte("false")},
		{Name: "max_tokens", Value: []byte("1")},
	}
	// One token is asked for. These would ask for more, or need a longer or streamed answer.
	for _, name := range [...]string{"max_completion_tokens", "min_tokens", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo"} {
		members = append(members, openai.Member{Name: name})
	}
	if l.Engine == trtllm {
		return append(members, openai.Member{Name: paramsTRTLLM, Value: []byte(`{"request_type":"context_only"}`)})
	}
	return append(members, openai.Member{Name: paramsVLLM, Value: []byte(`{"do_remote_decode":true}`)})
}

const (
	paramsVLLM   = "kv_transfer_params"
	paramsTRTLLM = "disaggregated_params"
)

// parameters returns the member that makes the client's body a decode request, without a value if
// the decode request has been sent.
func (l *Leg) parameters(answer []byte) (m openai.Member, ok bool) {
	switch l.Engine {
	case sglang:
		return m, true
	case trtllm:
		m = openai.Member{Name: paramsTRTLLM, Value: openai.Find(answer, "choices", paramsTRTLLM)}
		if isObject(m.Value) {
			m.Value = bytes.Join(openai.Edit(m.Value, openai.Member{Name: "request_type", Value: []byte(`"generation_only"`)}), nil)
		}
	default:
		m = openai.Member{Name: paramsVLLM, Value: openai.Find(answer, paramsVLLM)}
	}
	return m, isObject(m.Value)
}

func isObject(v []byte) bool { return len(v) > 2 && v[0] == '{' }

// post sends a request to the prefill worker and returns the body of its answer.
func (c *Client) post(ctx context.Context, l *Leg, pieces [][]byte) ([]byte, error) {
	body, size := net.Buffers(slices.Clone(pieces)), 0
	for _, p := range pieces {
		size += len(p)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+l.Address.String()+l.Path, &body)
	if err != nil {
		return nil, &Error{Reason: "unreachable", Err: err}
	}
	if l.Sent != nil {
		req = req.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(i httptrace.WroteRequestInfo) {
			if i.Err == nil {
				l.Sent()
			}
		}}))
	}
	req.ContentLength = int64(size)
	// A connection that the worker has closed meanwhile is no failure: the request is sent again.
	req.GetBody = func() (io.ReadCloser, error) { b := net.Buffers(slices.Clone(pieces)); return io.NopCloser(&b), nil }
	if l.Header != nil {
		req.Header = l.Header
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return nil, &Error{Reason: "unreachable", Err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, &Error{Reason: "status", Status: resp.StatusCode}
	}
	if l.Engine == sglang { // the whole response, of which nothing is needed
		_, err = io.Copy(io.Discard, resp.Body)
		if err != nil {
			err = &Error{Reason: "unreachable", Err: err}
		}
		return nil, err
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, &Error{Reason: "unreachable", Err: err}
	case len(answer) > maxAnswer:
		return nil, &Error{Reason: "too_large", Err: fmt.Errorf("the answer has more than %d bytes", maxAnswer)}
	}
	return answer, nil
}
