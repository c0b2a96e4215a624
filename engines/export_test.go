// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// Published returns the published blocks by rank and tier, and the weight of all remembered ones.
func (e *Engine) Published() (blocks map[uint32]map[indexer.Tier]map[uint64]bool, weight int) {
	blocks = make(map[uint32]map[indexer.Tier]map[uint64]bool)
	for rank, r := range e.ranks {
		blocks[rank] = make(map[indexer.Tier]map[uint64]bool)
		for _, p := range r.Places {
			at := p.At
			if blocks[rank][at.Tier] == nil {
				blocks[rank][at.Tier] = make(map[uint64]bool)
			}
			for hash, k := range p.table.all() {
				weight += k.weight()
				if k.Published {
					for _, b := range appendBlocks(nil, hash, &k) {
						blocks[rank][at.Tier][b.External] = true
					}
				}
			}
		}
	}
	return blocks, weight
}

// SaveAndRestore saves an engine and restores it as another one. It returns that engine, its
// events for the index, and the number of blocks that no event restores.
func SaveAndRestore(e *Engine, opt EngineOptions) (again *Engine, restored []events.RouterEvent, orphans int) {
	saved, err := loadRank((&savedRank{Ranks: e.save()}).owner())
	if err != nil {
		panic(err)
	}
	again = NewEngine(opt)
	restored, orphans = again.restore(saved.Ranks)
	return again, restored, orphans
}
