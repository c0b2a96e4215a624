// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// add is Python's +.
func (r *renderer) add(a, b Value) Value {
	r.defined(a, b)
	switch {
	case a.isString() && b.isString():
		x, y := a, b
		if a.kind != b.kind {
			x, y = r.safe(a), r.safe(b)
		}
		r.made(len(x.str) + len(y.str))
		return x.withText(x.str + y.str)
	case a.isSequence() && a.kind == b.kind:
		return r.addLists(a, b)
	case a.isString():
		raise(TypeError, "can only concatenate str (not %q) to str", b.typeName())
	}
	return r.arithmetic("+", a, b)
}

// safe is markupsafe's escape: the text of a value with special characters replaced,
// unless it is safe already.
func (r *renderer) safe(v Value) Value {
	if v.kind == kindSafe {
		return v
	}
	s := r.text(v)
	r.made(len(s))
	escaped := escaper.Replace(s)
	r.hold(2 * len(escaped))
	return Value{kind: kindSafe, str: escaped}
}

// addLists returns the items of a and of b. A list that is added to again and again
// grows in place: the lists that it grew from do not see what is behind their ends.
func (r *renderer) addLists(a, b Value) Value {
	x, y := a.ref.(*list), b.Items()
	n := len(x.items)
	if x.grown != nil && *x.grown == n && cap(x.items)-n >= len(y) {
		r.tick(1 + len(y)*itemSteps)
		r.hold(boxSize)
		*x.grown += len(y)
		return Value{kind: a.kind, ref: &list{append(x.items, y...), x.grown}}
	}
	size := n + len(y)
	r.listed(size + size/2)
	items := make([]Value, 0, size+size/2)
	return Value{kind: a.kind, ref: &list{append(append(items, x.items...), y...), &size}}
}

// arithmetic is any operator but + of strings and lists.
func (r *renderer) arithmetic(op string, a, b Value) Value {
	r.defined(a, b)
	switch {
	case op == "%" && a.isString():
		return r.percent(a, b)
	case op == "*" && (a.isString() || a.isSequence()) && b.isInt():
		return r.repeated(a, b.int())
	case op == "*" && (b.isString() || b.isSequence()) && a.isInt():
		return r.repeated(b, a.int())
	case !a.isNumber() || !b.isNumber():
		raise(TypeError, "unsupported operand type(s) for %s: '%s' and '%s'", op, a.typeName(), b.typeName())
	case (op == "/" || op == "//" || op == "%") && !b.Truth():
		raise(ZeroDivision, "division by zero")
	case a.kind == kindFloat || b.kind == kindFloat:
		return floats(op, toFloat(a), toFloat(b))
	}
	return integers(op, a, b)
}

func (r *renderer) repeated(v Value, n int64) Value {
	n = max(n, 0)
	items := v.Items()
	if size := len(v.str) + 8*len(items); size > 0 && n > int64(r.MaxOutput/size) {
		raise(LimitError, "a value of more than %d bytes", r.MaxOutput)
	}
	if v.isString() {
		r.made(len(v.str) * int(n))
		return v.withText(strings.Repeat(v.str, int(n)))
	}
	if len(items) == 0 {
		n = 0
	}
	r.listed(len(items) * int(n))
	return sequence(v.kind, slices.Repeat(items, int(n)))
}

// toFloat converts a number as Python does.
func toFloat(v Value) float64 {
	switch v.kind {
	case kindFloat:
		return v.float()
	case kindBig:
		f, err := strconv.ParseFloat(v.str, 64)
		if err != nil {
			raise(OverflowError, "int too large to convert to float")
		}
		return f
	}
	return float64(v.int())
}

func floats(op string, x, y float64) Value {
	switch op {
	case "+":
		return Float(x + y)
	case "-":
		return Float(x - y)
	case "*":
		return Float(x * y)
	case "/":
		return Float(x / y)
	case "//":
		return Float(math.Floor(x / y))
	}
	m := math.Mod(x, y)
	if m != 0 && (m < 0) != (y < 0) {
		m += y
	}
	return Float(m)
}

// integers computes with integers of at most 64 bits.
func integers(op string, a, b Value) Value {
	x, y := a.int(), b.int()
	if a.kind == kindBig || b.kind == kindBig || min(x, y) == math.MinInt64 {
		tooLarge()
	}
	var z int64
	overflow := false
	switch op {
	case "-", "+":
		if op == "-" {
			y = -y
		}
		z = x + y
		overflow = (z > x) != (y > 0)
	case "*":
		z = x * y
		overflow = z == math.MinInt64 || y != 0 && z/y != x
	case "/":
		const exact = 1 << 53 // larger integers are not floats
		if overflow = max(x, -x, y, -y) > exact; !overflow {
			return Float(float64(x) / float64(y))
		}
	default:
		quotient, rest := x/y, x%y
		if rest != 0 && (rest < 0) != (y < 0) {
			quotient, rest = quotient-1, rest+y
		}
		if z = quotient; op == "%" {
			z = rest
		}
	}
	if overflow {
		tooLarge()
	}
	return Int(z)
}

// sign is the operator + or - before a number.
func (r *renderer) sign(op string, v Value) Value {
	r.defined(v)
	switch {
	case !v.isNumber():
		raise(TypeError, "bad operand type for unary %s: '%s'", op, v.typeName())
	case op == "+" && v.kind != kindBool:
		return v
	case v.kind == kindFloat:
		return Float(-v.float())
	}
	return integers(op, Int(0), v)
}
