// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
)

// env is the state that the checks of a group share.
type env struct {
	options
	dir       string     // of this run: logs, sockets, models
	ends      []func()   // of the running check
	groupEnds []func()   // of its group
	stacks    []*stack   // of the running check
	vllms     *vllmFleet // nil until a check needs it
	sims      []string   // addresses of simulated engines
}

// result is the outcome of a check. A check without cases has failed.
type result struct {
	what             string // both sides of the comparison, as in "overlap with cached_tokens"
	cases, different int
	notes            []string       // a line for each difference, and explanations
	figures          []bench.Figure // measured by the check
}

// differ counts a difference; the first ten are printed.
func (r *result) differ(format string, args ...any) {
	if r.different++; r.different <= 10 {
		r.note(format, args...)
	}
}

func (r *result) note(format string, args ...any) {
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

// try counts a case, and an error of it as a difference, unless the check's time is over.
func (r *result) try(ctx context.Context, what string, compare func()) {
	r.cases++
	if err := bench.Try(compare); err != nil {
		bench.NoError(ctx.Err())
		r.differ("%s: %v", what, err)
	}
}

// check runs a check, and then its ends.
func (e *env) check(ctx context.Context, c check) (r result, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.limit, fmt.Errorf("not done in %v", c.limit))
	defer cancel()
	defer func() {
		callBackwards(e.ends)
		e.ends, e.stacks = nil, nil
	}()
	err = bench.Try(func() { c.run(ctx, e, &r) })
	if err == nil && r.cases == 0 {
		err = errors.New("nothing was compared")
	}
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	if err != nil {
		for _, s := range e.stacks {
			err = fmt.Errorf("%w\n%s:\n%s", err, s.router.Name, s.router.LastLines())
		}
	}
	return r, err
}

// atEnd has f called at the end of the check, in the order of deferred functions.
func (e *env) atEnd(f func()) { e.ends = append(e.ends, f) }

// atGroupEnd is atEnd for the end of the group.
func (e *env) atGroupEnd(f func()) { e.groupEnds = append(e.groupEnds, f) }

func (e *env) endGroup() {
	callBackwards(e.groupEnds)
	e.groupEnds = nil
}

func callBackwards(ends []func()) {
	for _, f := range slices.Backward(ends) {
		f()
	}
}

// start starts a program, whose log goes to the run's folder.
func (e *env) start(name string, environment []string, program string, args ...string) *process.Process {
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), environment...)
	return bench.Must(process.Start(e.dir, name, cmd))
}

// startKvroute starts a command of kvroute's that writes its addresses.
func (e *env) startKvroute(ctx context.Context, name string, args ...string) *process.Child {
	return bench.Must(process.StartChild(ctx, e.dir, name, e.kvroute, args...))
}

// await waits until missing returns "". It fails if the program p, which may be nil, ends or
// the limit passes. An error of missing counts as missing.
func await(ctx context.Context, p *process.Process, limit time.Duration, what string, missing func(context.Context) string) {
	last := ""
	ok := func(ctx context.Context) bool {
		if err := bench.Try(func() { last = missing(ctx) }); err != nil {
			last = err.Error()
		}
		return last == ""
	}
	wait := process.Until
	if p != nil {
		wait = p.Await
	}
	if err := wait(ctx, limit, what, ok); err != nil {
		bench.NoError(fmt.Errorf("%w: %s", err, last))
	}
}

// missingUnless is "" if ok.
func missingUnless(ok bool, format string, args ...any) string {
	if ok {
		return ""
	}
	return fmt.Sprintf(format, args...)
}
