// SPDX-License-Identifier: Apache-2.0

//go:build race

package indexer_test

// raceSlows is how many times slower the race detector makes the tests.
const raceSlows = 12
