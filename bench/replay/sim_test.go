// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// small is a workload that keeps eight workers busy for a minute or two.
func small(t testing.TB) *Trace {
	t.Helper()
	trace, err := Generate(GenerateConfig{Requests: 600, Rate: 12, Prefixes: 30, PrefixTokens: 8000, QuestionTokens: 1500, OutputTokens: 100, Turns: 3, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

func rule(t testing.TB, name string) Rule {
	t.Helper()
	r, err := ParseRule(name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func play(t testing.TB, c Scenario) *Result {
	t.Helper()
	r, err := Run(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func encode(t testing.TB, r *Result) string {
	t.Helper()
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestSameSeedSameBytes(t *testing.T) {
	trace := small(t)
	for _, r := range named() {
		c := Scenario{Trace: trace, Rule: r, KVBlocks: 300, Seed: 3}
		if a, b := encode(t, play(t, c)), encode(t, play(t, c)); a != b {
			t.Errorf("%s: two runs of one seed differ:\n%s\n%s", r.Name, a, b)
		}
	}
}

// decisions plays a scenario and returns all that its routers decided, in order, but
// for what it took them on the real clock.
func decisions(t testing.TB, c Scenario) []string {
	t.Helper()
	var all []string
	c.decided = func(req int32, d router.Decision) {
		d.TokenizeTime, d.MatchTime, d.PickTime = 0, 0, 0
		text, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, fmt.Sprintf("%d: %s", req, text))
	}
	play(t, c)
	return all
}

// One seed gives the same decisions, bit for bit: workers, overlaps, costs and all.
func TestSameSeedSameDecisions(t *testing.T) {
	trace := small(t)
	for _, c := range []Scenario{
		{Rule: rule(t, Default)},
		{Rule: rule(t, "dynamo")},
		{Rule: rule(t, "random")},
		{Rule: rule(t, "tokens:router_temperature=.5")},
		{Rule: rule(t, Default), Replicas: 4, SyncDelay: 10 * time.Millisecond, EventLoss: .1, EventDelay: time.Second, Predict: 10 * time.Second},
		{Rule: rule(t, Default), PrefillWorkers: 5, Jitter: time.Second},
		{Rule: rule(t, Default), Groups: 4, Predict: 10 * time.Second, Jitter: time.Millisecond},
		{Rule: rule(t, Default), Groups: 2, Approximate: true, Changes: []Change{{20 * time.Second, 1, Leave}}},
	} {
		c.Trace, c.KVBlocks, c.Seed = trace, 300, 7
		a, b := decisions(t, c), decisions(t, c)
		if len(a) < len(trace.Requests) || !slices.Equal(a, b) {
			t.Errorf("%s: %d and %d decisions, which differ", c.Rule.Name, len(a), len(b))
		}
		c.Seed = 8
		if slices.Equal(a, decisions(t, c)) {
			t.Errorf("%s: another seed decides the same", c.Rule.Name)
		}
	}
}

func TestSeedDrawsTies(t *testing.T) {
	c := Scenario{Trace: small(t), Rule: rule(t, "random"), Seed: 1}
	a := play(t, c)
	c.Seed = 2
	if b := play(t, c); a.TTFT == b.TTFT {
		t.Errorf("seeds 1 and 2 give the same times: %+v", a.TTFT)
	}
}

// Every rule must get what it looks at: none may behave like blind luck, and each
// differs from each other one.
func TestRulesDiffer(t *testing.T) {
	trace := small(t)
	seen := map[string]string{}
	for _, r := range named() {
		res := play(t, Scenario{Trace: trace, Rule: r, KVBlocks: 300, Seed: 1})
		key := fmt.Sprint(res.TTFT, res.HitRate)
		if other := seen[key]; other != "" && !alike(other, r.Name) {
			t.Errorf("%s and %s decide the same", other, r.Name)
		}
		seen[key] = r.Name
	}
}

// alike are the rules that differ only where this trace has nothing to show.
func alike(a, b string) bool {
	pairs := "dynamo dynamo_newer"
	return strings.Contains(pairs, a+" "+b) || strings.Contains(pairs, b+" "+a)
}

// digest is what a change of the router's arithmetic must change.
func digest(t testing.TB) string {
	trace := small(t)
	var all []string
	for _, name := range []string{"tokens", "dynamo", "lmetric"} {
		all = append(all, encode(t, play(t, Scenario{Trace: trace, Rule: rule(t, name), KVBlocks: 300, Seed: 1})))
	}
	all = append(all, encode(t, play(t, Scenario{Trace: trace, Rule: rule(t, "predicted_ttft"), KVBlocks: 300, Seed: 1, PrefillWorkers: 4})))
	return strings.Join(all, "\n")
}

func TestDigest(t *testing.T) {
	if name := os.Getenv("KVROUTE_REPLAY_DIGEST"); name != "" {
		if err := os.WriteFile(name, []byte(digest(t)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// The simulation decides by package scorer, by the published rules, and on prefill and decode workers
// by package router: a change of one of them changes its results.
func TestMutatedScorerChangesTheResult(t *testing.T) {
	if testing.Short() {
		return
	}
	want := strings.Split(digest(t), "\n")
	for i, m := range []struct{ file, from, to string }{
		{"scorer/policy.go", "return pend + own*", "return .5*pend + own*"},
		{"scorer/policy.go", "return s.OverlapWeight*max(0, prefill)/r.block() + decode", "return s.OverlapWeight*max(0, prefill)/r.block() + 2*decode"},
		{"bench/replay/published.go", "return float64(in.PendTokens+uncached(r, in)) * float64(in.ActiveRequests+1)", "return float64(in.PendTokens+uncached(r, in)) * float64(in.ActiveRequests+2)"},
		{"router/split.go", "d.AssumeKVReuse, d.TrackPrefill = false, false", "d.AssumeKVReuse, d.TrackPrefill = true, false"},
	} {
		dir := t.TempDir()
		name, err := filepath.Abs(filepath.Join("../..", m.file))
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(text), m.from); n != 1 {
			t.Fatalf("%s has %q %d times, want once: write the mutation anew", m.file, m.from, n)
		}
		mutant, overlay, out := filepath.Join(dir, filepath.Base(m.file)), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "digest")
		for file, data := range map[string]string{
			mutant:  strings.Replace(string(text), m.from, m.to, 1),
			overlay: fmt.Sprintf(`{"Replace":{%q:%q}}`, name, mutant),
		} {
			if err := os.WriteFile(file, []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.CommandContext(t.Context(), "go", "test", "-overlay", overlay, "-count=1", "-run", "^TestDigest$", ".")
		cmd.Env = append(os.Environ(), "KVROUTE_REPLAY_DIGEST="+out)
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		data, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		for j, line := range strings.Split(string(data), "\n") {
			if (line == want[j]) != (i != j) {
				t.Errorf("%s: %q: result %d changed: %v", m.file, m.to, j, line != want[j])
			}
		}
	}
}

// Engine steps take the time of the published model.
func TestEngineSteps(t *testing.T) {
	block := func(input, output int) *Trace {
		return &Trace{BlockSize: MooncakeBlock, Requests: []Request{{Input: input, Output: output}}}
	}
	ms := func(s float64) float64 { return math.Round(s*1e6) / 1e3 }
	r := play(t, Scenario{Trace: block(12_000, 1), Rule: rule(t, "tokens"), Workers: 1})
	if got, want := ms(r.TTFT.Mean), 400.393+242.567; math.Abs(got-want) > .002 {
		t.Errorf("a prompt of 12,000 tokens takes %v ms, want %v", got, want)
	}
	many := &Trace{BlockSize: MooncakeBlock}
	for range 8 {
		many.Requests = append(many.Requests, Request{Input: 9_999, Output: 2})
	}
	e := &engine{model: scorer.Dense32B(), speed: 1, block: 512, cache: newCache(1<<20, 0), reqs: many.Requests, states: make([]state, len(many.Requests))}
	for i := range many.Requests {
		e.decodes.push(entry[int32]{1, int64(i), int32(i)})
		e.held += 10_000
	}
	e.plan(&sim{})
	if got := float64(e.end) / 1e6; math.Abs(got-15.48) > 1e-6 {
		t.Errorf("a step of 8 decodes with 80,000 tokens takes %v ms, want 15.48", got)
	}
	for _, c := range []struct {
		model scorer.Engine
		want  float64
	}{{scorer.Dense32B(), 400.393}, {scorer.Dense8B(), 172.7}, {scorer.Dense70B(), 582.5}} {
		r := play(t, Scenario{Trace: block(8192, 1), Rule: rule(t, "tokens"), Workers: 1, Engine: c.model})
		if got := ms(r.TTFT.Mean); math.Abs(got-c.want) > .05 {
			t.Errorf("8,192 tokens take %v ms, want %v", got, c.want)
		}
	}
}

// The wait ends where the computing begins: the second of two prompts waits for the
// step that the first one is in.
func TestWaitIsThePartBeforeThePrompt(t *testing.T) {
	trace := &Trace{BlockSize: MooncakeBlock, Requests: []Request{{Input: 8192, Output: 1}, {At: 100 * time.Millisecond, Input: 8192, Output: 1}}}
	r := play(t, Scenario{Trace: trace, Rule: rule(t, "tokens"), Workers: 1})
	if want := .300393 / 2; math.Abs(r.Wait.Mean-want) > 1e-5 || math.Abs(r.TTFT.Mean-r.Wait.Mean-.400393) > 1e-5 {
		t.Errorf("mean wait %v s of a mean TTFT of %v, want %v and .400393 of computing", r.Wait.Mean, r.TTFT.Mean, want)
	}
}

// stepwise is the engine without runs of steps: each step is an event.
func stepwise(c Scenario) Scenario {
	c.everyStep = true
	return c
}

func TestRunsOfStepsEqualSingleSteps(t *testing.T) {
	trace := small(t)
	for _, kv := range []int{60, 300, 5000} {
		for _, name := range []string{"tokens", "round-robin", "oracle"} {
			c := Scenario{Trace: trace, Rule: rule(t, name), KVBlocks: kv, Seed: 1, SharedAttention: kv == 300}
			a, b := play(t, c), play(t, stepwise(c))
			// Rounding to ns may differ by one a step.
			for _, v := range [][2]float64{{a.TTFT.Mean, b.TTFT.Mean}, {a.E2E.Mean, b.E2E.Mean}, {a.HitRate, b.HitRate}} {
				if math.Abs(v[0]-v[1]) > .002*v[1] {
					t.Errorf("%s, %d blocks: %v with runs, %v step by step", name, kv, v[0], v[1])
				}
			}
		}
	}
}

func TestScenarios(t *testing.T) {
	trace := small(t)
	base := Scenario{Trace: trace, Rule: rule(t, "tokens"), KVBlocks: 300, Seed: 1}
	plain := play(t, base)
	for name, change := range map[string]func(c *Scenario){
		"slow workers":   func(c *Scenario) { c.Speeds = []float64{.5, .5} },
		"twice the load": func(c *Scenario) { c.Speedup = 2 },
		"few workers":    func(c *Scenario) { c.Workers = 4 },
		"small caches":   func(c *Scenario) { c.KVBlocks = 60 },
		"shared reading": func(c *Scenario) { c.SharedAttention = true },
		"8B":             func(c *Scenario) { c.Engine = scorer.Dense8B() },
		"late events":    func(c *Scenario) { c.EventDelay = 5 * time.Second },
		"predictions":    func(c *Scenario) { c.Predict = 10 * time.Second },
		"lost events":    func(c *Scenario) { c.EventLoss = .2 },
		"replicas alone": func(c *Scenario) { c.Replicas, c.SyncDelay = 4, -1 },
		"replicas":       func(c *Scenario) { c.Replicas, c.SyncDelay = 4, 100*time.Millisecond },
		"no events":      func(c *Scenario) { c.Approximate = true },
		"replicas guess": func(c *Scenario) { c.Approximate, c.Replicas, c.SyncDelay = true, 4, 10*time.Millisecond },
		"a split":        func(c *Scenario) { c.PrefillWorkers = 5 },
		"8B transfers":   func(c *Scenario) { c.PrefillWorkers, c.Engine, c.KVBytesPerToken = 5, scorer.Dense8B(), 131_072 },
		"a loose split":  func(c *Scenario) { c.PrefillWorkers, c.ConditionalDisaggregation = 5, "isl_bounding" },
		"split replicas": func(c *Scenario) { c.PrefillWorkers, c.Replicas, c.SyncDelay = 5, 3, 10*time.Millisecond },
		"a cold split":   func(c *Scenario) { c.PrefillWorkers, c.ColdStart = 5, 20*time.Second },
		"guessed split":  func(c *Scenario) { c.PrefillWorkers, c.Approximate = 5, true },
		"slow transfer":  func(c *Scenario) { c.PrefillWorkers, c.TransferRate = 5, 3 },
		"jitter":         func(c *Scenario) { c.Jitter = 50 * time.Millisecond },
		"lost messages":  func(c *Scenario) { c.Replicas, c.SyncLost, c.SyncLostFor = 4, 10*time.Second, 20*time.Second },
		"groups":         func(c *Scenario) { c.Groups, c.SummaryAge = 4, time.Second },
		"empty group":    func(c *Scenario) { c.Groups, c.Changes = 8, []Change{{20 * time.Second, 1, Leave}} },
		"late restart":   func(c *Scenario) { c.EventDelay, c.Changes = 5*time.Second, []Change{{20 * time.Second, 1, Restart}} },
		"two groups":     func(c *Scenario) { c.Groups = 2 },
		"groups guess":   func(c *Scenario) { c.Groups, c.Approximate = 2, true },
		"coarse groups":  func(c *Scenario) { c.Groups, c.Stride = 4, 8 },
		"cold routers":   func(c *Scenario) { c.ColdStart = 20 * time.Second },
		"leave":          func(c *Scenario) { c.Changes = []Change{{20 * time.Second, 1, Leave}, {30 * time.Second, 1, Join}} },
		"restart":        func(c *Scenario) { c.Changes = []Change{{20 * time.Second, 1, Restart}} },
		"join":           func(c *Scenario) { c.Changes = []Change{{20 * time.Second, 7, Join}} },
	} {
		c := base
		change(&c)
		a, b := play(t, c), play(t, c)
		if encode(t, a) != encode(t, b) {
			t.Errorf("%s: two runs differ", name)
		}
		if a.TTFT == plain.TTFT {
			t.Errorf("%s: changes nothing", name)
		}
	}
}

// Reported load counts like observed load, and predicted blocks like cached ones.
func TestReplicasThatShareAllAtOnceAreOne(t *testing.T) {
	for _, approximate := range []bool{false, true} {
		c := Scenario{Trace: small(t), Rule: rule(t, "tokens"), Speedup: 2, KVBlocks: 300, Seed: 1, Approximate: approximate}
		one := play(t, c)
		c.Replicas = 4
		four := play(t, c)
		c.SyncDelay = -1
		alone := play(t, c)
		if math.Abs(four.TTFT.Mean-one.TTFT.Mean) > .1*one.TTFT.Mean || alone.TTFT.Mean < one.TTFT.Mean*1.1 {
			t.Errorf("approximate %v: mean TTFT of one replica %v, of four that share %v, that do not %v", approximate, one.TTFT.Mean, four.TTFT.Mean, alone.TTFT.Mean)
		}
	}
}

// The upper tier knows what its groups have cached from their summaries alone: what it
// expects a group to have is what that group's router finds on its best worker, but for
// what the filter finds wrongly, what came since the last summary, and what went. Without
// summaries it knows nothing.
func TestSummariesSayWhatGroupsHave(t *testing.T) {
	share := func(c Scenario) (expected float64) {
		c.Trace, c.Rule, c.KVBlocks, c.Groups, c.Seed = small(t), rule(t, "tokens"), 300, 4, 1
		var upper, lower float64
		c.decided = func(_ int32, d router.Decision) {
			if d.Group == "" {
				lower += float64(d.OverlapBlocks)
				return
			}
			upper += float64(d.OverlapBlocks)
		}
		play(t, c)
		t.Logf("%v, stride %d: %.0f blocks expected, %.0f found", c.SummaryAge, c.Stride, upper, lower)
		return upper / lower
	}
	for name, c := range map[string]struct {
		scenario  Scenario
		low, high float64
	}{
		"each quarter of a second": {Scenario{SummaryAge: 250 * time.Millisecond}, .95, 1.05},
		"each second":              {Scenario{SummaryAge: time.Second}, .9, 1.1},
		"each fourth block":        {Scenario{SummaryAge: time.Second, Stride: 4}, .8, .97},
		"nothing that fits":        {Scenario{SummaryAge: time.Second, Stride: 1 << 10}, 0, 0},
	} {
		if got := share(c.scenario); got < c.low || got > c.high {
			t.Errorf("%s: the upper tier expects %.3f of what there is, want %v to %v", name, got, c.low, c.high)
		}
	}
}

// A group whose workers have all gone takes no requests, though its summary says so late,
// and takes them again when one is back.
func TestEmptyGroupsTakeNothing(t *testing.T) {
	const gone, back = 21 * time.Second, 27 * time.Second // between two summaries
	// Caches are so small that nobody is passed by because others have all prompts.
	c := Scenario{Trace: small(t), Rule: rule(t, "tokens"), KVBlocks: 60, Seed: 1, Groups: 4, SummaryAge: 5 * time.Second}
	c.Changes = []Change{{gone, 0, Leave}, {gone, 1, Leave}, {back, 0, Join}}
	var before, between, after int
	c.decided = func(_ int32, d router.Decision) {
		if d.Worker.ID != c.Seed<<20+1 && d.Worker.ID != c.Seed<<20+2 {
			return
		}
		switch at := time.Duration(d.Time.UnixNano()); {
		case at < gone:
			before++
		case at < back:
			between++
		default:
			after++
		}
	}
	play(t, c)
	if before == 0 || between > 0 || after == 0 {
		t.Errorf("%d requests, none of which should be while nobody was there: %d; then %d", before, between, after)
	}
}

// Replicas that lose all messages are replicas without any.
func TestLostSyncIsNoSync(t *testing.T) {
	c := Scenario{Trace: small(t), Rule: rule(t, "tokens"), Speedup: 2, KVBlocks: 300, Seed: 1, Replicas: 4, SyncDelay: -1}
	alone := encode(t, play(t, c))
	c.SyncDelay, c.SyncLostFor = 10*time.Millisecond, time.Hour
	if lost := encode(t, play(t, c)); lost != alone {
		t.Errorf("with all messages lost\n%s\nwithout any\n%s", lost, alone)
	}
}

func TestConversationsTooLongAreLeftOut(t *testing.T) {
	line := func(in int) string {
		return fmt.Sprintf(`{"block_size":64,"requests":[{"in":64,"out":1,"h":[[1,1]]},{"in":%d,"out":1,"p":0,"h":[[2,%d]]}]}`+"\n", in, in/64)
	}
	c, err := readConversations("two", strings.NewReader(line(200_000)+line(200_064)))
	if err != nil {
		t.Fatal(err)
	}
	trace, err := c.Deal(DealConfig{Users: 1, Requests: 100, Seed: 1})
	if err != nil || len(trace.Requests) != 2 || trace.Requests[1].Input != 200_000 {
		t.Errorf("%v: %+v, want the two requests of the first conversation", err, trace)
	}
	c.list = c.list[1:]
	if _, err := c.Deal(DealConfig{Users: 1, Requests: 100, Seed: 1}); err == nil {
		t.Error("a trace of no requests")
	}
}

func TestClosedLoop(t *testing.T) {
	var text strings.Builder
	for conv := range 12 {
		var l sessionLine
		l.BlockSize = 64
		have := 0
		for i := range 20 {
			if i == 10 {
				l.Requests = append(l.Requests, sessionLine{Requests: []sessionLine{{In: 6400, Out: 9, Runs: [][2]int{{5000, 100}}}}})
				continue
			}
			blocks := 40 + 20*i
			l.Requests = append(l.Requests, sessionLine{In: blocks*64 + 7, Out: 50, Think: float64(i % 5), Keep: have, Runs: [][2]int{{1000 * conv, 0}, {have + 1, blocks - have}}})
			have = blocks
		}
		b, err := json.Marshal(&l)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(append(b, '\n'))
	}
	c, err := readConversations("small", strings.NewReader(text.String()))
	if err != nil {
		t.Fatal(err)
	}
	trace, err := c.Deal(DealConfig{Users: 5, Requests: 1000, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	if len(trace.Requests) != 12*20 {
		t.Errorf("%d requests, want %d", len(trace.Requests), 12*20)
	}
	good := play(t, Scenario{Trace: trace, Rule: rule(t, "tokens"), Workers: 4, KVBlocks: 300})
	bad := play(t, Scenario{Trace: trace, Rule: rule(t, "round-robin"), Workers: 4, KVBlocks: 300})
	if good.HitRate < .8 || good.HitRate < bad.HitRate+.1 {
		t.Errorf("hit rates: tokens %v, round robin %v", good.HitRate, bad.HitRate)
	}
}

func TestMooncakeRoundTrip(t *testing.T) {
	trace := small(t)
	var b bytes.Buffer
	if err := trace.WriteMooncake(&b); err != nil {
		t.Fatal(err)
	}
	back, err := readMooncake("back", bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	for i := range trace.Requests {
		a, b := &trace.Requests[i], &back.Requests[i]
		if a.Input != b.Input || a.Output != b.Output || a.Session != b.Session || len(b.Blocks) != (a.Input+511)/512 || (b.At-a.At).Abs() > time.Second {
			t.Fatalf("request %d is %+v, was %+v", i, *b, *a)
		}
	}
	if a, b := trace.HitRate(1, 0), back.HitRate(1, 0); a.Hit != b.Hit {
		t.Errorf("%d blocks hit, were %d", b.Hit, a.Hit)
	}
	// A record of the format does not change when it is read and written: the same bytes, and, where each
	// request has a millisecond of its own, the same simulation.
	for i := range back.Requests {
		back.Requests[i].At = time.Duration(i) * 83 * time.Millisecond
	}
	texts := make([]string, 2)
	results := make([]string, 2)
	for i, last := range []*Trace{back, nil} {
		if last == nil {
			if last, err = readMooncake("back", strings.NewReader(texts[i-1])); err != nil {
				t.Fatal(err)
			}
		}
		var b strings.Builder
		if err := last.WriteMooncake(&b); err != nil {
			t.Fatal(err)
		}
		texts[i] = b.String()
		results[i] = encode(t, play(t, Scenario{Trace: last, Rule: rule(t, Default), KVBlocks: 300, Seed: 1}))
	}
	if texts[0] != texts[1] || results[0] != results[1] {
		t.Errorf("read and written again: the text is the same: %v; results\n%s\n%s", texts[0] == texts[1], results[0], results[1])
	}
}

func TestBadTraces(t *testing.T) {
	for text, want := range map[string]string{
		"":    "no requests",
		"{}":  "line 1: input_length is 0",
		"\n{": "line 2: unexpected end",
		`{"timestamp":-1,"input_length":1,"hash_ids":[1]}`:                  "timestamp is -1",
		`{"input_length":513,"output_length":1,"hash_ids":[1]}`:             "1 hash_ids for an input_length of 513, want 2",
		`{"input_length":1,"output_length":-5,"hash_ids":[1]}`:              "output_length is -5",
		`{"input_length":1,"output_length":1,"hash_ids":["a"]}`:             "line 1",
		`{"input_length":1099511627776,"output_length":1,"hash_ids":["a"]}`: "line 1",
	} {
		if _, err := readMooncake("x", strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                   "no requests",
		`{"block_size":0}`:   "block_size is 0",
		`{"block_size":100}`: "block_size is 100",
		`{"block_size":64,"requests":[{"in":64,"out":1,"p":1,"h":[]}]}`:                           "keeps 1 blocks of 0",
		`{"block_size":64,"requests":[{"in":64,"out":1,"p":0,"h":[[1,2]]}]}`:                      "has 2 blocks for 64 tokens",
		`{"block_size":64,"requests":[{"in":64,"out":1,"p":0,"h":[[-1,2]]}]}`:                     "has the blocks",
		`{"block_size":64,"requests":[{"type":"subagent","requests":[{"requests":[{"in":1}]}]}]}`: "nested agent",
	} {
		if _, err := readConversations("x", strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestBadScenarios(t *testing.T) {
	trace := small(t)
	for want, c := range map[string]Scenario{
		"no trace":               {},
		"speedup is -1":          {Trace: trace, Speedup: -1},
		`workers is "9999"`:      {Trace: trace, Workers: 9999},
		`kv-blocks is "-1"`:      {Trace: trace, KVBlocks: -1},
		"2 speeds for 1":         {Trace: trace, Workers: 1, Speeds: []float64{1, 1}},
		"speeds are [0]":         {Trace: trace, Speeds: []float64{0}},
		"groups of":              {Trace: trace, Groups: 9},
		`jitter is "-1ns"`:       {Trace: trace, Jitter: -1},
		"sync lost at -1ns":      {Trace: trace, SyncLost: -1},
		`replicas is "-1"`:       {Trace: trace, Replicas: -1},
		"want one of them 1":     {Trace: trace, Groups: 2, Replicas: 2},
		`summary-stride is "-1"`: {Trace: trace, Stride: -1},
		"not without events":     {Trace: trace, Rule: Rule{Oracle: true}, Approximate: true},
		"event-loss is":          {Trace: trace, EventLoss: 2},
		`event-delay is "-1ns"`:  {Trace: trace, EventDelay: -1},
		"change":                 {Trace: trace, Changes: []Change{{Worker: 8, Kind: Leave}}},
	} {
		if _, err := Run(context.Background(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for _, text := range []string{"", "nobody", "tokens:beta=1", "tokens:alpha=x", "tokens:alpha=-1", "random:alpha=1", "random:ties=draw", "tokens:inputs=engine", "tokens:cost=dynamo", "tokens:engine=1"} {
		if _, err := ParseRule(text); err == nil {
			t.Errorf("rule %q is taken", text)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Run(ctx, Scenario{Trace: trace, Rule: rule(t, "tokens")}); err == nil {
		t.Error("a simulation goes on after its context has ended")
	}
}
