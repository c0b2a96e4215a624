// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// groupWorld is a group with publishing replicas and upper routers that receive from
// them, on a bus that loses, repeats and reorders messages. All runs in one goroutine on
// a clock moved by hand; the clocks of the participants differ by minutes.
type groupWorld struct {
	t          *testing.T
	rand       *rand.Rand
	now        time.Time
	publishers []*testPublisher
	hearers    []*groupHearer
	loss       float64
	mess       float64 // share of the messages that come twice, or after later ones
	filters    map[messageKey][]byte
	starts     int
}

// messageKey identifies a message: the slow model stores each publisher's filter after it.
type messageKey struct{ router, epoch, seq uint64 }

type testPublisher struct {
	*GroupPublisher
	router *router.Router
	ahead  time.Duration
	away   bool
}

type groupHearer struct {
	*Groups
	inbox  [][]byte
	filter *indexer.Filter // filter assembled from its messages
	last   router.Summary
	ahead  time.Duration
	away   bool
}

func newGroupWorld(t *testing.T, seed uint64, publishers, hearers int) *groupWorld {
	w := &groupWorld{t: t, rand: rand.New(rand.NewPCG(seed, 5)), now: time.Unix(1e9, 0), filters: make(map[messageKey][]byte)}
	for i := range publishers {
		s := &testPublisher{ahead: time.Duration(w.rand.IntN(600)-300) * time.Second}
		var err error
		if s.router, err = router.New(router.Config{Now: func() time.Time { return w.now.Add(s.ahead) }}); err != nil {
			t.Fatal(err)
		}
		for id := range uint64(2) {
			if err := s.router.SetWorker(router.WorkerInfo{ID: id + 1, Models: []string{"m"}, BlockSize: 8, Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, 1}), 80)}); err != nil {
				t.Fatal(err)
			}
		}
		w.publishers = append(w.publishers, s)
		w.start(i)
	}
	for range hearers {
		h := &groupHearer{ahead: time.Duration(w.rand.IntN(600)-300) * time.Second}
		var err error
		h.Groups, err = NewGroups(nil, GroupsConfig{
			Groups: []Group{{Name: "g", Address: "10.0.0.9:80", Models: []string{"m"}}},
			Set:    func([]fleet.Record) error { return nil },
			Summary: func(id uint64, s router.Summary) bool {
				if id != groupWorkerID("g", "m") {
					t.Errorf("a summary of %d", id)
				}
				if s.Filter != nil {
					h.filter = s.Filter
				}
				for _, x := range s.Added {
					h.filter.Add(x)
				}
				h.last = s
				return true
			},
			Now: func() time.Time { return w.now.Add(h.ahead) },
		})
		if err != nil {
			t.Fatal(err)
		}
		h.link = link{connected: func() bool { return !h.away }, publish: func(string, string, []byte) error {
			// One of the replicas receives the request.
			if s := w.publishers[w.rand.IntN(len(w.publishers))]; !w.lost() && !s.away {
				s.requestFull()
			}
			return nil
		}}
		w.hearers = append(w.hearers, h)
	}
	return w
}

func (w *groupWorld) lost() bool { return w.rand.Float64() < w.loss }

