// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
)

// The doctor asks router replicas what they know and says where they differ. This file
// asks and prints; diagnose.go compares.

// readTime is how long a replica may take for an answer.
const readTime = 5 * time.Second

// doctor compares what router replicas know. It fails if they differ, or one of them
// has a fault of its own.
func doctor(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("doctor", std.err)
	var urls []string
	fs.Func("url", "`URL` of a replica's API, once for each (default http://127.0.0.1:9003)", func(s string) error {
		u, err := url.Parse(s)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return errors.New("want http://host:port")
		}
		urls = append(urls, strings.TrimRight(s, "/"))
		return nil
	})
	var from apiFlags
	fs.StringVar(&from.tokenFile, "api-token-file", "", "`file` whose first line is the token that opens all of them")
	readings := fs.Int("readings", 5, "`number` of times that replicas are asked before they are said to differ")
	apart := fs.Duration("apart", 150*time.Millisecond, "`time` between two of them")
	var t tolerance
	fs.IntVar(&t.requests, "tolerate-requests", 0, "`number` of requests in flight by which a worker may differ")
	fs.IntVar(&t.tokens, "tolerate-tokens", 0, "`number` of pending tokens by which a worker may differ")
	fs.IntVar(&t.blocks, "tolerate-blocks", 0, "`number` of cached blocks by which a worker may differ")
	fs.DurationVar(&t.clock, "tolerate-clock", time.Second, "`time` by which clocks may differ unsaid")
	contents := fs.Bool("contents", false, "compare which blocks are cached, not only how many: reads each index whole")
	asJSON := fs.Bool("json", false, "print all as JSON")
	if err := parse(fs, args); err != nil {
		return err
	}
	if *readings < 2 || *readings > 100 || *apart < 0 || *apart > time.Minute {
		return fmt.Errorf("readings is %d and apart %v, want 2 to 100, at most 1m apart", *readings, *apart)
	}
	if t.requests < 0 || t.tokens < 0 || t.blocks < 0 || t.clock < 0 {
		return errors.New("a tolerance is below 0")
	}
	if len(urls) == 0 {
		urls = []string{"http://127.0.0.1:9003"}
	}
	d := examination{apart: *apart, contents: *contents, tolerance: t}
	var err error
	if d.token, err = from.token(); err != nil {
		return err
	}
	for _, u := range urls {
		// A new connection for each question: a balancer in between shows.
		d.all = append(d.all, &examined{url: u, client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}})
	}
	findings, err := d.run(ctx, *readings)
	if err != nil {
		return err
	}
	if *asJSON {
		err = d.writeJSON(std.out, findings)
	} else {
		err = d.print(std.out, findings)
	}
	if err != nil {
		return err
	}
	if bad := serious(findings); bad > 0 {
		return fmt.Errorf("%s, see above", counted(bad, "finding"))
	}
	return nil
}

// examination is one comparison of replicas.
type examination struct {
	all       []*examined
	token     string
	apart     time.Duration
	contents  bool
	tolerance tolerance
}

// examined is a replica and what it said.
type examined struct {
	url    string
	client *http.Client
	name   string // for people
	err    error  // why it said nothing more

	readings []reading
	ahead    time.Duration // its clock, before ours
	contents map[router.Worker]uint64
}

// reading is what a replica said at one time.
type reading struct {
	api.Replica
	workers    []router.WorkerState
	models     []router.ModelState
	thresholds map[string]string // of models that have some
}

// run asks all until two readings show no difference, or so many times.
func (d *examination) run(ctx context.Context, readings int) (findings []finding, err error) {
	for n := 1; ; n++ {
		d.each(func(x *examined) { x.read(ctx, d.token, d.contents && n >= 2) })
		if ctx.Err() != nil {
			return nil, errInterrupted
		}
		if n >= 2 {
			nameAll(d.all)
			if findings = diagnose(d.all, d.tolerance); n >= readings || differences(findings) == 0 {
				return findings, nil
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(d.apart):
		}
	}
}

// each has all replicas asked at once.
func (d *examination) each(ask func(*examined)) {
	var all sync.WaitGroup
	for _, x := range d.all {
		if x.err == nil {
			all.Go(func() { ask(x) })
		}
	}
	all.Wait()
}

// read asks a replica for all there is to compare.
func (x *examined) read(ctx context.Context, token string, contents bool) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	var r reading
	var workers struct{ Workers []router.WorkerState }
	var models struct{ Models []router.ModelState }
	var thresholds struct{ Thresholds []map[string]any }
	begin := time.Now()
	err := x.get(ctx, token, "/v1/replica", &r.Replica)
	took := time.Since(begin)
	err = cmp.Or(err, x.get(ctx, token, "/v1/workers", &workers), x.get(ctx, token, "/v1/models", &models), x.get(ctx, token, "/busy_threshold", &thresholds))
	if err == nil && contents {
		x.contents, err = x.dump(ctx, token)
	}
	if err != nil {
		x.err = err
		return
	}
	r.workers, r.models, r.thresholds = workers.Workers, models.Models, map[string]string{}
	for _, t := range thresholds.Thresholds {
		var set []string
		for _, name := range slices.Sorted(maps.Keys(t)) {
			if value := t[name]; value != nil && name != "model" {
				set = append(set, name+" "+shown(value))
			}
		}
		r.thresholds[shown(t["model"])] = strings.Join(set, ", ")
	}
	x.ahead = time.UnixMilli(r.NowMS).Sub(begin.Add(took / 2))
	x.readings = append(x.readings, r)
}

