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
	"sync"
)

// Bodies that clients compress go to the worker as they are. gzip is inflated to be
// read, as far as a body may be long; a body in another form, or that is not what it
// says, is routed by load, for it is the worker's to judge.

// What became of a compressed body.
const (
	inflated   = "read"
	kept       = "unread"    // of a form that is not read
	broken     = "broken"    // it is not what it says
	overfilled = "too_large" // inflated it is larger than a body may be
	crowded    = "crowded"   // too many of them are inflated at the time
)

// encodings reads the values of content-encoding: "" for none, or the name of the one
// that there is; "other" for what we have no name for, or several.
func encodings(values []string) (name string) {
	for _, v := range values {
		for item := range strings.SplitSeq(v, ",") {
			switch item = strings.ToLower(strings.TrimSpace(item)); {
			case item == "" || item == "identity":
			case name != "":
				return "other"
			case item == "x-gzip":
				name = "gzip"
			case slices.Contains([]string{"gzip", "deflate", "br", "zstd"}, item):
				name = item
			default:
				name = "other"
			}
		}
	}
	return name
}

// errTooLarge: inflated a body is larger than it may be. errCrowded: there is no room
// for more inflated bodies now.
var (
	errTooLarge = errors.New("the body is too large")
	errCrowded  = errors.New("too many bodies are inflated at a time")
)

// inflater inflates bodies. It may be used by any number of goroutines. The bytes of
// all that it has returned and has not been given back are taken from held.
type inflater struct {
	held    *heldBytes
	readers sync.Pool // of *gzip.Reader: one has some 40 KB
}

// grow returns text with room for n bytes, if there is any.
func (p *inflater) grow(text []byte, n int) ([]byte, bool) {
	if !p.held.take(n - cap(text)) {
		return text, false
	}
	return append(make([]byte, 0, n), text...), true
}

// giveBack makes room: text, from inflate, is used no more.
func (p *inflater) giveBack(text []byte) { p.held.give(cap(text)) }

// inflate returns what body is compressed of, at most limit bytes of it. With an error
// it returns what comes before that. Either way the caller owes it to giveBack. It ends
// soon after ctx.
func (p *inflater) inflate(ctx context.Context, body []byte, limit int) ([]byte, error) {
	in := bytes.NewReader(body)
	z, _ := p.readers.Get().(*gzip.Reader)
	var err error
	if z == nil {
		z, err = gzip.NewReader(in)
	} else {
		err = z.Reset(in)
	}
	if z != nil { // else it is none
		defer func() {
			in.Reset(nil) // it keeps no body
			p.readers.Put(z)
		}()
	}
	if err != nil {
		return nil, err
	}
	// Text shrinks to a third or so. What a body claims to be is not believed.
	out, ok := p.grow(nil, min(4*len(body), limit)+1)
	for {
		if len(out) == cap(out) && ok {
			out, ok = p.grow(out, min(2*len(out), limit+1))
		}
		if !ok {
			return out, errCrowded
		}
		if err := context.Cause(ctx); err != nil {
			return out, err
		}
		n, err := z.Read(out[len(out):min(cap(out), len(out)+256<<10)])
		out = out[:len(out)+n]
		switch {
		case len(out) > limit:
			return out[:limit], errTooLarge
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return out, err
		}
	}
}

// plain returns the text of a body. read is false if it cannot be read, which is counted;
// too large is an error. Of a truncated body it is the beginning. What was
// inflated is s.inflated, to be given back.
func (s *stream) plain(ctx context.Context, body []byte) (text []byte, read bool, err error) {
	if s.encoding == "" || len(body) == 0 {
		return body, true, nil
	}
	outcome := kept
	if s.encoding == "gzip" {
		ctx, cancel := context.WithTimeout(ctx, s.server.conf.DecisionTimeout)
		defer cancel()
		text, err = s.server.inflater.inflate(ctx, body, s.server.conf.MaxBodyBytes)
		s.inflated = text
		switch {
		case err == nil, s.truncated && errors.Is(err, io.ErrUnexpectedEOF):
			outcome = inflated
		case errors.Is(err, errTooLarge):
			outcome = overfilled
		case errors.Is(err, errCrowded):
			outcome = crowded
		default:
			outcome = broken
		}
	}
	s.server.metrics.encoded(s.encoding, outcome)
	if outcome == overfilled {
		return nil, false, errTooLarge
	}
	return text, outcome == inflated, nil
}
