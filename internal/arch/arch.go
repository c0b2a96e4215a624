// SPDX-License-Identifier: Apache-2.0

// Package arch holds the architecture rules as tests: which package may import which, how deep the
// tree is, and which files every package must have. It exports nothing, and nothing imports it.
package arch
