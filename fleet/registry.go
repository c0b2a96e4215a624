// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Periods of the worker's side. A record is put three times in its lifetime.
const (
	recordTTL      = 45 * time.Second
	putEvery       = 15 * time.Second
	heartbeatEvery = 2500 * time.Millisecond
)

// maxRecord is how many bytes a record may have as JSON; the registry takes no more.
const maxRecord = 64 << 10

const heartbeatTopic = "heartbeat"

// openBucket returns the bucket of records, and makes it if it is not there, kept
// by so many servers of a cluster. One that is there stays as it is.
func openBucket(ctx context.Context, nc *nats.Conn, scope wire.Scope, replicas int) (jetstream.KeyValue, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	bucket, err := js.KeyValue(ctx, scope.Bucket("workers"))
	if !errors.Is(err, jetstream.ErrBucketNotFound) {
		return bucket, bus.Explain(err)
	}
	bucket, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
		Bucket:       scope.Bucket("workers"),
		Description:  "kvroute: records of workers",
		TTL:          recordTTL,
		MaxValueSize: maxRecord,
		Replicas:     max(1, replicas),
	})
	if errors.Is(err, jetstream.ErrBucketExists) {
		return js.KeyValue(ctx, scope.Bucket("workers")) // somebody was faster
	}
	return bucket, err
}

// Networks are those that workers may have addresses in; [ParseNetworks] reads them.
type Networks = reach.Networks

// ParseNetworks reads a list, comma-separated: CIDR, CIDR:port or CIDR:port-port.
func ParseNetworks(list string) (Networks, error) { return reach.Parse(list) }

// RegistryConfig says where workers come from and who is told of them. Set and
// Remove are required; the zero value of each other field means its default.
type RegistryConfig struct {
	Scope wire.Scope
	// Replicas is how many servers of a NATS cluster keep the registry, if this
	// process makes it. Default 1.
	Replicas int
	// Networks are those that workers may have addresses in. Default all.
	Networks Networks
	// Ages are how long workers may be silent.
	Ages Ages
	// Set and Remove are told of workers, one call at a time. They must not call
	// back.
	Set    func(router.WorkerInfo)
	Remove func(id uint64)
	// Events is told, after Set, of each record that came, for what it says
	// of the worker's events. Default: nobody.
	Events func(Record, router.WorkerInfo)
	// Load is told of what each heartbeat says of its worker's work, Prefixes of the
	// prompts that it says to hold, where Record.Events.Transport is "heartbeat"
	// ([ParsePrefixes] reads them). Default: nobody.
	Load     func(router.WorkerInfo, Load)
	Prefixes func(id uint64, cached map[string]int)
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line for each connection and each refused record. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Registry tells of the workers that are configured or registered in NATS.
type Registry struct {
	conf    RegistryConfig
	nc      *nats.Conn
	metrics *metrics
	ready   atomic.Bool
	// connection is how often nc had reconnected when the registry began to watch. After
	// another reconnect the ages of heartbeats mean nothing until the watch begins again.
	connection atomic.Uint64

	mu sync.Mutex
	// mu guards the field below, and orders what Set and Remove are told.
	table *Table
}

// NewRegistry returns a registry on a connection that stays its caller's.
func NewRegistry(nc *nats.Conn, conf RegistryConfig) (*Registry, error) {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	conf.Meter = cmp.Or[metric.Meter](conf.Meter, noop.Meter{})
	if err := conf.Ages.Check(); err != nil {
		return nil, err
	}
	m, err := newMetrics(conf.Meter)
	if err != nil {
		return nil, err
	}
	table := NewTable(conf.Networks, conf.Set, conf.Remove)
	table.ages = conf.Ages.withDefaults()
	table.events, table.load, table.prefixes = conf.Events, conf.Load, conf.Prefixes
	table.flapped = func() { m.count(context.Background(), newsFlaps) }
	table.claimed = func(now router.WorkerInfo, was netip.AddrPort) {
		m.count(context.Background(), newsClaimed)
		conf.Log.Warn("two processes claim one worker's id: the last record counts; give each a name of its own",
			"worker", now.ID, "name", now.Name, "address", now.Address.String(), "other", was.String())
	}
	table.followed = func(old, by router.WorkerInfo) {
		m.count(context.Background(), newsFollowed)
		conf.Log.Info("another worker has started at a worker's address, which is taken to be gone until it is heard",
			"worker", old.ID, "name", old.Name, "address", old.Address.String(), "by", by.Name)
	}
	return &Registry{conf: conf, nc: nc, metrics: m, table: table}, nil
}

// SetStatic replaces the workers of the configuration; see [Table.SetStatic].
func (r *Registry) SetStatic(records []Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.table.SetStatic(r.conf.Now(), records)
}

// Alive takes the news that a worker answered a probe.
func (r *Registry) Alive(id uint64) { r.locked(func(t *Table) { t.Alive(r.conf.Now(), id) }) }

// Ready reports whether the registry is connected and has read all records since it connected.
func (r *Registry) Ready() bool { return r.ready.Load() && r.nc.IsConnected() && !r.reconnected() }

func (r *Registry) reconnected() bool { return r.nc.Stats().Reconnects != r.connection.Load() }

// Run listens until ctx ends. Whatever goes wrong with NATS, it tries again: the
// workers known stay known meanwhile.
func (r *Registry) Run(ctx context.Context) error {
	beats := make(chan *nats.Msg, 8192)
	subject := r.conf.Scope.Own(heartbeatTopic, "*")
	sub, err := r.nc.ChanSubscribe(subject, beats)
	if err != nil {
		return fmt.Errorf("fleet: subscribe to %s: %w", subject, err)
	}
	var judge sync.WaitGroup
	defer judge.Wait()
	judge.Go(func() { r.judge(ctx) })
	var retry bus.Retry
	for {
		err := r.watch(ctx, beats)
		r.ready.Store(false)
		if ctx.Err() != nil {
			if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
				return fmt.Errorf("fleet: unsubscribe from %s: %w", subject, err)
			}
			return nil
		}
		wait := retry.After(err)
		r.conf.Log.Warn("the registry of workers is not available; it is tried again", "err", err, "in", wait)
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// judge looks for who is silent, until ctx ends.
func (r *Registry) judge(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.locked(func(t *Table) { t.Tick(r.conf.Now(), r.away()) })
		}
	}
}

