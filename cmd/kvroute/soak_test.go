// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// outages are the times in which a worker was killed or absent. Only a request of that worker may fail,
// and only in these times.
type outages struct {
	sync.Mutex
	list []outage
}

type outage struct {
	worker   string // its id
	from, to time.Time
}

// begin records the start of an outage, and end its end.
func (o *outages) begin(worker string) (end func()) {
	o.Lock()
	defer o.Unlock()
	i := len(o.list)
	o.list = append(o.list, outage{worker, time.Now(), time.Now().Add(time.Hour)})
	return func() {
		o.Lock()
		defer o.Unlock()
		o.list[i].to = time.Now()
	}
}

// during reports whether a worker was away in a time. The worker of a response that kvroute did not see
// is not known: "".
func (o *outages) during(from, to time.Time, worker string) bool {
	o.Lock()
	defer o.Unlock()
	return slices.ContainsFunc(o.list, func(w outage) bool {
		return from.Before(w.to) && to.After(w.from) && (worker == "" || worker == w.worker)
	})
}

// soak is the load of TestSoak.
type soak struct {
	d     *demonstration
	away  outages
	asked atomic.Int64
	left  atomic.Int64 // canceled by the client
	spent atomic.Int64 // failed while their worker was absent
	blind atomic.Int64 // of these, without a worker in the response
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
	worker := got.header.Get("x-dynamo-worker-instance-id")
	stream := strings.HasPrefix(got.header.Get("Content-Type"), "text/event-stream")
	whole := got.err == nil && (got.status != 200 || !stream || strings.HasSuffix(got.body, "data: [DONE]\n\n"))
	switch {
	case got.status == want && whole:
	// 502 is Envoy's answer if a worker breaks off within the head of a response, or another process has
	// taken the port of a killed one.
	case s.away.during(begin, time.Now(), worker) && (got.status == 503 || got.status == 502 || got.status == 200):
		s.spent.Add(1)
		if worker == "" {
			s.blind.Add(1)
		}
	default:
		t.Errorf("status %d of worker %q (%v), whole: %v, want %d: %.200s", got.status, worker, got.err, whole, want, got.body)
	}
}

