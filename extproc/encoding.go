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

// Compressed bodies go to the worker as they are. kvroute inflates gzip to read it, up to the
// largest size of a body. It routes a body in another form, or a broken one, by load: the worker
// judges it.

// Outcomes of a compressed body.
const (
	inflated   = "read"
	kept       = "unread"    // in a form that is not read
	broken     = "broken"    // not in its declared form
	overfilled = "too_large" // larger than a body may be
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
			// Text shrinks to a third or so. The size that a body claims is not trusted.
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
			return text, overfilled, nil
		case errors.Is(err, io.EOF):
			return text, inflated, nil
		case err == nil:
			err = context.Cause(ctx)
		}
		if err != nil {
			return text, broken, err
		}
	}
}

// plain returns the text of a body, or of the beginning of a truncated one. The outcome is
// inflated if there is a text, kept if there is none, or why not; it is counted. Inflated text
// is s.inflated, too, to be given back.
func (s *stream) plain(ctx context.Context, body []byte) (text []byte, outcome string) {
	if s.encoding == "" || len(body) == 0 {
		return body, inflated
	}
	if outcome = kept; s.encoding == "gzip" {
		ctx, cancel := context.WithTimeout(ctx, s.server.conf.DecisionTimeout)
		defer cancel()
		var err error
		text, outcome, err = s.server.held.inflate(ctx, body, s.server.conf.MaxBodyBytes)
		if s.inflated = text; s.truncated && errors.Is(err, io.ErrUnexpectedEOF) {
			outcome = inflated
		}
	}
	count(s.server.metrics.encodings, label("encoding", s.encoding), label("outcome", outcome))
	return text, outcome
}

// deflate gives back the room of an inflated body.
func (s *stream) deflate() {
	s.server.held.give(cap(s.inflated))
	s.inflated = nil
}