// start restarts a publisher; its router stays.
func (w *groupWorld) start(i int) {
	s := w.publishers[i]
	w.starts++
	id := uint64(100 + w.starts)
	var err error
	s.GroupPublisher, err = NewGroupPublisher(nil, GroupPublisherConfig{
		Group: "g", ID: id, Router: s.router, Stride: 2, FullEvery: 10 * time.Second,
		Now: func() time.Time { return w.now.Add(s.ahead) },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	s.link = link{
		connected: func() bool { return !s.away },
		room:      func() int { return 4096 + 80 },
		publish: func(_, _ string, data []byte) error {
			data = bytes.Clone(data)
			m, err := readSummary(data)
			if err != nil {
				w.t.Fatal(err)
			}
			key := messageKey{m.Router, m.Epoch, m.Seq}
			if _, twice := w.filters[key]; twice {
				w.t.Fatalf("message %+v is sent twice", key)
			}
			if p := s.pools[poolName{"m", 8}]; p.filter != nil {
				w.filters[key] = p.filter.AppendTo(nil)
			}
			for _, h := range w.hearers {
				if !h.away && !w.lost() {
					h.inbox = append(h.inbox, data)
					if w.rand.Float64() < w.mess {
						h.inbox = append(h.inbox, data)
					}
				}
			}
			return nil
		},
	}
}

// deliver gives a receiver its next message, or another one.
func (w *groupWorld) deliver(h *groupHearer) {
	if len(h.inbox) == 0 {
		return
	}
	at := 0
	if w.rand.Float64() < w.mess {
		at = w.rand.IntN(len(h.inbox))
	}
	data := h.inbox[at]
	h.inbox = slices.Delete(h.inbox, at, at+1)
	h.Groups.take(data)
	f := h.groups["g"].feeds["m"]
	if f.whole && !f.broken {
		want := w.filters[messageKey{f.router, f.epoch, f.next - 1}]
		if got := h.filter.AppendTo(nil); !bytes.Equal(got, want) {
			w.t.Fatalf("after message %d of epoch %d the filter is not the publisher's", f.next-1, f.epoch)
		}
	}
}

// round advances all clocks by half a second.
func (w *groupWorld) round() {
	w.now = w.now.Add(500 * time.Millisecond)
	for _, s := range w.publishers {
		if w.now.UnixMilli()/500%2 == 0 {
			s.summarize(s.conf.Now())
		}
	}
	for _, h := range w.hearers {
		h.tick()
	}
}

// store applies to all routers of the group that a worker stored a prompt of random
// blocks.
func (w *groupWorld) store() {
	prompt := make([]uint64, 1+w.rand.IntN(12))
	for i := range prompt {
		prompt[i] = uint64(w.rand.IntN(3) + 1)
	}
	ev := indexer.Event{Kind: indexer.Stored}
	for i, s := range indexer.AppendSequenceHashes(nil, prompt) {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: s, Local: prompt[i]})
	}
	if w.rand.IntN(10) == 0 {
		ev = indexer.Event{Kind: indexer.Cleared}
	}
	id := uint64(1 + w.rand.IntN(2))
	for _, s := range w.publishers {
		s.router.ApplyEvent(router.Worker{ID: id}, ev)
	}
}

// TestSummariesConverge: messages may be lost, repeated, late, and publishers restarted.
// An upper router's state of a group is always one that a replica of the group published.
// After the faults end, it is the group's current state.
func TestSummariesConverge(t *testing.T) {
	for seed := range uint64(20) {
		w := newGroupWorld(t, seed, 1+int(seed%3), 2)
		w.loss, w.mess = []float64{0, .1, .4}[seed%3], []float64{0, .2}[seed%2]
		for range 600 {
			switch w.rand.IntN(40) {
			case 0:
				w.start(w.rand.IntN(len(w.publishers)))
			case 1:
				s := w.publishers[w.rand.IntN(len(w.publishers))]
				s.away = !s.away
			case 2:
				h := w.hearers[w.rand.IntN(len(w.hearers))]
				h.away = !h.away
			case 3:
				s := w.publishers[w.rand.IntN(len(w.publishers))]
				s.ahead += time.Duration(w.rand.IntN(20)-10) * time.Second
			case 4, 5, 6, 7, 8, 9, 10, 11:
				w.round()
			case 12, 13, 14, 15:
				w.store()
			default:
				w.deliver(w.hearers[w.rand.IntN(len(w.hearers))])
			}
		}
		w.loss, w.mess = 0, 0
		for _, s := range w.publishers {
			s.away = false
		}
		for _, h := range w.hearers {
			h.away = false
		}
		for i := range 60 {
			if i < 40 {
				w.store()
			}
			w.round()
			for _, h := range w.hearers {
				for len(h.inbox) > 0 {
					w.deliver(h)
				}
			}
		}
		for i, h := range w.hearers {
			f := h.groups["g"].feeds["m"]
			at := slices.IndexFunc(w.publishers, func(s *testPublisher) bool { return s.conf.ID == f.router })
			if f.broken || !f.whole || at < 0 {
				t.Fatalf("seed %d: hearer %d follows %d, broken %v", seed, i, f.router, f.broken)
			}
			s := w.publishers[at]
			for checkpoint, err := range s.router.Checkpoints("m", 8, 2) {
				if err != nil || !h.filter.Has(checkpoint) {
					t.Fatalf("seed %d: hearer %d misses a checkpoint, error %v", seed, i, err)
				}
			}
			if want := s.pools[poolName{"m", 8}].filter.AppendTo(nil); !bytes.Equal(h.filter.AppendTo(nil), want) {
				t.Fatalf("seed %d: hearer %d has another filter than the publisher", seed, i)
			}
			if age := w.now.Add(h.ahead).Sub(h.last.Taken); h.last.Healthy != 2 || age < 0 || age > 2*time.Second {
				t.Fatalf("seed %d: hearer %d has a summary of %v ago: %+v", seed, i, age, h.last)
			}
		}
	}
}

