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
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/wire"
)

// DurableConfig says how a [Durable] reads the stream. Holdings is required; the zero
// value of each other field means its default.
type DurableConfig struct {
	// Replica names this process among the router replicas. It should be the same
	// after a restart, and must not be that of another one. Default: random.
	Replica string
	// Holdings is what the subscriber's sink makes of the events.
	Holdings Holdings
	// Replicas is how many servers of a NATS cluster keep what this process
	// creates; what is there already stays as it is. Default 1.
	Replicas int
	// Memory keeps it in the servers' memory instead of files.
	Memory bool
	// SnapshotThreshold is the number of messages in the stream above which a
	// snapshot is taken and the stream shortened. Default 1,000,000.
	SnapshotThreshold int
	// Retention is how long the stream keeps messages, 30 min to a year. Default: as the
	// stream that is there, or 1 h.
	Retention time.Duration
	// ResetStates begins a new epoch: this and all other replicas forget what they
	// know and what is stored.
	ResetStates bool
	// Drain is how long the last snapshot may take. Default 10 s.
	Drain time.Duration
	// Log takes a line for what goes wrong. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// timing is what tests shorten.
type timing struct {
	maxAge       time.Duration // of messages in the stream
	duplicates   time.Duration // how far back the stream looks for repeated messages
	inactive     time.Duration // how long a replica may be away before its consumer goes
	lockTTL      time.Duration
	lockEvery    time.Duration
	keepEvery    time.Duration
	snapshotAge  time.Duration // a newer one is due behind which there are messages
	snapshotRest time.Duration // least time between two
	retry        time.Duration
	call         time.Duration // for a request to NATS
	probe        time.Duration // between two looks whether JetStream stores anything
	audit        time.Duration // between two questions to the workers while it does not
	stall        time.Duration // without a message although there are some
	fetch        int           // messages that are fetched ahead
}

func defaultTiming() timing {
	return timing{
		maxAge: time.Hour, duplicates: 2 * time.Minute, inactive: 5 * time.Minute,
		lockTTL: time.Minute, lockEvery: 15 * time.Second, keepEvery: time.Second,
		snapshotAge: 15 * time.Minute, snapshotRest: 30 * time.Second, retry: time.Second, probe: 5 * time.Second, audit: 30 * time.Second, call: 5 * time.Second, stall: 10 * time.Second, fetch: fetchMessages,
	}
}

const (
	// caughtUp is the number of messages that do not yet count as a backlog.
	caughtUp = 1000
	// What is fetched ahead: enough to keep busy, little enough to keep in memory.
	fetchMessages = 8192
	fetchBytes    = 64 << 20
)

// Durable reads the events from a stream that keeps them, in the place of
// [Subscriber.Run]. Nothing that the stream has acknowledged is missing from what
// the sink gets, whatever happens to connections, servers and replicas, and what
// comes twice counts once. What a replica knows is kept in snapshots, from which
// another one starts; see docs/protocol.md.
//
// # Invariants
//
//   - The tracker has got exactly the messages up to the position, of those that the
//     stream kept. Both change together, under one lock: a snapshot is a cut
//     between two messages, taken when the sink has got all events before it. What it says of a rank is what the rank's events make up to
//     its cursor, which an answer of the worker may have brought beyond the position:
//     messages behind the position that say no more are dropped by their ids.
//   - After each restoration, once the stream is read to its end, all are asked that can
//     be; of the others it is known whether messages may be missing.
//   - Messages are applied in the order of the stream. One that is missing in what
//     the consumer delivers, by the consumer's own numbers, is asked for again
//     before anything behind it is applied.
//   - What the messages up to the position said is all in a snapshot of it: in its
//     runs, as an event that waits for its worker, or as one that waits for its
//     parent, which the index lets wait although the cursor has passed it.
//   - The consumer outlives a session. A message that was delivered to it counts as read: at
//     most fetchMessages of fetchBytes are delivered and not applied. If others purge
//     these they are in a snapshot, from which a replica goes on that loses them unapplied
//     because it dies or its session ends (see overtaken).
//   - A message is purged only after it was delivered to every consumer of the subject, and
//     when the two newest snapshots contain it: each of them, with the stream, makes
//     everything.
//   - What another program purges before this replica has got it is lost, unless a snapshot
//     of a later position has it. Ranks with a gap are suspect.
//   - The newest snapshot is replaced only by one of a later position, by
//     compare-and-set, by the one who holds the lock.
type Durable struct {
	conf     DurableConfig
	scope    wire.Scope
	sub      *Subscriber
	js       jetstream.JetStream
	metrics  *durableMetrics
	timing   timing
	instance string // tells two processes with one name apart

	// pending is the number of messages in the stream that are not applied.
	pending atomic.Int64
	live    atomic.Bool // a session is open, and has been up to date
	wanted  atomic.Bool // a snapshot, in the place of one that is of no use
	// review is to be done at the stream's end: what it did not bring is asked for.
	review atomic.Bool
	lost   atomic.Bool // messages, before the position or behind it
	// refuses says that JetStream does not store events.
	refuses atomic.Bool

	// The mutex of sub guards these fields, too.
	at     position
	loaded bool
	// inherited says that what is known goes back to before the stream was made: it is
	// nowhere else if the store was deleted.
	inherited bool

	// The fields below belong to Run, and while a session is open to those who look
	// after it.
	consumer   string
	base       head     // the snapshot that was restored; zero if none
	damaged    []string // snapshots that could not be
	subscribed bool     // there has been one
	reset      bool
	lastTaken  time.Time
	lastExpire time.Time
	lastProbe  time.Time
	lastAudit  time.Time
	refusals   int // of probes, one after the other
}

// position is a place in a stream.
type position struct {
	stream int64 // when the stream was made, unix ns
	seq    uint64
	epoch  uint64
}

// NewDurable returns one that feeds a subscriber whose Run is not called.
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
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	conf.Meter = cmp.Or[metric.Meter](conf.Meter, noop.Meter{})
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

// consumerName makes a replica's name fit for a consumer.
func consumerName(replica string) string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' || strings.ContainsRune(`.*>/\`, r) {
			return '_'
		}
		return r
	}, replica)
}

