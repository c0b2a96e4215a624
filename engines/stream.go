// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"

	"github.com/zeebo/xxh3"
)

// stream puts the batches of one engine's socket in order: the live batches, and those that the
// engine sends again on request. It has no sockets, clock or goroutine.
//
// Engines number batches from 0 in each process, and send nothing when a process ends. A new
// process is detected in three ways. A live number is not above the previous one of its
// connection, or not above the last known number when the connection began. An answer begins with
// the last known batch, but its content differs. An answer does not contain that batch. Therefore
// requests begin with the last known batch, not with the next one.
//
// A long answer may lack batches that the engine has, because its socket drops messages that do
// not fit into its queue. Therefore a gap inside an answer is requested once more, from the last
// known batch. Batches that are missing again are lost.
//
// # Invariants
//
//   - The batches applied between two clears are a subsequence of those that one
//     process published, in order, without duplicates.
//   - No batch is missing between them unless the stream is suspect, and none
//     before them unless it is partial.
//   - While an answer is expected, live batches wait: at most maxHeldBatches
//     with at most maxHeldBytes.
type stream struct {
	replays bool // the engine can be asked
	// apply applies a batch and reports whether the engine cleared its cache in it.
	apply func(body []byte) (cleared bool)
	clear func()
	count func(outcome string, n int)

	// The last applied batch, if any since the last clear.
	hasLast bool
	last    uint64
	digest  uint64

	// The connection.
	fresh     bool   // no batch arrived on it yet
	before    uint64 // the last sequence when the connection began, if hadBefore
	hadBefore bool
	live      uint64 // the newest sequence that arrived on it
	closed    bool   // the port was closed before it, and no answer came since

	// The request to the engine.
	requesting  bool // a request is due or under way
	tail        bool // it begins with the last known batch, not with batch 0
	requests    int  // number of requests so far; answers to older requests are ignored
	rebuild     bool // an answer from 0 replaces the known blocks
	answered    bool // the answer had a requested batch
	gapRequests int  // requests since the stream was last in order
	holes       int  // requests since then because of a gap inside an answer
	hole        bool // the last of them began at the batch that is still the last

	held      []batch // live batches that wait for the answer
	heldBytes int

	partial     bool // batches before the first applied one are missing: blocks are unknown
	suspect     bool // batches in between are missing: known blocks may be gone
	recheck     bool // request everything after the next answer, if possible
	unavailable bool // the engine no longer has the missing batches: none is requested again until a clear or a restart
}

// batch is a message of an engine. The caller may change the body when the stream returns.
type batch struct {
	sequence uint64
	body     []byte
}

const (
	maxHeldBatches = 4096
	maxHeldBytes   = 64 << 20
	// maxGapRequests limits the requests for a gap that an answer did not fill.
	maxGapRequests = 2
	// maxHoles limits the requests because of gaps inside an answer. After that many, the engine
	// is assumed not to have the missing batches. An engine's queue of 1,000 messages loses some
	// of its 10,000 batches ten times at most.
	maxHoles = 50
)

func newStream(replays bool, apply func([]byte) bool, wipe func(), count func(string, int)) *stream {
	return &stream{replays: replays, apply: apply, clear: wipe, count: count}
}

// missing returns the number of batches that are missing before a sequence.
func (s *stream) missing(sequence uint64) uint64 {
	if !s.hasLast {
		return sequence
	}
	return sequence - s.last - 1
}

// connected starts a new connection. closed means that the engine's port was closed since the
// previous connection.
func (s *stream) connected(closed bool) {
	s.fresh, s.before, s.hadBefore = true, s.last, s.hasLast
	s.closed = s.hasLast && (closed || s.closed && s.replays)
	// The answer must contain these batches again; otherwise they are missing.
	s.held, s.heldBytes = nil, 0
	switch {
	case s.replays:
		s.gapRequests, s.holes, s.hole, s.rebuild = 0, 0, false, false
		s.request()
	case closed && s.hasLast:
		s.restart()
	}
}

// request schedules a request. It replaces the one under way.
func (s *stream) request() {
	s.requesting, s.answered = true, false
	s.requests++
}

// requestMore schedules a request for later batches, unless a request is under way.
func (s *stream) requestMore() {
	if s.replays && !s.requesting {
		s.request()
	}
}

// begin is called each time that the request is sent. It returns the first requested sequence.
func (s *stream) begin() (from uint64) {
	s.answered, s.tail = false, s.hasLast && !s.rebuild
	return s.from()
}

// from returns the sequence at which a request would start now.
func (s *stream) from() uint64 {
	if s.hasLast && !s.rebuild {
		return s.last
	}
	return 0
}

// requestAll requests all batches, to replace suspect state.
func (s *stream) requestAll() {
	if (s.suspect || s.partial) && s.replays && !s.unavailable && !s.requesting {
		s.rebuild, s.gapRequests = true, 0
		s.request()
	}
}

// reread requests all batches although none is missing: the known blocks are wrong.
func (s *stream) reread() {
	s.suspect = s.suspect || s.replays
	s.requestAll()
}

