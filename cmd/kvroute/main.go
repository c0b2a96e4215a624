// SPDX-License-Identifier: Apache-2.0

// Kvroute routes LLM requests to the worker whose KV cache and load fit best, as
// an external processor of Envoy. Its subcommands are listed by `kvroute help`.
//
// This package reads flags and files, wires the other packages together, and owns
// signals and the order of a shutdown. Every goroutine that is not a server's own
// starts in one of its run functions.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/internal/telemetry"
)

// command is one subcommand. run returns when its work is done or ctx ends.
type command struct {
	name, does string
	run        func(ctx context.Context, args []string, io stdio) error
}

// stdio is where a command writes: its result to out, messages for people to err.
type stdio struct{ out, err io.Writer }

func commands() []command {
	return []command{
		{"serve", "run the external processor", serve},
		{"demo", "play one load twice on Envoy and simulated workers: round robin and with kvroute", elsewhere("demo", new(demo.Command))},
		{"engine", "run a simulated worker", elsewhere("engine", new(demo.EngineCommand))},
		{"publish", "publish an engine's cache events and register it", publish},
		{"load", "send load to an OpenAI endpoint and measure it", elsewhere("load", new(demo.LoadCommand))},
		{"dump", "print the index of a running kvroute as JSON lines", dump},
		{"replay", "play a workload against simulated engines, with the real router", elsewhere("replay", new(replay.Command))},
		{"tokenize", "show the tokens, blocks and hashes of a request", tokenizeFile},
		{"doctor", "compare router replicas and report differences and faults", compareReplicas},
		{"explain", "print a recent decision of a running kvroute and its inputs", explain},
		{"top", "show live what a running kvroute does", showTop},
		{"config", "check a configuration and print it with its defaults", printConfig},
		{"config envoy", "print an Envoy bootstrap for kvroute", printEnvoy},
		{"healthcheck", "exit 0 if a URL answers 200", healthcheck},
		{"version", "print the version", version},
	}
}

var (
	// errUsage means that the flag package has printed the error.
	errUsage = errors.New("usage")
	// errInterrupted means that a signal ended the command early.
	errInterrupted = errors.New("interrupted")
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], stdio{os.Stdout, os.Stderr}))
}

func run(ctx context.Context, args []string, io stdio) (status int) {
	cmd, rest := find(args)
	if cmd == nil {
		usage(io.err)
		if len(args) == 1 && strings.Contains("help -h --help", args[0]) {
			return 0
		}
		return 2
	}
	switch err := cmd.run(ctx, rest, io); {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		return 2
	case errors.Is(err, errInterrupted), errors.Is(err, context.Canceled):
		return 130 // as shells report SIGINT
	default:
		fmt.Fprintf(io.err, "kvroute %s: %v\n", cmd.name, err)
		return 1
	}
}

// find looks for the longest command name that args begin with.
func find(args []string) (found *command, rest []string) {
	for _, c := range commands() {
		words := strings.Fields(c.name)
		if len(args) < len(words) || strings.Join(args[:len(words)], " ") != c.name {
			continue
		}
		if found == nil || len(words) > len(strings.Fields(found.name)) {
			found, rest = &c, args[len(words):]
		}
	}
	return found, rest
}

func usage(w io.Writer) {
	fmt.Fprint(w, "usage: kvroute COMMAND [flags]\n\n")
	for _, c := range commands() {
		fmt.Fprintf(w, "  %-14s %s\n", c.name, c.does)
	}
	fmt.Fprint(w, "\n`kvroute COMMAND -h` lists a command's flags.\n")
}

// program is a subcommand of another package. Run is called when its flags are read.
type program interface {
	Flags(fs *flag.FlagSet)
	Run(ctx context.Context, fs *flag.FlagSet, out, log io.Writer) error
}

// elsewhere returns the run function of a program's subcommand.
func elsewhere(name string, p program) func(context.Context, []string, stdio) error {
	return func(ctx context.Context, args []string, io stdio) error {
		fs := newFlagSet(name, io.err)
		p.Flags(fs)
		if err := parse(fs, args); err != nil {
			return err
		}
		return p.Run(ctx, fs, io.out, io.err)
	}
}

func newFlagSet(name string, out io.Writer) *flag.FlagSet {
	fs := flag.NewFlagSet("kvroute "+name, flag.ContinueOnError)
	fs.SetOutput(out)
	return fs
}

// parse reads the flags of a command that has no arguments.
func parse(fs *flag.FlagSet, args []string) error {
	rest, err := parseArgs(fs, args)
	if err == nil && len(rest) > 0 {
		return fmt.Errorf("unexpected argument %q", rest[0])
	}
	return err
}

// parseArgs reads the flags of a command and returns its arguments. Flags may stand before
// and after them.
func parseArgs(fs *flag.FlagSet, args []string) (rest []string, err error) {
	for {
		switch err := fs.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			return nil, err
		case err != nil:
			return nil, errUsage
		}
		if fs.NArg() == 0 {
			return rest, nil
		}
		rest, args = append(rest, fs.Arg(0)), fs.Args()[1:]
	}
}

func version(_ context.Context, args []string, io stdio) error {
	if err := parse(newFlagSet("version", io.err), args); err != nil {
		return err
	}
	fmt.Fprintf(io.out, "kvroute %s\n", telemetry.Version())
	return nil
}
