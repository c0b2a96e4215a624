// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// An event with an unknown parent waits for the parent. If the wait is in vain, its
// worker is reported.
func TestEventsWaitForTheirParents(t *testing.T) {
	now := time.Unix(1755000000, 0)
	r, err := router.New(router.Config{Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	for id := range uint64(2) {
		if err := r.SetWorker(router.WorkerInfo{ID: id + 1, Models: []string{"m"}, BlockSize: 4, Address: netip.MustParseAddrPort("10.0.0.1:80"), Events: router.EventSource{Transport: "nats"}}); err != nil {
			t.Fatal(err)
		}
	}
	one, two := router.Worker{ID: 1}, router.Worker{ID: 2}
	child := indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: 1, Blocks: []indexer.Block{{External: 2, Local: 2}}}
	r.ApplyEvent(one, child)
	r.ApplyEvent(two, child)
	r.ApplyEvent(one, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	if got := cached(r); got != [2]int{2, 0} {
		t.Errorf("cached %v blocks, want 2 and 0", got)
	}
	now = now.Add(29 * time.Second)
	if whose := r.ExpireEvents(); len(whose) > 0 {
		t.Errorf("%v waited too long already", whose)
	}
	now = now.Add(time.Second)
	if whose := r.ExpireEvents(); !cmp.Equal(whose, []router.Worker{two}) {
		t.Errorf("%v waited in vain, want worker 2", whose)
	}

	r.SetEventState(two, "suspect")
	r.SetEventState(router.Worker{ID: 9}, "suspect")
	r.SetEventState(router.Worker{ID: 1, DPRank: 9}, "suspect")
	if w := r.Workers(); w[0].KVEvents != "ok" || w[1].KVEvents != "suspect" || w[1].Transport != "nats" {
		t.Errorf("the workers' events are %q and %q", w[0].KVEvents, w[1].KVEvents)
	}
}

func cached(r *router.Router) (blocks [2]int) {
	for i, w := range r.Workers() {
		blocks[i] = w.CachedBlocks
	}
	return blocks
}

// A dump that had to wait shows the moment at which it begins, and has the workers'
// names.
func TestADumpThatWaited(t *testing.T) {
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	first, ok := r.Dump(nil)
	if !ok || len(first.Pools) > 0 {
		t.Fatalf("an empty router dumps %v, %v", first.Pools, ok)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := r.AwaitDump(short); !errors.Is(err, router.ErrDumping) {
		t.Errorf("a second dump at the same time: %v", err)
	}
	waited := make(chan *router.Dump)
	go func() {
		d, err := r.AwaitDump(t.Context())
		if err != nil {
			t.Error(err)
		}
		waited <- d
	}()
	for id := uint64(1); id <= 3; id++ {
		model := "m"
		if id == 3 {
			model = "n"
		}
		if err := r.SetWorker(router.WorkerInfo{ID: id, Models: []string{model}, BlockSize: 4, DPSize: 2, Address: netip.MustParseAddrPort("10.0.0.1:80")}); err != nil {
			t.Fatal(err)
		}
		for rank := range uint32(2) {
			r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: id*10 + uint64(rank), Local: 7}}})
		}
	}
	first.Close()
	d := <-waited
	defer d.Close()
	r.RemoveWorker(1)
	r.ApplyEvent(router.Worker{ID: 2}, indexer.Event{Kind: indexer.Cleared})
	got := map[string]map[router.Worker]uint64{}
	for p, run := range d.Runs {
		model := d.Pools[p].Model
		if got[model] == nil {
			got[model] = map[router.Worker]uint64{}
		}
		for _, h := range run.Holders {
			got[model][d.Holders[h.Worker]] = h.Externals[0]
		}
	}
	want := map[string]map[router.Worker]uint64{
		"m": {{ID: 1}: 10, {ID: 1, DPRank: 1}: 11, {ID: 2}: 20, {ID: 2, DPRank: 1}: 21},
		"n": {{ID: 3}: 30, {ID: 3, DPRank: 1}: 31},
	}
	if diff := cmp.Diff(want, got); diff != "" || d.Err() != nil || d.Blocks != 6 {
		t.Errorf("%v, %d blocks (-want +got):\n%s", d.Err(), d.Blocks, diff)
	}
}
