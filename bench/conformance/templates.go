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
func templates(ref *reference, o options) (compared []bench.Comparison) {
	all := templateTexts(o)
	if len(all) == 0 {
		fmt.Println("no templates under", o.shared)
		all = map[string]string{}
	}
	maps.Copy(all, ownTemplates)
	r := random(3)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if strings.Contains(name, o.only) {
			bench.Within(name, func() { compared = append(compared, template(ref, r, name, all[name])) })
		}
	}
	return compared
}

// ownTemplates have features that are rare in published templates.
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

// templateTexts are the templates of the reference data, by name. Without the data the
// list is empty.
func templateTexts(o options) (all map[string]string) {
	b, err := os.ReadFile(filepath.Join(o.shared, "templates/templates.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	bench.NoError(err)
	bench.NoError(json.Unmarshal(b, &all))
	return all
}

func template(ref *reference, r *rand.Rand, name, text string) (f bench.Comparison) {
	var parsed struct{ Error string }
	ref.ask(map[string]any{"op": "parse", "template": text}, &parsed)
	ours, err := jinja.Parse(name, text)
	if refused := parsed.Error != ""; err != nil || refused {
		if refused == (err != nil) {
			f = bench.NewComparison("template", name, conversations, 0, 0, 0)
			f.Refused = conversations
			return f
		}
		fmt.Printf("%s: different: got %v; want %s\n", name, err, parsed.Error)
		return bench.NewComparison("template", name, conversations, conversations, 0, 0)
	}
	vars := make([]json.RawMessage, conversations)
	for i := range vars {
		vars[i] = bench.Must(json.Marshal(conversation(r)))
	}
	var theirs struct {
		Outcomes []pythonOutcome
		Seconds  float64
	}
	ref.ask(map[string]any{"op": "render", "vars": vars}, &theirs)
	if len(theirs.Outcomes) != len(vars) {
		bench.NoError(errors.New("the reference process answered for other conversations"))
	}
	different := 0
	var took time.Duration
	for i, v := range vars {
		value := bench.Must(jinja.FromJSON(v))
		start := bench.CPUTime()
		out, err := ours.Render(nil, value.Dict(), jinja.Options{Now: today()})
		took += bench.CPUTime() - start
		got, want := outcome(string(out), err), theirs.Outcomes[i].String()
		if got == want {
			continue
		}
		if different++; different <= 2 {
			at := 0
			for at < min(len(got), len(want)) && got[at] == want[at] {
				at++
			}
			at = max(0, at-20)
			fmt.Printf("%s: different: got %+.80q; want %+.80q; for %s\n", name, got[at:], want[at:], v)
		}
	}
	return bench.NewComparison("template", name, len(vars), different, took, seconds(theirs.Seconds))
}

// pythonOutcome is the reference's text, or its error as "Class: message".
type pythonOutcome struct{ Out, Err *string }

func (o pythonOutcome) String() string {
	if o.Out != nil {
		return "text " + *o.Out
	}
	kind, message, _ := strings.Cut(*o.Err, ": ")
	return outcome("", &jinja.Error{Kind: jinja.Kind(kind), Message: message})
}

// outcome is the text or the kind of the error. An error that the template raises has its
// message, too.
func outcome(text string, err error) string {
	e, ok := errors.AsType[*jinja.Error](err)
	switch {
	case err == nil:
		return "text " + text
	case !ok:
		return "unknown error " + err.Error()
	case e.Kind == jinja.Raise:
		return "error " + string(e.Kind) + ": " + e.Message
	}
	return "error " + string(e.Kind)
}

// conversation makes the variables of a template from a random request, as an engine does:
// the arguments of calls are objects.
func conversation(r *rand.Rand) map[string]any {
	vars := chats.Requests{R: r, Strange: 5}.Request()
	for _, m := range vars["messages"].([]any) {
		calls, _ := m.(map[string]any)["tool_calls"].([]any)
		for _, call := range calls {
			f := call.(map[string]any)["function"].(map[string]any)
			if text, ok := f["arguments"].(string); ok && json.Valid([]byte(text)) && r.IntN(4) > 0 {
				f["arguments"] = json.RawMessage(text)
			}
		}
	}
	for name, value := range map[string]any{"add_generation_prompt": r.IntN(3) > 0, "bos_token": "<BOS>", "eos_token": "<EOS>", "tools": nil} {
		if _, given := vars[name]; !given {
			vars[name] = value
		}
	}
	if r.IntN(4) == 0 {
		vars["enable_thinking"] = r.IntN(2) == 0
	}
	if r.IntN(8) == 0 {
		vars["documents"] = []any{map[string]any{"title": "T", "text": "a\nb", "doc_id": "1"}}
	}
	return vars
}
