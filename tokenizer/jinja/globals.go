// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"strings"
	"time"
)

// maxRange is the sandbox's own limit.
const maxRange = 100_000

// globals are the functions that a template can call by name.
func globals() map[string]Value {
	all := map[string]Value{}
	add := func(name string, b *builtin) {
		all[name] = Value{
			kind: kindFunc, ref: &function{name: name, call: func(r *renderer, a args) Value { return r.invoke(b, Value{}, a) }},
		}
	}
	add("raise_exception", define("message!", func(r *renderer, _ Value, a args) Value {
		return raise(Raise, "%s", r.text(a.values[0]))
	}))
	add("strftime_now", define("format!", func(r *renderer, _ Value, a args) Value {
		r.tick(2 * len(a.text(0)))
		return String(strftime(r.Now, a.text(0)))
	}))
	add("range", define("_! _ _", rangeOf))
	add("dict", define("*", func(r *renderer, _ Value, a args) Value { return FromDict(r.dictOf(a)) }))
	add("namespace",
		define("*", func(r *renderer, _ Value, a args) Value { return Value{kind: kindNamespace, ref: r.dictOf(a)} }))
	for _, name := range []string{"cycler", "joiner", "lipsum"} {
		add(name, unsupported("the function", name))
	}
	return all
}

// dictOf returns the dictionary of keyword arguments.
func (r *renderer) dictOf(a args) *Dict {
	if len(a.positional()) > 0 {
		raise(Unsupported, "a dictionary of other values than keyword arguments")
	}
	d := NewDict(len(a.names))
	r.listed(3 * len(a.names))
	for i, name := range a.names {
		d.Set(name, a.values[i])
	}
	return d
}

func rangeOf(r *renderer, _ Value, a args) Value {
	start, stop, step := 0, a.integer(0, 0), a.integer(2, 1)
	if a.values[1].kind != kindUnset {
		start, stop = stop, a.integer(1, 0)
	}
	count := 0
	switch {
	case step == 0:
		raise(ValueError, "range() arg 3 must not be zero")
	case step > 0 && stop > start:
		count = (stop-start-1)/step + 1
	case step < 0 && stop < start:
		count = (start-stop-1)/-step + 1
	}
	if count > maxRange {
		raise(OverflowError, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", maxRange)
	}
	r.listed(count)
	items := make([]Value, count)
	for i := range items {
		items[i] = Int(int64(start + i*step))
	}
	text := fmt.Sprintf("range(%d, %d)", start, stop)
	if step != 1 {
		text = fmt.Sprintf("range(%d, %d, %d)", start, stop, step)
	}
	return Value{kind: kindRange, str: text, ref: &list{items: items}}
}

// dateLayouts are the directives of strftime as layouts of Go.
//
//nolint:gochecknoglobals // a table
var dateLayouts = map[byte]string{
	'a': "Mon", 'A': "Monday", 'b': "Jan", 'h': "Jan", 'B': "January", 'd': "02", 'e': "_2", 'm': "01", 'y': "06",
	'Y': "2006", 'j': "002",
	'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'F': "2006-01-02", 'T': "15:04:05", 'X': "15:04:05",
	'R': "15:04",
	'D': "01/02/06", 'x': "01/02/06", 'c': "Mon Jan _2 15:04:05 2006",
}

// strftime formats a time as Python does for a time without a zone. The flag "-"
// leaves out leading zeros, as in glibc.
func strftime(t time.Time, format string) string {
	var b strings.Builder
	for {
		text, directive, found := strings.Cut(format, "%")
		b.WriteString(text)
		if !found {
			return b.String()
		}
		directive, short := strings.CutPrefix(directive, "-")
		if directive == "" {
			raise(Unsupported, "a date format that ends in %%")
		}
		layout, known := dateLayouts[directive[0]]
		text = t.Format(layout)
		if short && known {
			text = strings.TrimLeft(text[:len(text)-1], "0 ") + text[len(text)-1:]
		}
		switch {
		case known:
			b.WriteString(text)
		case directive[0] == '%':
			b.WriteByte('%')
		case directive[0] == 'f':
			fmt.Fprintf(&b, "%06d", t.Nanosecond()/1000)
		case directive[0] != 'z' && directive[0] != 'Z': // there is no zone
			raise(Unsupported, "%%%c in a date format", directive[0])
		}
		format = directive[1:]
	}
}
