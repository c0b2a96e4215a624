// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"math"
	"slices"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// bytesSeed separates the hashes of text-block mode from all others.
const bytesSeed = 0x6b76726f75746521

// place returns the pool that the request in s goes to, and hashes the prompt for it. Of
// several pools of one model it is the pool of the pinned worker or of the session's
// worker, or else the cheapest pool; see [pool.compareCost].
func (r *Router) place(ctx context.Context, t target, s *scratch) (*pool, error) {
	q, best := &s.question, t.pools[0]
	ready := func(p *pool) error {
		if p.view.Load().reads {
			r.read(ctx, p, s, t.card)
		}
		return context.Cause(ctx)
	}
	if len(t.pools) == 1 {
		return best, ready(best)
	}
	at := slices.IndexFunc(t.pools, func(p *pool) bool {
		return q.Pinned != nil && p.has(q) || q.Pinned == nil && q.session != 0 && p.bound(r.conf.Now(), q.session)
	})
	if at >= 0 || q.Pinned != nil { // the first pool returns the error for an unknown worker
		best = t.pools[max(0, at)]
		return best, ready(best)
	}
	least := math.Inf(1)
	for _, p := range t.pools {
		if err := ready(p); err != nil {
			return nil, err
		}
		switch a, err := p.compareCost(r.conf.Now, s); {
		case errors.Is(err, ErrAllBusy) && math.IsInf(least, 1):
			best = p // the request may wait there
		case err != nil && !isAbsence(err):
			return nil, err
		case err == nil && a < least:
			best, least = p, a
		}
	}
	return best, ready(best)
}

// read fills in the prompt's tokens, once, and the hashes of its blocks for a pool.
func (r *Router) read(ctx context.Context, p *pool, s *scratch, card *Card) {
	if !s.hasRead {
		s.hasRead = true
		r.encode(ctx, s, card)
	}
	r.hash(p, s)
}

// encode fills in the prompt's tokens, or the reason why the prompt has no tokens. It may
// request them from a worker of the pool p.
func (r *Router) encode(ctx context.Context, s *scratch, card *Card) {
	req, q, d := &s.request, &s.question, &s.decision
	s.encoded = tokenizer.Prompt{}
	switch {
	case req.Unread:
		q.reason = ReasonUnread
	case req.Blocks != nil:
		q.tokens, d.TokenMode = req.Blocks.Tokens, tokenizer.Exact
	case req.Tokens != nil:
		s.encoded = tokenizer.Prompt{IDs: req.Tokens, Exact: len(req.Tokens), Mode: tokenizer.Exact}
		if len(req.Prompt.Messages) > 0 && chat.MayHaveItems(req.Prompt.Messages) {
			// The placeholders of different images have the same ids, but the engine's
			// blocks of them have different hashes.
			s.encoded.Exact, s.encoded.Mode, s.encoded.Reason = 0, tokenizer.ExactPrefix, tokenizer.Items
		}
		q.tokens, d.TokenMode, d.TokenReason = len(req.Tokens), s.encoded.Mode, s.encoded.Reason
	default:
		start := r.conf.Now()
		var m *tokenizer.Model
		if card != nil {
			m = card.Prompts
		}
		var err error
		if s.encoded, err = m.Encode(ctx, s.tokens[:0], req.Prompt, start); err != nil {
			q.reason = ReasonTokenizer
			// An estimate for the load: a token is about four bytes of English.
			q.tokens = (len(req.Prompt.Messages) + len(req.Prompt.Tools) + len(req.Prompt.Prompt)) / 4
			s.encoded = tokenizer.Prompt{}
		} else {
			s.tokens = s.encoded.IDs
			q.tokens = len(s.encoded.IDs) + s.encoded.Others
			d.TokenMode, d.TokenReason = s.encoded.Mode, s.encoded.Reason
			d.TextBytes, d.ReusedBytes = s.encoded.Size, s.encoded.Reused
		}
		d.TokenizeTime = r.conf.Now().Sub(start)
	}
	d.PromptTokens = q.tokens
}

// hash fills in the hashes of the prompt's blocks, by the block size of p.
func (r *Router) hash(p *pool, s *scratch) {
	q := &s.question
	q.local, q.sequence = nil, nil
	if b := s.request.Blocks; b != nil {
		if b.BlockSize == 0 || b.BlockSize == p.blockSize {
			q.local, q.sequence = b.Local, b.Sequence
		}
		s.decision.PromptBlocks = len(q.local)
		return
	}
	if s.decision.TokenMode == "" {
		return
	}
	seed := indexer.Seed(q.lora, s.request.Salt)
	tokens := s.encoded.IDs
	switch s.encoded.Mode {
	case tokenizer.Bytes:
		seed ^= bytesSeed
		q.guessed = true
	case tokenizer.ExactPrefix:
		// The blocks behind the exact ids have hashes that no engine has. Those before
		// them match events.
		q.guessed = len(tokens) > s.encoded.Exact
	case tokenizer.Exact, tokenizer.None:
	}
	start := r.conf.Now()
	s.local = indexer.AppendLocalHashes(s.local[:0], tokens, p.blockSize, seed)
	s.sequence = indexer.AppendSequenceHashes(s.sequence[:0], s.local)
	q.local, q.sequence = s.local, s.sequence
	s.decision.PromptBlocks = len(s.local)
	s.hashed = r.conf.Now()
	s.decision.HashTime += s.hashed.Sub(start)
}
