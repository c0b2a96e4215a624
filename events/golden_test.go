// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// Events of all kinds and tiers.
var (
	goldenStored  = events.RouterEvent{WorkerID: 7, DPRank: 1, EventID: 41, Event: indexer.Event{Kind: indexer.Stored, Parent: 100, HasParent: true, Blocks: []indexer.Block{{External: 101, Local: 1<<64 - 1}, {External: 1 << 63, Local: 5}}}}
	goldenRoot    = events.RouterEvent{WorkerID: 7, EventID: 1, Event: indexer.Event{Kind: indexer.Stored, Tier: indexer.HostPinned, Blocks: []indexer.Block{{External: 1, Local: 2}}}}
	goldenRemoved = events.RouterEvent{WorkerID: 7, DPRank: 1, EventID: 42, Event: indexer.Event{Kind: indexer.Removed, Tier: indexer.Disk, Externals: []uint64{101, 1 << 63}}}
	goldenCleared = events.RouterEvent{WorkerID: 7, EventID: 2, Event: indexer.Event{Kind: indexer.Cleared, Tier: indexer.External}}
	goldenEvents  = []events.RouterEvent{goldenRoot, goldenCleared, goldenStored, goldenRemoved}
)

// inside makes f of the bytes behind a head, such as those of the map in a map.
func inside(head string, f func([]byte) []byte) func([]byte) []byte {
	return func(data []byte) []byte {
		at := bytes.Index(data, []byte(head))
		if at < 0 {
			return nil
		}
		at += len(head)
		return append(slices.Clone(data[:at]), f(data[at:])...)
	}
}

// Later versions read the messages of workers and routers that version 0.1.0 writes. This version ignores keys that
// it does not know.
func TestGoldenMessages(t *testing.T) {
	envelope := events.Envelope{PublisherID: 4660, Sequence: 3, PublishedAt: 1755000000500, Topic: events.Topic}
	full := envelope
	full.Payload = events.AppendEvents(nil, goldenEvents)
	fixtures.Golden(t, "0.1.0/kv-events.bin", events.AppendEnvelope(nil, full), events.DecodeMessage, events.Message{Envelope: envelope, Events: goldenEvents}, fixtures.Later)
	list := func(data []byte) (evs []events.RouterEvent, err error) {
		evs, _, err = events.DecodeEvents(data)
		return evs, err
	}
	// Keys in an event, in its inner map, in the map of its kind and in a block; and an event of another kind in another
	// tier.
	one := full.Payload
	fixtures.Golden(t, "0.1.0/events.bin", one, list, goldenEvents, inside("\x94", fixtures.Later), inside("\xa5event", fixtures.Later),
		inside("\xa4data", fixtures.Later), inside("\xa6stored", fixtures.Later), inside("\xa6blocks\x91", fixtures.Later), inside("\xa7removed", fixtures.Later),
		func(data []byte) []byte {
			other := bytes.Replace(events.AppendEvents(nil, goldenEvents[:1])[1:], []byte("host_pinned"), []byte("another_one"), 1)
			return append(append([]byte{0x95}, other...), data[1:]...)
		})

	used := events.UsedBlocks{WorkerID: 7, DPRank: 1, Blocks: 300}
	readUsed := func(data []byte) (u events.UsedBlocks, err error) {
		u, present, err := events.ReadUsedBlocks(data)
		if !present {
			err = errors.Join(err, errors.New("no load is present"))
		}
		return u, err
	}
	fixtures.Golden(t, "0.1.0/load.bin", events.AppendUsedBlocks(nil, 7, 1, 300), readUsed, used, fixtures.Later)

	query := events.Query{WorkerID: 7, DPRank: 1, HasStart: true, Start: 41, End: 44, Kind: events.RecoveryKind}
	fixtures.Golden(t, "0.1.0/query.bin", events.AppendQuery(nil, query), events.DecodeQuery, query, fixtures.Later)
	whole := events.Query{WorkerID: 7, Kind: events.RecoveryKind}
	fixtures.Golden(t, "0.1.0/query-dump.bin", events.AppendQuery(nil, whole), events.DecodeQuery, whole, fixtures.Later)

	for file, c := range map[string]struct {
		key  string
		want events.Answer
	}{
		"answer-events":        {"\xa6Events", events.Answer{Kind: events.AnswerEvents, Events: goldenEvents[2:], LastEventID: 42}},
		"answer-dump":          {"\xa8TreeDump", events.Answer{Kind: events.AnswerDump, Events: goldenEvents[:1], LastEventID: 42}},
		"answer-dump-failed":   {"\xaeTreeDumpFailed", events.Answer{Kind: events.AnswerDumpFailed, LastEventID: 42, Message: "no memory"}},
		"answer-too-new":       {"\xa6TooNew", events.Answer{Kind: events.AnswerTooNew, LastEventID: 42, Start: 50, End: 60}},
		"answer-invalid-range": {"\xacInvalidRange", events.Answer{Kind: events.AnswerInvalidRange, Start: 9, End: 8}},
	} {
		fixtures.Golden(t, "0.1.0/"+file+".bin", events.AppendAnswer(nil, &c.want), events.DecodeAnswer, c.want, inside(c.key, fixtures.Later))
	}
	failed := events.Answer{Message: "not this worker"}
	fixtures.Golden(t, "0.1.0/answer-error.bin", events.AppendAnswer(nil, &failed), events.DecodeAnswer, failed)
}
