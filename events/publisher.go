// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
)

// Bounds of a message and of what waits for one.
const (
	flushAfter = 5 * time.Millisecond // what a batch may cost in freshness

	maxMessageEvents = 128
	maxMessageBlocks = 8192
	maxJoinedBlocks  = 128
	// maxPending bounds the memory while NATS takes nothing. A worker makes some
	// hundred events a second at most.
	maxPending = 16384
)

// PublisherConfig says for whom a [Publisher] speaks.
type PublisherConfig struct {
	Scope    wire.Scope
	WorkerID uint64
	// Lost is told of events that were dropped, by the goroutine of Run. Default
	// nobody.
	Lost func(events int)
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line for each loss. Default none.
	Log *slog.Logger
}

// Publisher tells the bus what happens in one worker's cache.
type Publisher struct {
	conf PublisherConfig
	nc   *nats.Conn
	id   uint64
	wake chan struct{} // holds one token while something is pending

	sequence uint64 // of messages; only Run flushes

	mu sync.Mutex
	// mu guards the fields below.
	pending []RouterEvent
	lastID  map[uint32]uint64 // by rank
	dropped int               // since the last flush
}

// NewPublisher returns a publisher on a connection that stays its caller's. It is
// a new one for all who listen: what they knew of the worker they forget.
func NewPublisher(nc *nats.Conn, conf PublisherConfig) *Publisher {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	if conf.Log == nil {
		conf.Log = slog.New(slog.DiscardHandler)
	}
	return &Publisher{
		conf: conf, nc: nc,
		id:     rand.Uint64() & (1<<53 - 1), // every JSON reader keeps it exactly
		wake:   make(chan struct{}, 1),
		lastID: make(map[uint32]uint64),
	}
}

// Publish takes an event of a rank, in the order in which they happen. It does not
// wait: the event leaves within 5 ms, together with what else came. The event's
// slices are kept. If more waits than there is room for, the event is dropped and
// its number skipped, so that readers see the gap.
func (p *Publisher) Publish(dpRank uint32, ev indexer.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.pending); n > 0 && join(&p.pending[n-1], dpRank, &ev) {
		return
	}
	p.lastID[dpRank]++
	if len(p.pending) >= maxPending {
		p.dropped++
		return
	}
	p.pending = append(p.pending, RouterEvent{WorkerID: p.conf.WorkerID, DPRank: dpRank, EventID: p.lastID[dpRank], Event: ev})
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// join makes ev part of the event before it, if together they say the same.
func join(last *RouterEvent, dpRank uint32, ev *indexer.Event) bool {
	before := &last.Event
	if last.DPRank != dpRank || before.Kind != ev.Kind || before.Tier != ev.Tier {
		return false
	}
	switch ev.Kind {
	case indexer.Stored:
		n := len(before.Blocks)
		if n == 0 || !ev.HasParent || ev.Parent != before.Blocks[n-1].External || n+len(ev.Blocks) > maxJoinedBlocks {
			return false
		}
		before.Blocks = append(slices.Clip(before.Blocks), ev.Blocks...)
		return true
	case indexer.Removed:
		if len(before.Externals)+len(ev.Externals) > maxJoinedBlocks {
			return false
		}
		before.Externals = append(slices.Clip(before.Externals), ev.Externals...)
		return true
	default:
		return false
	}
}

// Run publishes until ctx ends, then what is pending, and waits up to a second for
// the bus to have it.
func (p *Publisher) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			p.flush()
			if p.nc.IsConnected() {
				if err := p.nc.FlushTimeout(time.Second); err != nil {
					return fmt.Errorf("events: flush the last events: %w", err)
				}
			}
			return nil
		case <-p.wake:
		}
		batch := time.NewTimer(flushAfter)
		select {
		case <-ctx.Done():
		case <-batch.C:
		}
		batch.Stop()
		p.flush()
	}
}

// flush sends what is pending. What the connection refuses is lost, and seen to be
// lost by its missing numbers.
func (p *Publisher) flush() {
	p.mu.Lock()
	pending, dropped := p.pending, p.dropped
	p.pending, p.dropped = nil, 0
	p.mu.Unlock()

	subject := p.conf.Scope.Topic(Topic)
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
		message := AppendEnvelope(nil, Envelope{
			PublisherID: p.id,
			Sequence:    p.sequence,
			PublishedAt: uint64(p.conf.Now().UnixMilli()),
			Topic:       Topic,
			Payload:     AppendEvents(nil, pending[:n]),
		})
		p.sequence++
		if err := p.nc.Publish(subject, message); err != nil {
			dropped += n
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