// soakTime is how long TestSoak runs: KVROUTE_SOAK, as 2h, or 10 minutes in the long form.
func soakTime(t *testing.T) time.Duration {
	t.Helper()
	lasts, text := 10*time.Second, os.Getenv("KVROUTE_SOAK")
	if fixtures.Long() {
		lasts = 10 * time.Minute
	}
	if text != "" {
		var err error
		if lasts, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	return lasts
}

// Under load every process is killed, stopped and started again in a random order, one at a time, and
// in one of the two runs a tenth of the events is lost. A request fails only if its worker dies,
// whatever happens to kvroute. Afterwards no slot, stream or request is left, the index is equal to the
// engines' caches, and kvroute's memory and descriptors are those of its start again.
func TestSoak(t *testing.T) {
	t.Parallel() // mostly waits
	for events, flags := range map[string][]string{"jetstream": nil, "lost from sockets": {"--kv-events", "zmq", "--kv-events-drop-every", "10"}} {
		t.Run(events, func(t *testing.T) {
			t.Parallel()
			soakOnce(t, append([]string{"--speed", "20", "--num-gpu-blocks", "16384"}, flags...))
		})
	}
}

// noDrift checks that no request was judged to have other tokens than its worker stored.
func noDrift(t *testing.T, d *demonstration) {
	t.Helper()
	text, err := process.Get(t.Context(), "http://"+d.Router.At.HTTP+"/v1/models")
	var answer struct{ Models []router.ModelState }
	if err = cmp.Or(err, json.Unmarshal(text, &answer)); err != nil {
		t.Fatal(err)
	}
	for _, m := range answer.Models {
		for _, c := range m.Classes {
			if t.Logf("class %s: %v", c.Class, c.Requests); c.Unconfirmed || c.Requests[confirm.Unmatched.String()] > 0 {
				t.Errorf("class %s: %+v", c.Class, c)
			}
		}
	}
}

func soakOnce(t *testing.T, engine []string) {
	d := newStack(t, 3, engine)
	d.begin(t, "--avoid-failing", "100ms", "--drain-delay", "1500ms", "--drain-timeout", "10s")
	seed, lasts := rand.Uint64(), soakTime(t)
	t.Logf("seed %d, %v", seed, lasts)
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
	begin := time.Now()
	for time.Since(begin) < lasts && !t.Failed() {
		var fault string
		kinds := 4
		if time.Since(begin) > lasts/2 {
			kinds = 1 // the last kvroute lives for half of the time
		}
		switch rng.IntN(kinds) {
		case 0:
			fault = "a worker is killed"
			e := d.Engines[rng.IntN(len(d.Engines))]
			back := s.away.begin(fmt.Sprint(wire.WorkerID(e.Name)))
			kill(t, e)
			<-time.After(time.Duration(rng.IntN(300)) * time.Millisecond)
			*e = *restart(t, e, t.TempDir())
			back()
		case 1:
			fault = "kvroute is killed"
			kill(t, d.Router)
			<-time.After(time.Duration(rng.IntN(300)) * time.Millisecond)
			d.Router = restart(t, d.Router, d.Dir)
		case 2:
			fault = "kvroute drains"
			d.Router.Stop()
			d.Router = restart(t, d.Router, d.Dir)
		default:
			fault = "kvroute stands still"
			if err := d.Router.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			<-time.After(time.Duration(rng.IntN(2500)) * time.Millisecond)
			if err := d.Router.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
		}
		faults[fault]++
		before := s.asked.Load()
		eventually(t, "no requests are served behind the fault: "+fault, func() bool { return s.asked.Load() > before+4 })
		<-time.After(time.Duration(rng.Int64N(int64(lasts/50) + 1)))
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
	knowsCaches(t, d)
	noDrift(t, d)
	t.Logf("%d requests, %d left by clients, %d lost with their worker, %d of them without its name; faults: %v", s.asked.Load(), s.left.Load(), s.spent.Load(), s.blind.Load(), faults)
	end := d.uses(t)
	d.Router.Stop()
	d.Router = restart(t, d.Router, d.Dir)
	for range 50 { // a new kvroute at work
		if got := d.send(t, "hello", true); got.status != http.StatusOK {
			t.Errorf("status %d after the soak", got.status)
		}
	}
	atRest(t, d)
	knowsCaches(t, d)
	fresh := d.uses(t)
	t.Logf("after the soak kvroute uses %v, after a restart %v", end, fresh)
	// The heap may be twice the live data, which has the tokenizer's cache and 1,024 decisions.
	if end.memory > 2*fresh.memory+128<<20 || end.descriptors > fresh.descriptors+16 || end.goroutines > fresh.goroutines+64 {
		t.Error("kvroute does not give back what it used")
	}
}

// knowsCaches waits until kvroute's index contains for each worker what is in the engine's cache.
func knowsCaches(t *testing.T, d *demonstration) {
	t.Helper()
	var difference string
	defer func() {
		if t.Failed() {
			t.Log(difference)
		}
	}()
	var blocks, sent int
	next := time.Now().Add(3 * time.Second)
	eventually(t, "the index is not equal to the engines' caches", func() bool {
		indexed := map[uint64]map[uint64]bool{}
		blocks = 0
		_, dump := get(t, "http://"+d.Router.At.HTTP+"/v1/index/dump")
		for line := range strings.Lines(dump) {
			var ev struct {
				WorkerID uint64 `json:"worker_id"`
				Event    struct {
					Data struct {
						Stored struct {
							Blocks []struct {
								Hash uint64 `json:"block_hash"`
							} `json:"blocks"`
						} `json:"stored"`
					} `json:"data"`
				} `json:"event"`
			}
			if err := json.Unmarshal([]byte(line), &ev); err != nil {
				t.Fatal(err)
			}
			for _, b := range ev.Event.Data.Stored.Blocks {
				if indexed[ev.WorkerID] == nil {
					indexed[ev.WorkerID] = map[uint64]bool{}
				}
				indexed[ev.WorkerID][b.Hash] = true
			}
		}
		for _, e := range d.Engines {
			var cached []uint64
			if err := process.GetJSON(t.Context(), "http://"+e.At.HTTP+"/sim/blocks", &cached); err != nil {
				t.Fatal(err)
			}
			of, missing := indexed[wire.WorkerID(e.Name)], 0
			for _, b := range cached {
				if !of[b] {
					missing++
				}
			}
			if missing > 0 || len(of) != len(cached) {
				difference = fmt.Sprintf("%s: kvroute knows %d blocks, the cache has %d, of which kvroute does not know %d", e.Name, len(of), len(cached), missing)
				if time.Now().After(next) { // the next event of an engine shows that its last one was lost
					sent++
					prompt := strings.Repeat(fmt.Sprintf("prompt %d behind the lost event ", sent), 10)
					look(send(t, t.Context(), "POST", "http://"+e.At.HTTP+chatPath, chatBody(prompt, 1, false), nil))
					next = time.Now().Add(3 * time.Second)
				}
				return false
			}
			blocks += len(cached)
		}
		return true
	})
	if blocks == 0 {
		t.Error("the engines have cached nothing")
	}
}

// resources are what a process of kvroute uses: bytes of memory, open files and sockets, goroutines.
type resources struct{ memory, descriptors, goroutines int }

func (d *demonstration) uses(t *testing.T) resources {
	t.Helper()
	_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
	number := func(metric string) int {
		v, err := strconv.ParseFloat(level(text, metric), 64)
		if err != nil {
			t.Fatal(err)
		}
		return int(v)
	}
	return resources{number("process_resident_memory_bytes"), number("process_open_fds"), number("go_goroutines")}
}
