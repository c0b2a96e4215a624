// SPDX-License-Identifier: Apache-2.0

// Package replicas is what router replicas and router groups tell each other. The
// replicas of one router tell each other of their requests in flight ([Sync]) and that
// they run ([Presence]). A router group tells routers above it of its workers' load and
// cached blocks ([GroupPublisher]); a router above listens ([Groups]) and asks ([Probes]).
package replicas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Sync exchanges requests in flight with the other replicas of a router, so that all
// replicas decide by the load of all.
//
// # Protocol
//
// Each replica owns its requests. It publishes every change of them; a change leaves at
// most 5 ms after it happened, together with the other changes of that time. Messages are
// numbered. Every 2 s a replica publishes its presence: the number of its next message,
// and how many requests it has in flight. A peer that misses a number, or counts
// otherwise, requests the whole list, which replaces what the peer holds. The list
// expires with the presence: after three missed ones, or when the replica says that it
// leaves. While this replica has no connection, no peer expires.
//
// A replica that has heard no other one for a minute sends no changes; it uses up their
// numbers, so that a peer that returns sees the gap.
//
// # Invariants
//
//   - One goroutine sends and one receives, so messages, presences and lists of a replica
//     are in one order. A list holds exactly what the messages before it made.
//   - What is held of a peer without a pending request for its list is what the peer's
//     messages made, up to the last one.
//   - Only a peer's own messages change what is held of it.
//
// Routers of Dynamo publish changes only, without presence. Their requests end 300 s
// after they began if no message ends them. A router of Dynamo that is the only other
// router receives changes from its own first message on.
type Sync struct {
	conf    SyncConfig
	nc      *nats.Conn
	link    link
	times   syncTimes
	metrics *syncMetrics

	// Subjects: of changes, session bindings, presences, and of lists for this replica.
	topic, sessionTopic, presence, lists string

	own      ownRequests
	sessions chan router.SessionBinding // to be published
	listened atomic.Int64               // when another router was last there, in ns since 1970
	announce chan struct{}              // holds a token if this replica shall publish its presence now
	workers  workerChanges
	views    atomic.Pointer[[]PeerView] // as of the last tick
}

