// SPDX-License-Identifier: Apache-2.0

package fleet

import (
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

	"github.com/kvroute/kvroute/internal/beat"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Networks are the networks that workers may have addresses in; [reach.Parse] reads them.
type Networks = reach.Networks

// RegistryConfig configures a [Registry]. Set and Remove are required; the zero value of
// each other field selects its default. The registry calls one function at a time. The
// functions must not call back.
type RegistryConfig struct {
	Scope wire.Scope
	// Replicas is the number of servers of a NATS cluster that keep the registry, if this
	// process creates it. Default 1.
	Replicas int
	// Networks are the networks that workers may have addresses in. Default all.
	Networks Networks
	// Ages are the limits of workers' silence.
	Ages Ages
	// Room returns an error if Set could not take a registered worker. Its record is then refused, and tried again when
	// it is put again. Default: there is room.
	Room func(router.WorkerInfo) error
	// Set receives each worker that is new or has changed, Remove each worker that is gone.
	Set    func(router.WorkerInfo)
	Remove func(id uint64)
	// Events receives each new record, after Set. Default none.
	Events func(Record, router.WorkerInfo)
	// Load receives the load of each heartbeat. Default none.
	Load func(router.WorkerInfo, Load)
	// Traffic returns the work of a worker. Default none.
	Traffic func(id uint64) Traffic
	// Probe probes a worker once, and calls done later, as [Prober.Now] does. Default: no worker is probed.
	Probe func(info router.WorkerInfo, own *Probe, done func(error)) (queued bool)
	// Silent receives each worker that became unhealthy by its silence, and the cause, when a probe has found
	// the cause. Default none.
	Silent func(info router.WorkerInfo, cause string)
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log receives a line for each connection and each refused record. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Registry passes on the workers of the configuration and of the registry in NATS.
type Registry struct {
	conf         RegistryConfig
	registration registration
	news         meter.Counter
	ready        atomic.Bool
	// connection is the number of reconnections when the current watch began. After another
	// reconnection the ages of heartbeats mean nothing until the next watch begins.
	connection atomic.Uint64

	mu sync.Mutex
	// mu guards the field below, and orders the calls of Set and Remove.
	table *Table
}

// NewRegistry returns a registry on a connection that the caller closes.
func NewRegistry(nc *nats.Conn, conf RegistryConfig) (*Registry, error) {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	if conf.Events == nil {
		conf.Events = func(Record, router.WorkerInfo) {}
	}
	if conf.Load == nil {
		conf.Load = func(router.WorkerInfo, Load) {}
	}
	if conf.Traffic == nil {
		conf.Traffic = func(uint64) Traffic { return Traffic{} }
	}
	if conf.Probe == nil {
		conf.Probe = func(router.WorkerInfo, *Probe, func(error)) bool { return false }
	}
	if conf.Silent == nil {
		conf.Silent = func(router.WorkerInfo, string) {}
	}
	conf.Log = meter.Log(conf.Log)
	if err := conf.Ages.Check(); err != nil {
		return nil, err
	}
	m := meter.New(conf.Meter)
	news := m.Counter("kvroute.fleet.news", "{message}", "Messages about workers, by kind.", "kind")
	table := newTable(&conf)
	table.flapped = func() { news.Count("flaps") }
	table.claimed = func(now router.WorkerInfo, before netip.AddrPort) {
		news.Count("claimed")
		conf.Log.Warn("two processes claim one worker's id: the last record counts; give each a name of its own",
			"worker", now.ID, "name", now.Name, "address", now.Address.String(), "other", before.String())
	}
	table.followed = func(old, by router.WorkerInfo) {
		news.Count("followed")
		conf.Log.Info("another worker has started at a worker's address, which is taken to be gone until it is heard",
			"worker", old.ID, "name", old.Name, "address", old.Address.String(), "by", by.Name)
	}
	r := &Registry{conf: conf, registration: registration{nc, conf.Scope, conf.Replicas}, news: news, table: table}
	r.reportLosses(m)
	return r, m.Err()
}

// SetStatic replaces the workers of the configuration; see [Table.SetStatic].
func (r *Registry) SetStatic(records []Record) (err error) {
	r.locked(func(t *Table) { err = t.SetStatic(r.conf.Now(), records) })
	return err
}

// Probed notes the result of a health probe of a worker, and the error of the probe.
func (r *Registry) Probed(id uint64, result Probed, err error) {
	cause := ""
	if result != ProbeAnswered {
		var answer string
		if answer, cause = causeOf(err); answer == "failed" {
			cause = "the probe of its health fails; the log has the error" // an error may have a port that changes
		}
	}
	r.locked(func(t *Table) { t.probedFor(r.conf.Now(), id, result, cause) })
}

// Answered notes that a worker answered a request.
func (r *Registry) Answered(id uint64) {
	r.locked(func(t *Table) { t.Answered(r.conf.Now(), id) })
}

// Sources returns where each worker's record came from: "file" for those of [Registry.SetStatic], "HTTP"
// for workers that registered at this process, and "NATS" for other registered ones.
func (r *Registry) Sources() map[uint64]string {
	sources := map[uint64]string{}
	r.locked(func(t *Table) {
		for id, m := range t.workers {
			switch {
			case m.static:
				sources[id] = "file"
			case m.put.IsZero():
				sources[id] = "NATS"
			default:
				sources[id] = "HTTP"
			}
		}
	})
	return sources
}

// Ready reports whether the registry is connected and has read all records since it connected.
func (r *Registry) Ready() bool {
	return r.ready.Load() && r.registration.nc.IsConnected() && !r.reconnected()
}

func (r *Registry) reconnected() bool {
	return r.registration.nc.Stats().Reconnects != r.connection.Load()
}

func (r *Registry) locked(do func(*Table)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	do(r.table)
}

// Run follows the registry until ctx ends. After each failure of NATS it tries again, and
// the known workers stay.
func (r *Registry) Run(ctx context.Context) error {
	heartbeats := make(chan *nats.Msg, 8192)
	subject := r.conf.Scope.Own(heartbeatTopic, "*")
	sub, err := r.registration.nc.ChanSubscribe(subject, heartbeats)
	if err != nil {
		return fmt.Errorf("fleet: subscribe to %s: %w", subject, err)
	}
	defer func() { _ = sub.Unsubscribe() }() // fails if the connection is closed
	var judge sync.WaitGroup
	defer judge.Wait()
	judge.Go(func() { r.judge(ctx) })
	var retry bus.Retry
	for {
		err := r.watch(ctx, heartbeats)
		r.ready.Store(false)
		if ctx.Err() != nil {
			return nil
		}
		wait := retry.After(err)
		r.conf.Log.Warn("the registry of workers is not available; it is tried again", "err", err, "in", wait)
		bus.Wait(ctx, wait)
	}
}

// judge updates the workers' health by their ages, until ctx ends. While the registry is
// not ready, the cause of a silence may be NATS.
func (r *Registry) judge(ctx context.Context) {
	for bus.Wait(ctx, beat.Wait(time.Second)) {
		r.locked(func(t *Table) { t.Tick(r.conf.Now(), !r.Ready()) })
	}
}

// Reasons why a watch ends: it may have missed messages, so the next watch reads all.
var (
	errAway    = errors.New("NATS was away")
	errDeleted = errors.New("the bucket was deleted")
)

// bucketEvery is the time between two checks that the bucket is still the same. The watch
// of a deleted bucket receives nothing.
const bucketEvery = 3 * time.Second

// watch follows the registry until ctx ends or the watch may miss messages.
func (r *Registry) watch(ctx context.Context, heartbeats <-chan *nats.Msg) error {
	r.connection.Store(r.registration.nc.Stats().Reconnects)
	opening, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	bucket, err := r.registration.bucket(opening)
	if err != nil {
		return fmt.Errorf("fleet: open the bucket: %w", err)
	}
	opened, err := streamInfo(opening, bucket)
	if err != nil {
		return fmt.Errorf("fleet: read the bucket's state: %w", err)
	}
	watcher, err := bucket.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("fleet: watch the bucket: %w", err)
	}
	defer func() { _ = watcher.Stop() }() // fails without a connection, when there is nothing to stop
	watching, stop := context.WithCancel(ctx)
	lost := make(chan error, 1)
	var checking sync.WaitGroup
	defer checking.Wait()
	defer stop()
	checking.Go(func() { lost <- untilReplaced(watching, bucket, opened.Created) })
	r.locked(func(t *Table) { t.Refresh(r.conf.Now()) })

	tick := time.NewTimer(beat.Wait(time.Second))
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
				r.entry(entry, opened.TimeStamp)
			}
		case m := <-heartbeats:
			r.heartbeat(m)
		case err := <-lost:
			return err
		case <-tick.C:
			tick.Reset(beat.Wait(time.Second))
			// After a disconnection shorter than a tick, too: NATS may have lost the bucket.
			if !r.registration.nc.IsConnected() || r.reconnected() {
				return errAway
			}
		}
	}
}

