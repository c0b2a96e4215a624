// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"time"

	"github.com/kvroute/kvroute/bench/replay"
)

// axisCells vary one thing at a time on recorded workloads: blocks of a worker, workers, events, and what
// happens to workers or routers.
func (b *Bench) axisCells() []cell {
	out := predict(append(b.recorded(1.5, 1334), b.agenticCell(128, 5000)))
	for _, c := range predict(b.recorded(3, 2000)) {
		out = append(out, c.with("16 workers", func(s *replay.Scenario) { s.Workers = 16 }))
	}
	for _, c := range b.lateComparisons() {
		out = append(out, c.one, c.cell)
	}
	for _, c := range predict(b.three()) {
		out = append(
			out,
			c.with("events 30 s late", func(s *replay.Scenario) { s.EventDelay = 30 * time.Second }),
			c.with("1 % of events lost", func(s *replay.Scenario) { s.EventLoss = .01 }),
		)
	}
	const at = 200 * time.Second
	for _, c := range predict(b.recorded(1.3, 2000)) {
		for _, kind := range []replay.ChangeKind{replay.Leave, replay.Restart} {
			out = append(out, c.with("worker "+string(kind)+"s at 200 s", func(s *replay.Scenario) {
				s.Changes = []replay.Change{{At: at, Worker: 3, Kind: kind}}
			}))
		}
		out = append(out, c.with("routers replaced at 200 s", func(s *replay.Scenario) { s.ColdStart = at }))
	}
	return out
}

// lateComparisons are of events that are 5 s late and fresh ones.
func (b *Bench) lateComparisons() (out []comparison) {
	for _, c := range predict(b.three()) {
		out = append(out, comparison{what: c.name, one: c, cell: c.with("events 5 s late", func(s *replay.Scenario) { s.EventDelay = 5 * time.Second })})
	}
	return out
}
