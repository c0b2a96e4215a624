// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// asked is a prober with the calls that it made.
type asked struct {
	*fleet.Prober

	mu    sync.Mutex
	alive map[uint64]int
	loads map[string]fleet.Load
}

func startProber(t *testing.T) *asked {
	t.Helper()
	a := &asked{alive: map[uint64]int{}, loads: map[string]fleet.Load{}}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var err error
	if a.Prober, err = fleet.NewProber(fleet.ProberConfig{
		Probed: func(id uint64, result fleet.Probed, _ error) {
			a.mu.Lock()
			defer a.mu.Unlock()
			if result == fleet.ProbeAnswered {
				a.alive[id]++
			}
		},
		Load: func(info router.WorkerInfo, ranks map[uint32]fleet.Load) {
			a.mu.Lock()
			defer a.mu.Unlock()
			for r, l := range ranks {
				a.loads[fmt.Sprint(info.Name, ".", r)] = l
			}
		},
		Client: client,
	}); err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, a.Run)
	return a
}

func (a *asked) answers(name string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.alive[wire.WorkerID(name)]
}

func (a *asked) set(t *testing.T, s *httptest.Server, r fleet.Record) {
	t.Helper()
	r.Address = strings.TrimPrefix(s.URL, "http://")
	info, err := r.Info(mustParse(t, "127.0.0.0/8"))
	if err != nil {
		t.Fatal(err)
	}
	a.Set(r, info)
}

func TestWorkersAreProbed(t *testing.T) {
	var sick atomic.Bool
	var answered, elsewhereAsked atomic.Int32 // requests for the load
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case sick.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		case r.URL.Path == "/prometheus/metrics":
			elsewhereAsked.Add(1)
			http.NotFound(w, r)
		case r.URL.Path == "/metrics":
			answered.Add(1)
			fmt.Fprint(w, "vllm:num_requests_running{engine=\"0\"} 3\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n")
		case r.URL.Path != "/health":
			http.NotFound(w, r)
		}
	}))
	defer engine.Close()
	hanging := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer hanging.Close()
	a := startProber(t)
	often := func(name string) fleet.Record {
		r := record(name)
		r.TotalKVBlocks = 1000
		r.Health, r.Metrics = &fleet.Probe{Interval: "100ms", Timeout: "1s"}, &fleet.Probe{Interval: "100ms", Timeout: "1s"}
		return r
	}
	elsewhere := often("elsewhere") // 404 shows that a server is there
	elsewhere.Health.Path = "/alive"
	unasked := record("unasked")
	a.set(t, engine, often("a"))
	a.set(t, hanging, often("hanging"))
	a.set(t, engine, elsewhere)
	a.set(t, engine, unasked)
	natstest.Eventually(t, func() bool { return a.answers("a") >= 3 })
	natstest.Eventually(t, func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.loads["a.0"] == fleet.Load{Running: 3, KVUtilization: .25, KVUsedBlocks: 250} && a.loads["a.1"].KVUsedBlocks == 500
	})
	// From then on each of the two loops requests the path that answered first.
	natstest.Eventually(t, func() bool { return answered.Load() >= 8 })
	if n := elsewhereAsked.Load(); n > 2 {
		t.Errorf("the other path was asked %d times, want once for each worker", n)
	}
	natstest.Eventually(t, func() bool { return a.answers("elsewhere") >= 3 })
	for _, name := range []string{"hanging", "unasked"} {
		if a.answers(name) != 0 {
			t.Errorf("%s has answered", name)
		}
	}
	// An error is not a sign of health, and a removed worker is not probed.
	sick.Store(true)
	<-time.After(300 * time.Millisecond) // answers already on their way
	before := a.answers("a")
	<-time.After(300 * time.Millisecond)
	if got := a.answers("a"); got != before {
		t.Errorf("%d answers of a sick worker count", got-before)
	}
	sick.Store(false)
	natstest.Eventually(t, func() bool { return a.answers("a") > before })
	a.Remove(wire.WorkerID("a"))
	<-time.After(300 * time.Millisecond)
	before = a.answers("a")
	<-time.After(300 * time.Millisecond)
	if got := a.answers("a"); got != before {
		t.Errorf("%d probes after the worker was removed", got-before)
	}
}