func (x *examined) get(ctx context.Context, token, path string, into any) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	resp, err := open(ctx, x.client, http.MethodGet, x.url+path, token)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, fetchMax)).Decode(into); err != nil {
		return fmt.Errorf("read the answer of %s%s: %w", x.url, path, err)
	}
	return nil
}

// dump works out a digest of what each worker is known to hold.
func (x *examined) dump(ctx context.Context, token string) (map[router.Worker]uint64, error) {
	resp, err := open(ctx, x.client, http.MethodGet, x.url+"/v1/index/dump?sort=1", token)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	digests := map[router.Worker]uint64{}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if bytes.HasPrefix(lines.Bytes(), []byte(`{"kvroute_end":`)) {
			return digests, nil
		}
		var line struct {
			router.Worker
			Tier  string `json:"storage_tier"`
			Event struct {
				Data struct {
					Stored struct {
						Start  *uint64 `json:"start_position"`
						Blocks []struct {
							Tokens uint64 `json:"tokens_hash"`
						}
					}
				}
			}
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return nil, fmt.Errorf("read the dump of %s: %w", x.url, err)
		}
		stored := &line.Event.Data.Stored
		for _, b := range stored.Blocks {
			// They come in an order that replicas agree on, which makes the digest's.
			h := fnv.New64a()
			var n [8]byte
			for _, v := range []uint64{digests[line.Worker], b.Tokens, *cmp.Or(stored.Start, new(uint64))} {
				binary.LittleEndian.PutUint64(n[:], v)
				_, _ = h.Write(n[:]) // a hash takes all
			}
			_, _ = io.WriteString(h, line.Tier)
			digests[line.Worker] = h.Sum64()
		}
	}
	return nil, cmp.Or(lines.Err(), errors.New("the dump of "+x.url+" ends in the middle"))
}

// summary says in a line how it went.
func (d *examination) summary(findings []finding) string {
	bad, differ := serious(findings), differences(findings)
	asked := 0
	var last *reading
	for _, x := range d.all {
		if n := len(x.readings); x.err == nil && n > 0 {
			asked++
			last = &x.readings[n-1]
		}
	}
	switch {
	case last == nil:
		return "none of the replicas answers"
	case differ > 0:
		return fmt.Sprintf("different: %s, %s, among %s", counted(differ, "difference"), counted(bad-differ, "fault"), counted(asked, "replica"))
	}
	workers, blocks, requests := last.sums()
	verdict := "equal"
	if bad > 0 {
		verdict = "no difference, but " + counted(bad, "fault")
	}
	return fmt.Sprintf("%s: %s, %s, %s, %s in flight", verdict, counted(asked, "replica"), counted(workers, "worker"), counted(blocks, "cached block"), counted(requests, "request"))
}

func counted(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}

// printMost is how many findings are printed for people.
const printMost = 60

func (d *examination) print(out io.Writer, findings []finding) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "replica\turl\tversion\tstate\tworkers\tblocks\trequests\thears\tclock")
	for _, x := range d.all {
		if x.err != nil {
			fmt.Fprintf(w, "%s\t%s\t\tno answer\n", x.name, x.url)
			continue
		}
		last := &x.readings[len(x.readings)-1]
		workers, blocks, requests := last.sums()
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%+d ms\n", x.name, x.url, last.Version, last.Ready.Status, workers, blocks, requests, len(last.Peers), x.ahead.Milliseconds())
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(findings) > 0 {
		fmt.Fprintln(out)
	}
	rows := 0
	for i := range findings {
		if rows++; rows > printMost {
			fmt.Fprintf(out, "... and %d more; --json prints all\n", len(findings)-printMost)
			break
		}
		fmt.Fprintf(out, "%-9s  %s\n", findings[i].Level, findings[i].text())
	}
	if err := d.printTable(out, findings); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%s\n", d.summary(findings))
	return err
}

// printTable prints the differences with a column for each replica.
func (d *examination) printTable(out io.Writer, findings []finding) error {
	if differences(findings) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprint(w, "\nwhat differs\tof")
	for _, x := range d.all {
		fmt.Fprintf(w, "\t%s", x.name)
	}
	fmt.Fprintln(w)
	rows := 0
	for i := range findings {
		f := &findings[i]
		if len(f.Values) == 0 {
			continue
		}
		if rows++; rows > printMost {
			break
		}
		fmt.Fprintf(w, "%s\t%s", f.What, f.Of)
		for _, x := range d.all {
			fmt.Fprintf(w, "\t%s", cmp.Or(f.Values[x.name], "-"))
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

// writeJSON prints all, for programs.
func (d *examination) writeJSON(out io.Writer, findings []finding) error {
	type replica struct {
		Name     string `json:"name"`
		URL      string `json:"url"`
		Error    string `json:"error,omitempty"`
		Workers  int    `json:"workers"`
		Blocks   int    `json:"cached_blocks"`
		Requests int    `json:"requests_in_flight"`
		AheadMS  int64  `json:"ahead_ms"`
		*api.Replica
	}
	report := struct {
		Equal    bool      `json:"equal"`
		Summary  string    `json:"summary"`
		Replicas []replica `json:"replicas"`
		Findings []finding `json:"findings"`
	}{Equal: serious(findings) == 0, Summary: d.summary(findings), Findings: findings}
	if findings == nil {
		report.Findings = []finding{} // a list in JSON, not null
	}
	for _, x := range d.all {
		r := replica{Name: x.name, URL: x.url}
		if x.err != nil {
			r.Error = x.err.Error()
		} else {
			last := &x.readings[len(x.readings)-1]
			r.Workers, r.Blocks, r.Requests = last.sums()
			r.AheadMS, r.Replica = x.ahead.Milliseconds(), &last.Replica
		}
		report.Replicas = append(report.Replicas, r)
	}
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(report)
}
