// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"runtime"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
)

// The memory allocated for saving does not grow with the size of the index.
func TestSavingTakesNoMoreForALargeIndex(t *testing.T) {
	var took, written [2]int
	for i, sequences := range []int{500, 10_000} {
		x := indexer.New(indexer.Config{})
		sub, err := events.NewSubscriber(&nats.Conn{}, events.SubscriberConfig{Sink: func(uint64, uint32, indexer.Event) {}})
		if err != nil {
			t.Fatal(err)
		}
		var ranks []events.RankName
		for w := range 4 {
			sub.SetWorker(uint64(w), events.Source{Feed: events.FeedCore})
			sub.Follow(uint64(w), 7, 9)
			ranks = append(ranks, events.RankName{WorkerID: uint64(w)})
			for n := range uint64(sequences) {
				ev := indexer.Event{Kind: indexer.Stored}
				for b := range uint64(40) {
					ev.Blocks = append(ev.Blocks, indexer.Block{External: n<<20 | b<<8 | uint64(w), Local: n/8<<32 | n*(b/20)<<8 | b})
				}
				x.Apply(w, ev)
			}
		}
		out := counter(0)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if err := sub.Save(t.Context(), events.Holdings{Dump: func(s *events.Snapshot, _ func(uint64) bool) (func(), bool) {
			runs, stop := x.DumpNow()
			s.Ranks, s.Meta.Pools = ranks, make([]events.SnapshotPool, 1)
			s.Runs = func(yield func(int, indexer.Run) bool) {
				for run, err := range runs {
					if err != nil || !yield(0, run) {
						t.Error(err)
						return
					}
				}
			}
			return stop, true
		}}, writer(&out, wire.Scope{})); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		took[i], written[i] = int(after.TotalAlloc-before.TotalAlloc), int(out)
	}
	t.Logf("%d bytes allocated for a file of %d, %d for one of %d", took[0], written[0], took[1], written[1])
	if written[0] < 500*4*40*8 || written[1] < 15*written[0] || took[1] > 2<<20 || took[1] > took[0]+64<<10 {
		t.Errorf("%d bytes allocated for a file of %d, %d for one of %d; want the same and at most 2 MB", took[0], written[0], took[1], written[1])
	}
}

type counter int

func (c *counter) Write(b []byte) (int, error) { *c += counter(len(b)); return len(b), nil }
