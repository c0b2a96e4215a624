// SPDX-License-Identifier: Apache-2.0

// Command interop holds kvroute against real programs: engines, Dynamo's workers and
// everyday clients, as `make test-interop` runs it. It prints a line a check, and as
// the last one how many of them passed; it exits 1 if any did not.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
)

type options struct {
	kvroute, out, commit, only, shared string

	// Folders that tools/NAME.sh filled; an empty one leaves its checks out.
	clients, dynamo, vllm string
}

// group is the checks of one real program. They run one after the other; a check may use
// what an earlier one started.
type group struct {
	name   string               // of the group, and of the flag that says where its program is
	given  func(options) string // the folder of the program, "" if it is not given
	checks []check
}

// check is one thing that is compared.
type check struct {
	name  string
	limit time.Duration // for all of it, starting engines included
	run   func(context.Context, *env) (result, error)
}

// result is what a check found. A check that also returns an error could not finish.
type result struct {
	what             string // both sides of the comparison, as in "overlap with cached_tokens"
	cases, different int
	notes            []string       // a line for each difference, and what explains it
	figures          []bench.Figure // measured on the way
}

// differ counts a difference; the first ten are printed.
func (r *result) differ(format string, args ...any) {
	if r.different++; r.different <= 10 {
		r.notes = append(r.notes, fmt.Sprintf(format, args...))
	}
}

// env is what the checks of a group share.
type env struct {
	options
	dir   string // of this run: logs, sockets, models
	ends  []func()
	vllms *vllmFleet // nil until a check needs it
	sims  []string   // addresses of simulated engines
}

// start starts a program, whose log goes to the run's folder.
func (e *env) start(name string, environment []string, program string, args ...string) (*process.Process, error) {
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), environment...)
	return process.Start(e.dir, name, cmd)
}

// atEnd calls f when the group is done, in the order of deferred functions.
func (e *env) atEnd(f func()) { e.ends = append(e.ends, f) }

func (e *env) end() {
	for _, f := range slices.Backward(e.ends) {
		f()
	}
	e.ends = nil
}

func groups() []group {
	return []group{
		{name: "clients", given: func(o options) string { return o.clients }, checks: clientChecks()},
		{name: "dynamo", given: func(o options) string { return o.dynamo }, checks: dynamoChecks()},
		{name: "vllm", given: func(o options) string { return o.vllm }, checks: vllmChecks()},
	}
}

func main() {
	var o options
	shared, err := fixtures.Dir()
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		os.Exit(2)
	}
	flag.StringVar(&o.kvroute, "kvroute", ".cache/bin/kvroute", "the kvroute to check")
	flag.StringVar(&o.vllm, "vllm", "", "`folder` with vLLM; empty leaves its checks out")
	flag.StringVar(&o.dynamo, "dynamo", "", "`folder` with Dynamo; empty leaves its checks out")
	flag.StringVar(&o.clients, "clients", "", "`folder` with the clients; empty leaves their checks out")
	flag.StringVar(&o.only, "only", "", "run only the checks that have one of these, comma-separated, in \"group name\"")
	flag.StringVar(&o.shared, "shared", shared, "reference data; what is not there is left out, and said")
	flag.StringVar(&o.out, "out", "bench/out", "where the JSON goes")
	flag.StringVar(&o.commit, "commit", "", "recorded in the JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx, o, groups(), os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// run runs the requested checks and returns whether all passed.
func run(ctx context.Context, o options, all []group, w io.Writer) (ok bool, err error) {
	e := &env{options: o}
	if e.dir, err = os.MkdirTemp("", "interop"); err != nil {
		return false, err
	}
	defer func() { _ = os.RemoveAll(e.dir) }() // a rest of it harms nobody
	if e.kvroute, err = filepath.Abs(e.kvroute); err != nil {
		return false, err
	}
	passed, total := 0, 0
	var figures []bench.Figure
	for _, g := range all {
		n := 0
		for _, c := range g.checks {
			if !wanted(o.only, g.name+" "+c.name) {
				continue
			}
			if n++; g.given(o) == "" {
				continue
			}
			if ctx.Err() != nil {
				break
			}
			r, err := e.check(ctx, c)
			total++
			if err == nil && r.different == 0 && r.cases > 0 {
				passed++
			}
			figures = append(figures, report(w, g.name+": "+c.name, r, err)...)
		}
		e.end()
		if n > 0 && g.given(o) == "" {
			fmt.Fprintf(w, "%s: %d checks left out: --%s is not given\n", g.name, n, g.name)
		}
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if total == 0 {
		return false, errors.New("nothing was checked: check the name after --only, and give the program of its group (--clients, --dynamo, --vllm)")
	}
	if _, err := bench.Report(io.Discard, o.out, bench.NewRun("interop", o.commit, "make test-interop", figures)); err != nil {
		return false, err
	}
	_, err = fmt.Fprintf(w, "%d of %d checks\n", passed, total)
	return passed == total, err
}

func wanted(only, name string) bool {
	return only == "" || slices.ContainsFunc(strings.Split(only, ","), func(part string) bool { return part != "" && strings.Contains(name, part) })
}

func (e *env) check(ctx context.Context, c check) (result, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.limit, fmt.Errorf("not done in %v", c.limit))
	defer cancel()
	r, err := c.run(ctx, e)
	if err == nil && r.cases == 0 {
		err = errors.New("nothing was compared")
	}
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return r, err
}

// report prints what a check found, and returns it as figures.
func report(w io.Writer, name string, r result, err error) []bench.Figure {
	verdict := "ok"
	if err != nil || r.different > 0 {
		verdict = "FAILED"
	}
	fmt.Fprintf(w, "%-6s %s: %s: %d compared, %d different\n", verdict, name, r.what, r.cases, r.different)
	for _, n := range r.notes {
		fmt.Fprintln(w, "       ", n)
	}
	different := float64(r.different)
	if err != nil {
		fmt.Fprintln(w, "       ", strings.ReplaceAll(err.Error(), "\n", "\n        "))
		different = max(1, different)
	}
	for _, f := range r.figures {
		fmt.Fprintf(w, "        %s: %.4g %s\n", f.What, f.Median, f.Unit)
	}
	return append([]bench.Figure{bench.NewFigure(fmt.Sprintf("%s: %s: different of %d", name, r.what, r.cases), "", bench.Exactly(0), different)}, r.figures...)
}
