// SPDX-License-Identifier: Apache-2.0

// Package replicas is what router replicas and router groups tell each other. The
// replicas of one router tell each other of their requests in flight ([Sync]) and that
// they run ([Presence]). A router group tells routers above it of its workers' load and
// cached blocks ([Speaker]); a router above listens ([Groups]) and asks ([Probes]).
package replicas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Sync tells the other router replicas of this one's requests in flight, and the
// router of theirs, so that all decide by the load of all.
//
// # What is promised
//
// What a replica tells leaves at most a millisecond after it happened, and is never
// waited for: [Sync.Tell] does not block, nor does the bus. While no other replica has
// been heard for a minute nothing leaves, for a message costs several times what a
// decision does; one that comes hears of everything when it asks, as after any loss.
// Messages can be lost; a replica finds out within a presence (2 s) and asks for
// everything anew, so once nobody books or loses anything the slots of all replicas are
// the union of all replicas' requests. A replica that says that it leaves takes along
// what it has not ended; one that is not heard for three presences is gone, with all
// that it told. While our own connection is away nobody is called gone.
//
// # Invariants
//
//   - One goroutine sends: the messages of a replica, its presences and the answers to
//     those who ask for all are in one order on its connection. What an answer holds is
//     exactly what the messages before it made.
//   - One goroutine receives, through one channel, so that this order holds there. What
//     is held of a peer that is whole is what its messages made up to next.
//   - The digest of what is held of a peer changes by the peer's own words only, so that
//     it can be compared with what the peer says. A first token that somebody else
//     noticed changes slots alone.
//
// Routers of Dynamo are understood, too. They have no presence and cannot be asked:
// their requests end 300 s after they were told of, if nobody says so before. One that
// is the only other router hears of what happens behind its own first message.
type Sync struct {
	conf    SyncConfig
	nc      *nats.Conn
	link    link
	period  period
	metrics *syncMetrics
	// Where all speak of their requests, where they say that they are there, and where
	// this one is answered.
	topic, presence, answers string
	// Where they speak of sessions, and what is to be said of ours.
	sessionTopic string
	sessions     chan router.SessionBinding

	queue    syncQueue
	listened atomic.Int64               // when somebody was last there to listen, in ns since 1970
	own      atomic.Int64               // requests in flight, as told so far
	heard    atomic.Pointer[[]PeerView] // by the last tick

	workers syncWorkers
	greet   chan struct{} // a replica has come that should hear us soon
}

