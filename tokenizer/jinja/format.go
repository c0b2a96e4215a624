// SPDX-License-Identifier: Apache-2.0

package jinja

import "strings"

// percent is the operator % of strings, with the conversion %s only.
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
		if after == "" || after[0] != 's' && after[0] != '%' || format.kind == kindSafe {
			raise(Unsupported, "the format %%%.20s", after)
		}
		if rest = after[1:]; after[0] == '%' {
			r.write(String("%"))
			continue
		}
		if len(values) == 0 {
			raise(TypeError, "not enough arguments for format string")
		}
		r.write(String(r.text(values[0])))
		values = values[1:]
	}
	if len(values) > 0 && v.kind != kindDict && v.kind != kindList && v.kind != kindRange {
		raise(TypeError, "not all arguments converted during string formatting")
	}
	return String(r.cut(start))
}

// formatOf is the filter format: % with the arguments.
func formatOf(r *renderer, v Value, a args) Value {
	if len(a.names) > 0 {
		raise(Unsupported, "the filter 'format' with names")
	}
	r.listed(len(a.values))
	return r.percent(r.soft(v), tuple(a.kept().values...))
}
