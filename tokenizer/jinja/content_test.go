// SPDX-License-Identifier: Apache-2.0

package jinja_test

import (
	"testing"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// The results of vLLM 0.32's own detection for these templates.
func TestLoopsOverContent(t *testing.T) {
	for text, want := range map[string]bool{
		"{% for m in messages %}{{ m.content }}{% endfor %}":                                                            false,
		"{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}":                                       true,
		"{% for m in messages %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}":                             true,
		"{% for m in messages %}{% for c in m.content[1:] %}{% endfor %}{% endfor %}":                                   true,
		"{% for m in messages %}{% for c in m.content if c.x %}{% endfor %}{% endfor %}":                                true,
		"{% for m in messages %}{% for c in m['contents'] %}{% endfor %}{% endfor %}":                                   false,
		"{% for m in messages %}{% for c in m[content] %}{% endfor %}{% endfor %}":                                      false,
		"{% for m in messages %}{% for c in m.content.x %}{% endfor %}{% endfor %}":                                     false,
		"{% for m in messages %}{% for c in m.get('content') %}{% endfor %}{% endfor %}":                                false,
		"{% for m in messages %}{% for c in m.content or [] %}{% endfor %}{% endfor %}":                                 false,
		"{% for m in messages %}{% for c in (m.content is string) %}{% endfor %}{% endfor %}":                           true,
		"{% for m in messages %}{% for c in (m.content is not string) %}{% endfor %}{% endfor %}":                       false,
		"{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}":                                    false,
		"{% for m in messages %}{% for k, v in m.content %}{% endfor %}{% endfor %}":                                    false,
		"{% for m in messages %}{% for a, b in m.x %}{% endfor %}{% for c in m.content %}{% endfor %}{% endfor %}":      true,
		"{% for m, n in messages %}{% endfor %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}": false,
		// A variable set from a content counts if its name is content, wherever it comes from.
		"{% for m in messages[1:] %}{% set x = m['content'] %}{% for c in x %}{% endfor %}{% endfor %}":             false,
		"{% for m in messages[1:] %}{% set content = m['content'] %}{% for c in content %}{% endfor %}{% endfor %}": true,
		"{% for m in messages %}{% set content = m.x %}{% for c in content %}{% endfor %}{% endfor %}":              true,
		"{% for c in content %}{% endfor %}":                                                                            true,
		"{% for c in content | list %}{% endfor %}":                                                                     false,
		"{% for c, d in content %}{% endfor %}{% for c in content %}{% endfor %}":                                       false,
		"{% for x in y %}{% else %}{% for c in content %}{% endfor %}{% endfor %}":                                      true,
		"{% for x in y %}{% for a, b in content %}{% endfor %}{% else %}{% for c in content %}{% endfor %}{% endfor %}": false,
		// Messages by another name.
		"{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{% for c in m.content %}{% endfor %}{% endfor %}":         true,
		"{% set a = b %}{% set b = messages %}{% for m in a | list %}{% for c in m.content %}{% endfor %}{% endfor %}":               true,
		"{% if x %}{% set a = messages %}{% endif %}{% for m in a %}{% for c in m.content %}{% endfor %}{% endfor %}":                true,
		"{% set a = messages + [] %}{% for m in a %}{% for c in m.content %}{% endfor %}{% endfor %}":                                false,
		"{% set ns = namespace() %}{% set ns.m = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}": false,
		"{% set a, b = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}":                           false,
		"{% set a = messages %}{% set messages = a %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}":        true,
		"{% for c in messages[0].content %}{% endfor %}":                                                                             false,
		"{% set m = messages[0] %}{% for c in m.content %}{% endfor %}":                                                              false,
		"{% for m in messages[0] %}{% for c in m.content %}{% endfor %}{% endfor %}":                                                 false,
		// Macros.
		"{% macro f(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}":                               true,
		"{% macro f(x, y) %}{% for c in y %}{% endfor %}{% endmacro %}{% for m in messages %}{{ 'a' + f(1, y=m['content'] | list) }}{% endfor %}":       true,
		"{% macro f(x, y) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(1, m.content) }}{% endfor %}":                         false,
		"{% macro f(x) %}{% for c in x | list %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}":                        false,
		"{% macro f(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}":                                       false,
		"{% macro f(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{% if f(m.content) %}{% endif %}{% endfor %}":                 true,
		"{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ f(1) }}":                                                              false,
		"{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}":                   true,
		"{% macro g(m) %}{% for c in m.content %}{% endfor %}{% endmacro %}{% for m in messages %}{{ g(m) }}{% endfor %}":                               true,
		"{% macro g(m) %}{% for c in m.content %}{% endfor %}{% endmacro %}{% for n in messages %}{{ g(n) }}{% endfor %}":                               false,
		"{% macro f(x) %}{% macro h(y) %}{% for c in x %}{% endfor %}{% endmacro %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}": true,
		"{% macro f(x) %}{% for k, v in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}":                            false,
		"{% for m in messages %}{{ f.g(m.content) }}{% endfor %}{% macro g(x) %}{% for c in x %}{% endfor %}{% endmacro %}":                             false,
		"{% set m %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}{% endset %}":                                                true,
		"{% generation %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}{% endgeneration %}":                                    true,
	} {
		tmpl, err := jinja.Parse("t", text)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if tmpl.LoopsOverContent() != want {
			t.Errorf("%s: %v, want %v", text, !want, want)
		}
	}
}

func TestLoopsOver(t *testing.T) {
	tmpl, err := jinja.Parse("t", "{% for m in messages %}{% for c in msg['content'] | list %}{% endfor %}{% endfor %}{% if x %}{% for d in e.f[1:] %}{% endfor %}{% endif %}")
	if err != nil {
		t.Fatal(err)
	}
	for of, want := range map[[2]string]bool{{"msg", "content"}: true, {"e", "f"}: true, {"m", "content"}: false, {"msg", "f"}: false, {"messages", "content"}: false} {
		if tmpl.LoopsOver(of[0], of[1]) != want {
			t.Errorf("%s.%s: %v, want %v", of[0], of[1], !want, want)
		}
	}
}
