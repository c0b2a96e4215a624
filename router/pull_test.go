// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// pullWorld is a pool of three workers with blocks of 8 tokens. Worker 1 is pinned, so that it is always the target. A
// pull takes 100 ms and 1 ms a token, the computation of a token 2 ms: from 101 tokens on a pull is faster.
type pullWorld struct {
	t     *testing.T
	c     *core
	conf  Config
	infos [4]WorkerInfo
	host  []int32 // blocks of workers 1 to 3 in host memory
	held  int32   // blocks of worker 1 on the device
	req   Request
	now   time.Time

	adapter string
	version uint64 // of the workers when the overlap was counted; 0 = the newest
}

func newPullWorld(t *testing.T) *pullWorld {
	t.Helper()
	w := &pullWorld{t: t, now: time.Unix(1000, 0), host: []int32{0, 40, 50}}
	conf, err := Config{Pull: PullConfig{
		On: true, Delay: 100 * time.Millisecond, PerToken: time.Millisecond, ComputePerToken: 2 * time.Millisecond,
		MinTokens: 64, Limit: 2,
	}, AvoidFailing: time.Second}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	w.conf = conf
	made := newCore(&w.conf, 8)
	w.c = &made
	for id := 1; id <= 3; id++ {
		w.infos[id] = WorkerInfo{
			ID: uint64(id), Models: []string{"m"}, Address: netip.MustParseAddrPort(fmt.Sprintf("10.0.0.%d:8000", id)), BlockSize: 8,
			DPSize: 1, Engine: "vllm", KVSource: netip.MustParseAddrPort(fmt.Sprintf("10.0.0.%d:5710", id)),
		}
	}
	w.req = Request{Pinned: &Worker{ID: 1}, MayPull: true}
	w.set()
	return w
}

func (w *pullWorld) set() {
	for id := 1; id <= 3; id++ {
		w.c.setWorker(new(w.infos[id]))
	}
}

// comeAgain removes a worker after the overlap was counted, and adds it: its ordinal is that of another process.
func (w *pullWorld) comeAgain(id uint64) {
	w.version = w.c.changes
	ord, _ := w.c.find(Worker{ID: id})
	w.c.dropRank(ord)
}

// decide decides for a prompt of 100 blocks, and books it under an id.
func (w *pullWorld) decide(id string) *Decision {
	w.t.Helper()
	req := w.req
	req.ID = id
	in := &decisionInput{
		Request: &req, prompt: prompt{tokens: 800},
		overlap: overlap{blocks: []int32{w.held, 0, 0}, host: w.host, version: cmp.Or(w.version, w.c.changes)},
		adapter: w.adapter,
	}
	why := take
	if id == "" {
		why = look
	}
	to := new(result)
	if err := w.c.decide(w.now, in, why, 0, new(choices), to); err != nil {
		w.t.Fatal(err)
	}
	return &to.decision
}

// source is the source of a decision in short; "none" without one.
func source(d *Decision) string {
	if d.Source == nil {
		return "none"
	}
	return fmt.Sprintf("%d: %d tokens at %v, %g of %g ms", d.Source.Worker.ID, d.Source.Tokens, d.Source.Pulls, d.Source.PullMS, d.Source.ComputeMS)
}

