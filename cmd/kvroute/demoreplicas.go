// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// replicaRound is the load played through one replica, through several that tell each
// other of their requests, and through as many that do not.
type replicaRound struct{ one, synced, alone bench.Summary }

// replicaRound plays a round. Which way comes first changes from round to round: what
// the machine does beside it changes, too.
func (d *demonstration) replicaRound(ctx context.Context, round, n int) (r replicaRound, err error) {
	for way := range 3 {
		switch (way + round) % 3 {
		case 0:
			r.one, err = d.replicated(ctx, "one", 1)
		case 1:
			if r.synced, err = d.replicated(ctx, fmt.Sprint(n, " synced"), n); err == nil {
				err = d.agree(ctx)
			}
		case 2:
			r.alone, err = d.replicated(ctx, fmt.Sprint(n, " unsynced"), n, "--router-replica-sync=false")
		}
		if err != nil {
			return r, err
		}
	}
	return r, nil
}

// replicated plays the load against so many replicas that were just started, behind an
// Envoy that spreads requests over them, with workers whose caches are empty.
func (d *demonstration) replicated(ctx context.Context, title string, n int, flags ...string) (bench.Summary, error) {
	if err := d.emptyCaches(ctx); err != nil {
		return bench.Summary{}, err
	}
	d.stopRouters()
	d.replicas = nil
	for i := range n {
		c, err := startChild(ctx, d.dir, fmt.Sprint("kvroute-", i+1), append([]string{
			"serve", "--decision-headers", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--replica", fmt.Sprint("kvroute-", i+1),
			"--nats-url", d.bus.url(), "--drain-timeout", "1s", "--drain-delay", "0", d.durable(),
		}, flags...)...)
		if err != nil {
			return bench.Summary{}, err
		}
		d.others, d.router = append(d.others, c), c
		d.replicas = append(d.replicas, c.at.Extproc)
		if err := d.waitWorkers(ctx); err != nil {
			return bench.Summary{}, err
		}
	}
	if err := d.startEnvoy(ctx); err != nil {
		return bench.Summary{}, err
	}
	if err := poll(ctx, patience, "Envoy does not find all replicas", func(ctx context.Context) bool {
		healthy, err := d.envoy.Stat(ctx, "cluster.kvroute.membership_healthy")
		return err == nil && healthy == int64(n)
	}); err != nil {
		return bench.Summary{}, err
	}
	if err := d.waitRouted(ctx); err != nil {
		return bench.Summary{}, err
	}
	return d.play(ctx, title)
}

// stopRouters ends Envoy and all replicas.
func (d *demonstration) stopRouters() {
	if d.envoy != nil {
		_ = d.envoy.Stop() // it ends with us in any case
		d.envoy = nil
	}
	for _, c := range d.others {
		c.stop()
	}
	d.others, d.router = nil, nil
}

// agree asks the replicas whether they know the same.
func (d *demonstration) agree(ctx context.Context) error {
	e := examination{apart: 200 * time.Millisecond}
	for _, c := range d.others {
		e.all = append(e.all, &examined{url: "http://" + c.at.HTTP, client: http.DefaultClient})
	}
	findings, err := e.run(ctx, 25)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "kvroute doctor: %s\n", e.summary(findings))
	if serious(findings) > 0 {
		return errors.Join(e.print(d.out, findings), errors.New("the replicas differ"))
	}
	return nil
}

// replicaFigures compares the ways over all rounds, as figures does.
func replicaFigures(played []replicaRound) []bench.Figure {
	over := overRounds(played)
	return []bench.Figure{
		over("mean TTFT, several replicas ÷ one", "≤ 1.1", func(r *replicaRound) float64 { return r.synced.TTFT.Mean / r.one.TTFT.Mean }, func(v float64) bool { return v <= 1.1 }),
		over("mean TTFT, without sync ÷ with", "> 1", func(r *replicaRound) float64 { return r.alone.TTFT.Mean / r.synced.TTFT.Mean }, func(v float64) bool { return v > 1 }),
		over("p90 TTFT, several replicas ÷ one", "", func(r *replicaRound) float64 { return r.synced.TTFT.P90 / r.one.TTFT.P90 }, nil),
		over("p90 TTFT, without sync ÷ with", "", func(r *replicaRound) float64 { return r.alone.TTFT.P90 / r.synced.TTFT.P90 }, nil),
		over("mean TTFT in ms, one", "", func(r *replicaRound) float64 { return r.one.TTFT.Mean * 1e3 }, nil),
		over("mean TTFT in ms, several", "", func(r *replicaRound) float64 { return r.synced.TTFT.Mean * 1e3 }, nil),
		over("mean TTFT in ms, without sync", "", func(r *replicaRound) float64 { return r.alone.TTFT.Mean * 1e3 }, nil),
		over("failed requests", "0", func(r *replicaRound) float64 {
			return float64(r.one.Failed() + r.synced.Failed() + r.alone.Failed())
		}, func(v float64) bool { return v < 1 }),
	}
}
