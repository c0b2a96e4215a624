// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// Each change of a rank's groups counts: the 33rd one ends the rule. What changes nothing does not count.
func TestEachChangeOfLayersCounts(t *testing.T) {
	group := func(n, block int, needs indexer.Needs) indexer.SideGroup {
		return indexer.SideGroup{Group: n, Needs: needs, Block: block}
	}
	for name, change := range map[string]func(l *indexer.Layers, n int){
		"full blocks grow": func(l *indexer.Layers, n int) { l.TakeFull(4 * (n + 1)) },
		"a further group":  func(l *indexer.Layers, n int) { l.TakeSide(group(n, 4, indexer.NeedsState)) },
		"another size":     func(l *indexer.Layers, n int) { l.TakeSide(group(0, 4*(n+1), indexer.NeedsState)) },
		"another kind": func(l *indexer.Layers, n int) {
			l.TakeSide(group(0, 4, []indexer.Needs{indexer.NeedsState, indexer.NeedsWindow}[n%2]))
		},
		"a group comes and goes": func(l *indexer.Layers, n int) {
			if n%2 == 0 {
				l.TakeSide(group(0, 4, indexer.NeedsState))
			} else if !l.ForgetSide(0) {
				t.Error("no side group is forgotten")
			}
		},
		"all groups go": func(l *indexer.Layers, _ int) { l.Forget() },
	} {
		var l indexer.Layers
		for n := range 33 {
			if l.Unsteady() {
				t.Errorf("%s: unsteady after %d changes", name, n)
			}
			change(&l, n)
			l.ForgetSide(99)
			l.TakeFull(l.Full)
			if len(l.Sides) > 0 {
				l.TakeSide(l.Sides[0])
			}
			l.Clear()
			l.Next(4)
		}
		l.Clear()
		if s := l.Next(4); !l.Unsteady() || s == nil || s != l.Shape() || len(s.Sides) != 1 || s.Sides[0] != (indexer.SideGroup{}) {
			t.Errorf("%s: shape %+v after 33 changes, want one without a rule", name, s)
		}
		if s := l.Next(4); s != nil {
			t.Errorf("%s: shape %+v is sent twice", name, s)
		}
	}
}
