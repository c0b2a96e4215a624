// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Speaker speaks for a router group: it tells routers above what the group's workers do
// and hold, and answers what a request would find there.
//
// # Invariants
//
//   - Of the replicas of a group that hear each other one speaks, the one that started
//     first: it knows most. It falls silent with its connection, and says so when it
//     leaves; who hears no other for two intervals goes on in its place.
//   - What is told is a sequence by epochs: a full begins one, and says all that the group
//     holds; each message behind it has the next number, and deltas say what came since.
//     So who has all messages of an epoch has the filter that the speaker has.
//   - A probe is answered by one of the replicas, whichever, and books nothing.
//
// Blocks that were removed leave the filter with the next full. A walk over the index
// takes at most a twentieth of the time: with a very large one deltas come less often.
type Speaker struct {
	conf    SpeakerConfig
	nc      *nats.Conn
	link    link
	metrics *groupMetrics

	summaries, beacons string // subjects
	started            int64  // unix ms

	// Of the goroutine that speaks.
	pools     map[poolName]*spoken
	others    map[uint64]other
	listening time.Time // since when others would have been heard; zero while there is no connection
	epoch     uint64    // the last one
	hashes    []uint64  // memory to be used again
	message   []byte
}

// SpeakerConfig says who speaks for whom. Group, ID and Router are required; the zero
// value of each other field means its default.
type SpeakerConfig struct {
	Scope wire.Scope
	Group string
	// ID is the replica's own number, another one at each start.
	ID     uint64
	Router *router.Router
	// Interval is the time between two summaries. Default 1 s. FullEvery is that between
	// two that say all that the group holds. Default 30 s.
	Interval, FullEvery time.Duration
	// Stride is of how many blocks one is told of. Default 4.
	Stride int

	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line when this replica begins or ends to speak. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

const (
	groupInterval = time.Second
	fullEvery     = 30 * time.Second
	groupStride   = 4
	// groupSilence is after how many intervals another replica is taken to be gone.
	groupSilence = 2
	// fullAgain is the time between two fulls that somebody asked for, in intervals.
	fullAgain = 2
	// deltaMost is how many messages a delta takes at most: a full says more in less.
	deltaMost = 4
	// walkShare is the part of the time that is spent on looking for what is new.
	walkShare  = 20
	maxBeacons = 1024
	probeInbox = 1024 // probes that wait for their answer: more would be answered too late
)

// poolName is what a summary is about.
type poolName struct {
	model     string
	blockSize int
}

// spoken is what others were told of a pool.
type spoken struct {
	epoch, next uint64
	filter      *indexer.Filter // nil: a full is due
	full, walk  time.Time       // when the last full was told, and when the next delta may be
	asked       bool
	told        bool // in this round
}

// beacon is what replicas of a group tell each other.
type beacon struct {
	RouterID  uint64 `json:"router_id"`
	StartedMS int64  `json:"started_ms"`
	Leaving   bool   `json:"leaving,omitempty"`
}

// before says whether a replica speaks rather than another one.
func (b *beacon) before(o *beacon) bool {
	return cmp.Or(cmp.Compare(b.StartedMS, o.StartedMS), cmp.Compare(b.RouterID, o.RouterID)) < 0
}

type other struct {
	beacon
	heard time.Time
}

var errSpeakerless = errors.New("Group, ID and Router are required")

// NewSpeaker returns who speaks for a group on a connection that stays its caller's. It
// does nothing before [Speaker.Run].
func NewSpeaker(nc *nats.Conn, conf SpeakerConfig) (*Speaker, error) {
	s, err := newSpeaker(conf, linkOf(nc))
	if err == nil {
		s.nc = nc
	}
	return s, err
}

func newSpeaker(conf SpeakerConfig, to link) (*Speaker, error) {
	if conf.Group == "" || conf.ID == 0 || conf.Router == nil {
		return nil, fmt.Errorf("replicas: router group: %w", errSpeakerless)
	}
	if len(conf.Group) > maxGroupName {
		return nil, fmt.Errorf("replicas: router group: the name has %d bytes, want at most %d", len(conf.Group), maxGroupName)
	}
	conf.Interval = cmp.Or(conf.Interval, groupInterval)
	if ms := conf.Interval.Milliseconds(); ms < minGroupInterval || ms > maxGroupInterval {
		return nil, fmt.Errorf("replicas: router group: the interval is %v, want %v to %v", conf.Interval, minGroupInterval*time.Millisecond, maxGroupInterval*time.Millisecond)
	}
	conf.FullEvery, conf.Stride = cmp.Or(conf.FullEvery, fullEvery), cmp.Or(conf.Stride, groupStride)
	if conf.Stride < 1 || conf.Stride > maxStride {
		return nil, fmt.Errorf("replicas: router group: the stride is %d, want 1 to %d blocks", conf.Stride, maxStride)
	}
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	conf.Meter = cmp.Or[metric.Meter](conf.Meter, noop.Meter{})
	m, err := newGroupMetrics(conf.Meter)
	if err != nil {
		return nil, err
	}
	return &Speaker{
		conf: conf, link: to, metrics: m,
		summaries: conf.Scope.Group(conf.Group, summaryTopic), beacons: conf.Scope.Group(conf.Group, beaconTopic),
		started: conf.Now().UnixMilli(),
		pools:   make(map[poolName]*spoken), others: make(map[uint64]other),
	}, nil
}

// Run speaks until ctx ends.
func (s *Speaker) Run(ctx context.Context) error {
	beacons, asked, probes := make(chan *nats.Msg, 256), make(chan *nats.Msg, 16), make(chan *nats.Msg, probeInbox)
	var subs []*nats.Subscription
	defer func() {
		for _, sub := range subs {
			_ = sub.Unsubscribe() // fails if the connection is closed, when there is nothing to end
		}
	}()
	for _, to := range []struct {
		subject, queue string
		in             chan *nats.Msg
	}{
		{s.beacons, "", beacons},
		{s.conf.Scope.Group(s.conf.Group, summaryTopic, getTopic), "", asked},
		{s.conf.Scope.Group(s.conf.Group, probeTopic), "routers", probes},
	} {
		sub, err := s.nc.ChanQueueSubscribe(to.subject, to.queue, to.in)
		if err != nil {
			return fmt.Errorf("replicas: subscribe to %s: %w", to.subject, err)
		}
		subs = append(subs, sub)
	}
	var both sync.WaitGroup
	both.Go(func() { s.answer(ctx, probes) })
	defer both.Wait()
	s.talk(ctx.Done(), beacons, asked) //nolint:contextcheck // counters need none
	_ = s.nc.FlushTimeout(time.Second) // who is not told that we leave notices it
	return nil
}

// talk is the goroutine that everything but answers leaves by.
func (s *Speaker) talk(done <-chan struct{}, beacons, asked <-chan *nats.Msg) {
	s.announce(false)
	tick := time.NewTicker(s.conf.Interval / 2)
	defer tick.Stop()
	for half := false; ; {
		select {
		case <-done:
			s.announce(true)
			return
		case m := <-beacons:
			s.hear(m.Data)
		case <-asked:
			s.ask()
		case <-tick.C:
			s.announce(false)
			if half = !half; half {
				s.speak(s.conf.Now())
			}
		}
	}
}

// announce tells the other replicas of the group that this one is there.
func (s *Speaker) announce(leaving bool) {
	if !s.link.connected() {
		return
	}
	data, err := json.Marshal(beacon{RouterID: s.conf.ID, StartedMS: s.started, Leaving: leaving})
	if err == nil {
		err = s.link.publish(s.beacons, "", data)
	}
	if err != nil {
		s.metrics.count(groupUnsent)
	}
}

// hear takes what a replica of the group says.
func (s *Speaker) hear(data []byte) {
	var b beacon
	if json.Unmarshal(data, &b) != nil || b.RouterID == 0 || b.RouterID == s.conf.ID {
		return
	}
	_, known := s.others[b.RouterID]
	switch {
	case b.Leaving:
		delete(s.others, b.RouterID)
	case known || len(s.others) < maxBeacons:
		s.others[b.RouterID] = other{b, s.conf.Now()}
	}
}

// ask makes a full due for all pools.
func (s *Speaker) ask() {
	for _, p := range s.pools {
		p.asked = true
	}
}

// speaks says whether it is for this replica to speak.
func (s *Speaker) speaks(now time.Time) bool {
	silence := groupSilence * s.conf.Interval
	if !s.link.connected() {
		s.listening = time.Time{}
		return false
	}
	if s.listening.IsZero() {
		s.listening = now
		for id, o := range s.others {
			o.heard = now // nobody was heard, so nobody is called gone
			s.others[id] = o
		}
	}
	own := beacon{RouterID: s.conf.ID, StartedMS: s.started}
	speaks := len(s.pools) > 0 || now.Sub(s.listening) >= silence
	for id, o := range s.others {
		switch {
		case now.Sub(o.heard) > silence:
			delete(s.others, id)
		case o.before(&own):
			speaks = false
		}
	}
	return speaks
}

// speak tells of all pools, if it is for this replica to speak.
func (s *Speaker) speak(now time.Time) {
	did := len(s.pools) > 0
	if !s.speaks(now) {
		if clear(s.pools); did {
			s.conf.Log.Info("another replica speaks for the group", "group", s.conf.Group)
		}
		return
	}
	for _, m := range s.conf.Router.Models() {
		for _, sum := range s.conf.Router.Summarize(m.Model) {
			s.pool(now, &sum)
		}
	}
	for name, p := range s.pools {
		if !p.told {
			delete(s.pools, name)
		}
		p.told = false
	}
	if !did && len(s.pools) > 0 {
		s.conf.Log.Info("this replica speaks for the group", "group", s.conf.Group, "pools", len(s.pools))
	}
}

// pool tells of a pool what is due.
func (s *Speaker) pool(now time.Time, sum *router.Summary) {
	name := poolName{sum.Model, sum.BlockSize}
	p := s.pools[name]
	if p == nil {
		p = new(spoken)
		s.pools[name] = p
	}
	p.told = true
	m := summary{
		group: s.conf.Group, model: sum.Model, blockSize: sum.BlockSize, router: s.conf.ID,
		kind: summaryLoad, stride: s.conf.Stride, taken: sum.Taken, interval: s.conf.Interval, load: *sum,
	}
	if sum.Silent {
		m.stride = 0
		if p.epoch == 0 || p.filter != nil {
			p.filter = nil
			s.begin(now, p)
		}
		s.publish(p, &m)
		return
	}
	switch {
	case p.filter == nil || now.Sub(p.full) >= s.conf.FullEvery || p.asked && now.Sub(p.full) >= fullAgain*s.conf.Interval:
		s.full(now, p, &m)
	case !now.Before(p.walk):
		s.delta(now, p, &m)
	default:
		s.publish(p, &m)
	}
}

// begin begins an epoch. Its number is larger than that of all before, of other replicas,
// too, as far as clocks agree.
func (s *Speaker) begin(now time.Time, p *spoken) {
	s.epoch = max(s.epoch+1, uint64(max(0, now.UnixMilli()))<<20|rand.Uint64N(1<<20))
	p.epoch, p.next = s.epoch, 0
}

// full tells all that the workers hold.
func (s *Speaker) full(now time.Time, p *spoken, m *summary) {
	began := time.Now()
	s.hashes = s.hashes[:0]
	for h, err := range s.conf.Router.Checkpoints(m.model, m.blockSize, s.conf.Stride) {
		if err != nil {
			// Until it can be read, the old filter holds what it held.
			s.metrics.count(groupOvertaken)
			if p.filter == nil {
				s.begin(now, p)
			}
			s.publish(p, m)
			return
		}
		s.hashes = append(s.hashes, h)
	}
	n := len(s.hashes)
	n += n/8 + 256 // for what comes until the next one
	p.filter = indexer.NewFilter(n)
	for _, h := range s.hashes {
		p.filter.Add(h)
	}
	const most = 1 << 20
	if cap(s.hashes) > most {
		s.hashes = nil // it is as large as the index, and needed only now and then
	}
	s.begin(now, p)
	p.full, p.asked = now, false
	p.walk = now.Add(max(s.conf.Interval, walkShare*time.Since(began)) - s.conf.Interval/4)
	m.kind = summaryFull
	for _, part := range filterParts(p.filter, s.link.room()-4096) {
		m.filter = part
		s.publish(p, m)
	}
}

// delta tells what the workers hold that the filter does not have.
func (s *Speaker) delta(now time.Time, p *spoken, m *summary) {
	began, many := time.Now(), false
	s.hashes = s.hashes[:0]
	for h, err := range s.conf.Router.Checkpoints(m.model, m.blockSize, s.conf.Stride) {
		if err != nil {
			s.metrics.count(groupOvertaken)
			break // what was found is true all the same
		}
		if p.filter.Has(h) {
			continue
		}
		p.filter.Add(h)
		s.hashes = append(s.hashes, h)
		if many = len(s.hashes) > deltaMost*maxSummaryAdds || p.filter.Overfull(); many {
			break
		}
	}
	if many {
		s.full(now, p, m)
		return
	}
	p.walk = now.Add(max(s.conf.Interval, walkShare*time.Since(began)) - s.conf.Interval/4)
	if len(s.hashes) == 0 {
		s.publish(p, m)
		return
	}
	m.kind = summaryDelta
	for from := 0; from < len(s.hashes) && p.filter != nil; from += maxSummaryAdds {
		m.added = appendHashes(m.added[:0], s.hashes[from:min(from+maxSummaryAdds, len(s.hashes))])
		s.publish(p, m)
	}
}

// publish sends a message. One that cannot be sent leaves a hole, and so a full is due.
func (s *Speaker) publish(p *spoken, m *summary) {
	m.epoch, m.seq = p.epoch, p.next
	p.next++
	s.message = appendSummary(s.message[:0], m)
	if !s.link.connected() || s.link.publish(s.summaries, "", s.message) != nil {
		s.metrics.count(groupUnsent)
		p.filter = nil
		return
	}
	s.metrics.sent(m.kind, len(s.message))
}

// answer answers probes.
func (s *Speaker) answer(ctx context.Context, probes <-chan *nats.Msg) {
	var b []byte
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-probes:
			var outcome string
			if b, outcome = s.answerOne(ctx, b[:0], m); outcome != groupBadProbe {
				if s.link.publish(m.Reply, "", b) != nil {
					outcome = groupUnsent
				}
			}
			s.metrics.answered(ctx, outcome)
		}
	}
}

func (s *Speaker) answerOne(ctx context.Context, b []byte, m *nats.Msg) (answer []byte, outcome string) {
	p, err := readProbe(m.Data)
	if err != nil || m.Reply == "" {
		return b, groupBadProbe
	}
	outcome = groupAnswered
	a, err := s.conf.Router.Answer(ctx, p)
	if err != nil {
		a, outcome = router.ProbeAnswer{Busy: true}, groupNoWorker // nobody here takes it
	} else if a.Busy {
		outcome = groupBusy
	}
	a.Group = s.conf.Group
	return appendProbeAnswer(b, &a, &p), outcome
}
