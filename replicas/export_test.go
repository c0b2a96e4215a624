// SPDX-License-Identifier: Apache-2.0

package replicas

import "time"

// Quicken changes the period of the presence.
func (s *Sync) Quicken(every time.Duration) {
	s.times = syncTimes{presence: every, ask: every, jitter: every / 20}
}

// GroupWorkerID is the id of a candidate.
var GroupWorkerID = groupWorkerID
