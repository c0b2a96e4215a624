// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// P1 to P8 are defects of other endpoint pickers. Each has a test: internal/epptest has the tests of
// the stream itself, which can run against any picker; the others are here, through Envoy.
func TestDefectsOfOtherPickersHaveTests(t *testing.T) {
	var text strings.Builder
	for _, pattern := range []string{"../../internal/epptest/*_test.go", "*_test.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			part, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			text.Write(part)
		}
	}
	for i := range 8 {
		named := regexp.MustCompile(fmt.Sprintf(`// (?:.*[;.:] )?P%d[ :]`, i+1))
		if !named.MatchString(text.String()) {
			t.Errorf("no test says that it is of P%d", i+1)
		}
	}
}

// P5: a response is an error by its :status, not by a header called status that the worker sets.
func TestErrorsAreToldByTheirStatus(t *testing.T) {
	answers := func(code int, header string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Status", header)
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			fmt.Fprint(w, `{"choices":[]}`)
		}
	}
	d := newStack(t, 0, nil)
	d.begin(t, append(staticFlags(t, d, "fails", startHTTP(t, answers(500, "200")), "serves", startHTTP(t, answers(200, "500")), "refuses", startHTTP(t, answers(400, "500"))),
		"--router-mode", "round-robin", "--avoid-failing", "1m")...)
	statuses := map[int]int{}
	for i := range 24 {
		statuses[d.send(t, fmt.Sprint("question ", i), false).status]++
		atRest(t, d)
	}
	for _, w := range workers(t, d) {
		if w.Failing != (w.Name == "fails") {
			t.Errorf("%s: failing %v", w.Name, w.Failing)
		}
	}
	if statuses[500] < 3 || statuses[500] > 5 || statuses[200] < 9 || statuses[400] < 9 {
		t.Errorf("statuses %v: want five of 500 in all, few of them before the test", statuses)
	}
}

// P8: a client's mistake is one log line at level debug, without the request's text and without a
// stack, and adds one to a counter.
func TestAClientsMistakeIsOneQuietLine(t *testing.T) {
	const mistakes = 25
	for _, least := range []string{"info", "debug"} {
		t.Run(least, func(t *testing.T) {
			d := startStack(t, 1, []string{"--speed", "50"}, "--log-level", least)
			lines := func() (all []string) {
				text, err := os.ReadFile(d.Router.Log)
				if err != nil {
					t.Fatal(err)
				}
				for line := range strings.Lines(string(text)) {
					// Other lines about workers do not count.
					if strings.Contains(line, "refused") || !strings.HasPrefix(line, "time=") || strings.Contains(line, "a secret") || strings.Contains(line, "level=ERROR") || strings.Contains(line, "level=WARN") {
						all = append(all, line)
					}
				}
				return all
			}
			before := lines()
			for i := range mistakes {
				got := look(send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"a secret %d"}`, i), nil))
				outcomeOf(t, "the body is no JSON").check(t, got)
			}
			_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
			if n := level(text, `kvroute_extproc_refusals_total{status="400"}`); n != fmt.Sprint(mistakes) {
				t.Errorf("%s refusals are counted, want %d", n, mistakes)
			}
			want := 0
			if least == "debug" {
				want = mistakes
			}
			var got []string
			eventually(t, "the lines are not there", func() bool { got = lines()[len(before):]; return len(got) >= want })
			if len(got) != want {
				t.Errorf("%d lines, want %d:\n%s", len(got), want, strings.Join(got, ""))
			}
			for _, line := range got {
				if !strings.Contains(line, "level=DEBUG") || strings.Contains(line, "a secret") {
					t.Errorf("line %s", line)
				}
			}
		})
	}
}
