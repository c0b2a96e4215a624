// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// Every list of states in docs, alerts and help has the words of States, in the same order. The test of
// package api compares the list in docs/openapi.yaml.
func TestStatesAreTheSameEverywhere(t *testing.T) {
	all := indexer.States()
	faulty := slices.DeleteFunc(indexer.States(), func(s indexer.State) bool { return !s.Faulty() })
	less := func(leftOut ...indexer.State) []indexer.State {
		return slices.DeleteFunc(indexer.States(), func(s indexer.State) bool { return slices.Contains(leftOut, s) })
	}
	for _, c := range []struct {
		file, list string // the first group of the expression list is the list
		want       []indexer.State
	}{
		{"docs/protocol.md", "(?s)### States of a rank\n.*?\\|---\\|---\\|---\\|\n(.*?)\n\n", all},
		{"docs/observe.md", "state of the worker's cache events: (.*?), `never heard`", all},
		{"docs/workers.md", "how well the publisher knows the cache: (.*?)\\.", less(indexer.StateSummary)},
		{"docs/metrics.md", "followed ranks: (.*?) \\(", less(indexer.StateSummary)},
		{"docs/replicas.md", "(?s)its events were never heard, or are (.*?)\\.", faulty},
		{"docs/metrics.md", "(?s)\\[EventsLost\\].*?a rank is (.*?) for", faulty},
		{"docs/troubleshooting.md", "### EventsLost\n\nA rank is \\[(.*?)\\]", faulty},
		{"top/screen.go", "\nevents (.*?)never heard", all},
		{"examples/observability/alerts.yaml", `kvroute_events_ranks\{state=~"(.*?)"`, faulty},
	} {
		found := regexp.MustCompile(c.list).FindStringSubmatch(read(t, c.file))
		if found == nil {
			t.Errorf("%s has no %s", c.file, c.list)
			continue
		}
		list := found[1]
		if strings.HasPrefix(list, "| ") { // of a table the first column
			list = regexp.MustCompile(`(?m)^(\| \S+ ).*$`).ReplaceAllString(list, "$1")
		}
		var got []indexer.State
		for _, word := range regexp.MustCompile(`[a-z_]+`).FindAllString(list, -1) {
			if s := indexer.State(word).Known(); s != "" {
				got = append(got, s)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q has the states %q, want %q", c.file, found[1], got, c.want)
		}
	}
}

// The page shows a state as the server judges it, so that it needs no list.
func TestThePageHasNoListOfStates(t *testing.T) {
	scripts, err := filepath.Glob("../dashboard/*.js")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("%d scripts of the page: %v", len(scripts), err)
	}
	for _, path := range scripts {
		text := read(t, strings.TrimPrefix(path, "../"))
		for _, s := range indexer.States() {
			if s.Faulty() && strings.Contains(text, string(s)) {
				t.Errorf("%s judges the state %s itself", path, s)
			}
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
