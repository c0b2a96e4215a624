// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/wire"
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

// goldenState is a snapshot with records of all types, and its runs.
func goldenState() (*events.Snapshot, []run) {
	many := indexer.Run{ID: 1, Local: []uint64{11, 12}, Holders: []indexer.Holder{
		{Externals: []uint64{101, 102}}, {Worker: 1, Tier: indexer.Disk, Start: 1, Externals: []uint64{1 << 63}},
	}}
	return &events.Snapshot{
		Created: time.UnixMilli(1755000000500), LastSeq: 42,
		Meta: events.SnapshotMeta{
			Writer: "replica-a", Epoch: 2, Stream: 1755000000000000000, Inherited: true,
			Pools: []events.SnapshotPool{{Model: "llama", BlockSize: 16}, {Model: "qwen", BlockSize: 32}},
		},
		Ranks:   []events.RankName{{WorkerID: 7}, {WorkerID: 1 << 52, DPRank: 3}},
		Workers: []events.SnapshotWorker{{ID: 7, StartedMS: 1754999999000, Home: "jetstream", Info: json.RawMessage(`{"ID":7}`)}},
		Cursors: []events.Cursor{{RankName: events.RankName{WorkerID: 7}, PublisherID: 4660, EventID: 40}, {RankName: events.RankName{WorkerID: 1 << 52, DPRank: 3}, PublisherID: 4661, EventID: 1}},
		Waiting: []events.Waiting{{PublisherID: 4662, Event: goldenRoot}},
		Parked:  []events.RouterEvent{goldenStored},
		States:  []events.RankState{{RankName: events.RankName{WorkerID: 7}, State: indexer.StatePartial, Missed: time.UnixMilli(1754999999500)}, {RankName: events.RankName{WorkerID: 1 << 52, DPRank: 3}, State: indexer.StateSuspect, Missed: time.UnixMilli(1754999999600)}},
	}, []run{{0, many}, {0, indexer.Run{ID: 2, Parent: 1, Local: []uint64{13}, Holders: []indexer.Holder{{Externals: []uint64{103}}}}}, {1, indexer.Run{ID: 1, Local: []uint64{21}, Holders: []indexer.Holder{{Worker: 1, Externals: []uint64{201}}}}}}
}

type snapshotAndRuns struct {
	Snapshot events.Snapshot
	Runs     []run
}

// Later versions read the snapshots of version 0.1.0, in the object store and in --state-dir. This version skips
// records of types, and keys of JSON, that it does not know.
func TestGoldenState(t *testing.T) {
	scope := wire.Scope{Namespace: "prod", Component: "llama", Endpoint: "chat"}
	s, runs := goldenState()
	s.Runs = runsOf(runs...)
	var file bytes.Buffer
	if _, err := events.WriteSnapshot(&file, scope, s); err != nil {
		t.Fatal(err)
	}
	s.Runs = nil
	read := func(data []byte) (out snapshotAndRuns, err error) {
		in, runs, err := readAll(data, scope)
		if err == nil {
			in.Runs = nil
			out = snapshotAndRuns{*in, runs}
		}
		return out, err
	}
	later := func(data []byte) []byte {
		in, h, err := records.NewReader(bytes.NewReader(data), "KVRSNAP2", 1)
		if err != nil {
			t.Fatal(err)
		}
		var file bytes.Buffer
		out := records.NewWriter(&file, *h)
		write := func(kind byte, payload []byte) {
			if err := out.Record(kind, func(b []byte) []byte { return append(b, payload...) }); err != nil {
				t.Fatal(err)
			}
		}
		for {
			kind, payload, err := in.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if payload[0] == '{' {
				payload = fixtures.Later(payload)
			}
			write(200, []byte("of a type that no version knows"))
			write(kind, payload)
		}
		if err := out.Close(in.Count()); err != nil {
			t.Fatal(err)
		}
		return file.Bytes()
	}
	fixtures.Golden(t, "0.1.0/snapshot.bin", file.Bytes(), read, snapshotAndRuns{*s, runs}, later)
}
