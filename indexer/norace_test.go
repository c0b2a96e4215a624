// SPDX-License-Identifier: Apache-2.0

//go:build !race

package indexer_test

const raceSlows = 1
