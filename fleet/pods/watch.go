// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/kube"
)

// poolGone is how long the workers of a deleted pool stay: it may be made again at once.
const poolGone = 10 * time.Second

// source is a source and its watches.
type source struct {
	maker

	conf      *Config
	changed   func()       // a view is due
	count     func(string) // counts an event of a watch
	name      string
	namespace string
	slices    *kube.Set[slice] // of a Service
	pools     *kube.Set[pool]  // of an InferencePool
	poolNews  chan struct{}    // holds a token if the pool may have changed

	mu sync.Mutex
	// mu guards the fields below.
	current, next *watched  // the pods of a selector; next replaces current when it is listed
	missing       time.Time // since when the pool is missing; zero = it is there

	cache map[any]*cached // by object; belongs to the finder's Run
}

// watched are the pods of a selector.
type watched struct {
	*kube.Set[pod]
	selector string
	ports    []int
	stop     context.CancelFunc
}

// newSource returns a source that runs no watch yet. changed is called when a view is due, and count for each event
// of a watch, with the source's name.
func newSource(all *Config, conf *Source, changed func(), count func(name, event string)) (*source, error) {
	namespace := cmp.Or(conf.Namespace, all.Namespace)
	if namespace == "" {
		return nil, errors.New("namespace: want a namespace: kvroute runs in no pod")
	}
	s := &source{
		maker: maker{source: conf, labels: conf.Labels.withDefaults(), ports: conf.Ports, networks: all.Networks},
		conf:  all, changed: changed, namespace: namespace, poolNews: make(chan struct{}, 1),
	}
	s.count = func(event string) { count(s.name, event) }
	switch {
	case conf.Service != "":
		s.name = "service " + namespace + "/" + conf.Service
		s.slices = kube.NewSet[slice](all.Client, kube.Resource{
			Group: "discovery.k8s.io", Version: "v1", Name: "endpointslices", Namespace: namespace,
			Selector: "kubernetes.io/service-name=" + conf.Service,
		}, kube.SetConfig[slice]{Changed: s.changed, Count: s.count})
	case conf.InferencePool != "":
		s.name = "inference pool " + namespace + "/" + conf.InferencePool
		s.pools = kube.NewSet[pool](all.Client, kube.Resource{
			Group: "inference.networking.k8s.io", Version: "v1", Name: "inferencepools", Namespace: namespace,
			Object: conf.InferencePool,
		}, kube.SetConfig[pool]{Changed: s.poolChanged, Count: s.count})
	default:
		s.name = "pods " + namespace + "/" + conf.Selector
	}
	return s, nil
}

func (s *source) poolChanged() {
	select {
	case s.poolNews <- struct{}{}:
	default:
	}
	s.changed()
}

// run runs the watches of the source until ctx ends.
func (s *source) run(ctx context.Context) {
	switch {
	case s.slices != nil:
		_ = s.slices.Run(ctx) // nil
	case s.pools == nil:
		s.follow(ctx, s.source.Selector, s.source.Ports)
	default:
		s.followPool(ctx)
	}
}

// newPods returns the pods of a selector.
func (s *source) newPods(selector string, ports []int) *watched {
	resource := kube.Resource{Version: "v1", Name: "pods", Namespace: s.namespace, Selector: selector}
	return &watched{
		Set: kube.NewSet[pod](s.conf.Client, resource, kube.SetConfig[pod]{
			Changed: s.changed, Trim: keep(s.labels.names()), Count: s.count,
		}),
		selector: selector, ports: ports, stop: func() {},
	}
}

// follow watches the pods of a selector that does not change.
func (s *source) follow(ctx context.Context, selector string, ports []int) {
	w := s.newPods(selector, ports)
	s.mu.Lock()
	s.current = w
	s.mu.Unlock()
	_ = w.Run(ctx) // nil
}