// untilReplaced returns [errDeleted] when the bucket does not exist or was created again,
// and nil when ctx ends. If NATS does not answer, it checks again later.
func untilReplaced(ctx context.Context, bucket jetstream.KeyValue, created time.Time) error {
	for bus.Wait(ctx, beat.Wait(bucketEvery)) {
		info, err := streamInfo(ctx, bucket)
		if errors.Is(err, jetstream.ErrStreamNotFound) || errors.Is(err, jetstream.ErrBucketNotFound) || err == nil && !info.Created.Equal(created) {
			return errDeleted
		}
	}
	return nil
}

func streamInfo(ctx context.Context, bucket jetstream.KeyValue) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, bucketTime)
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

// entry handles a change of the bucket, or a record that the bucket had when it was
// opened. The time is that of the NATS server.
func (r *Registry) entry(e jetstream.KeyValueEntry, opened time.Time) {
	id, err := strconv.ParseUint(e.Key(), 16, 64)
	if err != nil || e.Key() != wire.WorkerKey(id) {
		r.refuse(fmt.Errorf("fleet: key %q is no worker id", clip(e.Key())))
		return
	}
	if e.Operation() != jetstream.KeyValuePut {
		r.news.Count("left")
		r.locked(func(t *Table) { t.Delete(r.conf.Now(), id) })
		return
	}
	record, err := ParseRecord(e.Value())
	if err == nil && record.ID() != id {
		err = fmt.Errorf("fleet: the record under key %s is of worker %q (%d)", e.Key(), clip(record.Name), record.ID())
	}
	if err == nil {
		r.locked(func(t *Table) {
			now := r.conf.Now()
			if err = t.Put(now.Add(-r.overdue(e, opened)), record); err == nil {
				t.judge(now, t.workers[id])
			}
		})
	}
	if err != nil {
		r.refuse(err)
		return
	}
	r.news.Count("record")
}

// overdue returns an age for a record in the bucket: 0, or the age of a degraded worker if
// the record was older than the time between two puts when the bucket was opened. The
// worker has been silent for that long, unless NATS was unavailable to all workers. So the
// worker is degraded until its next heartbeat.
func (r *Registry) overdue(e jetstream.KeyValueEntry, opened time.Time) time.Duration {
	if opened.Sub(e.Created()) <= putEvery+heartbeatEvery {
		return 0
	}
	return r.table.ages.Degraded + time.Millisecond
}

func (r *Registry) refuse(err error) {
	r.news.Count("refused")
	r.conf.Log.Warn("a worker's record is refused", "err", err)
}

func (r *Registry) heartbeat(m *nats.Msg) {
	var h Heartbeat
	key := m.Subject[strings.LastIndexByte(m.Subject, '.')+1:]
	if err := json.Unmarshal(m.Data, &h); err != nil || wire.WorkerKey(h.WorkerID) != key {
		r.news.Count("refused")
		return
	}
	kind := "stranger"
	r.locked(func(t *Table) {
		if t.Heartbeat(r.conf.Now(), &h) {
			kind = "heartbeat"
		}
	})
	r.news.Count(kind)
}
