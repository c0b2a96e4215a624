// SPDX-License-Identifier: Apache-2.0

package replica_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/replica"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

func info(id uint64, model string, blockSize int) router.WorkerInfo {
	return router.WorkerInfo{
		ID: id, Name: fmt.Sprint("w", id), Address: netip.MustParseAddrPort("10.0.0.1:8000"), Models: []string{model},
		BlockSize: blockSize, DPSize: 2, StartedMS: 7,
	}
}

func state(r *router.Router, expect func([]uint64)) events.Holdings {
	return replica.Holdings(replica.Config{
		Router: r, Direct: func(id uint64) bool { return id == 9 }, Expect: expect, Log: slog.New(slog.DiscardHandler),
	})
}

func always(uint64) bool { return true }

func lines(t *testing.T, r *router.Router) (out []string) {
	t.Helper()
	d, ok := r.Dump(nil)
	if !ok {
		t.Fatal("a dump is under way")
	}
	defer d.Close()
	for ev := range d.Events() {
		for i, b := range ev.Event.Blocks {
			out = append(out, fmt.Sprint(ev.Worker, ev.Event.Tier, ev.Position+i, b, ev.Hole && i == 0))
		}
	}
	slices.Sort(out)
	return out
}

// A snapshot file restores the router's blocks of all tiers and pools. Workers whose events do not
// come from the stream are in no snapshot, and keep their blocks.
func TestARouterComesBackFromAFile(t *testing.T) {
	make2 := func(infos ...router.WorkerInfo) *router.Router {
		t.Helper()
		r, err := router.New(router.Config{})
		for _, i := range infos {
			if err == nil {
				err = r.SetWorker(i)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	all := []router.WorkerInfo{info(1, "m", 16), info(2, "m", 32), info(3, "other", 16), info(9, "m", 16)}
	a := make2(all...)
	for n, i := range all {
		for tier := range indexer.External + 1 {
			at := uint64(n*10 + int(tier))
			if !a.ApplyEvent(router.Worker{ID: i.ID, DPRank: uint32(tier) % 2}, indexer.Event{Kind: indexer.Stored, Tier: tier, Blocks: []indexer.Block{{External: at, Local: 5}, {External: at + 1000, Local: at}}}) {
				t.Fatal("an event is refused")
			}
		}
	}
	// Two events wait for their parent. One of them is of a worker whose events are not in the
	// stream.
	child := indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: 500, Blocks: []indexer.Block{{External: 501, Local: 51}}}
	parent := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 500, Local: 50}}}
	for _, id := range []uint64{2, 9} {
		a.ApplyEvent(router.Worker{ID: id, DPRank: 1}, child)
	}
	want := slices.DeleteFunc(lines(t, a), func(l string) bool { return l[1] == '9' })

	snap := events.Snapshot{Created: time.UnixMilli(1755000000500)}
	done, ok := state(a, nil).Dump(&snap, always)
	if !ok {
		t.Fatal("no dump")
	}
	var file bytes.Buffer
	if _, err := saved.Write(&file, wire.Scope{}, &snap); err != nil {
		t.Fatal(err)
	}
	done()
	if len(snap.Meta.Pools) != 3 || len(snap.Workers) != 3 || len(snap.Parked) != 1 {
		t.Errorf("%d pools, %d workers, %d parked events; want 3, 3 and 1", len(snap.Meta.Pools), len(snap.Workers), len(snap.Parked))
	}

	b := make2(info(9, "m", 16))
	b.ApplyEvent(router.Worker{ID: 9}, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 77, Local: 7}}})
	kept := lines(t, b)
	var expected []uint64
	target := state(b, func(ids []uint64) { expected = append(expected, ids...) })
	for cut := range file.Len() { // a truncated file changes nothing
		if cut%97 != 0 {
			continue
		}
		if s, whole, err := saved.Read(bytes.NewReader(file.Bytes()[:cut]), wire.Scope{}); err == nil {
			if err := target.Restore(s, always, whole); !errors.Is(err, events.ErrSnapshot) {
				t.Fatalf("cut after %d bytes: %v", cut, err)
			}
		}
	}
	if got := lines(t, b); !slices.Equal(got, kept) || len(expected) != 0 {
		t.Errorf("after damaged files: %v, expected %v", got, expected)
	}
	s, whole, err := saved.Read(bytes.NewReader(file.Bytes()), wire.Scope{})
	if err != nil {
		t.Fatal(err)
	}
	if err := target.Restore(s, always, whole); err != nil {
		t.Fatal(err)
	}
	slices.Sort(expected)
	if got := lines(t, b); !slices.Equal(got, append(want, kept...)) || !slices.Equal(expected, []uint64{1, 2, 3}) {
		t.Errorf("expected %v, restored\n%v\nwant\n%v", expected, got, append(want, kept...))
	}
	for _, r := range []*router.Router{a, b} {
		if !r.ApplyEvent(router.Worker{ID: 2, DPRank: 1}, parent) {
			t.Fatal("an event is refused")
		}
	}
	want = slices.DeleteFunc(lines(t, a), func(l string) bool { return l[1] == '9' })
	if got := lines(t, b); !slices.Equal(got, append(want, kept...)) {
		t.Errorf("when the parent came\n%v\nwant\n%v", got, append(want, kept...))
	}
	if err := target.Restore(&events.Snapshot{}, always, nil); err != nil || !slices.Equal(lines(t, b), kept) {
		t.Errorf("%v; forgetting everything leaves %v", err, lines(t, b))
	}
}

// A hybrid worker has the same hits after a snapshot file is restored.
func TestHybridWorkersComeBackFromAFile(t *testing.T) {
	tokens := make([]uint32, 16*6)
	local := indexer.AppendLocalHashes(nil, tokens, 16, indexer.Seed("", ""))
	stored := indexer.Event{Kind: indexer.Stored}
	for i, l := range local[:5] {
		stored.Blocks = append(stored.Blocks, indexer.Block{External: uint64(i + 1), Local: l})
	}
	shape := &indexer.Shape{Block: 16, Full: 16, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsState, Block: 16}}}
	side := indexer.Event{Kind: indexer.SideStored, Group: 1, Shape: shape, Externals: []uint64{3}}
	cached := func(r *router.Router) int {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: tokens})
		if err != nil {
			t.Fatal(err)
		}
		return d.CachedTokens
	}
	var file bytes.Buffer
	var routers [2]*router.Router
	for i := range routers {
		r, err := router.New(router.Config{PredictTTL: -1})
		if err == nil {
			err = r.SetWorker(info(1, "m", 16))
		}
		if err != nil {
			t.Fatal(err)
		}
		routers[i] = r
	}
	for _, ev := range []indexer.Event{stored, side} {
		routers[0].ApplyEvent(router.Worker{ID: 1}, ev)
	}
	var snap events.Snapshot
	snap.Created = time.UnixMilli(1755000000500)
	done, ok := state(routers[0], nil).Dump(&snap, always)
	if !ok {
		t.Fatal("no dump")
	}
	_, err := saved.Write(&file, wire.Scope{}, &snap)
	done()
	if err != nil {
		t.Fatal(err)
	}
	s, whole, err := saved.Read(&file, wire.Scope{})
	if err == nil {
		err = state(routers[1], func([]uint64) {}).Restore(s, always, whole)
	}
	if before, after := cached(routers[0]), cached(routers[1]); err != nil || before != 48 || after != 48 {
		t.Errorf("%v: %d tokens hit before and %d after, want 48", err, before, after)
	}
}
