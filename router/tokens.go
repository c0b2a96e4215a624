// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/kvroute/kvroute/tokenizer"
)

// Tokens is a prompt as ids, with what is known of who would get them. Wrong ids
// there are wrong answers, not slow ones: whoever hands them on looks at all of it.
type Tokens struct {
	// IDs are the whole prompt; nil if it is not exact, or came as ids.
	IDs []uint32
	// Agreed: the model's ids were compared with a worker's and always equal.
	// Differs: they were not, at least once.
	Agreed, Differs bool
	// Engine and EngineVersion are the chosen worker's, as it registered.
	Engine, EngineVersion string
}

// tokensFor returns what the chosen worker could be handed, with the ids copied.
func (r *Router) tokensFor(t target, p *pool, s *scratch) *Tokens {
	out := &Tokens{}
	d, req := &s.decision, &s.request
	if d.TokenMode == tokenizer.Exact && req.Tokens == nil && req.Blocks == nil {
		out.IDs = slices.Clone(s.tokens)
	}
	if t.card != nil {
		v := t.card.Prompts.Verdict()
		out.Agreed, out.Differs = v == tokenizer.Agreed, v == tokenizer.Differs || v == tokenizer.DriftSeen
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// A worker that left meanwhile takes nothing.
	if ord, ok := p.core.find(d.Worker); ok {
		info := p.core.entries[ord].info
		out.Engine, out.EngineVersion = info.Engine, info.EngineVersion
	}
	return out
}

// remoteBudget is how long a decision waits for a worker's ids. A worker that is
// busy computing answers late, and a late decision costs more than one by load.
const remoteBudget = 300 * time.Millisecond

// askWorker puts a worker's ids in the place of prompt, which is in text-block mode. It
// stays that if nobody can be asked, or says anything in time. The workers that take
// requests are asked in turn: making ids of all prompts is no small work.
func (r *Router) askWorker(ctx context.Context, p *pool, req *Request, prompt *tokenizer.Prompt) {
	p.mu.Lock()
	at, ok := p.core.nextAsked()
	p.mu.Unlock()
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, remoteBudget)
	defer cancel()
	if ids, err := r.conf.Remote(ctx, at, req.Model, req.Prompt); err == nil {
		*prompt = tokenizer.Prompt{IDs: ids, Exact: len(ids), Mode: tokenizer.Remote, Others: prompt.Others}
	}
}

// nextAsked returns the address of the worker whose turn it is to be asked for ids.
func (c *core) nextAsked() (at netip.AddrPort, ok bool) {
	first := -1 // who takes requests, and is the first at all
	for i, ord := range c.order {
		e := &c.entries[ord]
		if e.info.Health != Healthy || e.info.Draining || e.info.Group != "" {
			continue
		}
		if e.worker.Compare(c.asked) > 0 {
			first = i
			break
		}
		if first < 0 {
			first = i
		}
	}
	if first < 0 {
		return at, false
	}
	e := &c.entries[c.order[first]]
	c.asked = e.worker
	at = e.info.rankAddress(e.worker.DPRank)
	return at, at.IsValid()
}
