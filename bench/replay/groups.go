// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"net/netip"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// filtersEvery is how often a group sends its whole filter. Between, it sends new blocks.
const filtersEvery = 30 * time.Second

// published is the upper tier's knowledge of a group's caches.
type published struct {
	filter *indexer.Filter // as the upper tier has it
	whole  int64           // when the whole filter was sent, ns
}

// newUpper makes the upper tier: a router whose candidates are the groups.
func (s *sim) newUpper() {
	r := bench.Must(router.New(s.config(uint64(s.Groups))))
	s.upper, s.published = &replica{router: r}, make([]published, s.Groups)
	for g := range s.Groups {
		name := "g" + strconv.Itoa(g)
		bench.NoError(r.SetWorker(router.WorkerInfo{
			ID: s.groupID(g), Name: name, Group: name, Models: []string{model}, BlockSize: s.Trace.BlockSize,
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(g >> 8), byte(g)}), 8000),
		}))
		s.summarise(g)
	}
}

// groupID is the name of a group as a worker of the upper tier.
func (s *sim) groupID(g int) uint64 { return s.id(maxWorkers + g) }

// summarise sends a group's load to the upper tier, and its new blocks or its whole filter.
func (s *sim) summarise(g int) {
	from, to := s.routers[g].router, &s.published[g]
	told := router.Summary{Model: model, BlockSize: s.Trace.BlockSize, Taken: time.Unix(0, s.now)}
	if all := from.Summarize(model); len(all) > 0 {
		told = all[0]
	}
	told.Interval = s.SummaryAge
	if !s.Approximate {
		whole := to.filter == nil || to.filter.Overfull() || s.now-to.whole >= filtersEvery.Nanoseconds()
		var hashes []uint64
		for h, err := range from.Checkpoints(model, s.Trace.BlockSize, s.Stride) {
			if errors.Is(err, router.ErrNoModel) {
				break
			}
			bench.NoError(err)
			if whole || !to.filter.Has(h) {
				hashes = append(hashes, h)
			}
		}
		if whole {
			to.filter, to.whole = indexer.NewFilter(len(hashes)+len(hashes)/8+256), s.now // as in package fleet
		}
		for _, h := range hashes {
			to.filter.Add(h)
		}
		if told.Stride, told.Added = s.Stride, hashes; whole {
			f := to.filter
			told.Filter, told.Added = bench.Must(indexer.ParseFilter(uint64(f.Bits()), uint64(f.Hashes()), uint64(f.Count()), f.AppendTo(nil))), nil
		}
	}
	s.upper.router.SetSummary(s.groupID(g), told)
}
