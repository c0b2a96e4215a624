// SPDX-License-Identifier: Apache-2.0

package localindex

import "github.com/kvroute/kvroute/events"

// RingEvents is a bound.
const RingEvents = ringEvents

// Ask answers a query, whole.
func (l *Index) Ask(q events.Query) events.Answer {
	a, content := l.Answer(&q)
	Complete(&a, &q, content)
	return a
}
