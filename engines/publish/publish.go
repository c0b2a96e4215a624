// SPDX-License-Identifier: Apache-2.0

// Package publish sends the events of one worker's cache to the routers over NATS, and answers their
// queries about them.
//
// A [Publisher] runs next to each engine: in `kvroute publish`, and in the library for C and Python.
package publish

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
)

// Bounds of a message and of the waiting events.
const (
	flushAfter = 5 * time.Millisecond // from the first event to its message

	maxMessageEvents = 128
	maxMessageBlocks = 8192
	// maxPending bounds the memory while NATS is unavailable. A worker has some hundred
	// events a second at most.
	maxPending = 16384
)

// Config configures a [Publisher].
type Config struct {
	Scope    wire.Scope
	WorkerID uint64
	// Durable publishes into the stream of the scope's component and repeats each message
	// until the stream has it. A missing stream is made.
	Durable bool
	// Replicas is how many servers of a NATS cluster keep a stream that this publisher
	// makes. Default 1.
	Replicas int
	// LocalIndexer keeps the worker's blocks and its last events, and answers queries. The
	// worker's record should say so.
	LocalIndexer bool
	// Publish sends a message of a Durable publisher and waits for the acknowledgement.
	// Default: JetStream's.
	Publish func(ctx context.Context, m *nats.Msg) error
	// Lost is called by the goroutine of Run with the number of dropped events. Optional.
	Lost func(events int)
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line for each loss. Default none.
	Log *slog.Logger
}

// Publisher publishes the events of one worker's cache.
//
// # Invariants
//
//   - The events of a rank have the numbers 1, 2, 3 and so on in the order of Publish,
//     also the dropped ones. An event that is joined to the one before has its number.
//   - The first sealed events of pending are final, and the local index has them: an answer
//     to a query and the events after it never overlap.
//   - A rank whose last event may not have been sent is in lost until a later event of it is
//     sent.
//   - At most max events are pending.
type Publisher struct {
	conf Config
	out  *outlet
	id   uint64
	wake chan struct{} // holds a token while events are pending
	max  int           // events that may be pending

	// answering is held while the local index is read, and locked before mu: a second dump
	// would wait for the first.
	answering sync.Mutex

	mu sync.Mutex
	// mu guards the fields below.
	pending []events.RouterEvent
	sealed  int               // number of final events in pending
	lastID  map[uint32]uint64 // by rank
	lost    map[uint32]bool   // ranks whose last event may not have been sent
	dropped int               // since the last flush
	local   *localindex.Index // nil without LocalIndexer
}

// New returns a publisher. The caller keeps the connection. Readers forget what
// they know of the worker from an earlier publisher.
func New(nc *nats.Conn, conf Config) *Publisher {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = meter.Log(conf.Log)
	p := &Publisher{
		conf: conf, max: maxPending,
		id:     rand.Uint64() & (1<<53 - 1), // every JSON reader keeps it exactly
		wake:   make(chan struct{}, 1),
		lastID: make(map[uint32]uint64),
		lost:   make(map[uint32]bool),
	}
	if conf.Durable {
		p.max = maxPendingDurable
	}
	p.out = newOutlet(nc, &p.conf)
	if conf.LocalIndexer {
		p.local = localindex.New()
	}
	return p
}

// ID returns the publisher's id in messages and in the worker's record. It has at most 53
// bits.
func (p *Publisher) ID() uint64 { return p.id }

// Publish takes the events of a rank in the order in which they happened, and does not wait:
// an event is sent within 5 ms, together with others. The event's slices are copied. If too
// many events are pending, the event is dropped and its number skipped, so that readers
// notice the gap.
func (p *Publisher) Publish(dpRank uint32, ev indexer.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	events.Parts(ev, func(part indexer.Event) { p.publishLocked(dpRank, part) })
}