func TestSourceOfAPull(t *testing.T) {
	t.Parallel()
	const third, second = "3: 400 tokens at 10.0.0.3:5710, 500 of 800 ms", "2: 320 tokens at 10.0.0.2:5710, 420 of 640 ms"
	avoid := func(w *pullWorld) *avoidance {
		ord, _ := w.c.find(Worker{ID: 3})
		return &w.c.entries[ord].avoid
	}
	for name, c := range map[string]struct {
		change func(*pullWorld)
		want   string
	}{
		"most blocks":                {func(*pullWorld) {}, third},
		"target has some":            {func(w *pullWorld) { w.held = 20 }, "3: 240 tokens at 10.0.0.3:5710, 340 of 480 ms"},
		"target has some in host":    {func(w *pullWorld) { w.host[0] = 20 }, "3: 240 tokens at 10.0.0.3:5710, 340 of 480 ms"},
		"target has as many":         {func(w *pullWorld) { w.held = 50 }, "none"},
		"computation is as fast":     {func(w *pullWorld) { w.held = 50; w.host[2] = 62; w.conf.Pull.Delay = 96 * time.Millisecond }, "none"},
		"computation is slower":      {func(w *pullWorld) { w.held = 50; w.host[2] = 62; w.conf.Pull.Delay = 95 * time.Millisecond }, "3: 96 tokens at 10.0.0.3:5710, 191 of 192 ms"},
		"short":                      {func(w *pullWorld) { w.conf.Pull.MinTokens = 401 }, "none"},
		"just long enough":           {func(w *pullWorld) { w.conf.Pull.MinTokens = 400 }, third},
		"the last token is computed": {func(w *pullWorld) { w.host[2] = 100 }, "3: 799 tokens at 10.0.0.3:5710, 899 of 1598 ms"},
		"request that may not":       {func(w *pullWorld) { w.req.MayPull = false }, "none"},
		"target without the tier":    {func(w *pullWorld) { w.infos[1].KVSource = netip.AddrPort{} }, "none"},
		"engine without the fields": {func(w *pullWorld) {
			w.infos[1].Engine, w.infos[2].Engine, w.infos[3].Engine = "sglang", "sglang", "sglang"
		}, "none"},
		"holder without the tier":      {func(w *pullWorld) { w.infos[3].KVSource = netip.AddrPort{} }, "2: 320 tokens at 10.0.0.2:5710, 420 of 640 ms"},
		"holder of another engine":     {func(w *pullWorld) { w.infos[3].Engine = "sglang" }, "2: 320 tokens at 10.0.0.2:5710, 420 of 640 ms"},
		"holder drains":                {func(w *pullWorld) { w.infos[3].Draining = true }, "2: 320 tokens at 10.0.0.2:5710, 420 of 640 ms"},
		"holder is degraded":           {func(w *pullWorld) { w.infos[3].Health = Degraded }, "2: 320 tokens at 10.0.0.2:5710, 420 of 640 ms"},
		"holder refuses":               {func(w *pullWorld) { w.infos[3].Refuses = true }, "2: 320 tokens at 10.0.0.2:5710, 420 of 640 ms"},
		"request allows two addresses": {func(w *pullWorld) { w.req.AllowedAddresses = []netip.AddrPort{w.infos[1].Address, w.infos[2].Address} }, "2: 320 tokens at 10.0.0.2:5710, 420 of 640 ms"},
		"request allows two workers":   {func(w *pullWorld) { w.req.Allowed = []Worker{{ID: 1}, {ID: 2}} }, "2: 320 tokens at 10.0.0.2:5710, 420 of 640 ms"},
		"request requires a taint":     {func(w *pullWorld) { w.infos[1].Taints, w.req.RequiredTaints = []string{"x"}, []string{"x"} }, "none"},
		"holder failed just now":       {func(w *pullWorld) { avoid(w).failing = true }, second},
		"holder is tried":              {func(w *pullWorld) { avoid(w).trying = true }, second},
		"holder without the adapter": {func(w *pullWorld) {
			w.adapter, w.infos[1].LoRA, w.infos[2].LoRA = "a", []string{"a"}, []string{"a"}
		}, second},
		"all have the adapter": {func(w *pullWorld) {
			w.adapter, w.infos[1].LoRA, w.infos[2].LoRA, w.infos[3].LoRA = "a", []string{"a"}, []string{"a"}, []string{"b", "a"}
		}, third},
		// The blocks of an ordinal are those of the process that had it when they were counted.
		"holder came again": {func(w *pullWorld) { w.comeAgain(3) }, second},
		"target came again": {func(w *pullWorld) { w.host[0] = 20; w.comeAgain(1) }, third},
		"port of a rank":    {func(w *pullWorld) { w.infos[3].KVSource = netip.MustParseAddrPort("10.0.0.3:65535") }, "3: 400 tokens at 10.0.0.3:65535, 500 of 800 ms"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newPullWorld(t)
			c.change(w)
			w.set()
			if got := source(w.decide("")); got != c.want {
				t.Errorf("source %s, want %s", got, c.want)
			}
			w.conf.Pull.On = false
			if got := source(w.decide("")); got != "none" {
				t.Errorf("turned off: source %s", got)
			}
		})
	}
}

