// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// ownTemplates have features that are rare in published templates.
//
//nolint:gochecknoglobals // a table
var ownTemplates = map[string]string{
	"own/unknown filter that is not reached": `{% for m in messages %}{% if m.role == 'nobody' %}{{ m.content | fromjson }}{% else %}{{ m.content }}{% endif %}{% endfor %}`,
	"own/unknown filter that some reach":     `{% for m in messages %}{{ m.content | from_json if m.role == 'tool' else m.content }}{% endfor %}`,
	"own/unknown test that some reach":       `{% for m in messages %}{% if m.tool_calls and m.content is json %}x{% endif %}{{ m.content }}{% endfor %}`,
	"own/unknown filter in a loop":           `{% if tools is none %}{% for m in messages %}{{ m.content | fromjson }}{% endfor %}{% endif %}`,
	"own/dict.fromkeys":                      `{{ dict.fromkeys(messages | map(attribute='role'), add_generation_prompt) }}`,
	"own/no name of a character":             `{{ '\N{BULLET' }}`,
	"own/tags that are not reached":          `{% for m in messages %}{% if m.role == 'nobody' %}{% include 'x' %}{% autoescape true %}{{ '\N{BULLET}' }}{% endautoescape %}{% else %}{{ m.content }}{% endif %}{% endfor %}`,
	"own/blocks":                             `{% for m in messages %}{% block turn scoped %}{{ m.role }}{% block end %}{{ m }}{{ bos_token }}{% endblock %}{% endblock %}{% endfor %}{{ self.end() }}`,
	"own/tags that some reach":               `{% for m in messages %}{% if m.role == 'tool' %}{% import 'x' as y %}{% endif %}{{ m.content }}{% endfor %}`,
	"own/names that are set later":           `{% for m in messages %}{{ m.role }}{{ tools }}{% endfor %}{% macro f() %}{{ add_generation_prompt }}{% endmacro %}{{ f() }}{% set tools = 1 %}{% set add_generation_prompt = 2 %}{{ f() }}`,
	"own/guarded attributes":                 `{% set ns = namespace(_n=0, n=0) %}{% for m in messages %}{% set ns._n = 1 %}{{ ns._n }}{{ ns['_n'] is defined }}{% if m.tool_calls %}{{ ns._n + 1 }}{% endif %}{% endfor %}`,
}

// templates compares the renderings of random conversations, template by template.
func templates(ref *reference, o options) (figures []bench.Figure) {
	all := templateTexts(o)
	if len(all) == 0 {
		fmt.Println("no templates under", o.shared)
	}
	maps.Copy(all, ownTemplates)
	r := random(3)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if strings.Contains(name, o.only) {
			bench.Within(name, func() { figures = append(figures, template(ref, r, name, all[name])) })
		}
	}
	return figures
}

// variables are the inputs of a template.
type variables struct {
	text json.RawMessage // for the reference
	vars *jinja.Dict     // the same, for kvroute's renderer
}

func template(ref *reference, r *rand.Rand, name, text string) bench.Figure {
	var parsed struct{ Error string }
	ref.ask(map[string]any{"op": "parse", "template": text}, &parsed)
	ours, err := jinja.Parse(name, text)
	if refused := parsed.Error != ""; refused || err != nil {
		different := 0.
		if !refused || err == nil {
			fmt.Printf("%s: different: got %v; want %s\n", name, err, parsed.Error)
			different = conversations
		}
		return bench.NewFigure(fmt.Sprintf("template %s: different of %d (refused)", name, conversations), "", bench.Exactly(0), different)
	}
	lacking := 0
	f := comparison[variables, string]{
		name: "template " + name, cases: conversations,
		random: func() variables {
			text := bench.Must(json.Marshal(conversation(r)))
			return variables{text, bench.Must(jinja.FromJSON(text)).Dict()}
		},
		theirs: func(all []variables) (out []string) {
			vars := make([]json.RawMessage, len(all))
			for i, v := range all {
				vars[i] = v.text
			}
			for _, o := range ref.askAll(map[string]any{"op": "render", "vars": vars}, len(vars)).Outcomes {
				if o.Out != nil {
					out = append(out, outcome(*o.Out, nil))
					continue
				}
				kind, message, _ := strings.Cut(*o.Err, ": ")
				out = append(out, outcome("", &jinja.Error{Kind: jinja.Kind(kind), Message: message}))
			}
			return out
		},
		ours: func(v variables) string {
			out, err := ours.Render(nil, v.vars, jinja.Options{Now: today()})
			return outcome(string(out), err)
		},
		equal: func(ours, theirs string) bool {
			// An unsupported request is routed by text blocks, and the decision has the reason. That is as good only if
			// the reference refuses the request, too.
			if ours == "error "+string(jinja.Unsupported) && strings.HasPrefix(theirs, "error ") {
				lacking++
				return true
			}
			return ours == theirs
		},
		show: func(v variables, got, want string) string {
			at := 0
			for at < min(len(got), len(want)) && got[at] == want[at] {
				at++
			}
			at = max(0, at-20)
			return fmt.Sprintf("got %+.80q; want %+.80q; for %s", got[at:], want[at:], v.text)
		},
	}.run()
	f.What += fmt.Sprintf(" (%d unsupported)", lacking)
	return f
}

// outcome describes what a template returned: the text or the kind of the error. An error that the
// template raises has its message, too.
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
	vars := map[string]any{"add_generation_prompt": r.IntN(3) > 0, "bos_token": "<BOS>", "eos_token": "<EOS>", "tools": nil}
	maps.Copy(vars, chats.Requests{R: r, Strange: 5}.Request())
	for _, m := range vars["messages"].([]any) {
		calls, _ := m.(map[string]any)["tool_calls"].([]any)
		for _, call := range calls {
			f := call.(map[string]any)["function"].(map[string]any)
			if text := f["arguments"].(string); json.Valid([]byte(text)) && r.IntN(4) > 0 {
				f["arguments"] = json.RawMessage(text)
			}
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
