// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"testing"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
)

// A sink that blocks does not delay registrations.
func TestASinkKeepsNobodyWaiting(t *testing.T) {
	t.Parallel()
	s, _ := startServer(t, -1)
	entered, leave := make(chan struct{}, 9), make(chan struct{})
	sub, err := events.NewSubscriber(connect(t, s), events.SubscriberConfig{Sink: func(uint64, uint32, indexer.Event) {
		entered <- struct{}{}
		<-leave
	}})
	if err != nil {
		t.Fatal(err)
	}
	sub.SetWorker(1, events.Source{Feed: events.FeedCore, DPSize: 1})
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		sub.Take(t.Context(), events.FeedCore, envelope(t, events.AppendEvents(nil, []events.RouterEvent{stored(1, 1)})), nil)
	}()
	<-entered
	defer func() { close(leave); <-taken }()
	natstest.Soon(t, "a worker that comes", func() { sub.SetWorker(2, events.Source{Feed: events.FeedCore, DPSize: 1}) })
	natstest.Soon(t, "a worker that leaves", func() { sub.Forget(2) })
	natstest.Soon(t, "a question", func() { sub.Wants(events.FeedCore) })
	natstest.Soon(t, "a message", func() {
		sub.Take(t.Context(), events.FeedCore, envelope(t, events.AppendEvents(nil, []events.RouterEvent{stored(1, 2)})), nil)
	})
}

// A callback that blocks delays neither registrations nor messages.
func TestACallbackKeepsNobodyWaiting(t *testing.T) {
	s, _ := startServer(t, -1)
	entered, leave := make(chan struct{}, 9), make(chan struct{})
	sub, err := events.NewSubscriber(connect(t, s), events.SubscriberConfig{
		Sink: func(uint64, uint32, indexer.Event) {},
		Changed: func(uint64, uint32, indexer.State) {
			entered <- struct{}{}
			<-leave
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	sub.SetWorker(1, events.Source{Feed: events.FeedCore, DPSize: 1})
	sub.Follow(1, 7, 1)
	go sub.Doubt(1, 0) // the rank is suspect
	<-entered
	defer close(leave)
	natstest.Soon(t, "a worker that comes", func() { sub.SetWorker(2, events.Source{Feed: events.FeedCore, DPSize: 1}) })
	natstest.Soon(t, "a worker that leaves", func() { sub.Forget(2) })
	natstest.Soon(t, "a message", func() { sub.Take(t.Context(), events.FeedCore, nil, nil) })
}
