// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// A request is decided and booked in five steps. Each step makes one value from the values before it, and no
// later step changes that value:
//
//	prompt         token ids of the request's prompt              [Router.encode]
//	decisionInput  request, prompt, hashes and overlap            [Router.input], [pool.countOverlap]
//	choice         candidates, inputs, costs, the chosen one      [core.choose]
//	Decision       what callers see                               [core.makeDecision]
//	booking        slots, session and counters of the pool        [core.book]
//
// The first two steps take no lock of a pool. The other three are one critical section of the pool. (The
// input of a prefill leg is made there, too: it has the chosen decode worker.) A
// comparison that books nothing ends after the choice.

// prompt is the prompt of a request as token ids.
type prompt struct {
	ids      tokenizer.Prompt // the mode is empty if the prompt was not read
	tokens   int              // length of the prompt; an estimate if fallback is ReasonTokenizer
	fallback Reason           // why cached blocks do not count; empty if they do
	took     time.Duration
}

// hashes are the hashes of a prompt's full blocks, in blocks of one pool's size.
type hashes struct {
	local     []uint64
	sequence  []uint64
	tokens    int           // of the prompt
	ownHashes bool          // no engine has these hashes
	took      time.Duration // for all pools that the request was hashed for
	hashedAt  time.Time     // when they were made; zero if the request came with hashes or has none
}

// overlap has the number of leading blocks of a prompt that each worker has cached. The slices are indexed by
// ordinal.
type overlap struct {
	blocks    []int32
	pending   []int32              // part of blocks that is only predicted
	whole     []int32              // leading blocks that workers have, also where a hybrid model can use fewer; empty if no worker has one
	ends      []indexer.Boundaries // of the usable prefixes; empty if no worker has a hybrid model
	lower     [3][]int32           // cached blocks behind these: in host memory, on disk and in external storage
	host      []int32              // leading blocks in host memory, for [Source]; empty without [Config.Pull]
	version   uint64               // ranks.changes when the blocks were counted
	matchedAt time.Time            // when they were counted; zero if they were not
	took      time.Duration
}

// probed has the answers of router groups to a [Probe].
type probed struct {
	answers []ProbeAnswer
	askedAt time.Time // when the groups were asked
	took    time.Duration
}

// taint is one of Request.PreferredTaints. Weights are added in a fixed order, because
// another order could round to another cost.
type taint struct {
	name   string
	weight float64
}

// decisionInput is all that is known of a request before the pool's lock is taken.
type decisionInput struct {
	*Request

	model          string // base model
	lora           string // adapter of the request
	adapter        string // the same, or empty if workers do not register their adapters
	prompt         prompt
	hashes         hashes
	overlap        overlap
	probed         probed
	session        uint64    // hash of the session's name; 0 = no session
	taints         []taint   // Request.PreferredTaints, sorted
	number         uint64    // of the booked decision; see keptDecisions
	listCandidates bool      // people see the candidates; see [core.list]
	completeAt     time.Time // when the input was complete
	holdout        holdout

	// decode is the worker that decodes, in the input of a prefill leg; nil in other inputs.
	decode *WorkerInfo
}

// plain says whether nothing in a request limits which workers may take it, except a pin, and no router
// group answered a probe.
func (in *decisionInput) plain() bool {
	return in.decode == nil && in.adapter == "" && in.Allowed == nil && in.AllowedAddresses == nil &&
		len(in.RequiredTaints)+len(in.probed.answers) == 0
}

// scratch is the memory of one decision, kept between requests. It belongs to the request and not to
// the pool, so that it stays in the cache of the CPU core that handles the request.
type scratch struct {
	request   Request
	target    target
	pool      *pool
	prompt    prompt
	promptSet bool // prompt is set
	input     decisionInput
	choices   choices
	result    result

	// Buffers of the values above.
	tokens        []uint32
	local         []uint64
	sequence      []uint64
	overlap       overlap
	guessedBlocks []int32
	taints        []taint

	submitted bool          // by [Router.Submit]
	pickTime  time.Duration // of the choice and the booking, with the wait for the pool's lock
}

// release gives the memory of a decision back, without the request's data. Memory that an
// unusually long prompt made large is not kept.
func (r *Router) release(s *scratch) {
	if cap(s.tokens) > 1<<20 {
		return
	}
	s.request, s.target, s.pool = Request{}, target{}, nil
	s.prompt, s.promptSet, s.input = prompt{}, false, decisionInput{}
	s.result.decision = Decision{} // not under the pool's lock
	s.submitted = false
	if leg := &s.choices.legInput; leg.Request != nil {
		*leg, s.choices.legRequest = decisionInput{}, Request{}
	}
	clear(s.taints)
	r.scratch.Put(s)
}

// inputPurpose is what a decisionInput is made for.
type inputPurpose uint8

const (
	forDecision   inputPurpose = iota
	forComparison              // of pools: no router group is asked, and the decision gets no number
	forLoads                   // the same, and the prompt is read in all modes
)