// encoded returns a summary as it is published.
func encoded(t testing.TB, s summary) []byte {
	t.Helper()
	data, err := encode(s, s.content)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestSummaryVectors checks the wire form against test vectors from its specification.
func TestSummaryVectors(t *testing.T) {
	load := router.Summary{
		Model: "m", BlockSize: 16, Taken: time.UnixMilli(1_700_000_000_123), Interval: time.Second, Stride: 4,
		Healthy: 8, Degraded: 2, Busy: 1, TotalBlocks: 160_000, ActiveBlocks: 5, PendTokens: 6, ActiveRequests: 7, Queued: 8, QueuedTokens: 9,
	}
	s := newSummary("g1", 7, time.Second, 4, &load)
	s.Epoch, s.Seq, s.Kind, s.content = 1<<60, 3, summaryDelta, events.AppendHashes(nil, []uint64{1, 1 << 63})
	const text = `{"v":1,"group":"g1","model":"m","block_size":16,"router_id":7,"epoch":1152921504606846976,"seq":3,"kind":"delta","stride":4,"taken_ms":1700000000123,"interval_ms":1000,` +
		`"load":{"workers_healthy":8,"workers_degraded":2,"busy_workers":1,"total_kv_blocks":160000,"active_blocks":5,"active_prefill_tokens":6,"active_requests":7,"queued":8,"queued_prefill_tokens":9}}` + "\n\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80"
	if got := encoded(t, s); string(got) != text {
		t.Errorf("written as %s\nwant %s", got, text)
	}
	got, err := readSummary([]byte(text))
	if err != nil || fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", s) || !slices.Equal(readHashes(got.content), []uint64{1, 1 << 63}) {
		t.Errorf("read %+v, error %v\nwant %+v", got, err, s)
	}
	read := got.routerSummary()
	if read.Taken = load.Taken; fmt.Sprintf("%+v", read) != fmt.Sprintf("%+v", load) {
		t.Errorf("the router gets %+v, want %+v", read, load)
	}
	f := indexer.NewFilter(100) // 16 words
	f.Add(0x0123456789abcdef)
	s.Kind = summaryFull
	var data []byte
	var sizes []int
	for s.Filter, s.content = range filterParts(f, 100) {
		got, err := readSummary(encoded(t, s))
		if want := (filterPart{M: 1024, K: 7, N: 1, Part: len(sizes), Parts: 2}); err != nil || got.Filter != want {
			t.Errorf("read %+v, error %v, want %+v", got, err, want)
		}
		data, sizes = append(data, got.content...), append(sizes, len(got.content))
	}
	if !slices.Equal(sizes, []int{100, 28}) {
		t.Errorf("parts of %d bytes", sizes)
	}
	if g, err := indexer.ParseFilter(1024, 7, 1, data); err != nil || !g.Has(0x0123456789abcdef) || g.Has(1) {
		t.Errorf("the parsed filter differs, error %v", err)
	}
	p := router.Probe{ID: "r", Model: "m", BlockSize: 16, Tokens: 40, Local: []uint64{1, 2}}
	data, err = encodeProbe(&p)
	if err != nil {
		t.Fatal(err)
	}
	q, err := readProbe(data)
	if err != nil || fmt.Sprintf("%+v", q) != fmt.Sprintf("%+v", p) {
		t.Errorf("read %+v, error %v; want %+v", q, err, p)
	}
	a := router.ProbeAnswer{Group: "g", Worker: router.Worker{ID: 1 << 60, DPRank: 2}, OverlapBlocks: 1, PendTokens: 100, ActiveBlocks: 4, ActiveRequests: 5, Cost: 1.5, Busy: true}
	if data, err = encodeProbeAnswer(&a, &p); err != nil {
		t.Fatal(err)
	}
	b, err := readProbeAnswer(data, &p)
	if err != nil || b != a {
		t.Errorf("read %+v, error %v; want %+v", b, err, a)
	}
}

