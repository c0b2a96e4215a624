// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"errors"
	"fmt"
	"math"
	"strconv"
)

// Cut is the part of a prompt's tokens that the engine keeps.
type Cut struct {
	// Kept is the number of tokens that are kept, 0 if all are. [ToContext] keeps one token less than the engine's context
	// length. That length is not known here.
	Kept int
	// First keeps the first tokens instead of the last ones.
	First bool
	// Framed keeps the special tokens around a text, and cuts only the text.
	Framed bool
}

// ToContext is the value of Cut.Kept for truncate_prompt_tokens: -1.
const ToContext = -1

// Cut reads truncate_prompt_tokens and truncation_side as the engine of a profile does. SGLang has no such fields.
// An error wraps [ErrRefused].
func (q Request) Cut(p Profile) (Cut, error) {
	if p == SGLang || q.TruncatePromptTokens == nil && q.TruncationSide == nil {
		return Cut{}, nil
	}
	c := Cut{Framed: true}
	switch string(q.TruncationSide) {
	case "":
	case `"left"`, `"right"`:
		c.Framed, c.First = false, string(q.TruncationSide) == `"right"`
	default:
		return c, fmt.Errorf("chat: truncation_side is neither left nor right: %w", ErrRefused)
	}
	var err error
	if q.TruncatePromptTokens != nil {
		c.Kept, err = tokenCount(string(q.TruncatePromptTokens))
	}
	return c, err
}

// tokenCount reads truncate_prompt_tokens as vLLM does: an integer from -1 on, also as a string or a float.
func tokenCount(span string) (int, error) {
	bad := fmt.Errorf("chat: truncate_prompt_tokens is no number of tokens: %w", ErrRefused)
	if span == "true" {
		return 1, nil
	}
	if text, err := strconv.Unquote(span); err == nil {
		span = text
	}
	f, err := strconv.ParseFloat(span, 64)
	switch {
	case errors.Is(err, strconv.ErrRange) || err == nil && f > math.MaxInt32:
		return math.MaxInt32, nil // more than any prompt has
	case err != nil, f != math.Trunc(f), f < ToContext, f == 0:
		return 0, bad
	}
	return int(f), nil
}
