// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/internal/meter"
)

const (
	// viewEvery is the shortest time between two views: pods change in bursts.
	viewEvery = 100 * time.Millisecond
	// idleView is the time between two views without changes.
	idleView = time.Minute
	// shownProblems is the number of problems of a source that its state lists.
	shownProblems = 20
)

// State is what a source has found.
type State struct {
	// Source names the source.
	Source string `json:"source"`
	// Workers are the pods, or the endpoints, by what kvroute makes of them.
	Ready      int `json:"ready"`
	NotReady   int `json:"not_ready"`   // were ready before: no new requests
	Draining   int `json:"draining"`    // are being deleted
	NeverReady int `json:"never_ready"` // are no workers
	LeftOut    int `json:"left_out"`    // are no workers, because something is wrong
	// Listed says that the source was read at least once.
	Listed bool `json:"listed"`
	// Error is why the source cannot be read now, and Since the time of the first failure.
	Error string    `json:"error,omitempty"`
	Since time.Time `json:"since,omitzero"`
	// Problems are what is wrong with pods, at most 20.
	Problems []string `json:"problems,omitempty"`
}

// Finder follows the pods of its sources.
type Finder struct {
	conf    Config
	sources []*source
	wake    chan struct{} // holds a token if a view is due
	news    meter.Counter

	mu sync.Mutex
	// mu guards the field below.
	states []State

	// The fields below belong to Run.
	known    map[string]*knownPlace // by uid
	owner    string                 // uid of the controller of kvroute's own pod
	problems map[string]bool        // of the last view, which were logged
	last     map[uint64]string      // states of the last view's workers, which were logged
}

// knownPlace is what a finder remembers of a place.
type knownPlace struct {
	wasReady bool
	deadline time.Time // by kvroute's clock; zero = it is not being deleted, or no deadline is known
	view     int
}

// New returns a finder. It sends no request.
func New(conf Config) (*Finder, error) {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	if conf.Pod == "" {
		host, _ := os.Hostname() // without a name no pod is left out
		conf.Pod = cmp.Or(os.Getenv("POD_NAME"), host)
	}
	conf.Namespace = cmp.Or(conf.Namespace, conf.Client.Namespace)
	conf.Log = meter.Log(conf.Log)
	m := meter.New(conf.Meter)
	f := &Finder{
		conf: conf, wake: make(chan struct{}, 1), known: make(map[string]*knownPlace), problems: make(map[string]bool),
		news: m.Counter("kvroute.fleet.kubernetes", "{event}", "Events of the watches of Kubernetes' API, by source and kind.", "source", "kind"),
	}
	m.Gauge("kvroute.fleet.pods", "{pod}", "Pods that the sources select, by source and state.", f.measure)
	m.Gauge("kvroute.fleet.kubernetes.failing", "s", "Time since Kubernetes' API cannot be read, by source; 0 if it can.", f.measureFailing)
	for i := range conf.Sources {
		s, err := newSource(&f.conf, &conf.Sources[i], f.changed, func(name, event string) { f.news.Count(name, event) })
		if err != nil {
			return nil, fmt.Errorf("sources[%d].%w", i, err)
		}
		f.sources = append(f.sources, s)
		f.states = append(f.states, State{Source: s.name})
	}
	return f, m.Err()
}

// changed makes a view due.
func (f *Finder) changed() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Listed reports whether all sources were read at least once.
func (f *Finder) Listed() bool {
	return !slices.ContainsFunc(f.States(), func(s State) bool { return !s.Listed })
}

// Works reports whether all sources can be read now.
func (f *Finder) Works() bool {
	return !slices.ContainsFunc(f.States(), func(s State) bool { return !s.Listed || s.Error != "" })
}

// States returns the state of each source, in their order.
func (f *Finder) States() []State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.states)
}

func (f *Finder) measure(o meter.Observe) {
	for _, s := range f.States() {
		o(float64(s.Ready), "source", s.Source, "state", "ready")
		o(float64(s.NotReady), "source", s.Source, "state", "not_ready")
		o(float64(s.Draining), "source", s.Source, "state", "draining")
		o(float64(s.NeverReady), "source", s.Source, "state", "never_ready")
		o(float64(s.LeftOut), "source", s.Source, "state", "left_out")
	}
}

func (f *Finder) measureFailing(o meter.Observe) {
	for _, s := range f.States() {
		failing := 0.0
		if s.Error != "" {
			failing = f.conf.Now().Sub(s.Since).Seconds()
		}
		o(failing, "source", s.Source)
	}
}

// Run follows the sources until ctx ends.
func (f *Finder) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	for _, s := range f.sources {
		running.Go(func() { s.run(ctx) })
	}
	due := time.NewTimer(idleView)
	defer due.Stop()
	for view := 1; ; view++ {
		select {
		case <-ctx.Done():
			return nil
		case <-f.wake:
		case <-due.C:
		}
		due.Reset(max(viewEvery, f.view(view)))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(viewEvery):
		}
	}
}
