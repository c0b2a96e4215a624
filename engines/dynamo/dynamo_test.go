// SPDX-License-Identifier: Apache-2.0

package dynamo_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// caches holds the blocks of each rank that a sink received: external to local.
type caches struct {
	mu     sync.Mutex
	blocks map[events.RankName]map[uint64]uint64
}

func (c *caches) apply(worker uint64, rank uint32, ev indexer.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := events.RankName{WorkerID: worker, DPRank: rank}
	if c.blocks == nil {
		c.blocks = map[events.RankName]map[uint64]uint64{}
	}
	if c.blocks[key] == nil || ev.Kind == indexer.Cleared {
		c.blocks[key] = map[uint64]uint64{}
	}
	for _, b := range ev.Blocks {
		c.blocks[key][b.External] = b.Local
	}
	for _, e := range ev.Externals {
		delete(c.blocks[key], e)
	}
}

func (c *caches) of(worker uint64, rank uint32) map[uint64]uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.blocks[events.RankName{WorkerID: worker, DPRank: rank}])
}

// dynamoRank is a rank of a Dynamo worker: a publisher on the event plane, which may lose
// messages, and a local indexer that is queried over the request plane.
type dynamoRank struct {
	*testing.T
	worker, publisher uint64
	rank              uint32
	pub               *enginesim.Sockets
	endpoint          string
	stop              func()
	nc                *nats.Conn // nil over ZMQ
	subject           string
	indexer           dynamo.Indexer

	mu       sync.Mutex
	local    *localindex.Index
	id, sent uint64
	held     map[uint64]uint64 // the blocks in the cache
	asked    int
	answered time.Time // time of the last answer
}

func newDynamoRank(t *testing.T, worker uint64, rank uint32, publisher uint64) *dynamoRank {
	d := &dynamoRank{T: t, worker: worker, rank: rank, publisher: publisher, local: localindex.New(), held: map[uint64]uint64{}, endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", fixtures.HoldPort(t))}
	path := fmt.Sprintf("%x/dynamo/backend/worker_kv_query_source_%x", worker, publisher)
	address := planeWorker(t, func(q planeRequest, w io.Writer) error {
		query, err := events.DecodeQuery(q.Body)
		if err != nil || q.Path != path {
			return fmt.Errorf("asked at %s with %x: %w", q.Path, q.Body, err)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.asked, d.answered = d.asked+1, time.Now()
		a := d.local.Answer(&query)()
		return say(w, q.Info.Subject, data(&a), last())
	}, nil)
	d.indexer = dynamo.Indexer{Transport: address + "/" + path, Publisher: publisher}
	d.open()
	return d
}

// open lets listeners connect. stop closes the connections and loses undelivered messages.
func (d *dynamoRank) open() {
	d.Helper()
	natstest.Eventually(d.T, func() (ok bool) {
		var err error
		d.pub, err = enginesim.NewSockets(enginesim.SocketsConfig{Endpoint: d.endpoint})
		return err == nil
	})
	d.endpoint, _ = d.pub.Endpoints()
	d.stop = natstest.Run(d.T, d.pub.Run)
}

func (d *dynamoRank) channel() dynamo.Channel {
	c := dynamo.Channel{Publisher: d.publisher, Worker: d.worker, DPRank: d.rank}
	if d.nc != nil {
		c.Subject = d.subject
	} else {
		c.Endpoint = d.endpoint
	}
	return c
}

// publish changes the cache, and publishes the events unless lost is set.
func (d *dynamoRank) publish(lost bool, evs ...indexer.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []events.RouterEvent
	for _, ev := range evs {
		d.id++
		r := events.RouterEvent{WorkerID: d.worker, DPRank: d.rank, EventID: d.id, Event: ev}
		d.local.Remember(time.Now(), r)
		all = append(all, r)
		switch ev.Kind {
		case indexer.Stored:
			for _, b := range ev.Blocks {
				d.held[b.External] = b.Local
			}
		case indexer.Removed:
			for _, e := range ev.Externals {
				delete(d.held, e)
			}
		default:
			clear(d.held)
		}
	}
	if !lost {
		d.say(events.AppendEvents(nil, all))
	}
}

// say sends a payload.
func (d *dynamoRank) say(payload []byte) {
	e := events.Envelope{PublisherID: d.publisher, Sequence: d.sent, PublishedAt: uint64(time.Now().UnixMilli()), Topic: events.Topic, Payload: payload}
	d.sent++
	if d.nc != nil {
		if err := d.nc.Publish(d.subject, events.AppendEnvelope(nil, e)); err != nil {
			d.Error(err)
		}
		return
	}
	frames := enginesim.PlaneFrames(e)
	d.pub.PublishFrames(frames[:]...)
	other := e
	other.Topic = events.Topic + "-more"   // the subscription's prefix matches it
	others := enginesim.PlaneFrames(other) // the socket owns the earlier frames now
	d.pub.PublishFrames(others[:]...)
}

func oneBlock(n uint64) indexer.Event {
	return indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: n, Local: n * n}}}
}

