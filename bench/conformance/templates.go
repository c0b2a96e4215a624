// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// templates compares the renderings of random conversations, template by template.
func templates(ref *reference, o options) ([]bench.Comparison, error) {
	all, err := templateTexts(o)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		fmt.Println("no templates under", o.shared)
		all = map[string]string{}
	}
	maps.Copy(all, ownTemplates)
	r := rand.New(rand.NewPCG(o.seed, 3))
	var compared []bench.Comparison
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !strings.Contains(name, o.only) {
			continue
		}
		c, err := template(ref, r, name, all[name], o.conversations)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		compared = append(compared, c)
	}
	return compared, nil
}

// ownTemplates have what templates in use seldom have, and users' templates may.
//
//nolint:gochecknoglobals // a table
var ownTemplates = map[string]string{
	"own/unknown filter that is not reached": `{% for m in messages %}{% if m.role == 'nobody' %}{{ m.content | fromjson }}{% else %}{{ m.content }}{% endif %}{% endfor %}`,
	"own/unknown filter that some reach":     `{% for m in messages %}{{ m.content | from_json if m.role == 'tool' else m.content }}{% endfor %}`,
	"own/unknown test that some reach":       `{% for m in messages %}{% if m.tool_calls and m.content is json %}x{% endif %}{{ m.content }}{% endfor %}`,
	"own/unknown filter in a loop":           `{% if tools is none %}{% for m in messages %}{{ m.content | fromjson }}{% endfor %}{% endif %}`,
	"own/dict.fromkeys":                      `{{ dict.fromkeys(messages | map(attribute='role'), add_generation_prompt) }}`,
	"own/names of characters":                `{% for m in messages %}{{ '\N{BULLET} \N{Latin Small Letter E With Acute}' ~ m.content }}{% endfor %}`,
	"own/no name of a character":             `{{ '\N{BULLETT}' }}`,
	"own/guarded attributes":                 `{% set ns = namespace(_n=0, n=0) %}{% for m in messages %}{% set ns._n = 1 %}{{ ns._n }}{{ ns['_n'] is defined }}{% if m.tool_calls %}{{ ns._n + 1 }}{% endif %}{% endfor %}`,
}