func (p *Publisher) publishLocked(dpRank uint32, ev indexer.Event) {
	if n := len(p.pending); n > p.sealed && events.Join(&p.pending[n-1], dpRank, &ev) {
		return
	}
	p.lastID[dpRank]++
	ev.Blocks, ev.Externals = slices.Clone(ev.Blocks), slices.Clone(ev.Externals)
	e := events.RouterEvent{WorkerID: p.conf.WorkerID, DPRank: dpRank, EventID: p.lastID[dpRank], Event: ev}
	if len(p.pending) >= p.max {
		p.sealLocked()
		if p.local != nil {
			p.local.Remember(p.conf.Now(), e)
		}
		p.dropped++
		p.lost[dpRank] = true
		return
	}
	p.pending = append(p.pending, e)
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// sealLocked makes the pending events final and gives them to the local index.
func (p *Publisher) sealLocked() {
	if p.local != nil {
		for _, ev := range p.pending[p.sealed:] {
			p.local.Remember(p.conf.Now(), ev)
		}
	}
	p.sealed = len(p.pending)
}

// Run publishes until ctx ends. Then it sends the pending events and waits up to a second,
// with Durable up to five, for NATS to have them.
func (p *Publisher) Run(ctx context.Context) error {
	end, err := p.out.open(ctx, p)
	defer end()
	if err != nil {
		return err
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	changes, _ := p.out.connection()
	for {
		select {
		case <-tick.C:
			now, up := p.out.connection()
			p.admit(now != changes, up)
			changes = now
			continue
		case <-ctx.Done():
			p.flush() //nolint:contextcheck // events are also sent after ctx; outlet.life ends that
			return p.out.flush()
		case <-p.wake:
		}
		batch := time.NewTimer(flushAfter)
		select {
		case <-ctx.Done():
		case <-batch.C:
		}
		batch.Stop()
		p.flush() //nolint:contextcheck // as above
	}
}

// flush sends the pending events. Refused ones are lost, which their missing numbers show.
func (p *Publisher) flush() {
	p.mu.Lock()
	p.sealLocked()
	pending, dropped := p.pending, p.dropped
	p.pending, p.sealed, p.dropped = nil, 0, 0
	p.mu.Unlock()

	for len(pending) > 0 {
		n, blocks := 0, 0
		for n < len(pending) && n < maxMessageEvents {
			size := len(pending[n].Event.Blocks) + len(pending[n].Event.Externals)
			if n > 0 && blocks+size > maxMessageBlocks {
				break
			}
			blocks += size
			n++
		}
		if err := p.out.send(events.Envelope{
			PublisherID: p.id,
			PublishedAt: uint64(p.conf.Now().UnixMilli()),
			Topic:       events.Topic,
			Payload:     events.AppendEvents(nil, pending[:n]),
		}); err != nil {
			dropped += n
			p.mu.Lock()
			for _, ev := range pending[:n] {
				p.lost[ev.DPRank] = true
			}
			p.mu.Unlock()
			p.conf.Log.Warn("sending events failed", "events", n, "err", err)
		}
		pending = pending[n:]
	}
	if dropped > 0 {
		if p.conf.Lost != nil {
			p.conf.Lost(dropped)
		}
		p.conf.Log.Warn("events are lost", "events", dropped)
	}
}

// reply answers a query. It returns nil for a query of another kind, which must not be
// answered.
func (p *Publisher) reply(data []byte) *events.Answer {
	q, err := events.DecodeQuery(data)
	switch {
	case err != nil:
		return &events.Answer{Message: "the query cannot be read"}
	case q.Kind != events.RecoveryKind:
		return nil
	case q.WorkerID != p.conf.WorkerID:
		return &events.Answer{Message: "this is another worker"}
	}
	return new(p.answer(&q))
}

func (p *Publisher) answer(q *events.Query) events.Answer {
	p.answering.Lock()
	defer p.answering.Unlock()
	p.mu.Lock()
	p.sealLocked()
	answer := p.local.Answer(q)
	p.mu.Unlock()
	return answer()
}

// admit publishes an event without blocks for each rank whose last event may have been lost,
// if messages can be sent: its number shows readers the gap. After a new connection that is
// every rank.
func (p *Publisher) admit(reconnected, up bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if reconnected {
		for rank := range p.lastID {
			p.lost[rank] = true
		}
	}
	if len(p.lost) == 0 || !up {
		return
	}
	lost := p.lost
	p.lost = make(map[uint32]bool)
	for rank := range lost {
		p.publishLocked(rank, indexer.Event{Kind: indexer.Removed})
	}
}