// away says whether the workers' silence may be the bus's.
func (r *Registry) away() bool { return !r.Ready() }

// A watch ends when NATS has been away, or the bucket is not the one that was opened:
// what was missed is read anew.
var (
	errAway    = errors.New("NATS was away")
	errDeleted = errors.New("the bucket was deleted")
)

// bucketEvery is how often it is looked whether the bucket is still there: the watch of
// one that was deleted hears nothing, and of the next one of that name not all.
const bucketEvery = 3 * time.Second

// follow returns when the bucket is another one than before, or none, or ctx ends. While
// NATS does not answer it is taken to be there.
func follow(ctx context.Context, bucket jetstream.KeyValue) error {
	var born time.Time
	tick := time.NewTicker(bucketEvery)
	defer tick.Stop()
	for {
		created, err := birth(ctx, bucket)
		switch {
		case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrBucketNotFound), err == nil && !born.IsZero() && !created.Equal(born):
			return errDeleted
		case err == nil:
			born = created
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// birth is when a bucket was made.
func birth(ctx context.Context, bucket jetstream.KeyValue) (time.Time, error) {
	info, err := streamInfo(ctx, bucket)
	if err != nil {
		return time.Time{}, err
	}
	return info.Created, nil
}

// serverTime is what the server's clock says, which also tells when records were put.
func serverTime(ctx context.Context, bucket jetstream.KeyValue) (time.Time, error) {
	info, err := streamInfo(ctx, bucket)
	if err != nil {
		return time.Time{}, err
	}
	return info.TimeStamp, nil
}

func streamInfo(ctx context.Context, bucket jetstream.KeyValue) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	status, err := bucket.Status(ctx)
	if err != nil {
		return nil, err
	}
	s, ok := status.(*jetstream.KeyValueBucketStatus)
	if !ok {
		return nil, errors.New("fleet: the status of a bucket is of an unknown kind")
	}
	return s.StreamInfo(), nil
}

// watch follows the registry until it cannot.
func (r *Registry) watch(ctx context.Context, beats <-chan *nats.Msg) error {
	r.connection.Store(r.nc.Stats().Reconnects)
	opening, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	bucket, err := openBucket(opening, r.nc, r.conf.Scope, r.conf.Replicas)
	if err != nil {
		return fmt.Errorf("fleet: open the bucket: %w", err)
	}
	asked, err := serverTime(opening, bucket)
	if err != nil {
		return fmt.Errorf("fleet: ask for the bucket's time: %w", err)
	}
	watcher, err := bucket.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("fleet: watch the bucket: %w", err)
	}
	defer func() { _ = watcher.Stop() }() // fails if NATS is away, when there is nothing to stop
	following, stop := context.WithCancel(ctx)
	lost := make(chan error, 1)
	var follower sync.WaitGroup
	defer follower.Wait()
	defer stop()
	follower.Go(func() { lost <- follow(following, bucket) })
	r.locked(func(t *Table) { t.Refresh(r.conf.Now()) })

	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case entry, ok := <-watcher.Updates():
			switch {
			case !ok:
				return errAway
			case entry == nil:
				r.ready.Store(true)
			default:
				r.entry(ctx, entry, asked)
			}
		case m := <-beats:
			r.heartbeat(ctx, m)
		case err := <-lost:
			return err
		case <-tick.C:
			// Also if it was away for less than a tick: it may have lost the bucket.
			if !r.nc.IsConnected() || r.reconnected() {
				return errAway
			}
		}
	}
}

