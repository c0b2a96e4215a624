// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"
)

// numbered joins n lines of a format with a number.
func numbered(format string, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, format, i)
	}
	return b.String()
}

// Files beyond the bounds are refused with the line and the reason, before they take much memory.
func TestYAMLBounds(t *testing.T) {
	t.Parallel()
	var bomb strings.Builder
	bomb.WriteString("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n")
	for i := 1; i < 9; i++ {
		fmt.Fprintf(&bomb, "a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i-1), 10), ","))
	}
	for name, c := range map[string]struct{ text, want string }{
		"many anchors":            {strings.Repeat("&", 100_000) + " x", ":1: there are more than 1000 anchors, aliases and tags"},
		"alias in its anchor":     {"workers: &x [*x]", ":1: *x is within its own anchor &x"},
		"alias in a mapping":      {"version: 1\nmodels: &x\n- {name: a, aliases: *x}", ":3: *x is within its own anchor &x"},
		"merge of itself":         {"a: &x\n  <<: *x", ":2: *x is within its own anchor &x"},
		"two anchors":             {"a: &x [*y]\nb: &y [*x]", ":1: there is no anchor &y above *y"},
		"anchor twice":            {"a: &x 1\nb: &x [*x]", ":2: the anchor &x is defined twice"},
		"alias bomb":              {bomb.String(), "values when aliases such as *a"},
		"brackets":                {strings.Repeat("[", 100_000), "lists and mappings within each other"},
		"closed brackets":         {"workers: " + strings.Repeat("[", 40) + strings.Repeat("]", 40), ":1: there are more than 32 lists and mappings"},
		"braces":                  {strings.Repeat("{a: ", 100_000), "lists and mappings within each other"},
		"lists in a line":         {strings.Repeat("- ", 100_000), "lists and mappings within each other"},
		"mappings by indentation": {deep(1000), "lists and mappings within each other"},
		"names":                   {numbered("a%d: b\n", 2000), ":1001: there are more than 1000 names in one mapping"},
		"names in braces":         {"{" + numbered("a%d: b, ", 2000) + "}", "more than 1000 names in one mapping"},
		"names without values":    {numbered("? a%d\n", 2000), "more than 1000 names in one mapping"},
		"documents":               {strings.Repeat("---\na: b\n", 100_000), ":5: there are several YAML documents, want one"},
		"two documents":           {"version: 1\n---\nversion: 1\n", "there are 2 YAML documents, want one"},
		"values":                  {"workers: [" + strings.Repeat("a,", 150_000) + "a]", "values and signs"},
		"size":                    {"# " + strings.Repeat("x", maxYAMLBytes), "is larger than 1048576 bytes, the limit"},
		"text without an end":     {"seed: \"" + strings.Repeat("x\n", 200_000), "could not find end character"},
	} {
		file := writeFile(t, c.text)
		if _, err := readFile(file); err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), file) {
			t.Errorf("%s: the error is %.200v, want %q", name, err, c.want)
		}
	}
}

func deep(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

// Anchors, aliases and merges within the bounds are read, and a list may have thousands of workers.
func TestYAMLAliases(t *testing.T) {
	t.Parallel()
	c, err := readFile(writeFile(t, "version: 1\nworkers:\n- &w {name: a, address: \"127.0.0.1:1\", models: [m]}\n- {<<: *w, name: b}\n"+
		numbered("- {name: w%d, address: \"127.0.0.1:1\", models: [m]}\n", 3000)))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(c.Workers); n != 3002 || c.Workers[1].Name != "b" || c.Workers[1].Address != c.Workers[0].Address {
		t.Errorf("there are %d workers, the second is %+v", n, c.Workers[1])
	}
}

// Any file is read or refused, within time and memory.
func FuzzConfigFile(f *testing.F) {
	for _, text := range []string{
		"version: 1\nworkers: &x [*x]", "a: &a {<<: *b}", "version: 1\nworkers:\n- {name: a, models: [m]}", "- - ? a\n  : b", "a: |2\n  x", "%YAML 1.2\n---\n!!a b",
		"version: 1\nmodels:\n- name: &n m\n  aliases: [*n]\nqueue-wait: 1s", "a: \"\\u0041", ": &0", "{a: [}, b]", "...\n---\n...",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		file := writeFile(t, text)
		if c, err := readFile(file); err == nil && c.Version != 1 {
			t.Errorf("version %d is accepted", c.Version)
		}
	})
}
