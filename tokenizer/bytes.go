// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Encode appends the token ids of the prompt r to dst. A prompt that is a list
// of token ids is taken as it is; of a list of such lists, the longest. Every
// other prompt is encoded by [AppendBytes] from its canonical text
// ([chat.AppendText]).
//
// On an error dst is returned unchanged, and the error names the field.
func Encode(dst []uint32, r chat.Request) ([]uint32, error) {
	if isTokenIDs(r.Prompt) {
		return appendIDs(dst, r.Prompt)
	}
	text, err := chat.AppendText(nil, r)
	if err != nil {
		return dst, err
	}
	return AppendBytes(dst, text), nil
}

// AppendBytes appends each byte of text as a token id, 0 to 255.
func AppendBytes(dst []uint32, text []byte) []uint32 {
	dst = slices.Grow(dst, len(text))
	for _, b := range text {
		dst = append(dst, uint32(b))
	}
	return dst
}

// isTokenIDs reports whether a prompt is a list whose first value is a number
// or a list.
func isTokenIDs(prompt []byte) bool {
	if len(prompt) == 0 || prompt[0] != '[' {
		return false
	}
	for _, c := range prompt[1:] {
		switch {
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
		case c == '[' || c == '-' || '0' <= c && c <= '9':
			return true
		default:
			return false
		}
	}
	return false
}

func appendIDs(dst []uint32, prompt []byte) ([]uint32, error) {
	var ids []uint32
	err := json.Unmarshal(prompt, &ids)
	if err == nil {
		return append(dst, ids...), nil
	}
	var lists [][]uint32
	if json.Unmarshal(prompt, &lists) != nil {
		return dst, fmt.Errorf("tokenizer: read prompt as token ids: %w", err)
	}
	var longest []uint32
	for _, l := range lists {
		if len(l) > len(longest) {
			longest = l
		}
	}
	return append(dst, longest...), nil
}
