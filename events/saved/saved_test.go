// SPDX-License-Identifier: Apache-2.0

package saved_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// goldenSnapshot is a file as the protocol defines it: block size 4, position 42, one rank (of
// worker 7), one cursor, one node of two blocks.
const goldenSnapshot = "4b5652534e41503201000000f4cf269e980100002a0000000000000039050000000000003e2d3384ac7198b1000000000000000000000000" +
	"00000000978d5e1f01280000007b22706f6f6c73223a5b7b226d6f64656c223a226d222c22626c6f636b5f73697a65223a347d5d7d452e9a" +
	"bc020200000007007b5ad9ca03050000000700b424015044397e06010000000092844206042600000000025cca2dfbd7e438cb4cb707b939" +
	"ecd3e800000002650000000000000066000000000000007301bbc9ff180000000500000000000000010000000000000097ea3ab4ae4810df" +
	"9ca18451"

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func stored(worker, id uint64) events.RouterEvent {
	return events.RouterEvent{WorkerID: worker, EventID: id, Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: id, Local: id}}}}
}

func goldenContent() *events.Snapshot {
	return &events.Snapshot{
		Created: time.UnixMilli(1755000000500), LastSeq: 42,
		Meta:    events.SnapshotMeta{Pools: []events.SnapshotPool{{Model: "m", BlockSize: 4}}},
		Ranks:   []events.RankName{{WorkerID: 7}},
		Cursors: []events.Cursor{{RankName: events.RankName{WorkerID: 7}, PublisherID: 4660, EventID: 1}},
		Runs: runsOf(run{0, indexer.Run{
			ID: 1, Local: []uint64{14643705804678351452, 16777012769546811212},
			Holders: []indexer.Holder{{Externals: []uint64{101, 102}}},
		}}),
	}
}

type run struct {
	Pool int
	Run  indexer.Run
}

func runsOf(runs ...run) iter.Seq2[int, indexer.Run] {
	return func(yield func(int, indexer.Run) bool) {
		for _, r := range runs {
			if !yield(r.Pool, r.Run) {
				return
			}
		}
	}
}

// readAll reads a complete snapshot, and its runs.
func readAll(data []byte, scope wire.Scope) (*events.Snapshot, []run, error) {
	s, whole, err := saved.Read(bytes.NewReader(data), scope)
	if err != nil {
		return nil, nil, err
	}
	var runs []run
	for p, r := range s.Runs {
		r.Local = slices.Clone(r.Local)
		r.Holders = slices.Clone(r.Holders)
		for i := range r.Holders {
			r.Holders[i].Externals = slices.Clone(r.Holders[i].Externals)
		}
		runs = append(runs, run{p, r})
	}
	_, err = ownersOf(s, whole)
	return s, runs, err
}

// ownedBlock is a block of an owner, at its place.
type ownedBlock struct {
	At    events.Place
	Block events.OwnedBlock
}

// ownersOf reads the owners of a snapshot whose runs are read, and their blocks.
func ownersOf(s *events.Snapshot, whole func() error) (owners [][]ownedBlock, err error) {
	for o := range s.Owners {
		blocks := []ownedBlock{{Block: events.OwnedBlock{ID: uint64(len(o.Events)), Parts: []uint64{uint64(len(o.Info))}}}}
		for at, b := range o.Blocks {
			blocks = append(blocks, ownedBlock{at, *b})
		}
		owners = append(owners, blocks)
	}
	return owners, whole()
}

