// SPDX-License-Identifier: Apache-2.0

package attention

// Docs are the sections of the documentation, by what.
var Docs = docs
