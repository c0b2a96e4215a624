// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
)

// Bounds of a message and of what waits for one.
const (
	flushAfter = 5 * time.Millisecond // what a batch may cost in freshness

	maxMessageEvents = 128
	maxMessageBlocks = 8192
	// maxPending bounds the memory while NATS takes nothing. A worker makes some
	// hundred events a second at most.
	maxPending = 16384
)

// PublisherConfig says for whom a [Publisher] speaks.
type PublisherConfig struct {
	Scope    wire.Scope
	WorkerID uint64
	// Durable publishes into the stream of the scope's component, which is made if
	// it is not there, and repeats each message until the stream has it.
	Durable bool
	// Replicas is how many servers of a NATS cluster keep a stream that this
	// publisher makes. Default 1.
	Replicas int
	// LocalIndexer keeps what the worker holds and its last events, and answers
	// queries about them. The worker's record should say so.
	LocalIndexer bool
	// Quiet says nothing while there are routers and none of them wants events.
	// When one does again, those who have no local indexer to ask are told all
	// that the worker holds.
	Quiet bool
	// Sockets are the publisher's own, by rank. If there are any, then it speaks
	// through them instead of NATS: it is not Durable, not Quiet, and answers
	// queries, so that LocalIndexer is implied. Events of other ranks are lost.
	Sockets map[uint32]RankSockets
	// Publish puts a message into the stream of a Durable publisher and waits for its
	// acknowledgement. Default: JetStream's.
	Publish func(ctx context.Context, m *nats.Msg) error
	// Lost is told of events that were dropped, by the goroutine of Run. Default
	// nobody.
	Lost func(events int)
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line for each loss. Default none.
	Log *slog.Logger
}

// Publisher tells the bus what happens in one worker's cache.
//
// # Invariants
//
//   - The events of a rank have the numbers 1, 2, 3 and so on in the order of Publish,
//     also those that are dropped; an event that joins the one before has its number.
//   - Of pending, the first sealed ones are as they will be sent, and are what the local
//     index knows: an answer to a query and the events behind it never overlap.
//   - A rank whose last event may have reached nobody is in lost until another event
//     with a number of its own has left.
//   - At most max events are pending.
type Publisher struct {
	conf PublisherConfig
	out  outlet // only Run sends
	id   uint64
	wake chan struct{} // holds one token while something is pending
	max  int           // events that may be pending

	// answering is held while the local index is read, before mu: a second dump
	// would wait for the first.
	answering sync.Mutex

	mu sync.Mutex
	// mu guards the fields below.
	pending  []events.RouterEvent
	sealed   int               // of pending: those that have their final form
	lastID   map[uint32]uint64 // by rank
	lost     map[uint32]bool   // ranks whose last event may have reached nobody
	dropped  int               // since the last flush
	local    *localindex.Index // nil if nobody needs it
	audience audience
	silent   bool
}

// NewPublisher returns a publisher on a connection that stays its caller's, and may
// be nil if the publisher has sockets. It is a new one for all who listen: what they
// knew of the worker they forget.
func NewPublisher(nc *nats.Conn, conf PublisherConfig) *Publisher {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	if len(conf.Sockets) > 0 {
		conf.Durable, conf.Quiet, conf.LocalIndexer = false, false, true
	}
	p := &Publisher{
		conf: conf, max: maxPending,
		id:     rand.Uint64() & (1<<53 - 1), // every JSON reader keeps it exactly
		wake:   make(chan struct{}, 1),
		lastID: make(map[uint32]uint64),
		lost:   make(map[uint32]bool),
	}
	switch {
	case len(conf.Sockets) > 0:
		p.out = newSocketOutlet(conf.Sockets)
	case conf.Durable:
		p.max, p.out = maxPendingDurable, &natsOutlet{nc: nc, stream: newStreamSender(nc, &conf)}
	default:
		p.out = &natsOutlet{nc: nc}
	}
	if conf.LocalIndexer || conf.Quiet {
		p.local = localindex.New()
	}
	return p
}

// ID is the id by which the publisher signs its messages, at most 53 bits. A worker's
// record may name it.
func (p *Publisher) ID() uint64 { return p.id }

// Publish takes an event of a rank, in the order in which they happen. It does not
// wait: the event leaves within 5 ms, together with what else came. The event's
// slices are kept. If more waits than there is room for, the event is dropped and
// its number skipped, so that readers see the gap.
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
	e := events.RouterEvent{WorkerID: p.conf.WorkerID, DPRank: dpRank, EventID: p.lastID[dpRank], Event: ev}
	if p.silent || len(p.pending) >= p.max {
		p.sealLocked()
		if p.local != nil {
			p.local.Remember(p.conf.Now(), e)
		}
		if !p.silent {
			p.dropped++
			p.lost[dpRank] = true
		}
		return
	}
	p.pending = append(p.pending, e)
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// sealLocked gives what is pending its final form: what is said of it from now on
// stays true.
func (p *Publisher) sealLocked() {
	if p.local != nil {
		for _, ev := range p.pending[p.sealed:] {
			p.local.Remember(p.conf.Now(), ev)
		}
	}
	p.sealed = len(p.pending)
}

// Run publishes until ctx ends, then what is pending, and waits up to a second, or
// five if it is durable, for the bus to have it.
func (p *Publisher) Run(ctx context.Context) error {
	end, err := p.out.open(p)
	defer end()
	if err != nil {
		return err
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	connection := p.out.connection()
	for {
		select {
		case <-tick.C:
			p.tell(p.conf.Now(), nil)
			now := p.out.connection()
			p.admit(now != connection)
			connection = now
			continue
		case <-ctx.Done():
			p.flush(ctx)
			return p.out.flush()
		case <-p.wake:
		}
		batch := time.NewTimer(flushAfter)
		select {
		case <-ctx.Done():
		case <-batch.C:
		}
		batch.Stop()
		p.flush(ctx)
	}
}

// flush sends what is pending. What the connection refuses is lost, and seen to be
// lost by its missing numbers.
func (p *Publisher) flush(ctx context.Context) {
	p.mu.Lock()
	p.sealLocked()
	pending, dropped := p.pending, p.dropped
	p.pending, p.sealed, p.dropped = nil, 0, 0
	p.mu.Unlock()

	for len(pending) > 0 {
		n, blocks, rank := 0, 0, pending[0].DPRank
		for n < len(pending) && n < maxMessageEvents {
			size := len(pending[n].Event.Blocks) + len(pending[n].Event.Externals)
			if n > 0 && blocks+size > maxMessageBlocks || len(p.conf.Sockets) > 0 && pending[n].DPRank != rank {
				break
			}
			blocks += size
			n++
		}
		if err := p.out.send(ctx, p.conf.Scope, rank, events.Envelope{
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
			p.conf.Log.Warn("the bus refuses events", "events", n, "err", err)
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
