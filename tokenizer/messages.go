// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"github.com/kvroute/kvroute/internal/jsonscan"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// messagesKey separates the keys of lists of messages from those of texts: no tokenizer has this identity.
const messagesKey = ^uint64(0)

const (
	mostValues    = 200_000 // JSON values of a list that is kept
	messagesShare = 8       // the messages of a step take at most this part of the limit
)

// place is a place behind a message of a list.
type place struct {
	end             int // in bytes from the list's beginning
	numbers, others int // JSON values before it
}

// messages are the messages that end in a step of a list, or behind its last step.
type messages struct {
	list []placed
	place
	bytes int      // of memory
	hash  cacheKey // of what lies behind the last step
}

type placed struct {
	*chat.Message
	place
}

func (m *messages) cost() int { return chunkCost + m.bytes }

// messagesReader reads a list.
type messagesReader struct {
	c     *Cache
	text  []byte // begins with the list
	keys  []cacheKey
	steps int      // whose entries are known
	fresh []entry  // of the next steps
	rest  messages // behind these
	tail  cacheKey // key of the known messages behind the last known step
	list  []*chat.Message
}

// Messages reads a list as [jsonscan.Scanner.Skip] does, with the same errors, and returns its items
// by [chat.NewMessage]. If a list began equally before, Messages only reads what follows the
// last common item that is known. It returns nil for a short list, and for one with
// items that are too large, that are not objects, or that NewMessage refuses.
func (c *Cache) Messages(s *jsonscan.Scanner) ([]*chat.Message, error) {
	start := s.At
	r := messagesReader{c: c, text: s.In[start:]}
	if r.keys = c.keys(nil, cacheKey{messagesKey, messagesKey}, r.text); len(r.keys) < 4 {
		return nil, s.Skip() // the list costs less than what would be kept of it
	}
	r.find()
	s.Others++ // the list itself
	known, numbers, others, keep := r.rest.place, s.Numbers, s.Others, true
	err := s.List(func() error {
		s.Peek()
		if s.At < start+known.end {
			s.At, s.Numbers, s.Others = start+known.end, numbers+known.numbers, others+known.others
			return nil
		}
		from := s.At
		if err := s.Skip(); err != nil || !keep {
			return err
		}
		if keep = s.In[from] == '{' && s.Numbers+s.Others < mostValues; !keep {
			return nil
		}
		m, err := chat.NewMessage(s.In[from:s.At])
		if keep = err == nil && r.rest.bytes+m.Bytes() < c.limit/messagesShare; keep {
			r.add(placed{m, place{s.At - start, s.Numbers - numbers, s.Others - others}})
		}
		return nil
	})
	if err != nil || !keep {
		return nil, err
	}
	r.complete(s.At - start)
	r.store()
	return r.list, nil
}

// find adds the known messages.
func (r *messagesReader) find() {
	for _, e := range r.c.find(r.keys) {
		m := e.(*messages)
		for _, p := range m.list {
			r.list = append(r.list, p.Message)
		}
		r.rest.place = m.place
		r.steps++
	}
	if r.steps == 0 {
		return
	}
	key := tailKey(r.keys[r.steps-1])
	for _, e := range r.c.find([]cacheKey{key}) {
		if m := e.(*messages); m.end <= len(r.text) && r.hash(r.steps, m.end) == m.hash {
			r.tail = key
			for _, p := range m.list {
				r.add(p)
			}
		}
	}
}

// hash returns the hash of the text up to end, which lies behind a number of steps.
func (r *messagesReader) hash(steps, end int) cacheKey {
	return r.c.mix(r.keys[steps-1], r.text[steps*r.c.step:end])
}

func (r *messagesReader) add(p placed) {
	r.complete(p.end)
	r.list, r.rest.list = append(r.list, p.Message), append(r.rest.list, p)
	r.rest.place = p.place
	r.rest.bytes += p.Bytes()
}

// complete ends the steps before the place at.
func (r *messagesReader) complete(at int) {
	for (r.steps+len(r.fresh)+1)*r.c.step < at {
		step := r.rest
		r.fresh = append(r.fresh, &step)
		r.rest = messages{place: step.place}
	}
}

// store keeps what is new. The messages behind the last step replace those that were known: in the next turn they
// are in a step.
func (r *messagesReader) store() {
	r.c.store(r.keys[r.steps:], r.fresh)
	steps := r.steps + len(r.fresh)
	if steps == 0 || len(r.rest.list) == 0 {
		return
	}
	rest := r.rest // a pointer into r would keep the text in memory
	rest.hash = r.hash(steps, rest.end)
	r.c.replace(r.tail, tailKey(r.keys[steps-1]), &rest)
}
