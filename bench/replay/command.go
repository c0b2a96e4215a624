// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/scorer"
)

const help = `usage: kvroute replay [flags]

Plays a workload against simulated engines on a virtual clock and has the router of
this binary choose among them, for each --rule, load and seed. Without a trace the
workload is made up.

A trace is in the Mooncake format (JSON lines: timestamp in ms, input_length,
output_length, hash_ids of blocks of 512 tokens; requests of one tick are spread
up to the next), or, with --users, recorded conversations that so many users work
through in a closed loop. Files that end with .gz are unpacked. --lanes makes up
sessions of coding agents with sub-agents, in a closed loop as the benchmark AgentX
plays them; requests that fill the caches first are not measured.

The result is a table of times in seconds from when a request was due: TTFT to the
first token, TPOT between two tokens, E2E to the end. goodput counts requests with
TTFT ≤ 2 s and TPOT ≤ 50 ms; hits are cached tokens of prompts, "of LRU" their
share of what one cache of the summed size would hit; imbalance is the most prompt
tokens that a worker computed over the mean, busiest the most running requests on a
worker over the mean, both averaged over time; misjudged is by how many cached tokens
decisions were wrong on average. The same flags give the same bytes, --timing apart.
With --prefill-workers the first token comes from the decode worker, after the
transfer; legs is the share of requests with a prefill leg.
With --router-queue-threshold requests wait in the router's queue as in production:
waited and refused count requests, queue is the time in it of all served requests,
and other times are of served requests only. Requests with a priority (--priority-share,
or fields priority and strict_priority of a trace) are compared with the others.

Rules: %s.
Settings follow a colon: tokens:alpha=.1,attention=6e-5 or dynamo:overlap_score_weight=4.

flags:
`

// Command is `kvroute replay`: what its flags say. Flags comes first, then Run.
type Command struct {
	Trace   string `yaml:"trace" help:"<file> with the workload; none: made up"`
	Users   int    `yaml:"users" want:"0 to 65536" help:"the trace has conversations, for this <number> of users in a closed loop"`
	Engine  string `yaml:"engine" default:"32b" want:"8b, 32b or 70b" help:"8b, 32b or 70b: preset of the engines, with one, two or four H100"`
	SyncOff bool   `yaml:"sync-off" help:"replicas never hear of each other's requests"`
	Seeds   int    `yaml:"seeds" default:"1" want:"1 to 1000" help:"<number> of seeds"`
	HitRate bool   `yaml:"hit-rate" help:"only print the block hits of caches without time: endless, one of the summed size, round robin"`
	JSON    string `yaml:"json" help:"<file> that gets the results as JSON, - = standard output instead of the table"`
	Save    string `yaml:"write-trace" help:"<file> that gets the workload in the Mooncake format"`

	generate GenerateConfig
	lanes    LaneConfig
	scenario Scenario
	rules    []string
	loads    []float64
}

// Flags adds the flags of the command to fs.
func (f *Command) Flags(fs *flag.FlagSet) {
	fs.Usage = func() {
		fmt.Fprintf(fs.Output(), help, strings.Join(ruleNames(), ", "))
		fs.PrintDefaults()
	}
	for _, part := range f.parts() {
		settings.SetDefaults(part)
	}
	s := &f.scenario
	s.Predict, s.Seed, s.StrictPriority = 10*time.Second, 1, 1
	for _, part := range f.parts() {
		settings.AddFlags(fs, part)
	}
	fs.Func("rule", "`name` of a way to choose; may be repeated, all stands for each without settings (default "+Default+" and dynamo)", func(v string) error {
		if v == "all" {
			f.rules = append(f.rules, ruleNames()...)
			return nil
		}
		_, err := ParseRule(v)
		f.rules = append(f.rules, v)
		return err
	})
	fs.Func("load", "`factors` by which a trace is played faster, comma-separated (default 1)", numbersFlag(&f.loads))
	fs.Func("speeds", "relative `speeds` of the first workers, comma-separated", numbersFlag(&s.Speeds))
	fs.Func("sync-lost", "when replicas stop to hear of each other, and for how long, as `time:duration`", func(v string) error {
		at, long, _ := strings.Cut(v, ":")
		var err, err2 error
		s.SyncLost, err = time.ParseDuration(at)
		s.SyncLostFor, err2 = time.ParseDuration(long)
		if err != nil || err2 != nil {
			return fmt.Errorf("%q is not time:duration, as in 200s:10s", v)
		}
		return nil
	})
	fs.Func("change", "a worker's fate as `time:join|leave|restart:number`, as in 60s:leave:3; may be repeated", func(v string) error {
		c, err := parseChange(v)
		s.Changes = append(s.Changes, c)
		return err
	})
}

// parts are the structs that have settings of the command.
func (f *Command) parts() []any { return []any{f, &f.generate, &f.lanes, &f.scenario} }

