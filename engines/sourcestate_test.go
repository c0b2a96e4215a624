// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
)

// A restarted process requests only the batches since its last save. If the engine is another
// process by then, or the block size changed, the saved state is discarded.
func TestSourcesComeBack(t *testing.T) {
	t.Parallel()
	s := simulate(t, enginesim.SocketsConfig{Replay: freePort})
	first := func() (file []byte) {
		var c caches
		src, err := engines.NewSources(engines.SourcesConfig{Sink: c.apply})
		if err != nil {
			t.Fatal(err)
		}
		src.Set(zmqWorker(7, s))
		stop := running(t, src.Run)
		agree(t, &c, 0, s)
		var live, end bytes.Buffer
		if err := src.Save(&live); err != nil {
			t.Fatal(err)
		}
		stop()
		if err := src.Save(&end); err != nil {
			t.Fatal(err)
		}
		if len(end.Bytes()) != live.Len() {
			t.Errorf("%d bytes while it runs, %d at the end", live.Len(), end.Len())
		}
		return end.Bytes()
	}
	again := func(file []byte, w engines.EngineWorker) (c *caches, meter *meterReader) {
		t.Helper()
		c, meter = &caches{}, newMeter(t)
		src, err := engines.NewSources(engines.SourcesConfig{Sink: c.apply, Meter: meter.meter})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := src.Load(bytes.NewReader(file)); n != 1 || err != nil {
			t.Fatalf("%d ranks, %v", n, err)
		}
		src.Set(w)
		running(t, src.Run)
		return c, meter
	}
	s.store(50)
	file := first()
	s.store(3) // while no process follows the engine

	c, meter := again(file, zmqWorker(7, s))
	agree(t, c, 0, s)
	if n, old := meter.read("kvroute.events.repairs", "what", "replayed"), meter.read("kvroute.source.batches", "outcome", "replayed"); n != 3 || old != 3 {
		t.Errorf("%d batches were sent again, and %d by the deprecated counter, want the 3 that were missing", n, old)
	}
	if n := meter.read("kvroute.events.received", "outcome", "accepted"); n != 3 || meter.read("kvroute.events.received", "feed", "zmq") != n {
		t.Errorf("%d batches were accepted, want 3, all of the feed zmq", n)
	}
	s.store(2)
	agree(t, c, 0, s)

	// The block size of the index is different now.
	w := zmqWorker(7, s)
	w.BlockSize = 32
	c, meter = again(file, w)
	eventually(t, func() bool { return len(c.of(7, 0)) == len(s.held)/2 })
	eventually(t, func() bool { return meter.read("kvroute.events.repairs", "what", "replayed") == len(s.held) })

	// The engine is another process, with higher numbers than the previous one.
	live, replay := s.live, s.replay
	s.stop()
	other := simulate(t, enginesim.SocketsConfig{Endpoint: live, Replay: replay})
	other.last = 500
	other.store(60)
	c, _ = again(file, zmqWorker(7, other))
	agree(t, c, 0, other)
	other.store(1)
	agree(t, c, 0, other)

	// Damaged files are refused completely.
	for i := range file {
		bad := bytes.Clone(file)
		bad[i] ^= 0x41
		src, err := engines.NewSources(engines.SourcesConfig{Sink: c.apply})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := src.Load(bytes.NewReader(bad)); n != 0 || !errors.Is(err, events.ErrSnapshot) {
			t.Fatalf("byte %d: %d ranks, %v", i, n, err)
		}
		if n, err := src.Load(bytes.NewReader(file[:i])); n != 0 || !errors.Is(err, events.ErrSnapshot) {
			t.Fatalf("cut at %d: %d ranks, %v", i, n, err)
		}
	}
}

