// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
)

// DurableConfig configures a [Durable]. Holdings is required; the zero value of each other
// field means its default.
type DurableConfig struct {
	// Replica is the name of this process among the router replicas. It should be the same after a
	// restart, and no other replica may have it. Default: random.
	Replica string
	// Holdings reads and replaces the content of the subscriber's sink.
	Holdings Holdings
	// Replicas is the number of servers of a NATS cluster that store the streams and buckets which
	// this process creates. Existing streams and buckets stay as they are. Default 1.
	Replicas int
	// Memory makes the servers store these streams and buckets in memory instead of in files.
	Memory bool
	// SnapshotThreshold is the number of messages in the stream above which the replica
	// takes a snapshot and purges the stream. Default 1,000,000.
	SnapshotThreshold int
	// Retention is how long the stream keeps messages, 30 min to a year. Default: that of the
	// existing stream, or 1 h.
	Retention time.Duration
	// ResetStates begins a new epoch: this replica and all others drop their state and what
	// is stored.
	ResetStates bool
	// Drain is how long the last snapshot may take. Default 10 s.
	Drain time.Duration
	// Log gets a line for each fault. Default none.
	Log *slog.Logger
	// Meter creates the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// timing has the periods that tests shorten.
type timing struct {
	maxAge       time.Duration // of messages in the stream
	duplicates   time.Duration // how far back the stream looks for repeated messages
	inactive     time.Duration // how long a replica may be away before the server deletes its consumer
	lockTTL      time.Duration
	lockEvery    time.Duration
	keepEvery    time.Duration
	snapshotAge  time.Duration // age of a snapshot at which a new one is due, if there are new messages
	snapshotRest time.Duration // least time between two snapshots
	retry        time.Duration
	call         time.Duration // for a request to NATS
	probe        time.Duration // between two checks whether JetStream stores messages
	audit        time.Duration // between two queries to the workers while it does not
	stall        time.Duration // longest time without a message although there are some
	fetch        int           // messages requested ahead
}

func defaultTiming() timing {
	return timing{
		maxAge: time.Hour, duplicates: 2 * time.Minute, inactive: 5 * time.Minute,
		lockTTL: time.Minute, lockEvery: 15 * time.Second, keepEvery: time.Second,
		snapshotAge: 15 * time.Minute, snapshotRest: 30 * time.Second, retry: time.Second, probe: 5 * time.Second,
		audit: 30 * time.Second, call: 5 * time.Second, stall: 10 * time.Second, fetch: fetchMessages,
	}
}

const (
	// nearEnd is the number of messages below which the stream counts as read to its end.
	nearEnd = 1000
	// The messages requested ahead are bounded by number and by bytes.
	fetchMessages = 8192
	fetchBytes    = 64 << 20
)

// Durable reads the events from a JetStream stream. The sink gets every event that the stream
// acknowledged to its publisher, once and in order, whatever happens to connections, servers
// and replicas. Replicas keep their state in snapshots, from which other replicas start; see
// docs/protocol.md.
//
// # Invariants
//
//   - The tracker has got exactly the stream's messages up to the position. Both change
//     together, under one lock. A snapshot is taken between two messages, when the sink has
//     got all events before it. It has the result of a rank's events up to the rank's cursor.
//     After an answer of the worker the cursor may be beyond the position: the tracker then
//     drops later messages up to the cursor by their ids.
//   - After each restore, when the stream is read to its end, workers with a local indexer
//     are queried; ranks of other workers are partial if messages may be missing.
//   - Messages are applied in the order of the stream. The consumer numbers what it delivers:
//     a missing message is requested again before a later one is applied.
//   - A snapshot has every event up to its position: in its runs, as an event that waits for
//     its worker, or as one that waits for the parent of its blocks.
//   - A delivered message counts as read, although up to fetchMessages or fetchBytes are not
//     applied yet. A replica that loses them, because it dies or its session ends, restores a
//     snapshot if they were purged meanwhile (see mustRestore).
//   - A message is purged only after it was delivered to every consumer of the subject, and if
//     the two newest snapshots contain it. Each of them, with the stream, has the whole state.
//   - What another program purges before this replica has got it is lost, unless a snapshot
//     of a later position has it. Ranks with a gap are suspect, the others partial.
//   - Only the holder of the lock replaces the newest snapshot, by compare-and-set, and only
//     by one of a later position.
type Durable struct {
	conf     DurableConfig
	scope    wire.Scope
	sub      *Subscriber
	js       jetstream.JetStream
	metrics  *durableMetrics
	timing   timing
	instance string // distinguishes two processes with one name

	// pending is the number of messages in the stream that are not applied.
	pending atomic.Int64
	live    atomic.Bool // a session is open, and has been up to date
	wanted  atomic.Bool // a snapshot is wanted in place of a damaged one, or because only this replica has the state
	// queryAtEnd: at the stream's end, workers are queried for events that the stream did not contain.
	queryAtEnd atomic.Bool
	lost       atomic.Bool // messages of the stream may be missing
	shared     atomic.Bool // the stream has had messages of other endpoints
	// refuses: JetStream does not store events.
	refuses atomic.Bool

	// The mutex of sub guards the fields below.
	at position

	// The fields below belong to Run, and to keep while a session is open.
	consumer   string
	base       head     // the restored snapshot; zero if none
	damaged    []string // snapshots that could not be restored
	subscribed bool     // the consumer was created once
	reset      bool
	lastTaken  time.Time
	lastProbe  time.Time
	lastAudit  time.Time
	refusals   int // failed probes in a row
	// refusedEpoch is the revision of the last refused epoch.
	refusedEpoch uint64
}

// position is a place in a stream. The tracker has the state there if it is loaded.
type position struct {
	stream int64 // creation time of the stream, unix ns
	seq    uint64
	epoch  uint64
	loaded bool
	// inherited: the state is older than the stream. After a deletion of the store only
	// replicas with such a state have it.
	inherited bool
}

// NewDurable returns a reader of the stream that passes the events to a subscriber.
func NewDurable(sub *Subscriber, conf DurableConfig) (*Durable, error) {
	instance := strconv.FormatUint(rand.Uint64(), 16)
	if conf.Replica == "" {
		conf.Replica = instance
	}
	if conf.Replicas == 0 {
		conf.Replicas = 1
	}
	if conf.Replicas < 0 || conf.Replicas > 5 {
		return nil, fmt.Errorf("events: Replicas is %d, want 1 to 5", conf.Replicas)
	}
	if conf.SnapshotThreshold == 0 {
		conf.SnapshotThreshold = 1_000_000
	}
	if conf.SnapshotThreshold < 0 {
		return nil, fmt.Errorf("events: SnapshotThreshold is %d, want a number of messages", conf.SnapshotThreshold)
	}
	if r := conf.Retention; r != 0 && (r < 30*time.Minute || r > 8760*time.Hour) {
		return nil, fmt.Errorf("events: Retention is %v, want 30m to 8760h", r)
	}
	if conf.Drain == 0 {
		conf.Drain = 10 * time.Second
	}
	conf.Log = meter.Log(conf.Log)
	js, err := jetstream.New(sub.nc)
	if err != nil {
		return nil, fmt.Errorf("events: use JetStream: %w", err)
	}
	d := &Durable{
		conf: conf, scope: sub.conf.Scope, sub: sub, js: js, timing: defaultTiming(), instance: instance,
		consumer: "kvroute-" + consumerName(conf.Replica), reset: conf.ResetStates,
	}
	d.timing.maxAge = cmp.Or(conf.Retention, d.timing.maxAge)
	d.metrics, err = newDurableMetrics(conf.Meter, d)
	return d, err
}

// consumerName replaces the characters that a consumer's name may not have.
func consumerName(replica string) string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' || strings.ContainsRune(`.*>/\`, r) {
			return '_'
		}
		return r
	}, replica)
}

