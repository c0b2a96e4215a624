// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/wire"
)

// savedEngine is a record of a file in --state-dir about a rank of an engine. Its events build the rank's blocks.
type savedEngine struct {
	Worker           uint64
	Rank             uint32
	Started          int64
	Options          EngineOptions
	Last, Digest     uint64
	Partial, Suspect bool
	Events           []indexer.Event
	Orphans          int
}

// storedBlocks returns an event of an engine's rank 1.
func storedBlocks(ev EngineEvent) EngineEvent {
	ev.Kind, ev.Rank, ev.HasRank, ev.Usable = EngineStored, 1, true, len(ev.Hashes)
	return ev
}

func readEngine(data []byte) (out savedEngine, err error) {
	s, err := NewSources(SourcesConfig{})
	if err == nil {
		_, err = s.Load(bytes.NewReader(data))
	}
	for _, r := range s.saved {
		out = savedEngine{Worker: r.Worker, Rank: r.Rank, Started: r.Started, Options: r.Options, Last: r.Last, Digest: r.Digest, Partial: r.Partial, Suspect: r.Suspect}
		e := NewEngine(r.Options)
		var evs []events.RouterEvent
		evs, out.Orphans = e.restore(r.Ranks)
		// The half of a block is there, too: the other half makes a block of them.
		last, _ := e.Apply(&EngineBatch{Events: []EngineEvent{storedBlocks(EngineEvent{BlockSize: 2, Hashes: []uint64{302}, Parent: 301, HasParent: true, Tokens: []uint32{3, 4}, Tier: indexer.Disk})}})
		for _, ev := range append(evs, last...) {
			if ev.Event.Kind != indexer.Shaped { // the engine sends the shape of its blocks again
				out.Events = append(out.Events, ev.Event)
			}
		}
	}
	return out, err
}

// Later versions read the file of engines' states that this version writes, and this version that of 0.1.0.
func TestGoldenEngineState(t *testing.T) {
	opt := EngineOptions{BlockSize: 4, Rank: 1, Placeholder: 9, SetLike: true, MaxBlocks: 1000}
	e := NewEngine(opt)
	_, drops := e.Apply(&EngineBatch{Events: []EngineEvent{
		storedBlocks(EngineEvent{BlockSize: 4, Hashes: []uint64{101, 102}, Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8}}),
		storedBlocks(EngineEvent{BlockSize: 4, Hashes: []uint64{103}, Parent: 102, HasParent: true, Tokens: []uint32{1, 2, 3, 4}, Tier: indexer.HostPinned}),
		storedBlocks(EngineEvent{BlockSize: 8, Hashes: []uint64{201}, Tokens: []uint32{8, 7, 6, 5, 4, 3, 2, 1}}),
		storedBlocks(EngineEvent{BlockSize: 2, Hashes: []uint64{301}, Tokens: []uint32{1, 2}, Tier: indexer.Disk}),
	}})
	if drops != (Drops{}) {
		t.Fatalf("%+v is dropped", drops)
	}
	state := savedRank{Worker: 7, Rank: 1, Started: 1755000000500, Options: opt, Last: 42, Digest: 0xCB38E4D7FB2DCA5C, Partial: true, Suspect: true, Ranks: e.save()}
	var file bytes.Buffer
	if _, err := saved.Write(&file, wire.Scope{}, &events.Snapshot{
		Created: time.UnixMilli(1755000000500), Owners: slices.Values([]*events.Owner{state.owner()}),
	}); err != nil {
		t.Fatal(err)
	}
	want := savedEngine{
		Worker: 7, Rank: 1, Started: 1755000000500, Options: opt, Last: 42, Digest: 0xCB38E4D7FB2DCA5C, Partial: true, Suspect: true,
		Events: []indexer.Event{
			{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 101, Local: 14643705804678351452}, {External: 102, Local: 16777012769546811212}}},
			{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 931267526893756734, Local: 18123032617999666275}, {External: 201, Local: 2650602268797155303}}},
			{Kind: indexer.Stored, Tier: indexer.HostPinned, Parent: 102, HasParent: true, Blocks: []indexer.Block{{External: 103, Local: 14643705804678351452}}},
			{Kind: indexer.Stored, Tier: indexer.Disk, Blocks: []indexer.Block{{External: 302, Local: 14643705804678351452}}},
		},
	}
	fixtures.Golden(t, "0.2.0/sources.bin", file.Bytes(), readEngine, want)
	// Version 0.1.0 wrote a gob stream.
	fixtures.Golden(t, "0.1.0/sources.bin", nil, readEngine, want)
}
