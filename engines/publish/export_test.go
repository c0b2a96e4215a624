// SPDX-License-Identifier: Apache-2.0

package publish

import "github.com/kvroute/kvroute/events"

// Answer answers a query completely, as Run does for queries over NATS.
func (p *Publisher) Answer(q events.Query) events.Answer { return p.answer(&q) }

// Flush sends the pending events, as Run does.
func (p *Publisher) Flush() { p.flush() }
