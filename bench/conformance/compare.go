// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/kvroute/kvroute/bench"
)

// comparison is one row of the report: random cases, for each of which both sides give an
// outcome.
type comparison[Case, Outcome any] struct {
	name   string
	cases  int
	random func() Case
	theirs func([]Case) []Outcome // of the reference, for a batch of cases
	ours   func(Case) Outcome
	equal  func(ours, theirs Outcome) bool
	show   func(c Case, ours, theirs Outcome) string // describes a difference
}

// batch is the largest number of cases in one question to the reference.
const batch = 500

// run compares all cases, and prints the first differences.
func (c comparison[Case, Outcome]) run() bench.Figure {
	different := 0
	for done := 0; done < c.cases; done += batch {
		all := make([]Case, min(batch, c.cases-done))
		for i := range all {
			all[i] = c.random()
		}
		for i, theirs := range c.theirs(all) {
			ours := c.ours(all[i])
			if c.equal(ours, theirs) {
				continue
			}
			if different++; different <= 3 {
				fmt.Printf("%s: different: %s\n", c.name, c.show(all[i], ours, theirs))
			}
		}
	}
	return bench.NewFigure(fmt.Sprintf("%s: different of %d", c.name, c.cases), "", bench.Exactly(0), float64(different))
}
