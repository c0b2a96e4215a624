// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// TestStories plays the scripts in testdata/stories. Each script explains one kind of loss, and then shows it for
// several feeds. One worker publishes events; each event stores a block, which has a letter for the worker's process
// and the number of the event: b3 is event 3 of the second process. Events are numbered from 1, an engine's batches
// from 0. After each step stand what is requested, the state of the rank, and the blocks that the index holds. The steps:
//
//	begin feed=nats [asked]    the worker publishes over NATS; with asked, its local indexer is queried
//	begin feed=stream [asked]  it publishes into the stream, and is unknown until it registers
//	begin feed=engine [asked]  an engine's socket; with asked, it has a replay socket that keeps keep=… batches
//	register                   the worker's record is there
//	publish 3                  publishes events
//	lose 3                     publishes events that do not arrive
//	clear                      the engine clears its cache
//	restart                    another process of the worker begins
//	connect closed             the engine is connected again; its port was closed before
//	stream-end lost            the stream was read to its end; messages have left it before they were read
//	wait 1s                    time passes; what is requested then is shown
//	answer                     the worker answers the query with what it has
//	fail                       no answer comes to the next query, until the repair is given up
func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/stories/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d stories, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			var s *gapStory
			datadriven.RunTest(t, file, func(t *testing.T, d *datadriven.TestData) string {
				if d.Cmd == "begin" {
					s = beginStory(t, d)
				}
				s.said = nil
				s.step(t, d)
				return s.shown()
			})
		})
	}
}

// gapStory is one worker, and what is known of its cache.
type gapStory struct {
	now      time.Time
	src      events.Source
	tracker  events.Tracker
	follower *events.Follower // nil for NATS and the stream

	process uint64 // also the publisher's id
	last    uint64 // id of the last event
	keep    uint64 // batches that the engine keeps
	cleared uint64 // the last clear
	local   *localindex.Index

	holds    map[string]bool
	query    events.Query
	id, from uint64 // of the last query, 0 = none
	said     []string
}

func beginStory(t *testing.T, d *datadriven.TestData) *gapStory {
	feed, keep := "", 1<<20
	d.ScanArgs(t, "feed", &feed)
	d.MaybeScanArgs(t, "keep", &keep)
	s := &gapStory{now: start, holds: map[string]bool{}, keep: uint64(keep), process: 1, local: localindex.New()}
	s.src = events.Source{DPSize: 1, Queries: d.HasArg("asked"), Feed: events.FeedCore}
	if feed == "stream" {
		s.src.Feed = events.FeedDurable
	}
	if feed != "engine" {
		s.tracker = events.NewTracker(func(_ uint64, _ uint32, ev indexer.Event) { s.apply(ev) }).Seed(1)
		return s
	}
	s.follower = events.NewFollower(events.FollowerConfig{
		Replays: s.src.Queries, GaveUp: func() { s.say("given up") },
		Apply: func(body []byte) (cleared bool) {
			ev := s.event(binary.BigEndian.Uint64(body), binary.BigEndian.Uint64(body[8:]))
			s.apply(ev)
			return ev.Kind == indexer.Cleared
		},
		Clear: func() { s.apply(indexer.Event{Kind: indexer.Cleared}) },
		Count: func(string, int) {},
	})
	s.follower.Seed(1)
	s.follower.Connected(s.now, false)
	return s
}

func (s *gapStory) say(format string, args ...any) {
	s.said = append(s.said, fmt.Sprintf(format, args...))
}

// event returns the event with an id of a process. An engine's batch has the id minus one as its number.
func (s *gapStory) event(process, id uint64) indexer.Event {
	if id == s.cleared && process == s.process {
		return indexer.Event{Kind: indexer.Cleared}
	}
	if s.follower != nil {
		id--
	}
	return indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: process<<32 | id, Local: id}}}
}

func (s *gapStory) apply(ev indexer.Event) {
	if ev.Kind == indexer.Cleared {
		clear(s.holds)
	}
	for _, b := range ev.Blocks {
		s.holds[fmt.Sprintf("%c%06d", 'a'+b.External>>32-1, uint32(b.External))] = true
	}
}

