// SPDX-License-Identifier: Apache-2.0

// Package replicas has the messages between router replicas and between router groups. The
// replicas of one router exchange their requests in flight ([Sync]) and their presence
// ([Presence]). A router group publishes the load and the cached blocks of its workers to
// routers above ([GroupPublisher]). A router above follows the groups ([Groups]) and asks
// them about single requests ([Probes]).
package replicas

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Sync exchanges requests in flight with the other replicas of a router, so that each
// replica decides by the load of all.
//
// # Protocol
//
// Each replica owns its requests. It publishes every change of them; a change leaves at
// most 10 ms after it happened, together with the other changes of that time. Messages are
// numbered. Every 2 s a replica publishes its presence: the number of its next message,
// and how many requests it has in flight. A peer that misses a number, or counts
// otherwise, requests the whole list, which replaces what the peer holds. The list
// expires with the presence: after three missed ones, or when the replica says that it
// leaves. While this replica has no connection, no peer expires.
//
// A replica that meets another one, or has a connection again, also requests the ids that workers gave out: nothing
// else repeats them.
//
// A replica that has received nothing from another router for a minute sends no changes. It
// skips a number, so that a peer that returns notices the gap.
//
// # Invariants
//
//   - One goroutine sends and one receives, so messages, presences and lists of a replica
//     are in one order. A list holds exactly what the messages before it made.
//   - The requests held of a peer are the result of all its messages so far, unless a
//     request for its list is pending.
//   - Only a peer's own messages change the requests held of it.
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

	own        ownRequests
	sessions   chan router.SessionBinding // to publish
	given      chan router.GivenBinding   // to publish
	othersSeen atomic.Int64               // when another router was last there, in ns since 1970
	announce   chan struct{}              // holds a token if this replica must publish its presence now
	workers    workerChanges
	status     atomic.Pointer[syncStatus] // as of the last tick
}

// syncStatus is what a replica holds of the others.
type syncStatus struct {
	peers   []PeerView
	routers int // peers, and routers of Dynamo
}

// SyncConfig configures [Sync]. ID, Apply, Remove and FirstToken are required; the zero
// value of each other field selects its default.
type SyncConfig struct {
	Scope wire.Scope
	// ID is the number of the replica. It differs after each start.
	ID uint64
	// Presence is published with the state of the exchange added.
	Presence Presence

	// Apply takes a change of a peer's request; see [router.Router.PeerChanged].
	Apply func(peer uint64, c router.Change) (known bool)
	// Remove drops all requests of a peer; see [router.Router.RemovePeer].
	Remove func(peer uint64)
	// FirstToken takes the first token of an own request that another process reported.
	FirstToken func(id string) (news bool)
	// Bind takes a peer's session binding; see [router.Router.PeerSession]. Default: session bindings
	// are ignored.
	Bind func(router.SessionBinding) (news bool)
	// BindGiven takes the binding of an id that a peer's worker gave out; see [router.Router.PeerGave]. Default:
	// these bindings are ignored.
	BindGiven func(router.GivenBinding) (news bool)
	// Given returns the bindings of all ids, for a replica that begins; see [router.Router.GivenBindings]. Default: none.
	Given func() []router.GivenBinding

	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log receives a line for each replica that comes, goes or is late. Default none.
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
	presentEvery   = 2 * time.Second       // a replica is gone after three missing presences
	syncDelay      = time.Millisecond      // the least time that a change waits for others
	syncSpacing    = 10 * time.Millisecond // between two rounds of messages
	syncListEvery  = 50 * time.Millisecond // between two answers to requests for the list
	syncQuietAfter = time.Minute           // without another router, until changes are not sent
	syncDynamo     = 300 * time.Second     // without a message, until a router of Dynamo is removed
	syncLate       = 100 * time.Millisecond

	syncInbox    = 1 << 16 // received messages that wait
	syncSessions = 4096    // bindings of a kind that wait to be sent
	syncPeers    = 1024    // peers, and routers of Dynamo
	syncRequests = 1 << 18 // requests of a peer
	syncHashes   = 1 << 23 // of the prompts' blocks in a peer's list
)

