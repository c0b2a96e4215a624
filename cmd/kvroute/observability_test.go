// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
)

const observability = "../../examples/observability"

type alertRule struct {
	Alert, Expr         string
	Annotations, Labels map[string]string
}

func alertRules(t *testing.T) []alertRule {
	t.Helper()
	var file struct {
		Groups []struct{ Rules []alertRule }
	}
	text, err := os.ReadFile(observability + "/alerts.yaml")
	if err == nil {
		err = yaml.Unmarshal(text, &file)
	}
	if err != nil || len(file.Groups) != 1 || len(file.Groups[0].Rules) < 10 {
		t.Fatalf("alerts.yaml: %v, %+v", err, file)
	}
	return file.Groups[0].Rules
}

// panelQueries returns the queries of the Grafana dashboard, with its variables filled in, by panel.
func panelQueries(t *testing.T) map[string]string {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	text, err := os.ReadFile(observability + "/dashboard.json")
	if err == nil {
		err = json.Unmarshal(text, &dashboard)
	}
	if err != nil {
		t.Fatal(err)
	}
	queries := map[string]string{}
	fill := strings.NewReplacer("$__rate_interval", "1m", "$job", "kvroute", "$model", ".*", "$worker", ".*")
	for _, p := range dashboard.Panels {
		for i, target := range p.Targets {
			if !strings.Contains(target.Expr, `job=~"$job"`) {
				t.Errorf("%s: the query does not select the job: %s", p.Title, target.Expr)
			}
			queries[fmt.Sprint(p.Title, " ", i)] = fill.Replace(target.Expr)
		}
	}
	if len(queries) < 40 {
		t.Fatalf("%d queries", len(queries))
	}
	return queries
}

