// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
)

// The worker gets a compressed body unchanged. kvroute inflates gzip to read it, up to the largest
// size of a body. It routes other compressed bodies, and broken ones, by load: the worker may be
// able to read them.

// Outcomes of reading a compressed body.
const (
	readable   = "read"
	unreadable = "unread"    // in a form that kvroute does not read
	broken     = "broken"    // not in its declared form
	tooBig     = "too_large" // larger than a body may be
	crowded    = "crowded"   // the budget has no room for it
)

// encodings reads the values of content-encoding: "" for none, or the name of the only one;
// "other" for an unknown one, or several.
func encodings(values []string) string {
	names := strings.FieldsFunc(strings.ToLower(strings.Join(values, ",")), func(r rune) bool { return r == ',' || r == ' ' || r == '\t' })
	names = slices.DeleteFunc(names, func(name string) bool { return name == "identity" })
	switch {
	case len(names) == 0:
		return ""
	case len(names) > 1:
		return "other"
	case names[0] == "x-gzip":
		return "gzip"
	case slices.Contains([]string{"gzip", "deflate", "br", "zstd"}, names[0]):
		return names[0]
	}
	return "other"
}

// inflate returns the text of a compressed body, at most limit bytes, or the text before a
// fault. The caller gives cap(text) back to the budget. It ends soon after ctx.
func (h *heldBytes) inflate(ctx context.Context, body []byte, limit int) (text []byte, outcome string, err error) {
	z, err := gzip.NewReader(bytes.NewReader(body))
	if err != nil {
		return nil, broken, err
	}
	for {
		if len(text) == cap(text) {
			// Text usually shrinks to a third. The size in the body is not trusted.
			size := min(max(4*len(body), 2*len(text)), limit) + 1
			if !h.take(size - cap(text)) {
				return text, crowded, nil
			}
			text = append(make([]byte, 0, size), text...)
		}
		n, err := z.Read(text[len(text):min(cap(text), len(text)+256<<10)])
		text = text[:len(text)+n]
		switch {
		case len(text) > limit:
			return text, tooBig, nil
		case errors.Is(err, io.EOF):
			return text, readable, nil
		case err == nil:
			err = context.Cause(ctx)
		}
		if err != nil {
			return text, broken, err
		}
	}
}

// plain returns the text of a body, or of the beginning of a truncated one, and counts the outcome.
// The text is complete if the outcome is readable. Inflated text must be dropped with dropInflated.
func (s *stream) plain(ctx context.Context, body []byte) (text []byte, outcome string) {
	if s.encoding == "" || len(body) == 0 {
		return body, readable
	}
	if outcome = unreadable; s.encoding == "gzip" {
		ctx, cancel := context.WithTimeout(ctx, s.server.conf.DecisionTimeout)
		defer cancel()
		var err error
		text, outcome, err = s.server.held.inflate(ctx, body, s.server.conf.MaxBodyBytes)
		if s.inflated = text; s.truncated && errors.Is(err, io.ErrUnexpectedEOF) {
			outcome = readable
		}
	}
	s.server.metrics.encodings.Count(s.encoding, outcome)
	return text, outcome
}

// dropInflated gives the bytes of the inflated body back to the budget.
func (s *stream) dropInflated() {
	s.server.held.give(cap(s.inflated))
	s.inflated = nil
}