func (r *Registry) locked(do func(*Table)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	do(r.table)
}

// overdue is how much longer than records are put apart one was in the bucket when asked,
// by the server's clock; 0 if it came later. Its worker has been silent for at least so
// long, if it is not NATS that was away from all of them: so it is enough that the worker
// stands behind others until its next heartbeat.
func (r *Registry) overdue(e jetstream.KeyValueEntry, asked time.Time) time.Duration {
	if asked.Sub(e.Created()) <= putEvery+heartbeatEvery {
		return 0
	}
	return r.table.ages.Degraded + time.Millisecond
}

// entry takes a change of the bucket, which it may have been before the watch began, when
// it was asked.
func (r *Registry) entry(ctx context.Context, e jetstream.KeyValueEntry, asked time.Time) {
	id, err := strconv.ParseUint(e.Key(), 16, 64)
	if err != nil || e.Key() != wire.WorkerKey(id) {
		r.refuse(ctx, fmt.Errorf("fleet: key %q is no worker id", clip(e.Key())))
		return
	}
	if e.Operation() != jetstream.KeyValuePut {
		r.metrics.count(ctx, newsLeft)
		r.locked(func(t *Table) { t.Delete(id) })
		return
	}
	record, err := ParseRecord(e.Value())
	if err == nil && record.ID() != id {
		err = fmt.Errorf("fleet: the record under key %s is of worker %d", e.Key(), record.ID())
	}
	if err == nil {
		r.locked(func(t *Table) {
			now := r.conf.Now()
			if err = t.Put(now.Add(-r.overdue(e, asked)), record); err == nil {
				t.judge(now, t.workers[id])
			}
		})
	}
	if err != nil {
		r.refuse(ctx, err)
		return
	}
	r.metrics.count(ctx, newsRecord)
}

func (r *Registry) refuse(ctx context.Context, err error) {
	r.metrics.count(ctx, newsRefused)
	r.conf.Log.Warn("a worker's record is refused", "err", err)
}

// Heartbeat is a worker's sign of life.
type Heartbeat struct {
	WorkerID uint64 `json:"worker_id"`
	TS       int64  `json:"ts_ms"`
	Load
	// CachedPrefixes is all that the worker holds: tokens by what [ParsePrefixes] reads.
	// Nil says nothing; an empty one says that it holds nothing any more.
	CachedPrefixes map[string]int `json:"cached_prefixes,omitzero"`
}

func (r *Registry) heartbeat(ctx context.Context, m *nats.Msg) {
	var h Heartbeat
	key := m.Subject[strings.LastIndexByte(m.Subject, '.')+1:]
	if err := json.Unmarshal(m.Data, &h); err != nil || wire.WorkerKey(h.WorkerID) != key {
		r.metrics.count(ctx, newsRefused)
		return
	}
	known := false
	r.locked(func(t *Table) { known = t.Heartbeat(r.conf.Now(), &h) })
	if known {
		r.metrics.count(ctx, newsHeartbeat)
	} else {
		r.metrics.count(ctx, newsStranger)
	}
}
