// SPDX-License-Identifier: Apache-2.0

package engines

import "github.com/zeebo/xxh3"

// stream puts the batches of one engine's socket in order: the live ones, and
// those that the engine sends again when it is asked. It is a source without
// sockets, clock and goroutine.
//
// Engines number batches from 0 in each process, and say nothing when a process
// ends. Three things tell of a new one: a live number that is not above the one
// before it on its connection, or not above what was known when the connection
// began; an answer that begins with the last batch known, which is another one
// now; and an answer without it. That is why questions begin with the last batch
// that is known, not the one behind it.
//
// A long answer may lack batches that the engine has: its socket drops what does not
// fit into its queue. What is missing inside of an answer is therefore asked for once
// more, from the last batch known on; what is missing again is gone.
//
// # Invariants
//
//   - What is applied between two clears is a subsequence of what one process
//     published, in order, none twice.
//   - Nothing is missing between them unless the stream is suspect, and nothing
//     before them unless it is partial.
//   - While an answer is due live batches wait, at most maxWaitingBatches of
//     at most maxWaitingBytes.
type stream struct {
	replays bool // the engine can be asked
	// apply takes a batch and says whether the engine cleared its cache in it.
	apply func(body []byte) (cleared bool)
	clear func()
	count func(outcome string, n int)

	// What was applied last, if anything since the last clear.
	heard  bool
	last   uint64
	digest uint64

	// The connection.
	fresh     bool   // nothing came over it yet
	before    uint64 // the last sequence when it began, if hadBefore
	hadBefore bool
	live      uint64 // the newest that came over it
	closed    bool   // before it the port was closed, and no answer told more yet

	// The question to the engine.
	asking   asking
	asks     int  // questions so far; answers to others than the newest mean nothing
	rebuild  bool // an answer from 0 replaces what is known
	answered bool // the answer had what was asked for
	again    int  // questions since the stream was last in order
	holes    int  // questions since then for what was missing inside of an answer
	hole     bool // the newest of them was put behind the batch that is still the last

	waiting      []batch
	waitingBytes int

	partial  bool // it began before we heard of it: blocks are unknown
	suspect  bool // something is missing in between: blocks may be wrongly known
	review   bool // everything is to be asked for behind the next answer, if that can be
	hopeless bool // and the engine does not have it any more
}

// batch is a message of an engine.
type batch struct {
	sequence uint64
	body     []byte
}

type asking uint8

const (
	askNothing asking = iota
	askTail           // from the last one known
	askAll            // from 0
)

const (
	maxWaitingBatches = 4096
	maxWaitingBytes   = 64 << 20
	// maxAgain is how often a hole that an answer did not fill is asked for.
	maxAgain = 2
	// maxHoles is how often something may be missing inside of an answer before the
	// engine is believed not to have it. An engine's queue of 1,000 loses something of
	// its 10,000 batches ten times at most.
	maxHoles = 50
)

func newStream(replays bool, apply func([]byte) bool, wipe func(), count func(string, int)) *stream {
	return &stream{replays: replays, apply: apply, clear: wipe, count: count}
}

// missing returns how many batches are missing before one of a sequence.
func (s *stream) missing(sequence uint64) uint64 {
	if !s.heard {
		return sequence
	}
	return sequence - s.last - 1
}

// connected begins a new connection. closed says that the engine's port was seen
// closed since the one before.
func (s *stream) connected(closed bool) {
	s.fresh, s.before, s.hadBefore = true, s.last, s.heard
	s.closed = s.heard && (closed || s.closed && s.replays)
	// If the answer does not bring them again, they are missing.
	s.waiting, s.waitingBytes = nil, 0
	switch {
	case s.replays:
		s.again, s.holes, s.hole = 0, 0, false
		s.ask()
	case closed && s.heard:
		s.restart()
	}
}

// ask wants an answer: what follows the last batch, or everything.
func (s *stream) ask() {
	s.asking, s.answered = askAll, false
	if s.heard && !s.rebuild {
		s.asking = askTail
	}
	s.asks++
}

