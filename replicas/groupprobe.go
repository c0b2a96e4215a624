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

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// Probes asks router groups which worker would get a request. It asks all groups at once and
// waits for a limited time. A group that did not answer three times in a row is asked once
// a second, so that it does not delay every request.
//
// Its methods may be called by any number of goroutines.
type Probes struct {
	conf   ProbesConfig
	nc     *nats.Conn
	probes meter.Counter
	took   metric.Float64Histogram

	mu sync.Mutex
	// mu guards the field below.
	groups map[string]*probedGroup
}

// ProbesConfig configures [Probes]. The zero value of each field selects its default.
type ProbesConfig struct {
	Scope wire.Scope
	// Most is the number of groups of a model above which no group is asked. Default 8.
	Most int
	// Budget is the time limit for answers. Default 3 ms.
	Budget time.Duration
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

const (
	probeGroups = 8
	probeBudget = 3 * time.Millisecond
	probeMisses = 3 // missing answers in a row, until a group is asked less often
	probeAgain  = time.Second
)

type probedGroup struct {
	misses int // missing answers in a row
	asked  time.Time
}

// NewProbes returns Probes on a connection that the caller closes.
func NewProbes(nc *nats.Conn, conf ProbesConfig) (*Probes, error) {
	conf.Most, conf.Budget = cmp.Or(conf.Most, probeGroups), cmp.Or(conf.Budget, probeBudget)
	m := meter.New(conf.Meter)
	return &Probes{
		conf: conf, nc: nc, groups: make(map[string]*probedGroup),
		probes: m.Counter("kvroute.group.probes", "{probe}", "Probes of router groups, by what became of them.", "outcome"),
		took: m.Seconds("kvroute.group.probe.duration", "Time that a request waited for the answers to its probes.",
			.0001, .0002, .0005, .001, .002, .003, .005, .01),
	}, m.Err()
}

// Ask asks the groups of a probe, and returns the answers that came in time; see
// [router.Config.Probe].
func (p *Probes) Ask(ctx context.Context, q router.Probe) (answers []router.ProbeAnswer) {
	switch {
	case !p.nc.IsConnected():
		p.probes.Add(len(q.Groups), "unsent")
		return nil
	case len(q.Groups) > p.conf.Most || len(q.Local) > maxProbeBlocks:
		p.probes.Add(len(q.Groups), "too_many")
		return nil
	}
	start := time.Now()
	groups := p.responsive(start, q.Groups)
	p.probes.Add(len(q.Groups)-len(groups), "skipped")
	data, err := encodeProbe(&q)
	if len(groups) == 0 || err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.conf.Budget)
	defer cancel()
	found := make([]*router.ProbeAnswer, len(groups))
	var asking sync.WaitGroup
	for i, name := range groups {
		asking.Go(func() { found[i] = p.askOne(ctx, name, data, &q) })
	}
	asking.Wait()
	p.took.Record(ctx, time.Since(start).Seconds())
	p.note(groups, found)
	for _, a := range found {
		if a != nil {
			answers = append(answers, *a)
		}
	}
	return answers
}

// askOne returns a group's answer, or nil if none arrives in time.
func (p *Probes) askOne(ctx context.Context, name string, data []byte, q *router.Probe) *router.ProbeAnswer {
	m, err := p.nc.RequestWithContext(ctx, p.conf.Scope.Group(name, probeTopic), data)
	outcome := "bad"
	defer func() { p.probes.Count(outcome) }()
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		outcome = "nobody"
	case ctx.Err() != nil:
		outcome = "late"
	case err != nil:
		outcome = "unsent"
	default:
		if a, err := readProbeAnswer(m.Data, q); err == nil && a.Group == name {
			outcome = "answered"
			return &a
		}
	}
	return nil
}

// responsive returns the groups to ask now.
func (p *Probes) responsive(now time.Time, names []string) (list []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range names {
		g := p.groups[name]
		if g == nil {
			if len(p.groups) >= maxGroups {
				clear(p.groups) // most are no longer configured
			}
			g = new(probedGroup)
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