// Ready reports whether the stream is read, and was read nearly to its end.
func (d *Durable) Ready() bool { return d.live.Load() && d.sub.nc.IsConnected() }

// Stores reports whether JetStream stores events, by the last probes.
func (d *Durable) Stores() bool { return !d.refuses.Load() }

// Position returns the number of the last message applied.
func (d *Durable) Position() uint64 {
	return d.position().seq
}

func (d *Durable) position() position {
	d.sub.mu.Lock()
	defer d.sub.mu.Unlock()
	return d.at
}

// moveTo sets the number of the last message applied.
func (d *Durable) moveTo(seq uint64) {
	d.sub.mu.Lock()
	defer d.sub.mu.Unlock()
	d.at.seq = seq
}

// Run reads the stream until ctx ends, then takes a last snapshot. After any fault of NATS it
// tries again, and keeps its state meanwhile.
func (d *Durable) Run(ctx context.Context) error {
	var last *opened
	var retry bus.Retry
	for {
		o, err := d.session(ctx)
		d.live.Store(false)
		if o != nil {
			last = o
		}
		if ctx.Err() != nil {
			break
		}
		d.metrics.reopened(err)
		d.conf.Log.Warn("the stream of events is opened anew", "err", err)
		wait := d.timing.retry
		if errors.Is(err, bus.ErrNoJetStream) {
			wait = retry.After(err)
		}
		bus.Wait(ctx, wait/4+rand.N(wait))
	}
	if last != nil {
		d.leave(ctx, last)
	}
	return nil
}

// leave takes a last snapshot, if there are new messages.
func (d *Durable) leave(ctx context.Context, o *opened) {
	if !d.sub.nc.IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.conf.Drain)
	defer cancel()
	if err := d.snapshot(ctx, o); err != nil {
		d.conf.Log.Warn("the last snapshot failed", "err", err)
	}
}

// Reasons for the end of a session.
var (
	errMissed    = errors.New("messages of the stream did not arrive")
	errEpoch     = errors.New("another replica began a new epoch")
	errNewStream = errors.New("the stream is gone or another one")
	errConsumer  = errors.New("the consumer is gone, or delivers nothing")
	errPurged    = errors.New("messages that were not read yet were purged")
	errInherited = errors.New("another replica knows what was before the stream")
)

