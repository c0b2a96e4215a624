// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"

	"github.com/kvroute/kvroute/router"
)

// maxUsage is the largest usage in bytes. Engines write about 200.
const maxUsage = 4 << 10

// UsageReader finds the field usage in a response that comes in pieces of any size: JSON, or an event stream of
// JSON. Text in JSON cannot contain the quoted name, because its quotes are escaped. The zero value is ready to use,
// by one goroutine at a time.
type UsageReader struct {
	router.Usage
	Ended bool   // the last piece has come
	rest  []byte // the unread end of the pieces
}

// Read reads the next piece.
func (u *UsageReader) Read(piece []byte, last bool) {
	for len(piece) > 0 {
		n := min(len(piece), maxUsage)
		u.rest = append(u.rest, piece[:n]...)
		piece = piece[n:]
		for u.next() {
		}
	}
	u.Ended = u.Ended || last
}

// Report passes the usage to report. A response that broke off before its usage has none. u may be nil.
func (u *UsageReader) Report(id string, report func(id string, u router.Usage)) {
	if u != nil && (u.Ended || u.Usage != (router.Usage{})) {
		report(id, u.Usage)
	}
}

// next reads one field, and returns false if more text is needed.
func (u *UsageReader) next() bool {
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
func (u *UsageReader) add(field []byte) {
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