// TestBadSummariesAreRefused: an invalid summary has no effect.
func TestBadSummariesAreRefused(t *testing.T) {
	good := func() summary {
		s := summary{Version: 1, Group: "g", Model: "m", BlockSize: 8, Router: 1, Epoch: 1, Kind: summaryFull, Stride: 4, TakenMS: 1, IntervalMS: 1000}
		for s.Filter, s.content = range filterParts(indexer.NewFilter(100), 1000) {
			break
		}
		return s
	}
	whole := encoded(t, good())
	if _, err := readSummary(whole); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*summary){
		"no version":     func(s *summary) { s.Version = 0 },
		"less than none": func(s *summary) { s.Stride = -1 },
		"a part before":  func(s *summary) { s.Filter.Part = -1 },
		"no group":       func(s *summary) { s.Group = "" },
		"long model":     func(s *summary) { s.Model = string(make([]byte, 300)) },
		"no block size":  func(s *summary) { s.BlockSize = 0 },
		"huge blocks":    func(s *summary) { s.BlockSize = 1 << 17 },
		"no stride":      func(s *summary) { s.Stride = 0 },
		"huge stride":    func(s *summary) { s.Stride = 1 << 20 },
		"odd kind":       func(s *summary) { s.Kind = "new" },
		"odd bits":       func(s *summary) { s.Filter.M = 100 },
		"many bits":      func(s *summary) { s.Filter.M = 1 << 40 },
		"no parts":       func(s *summary) { s.Filter.Parts = 0 },
		"part behind":    func(s *summary) { s.Filter.Part = 1 },
		"many parts":     func(s *summary) { s.Filter.Parts = 100 },
		"no data":        func(s *summary) { s.content = nil },
		"much data":      func(s *summary) { s.content = make([]byte, 1<<20) },
		"half a hash":    func(s *summary) { s.Kind, s.content = summaryDelta, make([]byte, 12) },
		"too many added": func(s *summary) { s.Kind, s.content = summaryDelta, make([]byte, 8*maxSummaryAdds+8) },
	} {
		s := good()
		if change(&s); name == "much data" {
			s.Filter.M = 1 << 25
		}
		if _, err := readSummary(encoded(t, s)); err == nil {
			t.Errorf("%s: the summary is accepted", name)
		}
	}
	for n := range bytes.IndexByte(whole, '\n') {
		if _, err := readSummary(whole[:n]); err == nil {
			t.Errorf("the first %d bytes are accepted", n)
		}
	}
	// Parts that disagree about the filter's size make no filter.
	var summaries int
	g, err := NewGroups(nil, GroupsConfig{
		Groups:  []Group{{Name: "g", Address: "10.0.0.9:80"}},
		Set:     func([]fleet.Record) error { return nil },
		Summary: func(uint64, router.Summary) bool { summaries++; return true },
	})
	if err != nil {
		t.Fatal(err)
	}
	g.link = link{connected: func() bool { return false }}
	for i, p := range []filterPart{{M: 1024, K: 7, Part: 0, Parts: 2}, {M: 512, K: 7, Part: 1, Parts: 2}} {
		s := good()
		s.Seq, s.Filter, s.content = uint64(i), p, make([]byte, 64)
		g.take(encoded(t, s))
	}
	if f := g.groups["g"].feeds["m"]; f.whole || !f.broken || summaries != 2 {
		t.Errorf("feed %+v, %d summaries", f, summaries)
	}
}

func FuzzSummary(f *testing.F) {
	s := summary{Version: 1, Group: "g", Model: "m", BlockSize: 8, Kind: summaryDelta, Stride: 4, IntervalMS: 1000, TakenMS: 5, content: make([]byte, 16)}
	f.Add(encoded(f, s))
	s.Kind = summaryFull
	for s.Filter, s.content = range filterParts(indexer.NewFilter(10), 8) {
		f.Add(encoded(f, s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := readSummary(data)
		if err != nil {
			return
		}
		if _, err := readSummary(encoded(t, s)); err != nil {
			t.Errorf("the encoded summary cannot be read: %v", err)
		}
	})
}
