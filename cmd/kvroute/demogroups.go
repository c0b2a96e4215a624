// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/router"
)

// groupRound is the load played through one router of all workers, and through a router
// of groups of them: one that asks the groups about each request, and one that goes by
// what they tell once a second.
type groupRound struct {
	flat, asked, told bench.Summary
	named             float64 // share of the asked ones for which a group named the worker
}

// groupRound plays a round. Which way comes first changes, as in replicaRound.
func (d *demonstration) groupRound(ctx context.Context, round, n int) (r groupRound, err error) {
	for way := range 3 {
		switch (way + round) % 3 {
		case 0:
			r.flat, err = d.flat(ctx)
		case 1:
			if r.asked, err = d.grouped(ctx, "groups, asked", n, "--group-probe", "on"); err == nil {
				r.named, err = d.askedShare(ctx)
			}
		case 2:
			r.told, err = d.grouped(ctx, "by summaries", n, "--group-probe", "off")
		}
		if err != nil {
			return r, err
		}
	}
	return r, nil
}

// flat plays the load through one router of all workers.
func (d *demonstration) flat(ctx context.Context) (bench.Summary, error) {
	d.stopTiers()
	if err := d.startEngines(ctx, "workers", 1); err != nil {
		return bench.Summary{}, err
	}
	if err := d.startRouter(ctx); err != nil {
		return bench.Summary{}, err
	}
	return d.play(ctx, "flat")
}

// grouped plays the load through two tiers. Each group has its share of the workers, an
// Envoy and a router; so has the tier above them. Workers are of the names and kinds that
// flat has, in the order of their names.
func (d *demonstration) grouped(ctx context.Context, title string, n int, flags ...string) (bench.Summary, error) {
	d.stopTiers()
	for i := range n {
		if err := d.startGroup(ctx, i, n); err != nil {
			return bench.Summary{}, fmt.Errorf("group %d: %w", i+1, err)
		}
	}
	file, err := d.upperFile()
	if err != nil {
		return bench.Summary{}, err
	}
	if err := d.startRouter(ctx, append([]string{"--config", file}, flags...)...); err != nil {
		return bench.Summary{}, err
	}
	if err := poll(ctx, patience, "the groups are not heard", d.heard); err != nil {
		return bench.Summary{}, err
	}
	s, err := d.play(ctx, title)
	if err == nil && !d.heard(ctx) {
		err = fmt.Errorf("%s: a group is not heard any more", title)
	}
	return s, err
}

// startGroup starts the i-th of n groups.
func (d *demonstration) startGroup(ctx context.Context, i, n int) error {
	name := fmt.Sprint("group-", i+1)
	first, end := i*d.workers/n, (i+1)*d.workers/n
	g := &demonstration{
		out: d.out, dir: filepath.Join(d.dir, name), envoyPath: d.envoyPath, bus: d.bus,
		workers: end - first, engine: d.engine, load: d.load, core: d.core,
	}
	d.groups = append(d.groups, g)
	if err := os.MkdirAll(g.dir, 0o700); err != nil {
		return err
	}
	if err := g.startEngines(ctx, name, first+1); err != nil {
		return err
	}
	return g.startRouter(ctx, "--group", name, "--component", name, "--allow-direct")
}

// upperFile writes the configuration of the tier above the groups. It hashes prompts as
// they do, so it is given the tokenizer that they have of their workers.
func (d *demonstration) upperFile() (name string, err error) {
	model := filepath.Join(d.dir, "model")
	if _, err := os.Stat(model); err != nil {
		if err := os.CopyFS(model, enginesim.ModelFiles()); err != nil {
			return "", err
		}
	}
	var text strings.Builder
	fmt.Fprintf(&text, "version: 1\ncomponent: tier\nmodels:\n- {name: %q, tokenizer: %q}\ngroups:\n", d.load.Model, model)
	for i, g := range d.groups {
		fmt.Fprintf(&text, "- {name: group-%d, address: %q}\n", i+1, strings.TrimPrefix(g.envoy.URL(), "http://"))
	}
	name = filepath.Join(d.dir, "upper.yaml")
	return name, os.WriteFile(name, []byte(text.String()), 0o600)
}

// heard says whether the upper tier knows what each group does and holds.
func (d *demonstration) heard(ctx context.Context) bool {
	var answer struct{ Workers []router.WorkerState }
	if err := getJSON(ctx, "http://"+d.router.at.HTTP+"/v1/workers", &answer); err != nil || len(answer.Workers) != len(d.groups) {
		return false
	}
	members := 0
	for _, w := range answer.Workers {
		if w.Summary == nil || w.Summary.Stale || !w.Summary.Filtered {
			return false
		}
		members += w.Summary.Members
	}
	return members == d.workers
}

// askedShare returns the share of the last requests for which a group had named the worker.
func (d *demonstration) askedShare(ctx context.Context) (float64, error) {
	var kept struct{ Decisions []router.Decision }
	if err := getJSON(ctx, "http://"+d.router.at.HTTP+"/v1/decisions?limit=1000", &kept); err != nil {
		return 0, err
	}
	n := 0
	for i := range kept.Decisions {
		if kept.Decisions[i].Member != nil {
			n++
		}
	}
	return float64(n) / float64(max(1, len(kept.Decisions))), nil
}

// stopTiers ends all but the bus, the clients of others first.
func (d *demonstration) stopTiers() {
	bus := d.bus
	d.bus = nil
	d.stop()
	d.bus, d.envoy, d.router, d.groups, d.engines = bus, nil, nil, nil, nil
}

// groupFigures compares the ways over all rounds, as figures does.
func groupFigures(played []groupRound) []bench.Figure {
	over := overRounds(played)
	most := func(limit float64) func(float64) bool { return func(v float64) bool { return v <= limit } }
	return []bench.Figure{
		over("mean TTFT, groups by summaries ÷ flat", "≤ 1.15", func(r *groupRound) float64 { return r.told.TTFT.Mean / r.flat.TTFT.Mean }, most(1.15)),
		over("mean E2E, groups by summaries ÷ flat", "≤ 1.05", func(r *groupRound) float64 { return r.told.E2E.Mean / r.flat.E2E.Mean }, most(1.05)),
		over("mean TTFT, groups that are asked ÷ flat", "≤ 1.15", func(r *groupRound) float64 { return r.asked.TTFT.Mean / r.flat.TTFT.Mean }, most(1.15)),
		over("mean E2E, groups that are asked ÷ flat", "≤ 1.05", func(r *groupRound) float64 { return r.asked.E2E.Mean / r.flat.E2E.Mean }, most(1.05)),
		over("asked, and the worker named, share of requests", "", func(r *groupRound) float64 { return r.named }, nil),
		over("mean TTFT in ms, flat", "", func(r *groupRound) float64 { return r.flat.TTFT.Mean * 1e3 }, nil),
		over("mean TTFT in ms, groups by summaries", "", func(r *groupRound) float64 { return r.told.TTFT.Mean * 1e3 }, nil),
		over("mean TTFT in ms, groups that are asked", "", func(r *groupRound) float64 { return r.asked.TTFT.Mean * 1e3 }, nil),
		over("failed requests", "0", func(r *groupRound) float64 {
			return float64(r.flat.Failed() + r.asked.Failed() + r.told.Failed())
		}, most(0)),
	}
}
