// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"strings"
)

// Table prints the legal moves of a main stream.
func Table() string {
	var b strings.Builder
	for s := range states {
		for m := range messages {
			act, to := next(s, m)
			switch act {
			case leave:
			case decide:
				fmt.Fprintf(&b, "%s: %s: decide\n", s, m)
			default:
				fmt.Fprintf(&b, "%s: %s: %s -> %s\n", s, m, act, to)
			}
		}
	}
	b.WriteString("anything else: leave\n")
	return b.String()
}

// NewFirstEvent returns a function that is fed the pieces of an event stream.
func NewFirstEvent() func(piece []byte) bool { return new(firstEvent).in }