// The schedule has each probe of each worker once, in any order of changes, and a probe is due once a period.
func TestScheduleOfProbes(t *testing.T) {
	p, err := fleet.NewProber(fleet.ProberConfig{Probed: func(uint64, fleet.Probed, error) {}, Load: func(router.WorkerInfo, map[uint32]fleet.Load) {}})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	now := time.Now()
	for range 2000 {
		id := rng.Uint64N(50)
		switch rng.IntN(4) {
		case 0:
			p.Remove(id)
		case 1:
			p.Due(now)
			now = now.Add(time.Duration(rng.Int64N(int64(10 * time.Second))))
		default:
			every := fmt.Sprintf("%dms", 100+rng.IntN(60_000))
			p.Set(fleet.Record{Health: &fleet.Probe{Interval: every}, Metrics: &fleet.Probe{Interval: every}}, router.WorkerInfo{ID: id})
		}
		if err := p.CheckSchedule(); err != nil {
			t.Fatal(err)
		}
	}
	for id := range uint64(50) {
		p.Remove(id)
	}
	p.Set(fleet.Record{Health: &fleet.Probe{Interval: "10s"}}, router.WorkerInfo{ID: 7})
	p.Set(fleet.Record{Health: &fleet.Probe{Interval: "1h"}}, router.WorkerInfo{ID: 8})
	if due := p.Due(now); !slices.Equal(due, []uint64{7, 8}) {
		t.Errorf("due at first: %v, want both", due)
	}
	if due := p.Due(now.Add(9 * time.Second)); len(due) > 0 {
		t.Errorf("due before the first period is over: %v", due)
	}
}

// A worker cannot redirect a health probe to another host.
func TestProbesAreNotRedirected(t *testing.T) {
	var elsewhere, engine atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	redirecting := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		engine.Add(1)
		http.Redirect(w, r, other.URL+"/quitquitquit", http.StatusTemporaryRedirect)
	}))
	defer redirecting.Close()
	a := &asked{alive: map[uint64]int{}, loads: map[string]fleet.Load{}}
	var err error
	if a.Prober, err = fleet.NewProber(fleet.ProberConfig{
		Probed: func(_ uint64, result fleet.Probed, _ error) {
			if result != fleet.ProbeFailed {
				t.Errorf("a redirect has the result %d", result)
			}
		},
		Load: func(router.WorkerInfo, map[uint32]fleet.Load) {},
	}); err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, a.Run)
	r := record("a")
	r.Health, r.Metrics = &fleet.Probe{Interval: "100ms"}, &fleet.Probe{Interval: "100ms"}
	a.set(t, redirecting, r)
	natstest.Eventually(t, func() bool { return engine.Load() >= 6 }) // two rounds of one health path and two metrics paths
	if n := elsewhere.Load(); n != 0 {
		t.Errorf("%d redirects were followed", n)
	}
}

// Only the status of an answer to a health probe counts. Of its body kvroute reads little: a server that sends
// without end neither counts as dead nor takes memory.
func TestLongAnswersToHealthProbes(t *testing.T) {
	var sent atomic.Int64
	endless := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		piece := make([]byte, 64<<10)
		for r.Context().Err() == nil {
			n, err := w.Write(piece)
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	}))
	defer endless.Close()
	a := startProber(t)
	r := record("endless")
	r.Health = &fleet.Probe{Interval: "100ms"}
	a.set(t, endless, r)
	natstest.Eventually(t, func() bool { return a.answers("endless") >= 3 })
	const buffered = 16 << 20 // by the kernel, for a connection
	if n := sent.Load(); n > 8*buffered {
		t.Errorf("%d bytes were sent in answer to few probes", n)
	}
}
