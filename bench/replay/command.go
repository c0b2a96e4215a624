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

	"github.com/kvroute/kvroute/scorer"
)

const help = `usage: kvroute replay [flags]

Plays a workload against simulated engines on a virtual clock and has the router of
this binary choose among them, for each --rule, load and seed. Without a trace the
workload is made up.

A trace is in the Mooncake format (JSON lines: timestamp in ms, input_length,
output_length, hash_ids of blocks of 512 tokens; requests of one tick are spread
up to the next), or, with --users, recorded conversations that so many users work
through in a closed loop. Files that end with .gz are unpacked.

The result is a table of times in seconds from when a request was due: TTFT to the
first token, TPOT between two tokens, E2E to the end. goodput counts requests with
TTFT ≤ 2 s and TPOT ≤ 50 ms; hits are cached tokens of prompts, "of LRU" their
share of what one cache of the summed size would hit; imbalance is the most prompt
tokens that a worker computed over the mean; misjudged is by how many cached tokens
decisions were wrong on average. The same flags give the same bytes, --timing apart.

Rules: %s.
Settings follow a colon: tokens:alpha=.1,attention=6e-5 or dynamo:overlap_score_weight=4.

flags:
`

// Command is `kvroute replay`: what its flags say. Flags comes first, then Run.
type Command struct {
	trace    string
	users    int
	generate GenerateConfig
	rules    []string
	loads    []float64
	seeds    int
	engine   string
	syncOff  bool
	jsonFile string
	outFile  string
	hitRate  bool
	scenario Scenario
}

// Flags adds the flags of the command to fs.
func (f *Command) Flags(fs *flag.FlagSet) {
	fs.Usage = func() {
		fmt.Fprintf(fs.Output(), help, strings.Join(ruleNames(), ", "))
		fs.PrintDefaults()
	}
	s, g := &f.scenario, &f.generate
	fs.StringVar(&f.trace, "trace", "", "`file` with the workload; none: made up")
	fs.IntVar(&f.users, "users", 0, "the trace has conversations, for this `number` of users in a closed loop")
	fs.IntVar(&g.Requests, "requests", 4000, "`number` of requests made up, or taken from conversations")
	fs.Float64Var(&g.Rate, "rate", 10, "made up: `requests` a second")
	fs.IntVar(&g.Prefixes, "prefixes", 150, "made up: `number` of shared prefixes")
	fs.IntVar(&g.PrefixTokens, "prefix-tokens", 6000, "made up: `tokens` of a prefix")
	fs.IntVar(&g.QuestionTokens, "question-tokens", 1200, "made up: mean `tokens` of a question")
	fs.IntVar(&g.OutputTokens, "output-tokens", 1000, "made up: mean `tokens` of an output")
	fs.IntVar(&g.Turns, "turns", 1, "made up: `requests` of a conversation")
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
	fs.DurationVar(&s.Jitter, "jitter", 0, "`time` up to which each request of an open loop comes later, by the seed")
	fs.IntVar(&s.Workers, "workers", 8, "`number` of workers")
	fs.Func("speeds", "relative `speeds` of the first workers, comma-separated", numbersFlag(&s.Speeds))
	fs.StringVar(&f.engine, "engine", "32b", "`preset` of the engines: 8b (one H100), 32b (two) or 70b (four)")
	fs.IntVar(&s.KVBlocks, "kv-blocks", 2000, "`blocks` of 512 tokens in a worker's cache")
	fs.IntVar(&s.Replicas, "replicas", 1, "`number` of router replicas")
	fs.DurationVar(&s.SyncDelay, "sync-delay", 0, "`time` until replicas hear of each other's requests")
	fs.BoolVar(&f.syncOff, "sync-off", false, "replicas never hear of each other's requests")
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
	fs.IntVar(&s.Groups, "groups", 1, "`number` of router groups below an upper router")
	fs.DurationVar(&s.SummaryAge, "summary-age", time.Second, "`time` between two summaries of a group")
	fs.IntVar(&s.Stride, "summary-stride", 1, "`blocks` from one to the next that a summary tells of")
	fs.BoolVar(&s.Approximate, "no-kv-events", false, "workers publish no cache events: routers guess")
	fs.DurationVar(&s.EventDelay, "event-delay", 0, "`time` until routers hear of cache events")
	fs.Float64Var(&s.EventLoss, "event-loss", 0, "`share` of cache events that are lost")
	fs.DurationVar(&s.Predict, "predict", 10*time.Second, "`time` for which routers believe that a prompt will be cached where they sent it; 0 = not at all")
	fs.IntVar(&s.PrefillWorkers, "prefill-workers", 0, "`number` of workers that compute prompts only, while the others decode; 0 = each does both")
	fs.Float64Var(&s.Transfer, "transfer", 190_000, "`tokens` a second that go from prefill to decode")
	fs.Float64Var(&s.ForeignShare, "foreign-share", 0, "`share` of requests that reach workers past the routers; compare a rule with itself and reports=none")
	fs.IntVar(&s.ForeignWorkers, "foreign-workers", 0, "`number` of the workers, the first ones, that these requests go to (default half of them)")
	fs.DurationVar(&s.ReportEvery, "report-every", 2500*time.Millisecond, "`time` between two reports of an engine's load")
	fs.Func("change", "a worker's fate as `time:join|leave|restart:number`, as in 60s:leave:3; may be repeated", func(v string) error {
		c, err := parseChange(v)
		s.Changes = append(s.Changes, c)
		return err
	})
	fs.DurationVar(&s.ColdStart, "cold-start", 0, "`time` at which the routers are replaced by ones that know nothing")
	fs.Uint64Var(&s.Seed, "seed", 1, "first seed")
	fs.IntVar(&f.seeds, "seeds", 1, "`number` of seeds")
	fs.BoolVar(&s.Timing, "timing", false, "measure what decisions cost here")
	fs.BoolVar(&f.hitRate, "hit-rate", false, "only print the block hits of caches without time: endless, one of the summed size, round robin")
	fs.StringVar(&f.jsonFile, "json", "", "`file` that gets the results as JSON, - = standard output instead of the table")
	fs.StringVar(&f.outFile, "write-trace", "", "`file` that gets the workload in the Mooncake format")
}