// SyncConfig says what a replica publishes and where peers' changes go. ID, Apply, Remove
// and FirstToken are required; the zero value of each other field means its default.
type SyncConfig struct {
	Scope wire.Scope
	// ID is the replica's own number, another one at each start.
	ID uint64
	// Presence is published with the state of the exchange added.
	Presence Presence

	// Apply takes a change of a peer's request; see [router.Router.PeerChanged].
	Apply func(peer uint64, c router.Change) (known bool)
	// Remove drops all requests of a peer; see [router.Router.RemovePeer].
	Remove func(peer uint64)
	// FirstToken takes the first token of an own request that another process noticed.
	FirstToken func(id string) (news bool)
	// Bind takes a peer's session binding; see [router.Router.PeerSession]. Default: bindings
	// are not received.
	Bind func(router.SessionBinding) (news bool)

	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log gets a line for each replica that comes, goes or is late. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// syncTimes are the times of the exchange, so that tests can have shorter ones.
type syncTimes struct {
	presence time.Duration // between two presences; a peer expires after three
	ask      time.Duration // at least, between two requests for a peer's list
	jitter   time.Duration // at most, from a reason to a request for a list
}

const (
	syncDelay      = time.Millisecond      // the least time that a change waits for others
	syncSpacing    = 5 * time.Millisecond  // between two rounds of messages
	syncListEvery  = 50 * time.Millisecond // between two answers to requests for the list
	syncQuietAfter = time.Minute           // without another router, until changes are not sent
	syncStranger   = 300 * time.Second     // without a message, until a router of Dynamo is forgotten
	syncLate       = 100 * time.Millisecond

	syncInbox    = 1 << 16 // received messages that wait
	syncSessions = 4096    // bindings that wait to be sent
	syncPeers    = 1024    // peers, and routers of Dynamo
	syncRequests = 1 << 18 // requests of a peer
)

var errSyncConfig = errors.New("ID, Apply, Remove and FirstToken are required")

// NewSync returns the exchange of one replica. The connection stays its caller's. Nothing
// is exchanged before [Sync.Run].
func NewSync(nc *nats.Conn, conf SyncConfig) (*Sync, error) {
	if conf.ID == 0 || conf.Apply == nil || conf.Remove == nil || conf.FirstToken == nil {
		return nil, fmt.Errorf("replica sync: %w", errSyncConfig)
	}
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	conf.Meter = cmp.Or[metric.Meter](conf.Meter, noop.Meter{})
	m, err := newSyncMetrics(conf.Meter)
	if err != nil {
		return nil, err
	}
	s := &Sync{
		conf: conf, nc: nc, link: linkOf(nc), metrics: m,
		times: syncTimes{presence: presentEvery, ask: presentEvery, jitter: 100 * time.Millisecond},
		topic: conf.Scope.Topic(syncTopic), sessionTopic: conf.Scope.Topic(sessionTopic),
		presence: conf.Scope.Own(presenceTopic), lists: conf.Scope.Own("dump", wire.WorkerKey(conf.ID)),
		sessions: make(chan router.SessionBinding, syncSessions), announce: make(chan struct{}, 1),
	}
	s.own = ownRequests{
		id: conf.ID, metrics: m, wake: make(chan struct{}, 1),
		requests: make(map[string]*ownRequest), quiet: true,
	}
	return s, nil
}

// Publish takes a change of the router's own requests, or the first token of a peer's
// request that was noticed here; see [router.Config.Tell]. It never waits for the bus.
func (s *Sync) Publish(c router.Change) { s.own.change(&c) }

// PublishSession takes where a session of this router is bound; see
// [router.Config.TellSession]. Bindings are hints: one without room is dropped.
func (s *Sync) PublishSession(b router.SessionBinding) {
	if s.own.isQuiet() {
		return
	}
	if len(b.Session) <= maxSyncID {
		select {
		case s.sessions <- b:
			return
		default:
		}
	}
	s.metrics.dropped(droppedSession, 1)
}

// WorkerChanged takes the news that the router knows a worker, or has dropped it with all
// requests there. Peers' requests on it are booked again, or count as not booked.
func (s *Sync) WorkerChanged(id uint64, known bool) { s.workers.add(id, known) }

// PeerView is what is held of another replica.
type PeerView struct {
	RouterID uint64 `json:"router_id"`
	Replica  string `json:"replica,omitempty"`
	// ActiveRequests are its requests in flight. Whole is false while its list was
	// requested and has not come.
	ActiveRequests int  `json:"active_requests"`
	Whole          bool `json:"whole"`
}

// Views returns how many requests this replica has in flight, and what it holds of each
// other replica, by id, some milliseconds ago. Routers of Dynamo are not among them.
func (s *Sync) Views() (own int, peers []PeerView) {
	if v := s.views.Load(); v != nil {
		peers = *v
	}
	return s.own.count(), peers
}

// Run exchanges until ctx ends, and then publishes that this replica leaves: peers drop
// its requests. So ctx must not end before the requests have.
func (s *Sync) Run(ctx context.Context) error {
	in, asked := make(chan *nats.Msg, syncInbox), make(chan *nats.Msg, 1024)
	subjects := []string{s.topic, s.presence, s.lists}
	if s.conf.Bind != nil {
		subjects = append(subjects, s.sessionTopic)
	}
	subs := subscriptions{nc: s.nc}
	defer subs.end()
	for _, subject := range subjects {
		if err := subs.add(subject, "", in); err != nil {
			return err
		}
	}
	if err := subs.add(s.listRequests(s.conf.ID), "", asked); err != nil {
		return err
	}
	var sending sync.WaitGroup
	sending.Go(func() { newSender(s).run(ctx.Done(), asked) }) //nolint:contextcheck // counters need none
	newReceiver(s).run(ctx.Done(), in)                         //nolint:contextcheck // as before
	sending.Wait()
	_ = s.nc.FlushTimeout(time.Second) // a peer that misses the last message drops the requests later
	return nil
}

// listRequests is the subject on which a replica is asked for its list.
func (s *Sync) listRequests(id uint64) string { return s.conf.Scope.Own("sync", wire.WorkerKey(id)) }

// heardRouter notes that another router is there, which changes are for.
func (s *Sync) heardRouter(now time.Time) {
	s.listened.Store(now.UnixNano())
	s.own.setQuiet(false)
}

// workerChanges are the workers that the router learned of or dropped since the last take.
type workerChanges struct {
	mu sync.Mutex
	// mu guards the fields below.
	known, dropped []uint64
}

func (w *workerChanges) add(id uint64, known bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if known {
		w.known = append(w.known, id)
	} else {
		w.dropped = append(w.dropped, id)
	}
}

func (w *workerChanges) take() (known, dropped []uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	known, dropped = w.known, w.dropped
	w.known, w.dropped = nil, nil
	return known, dropped
}