// follows starts a subscriber and sources that follow ranks.
func (c *caches) follows(t *testing.T, nc *nats.Conn, plane dynamo.Plane, ranks ...*dynamoRank) (*events.Subscriber, *engines.Sources) {
	t.Helper()
	var sources *engines.Sources
	sub, err := events.NewSubscriber(nc, events.SubscriberConfig{
		Scope: wire.Scope{Namespace: "kvroute", Component: "workers", Endpoint: "generate"}, Sink: c.apply,
		Ask: func(ctx context.Context, q events.Query, part func(events.AnswerPart) bool) error {
			return sources.Dynamo.Ask(ctx, q, part)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if sources, err = engines.NewSources(engines.SourcesConfig{Sink: c.apply, Subscriber: sub}); err != nil {
		t.Fatal(err)
	}
	sources.Dynamo.Set(plane)
	for _, d := range ranks {
		c.apply(d.worker, d.rank, indexer.Event{Kind: indexer.Cleared})
		sub.SetWorker(d.worker, events.Source{Feed: events.FeedPlane, Queries: true, DPStart: d.rank, DPSize: 1, Publisher: d.publisher})
	}
	natstest.Run(t, sub.Run)
	natstest.Run(t, sources.Run)
	return sub, sources
}

func planeOf(ranks ...*dynamoRank) dynamo.Plane {
	p := dynamo.Plane{Indexers: map[events.RankName]dynamo.Indexer{}}
	for _, d := range ranks {
		p.Channels = append(p.Channels, d.channel())
		p.Indexers[events.RankName{WorkerID: d.worker, DPRank: d.rank}] = d.indexer
	}
	return p
}

// agrees waits until the known blocks equal the cache. A message lost on its way to a new listener
// is only shown by a later event, so an event is published now and then.
func (d *dynamoRank) agrees(c *caches) {
	d.Helper()
	shown := time.Now()
	natstest.Eventually(d.T, func() bool {
		if time.Since(shown) > time.Second {
			shown = time.Now()
			d.publish(false, oneBlock(uint64(shown.UnixNano())))
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		return maps.Equal(c.of(d.worker, d.rank), d.held)
	})
}

// Workers with sockets or on NATS lose messages and connections at random. A listener that starts
// late, and every listener after each detected loss, has the complete cache.
func TestDynamosWorkersAreFollowed(t *testing.T) {
	t.Parallel()
	for _, over := range []string{"zmq", "nats"} {
		t.Run(over, func(t *testing.T) {
			nc := natstest.Connect(t, natstest.Start(t, 0))
			rng := rand.New(rand.NewPCG(7, 7))
			ranks := []*dynamoRank{newDynamoRank(t, 26, 1, 255), newDynamoRank(t, 1<<63+5, 0, 256)}
			if over == "nats" {
				for _, d := range ranks {
					d.nc, d.subject = nc, "namespace.dynamo.component.backend.endpoint.generate."+events.Topic
				}
			}
			n := uint64(0)
			some := func(d *dynamoRank, lost bool) {
				var evs []indexer.Event
				for range 1 + rng.IntN(3) {
					n++
					switch {
					case rng.IntN(40) == 0:
						evs = append(evs, indexer.Event{Kind: indexer.Cleared})
					case rng.IntN(3) == 0:
						evs = append(evs, indexer.Event{Kind: indexer.Removed, Externals: []uint64{n - rng.Uint64N(min(n, 20))}})
					default:
						evs = append(evs, oneBlock(n))
					}
				}
				d.publish(lost, evs...)
			}
			for range 30 {
				for _, d := range ranks {
					some(d, false)
				}
			}
			var c caches
			c.follows(t, nc, planeOf(ranks...), ranks...)
			for _, d := range ranks {
				d.agrees(&c)
			}
			for range 30 {
				d := ranks[rng.IntN(len(ranks))]
				cut := over == "zmq" && rng.IntN(3) == 0
				if cut {
					d.stop()
				}
				for range rng.IntN(6) {
					some(d, rng.IntN(3) == 0)
				}
				if cut {
					d.open() // a new connection causes a query
				} else {
					some(d, false) // shows the earlier loss
				}
				d.agrees(&c)
			}
		})
	}
}

// A publisher may send events of its own rank only.
func TestPublishersSpeakForTheirOwn(t *testing.T) {
	t.Parallel()
	var c caches
	a, b := newDynamoRank(t, 26, 0, 255), newDynamoRank(t, 27, 0, 256)
	nc := natstest.Connect(t, natstest.Start(t, 0))
	c.follows(t, nc, planeOf(a, b), a, b)
	a.publish(false, oneBlock(1))
	b.publish(false, oneBlock(2))
	a.agrees(&c)
	b.agrees(&c)
	// A publisher of another component sends a clear for the first rank, and an unregistered
	// worker publishes a block.
	e := func(worker, id uint64, ev indexer.Event) []byte {
		return events.AppendEvents(nil, []events.RouterEvent{{WorkerID: worker, EventID: id, Event: ev}})
	}
	b.mu.Lock()
	b.say(e(26, 2, indexer.Event{Kind: indexer.Cleared}))
	b.say(e(28, 1, oneBlock(9)))
	b.mu.Unlock()
	b.publish(false, oneBlock(3))
	b.agrees(&c)
	a.agrees(&c)
	if len(c.of(28, 0)) > 0 {
		t.Error("a worker that nobody knows has blocks")
	}
}

// A worker that restarts has another publisher. Publishers that are not wanted any more are not
// subscribed to.
func TestDynamosPublishersComeAndGo(t *testing.T) {
	t.Parallel()
	var c caches
	a, b := newDynamoRank(t, 26, 0, 255), newDynamoRank(t, 27, 0, 256)
	nc := natstest.Connect(t, natstest.Start(t, 0))
	sub, sources := c.follows(t, nc, planeOf(a), a)
	a.publish(false, oneBlock(1))
	a.agrees(&c)
	b.publish(false, oneBlock(2))
	sources.Dynamo.Set(planeOf(b))
	sub.SetWorker(27, events.Source{Feed: events.FeedPlane, Queries: true, DPSize: 1, Publisher: 256})
	sub.Forget(26)
	b.agrees(&c)
	natstest.Eventually(t, func() bool { return a.pub.Subscribers() == 0 && b.pub.Subscribers() == 1 })
	// The records name the new publisher before its socket is open.
	a.stop()
	sources.Dynamo.Set(planeOf(a, b))
	sub.SetWorker(26, events.Source{Feed: events.FeedPlane, Queries: true, DPSize: 1, Publisher: 255})
	b.publish(false, oneBlock(4))
	b.agrees(&c)
	a.publish(true, oneBlock(5))
	a.open()
	a.agrees(&c)
	for _, rank := range []*dynamoRank{a, b} {
		rank.mu.Lock() // a query may still be in progress
		if rank.asked == 0 {
			t.Errorf("the indexer of worker %d was not asked", rank.worker)
		}
		rank.mu.Unlock()
	}
}

// A message that does not belong to the event plane is counted and ignored.
func TestGarbageFromDynamosPublishersIsHarmless(t *testing.T) {
	t.Parallel()
	var c caches
	a := newDynamoRank(t, 26, 0, 255)
	p := planeOf(a)
	p.Channels = append(p.Channels, dynamo.Channel{Publisher: 1, Endpoint: "tcp://"}, dynamo.Channel{Publisher: 2, Subject: "not a subject"})
	c.follows(t, natstest.Connect(t, natstest.Start(t, 0)), p, a)
	natstest.Eventually(t, func() bool { return a.pub.Subscribers() == 1 })
	for _, frames := range [][]string{{"kv-events"}, {"kv-events", "x"}, {"kv-events", strings.Repeat("\x00", 8), "body"}, {"kv-events", strings.Repeat("\x00", 8), strings.Repeat("\x00", 8), "\x01\x00\x00\x00\x00"}} {
		var raw [][]byte
		for _, f := range frames {
			raw = append(raw, []byte(f))
		}
		a.pub.PublishFrames(raw...)
	}
	a.mu.Lock()
	a.say(bytes.Repeat([]byte{0xc1}, 40))
	a.mu.Unlock()
	a.publish(false, oneBlock(1))
	a.agrees(&c)
}

// A real publisher may be slow to accept a subscription. Messages sent meanwhile are lost, and
// nothing later shows the loss. Therefore the publisher is queried once more.
func TestANewConnectionIsAskedForTwice(t *testing.T) {
	t.Parallel()
	var c caches
	a := newDynamoRank(t, 26, 0, 255)
	a.publish(true, oneBlock(1))
	c.follows(t, natstest.Connect(t, natstest.Start(t, 0)), planeOf(a), a)
	natstest.Eventually(t, func() bool { return a.pub.Subscribers() == 1 && len(c.of(26, 0)) == 1 })
	heard := time.Now()
	a.publish(true, oneBlock(2))
	natstest.Eventually(t, func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.answered.Sub(heard) > time.Second
	})
	natstest.Eventually(t, func() bool { return len(c.of(26, 0)) == 2 })
}