// Run plays the workload and prints the table of results.
func (f *Command) Run(ctx context.Context, fs *flag.FlagSet, out, _ io.Writer) error {
	engines := map[string]scorer.Engine{"8b": scorer.Dense8B(), "32b": scorer.Dense32B(), "70b": scorer.Dense70B()}
	f.scenario.Engine = engines[strings.ToLower(f.engine)]
	if err := errors.Join(f.check(fs), f.withoutEffect(fs)); err != nil {
		return err
	}
	// Below, 0 stands for the default.
	g := &f.generate
	g.PrefixTokens, g.QuestionTokens = cmp.Or(g.PrefixTokens, NoTokens), cmp.Or(g.QuestionTokens, NoTokens)
	if f.syncOff {
		f.scenario.SyncDelay = -1
	}
	if len(f.rules) == 0 {
		f.rules = []string{Default, "dynamo"}
	}
	if len(f.loads) == 0 {
		f.loads = []float64{1}
	}
	traces, err := f.load()
	if err != nil {
		return err
	}
	if f.outFile != "" {
		if err := saveFile(f.outFile, traces[0].WriteMooncake); err != nil {
			return err
		}
	}
	if f.hitRate {
		f.printHits(out, traces[0])
		return nil
	}
	return f.play(ctx, out, traces)
}

