// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"time"
)

// Roles of an engine in a split model.
const (
	rolePrefill = "prefill" // computes prompts whose blocks decode engines fetch
	roleDecode  = "decode"  // fetches blocks
	roleBoth    = "both"    // either, for each request; not with SGLang, whose two requests are equal
)

// transfer says how the blocks of a prompt move, as the body of its request tells. The zero value
// means that they do not move.
type transfer struct {
	send bool   // another engine will fetch them
	from string // the prefill engine to fetch them from, host:port; "" = none
	id   string // of the leg at the prefill engine; "" if that chooses it
}

// transfer reads the fields of a protocol. As in vLLM without a connector, an engine ignores the
// fields of another role.
func (c *Config) transfer(data []byte) (transfer, error) {
	var f struct {
		VLLM struct {
			Send    bool   `json:"do_remote_decode"`
			Receive bool   `json:"do_remote_prefill"`
			ID      string `json:"remote_request_id"`
			Host    string `json:"remote_host"`
			Port    int    `json:"remote_port"`
		} `json:"kv_transfer_params"`
		TRTLLM struct {
			Type  string `json:"request_type"`
			ID    uint64 `json:"ctx_request_id"`
			State string `json:"opaque_state"`
		} `json:"disaggregated_params"`
		Host first[string] `json:"bootstrap_host"`
		Port first[int]    `json:"bootstrap_port"`
		Room first[uint64] `json:"bootstrap_room"`
	}
	if c.Role == "" {
		return transfer{}, nil
	}
	if err := json.Unmarshal(data, &f); err != nil {
		return transfer{}, err
	}
	prefill, decode := c.Role != roleDecode, c.Role != rolePrefill
	address := func(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
	switch {
	case c.Engine == SGLang && f.Room.value == nil:
		return transfer{}, errors.New("the request has no bootstrap_room, and this engine serves no whole requests")
	case c.Engine == SGLang:
		t := transfer{send: prefill, id: strconv.FormatUint(*f.Room.value, 10)}
		if decode && f.Host.value != nil && f.Port.value != nil {
			t.from = address(*f.Host.value, *f.Port.value)
		}
		return t, nil
	case c.Engine == TRTLLM && decode && f.TRTLLM.Type == "generation_only":
		return transfer{from: f.TRTLLM.State, id: strconv.FormatUint(f.TRTLLM.ID, 10)}, nil
	case c.Engine == TRTLLM:
		return transfer{send: prefill && f.TRTLLM.Type == "context_only"}, nil
	case decode && f.VLLM.Receive:
		return transfer{from: address(f.VLLM.Host, f.VLLM.Port), id: f.VLLM.ID}, nil
	}
	return transfer{send: prefill && f.VLLM.Send}, nil
}

// first is a JSON value, or the first one of a list: a request of several prompts has lists, and the
// engine answers the first prompt.
type first[T any] struct{ value *T }

// UnmarshalJSON implements [json.Unmarshaler].
func (f *first[T]) UnmarshalJSON(data []byte) error {
	var list []*T
	if json.Unmarshal(data, &list) == nil {
		if len(list) > 0 {
			f.value = list[0]
		}
		return nil
	}
	return json.Unmarshal(data, &f.value)
}

// leg is a prompt that this engine computes for another one. Engine.mu guards its fields.
type leg struct {
	id       string
	request  *request           // nil if only its decode engine has come, which SGLang allows
	computed chan struct{}      // closed when the blocks are there, or never will be
	timer    *time.Timer        // ends the leg if nobody fetches the blocks; nil until they are there
	ended    func(fetched bool) // called once; may be nil
}

// leg returns the leg of an id, which is made if it is new. mu is held.
func (e *Engine) leg(id string) *leg {
	l := e.legs[id]
	if l == nil {
		l = &leg{id: id, computed: make(chan struct{})}
		e.legs[id] = l
	}
	return l
}

// open makes a request the prefill of a leg: its blocks stay until they are fetched, or nobody
// fetches them within the hold time. SGLang's prefill requests are answered then, the others before.
func (e *Engine) open(id string, r *request, a *answer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.leg(cmp.Or(id, strconv.FormatUint(rand.Uint64()>>11, 10))) // a number that JSON keeps
	if l.request != nil {
		return fmt.Errorf("another request has the room %s", id)
	}
	l.request, r.leg = r, l
	answered := r.finished
	r.finished = func() {
		l.timer = time.AfterFunc(e.conf.HoldTime, func() { e.lose(l) })
		close(l.computed)
		if e.conf.Engine != SGLang {
			answered()
		}
	}
	if e.conf.Engine == SGLang {
		r.output = 1
		l.ended = func(fetched bool) { a.failed = !fetched; answered() }
	}
	return nil
}

// end ends a leg and frees its blocks. It returns false if the leg has ended before. mu is held.
func (e *Engine) end(l *leg, fetched bool) bool {
	if e.legs[l.id] != l {
		return false
	}
	delete(e.legs, l.id)
	if l.timer == nil {
		close(l.computed)
	} else {
		l.timer.Stop()
		e.scheduler.release(l.request)
		if l.ended != nil {
			l.ended(fetched)
		}
	}
	e.work()
	return true
}

// lose ends a leg whose blocks nobody fetched.
func (e *Engine) lose(l *leg) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.end(l, false)
}

