// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
)

var (
	percentField = regexp.MustCompile(`^(-?)(0?)(\d{0,5})(?:\.(\d{1,2}))?([sdifr%])`)
	formatField  = regexp.MustCompile(`^(\d*|[A-Za-z_]\w*)(?:!([rs]))?(:([<>]?)(0?)(\d{0,5})(?:\.(\d{1,2}))?([sdf]?))?\}`)
)

// percent is the operator % of strings.
func (r *renderer) percent(format, v Value) Value {
	values := []Value{v}
	if v.kind == kindTuple {
		values = v.Items()
	}
	start := len(r.out)
	for rest := format.str; ; {
		text, after, found := strings.Cut(rest, "%")
		if r.write(String(text)); !found {
			break
		}
		m := percentField.FindStringSubmatch(after)
		if m == nil || format.kind == kindSafe {
			panic(errorf(Unsupported, "the format %%%.20s", after))
		}
		if rest = after[len(m[0]):]; m[5] == "%" {
			r.write(String("%"))
			continue
		}
		if len(values) == 0 {
			panic(errorf(TypeError, "not enough arguments for format string"))
		}
		v, verb := values[0], m[5]
		values = values[1:]
		switch verb {
		case "r", "s":
			if v, verb = r.soft(v), "s"; m[5] == "r" {
				v = String(r.repr(v))
			}
			m[2] = ""
		case "d", "i":
			if verb = "d"; v.kind == kindFloat {
				v = truncated(v.float())
			}
		}
		if verb != "s" && !v.isNumber() {
			r.defined(v)
			panic(errorf(TypeError, "%%%s format: a number is required, not %s", verb, v.typeName()))
		}
		r.write(String(r.formatValue(v, m[1], m[2], m[3], m[4], verb)))
	}
	if len(values) > 0 && v.kind != kindDict && v.kind != kindList && v.kind != kindRange {
		panic(errorf(TypeError, "not all arguments converted during string formatting"))
	}
	return String(r.cut(start))
}

// formatOf is the filter format: % with the arguments.
func formatOf(r *renderer, v Value, a args) Value {
	if len(a.names) > 0 {
		panic(errorf(Unsupported, "the filter 'format' with names"))
	}
	r.listed(len(a.values))
	return r.percent(r.soft(v), tuple(a.kept().values...))
}

// formatted is str.format.
func formatted(r *renderer, v Value, a args) Value {
	start, next := len(r.out), 0
	for rest := v.str; ; {
		i := strings.IndexAny(rest, "{}")
		if i < 0 {
			r.write(String(rest))
			return v.withText(r.cut(start))
		}
		r.write(String(rest[:i]))
		if rest = rest[i:]; strings.HasPrefix(rest, "{{") || strings.HasPrefix(rest, "}}") {
			r.write(String(rest[:1]))
			rest = rest[2:]
			continue
		}
		m := formatField.FindStringSubmatch(rest[1:])
		if m == nil || rest[0] == '}' || v.kind == kindSafe {
			panic(errorf(Unsupported, "the format %.20s", rest))
		}
		x, ok := a.named(m[1])
		if k, err := strconv.Atoi(m[1]); err == nil || m[1] == "" {
			switch {
			case m[1] != "" && next > 0 || m[1] == "" && next < 0:
				panic(errorf(ValueError, "automatic and manual field numbers in one format"))
			case m[1] != "":
				next = -1
			default:
				k = next
				next++
			}
			if k >= len(a.positional()) {
				panic(errorf(IndexError, "Replacement index %d out of range for positional args tuple", k))
			}
			x, ok = a.values[k], true
		}
		if !ok {
			panic(errorf(KeyError, "'%s'", m[1]))
		}
		r.write(String(r.formatFieldValue(x, m)))
		rest = rest[1+len(m[0]):]
	}
}

// formatFieldValue formats v as m, a match of formatField, says.
func (r *renderer) formatFieldValue(v Value, m []string) string {
	switch {
	case m[2] == "r":
		v = String(r.repr(v))
	case m[2] == "s" || len(m[3]) < 2:
		v = r.soft(v)
	case v.kind == kindBool:
		v = Int(v.int())
	}
	align, verb := map[string]string{"<": "-"}[m[4]], m[8]
	switch {
	case !v.isNumber() && !v.isString():
		panic(errorf(TypeError, "unsupported format string passed to %s.__format__", v.typeName()))
	case v.isString() && strings.Contains("df", verb) && verb != "", v.isNumber() && verb == "s", v.kind == kindFloat && verb == "d", verb == "d" && m[7] != "":
		panic(errorf(ValueError, "Unknown format code '%s' for object of type '%s'", verb, v.typeName()))
	case v.isNumber() && verb == "" && m[7] != "", m[5] != "" && (m[4] != "" || v.isString() || verb == ""):
		panic(errorf(Unsupported, "the format %s", m[3]))
	case v.isString() && m[4] == "":
		align = "-"
	}
	return r.formatValue(v, align, m[5], m[6], m[7], verb)
}

// formatValue formats a value with a format of Go.
func (r *renderer) formatValue(v Value, align, zero, width, precision, verb string) string {
	n, _ := strconv.Atoi("0" + width) // digits only
	r.made(n)
	format := "%" + align + zero + width
	if precision != "" {
		format += "." + precision
	}
	switch verb {
	case "d":
		if precision != "" {
			panic(errorf(Unsupported, "a precision of %%d"))
		}
		return fmt.Sprintf(format+"d", v.toBig())
	case "f":
		f := toFloat(v)
		if math.IsInf(f, 0) || math.IsNaN(f) {
			panic(errorf(Unsupported, "the format of %v", f))
		}
		return fmt.Sprintf(format+"f", f)
	}
	return fmt.Sprintf(format+"s", r.text(v))
}
