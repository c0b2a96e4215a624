// SPDX-License-Identifier: Apache-2.0

package slots_test

import (
	"math"
	"testing"

	"github.com/kvroute/kvroute/slots"
)

// An output without reports grows by time from the first token on; a reported output has
// the reported length.
func TestOutputsGrowByTime(t *testing.T) {
	var s slots.Table
	book := slots.Booking{Blocks: []uint64{1}, PromptTokens: 30, BlockSize: 16}
	s.Add(at(0), "a", &book)
	grow := func(seconds float64, wantBlocks, wantTokens int) {
		t.Helper()
		s.Grow(at(seconds), 0, 10)
		if l := s.Load(0); l.Blocks != wantBlocks || l.DecodeTokens != wantTokens {
			t.Errorf("after %v s: %d blocks, %d tokens; want %d, %d", seconds, l.Blocks, l.DecodeTokens, wantBlocks, wantTokens)
		}
	}
	grow(5, 1, 0) // no token yet
	s.MarkPrefillCompleted(at(6), "a")
	grow(6.2, 1, 32) // two tokens fill the block that the prompt began
	grow(6.3, 2, 33)
	grow(6.3, 2, 33)
	grow(6.1, 2, 33) // an earlier time changes nothing
	grow(7.9, 3, 49)
	s.Grow(at(9), 1, 10) // on another worker
	s.Grow(at(9), -1, 10)
	if !s.AddOutputTokens(at(9), "a", 0) {
		t.Error("reported output of a request in flight has no effect")
	}
	grow(8, 3, 50) // no output was reported
	s.AddOutputTokens(at(9), "a", 3)
	grow(99, 2, 33)
	if got := s.OutputRate(0); got != 1 {
		t.Errorf("3 tokens in 3 s are %v a second, want 1", got)
	}

	// The output does not exceed its expected length.
	short := book
	short.ExpectedOutput, short.Worker = 7, 1
	s.Add(at(100), "b", &short)
	s.MarkPrefillCompleted(at(100), "b")
	s.Grow(at(200), 1, 10)
	if l := s.Load(1); l.DecodeTokens != 37 {
		t.Errorf("%d tokens, want 30 of the prompt and the 7 that are expected", l.DecodeTokens)
	}
	s.Free("a")
	s.Free("b")
	if left := s.Left(); left != 0 {
		t.Errorf("%d things are left", left)
	}
}

func TestTheRateOfAWorkerIsLearned(t *testing.T) {
	var s slots.Table
	if got := s.OutputRate(3); got != 0 {
		t.Errorf("rate %v of an unknown worker", got)
	}
	tell := func(id string, tokens int, seconds float64) {
		s.Add(at(0), id, &slots.Booking{Worker: 3, PromptTokens: 1, BlockSize: 16})
		s.MarkPrefillCompleted(at(1), id)
		s.AddOutputTokens(at(1+seconds), id, tokens)
		s.Free(id)
	}
	tell("short", 50, .5)
	if got := s.OutputRate(3); got != 0 {
		t.Errorf("an output of half a second gives rate %v", got)
	}
	tell("first", 60, 2)
	if got := s.OutputRate(3); got != 30 {
		t.Errorf("rate %v, want 30", got)
	}
	for range 200 {
		tell("more", 100, 2)
	}
	if got := s.OutputRate(3); math.Abs(got-50) > .1 {
		t.Errorf("rate %v, want 50 after many of them", got)
	}
	s.RemoveWorker(3)
	if got := s.OutputRate(3); got != 0 {
		t.Errorf("the next worker inherits %v", got)
	}
}

// The length of the whole output replaces estimates, and what was reported before.
func TestReportedOutput(t *testing.T) {
	for _, before := range []func(*slots.Table){
		func(*slots.Table) {},
		func(s *slots.Table) { s.Grow(at(2), 0, 30) },
		func(s *slots.Table) { s.AddOutputTokens(at(2), "a", 25) },
	} {
		var s slots.Table
		s.Add(at(0), "a", &slots.Booking{PromptTokens: 10})
		s.MarkPrefillCompleted(at(1), "a")
		before(&s)
		if !s.ReportOutput(at(3), "a", 40) || s.ReportOutput(at(3), "b", 40) {
			t.Error("a has a slot, and b has none")
		}
		if l := s.Load(0); l.DecodeTokens != 50 {
			t.Errorf("%d tokens, want 10 of the prompt and 40", l.DecodeTokens)
		}
		if e := s.Finish(at(4), "a"); e != (slots.Ended{Existed: true, Started: true, OutputTokens: 40}) {
			t.Errorf("the request ended with %+v", e)
		}
	}
}
