// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// Of a worker that may publish no events what was sent there counts for as long as of
// one that publishes none, and nobody says that its cache is known. Its first event
// changes both.
func TestAWorkerThatMayPublishNoEvents(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read, PredictTTL: 10 * time.Second}, 0)
	w := worker(1)
	w.EventsUnsure = true
	set(t, r, w)
	book(t, r, "a", "abcd")
	c.pass(time.Minute)
	if _, overlap := book(t, r, "b", "abcd"); overlap == 0 {
		t.Error("what was sent there a minute ago is forgotten")
	}
	if s := r.Workers()[0]; s.KVEvents != "none" || !s.NeverHeard {
		t.Errorf("before any event: kv_events %s, never heard %t", s.KVEvents, s.NeverHeard)
	}
	set(t, r, w) // its health, for example
	r.ApplyEvent(router.Worker{ID: 1}, indexer.Event{Kind: indexer.Cleared})
	if s := r.Workers()[0]; !s.NeverHeard {
		t.Error("that its cache is empty counts as an event of its own")
	}
	r.ApplyEvent(router.Worker{ID: 1}, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	if s := r.Workers()[0]; s.KVEvents != "ok" || s.NeverHeard {
		t.Errorf("after an event: kv_events %s, never heard %t", s.KVEvents, s.NeverHeard)
	}
	book(t, r, "c", "wxyz")
	c.pass(time.Minute)
	if _, overlap := book(t, r, "d", "wxyz"); overlap != 0 {
		t.Error("its events would have told of what was sent there a minute ago")
	}
}
