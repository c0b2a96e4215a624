// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// For a worker that may publish no events, predictions last as long as for a worker that
// publishes none, and its cache is not reported as known. Its first event changes both.
func TestAWorkerThatMayPublishNoEvents(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read, PredictTTL: 10 * time.Second}, 0)
	w := worker(1)
	w.EventsUnsure = true
	set(t, r, w)
	book(t, r, "a", "abcd")
	c.pass(time.Minute)
	if _, overlap := book(t, r, "b", "abcd"); overlap == 0 {
		t.Error("the prompt that was sent there a minute ago is not predicted")
	}
	if s := r.Workers()[0]; s.KVEvents != "none" || !s.NeverHeard {
		t.Errorf("before any event: kv_events %s, never heard %t", s.KVEvents, s.NeverHeard)
	}
	set(t, r, w) // for example, its health changed
	r.ApplyEvent(router.Worker{ID: 1}, indexer.Event{Kind: indexer.Cleared})
	if s := r.Workers()[0]; !s.NeverHeard {
		t.Error("an event that clears an empty cache does not count as the first event")
	}
	r.ApplyEvent(router.Worker{ID: 1}, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	if s := r.Workers()[0]; s.KVEvents != "ok" || s.NeverHeard {
		t.Errorf("after an event: kv_events %s, never heard %t", s.KVEvents, s.NeverHeard)
	}
	book(t, r, "c", "wxyz")
	c.pass(time.Minute)
	if _, overlap := book(t, r, "d", "wxyz"); overlap != 0 {
		t.Error("the prediction of a minute ago still counts after the first event")
	}
}
