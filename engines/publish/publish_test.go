// SPDX-License-Identifier: Apache-2.0

package publish_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// Events that an answer contains are final: a later event is not joined to them.
func TestAnsweredEventsAreNotJoined(t *testing.T) {
	t.Parallel()
	nc := natstest.Connect(t, natstest.Start(t, 0))
	sub, err := nc.SubscribeSync(wire.Scope{}.Topic(events.Topic))
	if err != nil {
		t.Fatal(err)
	}
	p := publish.New(nc, publish.Config{WorkerID: 7, LocalIndexer: true})
	for i := range uint64(6) {
		p.Publish(0, indexer.Event{Kind: indexer.Stored, HasParent: i > 0, Parent: i, Blocks: []indexer.Block{{External: i + 1, Local: i}}})
		if i == 2 {
			if a := p.Answer(events.Query{WorkerID: 7}); a.LastEventID != 1 || len(a.Events) != 1 || len(a.Events[0].Event.Blocks) != 3 {
				t.Errorf("answered %+v, want three blocks, up to event 1", a)
			}
		}
		if i == 4 {
			if a := p.Answer(events.Query{WorkerID: 7, HasStart: true, Start: 2}); a.LastEventID != 2 || len(a.Events) != 1 || len(a.Events[0].Event.Blocks) != 2 {
				t.Errorf("answered %+v, want two blocks, in event 2", a)
			}
		}
	}
	p.Flush()
	m, err := sub.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	e, err := events.DecodeEnvelope(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	evs, _, err := events.DecodeEvents(e.Payload)
	if err != nil || len(evs) != 3 || len(evs[0].Event.Blocks) != 3 || len(evs[1].Event.Blocks) != 2 || len(evs[2].Event.Blocks) != 1 {
		t.Errorf("published %+v, %v; want events of 3, 2 and 1 blocks", evs, err)
	}
}