// Ready reports whether the stream is being read and, but for some messages, has
// been read to its end.
func (d *Durable) Ready() bool { return d.live.Load() && d.sub.nc.IsConnected() }

// Stores reports whether JetStream stores events, as far as is known.
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

// Run reads the stream until ctx ends, then takes a last snapshot. Whatever goes
// wrong with NATS, it tries again: what is known stays known meanwhile.
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
		d.metrics.reopened(ctx, err)
		d.conf.Log.Warn("the stream of events is opened anew", "err", err)
		wait := d.timing.retry
		if errors.Is(err, bus.ErrNoJetStream) {
			wait = retry.After(err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait/4 + rand.N(wait)):
		}
	}
	if last != nil {
		d.leave(ctx, last)
	}
	return nil
}

// leave takes a last snapshot, if that would be of use.
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

// Reasons to end a session.
var (
	errMissed    = errors.New("messages of the stream did not arrive")
	errEpoch     = errors.New("another replica began a new epoch")
	errNewStream = errors.New("the stream is gone or another one")
	errConsumer  = errors.New("the consumer is gone, or delivers nothing")
	errPurged    = errors.New("messages that were not read yet were purged")
	errInherited = errors.New("another replica knows what was before the stream")
)

// opened is what a session works with.
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

// session opens everything, and reads until it cannot go on.
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

