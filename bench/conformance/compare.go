// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// comparison is one row of the report: random cases, for each of which both sides give an
// outcome.
type comparison[Case, Outcome any] struct {
	kind, name string
	cases      int
	random     func() Case
	theirs     func([]Case) (all []Outcome, seconds float64) // of the reference, for a batch of cases
	ours       func(Case) Outcome
	equal      func(ours, theirs Outcome) bool
	show       func(c Case, ours, theirs Outcome) string // describes a difference
}

// batch is the largest number of cases in one question to the reference.
const batch = 500

// run compares all cases, and prints the first differences.
func (c comparison[Case, Outcome]) run() bench.Comparison {
	var ours time.Duration
	theirs, different := 0., 0
	for done := 0; done < c.cases; done += batch {
		all := make([]Case, min(batch, c.cases-done))
		for i := range all {
			all[i] = c.random()
		}
		want, seconds := c.theirs(all)
		theirs += seconds
		for i, one := range all {
			start := bench.CPUTime()
			got := c.ours(one)
			ours += bench.CPUTime() - start
			if c.equal(got, want[i]) {
				continue
			}
			if different++; different <= 3 {
				fmt.Printf("%s: different: %s\n", c.name, c.show(one, got, want[i]))
			}
		}
	}
	return bench.NewComparison(c.kind, c.name, c.cases, different, ours, time.Duration(theirs*float64(time.Second)))
}
