// SPDX-License-Identifier: Apache-2.0

package jinja_test

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Hostile templates end with an error that says which bound they met.
func TestLimits(t *testing.T) {
	small := jinja.Options{MaxOutput: 1 << 20, MaxSteps: 200_000}
	for _, c := range []struct {
		name, text string
		want       jinja.Kind
	}{
		{"endless loops", "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{% endfor %}{% endfor %}{% endfor %}", jinja.LimitError},
		{"long output", "{% for a in range(10000) %}" + strings.Repeat("x", 1000) + "{% endfor %}", jinja.LimitError},
		{"long string", "{{ 'a' * 10000000000 }}", jinja.LimitError},
		{"doubling", "{% set ns = namespace(s='aaaaaaaa') %}{% for a in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", jinja.LimitError},
		{"doubling a list", "{% set ns = namespace(s=[1]) %}{% for a in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", jinja.LimitError},
		{"long list", "{{ [1] * 10000000000 }}", jinja.LimitError},
		{"padding", "{{ ('%60000s' * 1000) % ((1,) * 1000) }}", jinja.LimitError},
		{"padding by format", "{{ ('{:60000}' * 1000).format(*([1] * 1000)) }}", jinja.LimitError},
		{"wide format", "{{ '%99999999s' % 1 }}", jinja.LimitError},
		{"centering", "{{ 'a' | center(1000000000) }}", jinja.LimitError},
		{"tabs", "{{ ('\t' * 10000).expandtabs(1000000) }}", jinja.LimitError},
		{"indenting", "{{ ('\n' * 100000) | indent(10000) }}", jinja.LimitError},
		{"batches", "{{ [1] | batch(1000000000, 0) | list }}", jinja.LimitError},
		{"slices", "{{ [1] | slice(1000000000) | list }}", jinja.LimitError},
		{"powers", "{{ 9 ** 99999999 }}", jinja.LimitError},
		{"large products", "{% set ns = namespace(n=10 ** 4000) %}{% for a in range(9) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", jinja.LimitError},
		{"recursive loops", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", jinja.RecursionError},
		{"callers", "{% macro m() %}{{ caller() }}{% call m() %}x{% endcall %}{% endmacro %}{% call m() %}x{% endcall %}", jinja.RecursionError},
		{"translating", "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}", jinja.LimitError},
		{"wrapping", "{% for a in range(1000) %}{{ ('a ' * 100000) | wordwrap(1) }}{% endfor %}", jinja.LimitError},
		{"links", "{% for a in range(1000) %}{{ ('www.a.com ' * 10000) | urlize }}{% endfor %}", jinja.LimitError},
		{"replacing", "{{ ('a' * 100000).replace('a', 'b' * 100000) }}", jinja.LimitError},
		{"joining", "{{ (['a' * 100000] * 100000) | join }}", jinja.LimitError},
		{"recursion", "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", jinja.RecursionError},
		{"deep parentheses", "{{ " + strings.Repeat("(", 50_000) + "1" + strings.Repeat(")", 50_000) + " }}", jinja.SyntaxError},
		{"deep lists", "{{ " + strings.Repeat("[", 100_000) + " }}", jinja.SyntaxError},
		{"deep blocks", strings.Repeat("{% if 1 %}", 20_000), jinja.SyntaxError},
		{"deep signs", "{{ " + strings.Repeat("-", 100_000) + "1 }}", jinja.SyntaxError},
		{"deep nots", "{{ " + strings.Repeat("not ", 100_000) + "1 }}", jinja.SyntaxError},
		{"many filters", "{{ 1" + strings.Repeat("|string", 50_000) + " }}", jinja.SyntaxError},
		{"long template", strings.Repeat("x", 5<<20), jinja.LimitError},
		{"not UTF-8", "\xff", jinja.SyntaxError},
	} {
		t.Run(c.name, func(t *testing.T) {
			tmpl, err := jinja.Parse("hostile", c.text)
			if err == nil {
				_, err = tmpl.Render(nil, nil, small)
			}
			var e *jinja.Error
			if !errors.As(err, &e) || e.Kind != c.want || e.Name != "hostile" {
				t.Errorf("error %v, want one of kind %s that names the template", err, c.want)
			}
		})
	}
}

// Reading a template takes bounded memory, whatever it is made of.
func TestParsingIsBounded(t *testing.T) {
	for _, c := range []struct{ before, part, behind string }{
		{"{{ a", ".a", " }}"},
		{"{{ a", "[a]", " }}"},
		{"{{ a", "()", " }}"},
		{"{{ a", "+a", " }}"},
		{"{{ a", " and a", " }}"},
		{"{{ a", "~a", " }}"},
		{"{{ a", "<a", " }}"},
		{"{{ [a", ",a", "] }}"},
		{"{{ {a:a", ",a:a", "} }}"},
		{"{{ a(b=1", ",b=1", ") }}"},
		{"{{ 2", "**2", " }}"},
		{"", "{%with a=a%}{%endwith%}", ""},
		{"", "{%filter upper%}{%endfilter%}", ""},
		{"{%macro a()%}{%endmacro%}", "{%call a()%}{%endcall%}", ""},
		{"{{ 'a'", "''", " }}"},
		{"", "{{a}}", ""},
		{"", "{#a#}a", ""},
		{"", "{%if a%}{%endif%}", ""},
		{"", "{%for a in a%}{%endfor%}", ""},
		{"", "{%macro a()%}{%endmacro%}", ""},
		{"", "{%set a=a%}", ""},
	} {
		for _, size := range []int{120_000, 900_000} {
			text := c.before + strings.Repeat(c.part, size/len(c.part)) + c.behind
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			tmpl, err := jinja.Parse("t", text)
			if err == nil {
				_, err = tmpl.Render(nil, nil, jinja.Options{})
			}
			runtime.ReadMemStats(&after)
			made := (after.TotalAlloc - before.TotalAlloc) >> 20
			t.Logf("%d KB of %s: %d MiB allocated, %.100v", size>>10, c.part, made, err)
			if made > 450 { // 100 without the race detector; 500 and more without the limit of tokens
				t.Errorf("%d KB of %s: %d MiB allocated", size>>10, c.part, made)
			}
		}
	}
}

// No value that a template can build endangers the process: values that hold
// themselves, are deep or share their parts end the rendering where they are
// printed, compared or sorted, and work is counted by its size.
func TestHostileValues(t *testing.T) {
	const (
		itself  = "{% set ns = namespace() %}{% set ns.a = ns %}\n"
		deep    = "{% set ns = namespace(l=[], m=[]) %}{% for a in range(100) %}{% for b in range(100) %}{% set ns.l = [ns.l] %}{% set ns.m = [ns.m] %}{% endfor %}{% endfor %}\n"
		tuples  = "{% set ns = namespace(l=(), m=()) %}{% for a in range(1000) %}{% set ns.l = (ns.l,) %}{% set ns.m = (ns.m,) %}{% endfor %}\n"
		shared  = "{% set ns = namespace(s=['x'], t=['x']) %}{% for a in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}\n"
		sharedT = "{% set ns = namespace(s=('x',), t=('x',)) %}{% for a in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}\n"
	)
	for _, c := range []struct {
		text string
		want jinja.Kind
		line int
	}{
		{itself + "{{ ns }}", jinja.RecursionError, 2},
		{itself + "{{ ns | string }}", jinja.RecursionError, 2},
		{itself + "{{ [ns] }}", jinja.RecursionError, 2},
		{itself + "{{ 'a' ~ ns }}", jinja.RecursionError, 2},
		{itself + "{{ '%s' % [ns] }}", jinja.RecursionError, 2},
		{itself + "{{ [[ns]] | join }}", jinja.RecursionError, 2},
		{itself + "{{ [ns] | upper }}", jinja.RecursionError, 2},
		{itself + "{{ raise_exception(ns) }}", jinja.RecursionError, 2},
		{itself + "{{ 'x' | replace(ns, 1) }}", jinja.RecursionError, 2},
		{"{% set ns = namespace(l=[]) %}{% for a in range(2200) %}{% for b in range(2200) %}{% set ns.l = [ns.l] %}{% endfor %}{% endfor %}{{ ns.l }}", jinja.LimitError, 1},
		{deep + "{{ ns.l | string }}", jinja.RecursionError, 2},
		{deep + "{{ ns.l | tojson }}", jinja.RecursionError, 2},
		{deep + "{{ ns.l == ns.m }}", jinja.RecursionError, 2},
		{deep + "{{ ns.l < ns.m }}", jinja.RecursionError, 2},
		{deep + "{{ [ns.l, ns.m] | sort }}", jinja.RecursionError, 2},
		{deep + "{{ ns.l in [ns.m] }}", jinja.RecursionError, 2},
		{deep + "{{ {'a': ns.l} == {'a': ns.m} }}", jinja.RecursionError, 2},
		{tuples + "{{ {ns.l: 1} }}", jinja.RecursionError, 2},
		{shared + "{{ ns.s | tojson }}", jinja.LimitError, 2},
		{shared + "{{ ns.s | tojson(indent=900) }}", jinja.LimitError, 2},
		{shared + "{{ ns.s | string }}", jinja.LimitError, 2},
		{shared + "{{ ns.s == ns.t }}", jinja.LimitError, 2},
		{shared + "{{ ns.s > ns.t }}", jinja.LimitError, 2},
		{shared + "{{ ns.s is eq(ns.t) }}", jinja.LimitError, 2},
		{sharedT + "{{ {ns.s: 1}[ns.t] }}", jinja.LimitError, 2},
		{"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", jinja.LimitError, 1},
		{"{% set l = range(65536) | list %}{% for a in range(3000) %}\n{% set x = l | sort %}{% endfor %}", jinja.LimitError, 2},
		{"{% set l = range(65536) | list %}{% for a in range(9999) %}\n{% set x = l[::2] %}{% endfor %}", jinja.LimitError, 2},
		{"{% set l = range(65536) | list %}{% for a in range(9999) %}\n{% set x = l + l %}{% endfor %}", jinja.LimitError, 2},
		{"{% set l = range(65536) | list %}{% for a in range(99999) %}\n{% set x = l == l %}{% endfor %}", jinja.LimitError, 2},
		{"{% set l = ['x'] * 65536 %}{% for a in range(9999) %}\n{% set x = l | join(',') %}{% endfor %}", jinja.LimitError, 2},
		{"{% set l = ['x' * 100000] * 100000 %}\n{{ ','.join(l) }}", jinja.LimitError, 2},
		{"{% set s = 'x' * 1000000 %}{% for a in range(99999) %}\n{% set x = s.strip('x') %}{% endfor %}", jinja.LimitError, 2},
		{"{% set s = 'x ' * 5000000 %}\n{{ s.split() | length }}", jinja.LimitError, 2},
		{"{% set s = 'x ' * 5000000 %}\n{{ s.split(' ') | length }}", jinja.LimitError, 2},
		{"{% set s = ' ' * 4280 ~ '7' %}{% for a in range(99999) %}\n{% set x = s | int %}{% endfor %}", jinja.LimitError, 2},
		{"{% set s = 'x' * 1000000 %}{% for a in range(99999) %}\n{% set x %}{{ s }}{% endset %}{% endfor %}", jinja.LimitError, 2},
	} {
		start := time.Now()
		tmpl, err := jinja.Parse("hostile", c.text)
		if err != nil {
			t.Fatalf("%s: %v", c.text, err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err = tmpl.Render(nil, nil, jinja.Options{})
		runtime.ReadMemStats(&after)
		var e *jinja.Error
		if !errors.As(err, &e) || e.Kind != c.want || e.Name != "hostile" || e.Line != c.line {
			t.Errorf("%s: error %v, want one of kind %s that names the template and line %d", c.text, err, c.want, c.line)
		}
		made := (after.TotalAlloc - before.TotalAlloc) >> 20
		t.Logf("%v, %d MiB: %.140q", time.Since(start).Round(time.Millisecond), made, c.text[max(0, len(c.text)-60):])
		if made > 640 {
			t.Errorf("%s: %d MiB allocated", c.text, made)
		}
	}
}

// heap is how many bytes objects take that were not collected yet.
func heap() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// However a template makes values, what it holds at once is bounded: 128 MiB with all
// that a busy machine has not collected yet, however many steps it takes.
func TestMemoryIsBounded(t *testing.T) {
	const many = "{% for a in range(99999) %}{% for b in range(99999) %}"
	for _, text := range []string{
		"{% set ns = namespace(s='x' * 1000000, l=[]) %}" + many + "{% set ns.l = ns.l + [ns.s ~ a ~ b] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = [ns.l, a, b] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [{'a': a, 'b': b}] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + ['x'.upper] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [namespace(a=1)] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [loop] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [range(a)] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [[1] | map('upper')] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% macro m(x) %}{{ x }}{% endmacro %}{% set ns.l = ns.l + [m] %}{% endfor %}{% endfor %}",
		"{% set n = ('9' * 4000) | int %}{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [n * n + a] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + ['abc def'.split()] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [{'a': 1}.items()] %}{% endfor %}{% endfor %}",
		"{% set s = '\n' * 2000000 %}{{ s.splitlines() | length }}", "{{ ('%60000s' * 1000) % ((1,) * 1000) }}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [cycler(a, b)] %}{% endfor %}{% endfor %}",
		"{% set ns = namespace(l=[]) %}" + many + "{% set ns.l = ns.l + [[a, b] | groupby('x', 1)] %}{% endfor %}{% endfor %}",
		"{{ ('a b ' * 1000000) | wordwrap(3) }}", "{{ ('<a>' * 2000000) | striptags }}", "{{ ('ä' * 3000000) | urlencode }}",
		"{% set s = 'a ' * 2000000 %}{{ s.split() }}", "{% set s = 'a' * 8000000 %}{{ s | list | length }}",
		"{{ ('<' * 3000000) | escape }}",
		"{{ range(99999) | list | tojson(indent=900) }}", many + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
		"{% set x %}" + many + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}{% endset %}",
		"{% macro m(n) %}{{ 'x' * 100000 }}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(190) }}",
		"{{ (['a' * 100000] * 1000) | sort | join }}",
	} {
		tmpl, err := jinja.Parse("hostile", text)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		runtime.GC()
		before := heap()
		done := make(chan struct{})
		peak := uint64(0)
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				peak = max(peak, heap())
				select {
				case <-done:
					return
				default:
					runtime.Gosched()
				}
			}
		})
		out, err := tmpl.Render(nil, nil, jinja.Options{})
		close(done)
		wg.Wait()
		held := (int64(peak) - int64(before)) >> 20
		t.Logf("%d MiB, %.60v: %.100q", held, err, text)
		if held > 128 {
			t.Errorf("%s: %d MiB", text, held)
		}
		runtime.KeepAlive(out)
	}
}

