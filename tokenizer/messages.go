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

// messages holds the messages that end in a step of a list.
type messages struct {
	list            []*chat.Message
	end             int // where the last message so far ends; 0 if there is none
	numbers, others int // JSON values up to there
	bytes           int // of memory
}

func (m *messages) cost() int { return chunkCost + m.bytes }

// Messages reads a list as [jsonscan.Scanner.Skip] does, with the same errors, and returns its items
// by [chat.NewMessage]. If a list began equally before, Messages only reads what follows the
// last item that ended in a known step. It returns nil for a short list, and for one with
// items that are too large, that are not objects, or that NewMessage refuses.
func (c *Cache) Messages(s *jsonscan.Scanner) (list []*chat.Message, err error) {
	start := s.At
	keys := c.keys(nil, cacheKey{messagesKey, messagesKey}, s.In[start:])
	if len(keys) < 2 { // the list costs less than what would be kept of it
		return nil, s.Skip()
	}
	found := c.find(keys)
	known, fresh := len(found), []entry(nil)
	now, keep := &messages{}, true
	for _, e := range found {
		now = e.(*messages)
		list = append(list, now.list...)
	}
	now = &messages{end: now.end, numbers: now.numbers, others: now.others}
	s.Others++
	numbers, others := s.Numbers, s.Others
	// complete keeps the steps that end before the place at.
	complete := func(at int) {
		for (known+len(fresh)+1)*c.step < at {
			fresh = append(fresh, now)
			now = &messages{end: now.end, numbers: now.numbers, others: now.others}
		}
	}
	err = s.List(func() error {
		s.Peek()
		if s.At < start+now.end {
			s.At, s.Numbers, s.Others = start+now.end, numbers+now.numbers, others+now.others
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
		if keep = err == nil && now.bytes+m.Bytes() < c.limit/messagesShare; keep {
			complete(s.At - start)
			list, now.list = append(list, m), append(now.list, m)
			now.end, now.numbers, now.others = s.At-start, s.Numbers-numbers, s.Others-others
			now.bytes += m.Bytes()
		}
		return nil
	})
	if err == nil && keep {
		complete(s.At - start)
	}
	c.store(keys[known:], fresh)
	if err != nil || !keep {
		list = nil
	}
	return list, err
}
