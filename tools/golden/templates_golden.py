# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer/jinja/testdata/golden.jsonl: short templates of our own with what Jinja2 makes of them.

Run through `make golden`. A line is {"template", "vars", "out"} or {"template", "vars", "err"}, the error as
"Class: message". The environment is that in which engines render chat templates.
"""
import datetime
import json
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2026, 8, 2, 9, 5, 7)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(lineno)

    def _same(self, caller):
        return caller()


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda f: NOW.strftime(f)
    return env


VARS = {
    "s": "Hello, Wörld <b>", "e": "", "n": 5, "neg": -7, "f": 2.5, "big": 123456789012345678901234567890, "t": True, "no": None,
    "l": [3, 1, 2], "ls": ["b", "A", "c"], "d": {"b": 2, "a": 1, "items": "key", "c": None}, "nested": {"x": [{"y": "z"}]},
    "users": [{"name": "ann", "age": 3, "on": True}, {"name": "Bob", "age": 1, "on": False}, {"name": "cy", "age": 2, "on": True}],
    "multi": "one\ntwo\n\nthree", "tabs": " \t x y \n", "emoji": "a😀b",
}

# Each is one expression that is printed.
EXPRESSIONS = """
none|missing|1 if false|x.y|no.x|missing + 'a'|missing.y|missing['y']|d.items|d['items']|d.items()|d.items()|list|d.keys()|d.values()|list
s|s.upper()|s.lower()|s.title()|s.capitalize()|s.swapcase()|s[0]|s[-1]|s[50]|s[1:4]|s[::-1]|s[:-3]|s[-3:]|s[::2]|s[10:2]|s[5::-1]|emoji[1]|emoji|length|emoji[1:]
s.split()|s.split(',')|s.split(' ', 1)|'a,b,c'.rsplit(',', 1)|' a  b '.split()|' a  b c'.split(none, 1)|' a b  c '.rsplit(none, 1)|''.split(',')|''.split()|'a'.split('')
s.strip('H>')|tabs.strip()|tabs.lstrip()|tabs.rstrip()|s.startswith('He')|s.startswith(('x', 'He'))|s.endswith('b>')|s.startswith(1)|s.find('l')|s.find('zz')|s.rfind('l')|s.index('zz')|s.count('l')
s.replace('l', 'L')|s.replace('l', 'L', 1)|'aaa'.replace('', '-')|s.replace(1, 'x')|'a-b-c'.partition('-')|'a-b-c'.rpartition('-')|'abc'.partition('x')
'pre-x'.removeprefix('pre-')|'x.txt'.removesuffix('.txt')|'12'.isdigit()|'x1'.isalnum()|'x'.isalpha()|' '.isspace()|'AB'.isupper()|'ab'.islower()|'½'.isnumeric()|'²'.isdigit()|''.isdigit()
','.join(ls)|','.join(l)|'5'.zfill(3)|'-5'.zfill(4)|'a'.ljust(3)+'|'|'a'.rjust(3, '.')|'a'.center(4, '*')|'ab'.center(5, '*')|'{} {}'.format(1, 'x')|'{0}{0}{n}'.format('a', n=2)|'{:.2f}|{:>5}|{:<4}|{:^5}|{:05d}|{:,}'.format(3.14159, 'ab', 'c', 'd', 42, 1234567)
'%s and %d %.1f %5s|%-5s|%05d %%' % ('a', 3, 2.55, 'r', 'l', 42)|'%s' % 'x'|'%s %s' % 'x'|'%d' % 'x'|'%(a)s' % {'a': 1}|'x' % 1|'%r' % 'a'|'%x' % 255
n + 1|n - 7|n * 2|n / 2|n // 2|neg // 2|neg % 3|n % -3|n ** 2|2 ** -1|2 ** 100|big + 1|big * big|-big|n / 0|n % 0|n // 0|1.0 / 3|7.0 // 2|-7.5 % 2|1e20|0.1 + 0.2|1e16|123456789.0|1e-5|0.0001|100000000000000000000.0|-0.0|3.0|2.5e10
'a' * 3|3 * 'a'|'a' * -1|[1] * 2|(1, 2) + (3,)|[1] + [2]|[1] + (2,)|'a' + 1|1 + 'a'|none + 'a'|'a' + none|{} + {}|'a' ~ 1 ~ none ~ missing ~ [1]|true + 1|true|false|-true|+5|--5|-'a'
1 < 2|1 < 2 < 3|1 < 3 < 2|'a' < 'b'|'a' < 1|[1, 2] < [1, 3]|1 == 1.0|1 == true|'1' == 1|none == none|missing == missing|missing == none|[1, [2]] == [1, [2]]|{'a': 1} == {'a': 1.0}|(1,) == [1]|1 != 2|2 >= 2|none < 1|missing < 1
'a' in 'abc'|'' in 'abc'|1 in l|9 not in l|'a' in d|'zz' in d|'x' in none|1 in 'abc'|'x' in missing|[1] in [[1]]|[1] in d|not 1 in l|'x' in 5
t and 'yes'|e or 'def'|not e|not not 1|none or missing or 'x'|1 if t else 2|1 if e else 2 if e else 3|(1 if t)|'a' if missing else 'b'
[1, 'a', none, true, 1.0, {'k': 1}]|["it's", 'q"q', 'b\\\\s', 'n\\n', '\\x07', 'é', '\u200b', "'\\""]|(1,)|()|(1, 2)|{'a': (1, 'x'), 2: [none]}|{}|[]|[1, 2,]|{'a': 1,}
l[0]|l[-1]|l[9]|l['x']|l[1:]|l[::-1]|l[:2]|l[5:]|l[-2:]|l.0|l.x|d.a|d['b']|d.zz|d['zz']|d.get('a')|d.get('zz')|d.get('zz', 3)|nested.x[0].y|nested['x'][0]['y']|nested.x.0.y|nested.zz.y|d[missing]|(1, 2)[1]|'abc'['upper']()
l.append(1)|d.update({'a': 2})|d.pop('a')|l.sort()|l.index(1)|l.count(3)|d.copy()|l.insert(0, 1)|l.foo()|s.nope()|missing()|5()|'a'.__class__|l.__len__()
s|upper|s|length|missing|length|no|length|n|length|d|length|l|first|l|last|e|first|[]|first|[]|last|missing|first|'abc'|first|'abc'|last
l|sort|l|sort(reverse=true)|ls|sort|ls|sort(case_sensitive=true)|users|sort(attribute='age')|map(attribute='name')|list|[1, 'a']|sort|d|dictsort|d|dictsort(by='value')|d|dictsort(reverse=true)|{'b': 1, 'A': 2}|dictsort|{'b': 1, 'A': 2}|dictsort(true)
l|join|l|join(', ')|users|join(',', attribute='name')|missing|join|'abc'|join('-')|ls|map('upper')|list|users|map(attribute='name')|join(' ')|users|map(attribute='zz', default='?')|list|l|map('string')|list|ls|map('nofilter')|list
users|selectattr('on')|map(attribute='name')|list|users|selectattr('age', 'gt', 1)|map(attribute='name')|list|users|rejectattr('on')|list|l|select('odd')|list|l|reject('odd')|list|l|select('>', 1)|list|[0, 1, '']|select|list|users|selectattr('name', 'equalto', 'cy')|list
l|sum|users|sum(attribute='age')|['a']|sum|l|min|l|max|[]|max|ls|min|ls|max(case_sensitive=true)|l|reverse|list|s|reverse|l|unique|list|['a', 'A', 'b']|unique|list|['a', 'A']|unique(true)|list
[1, 2, 3, 4, 5]|batch(2)|list|[1, 2, 3]|batch(2, 'x')|list|[1, 2, 3, 4, 5]|slice(2)|list|[1, 2, 3]|slice(2, 'x')|list|users|groupby('on')|list
2.5|round|3.5|round|2.675|round(2)|7|round|2.1|round(0, 'ceil')|2.9|round(method='floor')|-2.5|round|1234.5|round(-2)|'a'|round|3.7|int|'z'|int|'42'|int|' 42 '|int|'0x1f'|int(0, 16)|'3.9'|int|none|int|true|int|'1e3'|int|'abc'|int(7)|'2.5'|float|'x'|float|'x'|float(1.5)|3|float|-5|abs|-5.5|abs|'a'|abs
s|trim|tabs|trim|'xxaxx'|trim('x')|s|replace('l', '!')|s|replace('l', '!', 1)|5|replace('5', '6')|s|title|'foo bar-baz (qux)'|title|s|capitalize|s|lower|5|upper|s|wordcount|'a'|center(5)|s|striptags|'<p>a <b>b</b>  c</p><!-- x -->'|striptags
s|e|s|escape|s|forceescape|s|safe|'a<b'|safe + '<c>'|'<c>' + 'a<b'|safe|('a<b'|safe)|e|'<'|safe|upper|('<'|safe) ~ '<'|['<']|safe|'a'|safe == 'a'
missing|default('x')|e|default('x')|e|default('x', true)|no|default('x')|no|d('x', true)|missing|d|d|items|list|missing|items|list|5|items|list|'abc'|list|d|list|5|list|no|list|n|string|no|string|s|attr('upper')|d|attr('a')|'%s-%s'|format(1, 'a')
d|tojson|l|tojson|s|tojson|no|tojson|1.0|tojson|1e20|tojson|'é\u2028"\\\\\\n\\x01'|tojson|'é😀'|tojson(ensure_ascii=true)|{'b': [1, {'c': []}], 'a': {}}|tojson(indent=2)|{'b': 1, 'a': 2}|tojson(sort_keys=true)|[1, 2]|tojson(separators=(',', ':'))|{1: 2, none: 3, true: 4}|tojson|missing|tojson|range(3)|list|tojson|(1, 2)|tojson|big|tojson|d|tojson(indent=4)
s is string|n is string|n is number|f is number|t is number|n is integer|t is integer|f is float|t is boolean|no is none|missing is none|missing is defined|s is defined|missing is undefined|d is mapping|l is mapping|l is sequence|s is sequence|n is sequence|d is sequence|l is iterable|n is iterable|missing is iterable|n is odd|n is even|n is divisibleby 5|n is divisibleby(2)|n is eq 5|n is ne 5|n is lt 6|n is ge 5|n is gt(7)|n is in l|3 is in l|s is lower|'a' is lower|'A' is upper|n is sameas 5|none is sameas none|t is true|1 is true|e is false|false is false|range is callable|s is callable|'upper' is filter|'nope' is filter|'odd' is test|s is not string|not s is string|missing is not defined and t|('a'|safe) is escaped
range(3)|list|range(1, 4)|list|range(5, 0, -2)|list|range(0)|list|range(200000)|range('a')|range(1, 2, 0)|dict(a=1, b=2)|namespace(a=1).a|strftime_now('%Y-%m-%d %H:%M:%S %a %A %b %B %d %j %p %I %y %%')|strftime_now('%-d %b %Y')|strftime_now('%-m/%-d %e %k %l %U %W %u %w %C %D %F %T %R %h')|raise_exception('no ' ~ 1)|raise_exception(none)
1_000|0x1f|0b101|0o17|1.5e3|1E3|'a' 'b'|"a\\tb"|'\\u00e9\\x41\\101'|'\\q'|(1)|((1, 2), 3)|[[]]|{'a': {'b': {}}}.a.b|[1, 2][1]|'abc'.upper().lower()|(1 + 2) * 3|1 + 2 * 3 ** 2|-2 ** 2|10 - 2 - 3|2 ** 3 ** 2|'a' ~ 1 + 2|1 + 1 ~ 'a'|not 1 == 2|1 in [1] == true|5 // 2 * 2
cycler('a', 'b').next()|joiner(',')()|loop is defined|true is defined|True|None|False
"""

STATEMENTS = [
    "a\n{% if t %}\nb\n{% endif %}\nc\n", "a\n  {% if t %}  b  {% endif %}  \nc", "a {%- if t -%} b {%- endif -%} c", "a\n  {%+ if t %}b{% endif +%}\nc", "{# c #}\nx\n  {# d #}  \ny{#- e -#} z", "x\n\n", "x\r\ny\r\n",
    "{{ s }}\n{{- n -}}\n x", "  {{ n }}\n", "{% raw %}\n{{ x }}{% if %}\n{% endraw %}\ny", "a {%- raw -%} {{ x }} {%- endraw -%} b", "{% raw %}{% endraw %}",
    "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ x }};{% endfor %}",
    "{% for x in l %}{{ loop.previtem }}-{{ loop.nextitem }}|{{ loop.previtem is defined }};{% endfor %}", "{% for x in l %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }}{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}", "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k, v in d|items %}{{ k }}{% endfor %}", "{% for c in 'aé😀' %}{{ c }}.{% endfor %}", "{% for x in missing %}a{% else %}none{% endfor %}", "{% for x in [] %}a{% else %}none{% endfor %}", "{% for x in none %}{% endfor %}", "{% for x in 5 %}{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% else %}none{% endfor %}", "{% for x in l if x > 9 %}a{% else %}none{% endfor %}", "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in [[1, [2, [3]]], [4]] recursive %}{{ loop.depth }}{{ loop.depth0 }}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}", "{% for a, b in [[1, 2], (3, 4)] %}{{ a }}{{ b }}{% endfor %}", "{% for a, b in [[1, 2, 3]] %}{{ a }}{% endfor %}", "{% for (a, b) in [(1, 2)] %}{{ a + b }}{% endfor %}",
    "{% for x in l %}{% for y in ls %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}", "{% for x in 1, 2, 3 %}{{ x }}{% endfor %}", "{% for x in l[1:] %}{{ x }}{% endfor %}", "{% for x in range(3) %}{{ x }}{% endfor %}", "{% for x in l %}{{ x }}{% endfor %}{{ x }}{{ loop }}",
    "{% set x = 1 %}{% for y in l %}{% set x = x + y %}{{ x }}{% endfor %}{{ x }}", "{% set ns = namespace(x=0) %}{% for y in l %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}", "{% set ns = namespace(d) %}{{ ns.a }}{{ ns.zz }}", "{% set x = {} %}{% set x.y = 1 %}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set a, b = [1, 2, 3] %}", "{% set x %}a{{ n }}\n{% endset %}[{{ x }}]", "{% set x | upper | trim %} abc {% endset %}[{{ x }}]",
    "{% if t %}{% set x = 1 %}{% endif %}{{ x }}", "{% if e %}{% set x = 1 %}{% endif %}{{ x }}", "{% if e %}a{% elif n == 5 %}b{% else %}c{% endif %}", "{% if missing %}a{% elif no %}b{% else %}c{% endif %}", "{% if missing.x %}a{% endif %}", "{% if not missing is defined and t or e %}y{% endif %}",
    "{% macro m(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(1, 2, 3) }}{{ m() }}", "{% macro m(a) %}{{ varargs }}{{ kwargs }}{{ a }}{% endmacro %}{{ m(1, 2, 3, x=4) }}", "{% macro m() %}{{ n }}{{ y }}{% endmacro %}{% set y = 3 %}{{ m() }}", "{% macro m(a) %}{% if a > 0 %}{{ a }}{{ m(a - 1) }}{% endif %}{% endmacro %}{{ m(3) }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(4) }}", "{% macro m() -%}\n  x\n{%- endmacro %}[{{ m() }}]{{ m() | upper }}{{ m.name }}", "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}in{{ n }}{% endcall %}", "{% macro m() %}[{{ caller(1, 2) }}]{% endmacro %}{% call(a, b) m() %}{{ a }}{{ b }}{% endcall %}", "{% macro m(x) %}{% set x = x ~ '!' %}{{ x }}{% endmacro %}{{ m('a') }}{{ x }}", "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}",
    "{% for x in l %}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% endfor %}", "{% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}{{ a }}", "{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q }}", "{% filter upper %}a{{ s }}{% endfilter %}", "{% filter replace('a', 'b') | upper %}aca{% endfilter %}", "{% generation %}g{{ n }}{% endgeneration %}", "{% for x in l %}\n  {{ x }}\n{% endfor %}\nend", "{%- for x in l %}\n{{ x }}\n{%- endfor %}\nend",
    "{{ l | map('upper') | join }}", "{% if %}{% endif %}", "{% if t %}", "{{ }}", "{{ a b }}", "{% nope %}", "{{ 'a }}", "{{ (1 }}", "{% endif %}", "{{ x | nope }}", "{{ x is nope }}", "{% for x in l %}{% endfor x %}", "{% set %}", "{{ 1 is 2 }}", "{# open", "{% raw %}", "{{ a.1.b }}", "{{ {'a': {'b': 1}}}}", "{{ '}}' }}", "{{ '%}' }}{% if '%}' %}x{% endif %}", "{{ -n|abs }}", "{{ n|abs ** 2 }}", "{{ (n if t)|string }}", "{{ s[0:1] ~ s[1:2] }}", "{% set x = n, s %}{{ x }}", "{{ n, s }}", "{{ [x for x in l] }}",
    "{% set m = users | selectattr('on') | list %}{{ m | length }}{{ m[0].name }}", "{% for u in users | sort(attribute='name') %}{{ u.name }} {% endfor %}", "{% for k, g in users | groupby('on') %}{{ k }}{{ g | length }}{% endfor %}", "{{ users | map(attribute='age') | sum }}", "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}", "{% set j = joiner('; ') %}{% for x in l %}{{ j() }}{{ x }}{% endfor %}",
    "{{ loop }}", "{% for x in l %}{{ loop.nope }}{% endfor %}", "{% for x in l %}{{ loop(x) }}{% endfor %}", "{{ d.items }}".replace("d.items", "d.a.b"), "{% if d.c.x is defined %}a{% else %}b{% endif %}", "{% if missing.x is defined %}a{% else %}b{% endif %}", "{{ missing.x | default('q') }}", "{{ no.x | default('q') }}",
    "{% set x = 'outer' %}{% macro m() %}{{ x }}{% endmacro %}{% for i in [1] %}{% set x = 'inner' %}{{ m() }}{% endfor %}", "{% for i in [1, 2] %}{% if loop.first %}{% set x = i %}{% endif %}{{ x }}{% endfor %}", "{% set s = 'shadow' %}{{ s }}", "{% for n in l %}{{ n }}{% endfor %}{{ n }}",
    # Unknown filters and tests: inside of if, at any depth without variables of its own, they are looked for when they are reached.
    "{% if e %}{{ s | nope }}{% endif %}x", "{% if t %}{{ s | nope }}{% endif %}x", "{% if e %}{{ s is nope }}{% else %}x{% endif %}", "{% if t %}{{ s is nope }}{% endif %}", "{% if s | nope %}{% endif %}", "{% if e %}{% elif s is nope %}{% endif %}",
    "{{ s | nope if e else 1 }}", "{{ s | nope if t }}", "{{ 1 if s is nope }}", "{{ (s | nope) if e else (s if t else s | nope) }}", "{% if e %}{% set x = s | nope %}{% endif %}x", "{% if e %}{% for x in s | nope %}{% endfor %}{% endif %}x", "{% for x in l %}{% if x > 9 %}{{ x | nope }}{% endif %}{{ x }}{% endfor %}",
    "{% macro m(x) %}{% if x %}{{ x | nope }}{% endif %}y{% endmacro %}{{ m(0) }}", "{% macro m(x) %}{% if x %}{{ x | nope }}{% endif %}y{% endmacro %}{{ m(1) }}", "{% if e %}{{ s | nope.nope }}{% endif %}x", "{% if 'nope' is filter %}{{ s | nope }}{% endif %}x",
    "{% for x in [] %}{{ x | nope }}{% endfor %}", "{% for x in [] if x is nope %}{% endfor %}", "{% macro m() %}{{ s | nope }}{% endmacro %}", "{% if e %}{% for x in l %}{{ x | nope }}{% endfor %}{% endif %}", "{% if e %}{% macro m() %}{{ s | nope }}{% endmacro %}{% endif %}", "{% if e %}{% macro m(a=s|nope) %}{% endmacro %}{% endif %}",
    "{% if e %}{% filter nope %}{% endfilter %}{% endif %}", "{% if e %}{% set x | nope %}{% endset %}{% endif %}", "{% if e %}{% with a = s | nope %}{% endwith %}{% endif %}x", "{% if e %}{% with %}{{ s | nope }}{% endwith %}{% endif %}", "{% if e %}{% generation %}{{ s | nope }}{% endgeneration %}{% endif %}", "{% with a = s | nope %}{% endwith %}",
    "{% if e %}{% set x %}{{ s | nope }}{% endset %}{% endif %}", "{{ s | nope }}{{ 1 if e }}", "{{ [s | nope, 1 if e] }}", "{{ [s | nope if e] }}",
    "{{ dict.fromkeys('ab', 1) }}{{ dict.fromkeys(l) }}", "{{ dict.fromkeys(n) }}", "{{ dict.fromkeys([[]]) }}", "{{ dict is callable }}",
    "{{ '\\N{BULLET}\\N{latin small letter e with acute}' }}", "{{ '\\N{NO SUCH NAME}' }}", "{{ '\\N' }}", "{{ '\\N{BULLET' }}", "{{ '\\N{}' }}", "{{ '\\\\N{x}' }}",
    "{% set ns = namespace(_a=1) %}[{{ ns._a }}{{ ns['_a'] }}]", "{% set ns = namespace(_a=1) %}{{ ns._a + 1 }}", "{% set ns = namespace(a=1) %}{% set ns._a = 2 %}{{ ns._a is defined }}", "{% set ns = namespace() %}{{ ns._a is defined }}{{ ns._a + 1 }}", "{{ {'_a': 1}._a }}",
    "{{ {'a': 'b&c', 'x': none}|xmlattr }}", "{{ 'a b/c?d=e&f'|urlencode }}", "{{ {'a': 'b c', 'd': 1}|urlencode }}", "{{ [('a', 'é')]|urlencode }}",
    # Blocks, tags without a loader, names that cannot be set, and names that a scope sets later than a scope inside reads them.
    "{% block a %}x{{ n }}{% endblock %}",
    "{% block a %}x{% endblock a %}",
    "{% block a %}x{% endblock b %}",
    "{% block a %}x{% endblock %}{% block a %}{% endblock %}",
    "{% for x in l %}{% block a %}[{{ x }}]{% endblock %}{% endfor %}",
    "{% for x in l %}{% block a scoped %}[{{ x }}{{ loop.index }}]{% endblock %}{% endfor %}",
    "{% for x in l %}{% block a %}{{ loop is defined }}{% endblock %}{% endfor %}",
    "{% set q = 1 %}{% block a %}{{ q }}{% set q = 2 %}{{ q }}{% endblock %}{{ q }}",
    "{% block a %}{% set q = 2 %}{% endblock %}{{ q }}",
    "{% macro m() %}M{{ q }}{% endmacro %}{% set q = 4 %}{% block a %}{{ m() }}{% endblock %}",
    "{% macro m(z) %}{% block a %}{{ z }}{{ n }}{% endblock %}{% endmacro %}{{ m(9) }}",
    "{% macro m(z) %}{% block a scoped %}{{ z }}{{ n }}{% endblock %}{% endmacro %}{{ m(9) }}",
    "{% with z = 1 %}{% block a %}{{ z }}{% endblock %}{% endwith %}",
    "{% with z = 1 %}{% block a scoped %}{{ z }}{% endblock %}{% endwith %}",
    "{% if t %}{% block a %}y{% endblock %}{% endif %}",
    "{% if e %}{% block a %}y{% endblock %}{% endif %}-{{ self.a() }}",
    "{% block a %}y{% endblock %}{{ self.a() }}{{ self['a']() }}{{ self.b }}{{ self.b is defined }}",
    "{{ self.b() }}",
    "{% block a %}{{ super() }}{% endblock %}",
    "{% block a %}{{ super }}{{ super is defined }}{% endblock %}",
    "{{ super }}{{ super is defined }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% block a %}{% block b %}{{ n }}{% endblock %}{% endblock %}",
    "{% for x in l %}{% block a scoped %}{% block b %}{{ x }}{% endblock %}{% endblock %}{% endfor %}",
    "{% for x in l %}{% block a scoped %}{% set y = 1 %}{% block b %}{{ x }}{{ y }}{% endblock %}{% endblock %}{% endfor %}",
    "{% for x in l %}{% block a scoped %}{% set y = 1 %}{% block b scoped %}{{ x }}{{ y }}{% endblock %}{% endblock %}{% endfor %}",
    "{% for x in l %}{% block a scoped %}{{ x }}{% endblock %}{% endfor %}{{ self.a() }}",
    "{% block a required %}{% endblock %}",
    "{% block a required %} {# c #} {% endblock %}",
    "{% block a required %}x{% endblock %}",
    "{% block a required %}{{ 1 }}{% endblock %}",
    "{% if e %}{% block a required %}{% endblock %}{% endif %}ok",
    "{% block a scoped required %}{% endblock %}",
    "{% block a required scoped %}{% endblock %}",
    "{% block %}{% endblock %}",
    "{% block a-b %}{% endblock %}",
    "{% for x in l %}{% block a %}{% break %}{% endblock %}{% endfor %}",
    "{% block a %}{% endblock x %}",
    "{% if e %}{% block a %}{{ s | nope }}{% endblock %}{% endif %}",
    "{% set x %}a{% block b %}{{ n }}{% endblock %}{% endset %}{{ x }}",
    "{% filter upper %}{% block b %}abc{% endblock %}{% endfilter %}",
    "{% set x = 1 %}{% for i in l %}{% set x = 2 %}{% block b %}{{ x }}{% endblock %}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{% set x = 2 %}{% block b scoped %}{{ x }}{% endblock %}{% endfor %}",
    "{% set _x = 1 %}{% block b %}{{ _x }}{% endblock %}",
    "{% set self = 5 %}{{ self }}",
    "{% if e %}{% set self = 5 %}{% endif %}{{ self.a is defined }}",
    "{% block a %}{% macro m() %}{{ self.b() }}{% endmacro %}{{ m() }}{% endblock %}{% block b %}B{% endblock %}",
    "{{ self.a(1) }}{% block a %}{% endblock %}",
    "{{ self.a() | upper }}{% block a %}xy{% endblock %}",
    "{% block a %}{% for x in l %}{{ loop.index }}{{ x }}{% endfor %}{% endblock %}",
    "{% for x in l %}{{ self.a() }}{% endfor %}{% block a %}{{ x }}{% endblock %}",
    "{% macro m() %}{{ self.a() }}{% endmacro %}{{ m() }}{% block a %}{{ n }}{% endblock %}",
    "{% macro m(self) %}{{ self }}{% endmacro %}{{ m(3) }}",
    "{% for self in l %}{{ self }}{% endfor %}",
    "{% block a %}x{% endblock %}{% for i in l %}{{ self.a() }}{% endfor %}",
    "{% autoescape false %}{{ s }}{% set q = 1 %}{{ q }}{% endautoescape %}{{ q }}",
    "{% autoescape e %}{{ s }}{% endautoescape %}",
    "{% autoescape true %}{{ n }}{% endautoescape %}",
    "{% autoescape t %}{{ s }}{% endautoescape %}",
    "{% autoescape missing %}{{ s }}{% endautoescape %}",
    "{% autoescape %}{% endautoescape %}",
    "{% if e %}{% autoescape true %}{{ s }}{% endautoescape %}{% endif %}ok",
    "{% for x in l %}{% autoescape false %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endautoescape %}{% endfor %}",
    "{% include 'x' %}",
    "{% include 'x' ignore missing %}",
    "{% include 'x' ignore missing with context %}",
    "{% include 'x' without context %}",
    "{% include [] ignore missing %}ok",
    "{% include [] %}",
    "{% include () %}",
    "{% include ['a', 'b'] ignore missing %}",
    "{% include missing %}",
    "{% include missing ignore missing %}",
    "{% include no %}",
    "{% include n %}",
    "{% include no ignore missing %}ok",
    "{% include 0 ignore missing %}ok",
    "{% include ['a', n] %}",
    "{% include s.nope.nope %}",
    "{% include %}",
    "{% include 'a' nope %}",
    "{% if e %}{% include 'x' %}{% endif %}ok",
    "{% if e %}{% extends 'x' %}{% endif %}ok",
    "{% extends 'x' %}",
    "a{% extends missing %}",
    "{% for x in l %}{% extends 'x' %}{% endfor %}",
    "{% macro m() %}{% extends 'x' %}{% endmacro %}",
    "{% block a %}{% extends 'x' %}{% endblock %}",
    "{% with %}{% extends 'x' %}{% endwith %}",
    "{% import 'x' as y %}",
    "{% import 'x' as y with context %}",
    "{% import 'x' as y without context %}",
    "{% import 'x' %}",
    "{% import missing as y %}",
    "{% if e %}{% import 'x' as y %}{% endif %}{{ y }}ok",
    "{% if e %}{% from 'x' import y %}{% endif %}{{ y }}ok",
    "{% from 'x' import y %}",
    "{% from 'x' import y as z, w with context %}",
    "{% from 'x' import y, %}",
    "{% if e %}{% from 'x' import y, z as n with context %}{% endif %}{{ n }}",
    "{% from 'x' import %}",
    "{% from 'x' import _y %}",
    "{% from 'x' import with context %}",
    "{% if e %}{% from 'x' import with, context %}{% endif %}ok",
    "{% set n = 1 %}{% if e %}{% import 'a' as n %}{% endif %}{{ n }}",
    "{% set true = 1 %}",
    "{% set none = 1 %}",
    "{% macro true() %}{% endmacro %}",
    "{% macro m(true) %}{% endmacro %}",
    "{% set True.x = 1 %}",
    "{% set a, none = 1, 2 %}",
    "{% for x in l %}{% set loop = 1 %}{% endfor %}",
    "{% for loop in l %}{% endfor %}",
    "{% set loop = 3 %}{{ loop }}{% for x in l %}{{ loop.index }}{% endfor %}{{ loop }}",
    "{% for x in l %}{% macro loop() %}{% endmacro %}{% endfor %}",
    "{% for x in l %}{% with loop = 1 %}{% endwith %}{% endfor %}",
    "{% with loop = 1 %}{{ loop }}{% endwith %}",
    "{% print %}",
    "{% print 1, 2 %}",
    "{% print 1, %}",
    "{% set a, = (1,) %}{{ a }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, x=2) }}{{ m.name }}{{ m.arguments }}{{ m.catch_kwargs }}{{ m.catch_varargs }}{{ m.caller }}{{ m.defaults }}{{ m.explicit_caller }}",
    "{% macro m(caller=1) %}{{ caller }}{% endmacro %}{{ m() }}",
    "{% macro m(varargs) %}{{ varargs }}{% endmacro %}{{ m(1) }}",
    "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}{% call m() %}{% endcall %}",
    "{% macro m() %}{% set varargs = 1 %}{{ varargs }}{% endmacro %}{{ m(1) }}",
    "{% macro m() %}{{ caller(1) }}{% endmacro %}{% call(x, y=2) m() %}{{ x }}{{ y }}{% endcall %}",
    "{% macro m() %}{{ caller(x=1) }}{% endmacro %}{% call(x) m() %}{{ x }}{{ caller }}{% endcall %}",
    "{{ (1).real }}{{ n.real }}{{ n.imag }}{{ n.numerator }}{{ n.denominator }}",
    "{{ f.real }}{{ f.imag }}{{ f.conjugate() }}",
    "{{ t.real }}{{ t.numerator }}",
    "{{ namespace.x is defined }}{{ dict.x is defined }}{{ cycler.x is defined }}{{ joiner.x is defined }}",
    "{{ joiner().used }}{{ joiner().sep }}",
    "{% for x in l %}{{ n }}{% endfor %}{% set n = 1 %}{{ n }}",
    "{% if n %}{% endif %}{% for x in l %}{{ n }}{% endfor %}{% set n = 1 %}{{ n }}",
    "{% for x in l %}{{ n }}{% endfor %}{% if t %}{% set n = 1 %}{% endif %}{{ n }}",
    "{% for x in l %}{{ n }}{% endfor %}{% if t %}{% set n = 1 %}{% elif e %}{% set n = 2 %}{% else %}{% set n = 3 %}{% endif %}{{ n }}",
    "{% macro m() %}{{ n }}{% endmacro %}{{ m() }}{% set n = 1 %}{{ m() }}",
    "{% block a %}{{ n }}{% endblock %}{% with %}{{ n }}{% endwith %}{% set n = 1 %}",
    "{% for x in l %}{% for y in l %}{{ n }}{% endfor %}{% set n = y %}{% endfor %}",
    "{% block a %}{% for x in l %}{{ n }}{% endfor %}{% set n = 1 %}{% endblock %}",
    "{% for x in l %}{{ n }}{% endfor %}{% set n = n %}{{ n }}",
    "{% with n = n %}{{ n }}{% endwith %}{% macro n() %}{% endmacro %}",
    "{% for x in l %}{{ n }}{% endfor %}{% if e %}{% from 'x' import n %}{% endif %}",
    "{% set x %}{{ n }}{% endset %}{% set n = 1 %}{{ x }}",
    "{% generation %}{{ varargs }}{{ kwargs }}{{ caller }}{% endgeneration %}",
    "{% for a, b in [[1, 2], [3, 4]] if a %}{{ loop.nextitem }}{% endfor %}",
    "{% for c in '<a>'|e %}{{ [c] }}{% endfor %}{{ ('<'|e)[0] is escaped }}",
    "{{ 'a' is string if t else 'b' }}",
    "{{ ('a' is string) if t else 'b' }}",
    "{{ dict(a=1, a=2) }}",
    "{{ s|default(boolean=1, boolean=2) }}",
    "{{ 3 % -0.75 }}{{ -3 % 0.75 }}{{ 7.5 // -2 }}{{ -0.0 // 3 }}{{ 1e300 // 1e-300 }}",
    "{{ (1, 2).copy() }}",
    "{{ (1, 2).append(3) }}",
    "{{ {} is filter }}",
    "{{ {d.keys(): 1} }}",
    "{{ [] in d.keys() }}",
    "{{ namespace(a=1)|dictsort }}",
    "{{ dict(missing) }}",
    "{{ [1, 2]|truncate }}",
    "{{ 'abc'[:10 ** 30] }}{{ 'abc'[-10 ** 30:] }}",
    "{{ cycler(1, a=2) }}",
]


def main() -> None:
    env = environment()
    out = open(sys.argv[1], "w")
    print(json.dumps({"vars": VARS, "now": NOW.isoformat()}, ensure_ascii=False), file=out)
    count = 0
    # A bar parts the expressions of a line unless a filter's name can follow it: so they are joined again.
    sources = list(STATEMENTS)
    for line in EXPRESSIONS.strip().splitlines():
        sources += [f"{{{{ {e} }}}}" for e in split(line)]
    for src in sources:
        row = {"template": src}
        try:
            row["out"] = env.from_string(src).render(**VARS)
        except Exception as e:
            kind = type(e).__name__
            row["err"] = f"{kind}: {e}"
        if "object at 0x" in row.get("out", ""):
            continue
        print(json.dumps(row, ensure_ascii=False), file=out)
        count += 1
    print(count, "cases", file=sys.stderr)


FILTERS = set(jinja2.filters.FILTERS) | {"tojson", "nofilter", "nope"}


def split(line):
    """Parts a line at bars outside of quotes and brackets that are not followed by a filter's name."""
    parts, depth, quote, now = [], 0, None, ""
    i = 0
    while i < len(line):
        c = line[i]
        if quote:
            now += c
            if c == "\\":
                i += 1
                now += line[i]
            elif c == quote:
                quote = None
        elif c in "'\"":
            quote = c
            now += c
        elif c == "|" and depth == 0:
            rest = line[i + 1 :]
            name = ""
            for ch in rest:
                if not (ch.isalnum() or ch == "_"):
                    break
                name += ch
            following = rest[len(name) : len(name) + 1]
            # Names of variables are no filters here, but for d: it is written with arguments when it is one.
            if name in FILTERS and (name not in VARS or following == "(") and not (name in VARS and following != "("):
                now += c
            else:
                parts.append(now)
                now = ""
        else:
            depth += (c in "([{") - (c in ")]}")
            now += c
        i += 1
    return parts + [now]


if __name__ == "__main__":
    main()
