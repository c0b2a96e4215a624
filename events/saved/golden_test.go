// SPDX-License-Identifier: Apache-2.0

package saved_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/wire"
)

var (
	goldenStored = events.RouterEvent{WorkerID: 7, DPRank: 1, EventID: 41, Event: indexer.Event{Kind: indexer.Stored, Parent: 100, HasParent: true, Blocks: []indexer.Block{{External: 101, Local: 1<<64 - 1}, {External: 1 << 63, Local: 5}}}}
	goldenRoot   = events.RouterEvent{WorkerID: 7, EventID: 1, Event: indexer.Event{Kind: indexer.Stored, Tier: indexer.HostPinned, Blocks: []indexer.Block{{External: 1, Local: 2}}}}
)

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
	if _, err := saved.Write(&file, scope, s); err != nil {
		t.Fatal(err)
	}
	s.Runs = nil
	read := func(data []byte) (out snapshotAndRuns, err error) {
		in, runs, err := readAll(data, scope)
		if err == nil {
			in.Runs, in.Owners = nil, nil
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