// A saved block whose parent is gone cannot be restored: the rank is suspect, and is read from the
// beginning at once if the engine still has all batches.
func TestBlocksBehindHolesAreReadAgain(t *testing.T) {
	t.Parallel()
	for name, buffer := range map[string]int{"the engine has all": 0, "it has the end": 3} {
		t.Run(name, func(t *testing.T) {
			s := simulate(t, enginesim.SocketsConfig{Replay: freePort, Buffer: buffer})
			s.store(6)
			var file bytes.Buffer
			var c caches
			src, err := engines.NewSources(engines.SourcesConfig{Sink: c.apply})
			if err != nil {
				t.Fatal(err)
			}
			src.Set(zmqWorker(7, s))
			stop := running(t, src.Run)
			if buffer > 0 { // batches that left the buffer are unknown
				eventually(t, func() bool { return src.State(7) == indexer.StatePartial })
				s.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Cleared}})
				s.held, s.last = map[uint64]uint64{}, 100
				s.store(6)
			}
			first := s.last - 6
			s.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{1000 + first + 2}}})
			delete(s.held, 1000+first+2)
			agree(t, &c, 0, s)
			stop()
			if err := src.Save(&file); err != nil {
				t.Fatal(err)
			}

			var later caches
			src, err = engines.NewSources(engines.SourcesConfig{Sink: later.apply})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := src.Load(&file); err != nil {
				t.Fatal(err)
			}
			src.Set(zmqWorker(7, s))
			running(t, src.Run)
			s.store(1)
			if buffer == 0 {
				agree(t, &later, 0, s)
				eventually(t, func() bool { return src.State(7) == indexer.StateOK })
				return
			}
			eventually(t, func() bool { return src.State(7) == indexer.StateSuspect && len(later.of(7, 0)) > 0 })
			for id := range later.of(7, 0) {
				if _, ok := s.held[id]; !ok {
					t.Errorf("block %d is known, which the engine does not have", id)
				}
			}
		})
	}
}

// A faulty rank is still faulty after a restart of kvroute if the engine no longer has what is missing.
func TestRestoredRanksKeepTheirState(t *testing.T) {
	t.Parallel()
	for _, want := range []indexer.State{indexer.StatePartial, indexer.StateSuspect} {
		t.Run(string(want), func(t *testing.T) {
			s := simulate(t, enginesim.SocketsConfig{Replay: freePort, Buffer: 3})
			if want == indexer.StatePartial {
				s.store(6)
			}
			src, c := follow(t, engines.SourcesConfig{}, zmqWorker(7, s))
			eventually(t, func() bool { return s.Subscribers() == 1 })
			if want == indexer.StateSuspect {
				s.store(2)
				agree(t, c, 0, s)
				s.Drop(9)
				s.store(9)
				s.Drop(0)
			}
			clear(s.held) // the next block has no parent, which may be unknown
			s.store(1)
			eventually(t, func() bool { _, ok := c.of(7, 0)[1000+s.last-1]; return ok && src.State(7) == want })
			var file bytes.Buffer
			if err := src.Save(&file); err != nil {
				t.Fatal(err)
			}
			again, err := engines.NewSources(engines.SourcesConfig{Sink: new(caches).apply})
			if err != nil {
				t.Fatal(err)
			}
			if n, err := again.Load(&file); n != 1 || err != nil {
				t.Fatalf("%d ranks, %v", n, err)
			}
			again.Set(zmqWorker(7, s))
			running(t, again.Run)
			eventually(t, func() bool { return s.Subscribers() == 2 && again.State(7) == want })
		})
	}
}

// Without a replay socket, a later process cannot detect whether the engine is the same: nothing
// is saved, and the rank is read from now on.
func TestWhoCannotBeAskedIsNotSaved(t *testing.T) {
	t.Parallel()
	s := simulate(t, enginesim.SocketsConfig{})
	var c caches
	src, err := engines.NewSources(engines.SourcesConfig{Sink: c.apply})
	if err != nil {
		t.Fatal(err)
	}
	src.Set(zmqWorker(7, s))
	running(t, src.Run)
	eventually(t, func() bool { return src.State(7) == indexer.StateOK && s.Subscribers() == 1 })
	s.store(3)
	agree(t, &c, 0, s)
	var file bytes.Buffer
	if err := src.Save(&file); err != nil {
		t.Fatal(err)
	}
	if n, err := src.Load(&file); n != 0 || err != nil {
		t.Errorf("%d ranks, %v", n, err)
	}
}

