// SPDX-License-Identifier: Apache-2.0

package confirm

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// The rules of verdicts count the last judgements of a class, and those of each worker of it.
const (
	window      = 10 // judgements that count
	enough      = 3  // contradictions among them against a class or a worker; confirmations that speak for a worker
	reconfirmed = 5  // confirmations in a row that end a verdict against a class or a worker
)

// history has the last judgements, the latest in the lowest bit: 1 is a contradiction.
type history struct {
	bits uint16
	n    int
}

func (h *history) add(contradicted bool) {
	h.bits = h.bits << 1 & (1<<window - 1)
	if contradicted {
		h.bits |= 1
	}
	h.n = min(h.n+1, window)
}

func (h *history) contradictions() int { return bits.OnesCount16(h.bits) }

// recovered reports whether the last judgements are confirmations.
func (h *history) recovered() bool { return h.n >= reconfirmed && h.bits&(1<<reconfirmed-1) == 0 }

// Model has the verdicts on the classes and workers of one model. Make one with [NewModel].
type Model struct {
	// Name is the model's name. It does not change.
	Name string

	// The fields below are guarded by Table.mu.
	classes [chat.Classes]*class
	rows    map[rowKey]*row
}

type rowKey struct {
	class  chat.Class
	worker Worker
}

// class is the verdict on a class.
type class struct {
	history

	unconfirmed bool
	seen        [outcomes]uint64 // requests by outcome
	last        Difference       // the last one with the most that is known
}

// suspected says whether token ids help: a judgement was against the class, or none was in favour of it.
func (c *class) suspected() bool { return c.unconfirmed || c.bits != 0 || c.seen[Confirmed] == 0 }

// row is the verdict on a worker's requests of a class.
type row struct {
	history

	named  bool
	blocks [2]uint64 // confirmed and unconfirmed ones
}

// NewModel returns a model without judgements.
func NewModel(name string) *Model {
	return &Model{Name: name, rows: make(map[rowKey]*row)}
}

// Difference is where the prompt that kvroute made differs from the blocks that a worker stored.
type Difference struct {
	Worker Worker
	Block  int // number of the first block that differs
	// Position is the number of the first token that differs; -1 if the worker's events have no token ids, or if
	// they were not kept.
	Position int
	// Ours and Theirs are the ids around the position: at most 8 before it, and 8 from it on. Nil without a
	// position.
	Ours, Theirs []uint32
}

// Kind says what changed in a [Change].
type Kind uint8

// The kinds.
const (
	ClassUnconfirmed Kind = iota // workers make other tokens for requests of the class
	ClassConfirmed               // and no longer do
	Located                      // the first different token of an unconfirmed class is known now
	WorkerNamed                  // only this worker makes other tokens for requests of the class
	WorkerCleared                // and no longer does
)

// Change is a changed verdict.
type Change struct {
	Kind       Kind
	Model      *Model
	Class      chat.Class
	Difference        // for the last two kinds only the worker
	Confirmed  [2]int // requests of the class: confirmed and unconfirmed ones so far
}

func (m *Model) class(c chat.Class) *class {
	k := m.classes[c]
	if k == nil {
		k = new(class)
		m.classes[c] = k
	}
	return k
}

func (m *Model) count(c chat.Class, o Outcome) { m.class(c).seen[o]++ }

// row returns the row of a worker. If there are too many, it replaces one without contradictions: nil if all have some.
func (m *Model) row(c chat.Class, of Worker) *row {
	k := rowKey{c, of}
	r := m.rows[k]
	if r != nil {
		return r
	}
	if len(m.rows) >= maxRows {
		for key, other := range m.rows {
			if other.bits == 0 && !other.named {
				delete(m.rows, key)
				break
			}
		}
	}
	if len(m.rows) < maxRows {
		r = new(row)
		m.rows[k] = r
	}
	return r
}

func (m *Model) forget(id uint64) {
	for k := range m.rows {
		if k.worker.ID == id {
			delete(m.rows, k)
		}
	}
}

// confirmed notes a confirmed request. counts says that its worker had to store a block.
func (m *Model) confirmed(c chat.Class, of Worker, blocks int, counts bool) (changes []Change) {
	r := m.row(c, of)
	if r != nil {
		r.blocks[0] += uint64(blocks)
	}
	if !counts {
		return nil
	}
	k := m.class(c)
	if k.add(false); r != nil {
		r.add(false)
	}
	return m.decide(c, k, r, of)
}

// contradicted notes a request of some blocks whose worker stored another block at d.Block.
func (m *Model) contradicted(c chat.Class, blocks int, d Difference) (changes []Change) {
	r, k := m.row(c, d.Worker), m.class(c)
	if r != nil {
		r.blocks[0] += uint64(d.Block)
		r.blocks[1] += uint64(blocks - d.Block)
		r.add(true)
	}
	k.add(true)
	locates := k.last.Ours == nil && d.Ours != nil
	if k.last.Ours == nil {
		k.last = d
	}
	was := k.unconfirmed
	changes = m.decide(c, k, r, d.Worker)
	if locates && was && k.unconfirmed {
		changes = append(changes, m.change(Located, c, k, k.last))
	}
	return changes
}

