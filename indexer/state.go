// SPDX-License-Identifier: Apache-2.0

package indexer

import "slices"

// State says how well the cache of a rank is known. Its values are words of records, of the API and of
// metrics; docs/protocol.md explains them. The zero State means that nobody has said anything.
type State string

// The states.
const (
	StateOK      State = "ok"                  // all events are applied, or missing ones are being requested
	StatePartial State = "partial"             // the first events are missing: some blocks are unknown
	StateSuspect State = "suspect"             // events between others are missing: known blocks may be gone
	StateMisfit  State = "block_size_mismatch" // the engine's block size does not fit the index's: no block is known
	StateNone    State = "none"                // no events, or no connection to their source
	StateSummary State = "summary"             // of a router group, which sends summaries in place of events
)

// States returns all states. Of a worker's ranks a later one is worse.
func States() []State {
	return []State{StateOK, StatePartial, StateSuspect, StateMisfit, StateNone, StateSummary}
}

// Faulty reports whether events are missing or cannot be used, whatever the worker is.
func (s State) Faulty() bool { return s == StatePartial || s == StateSuspect || s == StateMisfit }

// Known returns s, or the zero State if s is a word that this version does not have.
func (s State) Known() State {
	if !slices.Contains(States(), s) {
		return ""
	}
	return s
}

// Worst returns the worse of two states.
func Worst(a, b State) State {
	if all := States(); slices.Index(all, a) > slices.Index(all, b) {
		return a
	}
	return b
}
