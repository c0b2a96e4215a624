// SPDX-License-Identifier: Apache-2.0

package indexer_test

import "github.com/kvroute/kvroute/internal/fixtures"

// raceSlows is how many times slower the race detector makes the tests.
var raceSlows = map[bool]int{false: 1, true: 12}[fixtures.Raced]
