# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer/jinja/testdata/methods.jsonl and filters.jsonl: what Jinja2 makes of Python's methods, Jinja's filters, and formats.

Run through `make golden`, with the form and the environment of templates_golden.py. Each line of CASES is an
expression that is printed, or a template.
"""
import json
import sys

sys.dont_write_bytecode = True

from templates_golden import NOW, VARS, environment

CASES = r"""
'ΑΣ'.lower()
'ΑΣ ΣΑΣ, ΣΣ.'.lower()
'Σ'.lower()
'ΑΣ\u0301Β ΑΣ\u0301 .Σ'.lower()
'Σ'|lower
'ß straße ﬁ ŉ ǰ ΐ և ẖ ﬓ'.upper()
'ß straße ﬁ ŉ'|upper
'ßa ﬁb ǆ ǅ ŉc'.title()
'ßa ﬁb ǆ ǅ ŉc'|title
'ßA'.capitalize()
'ﬁX ΑΣ'.capitalize()
'ﬁX ΑΣ'|capitalize
'ǆABC'.capitalize()
'İI'.lower()
'İI'|lower|length
'ıi'.upper()
'ßẞſςΣᾳ ᏸꭰ'.casefold()
'aΣ Σb ß Ǆ'.swapcase()
"they're bill's friends".title()
"they're bill's friends"|title
'x1y a_b ªb ⅷx'.title()
'Ⅷ ⓐ'.lower()
'Ⅷ ⓐ'.upper()
'ᾳ ᾼ ῳ'.upper()
'ᾳ ᾼ ῳ'.title()
'ª'.islower()
'ª'.isupper()
'ⅷ'.islower()
'Ⅷ'.isupper()
'ǅ'.isupper()
'ǅ'.islower()
'ǅ'.istitle()
'aB'.islower()
'a1'.islower()
'A1'.isupper()
'1'.isupper()
'A Bc'.istitle()
'A bc'.istitle()
'ABc'.istitle()
'1A'.istitle()
''.istitle()
'中'.isalpha()
'中'.isalnum()
'一二三'.isnumeric()
'一'.isalnum()
'½'.isdigit()
'½'.isalnum()
'²'.isdecimal()
'²'.isdigit()
'①'.isdigit()
'٣'.isdecimal()
'Ⅷ'.isnumeric()
'Ⅷ'.isdigit()
'abc'.isascii()
''.isascii()
'é'.isascii()
'a b'.isprintable()
'a\n'.isprintable()
''.isprintable()
'\u00a0'.isprintable()
'abc_1'.isidentifier()
'1abc'.isidentifier()
'é'.isidentifier()
''.isidentifier()
'a-b'.isidentifier()
'\x1c\u2028 '.isspace()
''.isspace()
'ß' is lower
'A1' is upper
'' is lower
n is lower
'a\tb\tc'.expandtabs()
'a\tbcd\te'.expandtabs(4)
'a\n\tb'.expandtabs(3)
'a\tb'.expandtabs(0)
'a\tb'.expandtabs(-1)
'a\tb'.expandtabs(tabsize=2)
'a\tb'.expandtabs('x')
'abc'.translate({97: 'X', 98: none, 99: 100})
'abc'.translate({97: 'XYZ'})
'abc'.translate('xx')
'abc'.translate({})
'abc'.translate({97: 1.5})
'aβc'.translate({946: 'b'})
'abc'.translate(''.maketrans('ab', 'xy'))
'abc'.translate(''.maketrans('ab', 'xy', 'c'))
'abc'.maketrans({'a': 1, 98: 'x'})
'abc'.maketrans('ab', 'xyz')
'abc'.maketrans('ab')
'abc'.maketrans({'ab': 1})
'abc'.center(6, 'xy')
'abc'.center(2)
'abc'.center(7)
'abc'.center(8)
'ab'.center(7, '-')
'abc'.center()
'abc'.ljust('x')
'abc'.ljust(5, 'é')
'abc'.rjust(6, '😀')
'abc'.rjust(5, 1)
'42'.zfill(5)
'+42'.zfill(6)
'-42'.zfill(2)
''.zfill(3)
'--1'.zfill(5)
'é'.zfill(3)
'a-b-c'.partition('')
'a-b-c'.partition('--')
'a-b-c'.rpartition('x')
'a-b-c'.partition(1)
'a-b-c'.partition()
'abab'.removeprefix('ab')
'abab'.removesuffix('ab')
'abab'.removeprefix('')
'abab'.removesuffix('')
'abab'.removeprefix(1)
'abab'.removesuffix()
'abcabc'.find('b', 2)
'abcabc'.find('b', 2, 4)
'abcabc'.find('b', -3)
'abcabc'.find('', 6)
'abcabc'.find('', 7)
'abcabc'.rfind('b', 0, 4)
'abcabc'.rfind('')
'abcabc'.index('b', 2)
'abcabc'.index('b', 5)
'abcabc'.rindex('c', 0, 5)
'abcabc'.rindex('z')
'é中é'.find('é', 1)
'é中é'.rfind('é')
'abc'.find(1)
'abc'.find()
'abcabc'.count('b', 2)
'abcabc'.count('')
'aaaa'.count('aa')
'abcabc'.count('bc', 0, 3)
'é中é'.count('')
'abc'.count(1)
'abc'.startswith('b', 1)
'abc'.startswith('b', 1, 1)
'abc'.startswith('', 3)
'abc'.startswith('', 4)
'abc'.startswith('c', -1)
'abc'.endswith('b', 0, 2)
'abc'.endswith(('x', 'c'))
'abc'.endswith(['c'])
'abc'.startswith(())
'abc'.startswith()
'abc'.startswith(('a', 1))
'abc'.startswith((1, 'a'))
'a,b,,c'.split(',')
'a,b,,c'.split(',', 2)
'a,b,,c'.split(',', maxsplit=1)
'a,b,,c'.split(sep=',')
'a,b,,c'.rsplit(',', 2)
'a,b,,c'.split(',', 0)
' a b '.split(none, 0)
' a  b '.rsplit(none, 0)
'  '.split()
'  '.split(none, 0)
'a\u00a0b\u2003c\x1dd'.split()
'a b'.split(1)
'a b'.split(' ', 'x')
'abc'.join('xyz')
'-'.join(['a', 1])
'-'.join({'a': 1, 'b': 2})
'-'.join(('a',))
'-'.join(1)
'-'.join()
'-'.join(['a', missing])
'xaxbx'.replace('x', '-', 2)
'xaxbx'.replace('x', '-', 0)
'aé'.replace('', '.')
'aé'.replace('', '.', 2)
''.replace('', 'x')
'abc'.replace('b')
'abc'.replace('b', none)
'abc'.replace('b', 'x', 'y')
'xxaxx'.strip('x')
'abcba'.strip('ab')
'abcba'.lstrip('ab')
'abcba'.rstrip('ab')
'\u2003a\u00a0'.strip()
'\x1fa\x1c'.strip()
'\u200ba'.strip()
'abc'.strip('')
'abc'.strip(1)
'abc'.strip(none)
'abc'.encode
'abc'.format_map({'a': 1})
'{a}'.format_map({'a': 1})
'{a}'.format_map({})
'abc'.nope
'abc'.__class__
'abc'.upper(1)
'abc'.lower(x=1)
[1, 2, 1].index(1, 1)
[1, 2, 1].index(1, 0, 0)
[1, 2, 1].index(9)
[1, 2].index()
[1, 2, 1].count(1)
[1, 2].count()
[1, 2].copy()
[1, 2].extend([3])
[1, 2].remove(1)
[1, 2].reverse()
[1, 2].clear()
[1, 2].pop
(1, 2, 1).count(1)
(1, 2, 1).index(2)
(1, 2).append
{'a': 1}.copy()
{'a': 1}.get()
{'a': 1}.get('a', 2, 3)
{'a': 1}.get([1])
{'a': 1}.get(key='a')
{'a': 1}.fromkeys(['x', 'y'])
{'a': 1}.fromkeys('xy', 0)
{'a': 1}.fromkeys()
{'a': 1}.setdefault('b', 1)
{'a': 1}.popitem()
{'a': 1}.clear()
{'a': 1}.items()
{'a': 1}.keys()
{'a': 1}.values()
{'a': 1}.keys() | list
{'a': 1}.items() | length
{'a': 1, 'b': 2}.values() | sum
{'a': 1}.items()[0]
{'a': 1}.keys() is iterable
{'a': 1}.keys() is sequence
{'a': 1}.values() is mapping
'a' in {'a': 1}.keys()
1 in {'a': 1}.values()
('a', 1) in {'a': 1}.items()
{'a': 1}.keys() == {'a': 2}.keys()
{'a': 1}.keys() | first
{'a': 1}.keys() | last
{'a': 1} | last
{'a': 1}.items() | tojson
{'a': 1}.keys() | join
{}.keys()
{}.items() is true
'x' if {}.keys() else 'y'
{1: 'a', 1.0: 'b', true: 'c'}
{none: 1, (1, 2): 2}
{[1]: 2}
{'a': 1}['a']['b']
{1: 2}[1.0]
{1: 2}[true]
{(1, 2): 3}[1, 2]
range(3)
range(1, 4)
range(5, 0, -2)
range(0)
range(3)[1]
range(3)[-1]
range(3)[5]
range(10)[2:5]
range(10)[::3]
range(10)[::-1]
range(10)[8:2:-2]
range(3) | list
range(3) | length
range(3) | first
range(3) | last
range(3) | sum
range(3) | reverse | list
range(3) | join(',')
range(3) | string
range(3) | tojson
range(3) == range(3)
range(0) == range(5, 1)
range(3) == [0, 1, 2]
2 in range(3)
3 in range(3)
1 in range(0, 9, 2)
1.0 in range(3)
'a' in range(3)
range(3) is sequence
range(3) is iterable
range(3) is mapping
range(3) is string
range(3) + range(2)
range(3) * 2
range(3).count(1)
range(3).index(2)
range(3).start
range(3).stop
range(1, 9, 2).step
range()
range(1, 2, 3, 4)
range(1.5)
range(none)
range(missing)
range(100001)
range(0, 200000, 2)
range(true)
range
dict
dict([('a', 1)], b=2)
dict({'a': 1})
dict(a=1)
dict([('a', 1), ('a', 2)])
dict('ab')
dict(['ab', 'cd'])
dict([1])
dict([[1, 2, 3]])
dict(1)
dict(1, 2)
namespace(a=1)
namespace({'a': 1}, b=2).b
namespace(a=1).zz
namespace(1)
namespace([('a', 1)]).a
cycler()
joiner()
joiner('-')()
cycler('a').current
cycler(1, 2).next()
cycler(1, 2)()
lipsum
1.0
1e5
1e15
1e16
1e-4
1e-5
123456789012345.6
0.1
1/3
100.0 / 3.0
2.5e-7
1e22
1e300 * 1e10
-1e300 * 1e10
1e300 * 1e10 - 1e300 * 1e10
5e-324
1.7976931348623157e308
-0.0
0.0 == -0.0
3.0 | string
[1.0, -0.0, 1e16]
1e400
7 // 2.0
-7 // 2.0
7 % -2.5
-7.5 // 2
7.5 % 2
-7.5 % -2
0 % 5
-5 % 5
2 ** 0.5
2 ** -1
0 ** 0
0.0 ** 0
(-8) ** 2
0 ** -1
0.0 ** -1
10 ** 20
2.0 ** 1024
10 ** 400 / 10 ** 399
10 ** 400 * 1.0
10 ** 400 / 3
1 / 3.0
1 / 0.0
1 // 0.0
1 % 0.0
9007199254740993 / 1
9007199254740993 == 9007199254740992.0
9007199254740993 < 9007199254740992.5
true + true
true * 3
-true
+true
~1
1 + 'a'
'a' + 1
[1] + 'a'
(1,) + [1]
{'a': 1} + {}
none + 1
'a' - 'b'
'a' * 'b'
'a' * 1.5
[1] * true
'a' * true
'%s' % 1
'%s' % none
'%s' % [1, 'a']
'%s' % (1,)
'%s' % ((1, 2),)
'%s %s' % (1,)
'%s' % (1, 2)
'%s' % {'a': 1}
'%(a)s %(b)r' % {'a': 1, 'b': 'x'}
'%(z)s' % {'a': 1}
'%(a)s' % 1
'%(a)d%%' % {'a': 5}
'abc' % {}
'abc' % []
'abc' % ()
'abc' % 1
'%' % ()
'%z' % 1
'%d' % 3.7
'%d' % -3.7
'%d' % true
'%d' % '1'
'%d' % none
'%d' % 12345678901234567890123
'%i|%u' % (1, 2)
'%5d|%-5d|%05d|%+d|% d|%+05d' % (42, 42, 42, 42, 42, 42)
'%.3d|%5.3d|%-8.3d' % (7, 7, 7)
'%x|%X|%#x|%#X|%o|%#o|%08x' % (255, 255, 255, 255, 8, 8, 255)
'%x' % -255
'%#x' % -255
'%x' % 1.5
'%x' % 'a'
'%f|%.0f|%.1f|%10.2f|%-10.2f|%+.2f|%010.2f' % (1.5, 2.5, 0.25, 3.14159, 3.14159, 1, -3.14159)
'%#.0f' % 3
'%f' % 12345678901234567890
'%f' % 'a'
'%e|%.2E|%e' % (12345.678, 0.00012, 0)
'%g|%g|%g|%g|%G|%.3g|%#g' % (100000, 1000000, 0.0001, 0.00001, 1e20, 1234.5, 1.5)
'%f %e %g' % (1e400, 1e400, -1e400)
'%c%c' % (97, 'b')
'%c' % 'ab'
'%c' % 1114112
'%c' % 1.5
'%s|%10s|%-10s|%.2s|%5.1s' % ('abc', 'abc', 'abc', 'abc', 'abc')
'%r|%a' % ('é', 'é')
'%5r' % 'a'
'%*d' % (5, 42)
'%-*d|' % (5, 42)
'%.*f' % (2, 3.14159)
'%ld %hd' % (1, 2)
'%(a)s %s' % {'a': 1}
'%(a' % {'a': 1}
'%((a))s' % {'(a)': 7}
'%s' % 'é中'
'%5s' % 'é中'
'{}'.format(1)
'{} {}'.format(1)
'{0} {}'.format(1, 2)
'{} {0}'.format(1, 2)
'{a} {b}'.format(a=1, b='x')
'{a}'.format()
'{0}'.format()
'{1}'.format(1)
'{{}} {}'.format(1)
'{'.format()
'}'.format()
'{0'.format(1)
'{0}}'.format(1)
'{!r} {!s} {!a}'.format('é', 'é', 'é')
'{!x}'.format(1)
'{!}'.format(1)
'{!r:>6}'.format('a')
'{0[a]} {0[b]}'.format({'a': 1, 'b': 2})
'{0[0]} {0[1]}'.format([1, 2])
'{0[5]}'.format([1, 2])
'{0.a}'.format({'a': 1})
'{0.upper}'.format(1)
'{0.__class__}'.format(1)
'{0.__class__.__mro__}'.format('')
'{a.b[c]}'.format(a={'b': {'c': 9}})
'{:{}}|'.format('a', 5)
'{:{w}.{p}f}'.format(3.14159, w=8, p=2)
'{:{:}}'.format(1, 2)
'{:<5}|{:>5}|{:^5}|{:*^7}|{:=5}'.format('a', 'b', 'c', 'd', 5)
'{:=5}'.format('a')
'{:5}|{:5}'.format('a', 1)
'{:05}|{:<05}|{:05}'.format(42, 42, -42)
'{:05}'.format('a')
'{:+}|{: }|{:-}'.format(1, 1, 1)
'{:+}'.format('a')
'{:,}|{:_}|{:,.2f}|{:_x}|{:_b}'.format(1234567, 1234567, 1234567.891, 65535, 65535)
'{:,}'.format('a')
'{:,x}'.format(1)
'{:010,}'.format(1234567)
'{:012,.2f}'.format(1234.5)
'{:b}|{:o}|{:x}|{:X}|{:d}|{:n}|{:c}'.format(5, 8, 255, 255, 5, 5, 97)
'{:#b}|{:#o}|{:#x}|{:#X}|{:#06x}'.format(5, 8, 255, 255, 255)
'{:d}'.format(1.5)
'{:d}'.format('a')
'{:x}'.format(1.5)
'{:s}'.format(1)
'{:s}'.format('a')
'{:.2}'.format('abc')
'{:.2s}|{:5.1}|'.format('abc', 'abc')
'{:f}|{:.0f}|{:.1f}|{:e}|{:E}|{:g}|{:G}|{:%}|{:.1%}'.format(1.5, 2.5, 0.25, 12345.678, 1e-7, 1e6, 1e-5, 0.5, 0.123)
'{:f}'.format(3)
'{:.3}'.format(3.14159)
'{:.3}'.format(31415.9)
'{:}'.format(3.0)
'{:g}'.format(100000.0)
'{:g}'.format(1000000.0)
'{:#g}|{:#.0f}'.format(1.5, 3.0)
'{:.2}'.format(5)
'{:5.1f}|{:<8.3e}|'.format(2.25, 1.5)
'{:f} {:F}'.format(f * 1e308, f * 1e308)
'{:+.2f}'.format(-0.001)
'{:z.1f}'.format(-0.01)
'{}'.format(none)
'{:5}'.format(none)
'{:5}'.format([1])
'{}'.format([1, 'a'])
'{}'.format(true)
'{:5}|{:d}'.format(true, true)
'{:s}'.format(true)
'{:q}'.format(1)
'{:99999999999999999999}'.format(1)
'{}'.format(missing)
'{:é>4}|{:中^5}'.format('a', 'b')
'{:c}'.format(128512)
'{:10}|{:<10}|{:>10}'.format(1.5, 1.5, 1.5)
'{0:>{1}}'.format('x', 3)
'{a[b.c]}'.format(a={'b.c': 1})
'{:,.0f}'.format(1e15)
'{:e}'.format(0)
'{:.0e}'.format(12345)
'{:g}'.format(1e100)
'{:.17g}'.format(0.1)
'%.17g' % 0.1
'%.0e' % 12345
1234567890 | filesizeformat
1234567890 | filesizeformat(true)
1 | filesizeformat
0 | filesizeformat
999 | filesizeformat
1000 | filesizeformat
1023 | filesizeformat(true)
1.5e30 | filesizeformat
'123456' | filesizeformat
'abc' | filesizeformat
none | filesizeformat
-5 | filesizeformat
'foo bar baz qux' | truncate(9)
'foo bar baz qux' | truncate(9, true)
'foo bar baz qux' | truncate(11)
'foo bar baz qux' | truncate(11, false, '...', 0)
'foo bar baz qux' | truncate(9, end='…')
'foo bar baz qux' | truncate(2)
'foo bar baz qux' | truncate(9, leeway=20)
'foobarbazqux' | truncate(5, leeway=0)
'short' | truncate
('é中' * 200) | truncate(10, true)
5 | truncate
'Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod' | wordwrap(20)
'Lorem ipsum dolor-sit amet' | wordwrap(15)
'Lorem ipsum dolor-sit amet' | wordwrap(15, break_on_hyphens=false)
'aaaaaaaaaaaaaaaaaaaaaaaaaa bb' | wordwrap(10)
'aaaaaaaaaaaaaaaaaaaaaaaaaa bb' | wordwrap(10, false)
'one two\nthree four five\n\nsix' | wordwrap(8)
'one two three' | wordwrap(5, true, '|')
'  leading and trailing  ' | wordwrap(10)
'a    b    c    d' | wordwrap(4)
'tab\tand more words' | wordwrap(6)
'well-known state-of-the-art --option x' | wordwrap(12)
'foo--bar baz---qux' | wordwrap(6)
'' | wordwrap
'a\n   \nb' | wordwrap(3)
'a' | wordwrap(3, wrapstring='-')
'{0[0]}{0[-1]}'.format('ab')
'{:>{w}}{}'.format(1, 2, w=3)
'{a}{}'.format(1, a=2)
'x' | wordwrap(0)
5 | wordwrap
'go to http://example.com/a?b=c&d now' | urlize
'www.example.com, (http://a.org) foo@bar.com mailto:x@y.de' | urlize
'http://example.com/abcdefgh' | urlize(10)
'http://example.com' | urlize(nofollow=true, target='_blank')
'http://example.com' | urlize(rel='a b')
'tel:123 x' | urlize(extra_schemes=['tel:'])
'<b>http://x.com</b>' | urlize
'example.com example.de a.b' | urlize
'plain' | urlize
'a' | center
'abc' | center(7)
5 | center(3)
'a b_c d-e é中' | wordcount
'' | wordcount
5 | wordcount
'<p>a &amp; b</p> &lt;x&gt; &eacute; &#233; <br' | striptags
'a <!-- x <b> --> b' | striptags
5 | striptags
'a b&c/d?é=1' | urlencode
{'a b': 'c/d', 'e': 'é&'} | urlencode
[('a', 1), ('b', none)] | urlencode
5 | urlencode
[1] | urlencode
{'a': 'x"y', 'b': none, 'c': true} | xmlattr
{'a b': 1} | xmlattr
{'a': 1} | xmlattr(false)
{} | xmlattr
[1] | xmlattr
{'b': [1, 2], 'a': 'x'} | pprint
'a' | pprint
[1, 2] | pprint
none | pprint
'foo bar' | title
'a.b c/d e:f "g h" (i [j {k <l -m'|title
'ÀB çD' | title
'foo BAR' | capitalize
' a ' | trim
'xax' | trim('x')
5 | trim
none | trim
'aba' | replace('a', 'x')
'aba' | replace('a', 'x', 1)
'aba' | replace('a', none)
5 | replace('5', 6)
('<a>' | safe) | replace('<', '>')
('<a>' | safe) | upper
('<a>' | safe) + '<b>'
'<b>' + ('<a>' | safe)
('<%s>' | safe) % '<b>'
('<%s %r>' | safe) % ('<b>', '&')
('<%(x)s>' | safe) % {'x': '<'}
('<%d>' | safe) % 5
('<{}>' | safe).format('<b>')
('<{:>5}>' | safe).format('<')
('<{}>' | safe).format('<b>' | safe)
('<' | safe).join(['a', '>'])
('a<b' | safe).split('<')
('a<b' | safe).partition('<')
('a' | safe).center(5, '<')
('a' | safe).ljust(3, 'x')
('a<b' | safe).replace('a', '<')
('a<b' | safe)[0:2]
('a<b' | safe)[1]
('a<b' | safe) * 2
('&lt;a&amp;' | safe).unescape()
('<p>a&lt;</p>' | safe).striptags()
('a' | safe).escape('<')
('a' | safe) is string
('a' | safe) is escaped
['a', '<' | safe] | join('<')
['a', '<' | safe]
('a' | safe) | tojson
{'a' | safe: 1}
('a' | safe) == 'a'
'a' ~ ('<' | safe)
'<' | escape | escape
'<' | forceescape | forceescape
5 | escape
none | escape
missing | escape
[1, '<'] | escape
'"\'' | e
l | map('upper') | list
ls | map('upper')
ls | map('upper') | length
ls | map('upper') | first
ls | map('upper') | last
ls | map('upper') | join
ls | map('upper') | string
ls | map('default', 'x') | list
ls | map('replace', 'b', 'x') | list
ls | map()
ls | map(attribute='x', foo=1) | list
ls | map(1) | list
users | map(attribute='name', default='z') | join
users | map(attribute='nope') | list
users | map(attribute='nope', default='d') | list
users | map(attribute='name.0') | list
[[1, 2], [3, 4]] | map(attribute=0) | list
[[1, 2], [3, 4]] | map(attribute='1') | list
[[1, 2], [3, 4]] | map('first') | list
[1, 2, 3] | select('nope') | list
[1, 2, 3] | select('divisibleby', 2) | list
[1, 2, 3] | select('in', [1, 3]) | list
[1, 2, 3] | select
[1, 2, 3] | reject('odd') | length
users | selectattr | list
users | selectattr('age', 'ge', 2) | map(attribute='name') | list
users | selectattr('nope', 'defined') | list
users | rejectattr('nope') | map(attribute='name') | list
[3, 1, 2] | sort
['b', 'A', 'a'] | sort
['b', 'A', 'a'] | sort(case_sensitive=true)
[1, 'a'] | sort
[none, 1] | sort
[[2, 1], [1, 2]] | sort
users | sort(attribute='age') | map(attribute='name') | list
users | sort(attribute='on,name') | map(attribute='name') | list
users | sort(attribute='nope')
users | sort(true, attribute='age') | map(attribute='age') | list
'bca' | sort
{'b': 1, 'a': 2} | sort
5 | sort
{'b': 1, 'A': 2, 'c': 0} | dictsort
{'b': 1, 'A': 2, 'c': 0} | dictsort(by='value')
{'b': 1, 'A': 2} | dictsort(true)
{'b': 1, 'A': 2} | dictsort(reverse=true)
{'b': 1, 'A': 2} | dictsort(by='x')
{1: 1, 'a': 2} | dictsort
[1] | dictsort
[1, 2, 1] | unique | list
['a', 'A'] | unique | list
['a', 'A'] | unique(true) | list
users | unique(attribute='on') | map(attribute='name') | list
[[1], [1]] | unique | list
[1, 2] | unique
[1, 2] | unique | length
[1, 2, 3, 4, 5] | batch(2) | list
[1, 2, 3] | batch(2, 0) | list
[1, 2, 3] | batch(2)
[1, 2, 3] | batch(0) | list
[1, 2, 3] | batch('x') | list
[] | batch(2) | list
[1, 2, 3, 4, 5] | slice(2) | list
[1, 2, 3, 4] | slice(3, 0) | list
[1] | slice(3) | list
[1] | slice(0) | list
[1] | slice('x') | list
users | groupby('on')
users | groupby('on') | first
(users | groupby('on') | first).grouper
(users | groupby('on') | first).list | length
users | groupby('nope') | length
users | groupby('nope', default=1) | list | length
[{'k': 'A'}, {'k': 'a'}] | groupby('k')
[{'k': 'A'}, {'k': 'a'}] | groupby('k', case_sensitive=true)
[1, 2] | sum
[1, 2] | sum(start=10)
['a'] | sum(start='b')
[[1], [2]] | sum(start=[])
users | sum('age')
users | sum(attribute='nope')
'ab' | sum
[3, 1] | min
[3, 1] | max
['b', 'A'] | min
['b', 'A'] | max(true)
users | max(attribute='age')
users | min(attribute='name')
[1, 'a'] | min
'bca' | min
[] | min
[] | max is defined
[1, 2] | first
[] | first is defined
'abc' | last
{'a': 1, 'b': 2} | first
5 | first
[1, 2] | last
5 | last
'abc' | reverse
[1, 2] | reverse
[1, 2] | reverse | list
{'a': 1, 'b': 2} | reverse | list
5 | reverse
none | reverse
[1, 2] | length
'é中😀' | length
5 | count
none | length
{'a': 1} | count
-5 | abs
5.5 | abs
'a' | abs
none | abs
true | abs
missing | abs
2.5 | round
3.5 | round
-2.5 | round
2.675 | round(2)
1234.567 | round(-2)
42 | round
42 | round(1)
42.55 | round(1, 'ceil')
42.55 | round(1, 'floor')
42 | round(method='ceil')
42 | round(0, 'floor')
42.5 | round(method='x')
'a' | round
none | round
1e300 | round(2)
1.5 | round(none)
true | round
'42' | int
'42.7' | int
'-42' | int
' 42 ' | int
'4_2' | int
'4__2' | int
'' | int
'a' | int
'a' | int(5)
'0x1A' | int(base=16)
'1A' | int(0, 16)
'0b101' | int(0, 2)
'0o17' | int(0, 8)
'0x1A' | int(0, 0)
'12' | int(0, 3)
'9' | int(0, 8)
42.9 | int
-42.9 | int
(f * 1e308) | int
none | int
[] | int
true | int
missing | int
'1e3' | int
'inf' | int
'nan' | int
'٣' | int
'42' | float
'4.2e1' | float
' 4.2 ' | float
'inf' | float
'-Infinity' | float
'nan' | float
'1_0.5' | float
'a' | float
'a' | float(1.5)
'a' | float('x')
none | float
true | float
'0x10' | float
'٣.٥' | float
'.5' | float
'5.' | float
'1e' | float
[1, 2] | join(attribute='x')
[1, none, 'a', missing] | join('-')
'abc' | join('-')
{'a': 1} | join
[1, 2] | join(3)
[[1, 2], [3, 4]] | join(',', attribute=1)
5 | join
missing | default('x')
none | default('x')
'' | default('x', true)
0 | default('x', boolean=true)
missing | default
none | d('x', true)
false | default('x')
d | items | list
d | items
missing | items | list
5 | items
5 | items | list
[1] | list
'ab' | list
{'a': 1} | list
5 | list
none | list
missing | list
(1, 2) | list
1 | string
none | string
missing | string
[1] | string
'a' | string
d | attr('a')
'a' | attr('upper')
5 | attr('nope')
d | attr('__class__')
'%s-%s' | format(1, 2)
'%(a)s' | format(a=1)
'%s %(a)s' | format(1, a=1)
'%s' | format
5 | format
'a' | tojson
{'a': none, 'b': true, 'c': 1.5, 'd': [1, (2,)]} | tojson
{'é': 'é中😀\u2028'} | tojson
{'é': 'é中😀\u2028'} | tojson(ensure_ascii=true)
'\x00\x1f\x7f\u0080"\\/' | tojson
'\x7f' | tojson(true)
[1, 2] | tojson(indent=2)
[1, 2] | tojson(indent=0)
[1, 2] | tojson(indent='\t')
[] | tojson(indent=2)
{} | tojson(indent=2)
{'b': 1, 'a': [1, {}]} | tojson(indent=2, sort_keys=true)
[1, 2] | tojson(separators=(',', ':'))
{'a': 1} | tojson(separators=[',', ':'])
{'a': 1} | tojson(indent=1, separators=(', ', '= '))
{1: 1, none: 2, true: 3, 1.5: 4} | tojson
{(1, 2): 1} | tojson
{2: 1, 1: 2} | tojson(sort_keys=true)
{'a': 1, 1: 2} | tojson(sort_keys=true)
1e16 | tojson
1e400 | tojson
range(2) | tojson
range | tojson
missing | tojson
('<' | safe) | tojson
d | tojson(2, 2, 3, 4)
1 is odd
2 is even
-1 is odd
1.5 is odd
'a' is odd
4 is divisibleby 2
4 is divisibleby(3)
4 is divisibleby 0
'a' is divisibleby 2
1 is eq 1
1 is equalto 2
1 is ne 2
1 is lt 2
1 is lessthan 2
1 is le 1
1 is gt 2
1 is greaterthan 0
1 is ge 1
1 is in [1]
1 is in 5
'a' is in 'abc'
1 is sameas 1
none is sameas none
true is sameas 1
1.5 is number
true is number
'1' is number
10 ** 30 is number
10 ** 30 is integer
1.0 is integer
1.0 is float
true is boolean
1 is boolean
true is true
1 is true
false is false
none is none
missing is none
missing is undefined
none is undefined
'a' is string
{} is mapping
[] is mapping
[] is sequence
() is sequence
'a' is sequence
{} is sequence
5 is sequence
missing is sequence
[] is iterable
missing is iterable
5 is iterable
none is iterable
range is callable
missing is callable
5 is callable
'a'.upper is callable
'upper' is filter
'nope' is filter
'odd' is test
'nope' is test
5 is filter
'a'|safe is escaped
'a' is upper
'A' is upper
5 is upper
'1.5' is lower
1 is nope
[1, 2, 3][1:]
[1, 2, 3][::2]
[1, 2, 3][::-1]
[1, 2, 3][5:]
[1, 2, 3][-2:-1]
[1, 2, 3]['a']
[1, 2, 3][none]
[1, 2, 3][1.0]
[1, 2, 3][true]
(1, 2, 3)[1:]
'é中😀'[1]
'é中😀'[::-1]
'é中😀'[-1:]
'abc'[1:2:0]
5[0]
none[0]
'abc'['x']
[1, 2].x
[[1, 2], [3]][0][1]
[1] == [1.0]
[1] == (1,)
[1] < [1, 2]
[1] < [2]
[1] < ['a']
(1, 2) <= (1, 2)
'a' < 'B'
'é' > 'z'
none < none
{} < {}
{'a': 1} == {'a': 1.0}
true == 1
'1' == 1
1 < 'a'
missing == missing
missing == none
missing < 1
1 in 'abc'
none in [none]
'' in 'abc'
{} in [{}]
[1] in {}
'a' in missing
1 in none
'ab' in ['ab']
1 not in [1]
'it\'s'
"say \"hi\""
['it\'s', 'say "hi"', 'both \' and "']
['\n\t\r\\\x00\x1f\x7f', '\x80\xa0\xad', '\u200b\u2028\ufeff', '\ue000', '\U000e0001', '😀']
[none, true, false]
[missing]
['a', ('b',), {'c': 'd'}]
{'a': missing}
[1.5, 10 ** 20]
[[], (), {}, '']
[range(2)]
[{'a': 1}.items()]
{% for x in range(3) %}{{ loop.index }}/{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
{% for x in 'é中a' %}{{ x }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.revindex }};{% endfor %}
{% for x in {'a': 1, 'b': 2}.items() %}{{ x[0] }}{{ x }}{% endfor %}
{% for x in range(5) if x % 2 %}{{ x }}{{ loop.length }}{% endfor %}
{% for x in 'abc' if x != 'b' %}{{ x }}{{ loop.previtem }}{% endfor %}
{% for x in [1, 2] %}{{ loop }}{% endfor %}
{% for x in [1, 2] | map('string') %}{{ loop.length }}{{ x }}{{ loop.last }}{% endfor %}
{% set m = ls | map('upper') %}{% for x in m %}{{ x }}{% endfor %}{% for x in m %}again{% endfor %}
{% set m = [1, 2] | select('odd') %}{{ m | list }}{{ m | list }}
{% set m = ls | map('nope') %}ok
{% for x in 5 %}{% endfor %}
{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}
{% for a, b in ['xy'] %}{{ a }}{{ b }}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for a, b in [(1,)] %}{% endfor %}
{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for x in [1, 2] %}{{ loop.cycle() }}{% endfor %}
{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{% endfor %}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}
{% macro m(a) %}{{ a }}{{ varargs }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ kwargs }}{% endmacro %}{{ m(1, z=2) }}
{% macro m(a, b=2) %}{{ m.name }}{{ m.arguments }}{{ m.catch_kwargs }}{{ m.catch_varargs }}{{ m.caller }}{% endmacro %}{{ m() }}
{% macro m() %}{{ caller() }}{% endmacro %}{{ m.caller }}{{ m() }}
{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}
{% macro m() %}x{% endmacro %}{{ m }}
{% macro m() %}x{% endmacro %}{{ m is callable }}{{ m() | upper }}
{% macro m(caller) %}{% endmacro %}
{% macro m(caller=1) %}{{ caller }}{% endmacro %}{{ m() }}
{% macro m(varargs) %}{{ varargs }}{% endmacro %}{{ m(4) }}
{% macro m(x=y) %}{{ x }}{% endmacro %}{% set y = 3 %}{{ m() }}
{% set ns = namespace() %}{% set ns.a = 1 %}{% set ns['b'] = 2 %}{{ ns.a }}
{% set ns = namespace(a=1) %}{{ ns['a'] }}{{ ns.b is defined }}{{ ns }}
{% set x.y = 1 %}
{% set d.y = 1 %}
{% for x in l %}{% break %}{% else %}else{% endfor %}
{% for x in l %}{% continue %}{% else %}else{{ x }}{% endfor %}
{% for x in l %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% else %}else{% endfor %}
{% for x in l %}{% if loop.last %}{% break %}{% endif %}{% else %}else{% endfor %}
{% for x in l %}{% for y in l %}{% break %}{% else %}y{% endfor %}{% else %}x{% endfor %}
{% for x in l recursive %}{{ x }}{% if loop.first and loop.depth == 1 %}{{ loop([7]) }}{% endif %}{% continue %}{% else %}else{% endfor %}
{% for x in l if x > 1 %}{% break %}{% else %}else{% endfor %}
{% generation %}{% set g = 1 %}{{ g }}{% endgeneration %}{{ g }}
{% for x in [1, 2] %}{% generation %}{{ x }}{{ loop.index }}{% endgeneration %}{% endfor %}
{% if missing %}a{% elif 0.0 %}b{% elif range(0) %}c{% elif {}.items() %}d{% else %}e{% endif %}
{% set x = ['a'] + ['b'] %}{% set y = x + ['c'] %}{% set z = x + ['d'] %}{{ x }}{{ y }}{{ z }}
{% set ns = namespace(l=[]) %}{% for i in range(5) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l }}
{% set ns = namespace(l=[], k=[]) %}{% for i in range(3) %}{% set ns.l = ns.l + [i] %}{% set ns.k = ns.k + [ns.l] %}{% endfor %}{{ ns.k }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.current }}
{% set j = joiner('|') %}{{ j() }}{{ j() }}{{ j() }}
{{ 'a' + missing.x + raise_exception('no') }}
{{ 'a' + 1 + raise_exception('no') }}
{{ raise_exception('first') + missing.x }}
none|select|list
0|reject('none')|list
false|map('upper')|list
missing|selectattr('a')|list
none|rejectattr('a')|list
0.0|map(attribute='a')|list
1|select|list
true|map('upper')|list
2.5|rejectattr('a')|list
none|select('nope')|list
none|selectattr()|list
none|map()|list
none|map('nope')|list
n[1:]
f[::-1]
d[1:]
(d.items())[1:]
(l|map('string'))[1:]
(l|reverse)[1:]
namespace(a=1)[1:]
range(5)[1:3]|list
l['a':]
n['a':]
{% macro m(a) %}{{ a }}[{{ caller() }}]{% endmacro %}{% call m(1) %}x{{ s }}{% endcall %}
{% macro m() %}{{ caller(1, b=2) }}{% endmacro %}{% call(a, b=3) m() %}{{ a }}{{ b }}{% endcall %}
{% macro m() %}{{ caller(1) }}{{ caller(5) }}{% endmacro %}{% call(a, b=3) m() %}{{ a }}{{ b }};{% endcall %}
{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}
{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}
{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}
{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, z=4, y=5) }}
{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ m(1, *[7, 8, 9]) }}
{% macro m(a, b=2) %}{{ a }}{{ b }}{{ kwargs }}{% endmacro %}{{ m(**{'b': 5, 'c': 6}) }}
{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1], **{'b': 3}) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, **{'a': 3}) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(*5) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(**5) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(*missing) }}
{% macro m(a) %}{% if a %}{{ varargs|length }}{% endif %}{% endmacro %}{{ m(1, 2, 3) }}{{ m(0, 1) }}
{% macro m(varargs=5) %}{{ varargs }}{% endmacro %}{{ m() }}
{% macro m(kwargs=5) %}{{ kwargs }}{% endmacro %}{{ m(kwargs=7) }}
{% macro m(kwargs=5) %}{{ kwargs }}{% endmacro %}{{ m(x=7) }}
{% macro outer() %}{% macro inner(a) %}{{ a }}{{ varargs }}{% endmacro %}{{ inner(1, 2) }}{% endmacro %}{{ outer() }}
{% macro m(a, b) %}{% endmacro %}{{ m.name }}{{ m.arguments }}{{ m.catch_kwargs }}{{ m.catch_varargs }}{{ m.caller }}
{% macro m(a) %}{{ caller() }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m.catch_kwargs }}{{ m.catch_varargs }}{{ m.caller }}
{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}
{% with %}{% set z = 1 %}{{ z }}{% endwith %}{{ z }}
{% set a = 5 %}{% with a = a + 1, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}
{% with a, b = [1, 2] %}{{ a }}{{ b }}{% endwith %}
{% with a = 1 b = 2 %}{% endwith %}
{% for x in l %}{% with y = x * 2 %}{{ y }}{{ loop.index }}{% endwith %}{% endfor %}
{% for x in l %}{% with y = x %}{% if y > 1 %}{% break %}{% endif %}{{ y }}{% endwith %}{% endfor %}
{% filter upper %}a{{ s }}b{% endfilter %}
{% filter replace('a', 'x') | upper %}abc{% for x in l %}{{ x }}{% endfor %}{% endfilter %}
{% filter trim %}  a  {% endfilter %}|
{% filter indent(2, true) %}a{{ "\n" }}b{% endfilter %}
{% set q = 1 %}{% filter upper %}{% set q = 2 %}x{{ q }}{% endfilter %}{{ q }}
{% set x | upper %}abc{{ s }}{% endset %}{{ x }}
{% set x | replace('a', 'b') | title %}abc abc{% endset %}{{ x }}
{% set x %}abc{% endset %}{{ x is string }}{{ x is escaped }}
{% print 1 + 2, 3 %}
{% print s %}
{% for x in [1, [2, [3, 4]]] recursive %}{% if x is sequence %}({{ loop(x) }}){% else %}{{ x }}@{{ loop.depth }}{{ loop.depth0 }}{% endif %}{% endfor %}
{% for n, kids in [('a', [('b', []), ('c', [('d', [])])])] recursive %}<{{ n }}{% if kids %}{{ loop(kids) }}{% endif %}>{% endfor %}
{% for x in [1, 2] if x > 1 recursive %}{{ x }}{% if loop.depth < 2 %}{{ loop([1, 2, 3]) }}{% endif %}{% endfor %}
{% for x in [1] recursive %}{{ loop() }}{% endfor %}
{% for x in [1] recursive %}{{ loop(1) }}{% endfor %}
{% for x in [1] %}{{ loop(1) }}{% endfor %}
{% for x in [1, 2, 3, 4] %}{{ loop.cycle('a', 'b', 'c') }}{% endfor %}
{% for x in [1, 1, 2, 2, 1] %}{{ loop.changed(x) }}{% endfor %}
{% for x in [1, 1, 2] %}{{ loop.changed(x, 5) }}{{ loop.changed() }}{% endfor %}
{% for x in [[1], [1]] %}{{ loop.depth }}{% for y in x %}{{ loop.depth }}{% endfor %}{% endfor %}
{% set c = cycler(1, 2, 3) %}{% for x in range(5) %}{{ c.next() }}{% endfor %}{{ c.current }}{{ c.pos }}{{ c.items }}{{ c.nope }}
{% set c = cycler('a') %}{{ c() }}
{% set j = joiner() %}{% for x in l %}{{ j() }}{{ x }}{% endfor %}
{% set j = joiner(sep='-') %}{{ j() }}{{ j() }}
2 ** 10
2 ** 3 ** 2
-2 ** 2
2 ** -1
2.0 ** 0.5
0 ** 0
0 ** -1
10 ** 30 + 1
(-2) ** 3
2 * 3 ** 2
'a' ** 2
2 ** 'a'
7 // -2 ** 2
10 ** 20 // 7
10 ** 20 % 7
-(10 ** 20) // 7
-(10 ** 20) % 7
10 ** 20 / 10 ** 19
10 ** 400 / 1
10 ** 20 - 10 ** 20
10 ** 20 * -1
(10 ** 20) > 5
(10 ** 20) > 1e19
(10 ** 20) == 1e20
10 ** 20 == 10 ** 20
[10 ** 20, 5, 3.5]|sort
9223372036854775807 + 1
-9223372036854775808 - 1
0xffffffffffffffffff
'123456789012345678901234567890'|int + 1
'0x1A'|int(base=16)
'0x1A'|int(0, 0)
'z'|int(base=36)
'1_000'|int
'_1'|int(5)
'1__0'|int(5)
'٣٤'|int
'1_0.5'|float
'-  5'|int(7)
'+5'|int
'1e3'|int
'abc'|int('x')
'12'|int(base=2)
range(10)[2:5]
range(10)[::-2]|list
range(0)[1:]
range(2, 10, 3)[1:].start
range(5)[::0]
range(5).count(3)
range(5).index(7)
[1, 2, 1].index(1, 1)
[1, 2, 1].index(2, 2)
[1, 2, 1].index(1, -1)
(1, 2).index(3)
dict([('a', 1), ('b', 2)])
dict({'a': 1}, b=2)
dict([1])
dict('ab')
dict([('a', 1)], [('b', 2)])
dict(['ab', 'cd'])
namespace({'a': 1}, b=2).a
users|sort(attribute='on,name')|map(attribute='name')|list
users|sort(attribute='on,age', reverse=true)|map(attribute='name')|list
users|sort(attribute='nope,age')|map(attribute='name')|list
[[2, 'b'], [1, 'b'], [1, 'A']]|sort(attribute='1,0')
users|unique(attribute='on,name')|list|length
users|groupby('name')|map('first')|list
users|groupby('age', case_sensitive=true)|map(attribute='grouper')|list
users|groupby('x.y', default='Q')|list|length
strftime_now('%k|%l|%U|%W|%u|%w|%C|%G|%g|%V|%P|%n|%t|%-k|%-U')
'%(a)s %(b)05.1f' | format(a=1, b=2.25)
'%s' | format(1, a=2)
'{:>{}}'.format('a', 3)
'{0!r:^7}'.format('a')
'{:_}'.format(1234567)
'{:n}'.format(1234)
'{:.3%}'.format(0.12345)
'{:08.3f}'.format(-3.14159)
'{:+08d}'.format(42)
'{:x^9}'.format('ab')
'{:e}'.format(10 ** 20)
'{:,}'.format(10 ** 20)
'%d' % (10 ** 20)
'%x' % (10 ** 20)
'%5.1f|%-8s|%+d' % (2.25, 'ab', 5)
'%c' % 128512
'%i' % 2.9
'%d' % 'a'
'%s' % [1]
'%s %s' % (1,)
'%s' % (1, 2)
'a b  c d'.split(None, 2)
'a b  c d'.rsplit(None, 2)
' a b '.split(None, 1)
' a b '.rsplit(None, 1)
' a b '.split(None, 0)
' a b '.rsplit(None, 0)
'  '.rsplit(None, 1)
'a,b,c'.split(',', 1)
'abcabc'.find('b', 2)
'abcabc'.rfind('b', 0, 4)
'abcabc'.index('z', 1)
'abcabc'.count('bc', 2)
'abcabc'.count('', 2)
'é中é'.find('é', 1)
'abc'.startswith('b', 1)
'abc'.startswith(('x', 'c'), -1)
'abc'.startswith('', 5)
'abc'.endswith('b', 0, 2)
'a'|center(5)|length
'x'|indent
'a\nb\n\nc'|indent
'a\nb\n\nc'|indent(2, true, true)
'a\nb'|indent('> ')
'a\nb'|indent(width='--', first=true)
'a\nb\n'|indent
'a\r\nb\x0bc'.splitlines()
'a\r\nb\n'.splitlines(true)
''.splitlines()
'\n'.splitlines()
3.7|round(method='floor')|int
25|round(-1)
35|round(-1)
-25|round(-1)
1250|round(-2)
25.0|round(-1)
35.5|round(-1)
0.5|round
1.5|round
1e22|round(-20)
12345.6789|round(3, 'ceil')
12345|round(-2, 'floor')
(10 ** 20)|round(-19)
(10 ** 20)|abs
-5.5|abs
[[1, 2], [0]]|min
['a', 1]|max
[1, 1.0, true]|unique|list
[none, none, 'a', 'A']|unique|list
['b', 'B', 'a']|min(true)
l|sum(start=0.5)
[0.1, 0.2, 0.3]|sum
[1, 2, 3, 4, 5, 6, 7]|slice(3, '-')|list
[1, 2, 3, 4, 5, 6, 7]|batch(3, '-')|list
'abc'|batch(2)|list
d|batch(2)|list
missing|batch(2)|list
s|truncate(5, leeway=0)
s|truncate(5, true, '', 0)
(s|safe)|truncate(9, leeway=0)
'a'|attr('upper')
('a'|attr('upper'))()
d|attr('keys')|string|length > 5
namespace(a=5)|attr('a')
'AbC' is lower
'ABC' is upper
'' is lower
5 is lower
s|wordwrap(5)
'a-b-c-d'|wordwrap(3)
'tic-tac-toe and more'|wordwrap(8, break_on_hyphens=false)
[1, 'a', {'b': 2}]|pprint
{'c': [1], 'a': {'z': 1, 'b': 2}}|pprint
"""


def main() -> None:
    env = environment()
    lines, count = CASES.strip("\n").split("\n"), 0
    for path, part in zip(sys.argv[1:3], [lines[: len(lines) // 2], lines[len(lines) // 2 :]]):
        out = open(path, "w")
        print(json.dumps({"vars": VARS, "now": NOW.isoformat()}, ensure_ascii=False), file=out)
        for line in part:
            src = line if line.startswith(("{%", "{{ '", "{{ r")) else f"{{{{ {line} }}}}"
            row = {"template": src}
            try:
                row["out"] = env.from_string(src).render(**VARS)
            except Exception as e:
                row["err"] = f"{type(e).__name__}: {e}"
            if " at 0x" in row.get("out", ""):
                continue
            print(json.dumps(row, ensure_ascii=False), file=out)
            count += 1
    print(count, "cases", file=sys.stderr)


main()
