// SPDX-License-Identifier: Apache-2.0

package jinja_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

type goldenCase struct {
	Template string
	Out, Err *string
}

func golden(t testing.TB) (vars *jinja.Dict, o jinja.Options, all []goldenCase) {
	t.Helper()
	for _, name := range []string{"golden", "methods", "filters"} {
		var more []goldenCase
		vars, o, more = goldenFile(t, name)
		all = append(all, more...)
	}
	return vars, o, all
}

func goldenFile(t testing.TB, name string) (vars *jinja.Dict, o jinja.Options, all []goldenCase) {
	t.Helper()
	f, err := os.Open("testdata/" + name + ".jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Scan()
	var head struct {
		Vars json.RawMessage
		Now  string
	}
	if err := json.Unmarshal(lines.Bytes(), &head); err != nil {
		t.Fatal(err)
	}
	v, err := jinja.FromJSON(head.Vars)
	if err != nil {
		t.Fatal(err)
	}
	if o.Now, err = time.Parse("2006-01-02T15:04:05", head.Now); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
		var c goldenCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	return v.Dict(), o, all
}

// The result of Jinja2 for each feature: the text, or the kind of error. A feature that this
// package does not have is an error of its own, never another text.
func TestGolden(t *testing.T) {
	vars, o, all := golden(t)
	unsupported := 0
	if len(all) < 2090 {
		t.Fatalf("%d cases", len(all))
	}
	for _, c := range all {
		tmpl, err := jinja.Parse("golden", c.Template)
		var out []byte
		if err == nil {
			out, err = tmpl.Render(nil, vars, o)
		}
		var e *jinja.Error
		switch {
		case errors.As(err, &e) && e.Kind == jinja.Unsupported:
			unsupported++
		case c.Out != nil && (err != nil || string(out) != *c.Out):
			t.Errorf("%q: got %q, %v; want %q", c.Template, out, err, *c.Out)
		case c.Err != nil:
			kind, message, _ := strings.Cut(*c.Err, ": ")
			if kind == "TemplateAssertionError" || kind == "SyntaxError" { // Python compiles what Jinja2 has parsed
				kind = "TemplateSyntaxError"
			}
			if e == nil || string(e.Kind) != kind || kind == "TemplateError" && e.Message != message {
				t.Errorf("%q: got %q, %v; want %s", c.Template, out, err, *c.Err)
			}
		}
	}
	t.Logf("%d of %d cases are unsupported", unsupported, len(all))
	if unsupported > 6 {
		t.Errorf("%d of %d cases are unsupported, at most 6 may be", unsupported, len(all))
	}
}