// Alerts and panels use metrics that docs/metrics.md lists, and each alert has a paragraph that says what
// to do.
func TestAlertsAndPanelsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `((?:kvroute|gen_ai)[^`]+)` \\| ([^ |]*)").FindAllStringSubmatch(string(text), -1) {
		name := strings.ReplaceAll(m[1], ".", "_") + map[string]string{"s": "_seconds", "By": "_bytes"}[m[2]]
		for _, suffix := range []string{"", "_total", "_bucket", "_sum", "_count"} {
			documented[name+suffix] = true
		}
	}
	check := func(where, query string) {
		names := regexp.MustCompile(`\b(?:kvroute|gen_ai)_[a-z_]+`).FindAllString(regexp.MustCompile(`\{[^}]*\}|\bby \([^)]*\)`).ReplaceAllString(query, ""), -1)
		for _, name := range names {
			if !documented[name] {
				t.Errorf("%s: docs/metrics.md does not list %s", where, name)
			}
		}
		if len(names) == 0 && !strings.Contains(query, "up{") && !strings.Contains(query, "process_") {
			t.Errorf("%s has no metric: %s", where, query)
		}
	}
	runbook, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range alertRules(t) {
		check(r.Alert, r.Expr)
		if !strings.Contains(string(runbook), "\n### "+r.Alert+"\n") || !strings.HasSuffix(r.Annotations["runbook_url"], "docs/troubleshooting.md#"+strings.ToLower(r.Alert)) {
			t.Errorf("%s has no paragraph in docs/troubleshooting.md, or does not name it: %s", r.Alert, r.Annotations["runbook_url"])
		}
		if row := fmt.Sprintf("\n| [%s](troubleshooting.md#%s) | %s | ", r.Alert, strings.ToLower(r.Alert), r.Labels["severity"]); !strings.Contains(string(text), row) {
			t.Errorf("docs/metrics.md does not list %s with its severity", r.Alert)
		}
	}
	for where, query := range panelQueries(t) {
		check(where, query)
	}
}

// ofPrometheus returns the path of Prometheus. Without it the test ends: as passed with a
// sentence in a short run, as failed in a long one.
func ofPrometheus(t *testing.T) (path string, there bool) {
	t.Helper()
	path, err := exec.LookPath("prometheus")
	if err != nil {
		say := t.Logf
		if fixtures.Long() {
			say = t.Errorf
		}
		say("prometheus was not run: it is not on PATH. Install it (on Debian: apt-get install prometheus) to check examples/observability.")
	}
	return path, err == nil
}

// findPromtool returns the path of the promtool that `make promtool` built. Without it the test fails.
func findPromtool(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../.cache/bin/promtool")
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("there is no promtool, run make promtool: %v", err)
	}
	return path
}

func TestPromtoolAcceptsTheRules(t *testing.T) {
	if testing.Short() {
		t.Skip("needs promtool, which takes minutes to build")
	}
	promtool := findPromtool(t)
	for _, args := range []string{"check rules alerts.yaml", "check config prometheus.yaml", "test rules alerts_test.yaml"} {
		cmd := exec.CommandContext(t.Context(), promtool, strings.Fields(args)...)
		cmd.Dir = observability
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", args, err, out)
		}
	}
	text, err := os.ReadFile(observability + "/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range alertRules(t) {
		if n := strings.Count(string(text), "alertname: "+r.Alert+"\n"); n < 2 {
			t.Errorf("alerts_test.yaml has %d cases of %s, want one in which it fires and one in which it does not", n, r.Alert)
		}
	}
}

// A real Prometheus accepts each query, and finds the figures of a kvroute that serves requests.
func TestPrometheusReadsTheFigures(t *testing.T) {
	path, there := ofPrometheus(t)
	if !there {
		return
	}
	d := startStack(t, 2, []string{"--speed", "50"}, "--audit-share", "1")
	dir := t.TempDir()
	config := fmt.Sprintf("global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n- {job_name: kvroute, static_configs: [{targets: [%q]}]}\n", d.Router.At.HTTP)
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	listen := fmt.Sprint("127.0.0.1:", fixtures.HoldPort(t))
	prometheus, err := process.Start(dir, "prometheus", exec.Command(path, "--config.file", filepath.Join(dir, "prometheus.yaml"),
		"--storage.tsdb.path", filepath.Join(dir, "data"), "--web.listen-address", listen))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		prometheus.Stop()
		http.DefaultClient.CloseIdleConnections()
	})
	query := func(expr string) (series int, err error) {
		var response struct {
			Status, Error string
			Data          struct{ Result []json.RawMessage }
		}
		if err := process.GetJSON(t.Context(), "http://"+listen+"/api/v1/query?query="+url.QueryEscape(expr), &response); err != nil {
			return 0, err
		}
		if response.Status != "success" {
			return 0, fmt.Errorf("%s: %s", expr, response.Error)
		}
		return len(response.Data.Result), nil
	}
	serve := func() {
		body := strings.Replace(chatBody(strings.Repeat("What is in the cache? ", 40), 4, true), "{", `{"stream_options":{"include_usage":true},`, 1)
		if resp, text := reply(t, d, http.MethodPost, chatPath, body, nil); resp.StatusCode != http.StatusOK {
			t.Fatal(text)
		}
	}
	queries := panelQueries(t)
	present := []string{
		"Requests 0", "Time to first token 0", "Request duration 0", "Time per output token 0", "Cached share of prompt tokens 0", "Cached share of prompt tokens 2",
		"Prefill tokens saved against a random choice 0", "Decisions by reason 0", "Audit 0", "Health 0", "Cached blocks 0", "Requests and failures 0", "Memory 0",
	}
	for _, name := range present {
		err := process.Until(t.Context(), process.Patience, "no series for "+name+": "+queries[name], func(context.Context) bool {
			serve()
			n, err := query(queries[name])
			return err == nil && n > 0 && queries[name] != ""
		})
		if err != nil {
			t.Error(err)
		}
	}
	for _, r := range alertRules(t) {
		queries[r.Alert] = r.Expr
	}
	for name, expr := range queries {
		if _, err := query(expr); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	firing := slices.DeleteFunc(alertRules(t), func(r alertRule) bool {
		n, err := query(r.Expr)
		return err == nil && n == 0
	})
	if len(firing) > 0 {
		t.Errorf("alerts fire in a healthy fleet: %+v", firing)
	}
}
