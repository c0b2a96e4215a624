// SPDX-License-Identifier: Apache-2.0

// Package durable reads the workers' cache events from a JetStream stream, and passes them to a
// subscriber of package events. It keeps snapshots in NATS, from which other replicas start.
package durable

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
)

// Config configures a [Reader]. Holdings is required; the zero value of each other
// field means its default.
type Config struct {
	// Replica is the name of this process among the router replicas. It should be the same after a
	// restart, and no other replica may have it. Default: random.
	Replica string
	// Holdings reads and replaces the content of the subscriber's sink.
	Holdings events.Holdings
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

// Reader reads the events from a JetStream stream. The sink gets every event that the stream
// acknowledged to its publisher, once and in order, whatever happens to connections, servers
// and replicas. Replicas keep their state in snapshots, from which other replicas start; see
// docs/protocol.md.
//
// # Invariants
//
//   - The subscriber has got exactly the stream's messages up to the position. Both change
//     together, under the subscriber's lock. A snapshot is taken between two messages, when the sink has
//     got all events before it. It has the result of a rank's events up to the rank's cursor.
//     After an answer of the worker the cursor may be beyond the position: the subscriber then
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
type Reader struct {
	conf     Config
	scope    wire.Scope
	sub      *events.Subscriber
	nc       *nats.Conn
	js       jetstream.JetStream
	metrics  *metrics
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

	mu sync.Mutex
	// mu guards the field below. It changes together with the state of sub, in functions that sub calls.
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

// position is a place in a stream. The subscriber has the state there if it is loaded.
type position struct {
	stream int64 // creation time of the stream, unix ns
	seq    uint64
	epoch  uint64
	loaded bool
	// inherited: the state is older than the stream. After a deletion of the store only
	// replicas with such a state have it.
	inherited bool
}

// New returns a reader of the stream that passes the events to a subscriber.
func New(sub *events.Subscriber, conf Config) (*Reader, error) {
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
	nc, scope := sub.Bus()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("events: use JetStream: %w", err)
	}
	d := &Reader{
		conf: conf, scope: scope, sub: sub, nc: nc, js: js, timing: defaultTiming(), instance: instance,
		consumer: "kvroute-" + consumerName(conf.Replica), reset: conf.ResetStates,
	}
	d.timing.maxAge = cmp.Or(conf.Retention, d.timing.maxAge)
	d.metrics, err = newMetrics(conf.Meter, d)
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
func (d *Reader) Ready() bool { return d.live.Load() && d.nc.IsConnected() }

// Stores reports whether JetStream stores events, by the last probes.
func (d *Reader) Stores() bool { return !d.refuses.Load() }

// Position returns the number of the last message applied.
func (d *Reader) Position() uint64 {
	return d.position().seq
}

func (d *Reader) position() position {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.at
}

func (d *Reader) setPosition(at position) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at = at
}

// moveTo sets the number of the last message applied.
func (d *Reader) moveTo(seq uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at.seq = seq
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
