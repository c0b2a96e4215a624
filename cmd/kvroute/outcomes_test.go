// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// outcome is a row of the table in docs/envoy.md of what a client receives. Tests of faults look
// their rows up, and each row is looked up by at least one test.
type outcome struct {
	what   string
	status int    // 0: no response
	code   string // of the error, or ""
	cut    bool   // the response breaks off
}

var outcomeRow = regexp.MustCompile("(?m)^\\| ([^|]+) \\| `(?:none|([0-9]{3})( cut off)?(?: ([a-z_]+))?)` \\|")

func envoyOutcomes(t *testing.T) map[string]outcome {
	t.Helper()
	text, err := os.ReadFile("../../docs/envoy.md")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]outcome{}
	_, section, _ := strings.Cut(string(text), "## Outcomes of a request")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, m := range outcomeRow.FindAllStringSubmatch(section, -1) {
		status, _ := strconv.Atoi(m[2]) // 0 for none
		all[m[1]] = outcome{m[1], status, m[4], m[3] != ""}
	}
	if rows := strings.Count(section, "\n| ") - 1; rows != len(all) || rows < 20 {
		t.Fatalf("%d of %d rows of the table are understood", len(all), rows)
	}
	return all
}

// outcomeOf returns the row of the table with a name.
func outcomeOf(t *testing.T, what string) outcome {
	t.Helper()
	o, ok := envoyOutcomes(t)[what]
	if !ok {
		t.Fatalf("docs/envoy.md has no row %q", what)
	}
	return o
}

// sight is the response that a client received.
type sight struct {
	status int
	header http.Header
	body   string
	err    error // from reading the response
}

// look reads a response to its end.
func look(resp *http.Response, err error) sight {
	if err != nil {
		return sight{err: err}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return sight{resp.StatusCode, resp.Header, string(text), err}
}

// check compares a response with the row.
func (o outcome) check(t *testing.T, s sight) {
	t.Helper()
	switch {
	case s.status != o.status:
		t.Errorf("%s: status %d (%v), want %d: %.300s", o.what, s.status, s.err, o.status, s.body)
	case o.status != 0 && (s.err != nil) != o.cut:
		t.Errorf("%s: the response ends with %v, want it cut off: %v", o.what, s.err, o.cut)
	case o.code != "" && !strings.Contains(strings.ReplaceAll(s.body, `": "`, `":"`), `"code":"`+o.code+`"`):
		t.Errorf("%s: %.300s, want the code %s", o.what, s.body, o.code)
	case o.status >= 400 && o.code != "" && !strings.HasPrefix(s.header.Get("Content-Type"), "application/json"):
		t.Errorf("%s: an error of type %q", o.what, s.header.Get("Content-Type"))
	case (o.status == 503 || o.status == 429) && o.code != "worker_failed" && s.header.Get("Retry-After") == "":
		t.Errorf("%s: status %d does not say when to come again", o.what, o.status)
	}
}

// Tests look up every row of the table, and no other rows.
func TestOutcomesAreTested(t *testing.T) {
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	tested := map[string]bool{}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?:outcomeOf\(t, |row: +)"([^"]+)"`).FindAllStringSubmatch(string(text), -1) {
			tested[m[1]] = true
		}
	}
	all := envoyOutcomes(t)
	for what := range all {
		if !tested[what] {
			t.Errorf("no test looks up %q", what)
		}
	}
	for what := range tested {
		if _, ok := all[what]; !ok {
			t.Errorf("the table has no %q", what)
		}
	}
}