// Run plays the workload and prints the table of results.
func (f *Command) Run(ctx context.Context, fs *flag.FlagSet, out, _ io.Writer) error {
	engines := map[string]struct {
		model   scorer.Engine
		kvBytes int // of Llama-3.1-8B, Qwen3-32B and Llama-3.3-70B
	}{"8b": {scorer.Dense8B(), 131_072}, "32b": {scorer.Dense32B(), kvBytes32B}, "70b": {scorer.Dense70B(), 327_680}}
	engine := engines[f.Engine]
	f.scenario.Engine, f.scenario.KVBytesPerToken = engine.model, cmp.Or(f.scenario.KVBytesPerToken, engine.kvBytes)
	if err := errors.Join(f.check(), f.withoutEffect(fs)); err != nil {
		return err
	}
	if f.SyncOff {
		f.scenario.SyncDelay = -1
	}
	if len(f.rules) == 0 {
		f.rules = []string{Default, "dynamo"}
	}
	if len(f.loads) == 0 {
		f.loads = []float64{1}
	}
	if err := f.hybridBlocks(); err != nil {
		return err
	}
	traces, err := f.load()
	if err != nil {
		return err
	}
	if f.Save != "" {
		if err := saveFile(f.Save, traces[0].WriteMooncake); err != nil {
			return err
		}
	}
	if f.HitRate {
		f.printHits(out, traces[0])
		return nil
	}
	return f.play(ctx, out, traces)
}

// windowBlock is the number of tokens in a block of a made-up workload for a window: vLLM's default.
const windowBlock = 16

// hybridBlocks sets the block size of made-up workloads to that of vLLM: the size of states, or windowBlock. The caches
// stay as large.
func (f *Command) hybridBlocks() error {
	s := &f.scenario
	if s.Hybrid == "" {
		return nil
	}
	window, tokens, err := parseHybrid(s.Hybrid)
	if window {
		tokens = windowBlock
	}
	if err == nil && f.Trace == "" && f.lanes.Lanes == 0 {
		f.generate.BlockSize = tokens
		s.KVBlocks = max(1, s.KVBlocks*MooncakeBlock/tokens)
	}
	return err
}

// check refuses values out of range. In a [Scenario], 0 would become the default.
func (f *Command) check() error {
	for _, part := range f.parts() {
		if err := settings.Check(part); err != nil {
			return err
		}
	}
	switch {
	case f.Users > 0 && f.Trace == "":
		return errors.New("--users needs a --trace with conversations")
	case (f.Users > 0 || f.lanes.Lanes > 0) && len(f.loads) > 0:
		return errors.New("--load is for open loops; users or lanes set the load of a closed one")
	}
	return nil
}

// withoutEffect refuses flags that others keep from changing anything.
func (f *Command) withoutEffect(fs *flag.FlagSet) (err error) {
	s := &f.scenario
	for _, row := range []struct {
		when          bool
		beside, flags string
	}{
		{f.Trace != "", "a --trace", "rate prefixes prefix-tokens question-tokens output-tokens turns burst burst-apart burst-questions"},
		{f.Trace != "" && f.Users == 0, "a --trace that is played whole", "requests"},
		{f.Trace != "", "a --trace", "lanes"},
		{f.lanes.Lanes > 0, "--lanes, which make up sessions for a time", "requests rate prefixes prefix-tokens question-tokens output-tokens turns burst burst-apart burst-questions jitter hit-rate write-trace"},
		{f.generate.Burst == 1, "--burst 1", "burst-apart burst-questions"},
		{f.lanes.Lanes == 0, "--lanes 0", "lane-duration lane-context lane-sessions lane-products lane-cache-bust"},
		{f.Users > 0, "--users, who set the load themselves", "jitter"},
		{s.Replicas == 1, "one replica", "sync-delay sync-off sync-lost"},
		{f.SyncOff, "--sync-off", "sync-delay sync-lost"},
		{s.Groups == 1, "one group", "summary-age summary-stride"},
		{s.ForeignShare == 0, "no --foreign-share", "foreign-workers report-every"},
		{s.Approximate, "--no-kv-events", "event-delay event-loss predict"},
		{s.RouterQueueThreshold == nil, "a missing --router-queue-threshold", "router-queue-policy router-queue-limit queue-wait priority-share strict-priority priority"},
		{s.PriorityShare == 0, "no --priority-share", "strict-priority priority"},
		{s.PrefillWorkers == 0 && !s.Pull, "--prefill-workers 0 without --pull", "kv-bytes-per-token transfer-rate"},
		{!s.Pull, "a missing --pull", "pull-delay pull-min-tokens pull-limit pull-cost"},
		{s.PrefillWorkers == 0, "--prefill-workers 0", "conditional-disaggregation disaggregation-tokens disaggregation-fraction decode-overlap-score-credit"},
		{s.ConditionalDisaggregation == "never", "--conditional-disaggregation never", "disaggregation-tokens disaggregation-fraction"},
		{f.HitRate, "--hit-rate, which plays nothing", "rule load jitter speeds engine replicas sync-delay sync-off sync-lost groups summary-age summary-stride " +
			"no-kv-events event-delay event-loss predict prefill-workers pull pull-delay pull-min-tokens pull-limit pull-cost kv-bytes-per-token transfer-rate conditional-disaggregation disaggregation-tokens disaggregation-fraction " +
			"decode-overlap-score-credit router-queue-threshold router-queue-policy router-queue-limit queue-wait priority-share strict-priority priority foreign-share foreign-workers report-every change cold-start seeds timing json hybrid"},
	} {
		fs.Visit(func(given *flag.Flag) {
			if row.when && err == nil && slices.Contains(strings.Fields(row.flags), given.Name) {
				err = fmt.Errorf("--%s has no effect beside %s", given.Name, row.beside)
			}
		})
	}
	return err
}

