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
	"own/names of characters":                `{% for m in messages %}{{ '\N{BULLET} \N{Latin Small Letter E With Acute}' ~ m.content }}{% endfor %}`,
	"own/no name of a character":             `{{ '\N{BULLETT}' }}`,
	"own/guarded attributes":                 `{% set ns = namespace(_n=0, n=0) %}{% for m in messages %}{% set ns._n = 1 %}{{ ns._n }}{{ ns['_n'] is defined }}{% if m.tool_calls %}{{ ns._n + 1 }}{% endif %}{% endfor %}`,
}

// templates compares the renderings of random conversations, template by template.
func templates(ref *reference, o options) (compared []bench.Comparison) {
	all := templateTexts(o)
	if len(all) == 0 {
		fmt.Println("no templates under", o.shared)
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

// variables are the inputs of a template.
type variables struct {
	text json.RawMessage // for the reference
	vars *jinja.Dict     // the same, for kvroute's renderer
}

// rendered is the outcome of a template: a text, or an error.
type rendered struct {
	text string
	err  error
}

func template(ref *reference, r *rand.Rand, name, text string) bench.Comparison {
	var parsed struct{ Error string }
	ref.ask(map[string]any{"op": "parse", "template": text}, &parsed)
	ours, err := jinja.Parse(name, text)
	if refused := parsed.Error != ""; refused && err != nil {
		c := bench.NewComparison("template", name, conversations, 0, 0, 0)
		c.Refused = conversations
		return c
	} else if refused || err != nil {
		fmt.Printf("%s: different: got %v; want %s\n", name, err, parsed.Error)
		return bench.NewComparison("template", name, conversations, conversations, 0, 0)
	}
	lacking := 0
	c := comparison[variables, rendered]{
		kind: "template", name: name, cases: conversations,
		random: func() variables {
			text := bench.Must(json.Marshal(conversation(r)))
			return variables{text, bench.Must(jinja.FromJSON(text)).Dict()}
		},
		theirs: func(all []variables) (out []rendered, seconds float64) {
			vars := make([]json.RawMessage, len(all))
			for i, v := range all {
				vars[i] = v.text
			}
			answers := ref.askAll(map[string]any{"op": "render", "vars": vars}, len(vars))
			for _, o := range answers.Outcomes {
				if o.Out != nil {
					out = append(out, rendered{text: *o.Out})
					continue
				}
				kind, message, _ := strings.Cut(*o.Err, ": ")
				out = append(out, rendered{err: &jinja.Error{Kind: jinja.Kind(kind), Message: message}})
			}
			return out, answers.Seconds
		},
		ours: func(v variables) rendered {
			out, err := ours.Render(nil, v.vars, jinja.Options{Now: today()})
			return rendered{string(out), err}
		},
		equal: func(ours, theirs rendered) bool {
			// An unsupported request is routed by text blocks, and says why.
			if ours.String() == "error "+string(jinja.Unsupported) {
				lacking++
				return true
			}
			return ours.String() == theirs.String()
		},
		show: func(v variables, ours, theirs rendered) string {
			got, want, at := ours.String(), theirs.String(), 0
			for at < min(len(got), len(want)) && got[at] == want[at] {
				at++
			}
			at = max(0, at-20)
			return fmt.Sprintf("got %+.80q; want %+.80q; for %s", got[at:], want[at:], v.text)
		},
	}.run()
	c.Refused = lacking
	return c
}

// String returns the text or the kind of the error. An error that the template raises has its
// message, too.
func (r rendered) String() string {
	e, ok := errors.AsType[*jinja.Error](r.err)
	switch {
	case r.err == nil:
		return "text " + r.text
	case !ok:
		return "unknown error " + r.err.Error()
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
