// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
)

// whats returns the names of a worker's faults.
func whats(s *engines.Sources, id uint64) string {
	var all []string
	for _, f := range s.Faults(id) {
		all = append(all, f.What)
	}
	return strings.Join(all, " ")
}

// Two workers whose records name one socket are one engine: the later one does not count until the
// other one is removed.
func TestTwoWorkersWithOneSocket(t *testing.T) {
	t.Parallel()
	sim := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	sim.store(5)
	first, second := zmqWorker(7, sim), zmqWorker(8, sim)
	first.Name, second.Name = "gpu-1", "gpu-2"
	s, c := follow(t, engines.SourcesConfig{}, first, second)
	agree(t, c, 0, sim)
	eventually(t, func() bool { return whats(s, 7) == "same_events" && whats(s, 8) == "same_events" })
	if f := s.Faults(7)[0].Text + s.Faults(8)[0].Text; !strings.Contains(f, `of worker "gpu-2" are the same`) || !strings.Contains(f, `of worker "gpu-1" are the same`) ||
		strings.Count(f, `the events of "gpu-2" are not counted`) != 2 {
		t.Error(f)
	}
	if n, state := len(c.of(8, 0)), s.State(8); n > 0 || state != indexer.StateNone {
		t.Errorf("the second worker has %d blocks, state %v", n, state)
	}
	s.Remove(7)
	eventually(t, func() bool { return len(c.of(8, 0)) == 5 && s.State(8) == indexer.StateOK && whats(s, 8) == "" })
}

// Of two registered workers with one socket, the one that started later counts.
func TestTheRestartedWorkerHasTheSocket(t *testing.T) {
	t.Parallel()
	sim := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	sim.store(5)
	old, restarted := zmqWorker(7, sim), zmqWorker(8, sim)
	old.Started, restarted.Started = 1000, 2000
	s, c := follow(t, engines.SourcesConfig{}, old, restarted)
	eventually(t, func() bool { return len(c.of(8, 0)) == 5 && s.State(7) == indexer.StateNone && len(c.of(7, 0)) == 0 })
	// The batches of a later one are equal to those of the one before, and prove nothing.
	latest := zmqWorker(9, sim)
	latest.Started = 3000
	s.Set(latest)
	eventually(t, func() bool { return len(c.of(8, 0)) == 0 && s.State(8) == indexer.StateNone })
	for deadline := time.Now().Add(20 * time.Second); len(c.of(9, 0)) < 5; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the worker that started last has %d of 5 blocks: %v", len(c.of(9, 0)), s.Faults(9))
		}
	}
}

// A socket under two names is found by its batches. It is two sockets again when the batches differ.
func TestOneSocketUnderTwoNames(t *testing.T) {
	t.Parallel()
	sim := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	first, second := zmqWorker(7, sim), zmqWorker(8, sim)
	second.Endpoint = strings.Replace(sim.live, "127.0.0.1", "localhost", 1)
	s, c := follow(t, engines.SourcesConfig{}, first, second)
	eventually(t, func() bool { return sim.Subscribers() == 2 })
	sim.store(2)
	eventually(t, func() bool { return len(c.of(7, 0)) == 2 && len(c.of(8, 0)) == 2 })
	if whats(s, 7)+whats(s, 8) != "" {
		t.Error("two equal batches are taken as a proof")
	}
	sim.store(1)
	eventually(t, func() bool {
		return whats(s, 7) == "same_events" && whats(s, 8) == "same_events" && len(c.of(8, 0)) == 0 && s.State(8) == indexer.StateNone
	})
	agree(t, c, 0, sim)
	if f := s.Faults(8)[0].Text; !strings.Contains(f, "deliver the same batches") || !strings.Contains(f, "tcp://localhost:") {
		t.Error(f)
	}
	sim.store(50)
	agree(t, c, 0, sim)
	if n := len(c.of(8, 0)); n > 0 {
		t.Errorf("%d blocks of the second worker count", n)
	}
	s.Remove(7)
	eventually(t, func() bool { return whats(s, 8) == "" && len(c.of(8, 0)) == 53 })
}

// Two engines that store the same blocks are two engines.
func TestEqualBlocksAreNoProof(t *testing.T) {
	t.Parallel()
	a, b := simulate(t, enginesim.SocketsConfig{Replay: freePort}), simulate(t, enginesim.SocketsConfig{Replay: freePort})
	s, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, a), zmqWorker(8, b))
	for range 100 {
		a.store(1)
		b.store(1)
	}
	// These batches are equal in each byte, but they have no exact time, or no events.
	for range 10 {
		for _, sim := range []*simulated{a, b} {
			sim.PublishBody([]byte{0x93, 0x01, 0x91, 0x91, 0xb0, 'A', 'l', 'l', 'B', 'l', 'o', 'c', 'k', 's', 'C', 'l', 'e', 'a', 'r', 'e', 'd', 0xc0})
			sim.PublishBody([]byte{0x93, 0xcb, 0x41, 0xd9, 0, 0, 0, 0x20, 0, 0, 0x90, 0xc0})
		}
	}
	a.held, b.held = map[uint64]uint64{}, map[uint64]uint64{}
	a.last, b.last = 500, 500
	a.store(3)
	b.store(3)
	eventually(t, func() bool { return len(c.of(7, 0)) == 3 && len(c.of(8, 0)) == 3 })
	if whats(s, 7)+whats(s, 8) != "" {
		t.Error(s.Faults(7), s.Faults(8))
	}
}