// opened is what a session has opened in NATS.
type opened struct {
	stream    jetstream.Stream
	subject   string // of the scope
	component string // with a wildcard: of all endpoints of the component
	state     jetstream.KeyValue
	locks     jetstream.KeyValue
	objects   jetstream.ObjectStore
	consumer  jetstream.Consumer
	created   int64 // the stream's time

	// The fields below belong to keep.
	progress uint64    // the position when it last changed,
	since    time.Time // and when that was
}

// session opens everything, and reads the stream until a fault.
func (d *Durable) session(ctx context.Context) (*opened, error) {
	o, err := d.open(ctx)
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancelCause(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer end(nil)
	parts.Go(func() { end(d.keep(ctx, o)) })
	if err := d.read(ctx, o); err != nil && ctx.Err() == nil {
		return o, err
	}
	return o, context.Cause(ctx)
}

// open opens or creates all that is needed in NATS, brings the state to a position of the
// stream, and creates the consumer that continues from there.
func (d *Durable) open(ctx context.Context) (*opened, error) {
	o, err := d.openStores(ctx)
	if err != nil {
		return nil, err
	}
	for {
		e, err := d.epoch(ctx, o)
		if err != nil {
			return nil, err
		}
		if err := d.ensureState(ctx, o, &e); err != nil {
			return nil, err
		}
		if err := d.subscribe(ctx, o); err != nil {
			return nil, err
		}
		again, err := d.mustRestore(ctx, o)
		if err != nil {
			return nil, err
		}
		if !again {
			d.setPending(d.pending.Load())
			return o, nil
		}
	}
}

// openStores opens or creates the stream, the buckets and the object store.
func (d *Durable) openStores(ctx context.Context) (o *opened, err error) {
	ctx, cancel := d.limited(ctx)
	defer cancel()
	o = &opened{subject: d.scope.Topic(Topic), component: d.scope.StreamSubjects(Topic)}
	if o.stream, err = openStream(ctx, d.js, d.scope, d.conf.Replicas, d.storage(), &d.timing); err != nil {
		return nil, err
	}
	if d.conf.Retention > 0 {
		if err := d.retain(ctx, o); err != nil {
			return nil, err
		}
	}
	o.created = o.stream.CachedInfo().Created.UnixNano()
	if o.state, err = d.bucket(ctx, "state", 0); err != nil {
		return nil, err
	}
	if o.locks, err = d.bucket(ctx, "lock", d.timing.lockTTL); err != nil {
		return nil, err
	}
	o.objects, err = d.objectStore(ctx)
	return o, err
}

// setPending notes how many messages are not applied yet.
func (d *Durable) setPending(n int64) {
	d.pending.Store(n)
	if n >= nearEnd {
		return
	}
	if d.queryAtEnd.CompareAndSwap(true, false) {
		d.sub.change(func(t *tracker, now time.Time) { t.repairAtStreamEnd(now, d.lost.Load()) })
		d.lost.Store(false)
	}
	d.live.Store(true)
}

// read applies the messages that the consumer delivers.
func (d *Durable) read(ctx context.Context, o *opened) error {
	messages, err := o.consumer.Messages(jetstream.PullMaxMessagesWithBytesLimit(d.timing.fetch, fetchBytes))
	if err != nil {
		return fmt.Errorf("events: read the stream: %w", err)
	}
	defer messages.Stop()
	defer context.AfterFunc(ctx, messages.Stop)()
	for delivered := uint64(1); ; delivered++ {
		m, err := messages.Next()
		if ctx.Err() != nil {
			return nil
		}
		var meta *jetstream.MsgMetadata
		if err == nil {
			meta, err = m.Metadata()
		}
		if err != nil {
			return fmt.Errorf("events: read the stream: %w", err)
		}
		if meta.Sequence.Consumer != delivered {
			return errMissed
		}
		if err := d.applyMessage(ctx, o, m.Data(), meta); err != nil {
			return err
		}
	}
}

// applyMessage applies a message, unless it was applied before.
func (d *Durable) applyMessage(ctx context.Context, o *opened, data []byte, meta *jetstream.MsgMetadata) error {
	before, at := d.Position(), meta.Sequence.Stream
	if at <= before {
		d.metrics.twice.Count()
	} else {
		missing := false
		d.sub.applyMessage(ctx, FeedDurable, data, nil, func(gap bool) {
			// If other endpoints share the stream, their messages are skipped, too.
			if missing = before > 0 && at > before+1 && (gap || !d.shared.Load()); !missing {
				d.at.seq = at
			}
		})
		if missing {
			if d.purgedBehind(ctx, o, before) {
				d.lost.Store(true)
				return errPurged // the next session restores a snapshot of a later position, if there is one
			}
			d.moveTo(at)
		}
	}
	d.setPending(int64(meta.NumPending))
	return nil
}