// SyncConfig says who tells whom. ID and the three functions are required; the zero
// value of each other field means its default.
type SyncConfig struct {
	Scope wire.Scope
	// ID is the replica's own number, another one at each start. Presence is what else
	// it says of itself.
	ID       uint64
	Presence Presence
	// Single sends each change as a message of its own, for Dynamo 1.4 and older.
	Single bool

	// Changed takes what a peer tells, as [router.Router.PeerChanged] does, Gone that it
	// is no more, and FirstToken the first token of an own request that somebody else
	// noticed.
	Changed    func(peer uint64, c router.Change) (known bool)
	Gone       func(peer uint64)
	FirstToken func(id string) (news bool)
	// Session takes what a peer tells of a session, as [router.Router.PeerSession] does.
	// Default: nobody listens.
	Session func(router.SessionBinding) (news bool)

	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line for each replica that comes, goes or is late. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// period are the times of the exchange.
type period struct {
	presence time.Duration // who is silent for three of these is gone
	ask      time.Duration // between two questions to one peer, at least
	jitter   time.Duration // within which a question follows its reason
}

const (
	syncDelay      = time.Millisecond // that the first change of a message waits for others
	syncBatch      = 256              // changes in a message
	syncLimit      = 100_000          // changes that wait to be sent
	syncInbox      = 1 << 16          // messages that wait to be read
	syncWorkerFor  = time.Minute      // for which a request waits for its worker to be known
	syncGhostFor   = 300 * time.Second
	syncEarlyFor   = 30 * time.Second // for which a first token, or an end, waits for its request
	syncMemory     = 1 << 16          // of those, at most
	syncPeers      = 1024             // replicas listened to, at most
	syncRequests   = 1 << 18          // requests of one of them, at most
	syncBehind     = 3                // presences in a row that are taken to come late
	syncLate       = 100 * time.Millisecond
	syncQuietAfter = time.Minute           // without anybody who listens; who is only not heard still hears
	syncSessions   = 4096                  // bindings that wait to be sent
	syncAnswers    = 50 * time.Millisecond // between two answers to those who ask for all
)

// link is the bus, so that tests can have a worse one.
type link struct {
	publish   func(subject, reply string, data []byte) error
	connected func() bool
	breaks    func() uint64 // connections lost and found again so far
	room      func() int    // the largest message in bytes
}

// linkOf is a connection as a link.
func linkOf(nc *nats.Conn) link {
	return link{
		publish: func(subject, reply string, data []byte) error {
			return nc.PublishMsg(&nats.Msg{Subject: subject, Reply: reply, Data: data})
		},
		connected: func() bool { return nc.IsConnected() },
		breaks:    func() uint64 { return nc.Stats().Reconnects },
		room:      func() int { return int(nc.MaxPayload()) },
	}
}

// errPeerless says what is missing in a configuration.
var errPeerless = errors.New("ID, Changed, Gone and FirstToken are required")

// NewSync returns the exchange of one replica on a connection that stays its caller's.
// It does nothing before [Sync.Run]; what it was told waits until then.
func NewSync(nc *nats.Conn, conf SyncConfig) (*Sync, error) {
	if conf.ID == 0 || conf.Changed == nil || conf.Gone == nil || conf.FirstToken == nil {
		return nil, fmt.Errorf("replicas: replica sync: %w", errPeerless)
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
		conf: conf, nc: nc, metrics: m, greet: make(chan struct{}, 1),
		period: period{presence: presentEvery, ask: presentEvery, jitter: 100 * time.Millisecond},
		link:   linkOf(nc),
	}
	s.topic, s.presence, s.answers = conf.Scope.Topic(syncTopic), conf.Scope.Own(presenceTopic), conf.Scope.Own("dump", wire.WorkerKey(conf.ID))
	s.sessionTopic, s.sessions = conf.Scope.Topic(sessionTopic), make(chan router.SessionBinding, syncSessions)
	s.queue.limit = syncLimit
	s.queue.quiet.Store(true)
	s.queue.wake, s.queue.full = make(chan struct{}, 1), make(chan struct{}, 1)
	return s, nil
}

// Tell takes a change of the router's own slots; see [router.Config.Tell].
func (s *Sync) Tell(c router.Change) {
	if lost := s.queue.put(&c); lost != "" {
		s.metrics.dropped(lost)
	}
}

// TellSession takes where a session of ours is bound; see [router.Config.TellSession].
// It is a hint: one for which there is no room is not told, and nobody asks for it.
func (s *Sync) TellSession(b router.SessionBinding) {
	if s.queue.quiet.Load() {
		return // nobody listens
	}
	if len(b.Session) > maxSyncID {
		s.metrics.dropped(droppedSession)
		return
	}
	select {
	case s.sessions <- b:
	default:
		s.metrics.dropped(droppedSession)
	}
}

// WorkerChanged says that a worker came, or, if it is not there, went with its slots.
// Requests on it are counted anew.
func (s *Sync) WorkerChanged(id uint64, there bool) { s.workers.put(id, there) }

// PeerView is what is held of another router replica.
type PeerView struct {
	RouterID uint64 `json:"router_id"`
	Replica  string `json:"replica,omitempty"`
	// ActiveRequests are its requests in flight. Whole says that none is missing, by all
	// that was heard so far.
	ActiveRequests int  `json:"active_requests"`
	Whole          bool `json:"whole"`
}

// Views returns how many requests this replica has told that it has in flight, and what
// it holds of each other one that it hears, by id; both some milliseconds old. Routers
// of Dynamo are not among them.
func (s *Sync) Views() (own int, peers []PeerView) {
	if heard := s.heard.Load(); heard != nil {
		peers = *heard
	}
	return int(s.own.Load()), peers
}

// syncWorkers are the workers that changed since somebody looked.
type syncWorkers struct {
	mu sync.Mutex
	// mu guards the fields below.
	came, gone []uint64
}

func (w *syncWorkers) put(id uint64, there bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if there {
		w.came = append(w.came, id)
	} else {
		w.gone = append(w.gone, id)
	}
}

func (w *syncWorkers) take() (came, gone []uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	came, gone = w.came, w.gone
	w.came, w.gone = nil, nil
	return came, gone
}

// questions is where a replica is asked for all of its requests.
func (s *Sync) questions(id uint64) string { return s.conf.Scope.Own("sync", wire.WorkerKey(id)) }

// Run exchanges until ctx ends, and then says that this replica leaves: others count
// its requests no more. So ctx must not end before those are over, as far as anybody
// waits for them.
func (s *Sync) Run(ctx context.Context) error {
	in, asked := make(chan *nats.Msg, syncInbox), make(chan *nats.Msg, 1024)
	heard := append([]string{s.topic, s.presence, s.answers}, s.conf.Scope.ComponentTopics(syncTopic)...)
	if s.conf.Session != nil {
		heard = append(append(heard, s.sessionTopic), s.conf.Scope.ComponentTopics(sessionTopic)...)
	}
	subs := make([]*nats.Subscription, 0, len(heard)+1)
	subscribe := func(subject string, to chan *nats.Msg) error {
		sub, err := s.nc.ChanSubscribe(subject, to)
		if err != nil {
			return fmt.Errorf("replicas: subscribe to %s: %w", subject, err)
		}
		subs = append(subs, sub)
		return nil
	}
	for _, subject := range heard {
		if err := subscribe(subject, in); err != nil {
			return err
		}
	}
	if err := subscribe(s.questions(s.conf.ID), asked); err != nil {
		return err
	}
	defer func() {
		for _, sub := range subs {
			_ = sub.Unsubscribe() // fails if the connection is closed, when there is nothing to end
		}
	}()
	var both sync.WaitGroup
	both.Go(func() { s.send(ctx.Done(), asked) }) //nolint:contextcheck // counters need none
	s.receive(ctx.Done(), in)                     //nolint:contextcheck // as before
	both.Wait()
	_ = s.nc.FlushTimeout(time.Second) // who did not hear it notices by the silence
	return nil
}

// send is the goroutine that everything of this replica leaves by.
func (s *Sync) send(done <-chan struct{}, asked <-chan *nats.Msg) {
	o := newOutgoing(s)
	o.present()
	tick := time.NewTicker(s.period.presence)
	defer tick.Stop()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	open := asked // nil for a while after an answer
	var again <-chan time.Time
	for {
		select {
		case <-done:
			o.leave()
			return
		case <-s.queue.wake:
			timer.Reset(syncDelay)
			select {
			case <-timer.C:
			case <-s.queue.full:
			case <-done:
			}
			o.take()
		case <-s.queue.full: // while nobody listens
			o.take()
		case b := <-s.sessions:
			o.session(b)
		case <-tick.C:
			o.present()
		case <-s.greet:
			o.present()
		case m := <-open:
			o.answer(askers(m, open))
			open, again = nil, time.After(syncAnswers)
		case <-again:
			open, again = asked, nil
		}
	}
}

// askers returns to whom an answer goes: all who wait for one now.
func askers(first *nats.Msg, more <-chan *nats.Msg) (replies []string) {
	for m := first; ; {
		if m.Reply != "" && !slices.Contains(replies, m.Reply) {
			replies = append(replies, m.Reply)
		}
		select {
		case m = <-more:
		default:
			return replies
		}
	}
}

// receive is the goroutine that everything of other replicas comes in by.
func (s *Sync) receive(done <-chan struct{}, in <-chan *nats.Msg) {
	p := newPeers(s)
	tick := time.NewTicker(min(max(s.period.presence/20, time.Millisecond), 100*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case m := <-in:
			p.message(m.Subject, m.Data)
		case <-tick.C:
			// Who waits in the channel is not silent: first all that came before the tick.
			for range len(in) {
				m := <-in
				p.message(m.Subject, m.Data)
			}
			p.tick()
		}
	}
}

// within returns a random part of a time, so that not all do the same at once.
func within(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return rand.N(d)
}