// decide applies the rules after a judgement of a worker's request.
func (m *Model) decide(c chat.Class, k *class, r *row, of Worker) (changes []Change) {
	if !k.unconfirmed && k.contradictions() < enough {
		return m.nameWorker(nil, c, k, r, of)
	}
	was := k.unconfirmed
	against, inFavour := m.workers(c)
	switch {
	case !k.unconfirmed && against > inFavour:
		k.unconfirmed = true
		changes = append(changes, m.change(ClassUnconfirmed, c, k, k.last))
	case k.unconfirmed && k.recovered():
		k.unconfirmed, k.history, k.last = false, history{}, Difference{}
		for key, r := range m.rows {
			if key.class == c {
				r.history = history{}
			}
		}
		changes = append(changes, m.change(ClassConfirmed, c, k, Difference{Worker: of}))
	case k.unconfirmed && against <= inFavour:
		k.unconfirmed = false
		changes = append(changes, m.change(ClassConfirmed, c, k, Difference{Worker: of}))
	}
	if was == k.unconfirmed {
		return m.nameWorker(changes, c, k, r, of)
	}
	for key, r := range m.rows {
		if key.class == c {
			changes = m.nameWorker(changes, c, k, r, key.worker)
		}
	}
	return changes
}

// nameWorker names a worker whose requests of a confirmed class are unconfirmed, or ends that.
func (m *Model) nameWorker(changes []Change, c chat.Class, k *class, r *row, of Worker) []Change {
	switch {
	case r == nil:
	case !r.named && !k.unconfirmed && r.contradictions() >= enough:
		r.named = true
		d := k.last
		if d.Worker != of {
			d = Difference{Worker: of, Position: -1}
		}
		return append(changes, m.change(WorkerNamed, c, k, d))
	case r.named && (k.unconfirmed || r.recovered()):
		if r.named = false; !k.unconfirmed {
			r.history = history{} // else the contradictions before would name it again
		}
		return append(changes, m.change(WorkerCleared, c, k, Difference{Worker: of}))
	}
	return changes
}

// workers returns how many workers have a contradiction among their last judgements of a class, and how many have
// several confirmations and none.
func (m *Model) workers(c chat.Class) (against, inFavour int) {
	for key, r := range m.rows {
		switch {
		case key.class != c:
		case r.contradictions() > 0:
			against++
		case r.n >= enough:
			inFavour++
		}
	}
	return against, inFavour
}

func (m *Model) change(kind Kind, c chat.Class, k *class, d Difference) Change {
	seen := [2]int{int(k.seen[Confirmed]), int(k.seen[Unmatched])}
	return Change{Kind: kind, Model: m, Class: c, Difference: d, Confirmed: seen}
}

// ClassState is the verdict on a class, and what became of its requests.
type ClassState struct {
	Class       string `json:"class"`
	Unconfirmed bool   `json:"unconfirmed"` // workers make other tokens than kvroute
	// Requests counts the requests by outcome; see [Outcome].
	Requests map[string]uint64 `json:"requests"`
	// Block and Position are the first block and token that differ, -1 if unknown.
	Block    int           `json:"block"`
	Position int           `json:"position"`
	Workers  []WorkerState `json:"workers"` // in their order
	// The texts around the position, by the caller.
	Ours   string `json:"ours,omitempty"`
	Theirs string `json:"theirs,omitempty"`

	Difference Difference `json:"-"`
}

// WorkerState counts the expected blocks of a worker's requests of a class.
type WorkerState struct {
	ID          uint64 `json:"worker_id"`
	Rank        uint32 `json:"dp_rank"`
	Named       bool   `json:"named,omitempty"` // only this worker makes other tokens
	Confirmed   uint64 `json:"confirmed_blocks"`
	Unconfirmed uint64 `json:"unconfirmed_blocks"`
}

// States returns the classes of a model that had requests, by number.
func (t *Table) States(m *Model) []ClassState {
	t.mu.Lock()
	defer t.mu.Unlock()
	states := []ClassState{} // an empty list in JSON, not null
	for c, k := range m.classes {
		if k == nil {
			continue
		}
		s := ClassState{Class: chat.Class(c).String(), Unconfirmed: k.unconfirmed, Block: -1, Position: -1, Requests: make(map[string]uint64), Workers: []WorkerState{}}
		for o, n := range k.seen {
			if n > 0 {
				s.Requests[Outcome(o).String()] = n
			}
		}
		if k.unconfirmed {
			s.Block, s.Position, s.Difference = k.last.Block, k.last.Position, k.last
		}
		for key, r := range m.rows {
			if key.class == chat.Class(c) {
				s.Workers = append(s.Workers, WorkerState{key.worker.ID, key.worker.Rank, r.named, r.blocks[0], r.blocks[1]})
			}
		}
		slices.SortFunc(s.Workers, func(a, b WorkerState) int {
			return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Rank, b.Rank))
		})
		states = append(states, s)
	}
	return states
}
