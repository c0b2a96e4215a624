// SPDX-License-Identifier: Apache-2.0

package chat

import "bytes"

// Opening returns the part of a list of messages, as JSON, that all turns of a chat have in common: up to the first
// message of the user, or the first message if the user has none. It returns all of a text that is no such list.
func Opening(messages []byte) []byte {
	depth, first, role := 0, 0, false
	for i := 0; i < len(messages); i++ {
		switch messages[i] {
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 1 && first == 0 {
				first = i + 1
			}
		case '"':
			end := stringEnd(messages, i)
			if depth == 2 {
				if text := messages[i:end]; role && string(text) == `"user"` {
					return messages[:objectEnd(messages, end)]
				} else {
					role = string(text) == `"role"`
				}
			}
			i = end - 1
		}
	}
	if first == 0 {
		return messages
	}
	return messages[:first]
}

// stringEnd returns the place behind the string that begins at a place.
func stringEnd(text []byte, at int) int {
	for at++; at < len(text); at++ {
		next := bytes.IndexAny(text[at:], `"\`)
		if next < 0 {
			return len(text)
		}
		if at += next; text[at] == '"' {
			return at + 1
		}
		at++ // the escaped character
	}
	return len(text)
}

// objectEnd returns the place behind the object that a place is in.
func objectEnd(text []byte, at int) int {
	for depth := 1; at < len(text); at++ {
		switch text[at] {
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return at + 1
			}
		case '"':
			at = stringEnd(text, at) - 1
		}
	}
	return len(text)
}
