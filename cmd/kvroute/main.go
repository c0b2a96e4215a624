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
	"runtime"
	"strings"
	"syscall"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/internal/telemetry"
)

// command is one subcommand. run returns when its work is done or ctx ends.
type command struct {
	name, does string // does is an imperative sentence, without the full stop
	run        func(ctx context.Context, args []string, io stdio) error
	topic      string // of this command and the next ones, in the list of `kvroute help`
	argument   string // name and meaning of what follows the flags, for the help of the command; empty if there is none
}

// stdio is where a command writes: its result to out, messages for people to err.
type stdio struct{ out, err io.Writer }

func commands() []command {
	return []command{
		{"serve", "run the external processor", serve, "Route", ""},
		{"publish", "publish an engine's cache events and register it", publish, "", ""},
		{"config", "print a configuration with its defaults", printConfig, "Configure", ""},
		{"config check", "check a configuration, and the files and folders that it names", checkConfig, "", ""},
		{"config envoy", "print an Envoy bootstrap for kvroute", printEnvoy, "", ""},
		{"tokenize", "show the tokens, blocks and hashes of a request", tokenizeFile, "", ""},
		{"top", "show live what a running kvroute does", showTop, "See what a running kvroute does", ""},
		{"explain", "print a recent decision of a running kvroute and its inputs", explain, "", "ID  " + idOfExplain},
		{"doctor", "compare router replicas and report differences and faults", compareReplicas, "", ""},
		{"dump", "print the index of a running kvroute as JSON lines", dump, "", ""},
		{"healthcheck", "exit 0 if a URL answers 200", healthcheck, "", ""},
		{
			"demo", "play one load twice on Envoy and simulated workers: round robin and with kvroute",
			elsewhere("demo", new(demo.Command)), "Try and measure", "",
		},
		{"engine", "run a simulated worker", elsewhere("engine", new(demo.EngineCommand)), "", ""},
		{"load", "send load to an OpenAI endpoint and measure it", elsewhere("load", new(demo.LoadCommand)), "", ""},
		{
			"replay", "play a workload against simulated engines, with the real router",
			elsewhere("replay", new(replay.Command)), "", "",
		},
		{
			"completion", "print the completion of commands, flags and values for a shell", completion,
			"Other", "SHELL  bash, zsh or fish",
		},
		{"version", "print the version", version, "", ""},
	}
}

// errInterrupted means that a signal ended the command early.
var errInterrupted = errors.New("interrupted")

// usageError is a mistake in the command line.
type usageError string

func (e usageError) Error() string { return string(e) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], stdio{os.Stdout, os.Stderr}))
}

func run(ctx context.Context, args []string, io stdio) (status int) {
	switch {
	case len(args) == 0:
		printCommands(io.err)
		return 2
	case args[0] == "--version":
		args = []string{"version"}
	case args[0] == "help": // help COMMAND is COMMAND -h
		args = append(args[1:], "-h")
	}
	cmd, rest := find(args)
	switch {
	case cmd == nil && strings.Contains("-h --help", args[0]):
		printCommands(io.out)
		return 0
	case cmd == nil:
		fmt.Fprintf(io.err, "kvroute: there is no command %q%s; `kvroute help` lists the commands\n",
			args[0], didYouMean(args[0], commandsWith("")))
		return 2
	}
	err := cmd.run(ctx, rest, io)
	help, isHelp := errors.AsType[helpError](err)
	wrong, isUsage := errors.AsType[usageError](err)
	switch {
	case err == nil:
		return 0
	case isHelp:
		cmd.printHelp(io.out, help.flags)
		return 0
	case isUsage:
		fmt.Fprintf(io.err, "kvroute %s: %v; `kvroute help %s` lists the flags\n", cmd.name, wrong, cmd.name)
		return 2
	case errors.Is(err, errInterrupted), errors.Is(err, context.Canceled):
		return 130 // as shells report SIGINT
	default:
		fmt.Fprintf(io.err, "kvroute %s: %s\n", cmd.name, asTyped(err.Error(), rest))
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

// program is a subcommand of another package. Run is called when its flags are read.
type program interface {
	Flags(fs *flag.FlagSet)
	Run(ctx context.Context, fs *flag.FlagSet, out, log io.Writer) error
}

// elsewhere returns the run function of a program's subcommand.
func elsewhere(name string, p program) func(context.Context, []string, stdio) error {
	return func(ctx context.Context, args []string, io stdio) error {
		fs := newFlagSet(name)
		p.Flags(fs)
		if err := parse(fs, args); err != nil {
			return err
		}
		return p.Run(ctx, fs, io.out, io.err)
	}
}

func newFlagSet(name string) *flag.FlagSet {
	fs := flag.NewFlagSet("kvroute "+name, flag.ContinueOnError)
	fs.SetOutput(io.Discard) // run prints errors and help
	return fs
}

// parse reads the flags of a command that has no arguments.
func parse(fs *flag.FlagSet, args []string) error {
	rest, err := parseArgs(fs, args)
	if err == nil && len(rest) > 0 {
		name := strings.TrimPrefix(fs.Name(), "kvroute ") + " "
		return usageError(fmt.Sprintf("unexpected argument %q%s", rest[0], didYouMean(name+rest[0], commandsWith(name))))
	}
	return err
}

// parseArgs reads the flags of a command, from the environment and from args, and returns its
// arguments. Flags may stand before and after them. Errors are usageError and helpError.
func parseArgs(fs *flag.FlagSet, args []string) (rest []string, err error) {
	if err := fromEnvironment(fs); err != nil {
		return nil, err
	}
	for {
		switch err := fs.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			return nil, helpError{fs}
		case err != nil:
			return nil, wrongFlag(fs, err)
		}
		if fs.NArg() == 0 {
			return rest, nil
		}
		rest, args = append(rest, fs.Arg(0)), fs.Args()[1:]
	}
}

func version(_ context.Context, args []string, io stdio) error {
	fs := newFlagSet("version")
	raw := fs.Bool("json", false, "print version, go_version and platform as JSON")
	if err := parse(fs, args); err != nil {
		return err
	}
	if *raw {
		return writeJSON(io.out, map[string]string{
			"version": telemetry.Version(), "go_version": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
		})
	}
	_, err := fmt.Fprintf(io.out, "kvroute %s\n", telemetry.Version())
	return err
}
