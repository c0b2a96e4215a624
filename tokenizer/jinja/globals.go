// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"slices"
	"strconv"
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
	add("cycler", define("*", newCycler))
	add("joiner", define("sep", newJoiner))
	for name, class := range map[string]struct{ name, unsupported string }{
		"dict":      {"dict", ""},
		"range":     {"range", "count index start step stop mro"},
		"namespace": {"jinja2.utils.Namespace", "mro"},
		"cycler":    {"jinja2.utils.Cycler", "current next reset mro"},
		"joiner":    {"jinja2.utils.Joiner", "mro"},
	} {
		f := all[name].ref.(*function)
		f.class, f.unsupported = class.name, strings.Fields(class.unsupported)
	}
	add("lipsum", unsupported("the function", "lipsum")) // its text is random
	return all
}

// dictOf is Python's dict: of a dictionary or pairs, and of keyword arguments.
func (r *renderer) dictOf(a args) *Dict {
	d, positional := NewDict(len(a.names)), a.positional()
	if len(positional) > 1 {
		raise(TypeError, "dict expected at most 1 argument, got %d", len(positional))
	}
	for _, from := range positional {
		r.defined(from)
		var pairs []Value
		if from.kind == kindDict {
			pairs = r.pairs(from.Dict())
		} else {
			pairs = r.iterate(from)
		}
		r.listed(3 * len(pairs))
		for i, it := range pairs {
			if it.isNumber() || it.IsNone() {
				raise(TypeError, "cannot convert dictionary update sequence element #%d to a sequence", i)
			}
			pair := r.iterate(it)
			if len(pair) != 2 {
				raise(ValueError, "dictionary update sequence element #%d has length %d; 2 is required", i, len(pair))
			}
			r.setKey(d, pair[0], pair[1])
		}
	}
	r.listed(3 * len(a.names))
	for i, name := range a.names {
		d.Set(name, a.values[len(positional)+i])
	}
	return d
}

// newObject returns an object with attributes, which can be called if call is not nil.
func (r *renderer) newObject(name string, call func(r *renderer, a args) Value, attribute func(*renderer, string) (Value, bool)) Value {
	v := r.newFunc(name, call)
	v.ref.(*function).attribute = attribute
	return v
}

// newCycler is cycler: an object that returns its items in turn.
func newCycler(r *renderer, _ Value, a args) Value {
	items, at := a.kept().positional(), 0
	if len(a.names) > 0 {
		raise(TypeError, "Cycler.__init__() got an unexpected keyword argument '%s'", a.names[0])
	}
	if r.listed(len(items)); len(items) == 0 {
		raise(ObjectError, "at least one item has to be provided")
	}
	next := r.newFunc("next", func(*renderer, args) Value {
		v := items[at]
		at = (at + 1) % len(items)
		return v
	})
	reset := r.newFunc("reset", func(*renderer, args) Value {
		at = 0
		return None()
	})
	return r.newObject("cycler", nil, func(_ *renderer, name string) (Value, bool) {
		switch name {
		case "next":
			return next, true
		case "reset":
			return reset, true
		case "current":
			return items[at], true
		case "pos":
			return Int(int64(at)), true
		case "items":
			return tuple(items...), true
		}
		return Value{}, false
	})
}

// newJoiner is joiner: a function that returns "" at first, and then its separator.
func newJoiner(r *renderer, _ Value, a args) Value {
	separator, used := a.or(0, String(", ")), false
	return r.newObject("joiner", func(*renderer, args) Value {
		if !used {
			used = true
			return String("")
		}
		return separator
	}, func(_ *renderer, name string) (Value, bool) {
		switch name {
		case "sep":
			return separator, true
		case "used":
			return Bool(used), true
		}
		return Value{}, false
	})
}

// attribute returns an attribute of a macro. m may be nil.
func (m *macro) attribute(name string) (Value, bool) {
	if m == nil {
		return Value{}, false
	}
	switch name {
	case "name":
		if m.name == "" {
			return None(), true
		}
		return String(m.name), true
	case "arguments":
		var names []Value
		for _, n := range m.names {
			names = append(names, String(n))
		}
		return tuple(names...), true
	case "catch_kwargs":
		return Bool(m.kwargs.read), true
	case "catch_varargs":
		return Bool(m.varargs.read), true
	case "caller":
		return Bool(m.caller.read), true
	case "explicit_caller":
		return Bool(slices.Contains(m.names, "caller")), true
	}
	return Value{}, false
}

// rangeParts returns the start, stop and step of a range.
func rangeParts(v Value) (parts [3]int) {
	parts[2] = 1
	text := strings.TrimSuffix(strings.TrimPrefix(v.str, "range("), ")")
	for i, part := range strings.Split(text, ", ") {
		parts[i], _ = strconv.Atoi(part) // rangeOf wrote it
	}
	return parts
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
		case directive[0] == 'n', directive[0] == 't':
			b.WriteByte(map[byte]byte{'n': '\n', 't': '\t'}[directive[0]])
		case strings.IndexByte("klUWuwCGVgP", directive[0]) >= 0:
			text := dateNumber(t, directive[0])
			if short {
				text = strings.TrimLeft(text[:len(text)-1], "0 ") + text[len(text)-1:]
			}
			b.WriteString(text)
		case directive[0] == 'f':
			fmt.Fprintf(&b, "%06d", t.Nanosecond()/1000)
		case directive[0] != 'z' && directive[0] != 'Z': // there is no zone
			raise(Unsupported, "%%%c in a date format", directive[0])
		}
		format = directive[1:]
	}
}

// dateNumber returns the numbers in dates for which Go has no layout.
func dateNumber(t time.Time, directive byte) string {
	year, week := t.ISOWeek()
	weekday := int(t.Weekday())
	switch directive {
	case 'k':
		return fmt.Sprintf("%2d", t.Hour())
	case 'l':
		return fmt.Sprintf("%2d", (t.Hour()+11)%12+1)
	case 'U': // weeks begin on Sunday
		return fmt.Sprintf("%02d", (t.YearDay()+6-weekday)/7)
	case 'W': // weeks begin on Monday
		return fmt.Sprintf("%02d", (t.YearDay()+6-(weekday+6)%7)/7)
	case 'u':
		return fmt.Sprint((weekday+6)%7 + 1)
	case 'w':
		return fmt.Sprint(weekday)
	case 'C':
		return fmt.Sprintf("%02d", t.Year()/100)
	case 'G':
		return fmt.Sprintf("%04d", year)
	case 'g':
		return fmt.Sprintf("%02d", year%100)
	case 'V':
		return fmt.Sprintf("%02d", week)
	}
	return t.Format("pm")
}