func TestPortsOfRanks(t *testing.T) {
	t.Parallel()
	info := WorkerInfo{KVSource: netip.MustParseAddrPort("10.0.0.3:65534")}
	for rank, want := range []string{"10.0.0.3:65534", "10.0.0.3:65535", "invalid AddrPort"} {
		if got := info.pullAddress(uint32(rank)).String(); got != want {
			t.Errorf("rank %d: %s, want %s", rank, got, want)
		}
	}
}

// A source gets only so many pulls at a time, equal sources share them, and each ends with its first token or request.
func TestPullsAreLimited(t *testing.T) {
	t.Parallel()
	w := newPullWorld(t)
	w.host = []int32{0, 50, 50}
	var order []uint64
	for i := range 5 {
		d := w.decide(fmt.Sprint(i))
		if d.Source == nil {
			order = append(order, 0)
			continue
		}
		order = append(order, d.Source.Worker.ID)
	}
	if want := []uint64{2, 3, 2, 3, 0}; !slices.Equal(order, want) {
		t.Errorf("sources %v, want %v: two pulls each", order, want)
	}
	if outcome, open := w.c.pulls.end(w.now, "1", pullFirstToken); outcome != PullInTime || !open {
		t.Errorf("outcome %q, %v", outcome, open)
	}
	if got := source(w.decide("5")); !strings.HasPrefix(got, "3:") {
		t.Errorf("after a first token: source %s, want worker 3", got)
	}
	if _, open := w.c.pulls.end(w.now, "1", pullServed); open {
		t.Error("the pull ends twice")
	}
}

// A source is not named again to a worker that it failed, nor to any worker while a pull is late.
func TestSourcesThatFail(t *testing.T) {
	t.Parallel()
	const late = 10 * time.Minute
	for name, c := range map[string]struct {
		after   time.Duration
		by      pullEnd
		outcome PullOutcome
		named   bool // again
	}{
		"in time":               {time.Second, pullFirstToken, PullInTime, true},
		"late":                  {late, pullFirstToken, PullLate, false},
		"served without token":  {time.Second, pullServed, PullInTime, true},
		"a long response":       {late, pullServed, PullUnknown, true},
		"failed":                {time.Second, pullError, PullFailed, false},
		"the client left":       {time.Second, pullLeft, PullUnknown, true},
		"the client waits long": {late, pullLeft, PullLate, false},
		"another worker served": {late, pullMoved, PullUnknown, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newPullWorld(t)
			w.host[1] = 0
			w.decide("a")
			if w.now = w.now.Add(c.after); c.after == late {
				if got := source(w.decide("")); got != "none" {
					t.Errorf("during a late pull: source %s", got)
				}
			}
			if outcome, _ := w.c.pulls.end(w.now, "a", c.by); outcome != c.outcome {
				t.Errorf("outcome %q, want %q", outcome, c.outcome)
			}
			if got := source(w.decide("")); (got != "none") != c.named {
				t.Errorf("source %s, want one: %v", got, c.named)
			}
			w.req.Pinned = &Worker{ID: 2} // another pair
			if got := source(w.decide("")); got == "none" {
				t.Error("no source for another worker")
			}
			w.req.Pinned = &Worker{ID: 1}
			w.now = w.now.Add(pullPause)
			if got := source(w.decide("")); got == "none" {
				t.Error("no source after the pause")
			}
		})
	}
}