// input makes the input of a decision in a pool, without the overlap. It returns an error if ctx ends before
// the prompt is read.
func (r *Router) input(ctx context.Context, p *pool, s *scratch, why inputPurpose) error {
	req, in := &s.request, &s.input
	var h hashes
	if why == forLoads || p.view.Load().needsPrompts {
		if !s.promptSet {
			s.promptSet = true
			s.prompt = r.encode(ctx, req, s.target.card, s.tokens[:0])
			if req.Tokens == nil && s.prompt.ids.IDs != nil {
				s.tokens = s.prompt.ids.IDs
			}
		}
		h = r.hash(p, s)
		h.took += in.hashes.took
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	in.overlap = overlap{} // it may be the overlap in another pool, which was compared before
	in.Request, in.model, in.lora, in.adapter = req, p.model, s.target.lora, s.target.adapter
	in.prompt, in.hashes, in.listCandidates = s.prompt, h, req.Explain
	if in.holdout = (holdout{}); r.conf.HoldoutShare > 0 {
		in.holdout = r.holdoutOf(in)
	}
	if req.Session != "" {
		in.session = r.sessionKey(req.Session)
	}
	if len(req.PreferredTaints) > 0 {
		s.taints = appendTaints(s.taints[:0], req.PreferredTaints)
		in.taints = s.taints
	}
	if why == forDecision && req.ID != "" {
		in.number = r.kept.next()
		in.listCandidates = in.listCandidates || r.conf.KeepDecisions > 0
	}
	start := h.hashedAt
	if why == forDecision && r.conf.Probe != nil && !req.Uncached {
		if in.probed = r.probe(ctx, p, in); in.probed.took > 0 {
			start = in.probed.askedAt.Add(in.probed.took)
		}
	}
	if start.IsZero() {
		start = r.conf.Now()
	}
	in.completeAt = start
	return nil
}

// countOverlap completes the input of a decision with the overlap of its prompt, which it counts without the
// pool's lock.
func (p *pool) countOverlap(now func() time.Time, s *scratch) {
	in := &s.input
	if in.hashes.sequence == nil {
		return
	}
	start := in.completeAt
	p.match(start, &in.hashes, s)
	in.overlap = s.overlap
	in.completeAt = now()
	in.overlap.took = in.completeAt.Sub(start)
}

// appendTaints appends preferred taints, sorted by name, with bounded weights.
func appendTaints(to []taint, preferred map[string]float64) []taint {
	for name, weight := range preferred {
		to = append(to, taint{name, min(max(weight, -mostWeight), mostWeight)})
	}
	slices.SortFunc(to, func(a, b taint) int { return strings.Compare(a.name, b.name) })
	return to
}

// bytesSeed separates the hashes of text-block mode from all others.
const bytesSeed = 0x6b76726f75746521

// encode makes the token ids of a request's prompt, or says why the prompt has none. room is memory for
// the ids.
func (r *Router) encode(ctx context.Context, req *Request, card *Card, room []uint32) (p prompt) {
	switch {
	case req.Unread:
		p.fallback = ReasonUnread
	case req.Blocks != nil:
		p.tokens, p.ids.Mode = req.Blocks.Tokens, tokenizer.Exact
	case req.Tokens != nil:
		p.tokens = len(req.Tokens)
		p.ids = tokenizer.Prompt{IDs: req.Tokens, Exact: len(req.Tokens), Mode: tokenizer.Exact}
		if len(req.Prompt.Messages) > 0 && chat.MayHaveItems(req.Prompt.Messages) {
			// The placeholders of different images have the same ids, but the engine's
			// blocks of them have different hashes.
			p.ids.Exact, p.ids.Mode, p.ids.Reason = 0, tokenizer.ExactPrefix, tokenizer.Items
		}
	default:
		start := r.conf.Now()
		var m *tokenizer.Model
		if card != nil {
			m = card.Prompts
		}
		ids, err := m.Encode(ctx, room, req.Prompt, start)
		if err != nil {
			p.fallback = ReasonTokenizer
			// An estimate for the load: a token is about four bytes of English.
			p.tokens = (len(req.Prompt.Messages) + len(req.Prompt.Tools) + len(req.Prompt.Prompt)) / 4
		} else {
			p.ids, p.tokens = ids, len(ids.IDs)+ids.Others
		}
		p.took = r.conf.Now().Sub(start)
	}
	return p
}

// hash makes the hashes of the prompt's blocks, by the block size of a pool.
func (r *Router) hash(p *pool, s *scratch) (h hashes) {
	h.tokens = s.prompt.tokens
	if b := s.request.Blocks; b != nil {
		if b.BlockSize == 0 || b.BlockSize == p.blockSize {
			h.local, h.sequence = b.Local, b.Sequence
		}
		return h
	}
	ids := &s.prompt.ids
	seed := indexer.Seed(s.target.lora, s.request.Salt)
	switch ids.Mode {
	case "":
		return h
	case tokenizer.Bytes:
		seed ^= bytesSeed
		h.ownHashes = true
	case tokenizer.ExactPrefix:
		// The blocks behind the exact ids have hashes that no engine has. Those before
		// them match events.
		h.ownHashes = len(ids.IDs) > ids.Exact
	case tokenizer.Exact, tokenizer.None:
	}
	start := r.conf.Now()
	s.local = indexer.AppendLocalHashes(s.local[:0], ids.IDs, p.blockSize, seed)
	s.sequence = indexer.AppendSequenceHashes(s.sequence[:0], s.local)
	h.local, h.sequence, h.hashedAt = s.local, s.sequence, r.conf.Now()
	h.took = h.hashedAt.Sub(start)
	return h
}
