// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/router"
)

// What probes cost at most.
const (
	probeTime  = 2 * time.Second // for one answer
	probeBytes = 8 << 20         // of it
	probesOpen = 64              // at a time
	probeEvery = 2500 * time.Millisecond
	loadEvery  = 5 * time.Second
)

// ProberConfig says whom a [Prober] tells. Alive and Load are required.
type ProberConfig struct {
	// Alive is told of a worker that answered its health probe.
	Alive func(id uint64)
	// Load is told of what an engine's metrics say of each of its ranks.
	Load func(info router.WorkerInfo, ranks map[uint32]Load)
	// Client asks. Default [Networks.Client] of all networks.
	Client *http.Client
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Prober asks workers over HTTP whether they live and how full they are: those whose
// records want it. What does not answer within 2 s, or with more than 8 MB, has not
// answered; at most 64 questions are open at a time, one of a kind for each worker.
// Its methods may be called by any number of goroutines.
type Prober struct {
	conf    ProberConfig
	metrics *probeMetrics

	mu sync.Mutex
	// mu guards the field below.
	targets map[uint64]*[2]target // by worker: health, metrics
}

// target is what is asked of a worker again and again.
type target struct {
	info  router.WorkerInfo
	paths []string // to be tried in turn until one answers; none = nothing is asked
	every time.Duration
	next  time.Time
	busy  bool // asked right now
}

const (
	askHealth = iota
	askLoad
)

// NewProber returns a prober that asks nobody yet.
func NewProber(conf ProberConfig) (*Prober, error) {
	if conf.Client == nil {
		conf.Client = Networks{}.Client()
	}
	m, err := newProbeMetrics(conf.Meter)
	if err != nil {
		return nil, err
	}
	return &Prober{conf: conf, metrics: m, targets: make(map[uint64]*[2]target)}, nil
}

// Set takes what a worker's record wants, in the place of what an earlier one wanted.
func (p *Prober) Set(r Record, info router.WorkerInfo) {
	var want [2]target
	if r.Health != nil {
		want[askHealth] = target{info: info, paths: []string{healthPath}, every: r.Health.every(probeEvery)}
		if r.Health.Path != "" {
			want[askHealth].paths = []string{r.Health.Path}
		}
	}
	if r.Metrics != nil {
		want[askLoad] = target{info: info, paths: LoadPaths[:], every: r.Metrics.every(loadEvery)}
		if r.Metrics.Path != "" {
			want[askLoad].paths = []string{r.Metrics.Path}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.Health == nil && r.Metrics == nil {
		delete(p.targets, info.ID)
		return
	}
	if old := p.targets[info.ID]; old != nil {
		for i := range want {
			want[i].next, want[i].busy = old[i].next, old[i].busy
		}
	}
	p.targets[info.ID] = &want
}

// Remove forgets a worker.
func (p *Prober) Remove(id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.targets, id)
}

// Run asks until ctx ends.
func (p *Prober) Run(ctx context.Context) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var open sync.WaitGroup
	defer open.Wait()
	room := make(chan struct{}, probesOpen)
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			for _, d := range p.due(now, probesOpen-len(room)) {
				room <- struct{}{}
				open.Go(func() {
					defer func() { <-room }()
					d.do(ctx, p)
				})
			}
		}
	}
}

// duty is one question.
type duty struct {
	id   uint64
	kind int
	target
	from string // path that answered, if several may
}

// due returns at most n questions whose time has come. Those of one moment spread out
// with time.
func (p *Prober) due(now time.Time, n int) (duties []duty) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, both := range p.targets {
		for kind := range both {
			t := &both[kind]
			if t.busy || len(t.paths) == 0 || now.Before(t.next) {
				continue
			}
			if len(duties) >= n {
				return duties
			}
			t.busy, t.next = true, now.Add(t.every-t.every/16+rand.N(t.every/8))
			duties = append(duties, duty{id: id, kind: kind, target: *t})
		}
	}
	return duties
}

// do asks, and tells what was answered.
func (d *duty) do(ctx context.Context, p *Prober) {
	err := d.ask(ctx, p)
	p.metrics.count(ctx, d.kind, err)
	p.mu.Lock()
	defer p.mu.Unlock()
	if both := p.targets[d.id]; both != nil {
		t := &both[d.kind]
		t.busy = false
		if at := slices.Index(t.paths, d.from); at > 0 { // it is asked first from now on
			t.paths = slices.Clone(t.paths)
			t.paths[0], t.paths[at] = t.paths[at], t.paths[0]
		}
	}
}

func (d *duty) ask(ctx context.Context, p *Prober) error {
	ctx, cancel := context.WithTimeout(ctx, min(probeTime, max(d.every, time.Second)))
	defer cancel()
	if d.kind == askHealth {
		if _, err := p.get(ctx, d.info.Address, d.paths[0]); err != nil {
			return err
		}
		p.conf.Alive(d.id)
		return nil
	}
	ranks, from, err := AskLoad(d.paths, Capacity{Blocks: d.info.TotalKVBlocks, BlockSize: d.info.BlockSize},
		func(path string) ([]byte, error) { return p.get(ctx, d.info.Address, path) })
	if err != nil {
		return err
	}
	d.from = from
	p.conf.Load(d.info, ranks)
	return nil
}

func (p *Prober) get(ctx context.Context, at netip.AddrPort, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+path, nil)
	if err != nil {
		return nil, fmt.Errorf("fleet: probe: %w", err)
	}
	resp, err := p.conf.Client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("fleet: probe: %w", err)
	}
	defer func() { _ = resp.Body.Close() }() // it was only read
	body, err := io.ReadAll(io.LimitReader(resp.Body, probeBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("fleet: probe %s: %w", at, err)
	case resp.StatusCode < 200 || resp.StatusCode > 299:
		return nil, fmt.Errorf("fleet: probe %s%s: status %d", at, path, resp.StatusCode)
	case len(body) > probeBytes:
		return nil, fmt.Errorf("fleet: probe %s%s: more than %d bytes", at, path, probeBytes)
	}
	return body, nil
}
