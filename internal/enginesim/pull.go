// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// With [Config.Pulls] each block on the device is in host memory, too, and another engine may copy it from there. The
// request of the target names the source as in vLLM's P2P tier, with the address of the source's HTTP server. The
// target asks for its blocks before the request enters its queue, and computes what the source does not send.

// pullRequest is what a target asks of its source.
type pullRequest struct {
	Have     int      `json:"have"`     // leading blocks that the target has
	Sequence []uint64 `json:"sequence"` // hashes of the prompt's blocks
}

type pullAnswer struct {
	Blocks int `json:"blocks"` // leading blocks that were sent or that the target had
}

// inHost publishes that host memory has the same blocks as the device; mu is held.
func (e *Engine) inHost(c Change) {
	if e.conf.Pulls && c.Kind != indexer.Cleared {
		c.Tier = indexer.HostPinned
		e.pending = append(e.pending, c.Event)
	}
}

// puller returns the function that copies blocks of a request from the source that its body names; nil if the body
// names none.
func (e *Engine) puller(body []byte, r *request) func(context.Context) {
	var f struct {
		Params struct {
			Source struct {
				ID   string `json:"kv_request_id"`
				Host string `json:"remote_host"`
				Port int    `json:"remote_port"`
			} `json:"remote_kv_source"`
		} `json:"kv_transfer_params"`
	}
	s := &f.Params.Source
	if !e.conf.Pulls || json.Unmarshal(body, &f) != nil || s.ID == "" || s.Host == "" {
		return nil
	}
	from := net.JoinHostPort(s.Host, strconv.Itoa(s.Port))
	return func(ctx context.Context) {
		e.mu.Lock()
		have, _ := e.scheduler.cache.hit(r.sequence)
		e.mu.Unlock()
		if blocks, ok := e.ask(ctx, from, pullRequest{have, r.sequence}); ok {
			e.mu.Lock()
			e.adopt(&r.prefix, min(blocks, len(r.sequence)))
			e.mu.Unlock()
			e.work()
		}
	}
}

// ask asks a source for blocks, and returns how many leading blocks the target has then.
func (e *Engine) ask(ctx context.Context, from string, p pullRequest) (blocks int, ok bool) {
	data, _ := json.Marshal(p) // plain data always marshals
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+from+"/sim/pull", bytes.NewReader(data))
	if err != nil {
		return 0, false
	}
	resp, err := e.peers.Do(req)
	if err != nil {
		return 0, false
	}
	defer resp.Body.Close()
	var a pullAnswer
	err = json.NewDecoder(resp.Body).Decode(&a)
	return a.Blocks, err == nil && resp.StatusCode == http.StatusOK && a.Blocks >= 0
}

// adopt caches the leading blocks of a prompt up to a number, if there is room; mu is held.
func (e *Engine) adopt(p *prefix, end int) {
	c := e.scheduler.cache
	have, unused := c.hit(p.sequence[:end])
	if have == end || c.used()+unused+end-have > c.capacity {
		return
	}
	c.acquire(p.sequence[:have])
	c.reserved += end - have
	c.evict()
	c.fill(p, have, end)
	c.release(p.sequence[:end])
}

// servePull sends blocks to a target. It takes the time of their transfer.
func (e *Engine) servePull(w http.ResponseWriter, r *http.Request) {
	var p pullRequest
	if err := json.NewDecoder(r.Body).Decode(&p); err != nil || !e.conf.Pulls {
		refusal(http.StatusBadRequest, "", "want hashes of blocks, and an engine that serves pulls").Write(w)
		return
	}
	e.mu.Lock()
	blocks, _ := e.scheduler.cache.hit(p.Sequence)
	e.pulled += max(0, blocks-p.Have)
	e.mu.Unlock()
	seconds := float64(max(0, blocks-p.Have)*e.conf.BlockSize*e.conf.TokenBytes) / (e.conf.Bandwidth * 1e9) / e.conf.Speed
	if wait(r.Context(), time.After(time.Duration(seconds*float64(time.Second)))) {
		reply(w, pullAnswer{blocks})
	}
}

// Pulled returns the number of blocks that other engines copied from this one.
func (e *Engine) Pulled() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pulled
}
