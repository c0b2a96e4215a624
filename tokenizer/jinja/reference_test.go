// SPDX-License-Identifier: Apache-2.0

package jinja_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/tokenizer/jinja"
)

func readJSON(t testing.TB, dir, name string, into any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatal(err)
	}
}

// Sixty templates of engines and models with eleven conversations each give the
// text or the error that Jinja2 gives.
func TestReference(t *testing.T) {
	dir := fixtures.Need(t, "templates")
	var templates map[string]string
	var cases map[string]json.RawMessage
	var expected []struct {
		Name, Case string
		Out, Err   *string
	}
	readJSON(t, dir, "templates.json", &templates)
	readJSON(t, dir, "cases.json", &cases)
	readJSON(t, dir, "expected.json", &expected)
	if len(templates) != 60 || len(cases) != 11 || len(expected) != 660 {
		t.Fatalf("%d templates, %d cases, %d outcomes; want 60, 11, 660", len(templates), len(cases), len(expected))
	}
	parsed := map[string]*jinja.Template{}
	for name, text := range templates {
		tmpl, err := jinja.Parse(name, text)
		if err != nil {
			t.Errorf("parse %s: %v", name, err)
			continue
		}
		parsed[name] = tmpl
	}
	now := jinja.Options{Now: time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC)}
	equal := 0
	for _, e := range expected {
		v, err := jinja.FromJSON(cases[e.Case])
		if err != nil {
			t.Fatal(err)
		}
		vars := v.Dict()
		vars.Set("bos_token", jinja.String("<BOS>"))
		vars.Set("eos_token", jinja.String("<EOS>"))
		if _, ok := vars.Get("tools"); !ok {
			vars.Set("tools", jinja.None())
		}
		tmpl := parsed[e.Name]
		if tmpl == nil {
			continue
		}
		out, err := tmpl.Render(nil, vars, now)
		if e.Out != nil {
			if err != nil || string(out) != *e.Out {
				t.Errorf("%s %s: %v\n got %q\nwant %q", e.Name, e.Case, err, tail(string(out), *e.Out), tail(*e.Out, string(out)))
				continue
			}
			equal++
			continue
		}
		kind, message, _ := strings.Cut(*e.Err, ": ")
		var got *jinja.Error
		if !errors.As(err, &got) || string(got.Kind) != kind || kind == "TemplateError" && got.Message != message {
			t.Errorf("%s %s: error %v, want %s", e.Name, e.Case, err, *e.Err)
			continue
		}
		equal++
	}
	t.Logf("%d of %d outcomes are equal", equal, len(expected))
}

// tail returns what a has behind its common beginning with b, cut short.
func tail(a, b string) string {
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	i = max(0, i-30)
	return a[i:min(len(a), i+120)]
}
