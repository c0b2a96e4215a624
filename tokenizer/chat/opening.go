// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"errors"

	"github.com/kvroute/kvroute/internal/jsonscan"
)

// errFound ends a scan that has found what it was for.
var errFound = errors.New("found")

// Opening returns the part of a list of messages, as JSON, that all turns of a chat have in common: up to the first
// message of the user, or the first message if the user has none. It returns all of a text that is no such list.
func Opening(messages []byte) []byte {
	s, end := jsonscan.Scanner{In: messages}, 0
	_ = s.List(func() error { // an error ends the list, as errFound does
		if s.Peek() != '{' {
			return s.Skip()
		}
		user := false
		err := s.Object(func(name []byte) error {
			value, err := s.Value()
			user = user || string(name) == `"role"` && string(value) == `"user"`
			return err
		})
		if err == nil && (end == 0 || user) {
			end = s.At
		}
		if err == nil && user {
			return errFound
		}
		return err
	})
	if end == 0 {
		return messages
	}
	return messages[:end]
}
