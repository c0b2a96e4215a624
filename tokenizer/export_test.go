// SPDX-License-Identifier: Apache-2.0

package tokenizer

// SetCacheStep makes steps of a cache small enough for texts of tests.
func SetCacheStep(c *Cache, step int) { c.step = step }
