// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
)

var percentField = regexp.MustCompile(`^(-?)(0?)(\d{0,5})(?:\.(\d{1,2}))?([sdifr%])`)

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
		r.write(String(r.formatted(values[0], m[1], m[2], m[3], m[4], m[5])))
		values = values[1:]
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

// formatted formats one value of %.
func (r *renderer) formatted(v Value, align, zero, width, precision, verb string) string {
	n, _ := strconv.Atoi("0" + width) // digits only
	r.made(n)
	if precision != "" {
		precision = "." + precision
	}
	format := "%" + align
	switch verb {
	case "r":
		return fmt.Sprintf(format+width+precision+"s", r.repr(v))
	case "s":
		return fmt.Sprintf(format+width+precision+"s", r.text(v))
	}
	if !v.isNumber() {
		r.defined(v)
		panic(errorf(TypeError, "%%%s format: a number is required, not %s", verb, v.typeName()))
	}
	if verb == "f" {
		f := toFloat(v)
		if math.IsInf(f, 0) || math.IsNaN(f) {
			panic(errorf(Unsupported, "the format of %v", f))
		}
		return fmt.Sprintf(format+zero+width+precision+"f", f)
	}
	if v.kind == kindFloat {
		v = truncated(v.float())
	}
	if precision != "" || v.kind == kindBig {
		panic(errorf(Unsupported, "a format %%d with a precision or of more than 64 bits"))
	}
	return fmt.Sprintf(format+zero+width+"d", v.int())
}