// randomOwners returns owners with blocks of all forms.
func randomOwners(rng *rand.Rand) (owners []*events.Owner, want [][]ownedBlock) {
	for range rng.IntN(4) {
		o := &events.Owner{Info: json.RawMessage(fmt.Sprintf(`{"Worker":%d}`, rng.Uint64()))}
		shape := &indexer.Shape{Block: 16, Full: 32, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsWindow, Block: 8, Tokens: 64}}}
		for range rng.IntN(3) {
			o.Events = append(o.Events, events.RouterEvent{WorkerID: 7, DPRank: 1, Event: indexer.Event{Kind: indexer.SideStored, Group: 1, Shape: shape, Externals: []uint64{rng.Uint64(), 1}}})
		}
		blocks := []ownedBlock{{Block: events.OwnedBlock{ID: uint64(len(o.Events)), Parts: []uint64{uint64(len(o.Info))}}}}
		for range rng.IntN(3) {
			at := events.Place{DPRank: rng.Uint32(), Tier: indexer.Tier(rng.IntN(4)), Group: rng.IntN(256)}
			for range rng.IntN(2000) {
				b := events.OwnedBlock{
					ID: rng.Uint64(), Local: rng.Uint64(), Seed: rng.Uint64(), Parent: rng.Uint64(), Copies: 1 + rng.Uint32N(1<<32-1),
					HasParent: rng.IntN(2) > 0, Published: rng.IntN(2) > 0,
				}
				switch rng.IntN(4) {
				case 0:
					b.Part, b.Tokens, b.Parts = true, []uint32{rng.Uint32(), 3}, []uint64{rng.Uint64()}
				case 1:
					b.Locals = []uint64{rng.Uint64(), rng.Uint64()}
				}
				blocks = append(blocks, ownedBlock{at, b})
			}
		}
		o.Blocks = func(yield func(events.Place, *events.OwnedBlock) bool) {
			for _, b := range blocks[1:] {
				if !yield(b.At, &b.Block) {
					return
				}
			}
		}
		owners, want = append(owners, o), append(want, blocks)
	}
	return owners, want
}

func TestGoldenSnapshot(t *testing.T) {
	want := unhex(t, goldenSnapshot)
	var got bytes.Buffer
	if n, err := saved.Write(&got, wire.Scope{}, goldenContent()); err != nil || n != int64(len(want)) || !bytes.Equal(got.Bytes(), want) {
		t.Errorf("wrote %d bytes, %v\ngot  %x\nwant %x", n, err, got.Bytes(), want)
	}
	s, runs, err := readAll(want, wire.Scope{})
	if err != nil {
		t.Fatal(err)
	}
	golden := goldenContent()
	if d := cmp.Diff(golden, s, cmpopts.IgnoreFields(events.Snapshot{}, "Runs", "Owners")); d != "" {
		t.Error(d)
	}
	var goldenRuns []run
	for p, r := range golden.Runs {
		goldenRuns = append(goldenRuns, run{p, r})
	}
	if d := cmp.Diff(goldenRuns, runs); d != "" {
		t.Error(d)
	}
}

// Every changed byte and every truncation is detected.
func TestDamagedSnapshotsAreRefused(t *testing.T) {
	good := unhex(t, goldenSnapshot)
	engines := ownersFile(t)
	for i := range engines {
		bad := bytes.Clone(engines)
		bad[i] ^= 1 << (i % 8)
		for _, data := range [][]byte{bad, engines[:i]} {
			if _, _, err := readAll(data, wire.Scope{}); !errors.Is(err, events.ErrSnapshot) {
				t.Fatalf("byte %d of a file of engines: %v", i, err)
			}
		}
	}
	for i := range good {
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			if _, _, err := readAll(bad, wire.Scope{}); !errors.Is(err, events.ErrSnapshot) {
				t.Fatalf("bit %d of byte %d changed: %v", bit, i, err)
			}
		}
		if _, _, err := readAll(good[:i], wire.Scope{}); !errors.Is(err, events.ErrSnapshot) {
			t.Fatalf("cut after %d bytes: %v", i, err)
		}
	}
	for what, data := range map[string][]byte{
		"longer":        append(bytes.Clone(good), 0),
		"twice":         append(bytes.Clone(good), good...),
		"another scope": good,
	} {
		var scope wire.Scope
		if what == "another scope" {
			scope.Endpoint = "other"
		}
		if _, _, err := readAll(data, scope); !errors.Is(err, events.ErrSnapshot) {
			t.Errorf("%s: %v", what, err)
		}
	}
	s, whole, err := saved.Read(bytes.NewReader(good), wire.Scope{})
	if err != nil || !errors.Is(whole(), events.ErrSnapshot) {
		t.Errorf("%v; a snapshot whose runs nobody read counts as whole", err)
	}
	for range s.Runs {
		break
	}
	if !errors.Is(whole(), events.ErrSnapshot) {
		t.Error("a snapshot that nobody read to the end counts as whole")
	}
	broken := errors.New("the disk")
	if _, _, err := saved.Read(io.MultiReader(bytes.NewReader(good[:70]), errReader{broken}), wire.Scope{}); !errors.Is(err, broken) || errors.Is(err, events.ErrSnapshot) {
		t.Errorf("a file that cannot be read: %v", err)
	}
}