// open finds or makes all that is needed in NATS, brings the state to a position of
// the stream, and makes the consumer that goes on from there.
func (d *Durable) open(ctx context.Context) (*opened, error) {
	o := &opened{subject: d.scope.Topic(Topic), component: d.scope.StreamSubjects(Topic)}
	err := d.limited(ctx, func(ctx context.Context) (err error) {
		if o.stream, err = openStream(ctx, d.js, d.scope, d.conf.Replicas, d.conf.Memory, &d.timing); err != nil {
			return err
		}
		if d.conf.Retention > 0 {
			if err := d.retain(ctx, o); err != nil {
				return err
			}
		}
		o.created = o.stream.CachedInfo().Created.UnixNano()
		if o.state, err = d.bucket(ctx, "state", 0); err != nil {
			return err
		}
		if o.locks, err = d.bucket(ctx, "lock", d.timing.lockTTL); err != nil {
			return err
		}
		o.objects, err = d.objectStore(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	for {
		e, err := d.epoch(ctx, o)
		if err != nil {
			return nil, err
		}
		if err := d.settle(ctx, o, &e); err != nil {
			return nil, err
		}
		if err := d.limited(ctx, func(ctx context.Context) error { return d.subscribe(ctx, o) }); err != nil {
			return nil, err
		}
		again, err := d.overtaken(ctx, o)
		if err != nil {
			return nil, err
		}
		if !again {
			d.behind(d.pending.Load())
			return o, nil
		}
	}
}

// limited gives do the time of a few requests.
func (d *Durable) limited(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d.timing.call)
	defer cancel()
	return do(ctx)
}

// OpenStream returns the stream of a scope's component, and makes it with the default
// retention if it is not there.
func OpenStream(ctx context.Context, js jetstream.JetStream, scope wire.Scope, replicas int) (jetstream.Stream, error) {
	t := defaultTiming()
	return openStream(ctx, js, scope, replicas, false, &t)
}

// openStream returns the stream of a scope's component, and makes it if it is not
// there. Publishers and routers do this, whoever comes first. A stream that is
// there stays as its owner configured it.
func openStream(ctx context.Context, js jetstream.JetStream, scope wire.Scope, replicas int, memory bool, t *timing) (jetstream.Stream, error) {
	name := scope.Stream()
	storage := jetstream.FileStorage
	if memory {
		storage = jetstream.MemoryStorage
	}
	stream, err := openOrCreate(jetstream.ErrStreamNotFound, jetstream.ErrStreamNameAlreadyInUse,
		func() (jetstream.Stream, error) { return js.Stream(ctx, name) },
		func() (jetstream.Stream, error) {
			return js.CreateStream(ctx, jetstream.StreamConfig{
				Name:        name,
				Description: "kvroute: what happens in the caches of workers",
				Subjects:    []string{scope.StreamSubjects(Topic)},
				Retention:   jetstream.LimitsPolicy,
				Discard:     jetstream.DiscardOld,
				MaxAge:      t.maxAge,
				Duplicates:  min(t.duplicates, t.maxAge),
				Storage:     storage,
				Replicas:    replicas,
			})
		})
	if err != nil {
		return nil, fmt.Errorf("events: open stream %s: %w", name, bus.Explain(err))
	}
	return stream, nil
}

// retain applies the configured retention to a stream that another process created.
func (d *Durable) retain(ctx context.Context, o *opened) (err error) {
	conf := o.stream.CachedInfo().Config
	if conf.MaxAge == d.conf.Retention {
		return nil
	}
	conf.MaxAge, conf.Duplicates = d.conf.Retention, min(conf.Duplicates, d.conf.Retention)
	if o.stream, err = d.js.UpdateStream(ctx, conf); err != nil {
		return fmt.Errorf("events: change the retention of stream %s: %w", conf.Name, bus.Explain(err))
	}
	return nil
}

func (d *Durable) storage() jetstream.StorageType {
	if d.conf.Memory {
		return jetstream.MemoryStorage
	}
	return jetstream.FileStorage
}

func (d *Durable) bucket(ctx context.Context, kind string, ttl time.Duration) (jetstream.KeyValue, error) {
	name := d.scope.Bucket(kind)
	bucket, err := openOrCreate(jetstream.ErrBucketNotFound, jetstream.ErrBucketExists,
		func() (jetstream.KeyValue, error) { return d.js.KeyValue(ctx, name) },
		func() (jetstream.KeyValue, error) {
			return d.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
				Bucket: name, Description: "kvroute: " + kind + " of the events", TTL: ttl, History: 1,
				Replicas: d.conf.Replicas, Storage: d.storage(), MaxValueSize: 64 << 10,
			})
		})
	if err != nil {
		return nil, fmt.Errorf("events: open bucket %s: %w", name, err)
	}
	return bucket, nil
}

func (d *Durable) objectStore(ctx context.Context) (jetstream.ObjectStore, error) {
	name := d.scope.Bucket("snap")
	objects, err := openOrCreate(jetstream.ErrBucketNotFound, jetstream.ErrBucketExists,
		func() (jetstream.ObjectStore, error) { return d.js.ObjectStore(ctx, name) },
		func() (jetstream.ObjectStore, error) {
			return d.js.CreateObjectStore(ctx, jetstream.ObjectStoreConfig{
				Bucket: name, Description: "kvroute: snapshots of the index",
				Replicas: d.conf.Replicas, Storage: d.storage(),
			})
		})
	if err != nil {
		return nil, fmt.Errorf("events: open object store %s: %w", name, err)
	}
	return objects, nil
}

