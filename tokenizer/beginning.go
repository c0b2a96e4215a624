// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"context"
	"iter"
	"time"
	"unicode/utf8"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Cut is the reason of a prompt of whose request only the beginning is there.
const Cut = "cut"

// proof is how many bytes of text are made to find what is certain: fifty ways in which
// 80 KB may go on. Where that is not enough a prompt is only likely.
const proof = 4 << 20

// EncodeBeginning appends the ids that a prompt begins with of which only a beginning
// is known: all yields requests that it may be, those that are usual marked. Exact of
// the ids are what all of them begin with, and what whatever goes on like them does, up
// to what could still merge with the text behind; the others are what the usual ones
// begin with.
//
// What cannot be encoded is in text-block mode. ok is false if too little is known:
// fewer than two of the requests have a prompt, or the time was up.
func (m *Model) EncodeBeginning(ctx context.Context, dst []uint32, all iter.Seq2[chat.Request, bool], now time.Time) (p Prompt, ok bool) {
	if m != nil && m.Verdict() != DriftSeen {
		if p, ok = m.beginning(ctx, dst, all, now); ok {
			return p, true
		}
	}
	c, made := common{}, 0
	for q, usual := range all {
		if !usual || made > proof {
			continue
		}
		text, err := chat.AppendText(nil, q)
		if ctx.Err() != nil || len(text) > MaxPrompt {
			return Prompt{IDs: dst}, false
		}
		if made += len(text); err == nil {
			c.add(text, usual)
		}
	}
	likely, _ := c.ends(false)
	if c.n == 0 || likely < bytesPerToken {
		return Prompt{IDs: dst}, false
	}
	why := NoTokenizer
	switch {
	case m.Verdict() == DriftSeen:
		why = Drifted
	case m != nil:
		why = Cut
	}
	return Prompt{IDs: AppendBytes(dst, c.text[:likely/bytesPerToken*bytesPerToken]), Mode: Bytes, Reason: why, Others: tokensOf(len(c.text) - likely)}, true
}

func (m *Model) beginning(ctx context.Context, dst []uint32, all iter.Seq2[chat.Request, bool], now time.Time) (p Prompt, ok bool) {
	var c common
	var f form
	var first chat.Text
	made := 0
	for q, usual := range all {
		if made > proof {
			if !usual {
				c.all = 0
			}
			continue
		}
		if ctx.Err() != nil || q.Inexact != "" || q.Size > 0 || q.Prompt == nil && m.chat == nil {
			return p, false
		}
		if isTokenIDs(q.Prompt) {
			if p, err := givenIDs(dst, q); err == nil && chat.Kept(q.TruncatePromptTokens) == 0 {
				p.Mode, p.Reason = ExactPrefix, Cut
				return p, p.Exact > 0
			}
			return p, false
		}
		text, form, why := m.text(q, now)
		switch {
		case why != "":
			continue // no such request is served
		case c.n == 0:
			first, f = text, form
		}
		if form != f || text.Kept > 0 || len(text.Text) > MaxPrompt {
			return p, false
		}
		c.add(text.Text[:text.Exact], usual)
		made += len(text.Text)
	}
	likely, exact := c.ends(first.Marked)
	if c.n < 2 && likely > 0 {
		return p, false
	}
	p = Prompt{Mode: ExactPrefix, Reason: Cut, Others: tokensOf(len(first.Text)-likely) + first.Items*itemTokens}
	base := len(dst)
	var err error
	p.Size = likely
	if p.IDs, p.Exact, p.Reused, err = m.stable(ctx, dst, c.text[:exact], f); err != nil {
		return p, false
	}
	if likely > exact {
		if p.IDs, _, p.Reused, err = m.stable(ctx, dst, c.text[:likely], f); err != nil {
			return p, false
		}
	}
	return p, len(p.IDs) > base
}

// stable appends the ids that every text that begins with this one, and is longer,
// begins with, and returns their number, and how many bytes were known.
func (m *Model) stable(ctx context.Context, dst []uint32, text []byte, f form) (ids []uint32, n, reused int, err error) {
	rec := recorder{step: len(text) + 1, next: len(text) + 1, add: func(resume) {}}
	// A character behind the end may still compose with the one before it.
	rec.limit, rec.last, rec.safe = len(text)-1, resume{start: true}, resume{start: true}
	if m.cache != nil && len(text) >= m.cache.step {
		ids, reused, err = m.cache.record(ctx, dst, m.tok, text, f, &rec)
	} else {
		ids, err = m.tok.encode(ctx, dst, text, f, &rec)
	}
	n = rec.safe.ids
	return ids[:len(dst)+n], n, reused, err
}

// common is what texts begin with.
type common struct {
	text []byte // the first one
	n    int    // how many there were
	// How much of it all of them have, and the usual ones, if there were any.
	all, usual int
	some       bool
}

func (c *common) add(text []byte, usual bool) {
	if c.n++; c.n == 1 {
		c.text, c.all, c.usual = text, len(text), len(text)
	}
	k := shared(text, c.text)
	c.all = min(c.all, k)
	if usual {
		c.usual, c.some = min(c.usual, k), true
	}
}

// ends returns how much of the text the usual ones have and how much all of them, no
// part of a character or a mark.
func (c *common) ends(marked bool) (usual, all int) {
	if !c.some {
		c.usual = c.all
	}
	return c.whole(c.usual, marked), c.whole(c.all, marked)
}

func (c *common) whole(n int, marked bool) int {
	if marked {
		for at := 0; at < n; {
			start, end, _ := chat.NextMark(c.text, at)
			if start < 0 || start >= n {
				break
			}
			if end > n {
				return start
			}
			at = end
		}
	}
	for n > 0 && n < len(c.text) && !utf8.RuneStart(c.text[n]) {
		n--
	}
	return n
}

// shared returns how many bytes two texts begin with alike. Of long ones most do, so it
// looks at many at a time.
func shared(a, b []byte) (n int) {
	const step = 256
	most := min(len(a), len(b))
	for n+step <= most && bytes.Equal(a[n:n+step], b[n:n+step]) {
		n += step
	}
	for n < most && a[n] == b[n] {
		n++
	}
	return n
}