// The saved state of a polled rank continues with the next event. If an event is missing, the
// state is discarded, because the engine no longer has the event.
func TestPolledRanksComeBack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		next uint64
		want int
	}{"the next": {4, 4}, "one is missing": {5, 1}, "it started anew": {0, 1}} {
		t.Run(name, func(t *testing.T) {
			p := polled(t)
			w := engines.EngineWorker{ID: 7, Transport: engines.TransportPoll, Endpoint: p.url, BlockSize: 4}
			var held caches
			src, err := engines.NewSources(engines.SourcesConfig{Sink: held.apply})
			if err != nil {
				t.Fatal(err)
			}
			src.Set(w)
			stop := running(t, src.Run)
			for id := range uint64(3) {
				p.says(id+1, 100+id)
			}
			eventually(t, func() bool { return len(held.of(7, 0)) == 3 })
			stop()
			var file bytes.Buffer
			if err := src.Save(&file); err != nil {
				t.Fatal(err)
			}
			var back caches
			if src, err = engines.NewSources(engines.SourcesConfig{Sink: back.apply}); err != nil {
				t.Fatal(err)
			}
			if n, err := src.Load(&file); n != 1 || err != nil {
				t.Fatalf("%d ranks, %v", n, err)
			}
			// A request whose answer the first process did not wait for may still remove events
			// from the server.
			p = polled(t)
			w.Endpoint = p.url
			src.Set(w)
			running(t, src.Run)
			eventually(t, func() bool { return maps.Equal(back.of(7, 0), held.of(7, 0)) })
			p.says(c.next, 200)
			eventually(t, func() bool { got := back.of(7, 0); _, ok := got[200]; return ok && len(got) == c.want })
		})
	}
}

// meterReader reads counters.
type meterReader struct {
	t      *testing.T
	reader *sdkmetric.ManualReader
	meter  metric.Meter
}

func newMeter(t *testing.T) *meterReader {
	reader := sdkmetric.NewManualReader()
	return &meterReader{t, reader, sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("test")}
}

func (m *meterReader) read(name, key, value string) (sum int) {
	m.t.Helper()
	var all metricdata.ResourceMetrics
	if err := m.reader.Collect(m.t.Context(), &all); err != nil {
		m.t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, metric := range scope.Metrics {
			if data, ok := metric.Data.(metricdata.Sum[int64]); ok && metric.Name == name {
				for _, p := range data.DataPoints {
					if v, ok := p.Attributes.Value(attribute.Key(key)); ok && v.AsString() == value {
						sum += int(p.Value)
					}
				}
			}
		}
	}
	return sum
}

// poller is a server like TensorRT-LLM's: it forgets the events that it has returned.
type poller struct {
	url string

	mu   sync.Mutex
	list []string
}

func polled(t *testing.T) *poller {
	p := &poller{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		p.mu.Lock()
		defer p.mu.Unlock()
		fmt.Fprint(w, "["+strings.Join(p.list, ",")+"]")
		p.list = nil
	}))
	t.Cleanup(server.Close)
	p.url = server.URL
	return p
}

// says makes the server store a block.
func (p *poller) says(event, block uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = append(p.list, trtStored(int(event), "null", trtBlock(fmt.Sprint(block), trtTokens(int(block)*4, 4), "")))
}

func FuzzLoadSources(f *testing.F) {
	var empty bytes.Buffer
	if s, err := engines.NewSources(engines.SourcesConfig{}); err != nil || s.Save(&empty) != nil {
		f.Fatal(err)
	}
	f.Add(empty.Bytes())
	for _, release := range []string{"0.1.0", "0.2.0"} {
		golden, err := os.ReadFile("testdata/" + release + "/sources.bin")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(golden)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := engines.NewSources(engines.SourcesConfig{})
		if err != nil {
			t.Fatal(err)
		}
		n, err := s.Load(bytes.NewReader(data))
		if err != nil && (n != 0 || !errors.Is(err, events.ErrSnapshot)) {
			t.Errorf("%d ranks, %v", n, err)
		}
		var again bytes.Buffer
		if err := s.Save(&again); err != nil {
			t.Error(err)
		}
	})
}