// NewSync returns the exchange of one replica, on a connection that the caller closes.
// [Sync.Run] does the exchange.
func NewSync(nc *nats.Conn, conf SyncConfig) (*Sync, error) {
	if conf.ID == 0 || conf.Apply == nil || conf.Remove == nil || conf.FirstToken == nil {
		return nil, errors.New("replica sync: ID, Apply, Remove and FirstToken are required")
	}
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = meter.Log(conf.Log)
	s := &Sync{
		conf: conf, nc: nc, link: linkOf(nc),
		times: syncTimes{presence: presentEvery, ask: presentEvery, jitter: 100 * time.Millisecond},
		topic: conf.Scope.Topic(syncTopic), sessionTopic: conf.Scope.Topic(sessionTopic),
		presence: conf.Scope.Own(presenceTopic), lists: conf.Scope.Own("dump", wire.WorkerKey(conf.ID)),
		sessions: make(chan router.SessionBinding, syncSessions), given: make(chan router.GivenBinding, syncSessions),
		announce: make(chan struct{}, 1),
	}
	s.status.Store(&syncStatus{peers: []PeerView{}})
	var err error
	s.metrics, err = newSyncMetrics(conf.Meter, s.status.Load)
	s.own = ownRequests{
		id: conf.ID, metrics: s.metrics, wake: make(chan struct{}, 1), requests: make(map[string]*ownRequest),
	}
	return s, err
}

// Publish publishes a change of the router's own requests, or the first token of a peer's
// request that this router received; see [router.Hooks.Tell]. It never waits for the bus.
func (s *Sync) Publish(c router.Change) { s.own.change(&c) }

// PublishSession publishes the binding of a session of this router; see
// [router.Hooks.TellSession]. Bindings are hints: one without room is dropped.
func (s *Sync) PublishSession(b router.SessionBinding) {
	if s.alone() {
		return
	}
	if len(b.Session) <= maxSyncID {
		select {
		case s.sessions <- b:
			return
		default:
		}
	}
	s.metrics.drops.Count("session")
}

// PublishGiven publishes the binding of an id that a worker gave out; see [router.Hooks.TellGiven]. A binding without
// room is dropped.
func (s *Sync) PublishGiven(b router.GivenBinding) {
	if s.alone() {
		return
	}
	select {
	case s.given <- b:
	default:
		s.metrics.drops.Count("given")
	}
}

// WorkerChanged notes that the router knows a worker now, or has dropped it with all its
// requests. Peers' requests on a known worker are booked again.
func (s *Sync) WorkerChanged(id uint64, known bool) { s.workers.add(id, known) }

// PeerView is the state of another replica, as this one holds it.
type PeerView struct {
	RouterID uint64 `json:"router_id"`
	Replica  string `json:"replica,omitempty"`
	// ActiveRequests is the number of its requests in flight. Whole is false while a request
	// for its list is pending.
	ActiveRequests int  `json:"active_requests"`
	Whole          bool `json:"whole"`
}

// Views returns the number of this replica's requests in flight, and the state of each other
// replica, ordered by id, as of some milliseconds ago. Routers of Dynamo are not included.
func (s *Sync) Views() (own int, peers []PeerView) { return s.own.count(), s.status.Load().peers }

// Run exchanges changes until ctx ends. Then it publishes that this replica leaves, and
// peers drop its requests. So ctx must not end before the requests have ended.
func (s *Sync) Run(ctx context.Context) error {
	in, asked := make(chan *nats.Msg, syncInbox), make(chan *nats.Msg, 1024)
	subjects := []string{s.topic, s.presence, s.lists}
	if s.conf.Bind != nil || s.conf.BindGiven != nil {
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
	sending.Go(func() { newSender(s).run(ctx.Done(), asked) })
	newReceiver(s).run(ctx.Done(), in) //nolint:contextcheck // its queries end with the receiver
	sending.Wait()
	_ = s.nc.FlushTimeout(time.Second) // a peer that misses the last message drops the requests later
	return nil
}

// listRequests returns the subject of requests for a replica's list.
func (s *Sync) listRequests(id uint64) string { return s.conf.Scope.Own("sync", wire.WorkerKey(id)) }

// alone reports whether no other router was present for some time. Then nothing is sent.
func (s *Sync) alone() bool {
	return s.conf.Now().UnixNano()-s.othersSeen.Load() > int64(syncQuietAfter)
}

// workerChanges are the workers that the router added or dropped since the last take.
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
