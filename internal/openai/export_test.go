// SPDX-License-Identifier: Apache-2.0

package openai

// Kept returns the number of unread bytes that the reader keeps.
func (u *UsageReader) Kept() int { return len(u.rest) }
