// SPDX-License-Identifier: Apache-2.0

// Package arch holds the rules of the house as tests: who may import whom, how deep
// the tree is, what every file and package must have. It exports nothing, and
// nothing imports it.
package arch