// Chains of operators are as long as a template, not as deep.
func TestLongChains(t *testing.T) {
	for _, c := range []string{"{{ 1" + strings.Repeat(" + 1", 20_000) + " }}", "{{ 1" + strings.Repeat(".real", 20_000) + " is defined }}", "{{ 'a'" + strings.Repeat(" ~ 'a'", 20_000) + " }}", "{% if 0 %}" + strings.Repeat("{% elif 0 %}", 20_000) + "{% endif %}"} {
		tmpl, err := jinja.Parse("long", c)
		if err == nil {
			_, err = tmpl.Render(nil, nil, jinja.Options{})
		}
		var e *jinja.Error
		if err != nil && !errors.As(err, &e) {
			t.Errorf("%.30s: %v", c, err)
		}
	}
}

func TestErrorsNameTheLine(t *testing.T) {
	for text, want := range map[string]string{
		"a\nb\n{{ x.y.z }}":                 "t:3: UndefinedError",
		"a\n{% if %}":                       "t:2: TemplateSyntaxError",
		"{% for x in [1] %}\n{{ x + 'a' }}": "t:2: TemplateSyntaxError",
		"\n\n{{ raise_exception('no') }}":   "t:3: TemplateError: no",
		"\n{% include 'x' %}":               "t:2: TypeError: no loader for this environment specified",
		"\n{% do x %}":                      "t:2: TemplateSyntaxError: unknown tag 'do'",
		"{% break %}":                       "t:1: TemplateSyntaxError: 'break' outside of a loop",
	} {
		tmpl, err := jinja.Parse("t", text)
		if err == nil {
			_, err = tmpl.Render(nil, nil, jinja.Options{})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one with %q", text, err, want)
		}
	}
}