// No further choice of a decision is its source.
func TestTheSourceOfADecisionIsNoSecondChoice(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		allowed []Worker
		source  string
		second  uint64 // worker
	}{
		"a third worker is there": {nil, "3: 400 tokens at 10.0.0.3:5710, 500 of 800 ms", 2},
		"two workers only":        {[]Worker{{ID: 1}, {ID: 3}}, "none", 3},
	} {
		w := newPullWorld(t)
		w.held, w.req.Pinned, w.req.WantSecond, w.req.Allowed = 1, nil, true, c.allowed
		w.infos[2].Taints = []string{"busy"}
		w.set()
		d := w.decide("")
		if d.Worker.ID != 1 {
			t.Fatalf("%s: worker %d, want 1", name, d.Worker.ID)
		}
		if c.source != "none" {
			c.source = strings.ReplaceAll(c.source, "400 tokens at 10.0.0.3:5710, 500 of 800", "392 tokens at 10.0.0.3:5710, 492 of 784")
		}
		if got := source(d); got != c.source || d.Second.Worker.ID != c.second || d.Third.Address.IsValid() {
			t.Errorf("%s: source %s, then %+v and %+v; want %s, then worker %d", name, got, d.Second.Worker, d.Third.Worker, c.source, c.second)
		}
	}
}

// The source is no other choice of the request. If there is no other one, no source is named.
func TestTheSourceIsNoSecondChoice(t *testing.T) {
	t.Parallel()
	a, b := Second{Worker: Worker{ID: 2}, Address: netip.MustParseAddrPort("10.0.0.2:1")}, Second{Worker: Worker{ID: 3}, Address: netip.MustParseAddrPort("10.0.0.3:1")}
	for name, c := range map[string]struct {
		second, third Second
		dropped       bool
		after         [2]Second
	}{
		"none":   {Second{}, Second{}, true, [2]Second{}},
		"only":   {a, Second{}, false, [2]Second{}},
		"second": {a, b, true, [2]Second{b}},
		"third":  {b, a, true, [2]Second{b}},
		"other":  {b, Second{}, true, [2]Second{b}},
	} {
		second, third, ok := without(a.Worker, c.second, c.third)
		if ok != c.dropped || ok && [2]Second{second, third} != c.after {
			t.Errorf("%s: %v, then %+v and %+v", name, ok, second, third)
		}
	}
}

// pullRouter is a router with the workers of a pullWorld. Worker 3 has half of a prompt of 800 tokens in host memory, and
// worker 1 is pinned. ask decides for the prompt.
func pullRouter(t *testing.T, on bool) (r *Router, ask func(id string) Decision) {
	t.Helper()
	from := newPullWorld(t)
	from.conf.Pull.On = on
	r, err := New(Config{PredictTTL: -1, Pull: from.conf.Pull})
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range from.infos[1:] {
		if err := r.SetWorker(info); err != nil {
			t.Fatal(err)
		}
	}
	tokens := make([]uint32, 800)
	ev := indexer.Event{Kind: indexer.Stored, Tier: indexer.HostPinned}
	for i, local := range indexer.AppendLocalHashes(nil, tokens[:400], 8, indexer.Seed("", "")) {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: uint64(i + 1), Local: local})
	}
	r.ApplyEvent(Worker{ID: 3}, ev)
	return r, func(id string) Decision {
		t.Helper()
		d, err := r.BestWorker(t.Context(), Request{ID: id, Owned: true, Model: "m", Tokens: tokens, Pinned: &Worker{ID: 1}, MayPull: true})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

// A pull ends with the first token of its request, with a response of status 500 or above of the chosen worker, if
// another worker serves the request, and with the request.
func TestWhatEndsAPull(t *testing.T) {
	t.Parallel()
	chosen, other := netip.MustParseAddrPort("10.0.0.1:8000"), netip.MustParseAddrPort("10.0.0.2:8000")
	for name, c := range map[string]struct {
		do      func(r *Router)
		outcome PullOutcome // empty: the pull goes on
		named   bool        // the source is named again
	}{
		"the first token":            {func(r *Router) { r.FirstToken("a", SignObserver) }, PullInTime, true},
		"a response without a fault": {func(r *Router) { r.Served("a", Response{Address: chosen, Status: 200}) }, "", true},
		"status 499":                 {func(r *Router) { r.Served("a", Response{Address: chosen, Status: 499}) }, "", true},
		"status 500":                 {func(r *Router) { r.Served("a", Response{Address: chosen, Status: 500}) }, PullFailed, false},
		"status 503":                 {func(r *Router) { r.Served("a", Response{Address: chosen, Status: 503}) }, PullFailed, false},
		"status 503 of Envoy":        {func(r *Router) { r.Served("a", Response{Address: chosen, Status: 503, Local: true}) }, "", true},
		"another worker":             {func(r *Router) { r.Served("a", Response{Address: other, Status: 200}) }, PullUnknown, true},
		"another worker, status 503": {func(r *Router) { r.Served("a", Response{Address: other, Status: 503}) }, PullUnknown, true},
		"the end of the request":     {func(r *Router) { r.Free("a") }, PullInTime, true},
		"status 500, then a token": {func(r *Router) {
			r.Served("a", Response{Address: chosen, Status: 500})
			r.FirstToken("a", SignObserver)
		}, PullFailed, false},
		"a first token, then the end": {func(r *Router) { r.FirstToken("a", SignObserver); r.Free("a") }, PullInTime, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, ask := pullRouter(t, true)
			if d := ask("a"); d.Source == nil || d.Source.Worker.ID != 3 {
				t.Fatalf("source %+v, want worker 3", d.Source)
			}
			c.do(r)
			open := 0
			p := r.poolOf(1)
			p.read(func(c *core) { open = len(c.pulls.open) })
			kept, _ := r.Decision("a")
			if want := map[bool]int{true: 1}[c.outcome == ""]; kept.Source.Outcome != c.outcome || open != want {
				t.Errorf("outcome %q, %d open pulls; want %q, %d", kept.Source.Outcome, open, c.outcome, want)
			}
			if d := ask(""); (d.Source != nil) != c.named {
				t.Errorf("source %+v afterwards, want one: %v", d.Source, c.named)
			}
		})
	}
}

