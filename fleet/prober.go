// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// Limits and default periods of probes.
const (
	probeTime   = 5 * time.Second // for one answer, unless the record says another time
	probeBytes  = 8 << 20         // of metrics
	healthBytes = 64 << 10        // of an answer to a health probe that are read
	probesOpen  = 2048            // at a time: workers that do not answer must not delay the probes of others
	probeWait   = time.Second     // of questions to an engine, for an answer to its health probe
	probeEvery  = 2500 * time.Millisecond
	loadEvery   = 5 * time.Second

	modelsEvery  = 7500 * time.Millisecond // an adapter is served within 10 s
	compareEvery = 5 * time.Minute
	silentEvery  = 30 * time.Second // of the list of models, while nothing answers
)

// Probed is the result of a health probe.
type Probed uint8

// The results. Any other answer than these, or none in time, is a ProbeFailed.
const (
	ProbeFailed Probed = iota
	// ProbeAnswered is a status of 200 to 299. It is also 404 or 405: the worker has no such path, but it answers.
	ProbeAnswered
	// ProbeUnavailable is the status 503.
	ProbeUnavailable
	// ProbeRefused means that the worker's host refused the connection.
	ProbeRefused
)

// resultOf returns the result of a probe that ended with this error.
func resultOf(err error) Probed {
	status, hasStatus := errors.AsType[reach.StatusError](err)
	switch {
	case err == nil, hasStatus && (status.Status == http.StatusNotFound || status.Status == http.StatusMethodNotAllowed):
		return ProbeAnswered
	case hasStatus && status.Status == http.StatusServiceUnavailable:
		return ProbeUnavailable
	case errors.Is(err, syscall.ECONNREFUSED):
		return ProbeRefused
	}
	return ProbeFailed
}

// ProberConfig configures a [Prober]. Probed and Load are required.
type ProberConfig struct {
	// Probed receives the result of each health probe, and its error, which is nil for [ProbeAnswered].
	Probed func(id uint64, result Probed, err error)
	// Load receives the load of each rank from an engine's metrics.
	Load func(info router.WorkerInfo, ranks map[uint32]Load)
	// Compare receives what engines report about themselves. Default: they are not asked.
	Compare *Comparison
	// Client sends the probes. Default [Networks.Client] of all networks.
	Client *http.Client
	// Log receives a line when a kind of probe begins to fail. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Prober sends health probes to workers, and reads the metrics of their engines, as their
// records request. An answer fails after 5 s, unless the record says another time. Metrics fail with more than
// 8 MB. At most 2,048 probes are open, and of each worker one of a kind. Its methods may be called by any number of
// goroutines.
type Prober struct {
	conf   ProberConfig
	probes meter.Counter
	news   chan struct{} // holds a token if there may be a new target

	mu sync.Mutex
	// mu guards the fields below.
	targets map[probeKey]*target
	queue   schedule      // the same targets
	near    time.Duration // a tenth of the shortest period so far: probes that are due within it are sent together
	once    []singleProbe // not sent yet
}

// maxOnce limits the probes that wait to be sent once.
const maxOnce = 1000

// singleProbe is a probe that is sent once.
type singleProbe struct {
	host string // for the Host header; empty for the URL's
	url  string
	done func(error)
}

type probeKey struct {
	worker uint64
	kind   string
}

const (
	kindHealth  = "health"
	kindMetrics = "metrics"
	kindLast    = "last"   // sent once to a worker that may be dead
	kindModels  = "models" // the engine's list of models
	kindEngine  = "engine" // block size and event sockets
)

// target is a periodic probe of a worker.
type target struct {
	key   probeKey
	at    int // its place in the schedule
	info  *router.WorkerInfo
	paths []string // tried in turn until one answers; the last one that answered is the first
	every time.Duration
	limit time.Duration // for one answer
	next  time.Time
	open  bool // no answer yet
	fails bool // the last answer was wrong
}

// schedule is a heap of targets by the time of the next probe: a change of one worker must not read all.
type schedule []*target

func (s schedule) Len() int           { return len(s) }
func (s schedule) Less(i, j int) bool { return s[i].next.Before(s[j].next) }
func (s schedule) Swap(i, j int)      { s[i], s[j] = s[j], s[i]; s[i].at, s[j].at = i, j }
func (s *schedule) Push(t any)        { *s = append(*s, t.(*target)) }
func (s *schedule) Pop() any {
	last := len(*s) - 1
	t := (*s)[last]
	*s = slices.Delete(*s, last, last+1)
	return t
}

// NewProber returns a prober without targets.
func NewProber(conf ProberConfig) (*Prober, error) {
	conf.Client = cmp.Or(conf.Client, Networks{}.Client())
	conf.Log = meter.Log(conf.Log)
	m := meter.New(conf.Meter)
	probes := m.Counter("kvroute.fleet.probes", "{probe}", "Questions to workers over HTTP, by kind and outcome.", "kind", "outcome")
	return &Prober{conf: conf, probes: probes, news: make(chan struct{}, 1), targets: make(map[probeKey]*target), near: time.Minute}, m.Err()
}

// Set replaces the probes of a worker by those of its record.
func (p *Prober) Set(r Record, info router.WorkerInfo) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.setLocked(probeKey{info.ID, kindHealth}, r.Health, target{info: &info, paths: []string{healthPath}, every: probeEvery})
	p.setLocked(probeKey{info.ID, kindMetrics}, r.Metrics, target{info: &info, paths: LoadPaths[:], every: loadEvery})
	var asks *Probe
	if p.conf.Compare != nil && isCompared(&r) {
		asks = &Probe{}
	}
	p.setLocked(probeKey{info.ID, kindModels}, asks, target{info: &info, paths: []string{modelsPath}, every: modelsEvery})
	p.setLocked(probeKey{info.ID, kindEngine}, asks, target{info: &info, paths: []string{""}, every: compareEvery})
	p.wake()
}

