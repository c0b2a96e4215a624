// SPDX-License-Identifier: Apache-2.0

// Package demo runs kvroute, simulated workers and a real Envoy as processes: for the
// commands demo, engine and load, and for tests of the whole.
package demo

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/settings"
)

// Command is `kvroute demo`: the same load through a real Envoy, routed in several ways.
type Command struct {
	Keep     bool   `yaml:"keep" help:"print the dashboard's address before each load, and afterwards leave everything running under a gentle load until Ctrl-C"`
	Rounds   int    `yaml:"rounds" default:"1" want:"1 to 100" help:"<number> of times to play the load in each way"`
	Report   string `yaml:"report" help:"<folder> that gets the rounds' figures, which are then printed with targets"`
	Commit   string `yaml:"commit" help:"<commit> to name in the report"`
	Envoy    string `yaml:"envoy" help:"<path> of an Envoy binary (default: on PATH, or what make envoy installed)"`
	Core     bool   `yaml:"core" help:"send events over NATS core, without a stream that keeps them"`
	Replicas int    `yaml:"replicas" default:"1" want:"1 to 16" help:"<number> of router replicas; above 1 the load is played through one replica, and through this number with and without --router-replica-sync"`
	Groups   int    `yaml:"groups" default:"1" want:"1 to 16" help:"<number> of router groups; above 1 the load is played through one router, and through a router of this number of groups with and without --group-probe"`
	Split    bool   `yaml:"split" help:"play the load on aggregated workers, and on prefill and decode workers, half of each"`
	Hot      bool   `yaml:"hot" help:"play chats that share one long prompt, with round robin and with kvroute's default cost, the latter also without its term for decoding"`
	Workers  int    `yaml:"workers" default:"4" want:"1 to 64" help:"<number> of simulated workers; 8 with groups or --hot"`
	Preset   string `yaml:"preset" default:"32b-2xh100" want:"8b-1xh100, 32b-2xh100 or 70b-4xh100" help:"8b-1xh100, 32b-2xh100 or 70b-4xh100: hardware of the workers"`
	Blocks   int    `yaml:"num-gpu-blocks" default:"2400" help:"capacity of each worker's cache in <blocks> of 16 tokens; 19,200 with --hot"`

	stack Stack // what every way has
	load  bench.LoadConfig
	out   io.Writer
}

// Flags adds the flags of the command to fs.
func (c *Command) Flags(fs *flag.FlagSet) {
	settings.SetDefaults(c)
	settings.AddFlags(fs, c)
	settings.SetDefaults(&c.load)
	l := &c.load
	l.Rate, l.Conversations, l.TurnGap, l.Seed = 10, 45, 2500*time.Millisecond, 1
	l.SystemPrompts, l.SystemBytes, l.UserBytes, l.ReplyBytes, l.MaxTokens = 12, 36_000, 4200, 1800, 40
	settings.AddFlags(fs, l)
}

// Run plays the rounds. It fails if a request failed, or a target was missed.
func (c *Command) Run(ctx context.Context, fs *flag.FlagSet, out, _ io.Writer) (err error) {
	c.out = out
	defer func() {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
	}()
	return bench.Try(func() { c.run(ctx, fs) })
}

func (c *Command) run(ctx context.Context, fs *flag.FlagSet) {
	bench.NoError(c.check(fs))
	c.stack = Stack{Model: c.load.Model, EnvoyPath: c.Envoy, Core: c.Core, Workers: c.Workers, EngineFlags: []string{"--preset", c.Preset, "--num-gpu-blocks", fmt.Sprint(c.Blocks)}}
	if c.Envoy == "" {
		c.stack.EnvoyPath = bench.Must(envoytest.Find())
	}
	c.stack.Dir = bench.Must(os.MkdirTemp("", "kvroute-demo-"))
	defer func() { _ = os.RemoveAll(c.stack.Dir) }()
	if c.Keep { // the page stays at one address, and connects again to each way
		port, release, err := process.HoldPort()
		bench.NoError(err)
		defer release()
		c.stack.HTTP = fmt.Sprint("127.0.0.1:", port)
	}
	var running Stack
	defer func() { running.Stop() }()
	show := c.show()
	var missed error
	played := make([][]bench.Summary, c.Rounds)
	for round := range played {
		played[round] = make([]bench.Summary, len(show.ways))
		for i := range show.ways {
			// The order of the ways changes, since other work on the machine changes, too.
			at := (i + c.Rounds - 1 - round) % len(show.ways)
			running.Stop()
			running = c.stack
			played[round][at] = c.play(ctx, &running, &show.ways[at])
		}
		show.compare(c.out, played[round])
		missed = errors.Join(missed, show.judge(played[round]))
	}
	c.twice(ctx, &running)
	if c.Report != "" {
		fmt.Fprintln(c.out)
		if !bench.Must(bench.Report(c.out, c.Report, bench.NewRun(show.name, c.Commit, show.command, show.figures(played)))) {
			missed = errors.Join(missed, errors.New("a target was missed"))
		}
	}
	if c.Keep {
		c.invite(&running)
		c.keepLoaded(ctx, &running)
	}
	bench.NoError(missed)
}