// openOrCreate opens what may have to be created, or be created by another process.
func openOrCreate[T any](missing, exists error, open, create func() (T, error)) (T, error) {
	v, err := open()
	if errors.Is(err, missing) {
		if v, err = create(); errors.Is(err, exists) {
			v, err = open()
		}
	}
	return v, err
}

// epoch returns the epoch to be in, and raises it once if that was asked for.
func (d *Durable) epoch(ctx context.Context, o *opened) (e epoch, err error) {
	err = d.limited(ctx, func(ctx context.Context) error {
		if d.reset {
			if e, err = o.raiseEpoch(ctx, d.conf.Replica); err != nil {
				return fmt.Errorf("events: reset states: %w", err)
			}
			d.reset = false
			d.conf.Log.Warn("states are reset: all replicas forget what the workers cache", "epoch", e.N)
			return nil
		}
		if _, err = readKey(ctx, o.state, keyEpoch, &e); err != nil {
			return fmt.Errorf("events: %w", err)
		}
		return nil
	})
	return e, err
}

// subscribe makes the consumer anew, behind the position: one of this name that is
// there belongs to a memory that is gone.
func (d *Durable) subscribe(ctx context.Context, o *opened) error {
	if was, err := o.stream.Consumer(ctx, d.consumer); err == nil {
		if by := was.CachedInfo().Config.Metadata["instance"]; d.subscribed && by != "" && by != d.instance {
			// It was made after ours, so its owner lives.
			d.consumer += "-" + d.instance
			d.conf.Log.Error("another process has this replica's name; this one goes on under a name of its own", "replica", d.conf.Replica, "consumer", d.consumer)
		}
	}
	if err := o.stream.DeleteConsumer(ctx, d.consumer); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return fmt.Errorf("events: delete consumer %s: %w", d.consumer, err)
	}
	var err error
	// Acknowledgements would only tell the server what was applied. What was delivered and is
	// purged before it is applied is in a snapshot.
	o.consumer, err = o.stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		Name:              d.consumer,
		Durable:           d.consumer,
		Description:       "kvroute replica " + d.conf.Replica,
		Metadata:          map[string]string{"instance": d.instance},
		FilterSubjects:    []string{o.subject},
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       d.Position() + 1,
		AckPolicy:         jetstream.AckNonePolicy,
		InactiveThreshold: d.timing.inactive,
	})
	if err != nil {
		return fmt.Errorf("events: make consumer %s: %w", d.consumer, err)
	}
	d.subscribed = true
	d.pending.Store(int64(o.consumer.CachedInfo().NumPending))
	return nil
}

// behind notes how many messages are still to be applied.
func (d *Durable) behind(n int64) {
	d.pending.Store(n)
	if n >= caughtUp {
		return
	}
	if d.review.CompareAndSwap(true, false) {
		d.sub.caughtUp(d.lost.Swap(false))
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
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("events: read the stream: %w", err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("events: read the stream: %w", err)
		}
		if meta.Sequence.Consumer != delivered {
			return errMissed
		}
		if err := d.take(ctx, o, m.Data(), meta); err != nil {
			return err
		}
	}
}

// take applies a message, unless it was applied before.
func (d *Durable) take(ctx context.Context, o *opened, data []byte, meta *jetstream.MsgMetadata) error {
	before, hole := d.Position(), false
	if meta.Sequence.Stream > before {
		d.sub.take(ctx, FeedDurable, data, nil, func(gap bool) {
			d.at.seq = meta.Sequence.Stream
			hole = gap && before > 0 && d.at.seq > before+1
		})
	} else {
		d.metrics.repeated(ctx)
	}
	d.behind(int64(meta.NumPending))
	if hole && d.purgedBehind(ctx, o, before) {
		d.review.Store(true)
		d.lost.Store(true)
		return errPurged // the next session restores a newer snapshot, if there is one
	}
	return nil
}
