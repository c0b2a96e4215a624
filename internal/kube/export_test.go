// SPDX-License-Identifier: Apache-2.0

package kube

import "time"

// Fast shortens the waits of a set, and Pings those of the client's pings.
func (s *Set[T]) Fast(first time.Duration) { s.first = first }

// Pings sets the times of HTTP/2 pings.
func (c *Config) Pings(after, limit time.Duration) { c.pingAfter, c.pingTime = after, limit }
