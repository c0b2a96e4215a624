// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
)

// outages are the times in which a worker was killed or absent. A request may fail only in these
// times.
type outages struct {
	sync.Mutex
	list [][2]time.Time
}

// begin records the start of an outage, and end its end.
func (o *outages) begin() (end func()) {
	o.Lock()
	defer o.Unlock()
	i := len(o.list)
	o.list = append(o.list, [2]time.Time{time.Now(), time.Now().Add(time.Hour)})
	return func() {
		o.Lock()
		defer o.Unlock()
		o.list[i][1] = time.Now()
	}
}

func (o *outages) during(from, to time.Time) bool {
	o.Lock()
	defer o.Unlock()
	for _, w := range o.list {
		if from.Before(w[1]) && to.After(w[0]) {
			return true
		}
	}
	return false
}

// soak is the load of TestSoak.
type soak struct {
	d     *demonstration
	away  outages
	asked atomic.Int64
	left  atomic.Int64 // canceled by the client
	spent atomic.Int64 // failed while a worker was absent
}

// one sends a request of any kind. Some clients disconnect before the end.
func (s *soak) one(t *testing.T, rng *rand.Rand) {
	s.asked.Add(1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	leaves := rng.IntN(5) == 0
	if leaves {
		time.AfterFunc(time.Duration(rng.IntN(60))*time.Millisecond, cancel)
	}
	body, want := chatBody(strings.Repeat(fmt.Sprint("topic ", rng.IntN(9), " "), 1+rng.IntN(1500)), 1+rng.IntN(120), rng.IntN(2) == 0), 200
	if rng.IntN(20) == 0 {
		body, want = body[:len(body)/2], 400
	}
	begin := time.Now()
	got := look(send(t, ctx, http.MethodPost, s.d.Envoy.URL()+chatPath, body, nil))
	if leaves && errors.Is(got.err, context.Canceled) {
		s.left.Add(1)
		return
	}
	stream := strings.HasPrefix(got.header.Get("Content-Type"), "text/event-stream")
	whole := got.err == nil && (got.status != 200 || !stream || strings.HasSuffix(got.body, "data: [DONE]\n\n"))
	switch {
	case got.status == want && whole:
	case s.away.during(begin, time.Now()) && (got.status == 503 || got.status == 200):
		s.spent.Add(1)
	default:
		t.Errorf("status %d (%v), whole: %v, want %d: %.200s", got.status, got.err, whole, want, got.body)
	}
}

// Under load every process is killed, stopped and started again in a random order, one at a time. A
// request fails only if a worker dies, whatever happens to kvroute. Afterwards no slot, stream or
// request is left.
func TestSoak(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 3, []string{"--speed", "20", "--num-gpu-blocks", "16384"})
	d.begin(t, "--avoid-failing", "100ms", "--drain-delay", "1500ms", "--drain-timeout", "10s")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	s := &soak{d: d}
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(c)))
			for ctx.Err() == nil {
				s.one(t, rng)
				<-time.After(5 * time.Millisecond) // leaves time for the machine's other work
			}
		})
	}
	rng := rand.New(rand.NewPCG(seed, 99))
	faults := map[string]int{}
	lasts := 10 * time.Second
	if fixtures.Long() {
		lasts = 5 * time.Minute
	}
	for end := time.Now().Add(lasts); time.Now().Before(end) && !t.Failed(); {
		var fault string
		switch rng.IntN(4) {
		case 0:
			fault = "kvroute is killed"
			kill(t, d.Router)
			<-time.After(time.Duration(rng.IntN(300)) * time.Millisecond)
			d.Router = restart(t, d.Router, d.Dir)
		case 1:
			fault = "kvroute drains"
			d.Router.Stop()
			d.Router = restart(t, d.Router, d.Dir)
		case 2:
			fault = "kvroute stands still"
			if err := d.Router.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			<-time.After(time.Duration(rng.IntN(2500)) * time.Millisecond)
			if err := d.Router.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
		default:
			fault = "a worker is killed"
			back := s.away.begin()
			e := d.Engines[rng.IntN(len(d.Engines))]
			kill(t, e)
			<-time.After(time.Duration(rng.IntN(300)) * time.Millisecond)
			*e = *restart(t, e, t.TempDir())
			back()
		}
		faults[fault]++
		before := s.asked.Load()
		eventually(t, "no requests are served behind the fault: "+fault, func() bool { return s.asked.Load() > before+4 })
	}
	stop()
	clients.Wait()
	if err := d.WaitWorkers(t.Context()); err != nil {
		t.Error(err)
	}
	atRest(t, d)
	eventually(t, "Envoy has streams open", func() bool {
		n, err := d.Envoy.Stat(t.Context(), "http.llm.downstream_rq_active")
		return err == nil && n == 0
	})
	t.Logf("%d requests, %d left by clients, %d lost with a worker; faults: %v", s.asked.Load(), s.left.Load(), s.spent.Load(), faults)
}