// The audit does not compare a response with its decision if the request named a source: the worker has more cached than
// its events promise, and such responses would teach a rule.
func TestPullsAreNotAudited(t *testing.T) {
	t.Parallel()
	for _, named := range []bool{false, true} {
		r, ask := pullRouter(t, named)
		for i := range 40 {
			id := fmt.Sprint(i)
			d := ask(id)
			if (d.Source != nil) != named {
				t.Fatalf("source %+v, want one: %v", d.Source, named)
			}
			r.ReportUsage(id, Usage{PromptTokens: 800, CachedTokens: 400, Cached: true})
			r.Free(id)
		}
		for _, w := range r.Workers() {
			if w.ID == 1 && (w.Audit == nil) != named {
				t.Errorf("named %v: audit %+v of worker 1", named, w.Audit)
			}
		}
	}
}

// A response with fewer cached tokens than half of the copied part says that the copy failed: the source is not named
// to the worker again.
func TestFewerCachedTokensThanCopied(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		usage  Usage
		served Response
		missed bool
	}{
		"all of them":               {Usage{PromptTokens: 800, CachedTokens: 400, Cached: true}, Response{}, false},
		"half of them":              {Usage{PromptTokens: 800, CachedTokens: 200, Cached: true}, Response{}, false},
		"fewer":                     {Usage{PromptTokens: 800, CachedTokens: 199, Cached: true}, Response{}, true},
		"none":                      {Usage{PromptTokens: 800, Cached: true}, Response{}, true},
		"not reported":              {Usage{PromptTokens: 800}, Response{}, false},
		"of another worker":         {Usage{PromptTokens: 800, Cached: true}, Response{Address: netip.MustParseAddrPort("10.0.0.2:8000"), Status: 200}, false},
		"of the worker, by address": {Usage{PromptTokens: 800, Cached: true}, Response{Address: netip.MustParseAddrPort("10.0.0.1:8000"), Status: 200}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, ask := pullRouter(t, true)
			if d := ask("a"); d.Source == nil || d.Source.Tokens != 400 {
				t.Fatalf("source %+v, want 400 tokens", d.Source)
			}
			if c.served.Address.IsValid() {
				r.Served("a", c.served)
			}
			r.ReportUsage("a", c.usage)
			kept, _ := r.Decision("a")
			if missed := kept.Source.Outcome == PullMissed; missed != c.missed {
				t.Errorf("outcome %q, want missed: %v", kept.Source.Outcome, c.missed)
			}
			if d := ask(""); (d.Source == nil) != c.missed {
				t.Errorf("source %+v afterwards, want one: %v", d.Source, !c.missed)
			}
		})
	}
}