// askAgain asks what follows, unless a question is out.
func (s *stream) askAgain() {
	if s.replays && s.asking == askNothing {
		s.ask()
	}
}

// begin is called when the question goes out, each time that it does. It returns
// the sequence from which on batches are wanted.
func (s *stream) begin() (from uint64) {
	s.answered = false
	if s.heard && !s.rebuild {
		s.asking = askTail
	}
	return s.from()
}

// from is the sequence from which on batches would be wanted now.
func (s *stream) from() uint64 {
	if s.heard && !s.rebuild {
		return s.last
	}
	return 0
}

// tryAll asks for everything, to replace what is suspect.
func (s *stream) tryAll() {
	if (s.suspect || s.partial) && s.replays && !s.hopeless && s.asking == askNothing {
		s.rebuild, s.again = true, 0
		s.ask()
	}
}

// restart forgets what the process before published.
func (s *stream) restart() {
	s.count(sourceRestart, 1)
	s.forget()
	s.clear()
}

func (s *stream) forget() {
	s.heard, s.hadBefore, s.closed, s.rebuild, s.asking = false, false, false, false, askNothing
	s.holes, s.hole = 0, false
	s.whole()
}

// whole says that nothing that matters is missing any more.
func (s *stream) whole() { s.partial, s.suspect, s.hopeless = false, false, false }

// fromLive takes a batch that the engine published just now.
func (s *stream) fromLive(b batch) {
	switch {
	case !s.fresh && b.sequence <= s.live, s.fresh && s.hadBefore && b.sequence <= s.before:
		s.waiting, s.waitingBytes = nil, 0 // the old process's
		s.restart()
	}
	s.fresh, s.live = false, b.sequence
	switch {
	case s.asking != askNothing:
		s.wait(b)
	case s.heard && b.sequence <= s.last:
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

// take applies a batch; what is missing before it is lost.
func (s *stream) take(b batch) {
	if n := s.missing(b.sequence); n > 0 {
		s.count(sourceLost, int(min(n, 1<<30)))
		s.partial, s.suspect = s.partial || !s.heard, s.suspect || s.heard
	}
	s.heard, s.last, s.digest, s.hole = true, b.sequence, xxh3.Hash(b.body), false
	if s.apply(b.body) {
		s.whole()
	}
}

// fromReplay takes a batch of the answer.
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
		// The last batch is gone, so is the port as it was: another process.
		s.restart()
		s.ask()
		return
	case s.rebuild && b.sequence > 0 && !s.answered:
		// The beginning is gone for good; keep what we have.
		s.hopeless = true
		s.giveUp()
		return
	case s.rebuild && !s.answered:
		s.forget()
		s.asking = askAll
		s.clear()
	case s.asking == askNothing || s.heard && b.sequence <= s.last:
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
		s.hopeless = true // the engine has no more of it
	}
	s.count(sourceReplayed, 1)
	s.take(b)
}

// replayEnd ends the answer.
func (s *stream) replayEnd() {
	switch {
	case s.asking == askNothing:
		return
	case s.asking == askTail && !s.answered:
		// The engine does not know its own last batch: it is another process.
		s.restart()
		s.ask()
		return
	case s.rebuild && !s.answered:
		s.restart() // it has nothing, so what we know is another's
	}
	s.asking, s.rebuild, s.holes, s.hole = askNothing, false, 0, false
	s.drain(s.again >= maxAgain)
	if s.review {
		s.review = false
		s.tryAll()
	}
}

// giveUp ends a question without an answer.
func (s *stream) giveUp() {
	if s.heard && s.closed && !s.answered {
		s.restart()
	}
	// Nobody knows what the answer would have been.
	s.partial, s.suspect = s.partial || !s.heard, s.suspect || s.heard
	s.asking, s.rebuild = askNothing, false
	s.asks++ // a late answer means nothing
	s.drain(true)
}

// drain applies what waits. A hole in it is asked for, unless this is the last try.
func (s *stream) drain(last bool) {
	for i, b := range s.waiting {
		if s.heard && b.sequence <= s.last {
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
