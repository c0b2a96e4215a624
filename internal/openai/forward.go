// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"strconv"

	"github.com/kvroute/kvroute/internal/jsonscan"
)

// Form is a way to send a prompt as token ids.
type Form string

// The forms, by the field that has the ids.
const (
	FormPrompt     Form = "prompt"             // completions: instead of the text
	FormKVTransfer Form = "kv_transfer_params" // chats: its member prompt_token_ids
	FormTokenIDs   Form = "prompt_token_ids"   // chats
)

// WithTokens returns a copy of a body that [Parse] accepted, with the prompt as ids in the given
// form. All other bytes are unchanged; of two fields of one name it changes the last one, which
// counts. It returns nil if the field has a value that cannot take ids.
func WithTokens(body []byte, form Form, ids []uint32) []byte {
	// Where the field's last copy is, and its value.
	start, end := -1, -1
	var old value
	s := jsonscan.Scanner{In: body}
	_ = readObject(&s, func(name []byte, v value) { // Parse has checked it, so there is no error
		if string(name) == string(form) {
			old, end = v, s.At
			if start = end - len(v); v == nil {
				start = end - len("null")
			}
		}
	})
	const field = `"prompt_token_ids":`
	list := appendIDs(make([]byte, 0, 8*len(ids)+2), ids)
	switch {
	case form == FormPrompt && old.kind() == '"':
		return splice(body, start, end, list)
	case form == FormPrompt:
		return nil
	case form == FormKVTransfer && old != nil:
		if old.kind() != '{' || old.member("prompt_token_ids") != nil {
			return nil
		}
		if first := (jsonscan.Scanner{In: old, At: 1}); first.Peek() == '}' {
			return splice(body, start+1, start+1, []byte(field), list)
		}
		// The new member is the last one: a null of that name may stand before it.
		return splice(body, end-1, end-1, []byte(`,`+field), list)
	case form == FormKVTransfer:
		list = append(append([]byte(`{`+field), list...), '}')
	case old != nil:
		return nil
	}
	if start >= 0 { // a null
		return splice(body, start, end, list)
	}
	return splice(body, s.At-1, s.At-1, []byte(`,"`+form+`":`), list)
}

// splice returns a copy of body with parts in the place of its bytes from start
// to end.
func splice(body []byte, start, end int, parts ...[]byte) []byte {
	size := len(body) - (end - start)
	for _, p := range parts {
		size += len(p)
	}
	out := append(make([]byte, 0, size), body[:start]...)
	for _, p := range parts {
		out = append(out, p...)
	}
	return append(out, body[end:]...)
}

func appendIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}
