// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// judged is the verdict on the token ids of one model. A model whose files are read again gets another one.
type judged struct {
	prompts *tokenizer.Model
	model   *confirm.Model
}

// Judgement is a changed verdict on the token ids of a model.
type Judgement struct {
	confirm.Change

	Prompts *tokenizer.Model
}

// judgedLocked returns the verdict on a model; nil if kvroute makes no ids for it.
func (r *Router) judgedLocked(model string, card *Card) *judged {
	if card == nil || card.Prompts == nil {
		delete(r.judged, model)
		return nil
	}
	j := r.judged[model]
	if j == nil || j.prompts != card.Prompts {
		j = &judged{card.Prompts, confirm.NewModel(model)}
		r.judged[model] = j
	}
	return j
}

// forgetJudgedLocked forgets the requests and the verdicts of a worker.
func (r *Router) forgetJudgedLocked(id uint64) {
	models := make([]*confirm.Model, 0, len(r.judged))
	for _, j := range r.judged {
		models = append(models, j.model)
	}
	r.confirms.Forget(id, models...)
}

// heldBuffer is memory of [known.held].
type heldBuffer [4][]int32

// held is [overlap.held] for a prompt with these local hashes.
func (k *known) held(ord int, local []uint64, b *heldBuffer) (n int) {
	for i := range b {
		b[i] = resize(b[i], ord+1)
	}
	k.index().FindMatches(&indexer.Matches{Device: b[0], Lower: [3][]int32(b[1:]), Whole: true}, local)
	for i := range b {
		n += int(b[i][ord])
	}
	return n
}

// rankOf returns the pool and the ordinal of a worker of a model; sure is false if its events are incomplete.
func (r *Router) rankOf(w confirm.Worker, model string) (p *pool, ord int, sure bool) {
	if p = r.poolOf(w.ID); p == nil || p.model != model {
		return nil, 0, false
	}
	known := false
	p.read(func(c *core) {
		if ord, known = c.find(Worker{w.ID, w.Rank}); known {
			sure = c.entries[ord].events == ""
		}
	})
	if !known {
		return nil, 0, false
	}
	return p, ord, sure
}

// Judge judges the requests whose worker's events had time to arrive; see package confirm. [Router.Run] calls it
// each second.
func (r *Router) Judge() {
	var buffer heldBuffer
	cache := confirm.Cache{
		Held: func(w confirm.Worker, m *confirm.Model, local []uint64) (int, bool) {
			p, ord, sure := r.rankOf(w, m.Name)
			if p == nil {
				return 0, false
			}
			return p.known.held(ord, local, &buffer), sure
		},
		AppendChain: func(dst []uint64, w confirm.Worker, m *confirm.Model, external uint64) []uint64 {
			p, ord, _ := r.rankOf(w, m.Name)
			if p == nil {
				return dst
			}
			return p.known.index().AppendChain(dst, ord, external)
		},
	}
	r.apply(r.confirms.Judge(r.conf.Now(), cache))
}

// Answered judges a request by the ids that its worker made of the client's body, as [Router.Judge] does by the
// worker's events. It returns the number of the first id that differs, -1 if none does. A difference behind the last
// full block changes no verdict.
func (r *Router) Answered(o *Observation, theirs []uint32) (position int) {
	position = tokenizer.FirstDiff(o.IDs, theirs)
	r.fleet.RLock()
	j, known := r.judged[o.Model], r.owners[o.Worker.ID] != nil
	r.fleet.RUnlock()
	if j != nil && j.prompts == o.Card.Prompts && known {
		w := confirm.Worker{ID: o.Worker.ID, Rank: o.Worker.DPRank}
		r.apply(r.confirms.Answered(j.model, o.Class, w, o.BlockSize, position, o.IDs, theirs))
	}
	return position
}

// apply passes on changed verdicts.
func (r *Router) apply(changes []confirm.Change) {
	for _, change := range changes {
		r.fleet.RLock()
		j := r.judged[change.Model.Name]
		r.fleet.RUnlock()
		if j == nil || j.model != change.Model {
			continue // the model's files were read again
		}
		switch change.Kind {
		case confirm.ClassUnconfirmed, confirm.ClassConfirmed:
			j.prompts.SetConfirmed(change.Class, change.Kind == confirm.ClassConfirmed)
		case confirm.Located, confirm.WorkerNamed, confirm.WorkerCleared:
		}
		if r.conf.Hooks.Judged != nil {
			r.conf.Hooks.Judged(Judgement{change, j.prompts})
		}
	}
}

// computed notes the first token of a request, or its end. With some signs the prompt may not be computed yet.
func (r *Router) computed(number uint64, by Sign, at time.Time) {
	if by != SignHeaders && by != SignRate {
		r.confirms.FirstToken(number, at)
	}
}

// noteStored notes an event for the requests that are to be judged.
func (r *Router) noteStored(w Worker, ev *indexer.Event) {
	switch of := (confirm.Worker{ID: w.ID, Rank: w.DPRank}); ev.Kind {
	case indexer.Stored:
		r.confirms.Stored(r.conf.Now(), of, ev)
	case indexer.Cleared:
		r.confirms.Interrupt(of)
	case indexer.Removed, indexer.Shaped, indexer.SideStored, indexer.SideRemoved:
	}
}

// compared is [confirm.Table.Compared] for a worker and a class of requests of a model.
func (r *Router) compared(t *target, w Worker, class chat.Class) (silent, suspect bool) {
	if t.judged == nil {
		return false, false
	}
	return r.confirms.Compared(confirm.Worker{ID: w.ID, Rank: w.DPRank}, t.judged.model, class)
}

// StoredTokens notes the engine's token ids of blocks that a worker stored. They are copied.
func (r *Router) StoredTokens(ids []uint32) { r.confirms.StoredTokens(ids) }

// classStates returns the verdicts on the classes of a model; nil if kvroute makes no ids for it.
func (r *Router) classStates(t *target) []confirm.ClassState {
	if t.judged == nil {
		return nil
	}
	states := r.confirms.States(t.judged.model)
	if r.conf.ExplainDrift {
		decode := func(ids []uint32) string { return string(t.judged.prompts.Tokenizer().Decode(nil, ids)) }
		for i := range states {
			s := &states[i]
			s.Ours, s.Theirs = decode(s.Difference.Ours), decode(s.Difference.Theirs)
		}
	}
	return states
}

// The results of the comparisons of a model's ids, as [ModelState].Checks has them.
const (
	checksNone    = "unchecked" // nothing was compared
	checksAgreed  = "agreed"    // all that was compared is equal
	ChecksDiffers = "differs"   // for some classes of requests, or on some workers, the ids differ
	ChecksDrift   = "drift"     // they differ for all classes that were compared
)

// checksOf returns the result of the comparisons of a model's ids.
func checksOf(classes []confirm.ClassState) string {
	differ, compared, named := 0, 0, false
	for i := range classes {
		c := &classes[i]
		if c.Unconfirmed {
			differ++
		}
		if c.Unconfirmed || c.Requests[confirm.Confirmed.String()] > 0 {
			compared++
		}
		named = named || slices.ContainsFunc(c.Workers, func(w confirm.WorkerState) bool { return w.Named })
	}
	switch {
	case differ == 0 && named, 0 < differ && differ < compared:
		return ChecksDiffers
	case differ > 0:
		return ChecksDrift
	case compared > 0:
		return checksAgreed
	}
	return checksNone
}
