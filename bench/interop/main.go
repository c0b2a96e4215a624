// SPDX-License-Identifier: Apache-2.0

// Command interop compares kvroute with real programs: engines, Dynamo's workers and
// everyday clients, as `make test-interop` runs it. It prints a line for each check and
// then how many of them passed. It exits 1 if a check did not pass.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/fixtures"
)

type options struct {
	kvroute, out, commit, only string
	shared                     string // folder with the reference data, which may be missing

	// Folders that tools/NAME.sh filled. The checks of an empty one are left out.
	clients, dynamo, vllm string
}

// group is the checks of one real program. They run one after the other; a check may use
// programs that an earlier one started.
type group struct {
	name   string               // of the group, and of the flag that names the program's folder
	folder func(options) string // of the program, "" if it is not given
	checks []check
}

// check is one comparison. It ends early with [bench.NoError].
type check struct {
	name  string
	limit time.Duration // for all of it, starting engines included
	run   func(context.Context, *env, *result)
}

func groups() []group {
	return []group{
		{"clients", func(o options) string { return o.clients }, clientChecks()},
		{"dynamo", func(o options) string { return o.dynamo }, dynamoChecks()},
		{"vllm", func(o options) string { return o.vllm }, vllmChecks()},
		{"vllm", func(o options) string { return o.vllm }, pairChecks()},
		{"vllm", func(o options) string { return o.vllm }, hybridChecks()},
	}
}

func main() {
	var o options
	flag.StringVar(&o.kvroute, "kvroute", ".cache/bin/kvroute", "the kvroute to check")
	flag.StringVar(&o.vllm, "vllm", "", "`folder` with vLLM; empty leaves its checks out")
	flag.StringVar(&o.dynamo, "dynamo", "", "`folder` with Dynamo; empty leaves its checks out")
	flag.StringVar(&o.clients, "clients", "", "`folder` with the clients; empty leaves their checks out")
	flag.StringVar(&o.only, "only", "", "run only the checks that have one of these, comma-separated, in \"group name\"")
	flag.StringVar(&o.out, "out", "bench/out", "`folder` for the JSON")
	flag.StringVar(&o.commit, "commit", "", "commit to name in the JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	bench.Exit("interop", func() bool { return run(ctx, o, groups(), os.Stdout) })
}

// run runs the requested checks and returns whether all passed.
func run(ctx context.Context, o options, all []group, w io.Writer) (ok bool) {
	o.shared = bench.Must(fixtures.Dir())
	e := &env{options: o, dir: bench.Must(os.MkdirTemp("", "interop"))}
	defer func() { _ = os.RemoveAll(e.dir) }() // a folder for temporary files may stay
	e.kvroute = bench.Must(filepath.Abs(e.kvroute))
	passed, total := 0, 0
	var figures []bench.Figure
	for _, g := range all {
		n := 0
		for _, c := range g.checks {
			if !wanted(o.only, g.name+" "+c.name) {
				continue
			}
			if n++; g.folder(o) == "" || ctx.Err() != nil {
				continue
			}
			r, err := e.check(ctx, c)
			total++
			if err == nil && r.different == 0 {
				passed++
			}
			figures = append(figures, report(w, g.name+": "+c.name, r, err)...)
		}
		e.endGroup()
		if n > 0 && g.folder(o) == "" {
			fmt.Fprintf(w, "%s: %d checks left out: --%s is not given\n", g.name, n, g.name)
		}
	}
	bench.NoError(ctx.Err())
	if total == 0 {
		bench.NoError(errors.New("nothing was checked: check the name after --only, and give the program of its group (--clients, --dynamo, --vllm)"))
	}
	bench.Must(bench.Report(io.Discard, o.out, bench.NewRun("interop", o.commit, "make test-interop", figures).Part(o.only)))
	bench.Must(fmt.Fprintf(w, "%d of %d checks\n", passed, total))
	return passed == total
}

func wanted(only, name string) bool {
	return only == "" || slices.ContainsFunc(strings.Split(only, ","), func(part string) bool { return part != "" && strings.Contains(name, part) })
}

// report prints the result of a check, and returns it as figures.
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