// send answers a decode engine that fetches blocks of a leg. It takes the time of their transfer.
func (e *Engine) send(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	blocks, err := strconv.Atoi(r.FormValue("blocks"))
	if err != nil || blocks < 0 || blocks > e.conf.NumBlocks {
		refusal(http.StatusBadRequest, "blocks", "want a number of blocks").Write(w)
		return
	}
	e.mu.Lock()
	l := e.legs[id]
	if l == nil && e.conf.Engine == SGLang {
		l = e.leg(id) // its prefill request comes, too
	}
	e.mu.Unlock()
	gone := refusal(http.StatusNotFound, "id", "the blocks are not here")
	if l == nil {
		gone.Write(w)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), e.conf.HoldTime)
	defer cancel()
	seconds := float64(blocks*e.conf.BlockSize*e.conf.TokenBytes) / (e.conf.Bandwidth * 1e9) / e.conf.Speed
	fetched := wait(ctx, l.computed) && wait(ctx, time.After(time.Duration(seconds*float64(time.Second))))
	e.mu.Lock()
	switch {
	case fetched:
		fetched = e.end(l, true)
	case l.request == nil: // the prefill request never came
		e.end(l, false)
	}
	e.mu.Unlock()
	if !fetched {
		gone.Write(w)
	}
}

// wait waits for c. It returns false if ctx ends first.
func wait[T any](ctx context.Context, c <-chan T) bool {
	select {
	case <-c:
		return true
	case <-ctx.Done():
		return false
	}
}

// offer adds to the answer of a leg's prefill request what its decode request needs.
func (e *Engine) offer(whole object, r *http.Request, l *leg, a *answer) {
	at, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	here, _ := netip.ParseAddrPort(fmt.Sprint(at))
	if e.conf.Engine == TRTLLM {
		id, _ := strconv.ParseUint(l.id, 10, 64) // open made it
		choices, _ := whole["choices"].([]object)
		choices[0]["disaggregated_params"] = object{
			"request_type": "context_only", "ctx_request_id": id, "opaque_state": here.String(), "first_gen_tokens": []int{1}, "draft_tokens": nil,
		}
		return
	}
	tokens := a.prompt + a.made - 1
	ids := make([]int, (tokens+e.conf.BlockSize-1)/e.conf.BlockSize)
	for i := range ids {
		ids[i] = i
	}
	params := object{
		"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [][]int{ids}, "remote_engine_id": e.conf.Name,
		"remote_request_id": l.id, "remote_host": here.Addr().String(), "remote_port": here.Port(), "tp_size": 1, "dcp_size": 1, "pp_size": 1,
		"remote_num_tokens": tokens, "remote_blocks_expiry_time": nil, "transfer_mode": "pull",
	}
	if a.made == 1 {
		params["remote_prefill_cached_tokens"] = a.cached
	}
	whole["kv_transfer_params"] = params
}

// receive fetches the blocks of a request that was admitted, except those in the cache. It returns
// false if the prefill engine does not send them.
func (e *Engine) receive(ctx context.Context, t transfer, r *request) bool {
	size := e.conf.BlockSize
	blocks := (r.prompt+size-1)/size - r.cached/size
	address := fmt.Sprintf("http://%s/sim/blocks/%s?blocks=%d", t.from, url.PathEscape(t.id), blocks)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, address, nil)
	if err != nil {
		return false
	}
	resp, err := e.peers.Do(req)
	if err != nil {
		return false
	}
	_, err = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	if err != nil || resp.StatusCode != http.StatusOK {
		return false
	}
	e.mu.Lock()
	e.scheduler.receive(r)
	e.mu.Unlock()
	e.work()
	return true
}