// followPool watches the pool, and the pods of its selector.
func (s *source) followPool(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { _ = s.pools.Run(ctx) }) // nil
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.poolNews:
		}
		next := s.applyPool()
		if next == nil {
			continue
		}
		watching, stop := context.WithCancel(ctx)
		next.stop = stop
		s.mu.Lock()
		s.next = next
		s.mu.Unlock()
		running.Go(func() { _ = next.Run(watching) }) // nil
	}
}

// applyPool compares the pool with the watch. It returns a watch to start if the pool selects other pods.
func (s *source) applyPool() *watched {
	pools, listed := s.pools.All()
	p := pools[s.namespace+"/"+s.source.InferencePool]
	s.mu.Lock()
	defer s.mu.Unlock()
	if p == nil {
		if listed && s.missing.IsZero() {
			s.missing = s.conf.Now()
			s.changed()
		}
		return nil
	}
	if !s.missing.IsZero() {
		s.missing = time.Time{}
		s.changed()
	}
	selector, ports := p.selector(), s.source.Ports
	if len(ports) == 0 {
		ports = p.ports()
	}
	newest := cmp.Or(s.next, s.current)
	switch {
	case newest == nil || newest.selector != selector:
		if s.next != nil {
			s.next.stop()
		}
		if selector == "" { // it selects no pod, but an empty selector would select all
			return nil
		}
		return s.newPods(selector, ports)
	case !slices.Equal(newest.ports, ports):
		newest.ports = ports
		s.changed()
	}
	return nil
}

// found is what the watches of a source hold at one moment.
type found struct {
	pods   map[string]*pod
	slices map[string]*slice
	ports  []int
	listed bool
	err    error
	since  time.Time // of err
	until  time.Time // the workers of a deleted pool are removed then; zero = the pool is there
}

// look returns what the watches hold. Pods of a new selector replace those of the old one when they are listed.
func (s *source) look(now time.Time) (f found) {
	fails := func(st kube.State) {
		if f.err == nil && st.Err != nil {
			f.err, f.since = st.Err, st.Since
		}
	}
	if s.slices != nil {
		f.slices, f.listed = s.slices.All()
		f.ports = s.source.Ports
		fails(s.slices.State())
		return f
	}
	if s.pools != nil {
		fails(s.pools.State())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil && s.next.State().Listed {
		if s.current != nil {
			s.current.stop()
		}
		s.current, s.next = s.next, nil
	}
	if s.next != nil {
		fails(s.next.State())
	}
	if s.current != nil {
		f.pods, f.listed = s.current.All()
		f.ports = s.current.ports
		fails(s.current.State())
	}
	if !s.missing.IsZero() {
		f.listed, f.until = true, s.missing.Add(poolGone)
		if f.err == nil {
			f.err = fmt.Errorf("inferencepools.inference.networking.k8s.io %s in namespace %s: there is none", s.source.InferencePool, s.namespace)
			f.since = s.missing
		}
		if !now.Before(f.until) {
			f.pods = nil
		}
	}
	return f
}

// cached is what the objects of a source mean, apart from their readiness. An object that is unchanged has the same
// pointer.
type cached struct {
	ports  []int // of the source, when it was made
	places []placed
}

// placed is a place with the records of its workers, as if it were ready.
type placed struct {
	place
	records  []fleet.Record
	problems []string
}

// places returns the places that the watches hold, with their records.
func (s *source) places(in *found) (all []placed) {
	s.ports = in.ports
	next := make(map[any]*cached, len(in.pods)+len(in.slices))
	// keep adds the places of an object. They are made again if the object or the ports have changed.
	keep := func(object any, places func() []place) {
		c := s.cache[object]
		if c == nil || !slices.Equal(c.ports, s.ports) {
			c = &cached{ports: s.ports}
			for _, at := range places() {
				p := placed{place: at}
				p.records, p.problems = s.records(&p.place)
				c.places = append(c.places, p)
			}
		}
		next[object] = c
		all = append(all, c.places...)
	}
	for _, p := range in.pods {
		keep(p, func() []place {
			if at, ok := p.place(); ok {
				return []place{at}
			}
			return nil
		})
	}
	for _, e := range in.slices {
		keep(e, e.places)
	}
	s.cache = next
	return all
}
