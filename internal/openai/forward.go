// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"strconv"
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
// form. The values of all other fields are unchanged. It returns nil if the field has a value that
// cannot take ids.
func WithTokens(body []byte, form Form, ids []uint32) []byte {
	old := value(bytes.TrimSpace(body)).member(string(form))
	list := appendIDs(make([]byte, 0, 8*len(ids)+2), ids)
	switch form {
	case FormPrompt:
		if old.kind() != '"' {
			return nil
		}
	case FormTokenIDs:
		if old != nil {
			return nil
		}
	case FormKVTransfer:
		if old = old.or("{}"); old.kind() != '{' || old.member(string(FormTokenIDs)) != nil {
			return nil
		}
		list = bytes.Join(Edit(old, Member{string(FormTokenIDs), list}), nil)
	}
	return bytes.Join(Edit(body, Member{string(form), list}), nil)
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