// ownersFile is a file of an owner with blocks of all forms.
func ownersFile(t *testing.T) []byte {
	owner := &events.Owner{Info: json.RawMessage(`{"Worker":7}`), Events: []events.RouterEvent{
		{WorkerID: 7, Event: indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: []uint64{102, 102}}},
	}, Blocks: func(yield func(events.Place, *events.OwnedBlock) bool) {
		_ = yield(events.Place{}, &events.OwnedBlock{ID: 101, Local: 5, Copies: 2, Published: true}) &&
			yield(events.Place{}, &events.OwnedBlock{ID: 102, Local: 6, Copies: 1, Parent: 101, HasParent: true, Locals: []uint64{7, 6}}) &&
			yield(events.Place{Tier: indexer.Disk, Group: 2}, &events.OwnedBlock{ID: 103, Copies: 1, Part: true, Tokens: []uint32{1, 2}, Parts: []uint64{9}})
	}}
	var file bytes.Buffer
	if _, err := saved.Write(&file, wire.Scope{}, &events.Snapshot{Created: time.UnixMilli(1), Owners: slices.Values([]*events.Owner{owner})}); err != nil {
		t.Fatal(err)
	}
	return file.Bytes()
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

// The checksums are right, but the content of the records is invalid.
func TestSenselessSnapshotsAreRefused(t *testing.T) {
	for name, edit := range map[string]func(*events.Snapshot){
		"a rank that is not there": func(s *events.Snapshot) { s.Ranks = nil },
		"a parent that comes later": func(s *events.Snapshot) {
			s.Runs = runsOf(run{0, indexer.Run{ID: 1, Parent: 2, Local: []uint64{1}}}, run{0, indexer.Run{ID: 2, Local: []uint64{2}}})
		},
		"a run without blocks": func(s *events.Snapshot) { s.Runs = runsOf(run{0, indexer.Run{ID: 1}}) },
		"a range behind the end": func(s *events.Snapshot) {
			s.Runs = runsOf(run{0, indexer.Run{ID: 1, Local: []uint64{1}, Holders: []indexer.Holder{{Start: 1, Externals: []uint64{1}}}}})
		},
		"a parent in another pool": func(s *events.Snapshot) {
			s.Meta.Pools = make([]events.SnapshotPool, 2)
			s.Runs = runsOf(run{0, indexer.Run{ID: 1, Local: []uint64{1}}}, run{0, indexer.Run{ID: 2, Local: []uint64{2}}},
				run{1, indexer.Run{ID: 1, Parent: 1<<32 - 1, Local: []uint64{3}}}) // 2 + this is 1
		},
		"a pool that is not there": func(s *events.Snapshot) {
			s.Meta.Pools = make([]events.SnapshotPool, 1)
			s.Runs = runsOf(run{1, indexer.Run{ID: 1, Local: []uint64{1}}})
		},
		"a block without copies": func(s *events.Snapshot) {
			s.Owners = ownerOf(events.Place{}, events.OwnedBlock{ID: 1})
		},
		"a tier that is not there": func(s *events.Snapshot) {
			s.Owners = ownerOf(events.Place{Tier: 9}, events.OwnedBlock{ID: 1, Copies: 1})
		},
	} {
		s := goldenContent()
		edit(s)
		var file bytes.Buffer
		if _, err := saved.Write(&file, wire.Scope{}, s); err != nil {
			t.Fatal(err)
		}
		if _, _, err := readAll(file.Bytes(), wire.Scope{}); !errors.Is(err, events.ErrSnapshot) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func ownerOf(at events.Place, b events.OwnedBlock) iter.Seq[*events.Owner] {
	return slices.Values([]*events.Owner{{Info: json.RawMessage("{}"), Blocks: func(yield func(events.Place, *events.OwnedBlock) bool) { yield(at, &b) }}})
}

// A block that fits into no record is left out, and a record with more than the maximum size is refused.
func TestLargeBlocks(t *testing.T) {
	for n, want := range map[int]int{1 << 10: 2, 1 << 17: 1} {
		s := goldenContent()
		s.Owners = ownerOf(events.Place{}, events.OwnedBlock{ID: 1, Copies: 1, Published: true, Locals: make([]uint64, n)})
		var file bytes.Buffer
		if _, err := saved.Write(&file, wire.Scope{}, s); err != nil {
			t.Fatal(err)
		}
		back, whole, err := saved.Read(&file, wire.Scope{})
		if err != nil {
			t.Fatal(err)
		}
		for range back.Runs {
		}
		if owners, err := ownersOf(back, whole); err != nil || len(owners) != 1 || len(owners[0]) != want {
			t.Errorf("%d hashes: %d owners, %v", n, len(owners), err)
		}
	}
	huge := goldenContent()
	huge.Owners = slices.Values([]*events.Owner{{Info: make([]byte, 1<<20+1), Blocks: func(func(events.Place, *events.OwnedBlock) bool) {}}})
	if _, err := saved.Write(io.Discard, wire.Scope{}, huge); err == nil {
		t.Error("a record above the maximum is written")
	}
}

// Any snapshot is restored unchanged: an index with holes and several pools, cursors, waiting
// events.
func TestSnapshotsComeBack(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		s := &events.Snapshot{
			Created: time.UnixMilli(rng.Int64N(1 << 42)), LastSeq: rng.Uint64(),
			Meta: events.SnapshotMeta{Writer: "test", Epoch: rng.Uint64(), Stream: rng.Int64()},
		}
		var pools []*indexer.Index
		for p := range 1 + rng.IntN(3) {
			x, n := randomIndex(rng)
			pools = append(pools, x)
			s.Meta.Pools = append(s.Meta.Pools, events.SnapshotPool{Model: fmt.Sprint("m", p), BlockSize: 16 << p})
			for i := range n {
				s.Ranks = append(s.Ranks, events.RankName{WorkerID: rng.Uint64(), DPRank: rng.Uint32()})
				s.Workers = append(s.Workers, events.SnapshotWorker{ID: rng.Uint64(), StartedMS: rng.Int64(), Home: "m", Info: json.RawMessage(fmt.Sprintf(`{"n":%d}`, i))})
			}
		}
		for range rng.IntN(50) {
			s.Cursors = append(s.Cursors, events.Cursor{RankName: events.RankName{WorkerID: rng.Uint64(), DPRank: rng.Uint32()}, PublisherID: rng.Uint64(), EventID: rng.Uint64()})
			ev := stored(rng.Uint64(), rng.Uint64())
			s.Waiting = append(s.Waiting, events.Waiting{PublisherID: rng.Uint64(), Event: ev})
			s.Parked = append(s.Parked, stored(rng.Uint64(), rng.Uint64()))
			s.States = append(s.States, events.RankState{
				RankName: events.RankName{WorkerID: rng.Uint64(), DPRank: rng.Uint32()}, State: []indexer.State{indexer.StatePartial, indexer.StateSuspect}[rng.IntN(2)], Missed: time.UnixMilli(rng.Int64N(1 << 42)),
			})
		}
		s.Runs = func(yield func(int, indexer.Run) bool) {
			for p, x := range pools {
				for r := range x.Dump() {
					if !yield(p, r) {
						return
					}
				}
			}
		}
		owners, wantOwners := randomOwners(rng)
		s.Owners = slices.Values(owners)
		var file bytes.Buffer
		if _, err := saved.Write(&file, wire.Scope{}, s); err != nil {
			t.Fatal(err)
		}
		back, whole, err := saved.Read(bytes.NewReader(file.Bytes()), wire.Scope{})
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(s, back, cmpopts.IgnoreFields(events.Snapshot{}, "Runs", "Owners")); d != "" {
			t.Fatal(d)
		}
		byPool := make([][]indexer.Run, len(pools))
		for p, r := range back.Runs {
			r.Local, r.Holders = slices.Clone(r.Local), slices.Clone(r.Holders)
			for i := range r.Holders {
				r.Holders[i].Externals = slices.Clone(r.Holders[i].Externals)
			}
			byPool[p] = append(byPool[p], r)
		}
		if got, err := ownersOf(back, whole); err != nil || !cmp.Equal(got, wantOwners) {
			t.Fatalf("seed %d: %v; %d owners, or their blocks, are others", seed, err, len(wantOwners))
		}
		for p, x := range pools {
			y, _, err := indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
				for _, r := range byPool[p] {
					if !yield(r, nil) {
						return
					}
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(natstest.Holdings(x), natstest.Holdings(y)); d != "" {
				t.Fatalf("seed %d, pool %d (-was +is):\n%s", seed, p, d)
			}
		}
	}
}

// randomIndex returns an index after random events of some workers: holes, shared chains, several
// engine hashes for one block.
func randomIndex(rng *rand.Rand) (x *indexer.Index, workers int) {
	x, workers = indexer.New(indexer.Config{}), 1+rng.IntN(8)
	stored := make([][]indexer.Block, workers)
	for range 60 {
		w := rng.IntN(workers)
		if len(stored[w]) > 0 && rng.IntN(3) == 0 {
			x.Apply(w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{stored[w][rng.IntN(len(stored[w]))].External}})
			continue
		}
		ev := indexer.Event{Kind: indexer.Stored}
		if n := len(stored[w]); n > 0 && rng.IntN(2) == 0 {
			ev.HasParent, ev.Parent = true, stored[w][rng.IntN(n)].External
		}
		for range 1 + rng.IntN(90) {
			b := indexer.Block{External: rng.Uint64N(1 << 40), Local: rng.Uint64N(3)}
			ev.Blocks = append(ev.Blocks, b)
		}
		x.Apply(w, ev)
		stored[w] = append(stored[w], ev.Blocks...)
	}
	return x, workers
}

// A run that ten thousand workers hold does not fit into one record.
func TestARunOfManyHolders(t *testing.T) {
	x := indexer.New(indexer.Config{})
	const workers, blocks = 10_000, 64
	ev := indexer.Event{Kind: indexer.Stored, Blocks: make([]indexer.Block, blocks)}
	for w := range workers {
		for i := range ev.Blocks {
			ev.Blocks[i] = indexer.Block{External: uint64(w*blocks + i + 1), Local: uint64(i)}
		}
		x.Apply(w, ev)
		if w%1000 == 0 { // a block after the run
			x.Apply(w, indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: ev.Blocks[blocks-1].External, Blocks: []indexer.Block{{External: 1<<50 + uint64(w), Local: uint64(w)}}})
		}
	}
	s := &events.Snapshot{Created: time.UnixMilli(0), Meta: events.SnapshotMeta{Pools: make([]events.SnapshotPool, 1)}, Ranks: make([]events.RankName, workers), Runs: func(yield func(int, indexer.Run) bool) {
		for r := range x.Dump() {
			if !yield(0, r) {
				return
			}
		}
	}}
	var file bytes.Buffer
	if _, err := saved.Write(&file, wire.Scope{}, s); err != nil {
		t.Fatal(err)
	}
	_, runs, err := readAll(file.Bytes(), wire.Scope{})
	if err != nil {
		t.Fatal(err)
	}
	y, _, err := indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
		for _, r := range runs {
			if !yield(r.Run, nil) {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := natstest.Holdings(x), natstest.Holdings(y); !slices.Equal(a, b) {
		t.Errorf("%d holdings went in, %d came out, or others", len(a), len(b))
	}
}

func FuzzReadSnapshot(f *testing.F) {
	f.Add(unhex(f, goldenSnapshot))
	f.Add([]byte(strings.Repeat("KVRSNAP2", 9)))
	f.Fuzz(func(_ *testing.T, data []byte) {
		_, _, _ = readAll(data, wire.Scope{})
	})
}