func (s *gapStory) step(t *testing.T, d *datadriven.TestData) {
	n := 1
	if len(d.CmdArgs) > 0 {
		n, _ = strconv.Atoi(d.CmdArgs[0].Key)
	}
	switch d.Cmd {
	case "begin":
	case "register":
		s.src.StartedMS = int64(s.process)
		s.tracker.SetWorker(s.now, 7, s.src)
	case "publish", "lose":
		for range n {
			s.publish(d.Cmd == "publish")
		}
	case "clear":
		s.cleared = s.last + 1
		s.publish(true)
	case "restart":
		s.process, s.last, s.cleared, s.local = s.process+1, 0, 0, localindex.New()
	case "connect":
		s.follower.Connected(s.now, d.HasArg("closed"))
	case "stream-end":
		s.tracker.CaughtUp(s.now, d.HasArg("lost"))
	case "wait":
		by, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		s.pass(by)
	case "answer":
		s.answer()
	case "fail":
		tries := 0
		for ; s.repairing(); s.pass(6 * time.Second) {
			if s.id != 0 {
				s.fail()
				tries++
			}
		}
		s.said = append(slices.DeleteFunc(s.said, func(line string) bool { return strings.HasPrefix(line, "requests") }), fmt.Sprint(tries, " tries"))
	default:
		d.Fatalf(t, "an unknown step")
	}
}

func (s *gapStory) publish(arrives bool) {
	s.last++
	ev := events.RouterEvent{WorkerID: 7, EventID: s.last, Event: s.event(s.process, s.last)}
	s.local.Remember(s.now, ev)
	switch {
	case !arrives:
	case s.follower != nil:
		s.follower.Live(s.now, s.last-1, s.body(s.last))
	case s.src.Feed == events.FeedDurable:
		s.tracker.AcceptStream(s.now, s.process, ev)
	default:
		s.tracker.Accept(s.now, s.process, ev)
	}
}

func (s *gapStory) body(id uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, s.process), id)
}

// pass lets time pass in small steps, and sends what is due.
func (s *gapStory) pass(by time.Duration) {
	for end := s.now.Add(by); s.now.Before(end); {
		if s.now = s.now.Add(50 * time.Millisecond); s.now.After(end) {
			s.now = end
		}
		if s.follower != nil {
			if id, from, _ := s.follower.Tick(s.now); id != 0 {
				s.id, s.from = id, from
				s.say("requests the batches from %d on", from)
			}
			continue
		}
		s.tracker.Expire(s.now)
		for _, a := range s.tracker.Tick(s.now) {
			if s.id, s.query = a.ID, a.Query; a.Query.HasStart {
				s.say("requests the events from %d on", a.Query.Start)
			} else {
				s.say("requests a dump")
			}
		}
	}
}

// answer answers the last query.
func (s *gapStory) answer() {
	id := s.id
	s.id = 0
	if s.follower == nil {
		a := localAnswer(s.local, s.query)
		s.say("the answer: %v, up to event %d", a.Kind, a.LastEventID)
		s.tracker.Answer(s.now, id, s.process, a)
		return
	}
	first := s.from
	if s.last > s.keep {
		first = max(first, s.last-s.keep)
	}
	if first < s.last {
		s.say("the answer: batches %d to %d", first, s.last-1)
	} else {
		s.say("the answer: no batches")
	}
	for at := first; at < s.last; at++ {
		if !s.follower.Part(s.now, id, at, s.body(at+1)) {
			return
		}
	}
	s.follower.End(s.now, id)
}

// fail lets the last query fail.
func (s *gapStory) fail() {
	id := s.id
	s.id = 0
	switch {
	case id == 0:
	case s.follower != nil:
		s.follower.Fail(s.now, id, false)
	default:
		s.tracker.Failed(s.now, id)
	}
}

func (s *gapStory) repairing() bool {
	if s.follower != nil {
		return s.follower.Waits()
	}
	return s.tracker.Repairing(7, 0)
}

func (s *gapStory) shown() string {
	state := s.tracker.State
	if s.follower != nil {
		state = func(uint64, uint32) indexer.State { return s.follower.State() }
	}
	var line strings.Builder
	line.WriteString(string(state(7, 0)))
	if s.repairing() {
		line.WriteString(", repairing")
	}
	// The blocks, with runs of numbers as ranges.
	blocks := slices.Sorted(maps.Keys(s.holds))
	for i := 0; i < len(blocks); {
		letter, first := blocks[i][:1], blocks[i][1:]
		n, _ := strconv.Atoi(first)
		last := n
		for i++; i < len(blocks) && blocks[i] == fmt.Sprintf("%s%06d", letter, last+1); i++ {
			last++
		}
		if fmt.Fprintf(&line, " %s%d", letter, n); last > n {
			fmt.Fprintf(&line, "-%d", last)
		}
	}
	return strings.Join(append(s.said, line.String()), "\n") + "\n"
}