// A feature that the package lacks gives an error that names it once it is reached.
func TestUnsupported(t *testing.T) {
	for text, want := range map[string]string{
		"\n{{ [1] | random }}": "t:2: Unsupported: the filter 'random'",
		"{{ dict.items }}":     "t:1: Unsupported: the attribute 'items' of the class dict",
		"{% if n %}\n{% autoescape true %}{% endautoescape %}{% endif %}": "",
		"\n{% autoescape true %}{% endautoescape %}":                      "t:2: Unsupported: the block 'autoescape'",
		"\n{{ 'a' '\\N{BULLET}' }}":                                       "t:2: Unsupported: the escape \\N{BULLET}",
		"{% if n %}{{ '\\N{BULLET}\\ud83d' }}{% endif %}":                 "",
		"a\n{{ 'a'.encode() }}":                                           "t:2: Unsupported: the method 'encode'",
		"{{ lipsum() }}":                                                  "t:1: Unsupported: the function 'lipsum'",
		"{{ (-2) ** 0.5 }}":                                               "t:1: Unsupported: complex numbers",
		"{{ strftime_now('%Q') }}":                                        "t:1: Unsupported: %Q in a date format",
		"{{ range(99) | list | pprint }}":                                 "t:1: Unsupported: pprint of more than one line",
		"{% if 0 %}{{ 'a'.encode() }}{{ lipsum() | random }}{% endif %}":  "",
		"{{ {'encode': 1}.encode }}":                                      "",
	} {
		tmpl, err := jinja.Parse("t", text)
		if err == nil {
			_, err = tmpl.Render(nil, nil, jinja.Options{})
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: error %v, want one with %q", text, err, want)
		}
	}
}

