// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"cmp"
	"context"
	"errors"
	"sync"
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
	metrics *groupMetrics

	mu sync.Mutex
	// mu guards the field below.
	groups map[string]*probed
}

// ProbesConfig says which groups are asked. The zero value of each field means its default.
type ProbesConfig struct {
	Scope wire.Scope
	// Most is the number of groups of a model above which no group is asked. Default 8.
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
	misses int
	asked  time.Time
}

// NewProbes returns probes on a connection that stays its caller's.
func NewProbes(nc *nats.Conn, conf ProbesConfig) (*Probes, error) {
	conf.Most, conf.Budget = cmp.Or(conf.Most, probeGroups), cmp.Or(conf.Budget, probeBudget)
	m, err := newGroupMetrics(cmp.Or[metric.Meter](conf.Meter, noop.Meter{}))
	if err != nil {
		return nil, err
	}
	return &Probes{conf: conf, nc: nc, metrics: m, groups: make(map[string]*probed)}, nil
}

// Ask asks the groups of a probe, and returns the answers that came in time; see
// [router.Config.Probe].
func (p *Probes) Ask(ctx context.Context, q router.Probe) (answers []router.ProbeAnswer) {
	switch {
	case !p.nc.IsConnected():
		p.metrics.probed(ctx, groupUnsent, len(q.Groups))
		return nil
	case len(q.Groups) > p.conf.Most || len(q.Local) > maxProbeBlocks:
		p.metrics.probed(ctx, groupTooMany, len(q.Groups))
		return nil
	}
	start := time.Now()
	groups := p.responsive(start, q.Groups)
	p.metrics.probed(ctx, groupSkipped, len(q.Groups)-len(groups))
	if len(groups) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.conf.Budget)
	defer cancel()
	data := appendProbe(nil, &q)
	found := make([]*router.ProbeAnswer, len(groups))
	var asking sync.WaitGroup
	for i, name := range groups {
		asking.Go(func() { found[i] = p.askOne(ctx, name, data, &q) })
	}
	asking.Wait()
	p.metrics.probeTook(ctx, time.Since(start))
	p.note(groups, found)
	for _, a := range found {
		if a != nil {
			answers = append(answers, *a)
		}
	}
	return answers
}

// askOne returns a group's answer, nil if none comes in time.
func (p *Probes) askOne(ctx context.Context, name string, data []byte, q *router.Probe) *router.ProbeAnswer {
	m, err := p.nc.RequestWithContext(ctx, p.conf.Scope.Group(name, probeTopic), data)
	outcome := groupAnswered
	var a router.ProbeAnswer
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		outcome = groupNobody
	case ctx.Err() != nil:
		outcome = groupLate
	case err != nil:
		outcome = groupUnsent
	default:
		if a, err = readProbeAnswer(m.Data, q); err == nil && a.Group != name {
			err = wrong("group", clip(a.Group))
		}
		if err != nil {
			outcome = groupBad
		}
	}
	p.metrics.probed(ctx, outcome, 1)
	if err != nil {
		return nil
	}
	return &a
}

// responsive returns the groups that are worth asking.
func (p *Probes) responsive(now time.Time, names []string) (list []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range names {
		g := p.groups[name]
		if g == nil {
			if len(p.groups) >= maxGroups {
				clear(p.groups) // of groups that are no more
			}
			g = new(probed)
			p.groups[name] = g
		}
		if g.misses >= probeMisses && now.Sub(g.asked) < probeAgain {
			continue
		}
		g.asked = now
		list = append(list, name)
	}
	return list
}

// note notes which groups answered.
func (p *Probes) note(names []string, answers []*router.ProbeAnswer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, name := range names {
		switch g := p.groups[name]; {
		case g == nil:
		case answers[i] != nil:
			g.misses = 0
		default:
			g.misses = min(g.misses+1, probeMisses)
		}
	}
}