// Compare compares a worker with its engine soon: the engine may have restarted.
func (p *Prober) Compare(id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, kind := range []string{kindModels, kindEngine} {
		if t := p.targets[probeKey{id, kind}]; t != nil {
			p.moveLocked(t, time.Time{})
		}
	}
	p.wake()
}

// wake lets Run look at the targets.
func (p *Prober) wake() {
	select {
	case p.news <- struct{}{}:
	default:
	}
}

func (p *Prober) setLocked(key probeKey, conf *Probe, t target) {
	old := p.targets[key]
	if !conf.isSent() {
		if old != nil {
			heap.Remove(&p.queue, old.at)
			delete(p.targets, key)
		}
		return
	}
	t.key, t.limit = key, duration(conf.Timeout, probeTime)
	if t.every = conf.every(t.every); conf.Path != "" {
		t.paths = []string{conf.Path}
	}
	p.near = min(p.near, t.every/10)
	p.targets[key] = &t
	if old == nil {
		t.at = len(p.queue)
		heap.Push(&p.queue, &t)
		return
	}
	t.at, t.open, t.fails = old.at, old.open, old.fails
	next := old.next
	becameReady := old.info.Health == router.NotReady && t.info.Health != router.NotReady
	if key.compares() && !sameSettings(old.info, t.info) || key.kind == kindHealth && becameReady {
		next = time.Time{}
	}
	p.queue[t.at] = &t
	p.moveLocked(&t, next)
}

// moveLocked changes the time of a target's next probe.
func (p *Prober) moveLocked(t *target, next time.Time) {
	t.next = next
	heap.Fix(&p.queue, t.at)
}

// sameSettings reports whether a worker is the same process with the same settings that a [Comparison] compares.
func sameSettings(a, b *router.WorkerInfo) bool {
	return a.StartedMS == b.StartedMS && a.Address == b.Address && a.BlockSize == b.BlockSize &&
		reflect.DeepEqual(a.Events, b.Events) && slices.Equal(a.Models, b.Models)
}

// Remove ends the probes of a worker.
func (p *Prober) Remove(id uint64) { p.Set(Record{}, router.WorkerInfo{ID: id}) }

// Now probes a worker once, in addition to its periodic probes, also after [Prober.Remove]. own is the
// worker's health probe, or nil for the default path. done receives the error of the probe, or nil if the
// worker answered; it is called later by another goroutine. Now returns false, and sends nothing, if 1,000
// such probes wait. A ctx of [Prober.Run] that ends drops the probes that wait.
func (p *Prober) Now(info router.WorkerInfo, own *Probe, done func(error)) (queued bool) {
	path := healthPath
	if own.isSent() && own.Path != "" {
		path = own.Path
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.once) >= maxOnce {
		return false
	}
	p.once = append(p.once, singleProbe{info.Host, "http://" + info.Address.String() + path, done})
	p.wake()
	return true
}

// Run sends probes until ctx ends. Probes that are due within a tenth of the shortest period so far are
// sent together, since each waking of an idle process costs more than a probe.
func (p *Prober) Run(ctx context.Context) error {
	var open sync.WaitGroup
	defer open.Wait()
	room := make(chan struct{}, probesOpen)
	// start runs a probe when there is room. It returns false if ctx ends first.
	start := func(probe func()) bool {
		select {
		case <-ctx.Done():
			return false
		case room <- struct{}{}:
		}
		open.Go(func() {
			defer func() { <-room }()
			probe()
		})
		return true
	}
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.news:
		case <-pause.C:
		}
		p.mu.Lock()
		once := p.once
		p.once = nil
		p.mu.Unlock()
		for _, one := range once {
			if !start(func() { p.probeOnce(ctx, &one) }) {
				return nil
			}
		}
		due, wait := p.due(time.Now())
		// The health of all workers comes first: requests can be routed before the engines have said more.
		for _, probes := range due {
			probes.stateSent = make(chan struct{})
			if !start(func() {
				defer close(probes.stateSent)
				p.send(ctx, probes.state)
			}) {
				return nil
			}
		}
		for _, probes := range due {
			if len(probes.questions) > 0 && !start(func() {
				select {
				case <-probes.stateSent: // its connection is free
				case <-time.After(probeWait):
				}
				p.send(ctx, probes.questions)
			}) {
				return nil
			}
		}
		pause.Reset(wait)
	}
}