func TestFromJSON(t *testing.T) {
	tmpl, err := jinja.Parse("t", "{{ x }}")
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		`{"b":1,"a":2,"b":3}`: "{'b': 3, 'a': 2}", `1e16`: "1e+16", `1.0`: "1.0", `-0.0`: "-0.0", `1E5`: "100000.0", `123456789012345678901234567890`: "123456789012345678901234567890",
		`[NaN, Infinity, -Infinity, true, null]`: "[nan, inf, -inf, True, None]", `"a\u00e9\ud83d\ude00\/"`: "aé😀/", ` [ ] `: "[]", `{}`: "{}", `1e400`: "inf",
	} {
		v, err := jinja.FromJSON([]byte(text))
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		vars := jinja.NewDict(1)
		vars.Set("x", v)
		if got, err := tmpl.Render(nil, vars, jinja.Options{}); err != nil || string(got) != want {
			t.Errorf("%s becomes %q, %v; want %q", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		``: "byte 0", `{`: "byte 1", `[1,]`: "byte 3", `{"a":1,}`: "byte 7", `"\ud800"`: "surrogate", `"\udc00x"`: "surrogate", "\"\xff\"": "UTF-8", "\"a\nb\"": "control", `01`: "byte 1", `1 2`: "after the end", `tru`: "byte 0",
		strings.Repeat("[", 5000): "too deep", `"\x"`: "escape", strings.Repeat("9", 5000): "4300",
	} {
		if _, err := jinja.FromJSON([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20s: error %v, want one with %q", text, err, want)
		}
	}
}

// One template and one set of variables serve many renderings at once.
func TestConcurrentRendering(t *testing.T) {
	vars, o, all := golden(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for _, c := range all {
				tmpl, err := jinja.Parse("golden", c.Template)
				if err != nil || c.Out == nil {
					continue
				}
				var e *jinja.Error
				if out, err := tmpl.Render(nil, vars, o); errors.As(err, &e) && e.Kind == jinja.Unsupported {
					continue
				} else if err != nil || string(out) != *c.Out {
					t.Errorf("%q: %q, %v", c.Template, out, err)
				}
			}
		})
	}
	wg.Wait()
}

