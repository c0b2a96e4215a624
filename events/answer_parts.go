// SPDX-License-Identifier: Apache-2.0

package events

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
)

// Bounds of an answer.
const (
	maxParts       = 4096
	MaxAnswerBytes = 256 << 20 // sum of the messages
)

// collected is an answer whose parts arrive one by one.
type collected struct {
	query     Query
	parts     []*Answer
	missing   int
	size      int
	publisher uint64
	answer    Answer // whole
}

// AnswerPart is one of the messages that make an answer.
type AnswerPart struct {
	Index, Count int    // from 0
	Publisher    uint64 // the publisher of the event ids; 0 = unknown
	Data         []byte
}

// partOf reads the headers of a part that came over NATS.
func partOf(m *nats.Msg) (p AnswerPart, err error) {
	p.Data, p.Count = m.Data, 1
	if text := m.Header.Get(HeaderParts); text != "" {
		var errs [2]error
		p.Index, errs[0] = strconv.Atoi(m.Header.Get(HeaderPart))
		p.Count, errs[1] = strconv.Atoi(text)
		if errors.Join(errs[:]...) != nil {
			return p, fmt.Errorf("events: an answer's part %.20q of %.20q", m.Header.Get(HeaderPart), text)
		}
	}
	if text := m.Header.Get(HeaderPublisher); text != "" {
		if p.Publisher, err = strconv.ParseUint(text, 16, 64); err != nil {
			return p, fmt.Errorf("events: an answer's publisher is %.20q", text)
		}
	}
	return p, nil
}

// add adds a part, and reports whether the answer is complete.
func (c *collected) add(m AnswerPart) (done bool, err error) {
	part, parts := m.Index, m.Count
	if parts < 1 || parts > maxParts || part < 0 || part >= parts {
		return false, fmt.Errorf("events: an answer's part %d of %d", part, parts)
	}
	if m.Publisher != 0 {
		c.publisher = m.Publisher
	}
	if c.size += len(m.Data); c.size > MaxAnswerBytes {
		return false, fmt.Errorf("events: an answer has more than %d bytes", MaxAnswerBytes)
	}
	if c.parts == nil {
		c.parts, c.missing = make([]*Answer, parts), parts
	}
	if len(c.parts) != parts || c.parts[part] != nil {
		return false, fmt.Errorf("events: an answer's part %d of %d does not fit", part, parts)
	}
	a, err := DecodeAnswer(m.Data)
	if err != nil {
		return false, err
	}
	c.parts[part] = &a
	if c.missing--; c.missing > 0 {
		return false, nil
	}
	c.answer = *c.parts[0]
	for _, p := range c.parts[1:] {
		if p.Kind != c.answer.Kind || p.LastEventID != c.answer.LastEventID {
			return false, fmt.Errorf("events: an answer's parts contradict each other: %v, %v", c.answer.Kind, p.Kind)
		}
		c.answer.Events = append(c.answer.Events, p.Events...)
		c.answer.Bad += p.Bad
	}
	c.parts = nil
	return true, nil
}
