// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"strings"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/router"
)

// auditMark ends the ids of a random share of the requests. Envoy's configuration, too, matches it.
const auditMark = "-audit"

// audited reports whether the usage in the response to a request is read although kvroute does not
// need the response otherwise.
func (s *Server) audited(id string) bool {
	return strings.HasPrefix(id, s.prefix) && strings.HasSuffix(id, auditMark)
}

// readsUsage returns a reader for the usage in a response, nil if the response can have none.
func readsUsage(h *extprocv3.HttpHeaders) *usageReader {
	if status(h) != "200" || h.GetEndOfStream() || header(h, "content-encoding") != "" {
		return nil
	}
	return new(usageReader)
}

// reportUsage reports the usage in a response. Nothing is reported of a response that broke off before its usage.
func (s *Server) reportUsage(id string, u *usageReader) {
	if u != nil && (u.ended || u.Usage != (router.Usage{})) {
		s.router.ReportUsage(id, u.Usage)
	}
}

// maxUsage is the largest usage in bytes. Engines write about 200.
const maxUsage = 4 << 10

// usageReader finds the field usage in a response that comes in pieces of any size: JSON, or an event
// stream of JSON. Text in JSON cannot contain the quoted name, because its quotes are escaped.
type usageReader struct {
	router.Usage
	rest  []byte // the unread end of the pieces
	ended bool   // the last piece has come
}

// read reads the next piece.
func (u *usageReader) read(piece []byte, last bool) {
	for len(piece) > 0 {
		n := min(len(piece), maxUsage)
		u.rest = append(u.rest, piece[:n]...)
		piece = piece[n:]
		for u.next() {
		}
	}
	u.ended = u.ended || last
}

// next reads one field, and returns false if more text is needed.
func (u *usageReader) next() bool {
	const name = `"usage"`
	at := bytes.Index(u.rest, []byte(name))
	if at < 0 {
		keep := min(len(u.rest), len(name)-1)
		u.rest = append(u.rest[:0], u.rest[len(u.rest)-keep:]...)
		return false
	}
	after := bytes.TrimLeft(u.rest[at+len(name):], " \t\r\n")
	var field json.RawMessage
	var err error
	switch value, isName := bytes.CutPrefix(after, []byte(":")); {
	case len(after) == 0:
		err = io.ErrUnexpectedEOF
	case isName:
		err = json.NewDecoder(bytes.NewReader(value)).Decode(&field)
	}
	if (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) && len(u.rest)-at <= maxUsage {
		u.rest = append(u.rest[:0], u.rest[at:]...)
		return false
	}
	if u.Bad = u.Bad || err != nil; err == nil && field != nil {
		u.add(field)
	}
	u.rest = append(u.rest[:0], u.rest[at+len(name):]...)
	return true
}

// add adds a usage object. Some responses have several: the last number of a name counts.
func (u *usageReader) add(field []byte) {
	type details struct {
		Cached *int `json:"cached_tokens"`
	}
	var o struct {
		Prompt        *int    `json:"prompt_tokens"`
		Input         *int    `json:"input_tokens"`            // of /v1/responses and /v1/messages
		CacheRead     *int    `json:"cache_read_input_tokens"` // of /v1/messages: not part of the input
		Completion    *int    `json:"completion_tokens"`
		Output        *int    `json:"output_tokens"`
		PromptDetails details `json:"prompt_tokens_details"`
		InputDetails  details `json:"input_tokens_details"`
	}
	if json.Unmarshal(field, &o) != nil {
		u.Bad = true
		return
	}
	set := func(to *int, n *int) bool {
		if n == nil {
			return false
		}
		if u.Bad = u.Bad || *n < 0 || *n > math.MaxInt32; !u.Bad {
			*to = *n
		}
		return true
	}
	set(&u.PromptTokens, o.Prompt)
	if set(&u.PromptTokens, o.Input) && set(&u.CachedTokens, o.CacheRead) {
		u.PromptTokens += u.CachedTokens
		u.Cached = true
	}
	set(&u.OutputTokens, o.Completion)
	set(&u.OutputTokens, o.Output)
	for _, n := range []*int{o.PromptDetails.Cached, o.InputDetails.Cached} {
		u.Cached = set(&u.CachedTokens, n) || u.Cached
	}
}