// hotLoad has the values of flags that --hot sets unless they are given. All chats share one prompt
// of about 16,000 tokens, and each adds a question of about 50. Spread evenly, the chats keep a worker
// decoding six of them at a time. A worker that gets all chats decodes ever more of them. The cache
// is as large as the memory that a 32B model leaves free on two H100.
//
//nolint:gochecknoglobals // a table
var hotLoad = map[string]string{
	"workers": "8", "num-gpu-blocks": "19200", "rate": "10", "conversations": "128", "turns": "1", "system-prompts": "1",
	"system-bytes": "96000", "user-bytes": "200", "max-tokens": "300", "timeout": "2m",
}

// check refuses numbers out of range, and sets what depends on other flags.
func (c *Command) check(fs *flag.FlagSet) error {
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if c.Groups > 1 && !given["workers"] {
		c.Workers = 8
	}
	for name, value := range hotLoad {
		if c.Hot && !given[name] {
			if err := fs.Set(name, value); err != nil {
				return err
			}
		}
	}
	if err := settings.Check(c); err != nil {
		return err
	}
	switch {
	case c.Groups > c.Workers:
		return fmt.Errorf("groups is %d, and workers %d: want a worker for each group", c.Groups, c.Workers)
	case c.Groups > 1 && c.Replicas > 1:
		return errors.New("groups and replicas are shown one at a time")
	case c.Split && (c.Groups > 1 || c.Replicas > 1):
		return errors.New("split is shown without groups and replicas")
	case c.Hot && (c.Split || c.Groups > 1 || c.Replicas > 1):
		return errors.New("hot is shown without split, groups and replicas")
	case c.Split && c.Workers < 2:
		return fmt.Errorf("workers is %d: want 2 or more for a split", c.Workers)
	}
	if (c.Replicas > 1 || c.Groups > 1) && !given["rate"] && !given["conversations"] {
		// With little to do it does not matter which router knows of what.
		c.load.Rate, c.load.Conversations = 5.5*float64(c.Workers), 25*c.Workers
	}
	return nil
}

// play starts the processes of a way, and plays the load through its Envoy.
func (c *Command) play(ctx context.Context, s *Stack, w *way) (played bench.Summary) {
	bench.Within(w.title, func() { bench.NoError(w.start(ctx, s)) })
	if c.Keep {
		fmt.Fprintf(c.out, "%s: the dashboard is at http://%s/\n", w.title, s.Router.At.HTTP)
	}
	load, bar := c.load, progressBar{out: c.out, title: w.title}
	load.URL = s.Envoy.URL()
	played = bench.Must(bench.Load(ctx, load, func(done, total int) {
		if ctx.Err() == nil { // cancelled requests are not done
			bar.show(done, total)
		}
	}, nil))
	if w.check != nil {
		bench.NoError(w.check(ctx, s, &played))
	}
	return played
}

// twice sends one conversation twice, and shows kvroute's decision each time.
func (c *Command) twice(ctx context.Context, s *Stack) {
	question := strings.Repeat("Why is the same question answered sooner the second time? ", 6)
	fmt.Fprintln(c.out, "\nThe same conversation, asked twice:")
	for _, when := range []string{"first", "again"} {
		h := bench.Must(s.Ask(ctx, question))
		fmt.Fprintf(c.out, "  %s: %s, overlap %s blocks, reason %s\n", when, h.Get("X-Sim-Worker"), h.Get("X-Dynamo-Overlap-Blocks"), h.Get("X-Dynamo-Reason"))
		select { // the worker's events travel some milliseconds
		case <-ctx.Done():
			bench.NoError(ctx.Err())
		case <-time.After(300 * time.Millisecond):
		}
	}
}

func (c *Command) invite(s *Stack) {
	fmt.Fprintf(c.out, `
Everything is still running; Ctrl-C ends it.
  dashboard  http://%s/
  clients    %s
  kvroute    http://%s/v1/workers  /v1/decisions  /metrics
  Envoy      %s
Try, twice:
  curl -i %s/v1/chat/completions -H 'content-type: application/json' \
    -d '{"model":"%s","max_tokens":8,"messages":[{"role":"user","content":"Tell me which worker has my blocks, and how it came to have them."}]}'
`, s.Router.At.HTTP, s.Envoy.URL(), s.Router.At.HTTP, s.Envoy.AdminURL(), s.Envoy.URL(), s.Model)
}

// keepLoaded sends a gentle load until ctx ends, so that the dashboard shows something. Failed requests, as of a worker
// that the user kills, do not end it.
func (c *Command) keepLoaded(ctx context.Context, s *Stack) {
	load := c.load
	load.URL, load.Rate, load.Conversations = s.Envoy.URL(), 1, 20
	for ctx.Err() == nil {
		load.Seed++
		if _, err := bench.Load(ctx, load, nil, nil); err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// progressBar shows the progress of a load: on a terminal as a bar that grows, elsewhere
// as a few lines.
type progressBar struct {
	out   io.Writer
	title string
	steps int // shown so far
}

func (b *progressBar) show(done, total int) {
	steps, begin, end := 4, "", "\n"
	if file, ok := b.out.(*os.File); ok {
		if info, err := file.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			steps, begin, end = 100, "\r", ""
		}
	}
	at := done * steps / total
	if at == b.steps {
		return
	}
	b.steps = at
	const width = 40
	full := done * width / total
	if done == total {
		end = "\n"
	}
	fmt.Fprintf(b.out, "%s%-12s [%s%s] %d of %d requests%s", begin, b.title, strings.Repeat("#", full), strings.Repeat(".", width-full), done, total, end)
}
