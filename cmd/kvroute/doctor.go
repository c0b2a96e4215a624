// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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

const (
	maxReadings  = 25                     // of each replica
	readingEvery = 150 * time.Millisecond // pause between two readings
	readingTime  = 5 * time.Second        // that one may take
	printMost    = 60                     // findings for people
)

// doctor reads what router replicas know, and fails if they differ or one of them has a
// fault. This file reads and prints; diagnose.go compares.
func doctor(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("doctor", std.err)
	var urls []string
	fs.Func("url", "`URL` of a replica's API, once for each (default "+defaultAPI+")", func(s string) error {
		u, err := url.Parse(s)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return errors.New("want http://host:port")
		}
		urls = append(urls, s)
		return nil
	})
	tokenFile := fs.String("api-token-file", "", "`file` whose first line is the token that opens all of them")
	var d examination
	t := &d.tolerance
	fs.IntVar(&t.requests, "tolerate-requests", 0, "`number` of requests in flight by which a worker may differ")
	fs.IntVar(&t.tokens, "tolerate-tokens", 0, "`number` of pending tokens by which a worker may differ")
	fs.IntVar(&t.blocks, "tolerate-blocks", 0, "`number` of cached blocks by which a worker may differ")
	asJSON := fs.Bool("json", false, "print all as JSON")
	if err := parse(fs, args); err != nil {
		return err
	}
	if min(t.requests, t.tokens, t.blocks) < 0 {
		return errors.New("a tolerance is below 0")
	}
	if len(urls) == 0 {
		urls = []string{defaultAPI}
	}
	for _, u := range urls {
		// Each request uses a new connection, so that several replicas behind one URL are noticed.
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		x := examined{api: apiClient{url: u, tokenFile: *tokenFile, http: client}}
		if err := x.api.readToken(); err != nil {
			return err
		}
		d.all = append(d.all, &x)
	}
	findings, err := d.run(ctx)
	if err != nil {
		return err
	}
	write := d.print
	if *asJSON {
		write = d.writeJSON
	}
	if err := write(std.out, findings); err != nil {
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
	tolerance tolerance
}

// examined is a replica and its readings.
type examined struct {
	api      apiClient
	name     string // for people
	readings []reading
	err      error // of the reading that failed; there are no more after it
}

// reading is the data of a replica at one time.
type reading struct {
	api.Replica
	workers    []router.WorkerState
	models     []router.ModelState
	thresholds map[string]string // of models that have thresholds
}

func (x *examined) last() *reading { return &x.readings[len(x.readings)-1] }

func (r *reading) sums() (workers, blocks, requests int) {
	for i := range r.workers {
		blocks += r.workers[i].CachedBlocks
		requests += r.workers[i].ActiveRequests
	}
	return len(r.workers), blocks, requests
}

// run reads all replicas until two readings show no difference, at most maxReadings times.
func (d *examination) run(ctx context.Context) (findings []finding, err error) {
	for n := 1; ; n++ {
		var asked sync.WaitGroup
		for _, x := range d.all {
			if x.err == nil {
				asked.Go(func() { x.err = x.read(ctx) })
			}
		}
		asked.Wait()
		if ctx.Err() != nil {
			return nil, errInterrupted
		}
		if n >= 2 {
			d.nameAll()
			if findings = diagnose(d.all, d.tolerance); n >= maxReadings || count(findings, different) == 0 {
				return findings, nil
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(readingEvery):
		}
	}
}

// nameAll gives each replica a unique name.
func (d *examination) nameAll() {
	seen := map[string]int{}
	for _, x := range d.all {
		x.name = ""
		if len(x.readings) > 0 {
			x.name = x.readings[0].Replica.Replica
		}
		x.name = cmp.Or(x.name, strings.TrimPrefix(x.api.url, "http://"))
		seen[x.name]++
	}
	for i, x := range d.all {
		if seen[x.name] > 1 {
			x.name = fmt.Sprintf("%s#%d", x.name, i+1)
		}
	}
}

// read adds a reading of a replica.
func (x *examined) read(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, readingTime)
	defer cancel()
	var r reading
	var answers struct {
		Workers    []router.WorkerState
		Models     []router.ModelState
		Thresholds []map[string]any
	}
	err = x.api.read(ctx, "/v1/replica", &r.Replica)
	for _, path := range []string{"/v1/workers", "/v1/models", "/busy_threshold"} {
		if err == nil {
			err = x.api.read(ctx, path, &answers)
		}
	}
	if err != nil {
		return err
	}
	r.workers, r.models, r.thresholds = answers.Workers, answers.Models, map[string]string{}
	for _, t := range answers.Thresholds {
		var set []string
		for _, name := range slices.Sorted(maps.Keys(t)) {
			if value := t[name]; value != nil && name != "model" {
				set = append(set, fmt.Sprint(name, " ", value))
			}
		}
		r.thresholds[fmt.Sprint(t["model"])] = strings.Join(set, ", ")
	}
	x.readings = append(x.readings, r)
	return nil
}

// summary returns the result as one line.
func (d *examination) summary(findings []finding) string {
	bad, differ := serious(findings), count(findings, different)
	asked := 0
	var last *reading
	for _, x := range d.all {
		if x.err == nil {
			asked++
			last = x.last()
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

func (d *examination) print(out io.Writer, findings []finding) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "replica\turl\tversion\tstate\tworkers\tblocks\trequests\thears")
	for _, x := range d.all {
		if x.err != nil {
			fmt.Fprintf(w, "%s\t%s\t\tno answer\n", x.name, x.api.url)
			continue
		}
		last := x.last()
		workers, blocks, requests := last.sums()
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\n", x.name, x.api.url, last.Version, last.Ready.Status, workers, blocks, requests, len(last.Peers))
	}
	fmt.Fprintln(w)
	for i := range findings[:min(len(findings), printMost)] {
		fmt.Fprintf(w, "%-9s  %s\n", findings[i].Level, findings[i].text())
	}
	if more := len(findings) - printMost; more > 0 {
		fmt.Fprintf(w, "... and %d more; --json prints all\n", more)
	}
	fmt.Fprintln(w, d.summary(findings))
	return w.Flush()
}

// writeJSON prints the examination for programs.
func (d *examination) writeJSON(out io.Writer, findings []finding) error {
	type replica struct {
		Name     string `json:"name"`
		URL      string `json:"url"`
		Error    string `json:"error,omitempty"`
		Workers  int    `json:"workers"`
		Blocks   int    `json:"cached_blocks"`
		Requests int    `json:"requests_in_flight"`
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
		r := replica{Name: x.name, URL: x.api.url}
		if x.err != nil {
			r.Error = x.err.Error()
		} else {
			last := x.last()
			r.Workers, r.Blocks, r.Requests = last.sums()
			r.Replica = &last.Replica
		}
		report.Replicas = append(report.Replicas, r)
	}
	return writeJSON(out, report)
}
