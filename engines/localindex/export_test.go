// SPDX-License-Identifier: Apache-2.0

package localindex

import "github.com/kvroute/kvroute/events"

// RingEvents is the limit of a rank's ring.
const RingEvents = ringEvents

// Ask answers a query completely.
func (l *Index) Ask(q events.Query) events.Answer {
	return l.Answer(&q)()
}
