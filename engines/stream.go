// SPDX-License-Identifier: Apache-2.0

package engines

import "github.com/zeebo/xxh3"

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
//   - While an answer is expected, live batches wait: at most maxWaitingBatches
//     with at most maxWaitingBytes.
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
	asking   asking
	asks     int  // number of requests so far; answers to older requests are ignored
	rebuild  bool // an answer from 0 replaces the known blocks
	answered bool // the answer had a requested batch
	again    int  // requests since the stream was last in order
	holes    int  // requests since then because of a gap inside an answer
	hole     bool // the last of them began at the batch that is still the last

	waiting      []batch
	waitingBytes int

	partial  bool // batches before the first applied one are missing: blocks are unknown
	suspect  bool // batches in between are missing: known blocks may be gone
	review   bool // request everything after the next answer, if possible
	hopeless bool // the engine no longer has the missing batches: none is requested again until a clear or a restart
}

// batch is a message of an engine.
type batch struct {
	sequence uint64
	body     []byte
}

type asking uint8

const (
	askNothing asking = iota
	askTail           // from the last known batch
	askAll            // from 0
)

const (
	maxWaitingBatches = 4096
	maxWaitingBytes   = 64 << 20
	// maxAgain limits the requests for a gap that an answer did not fill.
	maxAgain = 2
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
	s.waiting, s.waitingBytes = nil, 0
	switch {
	case s.replays:
		s.again, s.holes, s.hole, s.rebuild = 0, 0, false, false
		s.ask()
	case closed && s.hasLast:
		s.restart()
	}
}

// ask schedules a request: for the batches after the last one, or for all.
func (s *stream) ask() {
	s.asking, s.answered = askAll, false
	if s.hasLast && !s.rebuild {
		s.asking = askTail
	}
	s.asks++
}

// askAgain schedules a request for later batches, unless a request is under way.
func (s *stream) askAgain() {
	if s.replays && s.asking == askNothing {
		s.ask()
	}
}

// begin is called each time that the request is sent. It returns the first requested sequence.
func (s *stream) begin() (from uint64) {
	s.answered = false
	if s.hasLast && !s.rebuild {
		s.asking = askTail
	}
	return s.from()
}

// from returns the sequence at which a request would start now.
func (s *stream) from() uint64 {
	if s.hasLast && !s.rebuild {
		return s.last
	}
	return 0
}

// tryAll requests all batches, to replace suspect state.
func (s *stream) tryAll() {
	if (s.suspect || s.partial) && s.replays && !s.hopeless && s.asking == askNothing {
		s.rebuild, s.again = true, 0
		s.ask()
	}
}

// restart forgets the batches of the previous process.
func (s *stream) restart() {
	s.count(sourceRestart, 1)
	s.forget()
	s.clear()
}

func (s *stream) forget() {
	s.hasLast, s.hadBefore, s.closed, s.rebuild, s.asking = false, false, false, false, askNothing
	s.holes, s.hole = 0, false
	s.whole()
}

// whole marks the stream as complete.
func (s *stream) whole() { s.partial, s.suspect, s.hopeless = false, false, false }

// fromLive handles a batch that the engine has just published.
func (s *stream) fromLive(b batch) {
	switch {
	case !s.fresh && b.sequence <= s.live, s.fresh && s.hadBefore && b.sequence <= s.before:
		s.waiting, s.waitingBytes = nil, 0 // batches of the old process
		s.restart()
	}
	s.fresh, s.live = false, b.sequence
	switch {
	case s.asking != askNothing:
		s.wait(b)
	case s.hasLast && b.sequence <= s.last:
		s.count(sourceDuplicate, 1)
	case s.missing(b.sequence) == 0 || !s.replays:
		s.take(b)
	default:
		s.count(sourceGap, 1)
		s.wait(b)
		s.again = 0
		s.ask()
	}
}

func (s *stream) wait(b batch) {
	s.waiting = append(s.waiting, b)
	if s.waitingBytes += len(b.body); len(s.waiting) > maxWaitingBatches || s.waitingBytes > maxWaitingBytes {
		s.count(sourceOverflow, 1)
		s.giveUp()
	}
}

// take applies a batch. Batches missing before it are lost.
func (s *stream) take(b batch) {
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
	case s.asking == askTail && b.sequence == s.last && !s.answered:
		s.answered, s.closed = true, false
		if xxh3.Hash(b.body) != s.digest {
			s.restart()
			s.ask()
		}
		return
	case s.asking == askTail && b.sequence > s.last && !s.answered && s.closed:
		// The last known batch is missing from the answer and the port was closed: this is another
		// process.
		s.restart()
		s.ask()
		return
	case s.rebuild && b.sequence > 0 && !s.answered:
		// The engine no longer has the first missing batches; keep the known blocks.
		s.hopeless = true
		s.giveUp()
		return
	case s.rebuild && !s.answered:
		s.forget()
		s.asking = askAll
		s.clear()
	case s.asking == askNothing || s.hasLast && b.sequence <= s.last:
		return
	}
	inside := s.answered
	s.answered, s.closed = true, false
	if s.missing(b.sequence) > 0 {
		if inside && !s.hole && s.holes < maxHoles {
			s.count(sourceCut, 1)
			s.ask()
			s.hole = true
			s.holes++
			return
		}
		s.hopeless = true // the engine has no further batches
	}
	s.count(sourceReplayed, 1)
	s.take(b)
}

// replayEnd handles the end of the answer.
func (s *stream) replayEnd() {
	switch {
	case s.asking == askNothing:
		return
	case s.asking == askTail && !s.answered:
		// The engine does not have the last known batch: this is another process.
		s.restart()
		s.ask()
		return
	case s.rebuild && !s.answered:
		s.restart() // the engine has no batches, so the known ones belong to another process
	}
	s.asking, s.rebuild, s.holes, s.hole = askNothing, false, 0, false
	s.drain(s.again >= maxAgain)
	if s.review {
		s.review = false
		s.tryAll()
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
	s.asking, s.rebuild = askNothing, false
	s.asks++ // a late answer is ignored
	s.drain(true)
}

// drain applies the waiting batches. A gap in them is requested, unless last is set.
func (s *stream) drain(last bool) {
	for i, b := range s.waiting {
		if s.hasLast && b.sequence <= s.last {
			s.count(sourceDuplicate, 1)
			s.waitingBytes -= len(b.body)
			continue
		}
		if s.missing(b.sequence) > 0 && !last {
			s.waiting = s.waiting[i:]
			s.again++
			s.ask()
			return
		}
		s.waitingBytes -= len(b.body)
		s.take(b)
	}
	s.waiting, s.waitingBytes, s.again = nil, 0, 0
}