// check refuses values that mean nothing, and 0 where it would come to mean a default.
func (f *Command) check(fs *flag.FlagSet) error {
	s, g := &f.scenario, &f.generate
	for name := range strings.FieldsSeq("requests prefixes output-tokens turns workers kv-blocks replicas groups summary-stride") {
		if n, _ := fs.Lookup(name).Value.(flag.Getter).Get().(int); n < 1 {
			return fmt.Errorf("--%s is %d, want 1 or more", name, n)
		}
	}
	for _, v := range f.loads {
		if !(v > 0) {
			return fmt.Errorf("--load is %v, want numbers above 0", v)
		}
	}
	switch {
	case s.Engine == scorer.Engine{}:
		return fmt.Errorf("--engine is %q, want 8b, 32b or 70b", f.engine)
	case f.seeds < 1 || f.seeds > 1000:
		return fmt.Errorf("--seeds is %d, want 1 to 1,000", f.seeds)
	case f.users < 0:
		return fmt.Errorf("--users is %d, want 0 or more", f.users)
	case f.users > 0 && f.trace == "":
		return errors.New("--users needs a --trace with conversations")
	case f.users > 0 && len(f.loads) > 0:
		return errors.New("--load is for open loops; users set the load of a closed one")
	case !(g.Rate > 0):
		return fmt.Errorf("--rate is %v, want a number above 0", g.Rate)
	case !(s.Transfer > 0):
		return fmt.Errorf("--transfer is %v, want a number above 0", s.Transfer)
	case s.ForeignWorkers < 0:
		return fmt.Errorf("--foreign-workers is %d, want 0 or more", s.ForeignWorkers)
	case s.ReportEvery <= 0:
		return fmt.Errorf("--report-every is %v, want a time above 0", s.ReportEvery)
	case s.SummaryAge <= 0:
		return fmt.Errorf("--summary-age is %v, want a time above 0", s.SummaryAge)
	case g.PrefixTokens < 0 || g.QuestionTokens < 0 || g.PrefixTokens+g.QuestionTokens == 0:
		return fmt.Errorf("--prefix-tokens is %d and --question-tokens %d, want 0 or more, and one of them above 0", g.PrefixTokens, g.QuestionTokens)
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
		{f.trace != "", "a --trace", "rate prefixes prefix-tokens question-tokens output-tokens turns"},
		{f.trace != "" && f.users == 0, "a --trace that is played whole", "requests"},
		{f.users > 0, "--users, who set the load themselves", "jitter"},
		{s.Replicas == 1, "one replica", "sync-delay sync-off sync-lost"},
		{f.syncOff, "--sync-off", "sync-delay sync-lost"},
		{s.Groups == 1, "one group", "summary-age summary-stride"},
		{s.ForeignShare == 0, "no --foreign-share", "foreign-workers report-every"},
		{s.Approximate, "--no-kv-events", "event-delay event-loss predict"},
		{s.PrefillWorkers == 0, "workers that do both", "transfer"},
		{f.hitRate, "--hit-rate, which plays nothing", "rule load jitter speeds engine replicas sync-delay sync-off sync-lost groups summary-age summary-stride " +
			"no-kv-events event-delay event-loss predict prefill-workers transfer foreign-share foreign-workers report-every change cold-start seeds timing json"},
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
	case f.users > 0:
		conversations, err = LoadConversations(f.trace)
	case f.trace != "":
		trace, err = LoadMooncake(f.trace)
	}
	for i := range f.seeds {
		seed := f.scenario.Seed + uint64(i)
		t := trace
		switch {
		case err != nil:
			return nil, err
		case conversations != nil:
			t, err = conversations.Deal(DealConfig{Users: f.users, Requests: f.generate.Requests, Seed: seed})
		case trace == nil:
			f.generate.Seed = seed
			t, err = Generate(f.generate)
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
	switch f.jsonFile {
	case "-":
		return writeJSON(out, results)
	case "":
	default:
		if err := saveFile(f.jsonFile, func(w io.Writer) error { return writeJSON(w, results) }); err != nil {
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
		h := t.HitRate(t.InOrder(), c.workers, c.capacity)
		fmt.Fprintf(w, "%s: %d of %d blocks hit, %.4f (%.4f of tokens)\n", c.what, h.Hit, h.Blocks,
			float64(h.Hit)/float64(max(1, h.Blocks)), float64(h.HitTokens)/float64(max(1, h.Tokens)))
	}
}

// numbersFlag reads comma-separated numbers.
func numbersFlag(to *[]float64) func(string) error {
	return func(v string) error {
		for part := range strings.SplitSeq(v, ",") {
			n, err := strconv.ParseFloat(strings.TrimSpace(part), 64)
			if err != nil {
				return fmt.Errorf("%q is no number", part)
			}
			*to = append(*to, n)
		}
		return nil
	}
}

func parseChange(v string) (c Change, err error) {
	const form = "%q is not time:join|leave|restart:number"
	parts := strings.Split(v, ":")
	if len(parts) != 3 || !slices.Contains([]string{"join", "leave", "restart"}, parts[1]) {
		return c, fmt.Errorf(form, v)
	}
	at, err := time.ParseDuration(parts[0])
	worker, err2 := strconv.Atoi(parts[2])
	if cmp.Or(err, err2) != nil {
		return c, fmt.Errorf(form, v)
	}
	return Change{At: at, Kind: ChangeKind(parts[1]), Worker: worker}, nil
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