// A refused socket is a fault with its address and the cause, until the engine listens there.
func TestARefusedSocketIsAFault(t *testing.T) {
	t.Parallel()
	sim := simulate(t, enginesim.SocketsConfig{})
	sim.stop()
	w := zmqWorker(7, sim)
	s, _ := follow(t, engines.SourcesConfig{}, w)
	eventually(t, func() bool { return whats(s, 7) == "event_socket_refused" })
	if f := s.Faults(7)[0].Text; !strings.Contains(f, sim.live+" (rank 0) is unavailable: connection refused;") {
		t.Error(f)
	}
	simulate(t, enginesim.SocketsConfig{Endpoint: sim.live})
	eventually(t, func() bool { return whats(s, 7) == "" })
}

// Settings that differ from what the engine reports are faults.
func TestSettingsAreComparedWithTheEngine(t *testing.T) {
	t.Parallel()
	right := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	other := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	answers := map[string]string{
		"/kv_event_sources": fmt.Sprintf(`{"0":{"endpoint":%q,"replay_endpoint":%q}}`, right.live, right.replay),
		"/metrics":          `vllm:cache_config_info{block_size="32",num_gpu_blocks="400"} 1.0`,
	}
	without := func(paths ...string) map[string]string {
		m := maps.Clone(answers)
		for _, p := range paths {
			delete(m, p)
		}
		return m
	}
	for _, c := range []struct {
		name    string
		engine  map[string]string
		change  func(*engines.EngineWorker)
		want    string // names of faults
		in      string // a part of a text
		refused bool
	}{
		{name: "equal", engine: answers, change: func(w *engines.EngineWorker) {}},
		{name: "another block size", engine: answers, change: func(w *engines.EngineWorker) { w.BlockSize = 16 }, want: "block_size", in: "block_size is 16, and its engine has blocks of 32 tokens"},
		{name: "the block size by the metrics only", engine: without("/kv_event_sources"), change: func(w *engines.EngineWorker) { w.BlockSize = 16 }, want: "block_size", in: "set block_size to 32"},
		{name: "nothing is reported", engine: nil, change: func(w *engines.EngineWorker) { w.BlockSize = 16 }},
		{name: "the socket of another engine", engine: answers, change: func(w *engines.EngineWorker) { w.Endpoint = other.live }, want: "event_sockets", in: other.live},
		{name: "another replay socket", engine: answers, change: func(w *engines.EngineWorker) { w.Replay = other.replay }, want: "event_sockets", in: "events.replay is " + other.replay},
		{name: "another rank", engine: answers, change: func(w *engines.EngineWorker) { w.DPStart = 3 }, want: "event_sockets", in: "rank 3"},
		{name: "no sockets are named", engine: answers, change: func(w *engines.EngineWorker) { w.Endpoint = "" }},
		{name: "no events", engine: map[string]string{"/kv_event_sources": `{"0":{"enable_kv_cache_events":false}}`}, change: func(w *engines.EngineWorker) {}, want: "event_sockets", in: "no event sockets"},
		{name: "garbage", engine: map[string]string{"/kv_event_sources": "<html>"}, change: func(w *engines.EngineWorker) {}, refused: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				text, has := c.engine[r.URL.Path]
				if !has {
					w.WriteHeader(http.StatusNotFound)
				}
				fmt.Fprint(w, text)
			}))
			defer server.Close()
			w := engines.EngineWorker{
				ID: 7, Transport: engines.TransportZMQ, Address: server.Listener.Addr().String(), Endpoint: right.live, Replay: right.replay, BlockSize: 32,
			}
			c.change(&w)
			s, err := engines.NewSources(engines.SourcesConfig{})
			if err != nil {
				t.Fatal(err)
			}
			_, faults, err := s.Compare(t.Context(), w)
			var names, texts string
			for _, f := range faults {
				names, texts = names+f.What, texts+f.Text
			}
			if (err != nil) != c.refused || names != c.want || !strings.Contains(texts, c.in) {
				t.Errorf("%v, %v; want %q", faults, err, c.want)
			}
		})
	}
}

// A worker that ceases to count while its engine sends an answer gets no blocks of the rest.
func TestTheRestOfAnAnswerDoesNotCount(t *testing.T) {
	t.Parallel()
	sim := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	all := map[uint64]uint64{}
	for range 900 { // no block has a parent, so that none is missing
		sim.held = map[uint64]uint64{}
		sim.store(1)
		maps.Copy(all, sim.held)
	}
	sim.held = all
	old, restarted := zmqWorker(8, sim), zmqWorker(7, sim)
	old.Started, restarted.Started = 1000, 2000
	var c caches
	entered, leave := make(chan struct{}), make(chan struct{})
	wait := sync.OnceFunc(func() { close(entered); <-leave })
	s, _ := follow(t, engines.SourcesConfig{Sink: func(worker uint64, rank uint32, ev indexer.Event) {
		if worker == 8 && ev.Kind == indexer.Stored {
			wait()
			<-time.After(100 * time.Microsecond) // the answer is not read to its end before the worker ceases to count
		}
		c.apply(worker, rank, ev)
	}}, old)
	<-entered
	s.Set(restarted)
	eventually(t, func() bool { return whats(s, 7) == "same_events" }) // it is about to count instead
	close(leave)
	agree(t, &c, 0, sim)
	eventually(t, func() bool { return s.State(8) == indexer.StateNone })
	if n := len(c.of(8, 0)); n > 0 {
		t.Errorf("the worker that does not count has %d blocks", n)
	}
}