func FuzzTemplate(f *testing.F) {
	vars, o, all := golden(f)
	for i, c := range all {
		if i%5 == 0 {
			f.Add(c.Template)
		}
	}
	o.MaxOutput, o.MaxSteps = 1<<16, 20_000
	f.Fuzz(func(t *testing.T, text string) {
		tmpl, err := jinja.Parse("fuzz", text)
		if err == nil {
			_, err = tmpl.Render(nil, vars, o)
		}
		var e *jinja.Error
		if err != nil && !errors.As(err, &e) {
			t.Errorf("%q: error of another type: %v", text, err)
		}
	})
}

func FuzzJSONValue(f *testing.F) {
	f.Add([]byte(`{"a":[1,2.5e3,"x\n\u00e9",null,true,{"b":{}}],"c":-0.0}`))
	f.Add([]byte(`[NaN,"\ud83d\ude00",123456789012345678901234567890]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := jinja.FromJSON(b)
		if err != nil {
			return
		}
		vars := jinja.NewDict(1)
		vars.Set("x", v)
		tmpl, err := jinja.Parse("fuzz", "{{ x | tojson }}")
		if err != nil {
			t.Fatal(err)
		}
		once, err := tmpl.Render(nil, vars, jinja.Options{})
		if err != nil {
			t.Fatal(err)
		}
		again, err := jinja.FromJSON(once)
		if err != nil {
			t.Fatalf("%q becomes %q: %v", b, once, err)
		}
		vars.Set("x", again)
		if twice, err := tmpl.Render(nil, vars, jinja.Options{}); err != nil || string(once) != string(twice) {
			t.Errorf("%q becomes %q, then %q, %v", b, once, twice, err)
		}
	})
}

// conversation returns the variables of a chat with tools.
func conversation(messages int) *jinja.Dict {
	var b strings.Builder
	b.WriteString(`{"tools":[`)
	for i := range 8 {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"type":"function","function":{"name":"tool_%d","description":"Does number %d.","parameters":{"type":"object","properties":{"city":{"type":"string"},"n":{"type":"integer"}},"required":["city"]}}}`, i, i)
	}
	b.WriteString(`],"add_generation_prompt":true,"messages":[{"role":"system","content":"You help."}`)
	for i := range messages {
		role := []string{"user", "assistant"}[i%2]
		fmt.Fprintf(&b, `,{"role":%q,"content":"Message number %d says something of a usual length, and some more."}`, role, i)
	}
	b.WriteString("]}")
	v, err := jinja.FromJSON([]byte(b.String()))
	if err != nil {
		panic(err)
	}
	return v.Dict()
}

const chatml = `{%- if tools %}{{ '<|im_start|>system\n' }}{{ messages[0].content + '\n\n' }}{% for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}{%- set content = message.content %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '<|im_start|>' + message.role + '\n' + content.strip('\n') + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}`

func BenchmarkRender(b *testing.B) {
	tmpl, err := jinja.Parse("chatml", chatml)
	if err != nil {
		b.Fatal(err)
	}
	vars := conversation(100)
	var out []byte
	b.ReportAllocs()
	for b.Loop() {
		if out, err = tmpl.Render(out[:0], vars, jinja.Options{}); err != nil {
			b.Fatal(err)
		}
	}
}

// Rendering allocates in proportion to the messages, not to their text.
func TestAllocations(t *testing.T) {
	tmpl, err := jinja.Parse("chatml", chatml)
	if err != nil {
		t.Fatal(err)
	}
	const messages = 100
	vars := conversation(messages)
	out, err := tmpl.Render(nil, vars, jinja.Options{})
	if err != nil {
		t.Fatal(err)
	}
	n := testing.AllocsPerRun(10, func() { out, _ = tmpl.Render(out[:0], vars, jinja.Options{}) })
	t.Logf("%v allocations for %d messages", n, messages)
	if n > 20+messages {
		t.Errorf("%v allocations for %d messages", n, messages)
	}
}
