// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"
)

func replayed(t *testing.T, args ...string) (out string, status int, problem string) {
	t.Helper()
	var o, e bytes.Buffer
	status = run(context.Background(), append([]string{"replay"}, args...), stdio{&o, &e})
	return o.String(), status, e.String()
}

func TestReplayRepeatsItself(t *testing.T) {
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace.jsonl")
	made := []string{"--requests", "300", "--rate", "20", "--seeds", "2", "--rule", "tokens", "--rule", "random", "--load", "1,2", "--json", "-"}
	a, status, problem := replayed(t, append(made, "--write-trace", trace)...)
	b, _, _ := replayed(t, made...)
	if status != 0 || a != b || strings.Count(a, `"rule"`) != 8 {
		t.Errorf("status %d, %s\n%s", status, problem, a)
	}
	table, status, problem := replayed(t, "--trace", trace, "--change", "5s:leave:3", "--replicas", "2", "--sync-off")
	if status != 0 || !strings.Contains(table, "dynamo") {
		t.Errorf("the written trace: status %d, %s\n%s", status, problem, table)
	}
	timed, status, problem := replayed(t, "--requests", "50", "--timing", "--rule", "tokens")
	if status != 0 || !strings.Contains(timed, "decision p50") || len(strings.Fields(strings.Split(timed, "\n")[1])) != 21 {
		t.Errorf("what decisions cost: status %d, %s\n%s", status, problem, timed)
	}
	hits, status, _ := replayed(t, "--trace", trace, "--hit-rate")
	if status != 0 || strings.Count(hits, "blocks hit") != 3 {
		t.Errorf("hits: %s", hits)
	}
}

// Prompts without a shared prefix have no common blocks, and prompts without a question of their own
// are completely cached after the first time.
func TestReplayWithoutAPart(t *testing.T) {
	args := []string{"--requests", "200", "--rate", "5", "--prefixes", "4", "--hit-rate"}
	alone, status, problem := replayed(t, append(args, "--prefix-tokens", "0")...)
	if status != 0 || !strings.Contains(alone, "endless cache: 0 of") {
		t.Errorf("no prefix: status %d, %s\n%s", status, problem, alone)
	}
	shared, status, problem := replayed(t, append(args, "--question-tokens", "0")...)
	if status != 0 || !strings.Contains(shared, "endless cache: 2156 of 2200") {
		t.Errorf("no question: status %d, %s\n%s", status, problem, shared)
	}
}

func TestReplayRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"no such file":             {"--trace", "nowhere.jsonl"},
		"--users needs":            {"--users", "3"},
		"--load is for open":       {"--users", "3", "--trace", "x", "--load", "2"},
		"engine is":                {"--engine", "9b"},
		"seeds is":                 {"--seeds", "0"},
		"is unknown":               {"--rule", "nobody"},
		"is not time:join":         {"--change", "1:2:3"},
		"is no number":             {"--load", "fast"},
		`workers is "-1"`:          {"--workers", "-1"},
		`kv-blocks is "0"`:         {"--kv-blocks", "0"},
		`requests is "0"`:          {"--requests", "0"},
		`turns is "0"`:             {"--turns", "0"},
		`output-tokens is "0"`:     {"--output-tokens", "0"},
		`replicas is "0"`:          {"--replicas", "0"},
		`groups is "0"`:            {"--groups", "0"},
		`rate is "0"`:              {"--rate", "0"},
		`"0" is no number above 0`: {"--load", "1,0"},
		`transfer-rate is "0"`:     {"--transfer-rate", "0"},
		`users is "-1"`:            {"--users", "-1"},
		`lanes is "5000"`:          {"--lanes", "5000"},
		`lane-context is "9"`:      {"--lanes", "1", "--lane-context", "9"},
		"users or lanes set":       {"--lanes", "3", "--load", "2"},
		"one of them above 0":      {"--prefix-tokens", "0", "--question-tokens", "0"},
		"is not time:duration":     {"--sync-lost", "10s"},
		"one worker left":          {"--workers", "2", "--prefill-workers", "2"},
		`prefill-workers is "-1"`:  {"--prefill-workers", "-1"},
		"combined with groups":     {"--prefill-workers", "2", "--groups", "2"},
		"unexpected argument":      {"trace.jsonl"},
		"want one of them 1":       {"--groups", "2", "--replicas", "2"},
		"no worker is available":   {"--workers", "1", "--change", "1s:leave:0"},

		"--rate has no effect beside a --trace":           {"--trace", "x", "--rate", "3"},
		"--requests has no effect beside a --trace":       {"--trace", "x", "--requests", "3"},
		"--jitter has no effect beside --users":           {"--trace", "x", "--users", "3", "--jitter", "1s"},
		"--lanes has no effect beside a --trace":          {"--trace", "x", "--lanes", "3"},
		"--requests has no effect beside --lanes":         {"--lanes", "3", "--requests", "3"},
		"--burst-apart has no effect beside --burst 1":    {"--burst-apart", "1s"},
		"--lane-products has no effect beside --lanes 0":  {"--lane-products", "3"},
		"--sync-lost has no effect beside one replica":    {"--sync-lost", "1s:1s"},
		"--sync-delay has no effect beside --sync-off":    {"--sync-delay", "1s", "--sync-off", "--replicas", "2"},
		"--summary-age has no effect beside one group":    {"--summary-age", "1s"},
		"--summary-stride has no effect beside one group": {"--summary-stride", "4"},
		"--event-delay has no effect beside --no-kv-ev":   {"--no-kv-events", "--event-delay", "1s"},
		`summary-age is "0s", want more than 0s`:          {"--groups", "2", "--summary-age", "0"},
		`summary-stride is "0", want 1 to 65536`:          {"--groups", "2", "--summary-stride", "0"},
		"--transfer-rate has no effect beside --prefill-": {"--transfer-rate", "10"},
		"--disaggregation-tokens has no effect beside --": {"--prefill-workers", "2", "--disaggregation-tokens", "10"},
		"router-queue-threshold is":                       {"--router-queue-threshold", "-1"},
		`router-queue-policy is "sjf", want fcfs, lcfs`:   {"--router-queue-threshold", "1", "--router-queue-policy", "sjf"},
		`queue-wait is "0s", want more than 0s`:           {"--router-queue-threshold", "1", "--queue-wait", "0"},
		`priority-share is "2", want 0 to 1`:              {"--router-queue-threshold", "1", "--priority-share", "2"},
		"--priority-share has no effect beside a missing": {"--priority-share", ".1"},
		"--strict-priority has no effect beside no --pri": {"--router-queue-threshold", "1", "--strict-priority", "3"},
		"strict-priority and priority are 0":              {"--router-queue-threshold", "1", "--priority-share", ".1", "--strict-priority", "0"},
		"cannot be combined with cold-start":              {"--router-queue-threshold", "1", "--cold-start", "9s"},
		"--rule has no effect beside --hit-rate":          {"--hit-rate", "--rule", "tokens"},
		`alpha is 1, want a cost that knows it`:           {"--rule", "dynamo:alpha=1"},
		`"weight=1" is not one of its settings`:           {"--rule", "tokens:weight=1"},
		`which "tokens" does not`:                         {"--rule", "tokens:overlap_score_weight=1"},
		`which "dynamo" does not`:                         {"--rule", "dynamo:overlap_score_credit=1"},
	} {
		if _, status, problem := replayed(t, args...); status == 0 || !strings.Contains(problem, want) {
			t.Errorf("%v: status %d, %q, want %q", args, status, problem, want)
		}
	}
}