// restart forgets the batches of the previous process.
func (s *stream) restart() {
	s.count(sourceRestart, 1)
	s.forget()
	s.clear()
}

func (s *stream) forget() {
	s.hasLast, s.hadBefore, s.closed, s.rebuild, s.requesting = false, false, false, false, false
	s.holes, s.hole = 0, false
	s.whole()
}

// whole marks the stream as complete.
func (s *stream) whole() { s.partial, s.suspect, s.unavailable = false, false, false }

// fromLive handles a batch that the engine has just published.
func (s *stream) fromLive(b batch) {
	switch {
	case !s.fresh && b.sequence <= s.live, s.fresh && s.hadBefore && b.sequence <= s.before:
		s.held, s.heldBytes = nil, 0 // batches of the old process
		s.restart()
	}
	s.fresh, s.live = false, b.sequence
	switch {
	case s.requesting:
		s.hold(b)
	case s.hasLast && b.sequence <= s.last:
		s.count(sourceDuplicate, 1)
	case s.missing(b.sequence) == 0 || !s.replays:
		s.accept(b)
	default:
		s.count(sourceGap, 1)
		s.hold(b)
		s.gapRequests = 0
		s.request()
	}
}

func (s *stream) hold(b batch) {
	b.body = bytes.Clone(b.body)
	s.held = append(s.held, b)
	if s.heldBytes += len(b.body); len(s.held) > maxHeldBatches || s.heldBytes > maxHeldBytes {
		s.count(sourceOverflow, 1)
		s.giveUp()
	}
}

// accept applies a batch. Batches missing before it are lost.
func (s *stream) accept(b batch) {
	if n := s.missing(b.sequence); n > 0 {
		s.count(sourceLost, int(min(n, 1<<30)))
		s.partial, s.suspect = s.partial || !s.hasLast, s.suspect || s.hasLast
	}
	s.hasLast, s.last, s.digest, s.hole = true, b.sequence, xxh3.Hash(b.body), false
	if s.apply(b.body) {
		s.whole()
	}
}

// fromReplay handles a batch of the answer.
func (s *stream) fromReplay(b batch) {
	switch {
	case s.requesting && s.tail && b.sequence == s.last && !s.answered:
		s.answered, s.closed = true, false
		if xxh3.Hash(b.body) != s.digest {
			s.restart()
			s.request()
		}
		return
	case s.requesting && s.tail && b.sequence > s.last && !s.answered && s.closed:
		// The last known batch is missing from the answer and the port was closed: this is another
		// process.
		s.restart()
		s.request()
		return
	case s.rebuild && b.sequence > 0 && !s.answered:
		// The engine no longer has the first missing batches; keep the known blocks.
		s.unavailable = true
		s.giveUp()
		return
	case s.rebuild && !s.answered:
		s.forget()
		s.requesting, s.tail = true, false
		s.clear()
	case !s.requesting || s.hasLast && b.sequence <= s.last:
		return
	}
	inside := s.answered
	s.answered, s.closed = true, false
	if s.missing(b.sequence) > 0 {
		if inside && !s.hole && s.holes < maxHoles {
			s.count(sourceCut, 1)
			s.request()
			s.hole = true
			s.holes++
			return
		}
		s.unavailable = true // the engine has no further batches
	}
	s.count(sourceReplayed, 1)
	s.accept(b)
}

// replayEnd handles the end of the answer.
func (s *stream) replayEnd() {
	switch {
	case !s.requesting:
		return
	case s.tail && !s.answered:
		// The engine does not have the last known batch: this is another process.
		s.restart()
		s.request()
		return
	case s.rebuild && !s.answered:
		s.restart() // the engine has no batches, so the known ones belong to another process
	}
	s.requesting, s.rebuild, s.holes, s.hole = false, false, 0, false
	s.applyHeld(s.gapRequests >= maxGapRequests)
	if s.recheck {
		s.recheck = false
		s.requestAll()
	}
}

// giveUp ends a request without an answer.
func (s *stream) giveUp() {
	if s.hasLast && s.closed && !s.answered {
		s.restart()
	}
	if !s.rebuild { // it is unknown which batches the answer would have contained
		s.partial, s.suspect = s.partial || !s.hasLast, s.suspect || s.hasLast
	}
	s.requesting, s.rebuild = false, false
	s.requests++ // a late answer is ignored
	s.applyHeld(true)
}

// applyHeld applies the held batches. A gap in them is requested, unless last is set.
func (s *stream) applyHeld(last bool) {
	for i, b := range s.held {
		if s.hasLast && b.sequence <= s.last {
			s.count(sourceDuplicate, 1)
			s.heldBytes -= len(b.body)
			continue
		}
		if s.missing(b.sequence) > 0 && !last {
			s.held = s.held[i:]
			s.gapRequests++
			s.request()
			return
		}
		s.heldBytes -= len(b.body)
		s.accept(b)
	}
	s.held, s.heldBytes, s.gapRequests = nil, 0, 0
}
