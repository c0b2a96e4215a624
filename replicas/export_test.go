// SPDX-License-Identifier: Apache-2.0

package replicas

import "time"

// Quicken has a replica say that it is there at other times than every two seconds.
func (s *Sync) Quicken(every time.Duration) {
	s.times = syncTimes{presence: every, ask: every, jitter: every / 20}
}
