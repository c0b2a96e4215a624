// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// demo shows the main job: the same load through a real Envoy, first round robin,
// then by cache and load.
func demo(ctx context.Context, args []string, std stdio) (err error) {
	d := demonstration{out: std.out}
	fs := newFlagSet("demo", std.err)
	keep := fs.Bool("keep", false, "leave everything running until Ctrl-C")
	rounds := fs.Int("rounds", 1, "`number` of times to play the load in both modes")
	report := fs.String("report", "", "`folder` that gets the rounds' figures, which are then printed with targets")
	commit := fs.String("commit", "", "commit to name in the report")
	fs.StringVar(&d.envoyPath, "envoy", "", "`path` of an Envoy binary (default: on PATH, or what make envoy installed)")
	fs.BoolVar(&d.core, "core", false, "let events travel without a stream that keeps them")
	replicas := fs.Int("replicas", 1, "`number` of router replicas; above 1 the load is played through one, through so many, and through so many that do not tell each other of their requests")
	groups := fs.Int("groups", 1, "`number` of router groups; above 1 the load is played through one router, and through a router of so many groups that asks them, and that goes by what they tell")
	fs.IntVar(&d.workers, "workers", 4, "`number` of simulated workers; 8 if there are groups")
	preset := fs.String("preset", "32b-2xh100", "their hardware")
	blocks := fs.Int("num-gpu-blocks", 2400, "capacity of each worker's cache in `blocks` of 16 tokens")
	loadFlags(fs, &d.load)
	for name, value := range map[string]string{
		"rate": "10", "conversations": "45", "turns": "4", "turn-gap": "2500ms", "system-prompts": "12", "system-bytes": "36000",
		"user-bytes": "4200", "reply-bytes": "1800", "max-tokens": "40",
	} {
		f := fs.Lookup(name)
		f.DefValue = value
		if err := f.Value.Set(value); err != nil {
			return err
		}
	}
	if err := parse(fs, args); err != nil {
		return err
	}
	if *rounds < 1 || *rounds > 100 {
		return fmt.Errorf("rounds is %d, want 1 to 100", *rounds)
	}
	if d.workers < 1 || d.workers > 64 {
		return fmt.Errorf("workers is %d, want 1 to 64", d.workers)
	}
	if *replicas < 1 || *replicas > 16 {
		return fmt.Errorf("replicas is %d, want 1 to 16", *replicas)
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if *groups > 1 && !given["workers"] {
		d.workers = 8
	}
	if *groups < 1 || *groups > min(16, d.workers) {
		return fmt.Errorf("groups is %d, want 1 to 16, and a worker for each", *groups)
	}
	if *groups > 1 && *replicas > 1 {
		return errors.New("groups and replicas are shown one at a time")
	}
	if (*replicas > 1 || *groups > 1) && !given["rate"] && !given["conversations"] {
		// With little to do it does not matter who knows of what.
		d.load.Rate, d.load.Conversations = 5.5*float64(d.workers), 25*d.workers
	}
	d.engine = []string{"--preset", *preset, "--num-gpu-blocks", fmt.Sprint(*blocks)}
	if d.envoyPath == "" {
		if d.envoyPath, err = envoytest.Find(); err != nil {
			return err
		}
	}
	if d.dir, err = os.MkdirTemp("", "kvroute-demo-"); err != nil {
		return err
	}
	defer func() {
		d.stop()
		err = errors.Join(err, os.RemoveAll(d.dir))
		if ctx.Err() != nil {
			err = errInterrupted
		}
	}()
	if *groups > 1 {
		d.bus, err = startNATS("127.0.0.1:0", "") // who the workers belong to changes
	} else {
		err = d.start(ctx)
	}
	if err != nil {
		return err
	}
	var verdict error
	run := bench.NewRun("bench-demo", *commit, "make bench-demo", nil)
	switch {
	case *groups > 1:
		var played []groupRound
		for i := range *rounds {
			r, err := d.groupRound(ctx, i, *groups)
			if err != nil {
				return err
			}
			d.compare([]column{{"flat", &r.flat}, {"groups, asked", &r.asked}, {"by summaries", &r.told}})
			if n := r.flat.Failed() + r.asked.Failed() + r.told.Failed(); n > 0 {
				verdict = errors.Join(verdict, fmt.Errorf("%d requests failed", n))
			}
			played = append(played, r)
		}
		run = bench.NewRun("bench-demo-groups", *commit, fmt.Sprint("make bench-demo GROUPS=", *groups), groupFigures(played))
	case *replicas > 1:
		var played []replicaRound
		for i := range *rounds {
			r, err := d.replicaRound(ctx, i, *replicas)
			if err != nil {
				return err
			}
			d.compare([]column{{"one", &r.one}, {fmt.Sprint(*replicas, " synced"), &r.synced}, {fmt.Sprint(*replicas, " unsynced"), &r.alone}})
			if n := r.one.Failed() + r.synced.Failed() + r.alone.Failed(); n > 0 {
				verdict = errors.Join(verdict, fmt.Errorf("%d requests failed", n))
			}
			played = append(played, r)
		}
		run = bench.NewRun("bench-demo-replicas", *commit, fmt.Sprint("make bench-demo REPLICAS=", *replicas), replicaFigures(played))
	default:
		var played []round
		for range *rounds {
			r, err := d.round(ctx)
			if err != nil {
				return err
			}
			d.compare([]column{{string(router.RoundRobin), &r.roundRobin}, {string(router.KV), &r.kv}})
			verdict = errors.Join(verdict, judge(&r.roundRobin, &r.kv))
			played = append(played, r)
		}
		run.Figures = figures(played)
	}
	if err := d.twice(ctx); err != nil {
		return err
	}
	if *report != "" {
		fmt.Fprintln(d.out)
		if met, err := bench.Report(d.out, *report, run); err != nil || !met {
			verdict = errors.Join(verdict, err, errors.New("a target was missed"))
		}
	}
	if *keep {
		d.invite()
		<-ctx.Done()
		return nil
	}
	return verdict
}

// demonstration is everything that the demo starts.
type demonstration struct {
	out       io.Writer
	dir       string // logs of the children
	envoyPath string
	workers   int
	engine    []string // flags of the engines
	load      bench.LoadConfig
	core      bool // no stream
	bodyMode  envoy.BodyMode
	failover  envoy.Failover
	poolFile  string            // instead of the engines' addresses
	secure    envoy.Config      // what it says of TLS, of bodies and of time
	replicas  []string          // addresses for Envoy, instead of the router's alone
	dump      *envoytest.Dump   // Envoy's configuration, instead of ours
	edit      *strings.Replacer // changes Envoy's configuration, if not nil
	unrouted  bool              // no request is decided, or none has to be

	bus      *embeddedNATS
	engines  []*child
	router   *child
	others   []*child         // replicas, router among them, if the demo is of several
	groups   []*demonstration // those below the router, if it is one of groups
	envoy    *envoytest.Proc
	reserved []func() // release the ports that children listen at
}

// hold reserves an address for a child that may be started again there.
func (d *demonstration) hold() (address string, err error) {
	address, release, err := envoytest.Hold()
	if err == nil {
		d.reserved = append(d.reserved, release)
	}
	return address, err
}

// start starts what all phases share.
func (d *demonstration) start(ctx context.Context) (err error) {
	if d.bus, err = startNATS("127.0.0.1:0", ""); err != nil {
		return err
	}
	return d.startEngines(ctx, "workers", 1)
}

// startEngines starts the workers, as those of a component, by names that count from first.
func (d *demonstration) startEngines(ctx context.Context, component string, first int) error {
	d.engines = make([]*child, d.workers)
	all, ctx := errgroup.WithContext(ctx)
	for i := range d.engines {
		at, err := d.hold()
		if err != nil {
			return err
		}
		all.Go(func() (err error) {
			name := fmt.Sprint("worker-", first+i)
			d.engines[i], err = startChild(ctx, d.dir, name, append([]string{
				"engine", "--name", name, "--component", component,
				"--listen", at, "--nats-url", d.bus.url(), "--model", d.load.Model, d.durable(),
			}, d.engine...)...)
			return err
		})
	}
	return all.Wait()
}

// durable is the flag that says how events travel.
func (d *demonstration) durable() string { return fmt.Sprint("--durable-kv-events=", !d.core) }

// stop ends everything, the clients of others first.
func (d *demonstration) stop() {
	if d.envoy != nil {
		_ = d.envoy.Stop() // it ends with us in any case
	}
	for _, c := range d.others {
		c.stop()
	}
	if d.router != nil {
		d.router.stop()
	}
	for _, g := range d.groups {
		g.bus = nil // it is ours
		g.stop()
	}
	for _, e := range d.engines {
		if e != nil {
			e.stop()
		}
	}
	if d.bus != nil {
		d.bus.stop()
	}
	for _, release := range d.reserved {
		release()
	}
	d.reserved = nil
}

// round is the load played in both modes.
type round struct{ roundRobin, kv bench.Summary }

func (d *demonstration) round(ctx context.Context) (r round, err error) {
	if r.roundRobin, err = d.phase(ctx, router.RoundRobin); err != nil {
		return r, err
	}
	r.kv, err = d.phase(ctx, router.KV)
	return r, err
}

// figures compares the modes over all rounds. A round's two modes ran minutes
// apart at most, so their ratio is worth more than either.
func figures(played []round) []bench.Figure {
	over := overRounds(played)
	below1 := func(v float64) bool { return v < 1 }
	return []bench.Figure{
		over("mean TTFT, kv ÷ round robin", "< 1", func(r *round) float64 { return r.kv.TTFT.Mean / r.roundRobin.TTFT.Mean }, below1),
		over("p90 TTFT, kv ÷ round robin", "", func(r *round) float64 { return r.kv.TTFT.P90 / r.roundRobin.TTFT.P90 }, nil),
		over("mean E2E, kv ÷ round robin", "< 1", func(r *round) float64 { return r.kv.E2E.Mean / r.roundRobin.E2E.Mean }, below1),
		over("cached share, round robin ÷ kv", "< 1", func(r *round) float64 { return r.roundRobin.CachedShare / r.kv.CachedShare }, below1),
		over("mean TTFT in ms, round robin", "", func(r *round) float64 { return r.roundRobin.TTFT.Mean * 1e3 }, nil),
		over("mean TTFT in ms, kv", "", func(r *round) float64 { return r.kv.TTFT.Mean * 1e3 }, nil),
		over("failed requests", "0", func(r *round) float64 { return float64(r.kv.Failed() + r.roundRobin.Failed()) }, below1),
	}
}

// overRounds makes figures of rounds: what of says of each, and whether the median meets
// the target, if there is one.
func overRounds[R any](played []R) func(what, target string, of func(*R) float64, met func(median float64) bool) bench.Figure {
	return func(what, target string, of func(*R) float64, met func(float64) bool) bench.Figure {
		var v []float64
		for i := range played {
			v = append(v, of(&played[i]))
		}
		slices.Sort(v)
		f := bench.Figure{What: what, Target: target, Median: v[len(v)/2], Min: v[0], Max: v[len(v)-1]}
		f.Met = target != "" && met(f.Median)
		return f
	}
}

// phase plays the load against a router that was just started in the given mode,
// with workers whose caches are empty.
func (d *demonstration) phase(ctx context.Context, mode router.Mode) (bench.Summary, error) {
	if err := d.emptyCaches(ctx); err != nil {
		return bench.Summary{}, err
	}
	if err := d.startRouter(ctx, "--router-mode", string(mode)); err != nil {
		return bench.Summary{}, err
	}
	return d.play(ctx, string(mode))
}

func (d *demonstration) emptyCaches(ctx context.Context) error {
	for _, e := range d.engines {
		if err := post(ctx, "http://"+e.at.HTTP+"/reset_prefix_cache"); err != nil {
			return fmt.Errorf("empty the cache of %s: %w", e.name, err)
		}
	}
	return nil
}

// play plays the load through Envoy.
func (d *demonstration) play(ctx context.Context, title string) (bench.Summary, error) {
	d.load.URL = d.envoy.URL()
	bar := progressBar{out: d.out, title: title}
	show := func(done, total int) {
		if ctx.Err() == nil { // requests that are given up are not done
			bar.show(done, total)
		}
	}
	return bench.Load(ctx, d.load, show, nil)
}

// startRouter starts kvroute in place of the one before, and waits until requests
// through Envoy are decided by it.
func (d *demonstration) startRouter(ctx context.Context, flags ...string) (err error) {
	var extprocAt, httpAt string
	if d.router != nil { // Envoy knows the address of the one before
		extprocAt, httpAt = d.router.at.Extproc, d.router.at.HTTP
		d.router.stop()
		d.router = nil
	} else {
		if extprocAt, err = d.hold(); err != nil {
			return err
		}
		if httpAt, err = d.hold(); err != nil {
			return err
		}
	}
	flags = append([]string{
		"serve", "--decision-headers", "--extproc-address", extprocAt, "--http-address", httpAt,
		"--nats-url", d.bus.url(), "--drain-timeout", "1s", "--drain-delay", "0", d.durable(),
	}, flags...)
	if d.router, err = startChild(ctx, d.dir, "kvroute", flags...); err != nil {
		return err
	}
	if err := d.waitWorkers(ctx); err != nil {
		return err
	}
	if d.envoy == nil {
		if err := d.startEnvoy(ctx); err != nil {
			return err
		}
	}
	if d.unrouted {
		return nil
	}
	return d.waitRouted(ctx)
}

func (d *demonstration) startEnvoy(ctx context.Context) (err error) {
	c := envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", BodyMode: d.bodyMode, Failover: d.failover, PoolFile: d.poolFile, ExtProc: []string{d.router.at.Extproc}}
	if len(d.replicas) > 0 {
		c.ExtProc = d.replicas
	}
	c.CA, c.Cert, c.Key, c.ServerName = d.secure.CA, d.secure.Cert, d.secure.Key, d.secure.ServerName
	c.MaxBodyBytes, c.MessageTimeout, c.MaxMessageTimeout = d.secure.MaxBodyBytes, d.secure.MessageTimeout, d.secure.MaxMessageTimeout
	c.RequestTimeout, c.IdleTimeout, c.WorkerHTTP2 = d.secure.RequestTimeout, d.secure.IdleTimeout, d.secure.WorkerHTTP2
	c.EngineLoad, c.NoObserver, c.Pool = d.secure.EngineLoad, d.secure.NoObserver, slices.Clone(d.secure.Pool)
	for _, e := range d.engines {
		if d.poolFile == "" {
			c.Pool = append(c.Pool, e.at.HTTP)
		}
	}
	var text bytes.Buffer
	if d.dump != nil {
		boot, err := d.dump.Bootstrap(map[string]string{
			"10.0.0.2:9002": d.router.at.Extproc, "10.0.1.1:8000": c.Pool[0], "10.0.1.2:8000": c.Pool[1],
		})
		if err != nil {
			return err
		}
		text.Write(boot)
	} else if err := envoy.Render(&text, c); err != nil {
		return err
	}
	config := text.Bytes()
	if d.edit != nil {
		config = []byte(d.edit.Replace(text.String()))
	}
	d.envoy, err = envoytest.Start(ctx, envoytest.Options{Path: d.envoyPath, Config: config})
	return err
}

// waitWorkers waits until the router knows all workers, or groups.
func (d *demonstration) waitWorkers(ctx context.Context) error {
	want := d.workers
	if len(d.groups) > 0 {
		want = len(d.groups)
	}
	return poll(ctx, patience, "the workers do not register", func(ctx context.Context) bool {
		var answer struct{ Workers []router.WorkerState }
		err := getJSON(ctx, "http://"+d.router.at.HTTP+"/v1/workers", &answer)
		return err == nil && len(answer.Workers) >= want // there may be others than ours
	})
}

// waitRouted waits until Envoy asks kvroute about a request. While kvroute restarts, a health
// check of Envoy may fail, and Envoy's worker thread may learn it after a first request was
// routed. So Envoy's main thread is asked first.
func (d *demonstration) waitRouted(ctx context.Context) error {
	return poll(ctx, patience, "Envoy does not find kvroute", func(ctx context.Context) bool {
		hosts, err := fetch(ctx, http.DefaultClient, http.MethodGet, d.envoy.AdminURL()+"/clusters")
		if err != nil || bytes.Contains(hosts, []byte(d.router.at.Extproc+"::health_flags::/failed_active_hc")) {
			return false
		}
		if _, err := d.ask(ctx, "Are you there?"); err != nil {
			return false
		}
		var kept struct{ Decisions []router.Decision }
		err = getJSON(ctx, "http://"+d.router.at.HTTP+"/v1/decisions", &kept)
		return err == nil && len(kept.Decisions) > 0
	})
}

// patience is far above what anything here takes on a busy machine.
const patience = time.Minute

// poll asks until the answer is yes, for a limited time.
func poll(ctx context.Context, limit time.Duration, otherwise string, ask func(context.Context) bool) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for !ask(limited) {
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return errors.New(otherwise)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

// told is what the headers of a response tell of its routing.
type told struct{ name, overlap, reason string }

// ask sends one request that is not part of the load.
func (d *demonstration) ask(ctx context.Context, content string) (told, error) {
	body, err := json.Marshal(map[string]any{
		"model": d.load.Model, "max_tokens": 4,
		"messages": []map[string]string{{"role": "user", "content": content}},
	})
	if err != nil {
		return told{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.envoy.URL()+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return told{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return told{}, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return told{}, err
	}
	if resp.StatusCode != http.StatusOK {
		return told{}, fmt.Errorf("status %d", resp.StatusCode)
	}
	h := resp.Header
	return told{h.Get("X-Sim-Worker"), h.Get("X-Dynamo-Overlap-Blocks"), h.Get("X-Dynamo-Reason")}, nil
}

// twice asks the same thing again, and shows what kvroute says each time.
func (d *demonstration) twice(ctx context.Context) error {
	question := strings.Repeat("Why is the same question answered sooner the second time? ", 6)
	fmt.Fprintln(d.out, "\nThe same conversation, asked twice:")
	for _, when := range []string{"first", "again"} {
		reply, err := d.ask(ctx, question)
		if err != nil {
			return fmt.Errorf("ask through Envoy: %w", err)
		}
		fmt.Fprintf(d.out, "  %s: %s, overlap %s blocks, reason %s\n", when, reply.name, reply.overlap, reply.reason)
		select { // the worker's events travel some milliseconds
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(300 * time.Millisecond):
		}
	}
	return nil
}

// column is one way in which the load was played.
type column struct {
	title string
	*bench.Summary
}

func (d *demonstration) compare(columns []column) {
	line := func(what string, cell func(column) string) {
		fmt.Fprintf(d.out, "  %-22s", what)
		for _, c := range columns {
			fmt.Fprintf(d.out, " %14s", cell(c))
		}
		fmt.Fprintln(d.out)
	}
	row := func(what, format string, v func(*bench.Summary) any) {
		line(what, func(c column) string { return fmt.Sprintf(format, v(c.Summary)) })
	}
	fmt.Fprintln(d.out)
	line("", func(c column) string { return c.title })
	row("requests", "%d", func(s *bench.Summary) any { return s.Requests })
	row("errors", "%d", func(s *bench.Summary) any { return s.Failed() })
	row("TTFT mean", "%.0f ms", func(s *bench.Summary) any { return s.TTFT.Mean * 1e3 })
	row("TTFT p50", "%.0f ms", func(s *bench.Summary) any { return s.TTFT.P50 * 1e3 })
	row("TTFT p90", "%.0f ms", func(s *bench.Summary) any { return s.TTFT.P90 * 1e3 })
	row("E2E mean", "%.0f ms", func(s *bench.Summary) any { return s.E2E.Mean * 1e3 })
	row("E2E p90", "%.0f ms", func(s *bench.Summary) any { return s.E2E.P90 * 1e3 })
	row("cached prompt tokens", "%.1f %%", func(s *bench.Summary) any { return s.CachedShare * 100 })
	names := slices.Sorted(maps.Keys(columns[0].PerWorker))
	for _, name := range names {
		row("requests of "+name, "%d", func(s *bench.Summary) any { return s.PerWorker[name] })
	}
	for _, c := range columns {
		for kind, n := range c.Errors {
			fmt.Fprintf(d.out, "  %d requests failed: %s\n", n, kind)
		}
	}
}

// judge says whether the demo showed what it is to show.
func judge(roundRobin, kv *bench.Summary) error {
	var errs []error
	if n := roundRobin.Failed() + kv.Failed(); n > 0 {
		errs = append(errs, fmt.Errorf("%d requests failed", n))
	}
	if kv.TTFT.Mean >= roundRobin.TTFT.Mean {
		errs = append(errs, errors.New("the mean TTFT of kv is not better"))
	}
	if kv.CachedShare <= roundRobin.CachedShare {
		errs = append(errs, errors.New("the cached share of kv is not better"))
	}
	return errors.Join(errs...)
}

func (d *demonstration) invite() {
	fmt.Fprintf(d.out, `
Everything is still running; Ctrl-C ends it.
  clients    %s
  kvroute    http://%s/v1/workers  /v1/decisions  /metrics
  Envoy      %s
Try, twice:
  curl -i %s/v1/chat/completions -H 'content-type: application/json' \
    -d '{"model":"%s","max_tokens":8,"messages":[{"role":"user","content":"Tell me which worker has my blocks, and how it came to have them."}]}'
`, d.envoy.URL(), d.router.at.HTTP, d.envoy.AdminURL(), d.envoy.URL(), d.load.Model)
}

func post(ctx context.Context, url string) error {
	_, err := fetch(ctx, http.DefaultClient, http.MethodPost, url)
	return err
}

// progressBar shows how far a load has come: on a terminal as a bar that grows,
// elsewhere as a few lines.
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