// templateTexts are the templates of the reference data, by name; none if it is not
// at hand.
func templateTexts(o options) (all map[string]string, err error) {
	b, err := os.ReadFile(filepath.Join(o.shared, "templates/templates.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return all, json.Unmarshal(b, &all)
}

func template(ref *reference, r *rand.Rand, name, text string, conversations int) (f bench.Comparison, err error) {
	var parsed struct{ Error string }
	if err := ref.ask(map[string]any{"op": "parse", "template": text}, &parsed); err != nil {
		return f, err
	}
	ours, err := jinja.Parse(name, text)
	if refused := parsed.Error != ""; err != nil || refused {
		if refused == (err != nil) {
			f = bench.NewComparison("template", name, conversations, 0, 0, 0)
			f.Refused = conversations
			return f, nil
		}
		fmt.Printf("%s: different: got %v; want %s\n", name, err, parsed.Error)
		return bench.NewComparison("template", name, conversations, conversations, 0, 0), nil
	}
	vars := make([]json.RawMessage, conversations)
	for i := range vars {
		if vars[i], err = json.Marshal(conversation(r)); err != nil {
			return f, err
		}
	}
	var theirs struct {
		Outcomes []struct{ Out, Err *string }
		Seconds  float64
	}
	if err := ref.ask(map[string]any{"op": "render", "vars": vars}, &theirs); err != nil {
		return f, err
	}
	if len(theirs.Outcomes) != len(vars) {
		return f, errors.New("the reference process answered for other conversations")
	}
	different := 0
	var took time.Duration
	for i, v := range vars {
		value, err := jinja.FromJSON(v)
		if err != nil {
			return f, err
		}
		start := bench.CPUTime()
		out, err := ours.Render(nil, value.Dict(), jinja.Options{Now: time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC)})
		took += bench.CPUTime() - start
		if same(out, err, theirs.Outcomes[i].Out, theirs.Outcomes[i].Err) {
			continue
		}
		if different++; different <= 2 {
			fmt.Printf("%s: different: got %s; want %s; for %s\n", name, describe(out, err, theirs.Outcomes[i].Out), describeTheirs(theirs.Outcomes[i].Out, theirs.Outcomes[i].Err, out), v)
		}
	}
	return bench.NewComparison("template", name, len(vars), different, took, seconds(theirs.Seconds)), nil
}

// describe shows an outcome, a text from shortly before it differs from other.
func describe(out []byte, err error, other *string) string {
	if err != nil {
		return err.Error()
	}
	i := 0
	for other != nil && i < len(out) && i < len(*other) && out[i] == (*other)[i] {
		i++
	}
	i = max(0, i-20)
	return fmt.Sprintf("%+q", out[i:min(len(out), i+80)])
}

func describeTheirs(out, fault *string, ours []byte) string {
	if out == nil {
		return *fault
	}
	other := string(ours)
	return describe([]byte(*out), nil, &other)
}

// same reports whether two outcomes are equal: the text, or the kind of error and,
// where the template says it, the message.
func same(out []byte, err error, want, fault *string) bool {
	if want != nil {
		return err == nil && string(out) == *want
	}
	kind, message, _ := strings.Cut(*fault, ": ")
	e, ok := errors.AsType[*jinja.Error](err)
	return ok && string(e.Kind) == kind && (kind != string(jinja.Raise) || e.Message == message)
}

// conversation makes variables of a template: turns of all roles, tools and their
// results, parts, thoughts, and now and then what no template expects.
func conversation(r *rand.Rand) map[string]any {
	some := func(of ...any) any { return of[r.IntN(len(of))] }
	text := func() any {
		switch r.IntN(12) {
		case 0:
			return ""
		case 1:
			return "  spaces and\nlines \n\n"
		case 2:
			return "<think>why</think>\n\nbecause"
		case 3:
			return "é \"quoted\" <b> & 'single' 😀 </think> {x}"
		}
		return strings.Map(chats.Settled, chats.Random(r))
	}
	call := func() map[string]any {
		return map[string]any{"id": some("call12345", "abcdefghi"), "type": "function", "function": map[string]any{
			"name": some("get_weather", "f"), "arguments": some(map[string]any{"city": "Zürich", "n": 1.5, "l": []any{1, nil, true}}, map[string]any{}, `{"a": 1}`),
		}}
	}
	messages := []any{}
	if r.IntN(2) == 0 {
		messages = append(messages, map[string]any{"role": "system", "content": text()})
	}
	for range 1 + r.IntN(4) {
		user := map[string]any{"role": "user", "content": text()}
		if r.IntN(5) == 0 {
			user["content"] = []any{map[string]any{"type": "text", "text": text()}, some(map[string]any{"type": "image"}, map[string]any{"type": "text", "text": "b"})}
		}
		messages = append(messages, user)
		answer := map[string]any{"role": "assistant", "content": text()}
		switch r.IntN(6) {
		case 0:
			answer["tool_calls"] = []any{call()}
			messages = append(messages, answer, map[string]any{"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": text()})
			continue
		case 1:
			answer["content"], answer["tool_calls"] = nil, []any{call(), call()}
		case 2:
			answer["reasoning_content"], answer["reasoning"] = text(), text()
		case 3:
			continue // two users in a row
		}
		messages = append(messages, answer)
	}
	vars := map[string]any{"messages": messages, "add_generation_prompt": r.IntN(3) > 0, "bos_token": "<BOS>", "eos_token": "<EOS>", "tools": nil}
	if r.IntN(3) == 0 {
		vars["tools"] = []any{map[string]any{"type": "function", "function": map[string]any{
			"name": "get_weather", "description": text(), "parameters": map[string]any{
				"type": "object", "properties": map[string]any{"city": map[string]any{"type": "string", "description": "d"}, "unit": map[string]any{"type": []any{"string", "null"}, "enum": []any{"c", "f"}}}, "required": []any{"city"},
			},
		}}}
	}
	if r.IntN(4) == 0 {
		vars["enable_thinking"] = r.IntN(2) == 0
	}
	if r.IntN(8) == 0 {
		vars["documents"] = []any{map[string]any{"title": "T", "text": text(), "doc_id": "1"}}
	}
	return vars
}