// load returns the workload of each seed.
func (f *Command) load() (traces []*Trace, err error) {
	var conversations *Conversations
	var trace *Trace
	switch {
	case f.Users > 0:
		conversations, err = LoadConversations(f.Trace)
	case f.Trace != "":
		trace, err = LoadMooncake(f.Trace)
	}
	for i := range f.Seeds {
		seed := f.scenario.Seed + uint64(i)
		t := trace
		switch {
		case err != nil:
			return nil, err
		case conversations != nil:
			t, err = conversations.Deal(DealConfig{Users: f.Users, Requests: f.generate.Requests, Seed: seed})
		case f.lanes.Lanes > 0:
			f.lanes.Seed = seed
			t, err = Lanes(f.lanes)
		case trace == nil:
			f.generate.Seed = seed
			t, err = f.generate.generate()
		}
		traces = append(traces, t)
	}
	return traces, err
}

// play runs each rule with each load and seed.
func (f *Command) play(ctx context.Context, out io.Writer, traces []*Trace) error {
	var all []Scenario
	for _, name := range f.rules {
		rule, err := ParseRule(name)
		if err != nil {
			return err
		}
		for _, load := range f.loads {
			for i, trace := range traces {
				s := f.scenario
				s.Rule, s.Trace, s.Speedup, s.Seed = rule, trace, load, f.scenario.Seed+uint64(i)
				all = append(all, s)
			}
		}
	}
	results, err := RunAll(ctx, all)
	if err != nil {
		return err
	}
	switch f.JSON {
	case "-":
		return writeJSON(out, results)
	case "":
	default:
		if err := saveFile(f.JSON, func(w io.Writer) error { return writeJSON(w, results) }); err != nil {
			return err
		}
	}
	return writeTable(out, results)
}

func (f *Command) printHits(w io.Writer, t *Trace) {
	workers, blocks := f.scenario.Workers, f.scenario.KVBlocks
	for _, c := range []struct {
		what              string
		workers, capacity int
	}{
		{"endless cache", 1, 0},
		{fmt.Sprintf("one cache of %d blocks", workers*blocks), 1, workers * blocks},
		{fmt.Sprintf("round robin over %d caches of %d blocks", workers, blocks), workers, blocks},
	} {
		h := t.HitRate(c.workers, c.capacity)
		fmt.Fprintf(w, "%s: %d of %d blocks hit, %.4f (%.4f of tokens)\n", c.what, h.Hit, h.Blocks,
			float64(h.Hit)/float64(max(1, h.Blocks)), float64(h.HitTokens)/float64(max(1, h.Tokens)))
	}
}

// numbersFlag reads comma-separated numbers above 0.
func numbersFlag(to *[]float64) func(string) error {
	return func(v string) error {
		for part := range strings.SplitSeq(v, ",") {
			n, err := strconv.ParseFloat(strings.TrimSpace(part), 64)
			if err != nil || !(n > 0) {
				return fmt.Errorf("%q is no number above 0", part)
			}
			*to = append(*to, n)
		}
		return nil
	}
}

func parseChange(v string) (c Change, err error) {
	if parts := strings.Split(v, ":"); len(parts) == 3 && slices.Contains([]string{"join", "leave", "restart"}, parts[1]) {
		at, err := time.ParseDuration(parts[0])
		worker, err2 := strconv.Atoi(parts[2])
		if cmp.Or(err, err2) == nil {
			return Change{At: at, Kind: ChangeKind(parts[1]), Worker: worker}, nil
		}
	}
	return c, fmt.Errorf("%q is not time:join|leave|restart:number", v)
}

// saveFile writes a new file in one go.
func saveFile(name string, write func(io.Writer) error) (err error) {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return write(file)
}
