// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Probes asks router groups what a request would find there: all at once, and waits only
// so long. A group that did not answer three times in a row is asked once a second, so
// that it does not delay every request.
//
// Its methods may be called by any number of goroutines.
type Probes struct {
	conf    ProbesConfig
	nc      *nats.Conn
	link    link
	metrics *groupMetrics
	inbox   string // before the number of the probe
	running atomic.Bool
	number  atomic.Uint64

	mu sync.Mutex
	// mu guards the fields below.
	waiting map[uint64]chan []byte
	groups  map[string]*probed
}

// ProbesConfig says who is asked. The zero value of each field means its default.
type ProbesConfig struct {
	Scope wire.Scope
	// Most is how many groups of a model there may be at most for any to be asked. Default
	// 8.
	Most int
	// Budget is how long an answer is waited for. Default 3 ms.
	Budget time.Duration
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

const (
	probeGroups = 8
	probeBudget = 3 * time.Millisecond
	probeMisses = 3 // in a row, until a group is asked less often
	probeAgain  = time.Second
)

// probed is how well a group answers.
type probed struct {
	subject string
	misses  int
	asked   time.Time
}

// NewProbes returns who asks on a connection that stays its caller's. Before
// [Probes.Run], and after, nobody is asked.
func NewProbes(nc *nats.Conn, conf ProbesConfig) (*Probes, error) {
	if conf.Most == 0 {
		conf.Most = probeGroups
	}
	if conf.Budget == 0 {
		conf.Budget = probeBudget
	}
	conf.Meter = cmp.Or[metric.Meter](conf.Meter, noop.Meter{})
	m, err := newGroupMetrics(conf.Meter)
	if err != nil {
		return nil, err
	}
	return &Probes{
		conf: conf, nc: nc, link: linkOf(nc), metrics: m, inbox: nc.NewInbox() + ".",
		waiting: make(map[uint64]chan []byte), groups: make(map[string]*probed),
	}, nil
}

// Run takes answers until ctx ends.
func (p *Probes) Run(ctx context.Context) error {
	sub, err := p.nc.Subscribe(p.inbox+"*", p.answered)
	if err != nil {
		return fmt.Errorf("replicas: subscribe to %s*: %w", p.inbox, err)
	}
	p.running.Store(true)
	<-ctx.Done()
	p.running.Store(false)
	_ = sub.Unsubscribe() // fails if the connection is closed, when there is nothing to end
	return nil
}

// answered hands an answer to who waits for it.
func (p *Probes) answered(m *nats.Msg) {
	number, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, p.inbox), 10, 64)
	if err != nil {
		return
	}
	p.mu.Lock()
	to := p.waiting[number]
	p.mu.Unlock()
	select {
	case to <- m.Data:
	default: // it is too late, or nobody's
	}
}

// Ask asks the groups of a probe, and returns the answers that came in time; see
// [router.Config.Probe].
func (p *Probes) Ask(ctx context.Context, q router.Probe) (answers []router.ProbeAnswer) {
	switch {
	case !p.running.Load() || !p.link.connected():
		p.metrics.probed(ctx, groupUnsent, len(q.Groups))
		return nil
	case len(q.Groups) > p.conf.Most || len(q.Local) > maxProbeBlocks:
		p.metrics.probed(ctx, groupTooMany, len(q.Groups))
		return nil
	}
	start := time.Now()
	groups := p.worth(start, q.Groups)
	p.metrics.probed(ctx, groupSkipped, len(q.Groups)-len(groups))
	if len(groups) == 0 {
		return nil
	}
	in, number := make(chan []byte, len(groups)), p.number.Add(1)
	p.mu.Lock()
	p.waiting[number] = in
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.waiting, number)
	}()
	reply, data := p.inbox+strconv.FormatUint(number, 10), appendProbe(nil, &q)
	sent := 0
	for _, g := range groups {
		if p.link.publish(g.subject, reply, data) != nil {
			p.metrics.probed(ctx, groupUnsent, 1)
			continue
		}
		sent++
	}
	late := time.NewTimer(p.conf.Budget)
	defer late.Stop()
	for waits := true; waits && sent > 0; {
		select {
		case data := <-in:
			sent--
			a, err := readProbeAnswer(data, &q)
			switch {
			case len(data) == 0:
				p.metrics.probed(ctx, groupNobody, 1) // the server says that nobody listens
			case err != nil || !slices.Contains(q.Groups, a.Group):
				p.metrics.probed(ctx, groupBad, 1)
			default:
				p.metrics.probed(ctx, groupAnswered, 1)
				answers = append(answers, a)
			}
		case <-late.C:
			waits = false
		case <-ctx.Done():
			waits = false
		}
	}
	p.metrics.probed(ctx, groupLate, sent)
	p.metrics.probeTook(ctx, time.Since(start))
	p.judge(q.Groups, groups, answers)
	return answers
}

// worth returns the groups that are worth asking.
func (p *Probes) worth(now time.Time, names []string) (list []*probed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range names {
		g := p.groups[name]
		if g == nil {
			if len(p.groups) >= maxGroups {
				clear(p.groups) // of groups that are no more
			}
			g = &probed{subject: p.conf.Scope.Group(name, probeTopic)}
			p.groups[name] = g
		}
		if g.misses >= probeMisses && now.Sub(g.asked) < probeAgain {
			continue
		}
		g.asked = now
		list = append(list, g)
	}
	return list
}

// judge notes who answered.
func (p *Probes) judge(names []string, asked []*probed, answers []router.ProbeAnswer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range names {
		g := p.groups[name]
		switch {
		case g == nil || !slices.Contains(asked, g):
		case slices.ContainsFunc(answers, func(a router.ProbeAnswer) bool { return a.Group == name }):
			g.misses = 0
		default:
			g.misses = min(g.misses+1, probeMisses)
		}
	}
}
