// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"text/tabwriter"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/doctor"
)

// printMost is how many findings are printed for people.
const printMost = 60

// compareReplicas reads what router replicas know, and fails if they differ or one of them has a
// fault.
func compareReplicas(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("doctor")
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
	admin := fs.String("envoy-admin", "", "`URL` of an Envoy's admin endpoint: name what its configuration lacks to use kvroute")
	asJSON := fs.Bool("json", false, "print all as JSON")
	if err := parse(fs, args); err != nil {
		return err
	}
	if len(urls) == 0 {
		urls = []string{defaultAPI}
	}
	var sources []doctor.Source
	for _, u := range urls {
		// Each request uses a new connection, so that several replicas behind one URL are noticed.
		from := apiClient{
			url: u, tokenFile: *tokenFile, http: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		}
		if err := from.readToken(); err != nil {
			return err
		}
		sources = append(sources, doctor.Source{URL: u, Read: from.read})
	}
	r, err := doctor.Examine(ctx, sources)
	if err != nil {
		return err
	}
	if *admin != "" {
		r.ExamineEnvoy(ctx, &http.Client{}, *admin)
	}
	write := printReport
	if *asJSON {
		write = writeReport
	}
	if err := write(std.out, r); err != nil {
		return err
	}
	if bad := r.Serious(); bad > 0 {
		return fmt.Errorf("%s, see above", doctor.Counted(bad, "finding"))
	}
	return nil
}

// printReport prints a report for people.
func printReport(out io.Writer, r *doctor.Report) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "replica\turl\tversion\tstate\tworkers\tblocks\trequests\thears")
	for _, x := range r.Replicas {
		if x.Err != nil {
			fmt.Fprintf(w, "%s\t%s\t\tno answer\n", x.Name, x.URL)
			continue
		}
		last := x.Last()
		workers, blocks, requests := last.Sums()
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\n", x.Name, x.URL, last.Version, last.Ready.Status, workers, blocks,
			requests, len(last.Peers))
	}
	fmt.Fprintln(w)
	for i := range r.Findings[:min(len(r.Findings), printMost)] {
		f := &r.Findings[i]
		fmt.Fprintf(w, "%-9s  %s\n", f.Level, strings.TrimSuffix(f.String()+"; "+f.Advice, "; "))
	}
	if more := len(r.Findings) - printMost; more > 0 {
		fmt.Fprintf(w, "... and %d more; --json prints all\n", more)
	}
	fmt.Fprintln(w, r.Summary())
	return w.Flush()
}

// writeReport prints a report for programs.
func writeReport(out io.Writer, r *doctor.Report) error {
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
		Healthy  bool             `json:"healthy"`         // no finding is serious
		Equal    *bool            `json:"equal,omitempty"` // the same, for several replicas
		Summary  string           `json:"summary"`
		Replicas []replica        `json:"replicas"`
		Findings []doctor.Finding `json:"findings"`
	}{Healthy: r.Serious() == 0, Summary: r.Summary(), Findings: append([]doctor.Finding{}, r.Findings...)} // a list in JSON, not null
	if len(r.Replicas) > 1 {
		report.Equal = &report.Healthy
	}
	for _, x := range r.Replicas {
		one := replica{Name: x.Name, URL: x.URL}
		if x.Err != nil {
			one.Error = x.Err.Error()
		} else {
			last := x.Last()
			one.Workers, one.Blocks, one.Requests = last.Sums()
			one.Replica = &last.Replica
		}
		report.Replicas = append(report.Replicas, one)
	}
	return writeJSON(out, report)
}