// probeOnce sends a probe of [Prober.Now].
func (p *Prober) probeOnce(ctx context.Context, one *singleProbe) {
	asking, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	err := p.health(asking, one.host, one.url)
	outcome := "answered"
	if err != nil {
		outcome = "failed"
	}
	p.probes.Count(kindLast, outcome)
	if ctx.Err() == nil {
		one.done(err)
	}
}

// health sends a health probe. Only the status of the answer counts.
func (p *Prober) health(ctx context.Context, host, url string) error {
	if _, err := reach.Get(ctx, p.conf.Client, host, url, healthBytes); !errors.Is(err, reach.ErrLong) {
		return err
	}
	return nil
}

// dueProbes are the probes of one worker that are due: of its health and load, and the questions to its engine about
// itself. They are sent one after the other, so that one connection serves all. The questions wait at most probeWait
// for the others: a slow health path does not delay the list of models.
type dueProbes struct {
	state, questions []target
	stateSent        chan struct{} // closed when the answers to state have come
}

// send sends probes one after the other.
func (p *Prober) send(ctx context.Context, probes []target) {
	for i := range probes {
		p.probe(ctx, &probes[i])
	}
}

// due returns the probes whose time has come or is near, by worker, and the time until the next call. Their
// periods vary at random, so that probes of one moment spread out.
func (p *Prober) due(now time.Time) (due map[uint64]*dueProbes, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	due, wait = make(map[uint64]*dueProbes), time.Minute
	for len(p.queue) > 0 {
		t := p.queue[0]
		early := t.next.Sub(now)
		if early >= p.near {
			wait = min(wait, early)
			break
		}
		p.moveLocked(t, now.Add(max(0, early)+t.every-t.every/16+rand.N(t.every/8)))
		if t.open {
			continue
		}
		t.open = true
		if due[t.key.worker] == nil {
			due[t.key.worker] = new(dueProbes)
		}
		list := &due[t.key.worker].state
		if t.key.compares() {
			list = &due[t.key.worker].questions
		}
		*list = append(*list, *t)
	}
	for _, probes := range due {
		for _, list := range [][]target{probes.state, probes.questions} {
			slices.SortFunc(list, func(a, b target) int { return cmp.Compare(a.key.turn(), b.key.turn()) })
		}
	}
	return due, wait
}

// turn orders the probes of a worker: those that change its health and load come first.
func (k probeKey) turn() int {
	return slices.Index([]string{kindHealth, kindMetrics, kindModels, kindEngine}, k.kind)
}

// probe sends one probe and passes on the answer. t is a copy.
func (p *Prober) probe(ctx context.Context, t *target) {
	key := t.key
	asking, cancel := context.WithTimeout(ctx, t.limit)
	defer cancel()
	base := "http://" + t.info.Address.String()
	get := func(path string) ([]byte, error) {
		return reach.Get(asking, p.conf.Client, t.info.Host, base+path, probeBytes)
	}
	var err error
	var ranks map[uint32]Load
	from := t.paths[0]
	if key.compares() {
		err = p.compare(asking, key, t.info.Host, base)
	} else if key.kind == kindHealth {
		err = p.health(asking, t.info.Host, base+from)
		result := resultOf(err)
		if result == ProbeAnswered {
			err = nil
		}
		if ctx.Err() == nil {
			p.conf.Probed(key.worker, result, err)
		}
	} else if ranks, from, err = AskLoad(t.paths, Capacity{Blocks: t.info.TotalKVBlocks, BlockSize: t.info.BlockSize}, get); err == nil {
		p.conf.Load(*t.info, ranks)
	}
	outcome := "answered"
	if errors.Is(err, errNoLoad) || errors.Is(err, errNoModels) {
		outcome = "nothing said"
	} else if err != nil {
		outcome = "failed"
	}
	p.probes.Count(key.kind, outcome)

	p.mu.Lock()
	begins, level := false, slog.LevelWarn
	if key.compares() && !isAnswer(err) {
		level = slog.LevelDebug // the health of the worker says it
	}
	if now := p.targets[key]; now != nil {
		begins = outcome == "failed" && !now.fails
		if now.fails && outcome == "answered" && key.kind != kindMetrics {
			defer p.Compare(key.worker)
		}
		switch {
		case key.kind == kindModels && outcome == "nothing said":
			p.moveLocked(now, time.Now().Add(compareEvery))
		case key.kind == kindModels && now.fails && outcome == "failed" && !isAnswer(err):
			p.moveLocked(now, time.Now().Add(silentEvery))
		}
		now.open, now.fails = false, outcome == "failed"
		if at := slices.Index(now.paths, from); at > 0 {
			now.paths = slices.Clone(now.paths)
			now.paths[0], now.paths[at] = now.paths[at], now.paths[0]
		}
	}
	p.mu.Unlock()
	if begins && ctx.Err() == nil {
		p.conf.Log.Log(ctx, level, "a probe of a worker fails",
			"worker", key.worker, "kind", key.kind, "at", t.info.Place(), "err", err)
	}
}
