// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

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
func (s *sim) newUpper() error {
	conf := router.Config{
		Scoring: s.Rule.Settings, Rule: s.Rule.Choose, BlockSize: s.Trace.BlockSize,
		Seed: s.Seed + uint64(s.Groups), KeepDecisions: -1, PredictTTL: cmp.Or(s.Predict, -1),
		Now: func() time.Time { return time.Unix(0, s.now) },
	}
	r, err := router.New(conf)
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	s.upper, s.published = &replica{router: r}, make([]published, s.Groups)
	for g := range s.Groups {
		name := "g" + strconv.Itoa(g)
		if err := r.SetWorker(router.WorkerInfo{
			ID: s.groupID(g), Name: name, Group: name, Models: []string{model}, BlockSize: s.Trace.BlockSize,
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(g >> 8), byte(g)}), 8000),
		}); err != nil {
			return fmt.Errorf("replay: %w", err)
		}
		if err := s.summarise(g); err != nil {
			return err
		}
	}
	return nil
}

// groupID is the name of a group as a worker of the upper tier.
func (s *sim) groupID(g int) uint64 { return s.id(maxWorkers + g) }

// chooseGroup has the upper tier choose the group of a request.
func (s *sim) chooseGroup(req int32) error {
	d, err := s.decide(s.upper, req)
	if err != nil {
		return err
	}
	s.replica[req] = int32(d.Worker.ID - s.groupID(0))
	return nil
}

// refused handles the error of a group without workers, whose summary was old. It returns
// false for any other error.
func (s *sim) refused(req int32, err error) (bool, error) {
	if s.upper == nil || !errors.Is(err, router.ErrNoWorkers) {
		return false, nil
	}
	s.upper.router.Free(s.ids[req])
	return true, s.summarise(int(s.replica[req]))
}

// summarise sends a group's load to the upper tier, and its new blocks or its whole filter.
func (s *sim) summarise(g int) error {
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
			switch {
			case errors.Is(err, router.ErrNoModel):
			case err != nil:
				return fmt.Errorf("replay: group %d: %w", g, err)
			case whole || !to.filter.Has(h):
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
			var err error
			f := to.filter
			told.Added = nil
			if told.Filter, err = indexer.ParseFilter(uint64(f.Bits()), uint64(f.Hashes()), uint64(f.Count()), f.AppendTo(nil)); err != nil {
				return fmt.Errorf("replay: group %d: %w", g, err)
			}
		}
	}
	s.upper.router.SetSummary(s.groupID(g), told)
	return nil
}
