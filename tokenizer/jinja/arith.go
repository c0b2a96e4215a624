// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/big"
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
	case op == "-" && (a.kind == kindView || b.kind == kindView):
		raise(Unsupported, "the difference of keys or items")
	case !a.isNumber() || !b.isNumber():
		raise(TypeError, "unsupported operand type(s) for %s: '%s' and '%s'", op, a.typeName(), b.typeName())
	case (op == "/" || op == "//" || op == "%") && !b.Truth():
		raise(ZeroDivision, "division by zero")
	case op == "**":
		return r.power(a, b)
	case a.kind == kindFloat || b.kind == kindFloat:
		return floats(op, toFloat(a), toFloat(b))
	}
	return r.integers(op, a, b)
}

// power is the operator **.
func (r *renderer) power(a, b Value) Value {
	if a.kind == kindFloat || b.kind == kindFloat || b.kind != kindBig && b.int() < 0 {
		x, y := toFloat(a), toFloat(b)
		z := math.Pow(x, y)
		switch {
		case x == 0 && y < 0:
			raise(ZeroDivision, "0.0 cannot be raised to a negative power")
		case x < 0 && y != math.Trunc(y) && !math.IsInf(x, 0) && !math.IsInf(y, 0):
			raise(Unsupported, "complex numbers")
		case math.IsInf(z, 0) && !math.IsInf(x, 0) && !math.IsInf(y, 0):
			raise(OverflowError, "Numerical result out of range")
		}
		return Float(z)
	}
	x := r.bigOf(a)
	if b.kind == kindBig && x.CmpAbs(big.NewInt(1)) > 0 || b.kind != kindBig && b.int() > maxBits/int64(max(x.BitLen(), 1)) && x.BitLen() > 1 {
		raise(LimitError, "an integer of more than %d bits", maxBits)
	}
	y := r.bigOf(b)
	if x.BitLen() <= 1 { // 0, 1 or -1: only whether the exponent is even counts
		y = new(big.Int).SetUint64(uint64(min(y.Sign(), 1))*2 + uint64(y.Bit(0)))
	}
	r.tick(maxBits / stringStep)
	return r.bigResult(new(big.Int).Exp(x, y, nil))
}

// bigResult returns an integer as a value.
func (r *renderer) bigResult(n *big.Int) Value {
	text := n.String()
	r.made(len(text))
	return integer(text)
}

// maxBits limits integers.
const maxBits = 1 << 15

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
	}
	m := math.Mod(x, y)
	quotient := (x - m) / y
	switch {
	case m == 0:
		m = math.Copysign(0, y)
	case (m < 0) != (y < 0):
		m, quotient = m+y, quotient-1
	}
	switch floor := math.Floor(quotient); {
	case op == "%":
		return Float(m)
	case quotient == 0:
		return Float(math.Copysign(0, x/y))
	case quotient-floor > 0.5:
		return Float(floor + 1)
	default:
		return Float(floor)
	}
}

// integers computes with integers.
func (r *renderer) integers(op string, a, b Value) Value {
	x, y := a.int(), b.int()
	const small = 1 << 31 // no result overflows
	if a.kind == kindBig || b.kind == kindBig || max(x, y) >= small || min(x, y) <= -small {
		return r.bigIntegers(op, a, b)
	}
	switch op {
	case "+":
		return Int(x + y)
	case "-":
		return Int(x - y)
	case "*":
		return Int(x * y)
	case "/":
		return Float(float64(x) / float64(y))
	}
	quotient, rest := x/y, x%y
	if rest != 0 && (rest < 0) != (y < 0) {
		quotient, rest = quotient-1, rest+y
	}
	if op == "%" {
		return Int(rest)
	}
	return Int(quotient)
}

// bigIntegers computes with integers of any size up to maxBits.
func (r *renderer) bigIntegers(op string, a, b Value) Value {
	x, y := r.bigOf(a), r.bigOf(b)
	if x.BitLen()+y.BitLen() > maxBits {
		raise(LimitError, "an integer of more than %d bits", maxBits)
	}
	r.tick(x.BitLen()*y.BitLen()/(1<<16) + (x.BitLen()+y.BitLen())/scanStep)
	z := new(big.Int)
	switch op {
	case "+":
		z.Add(x, y)
	case "-":
		z.Sub(x, y)
	case "*":
		z.Mul(x, y)
	case "/":
		f, _ := new(big.Rat).SetFrac(x, y).Float64() // correctly rounded
		if math.IsInf(f, 0) {
			raise(OverflowError, "integer division result too large for a float")
		}
		return Float(f)
	default:
		rest := new(big.Int)
		z.QuoRem(x, y, rest)
		if rest.Sign() != 0 && (rest.Sign() < 0) != (y.Sign() < 0) {
			z.Sub(z, big.NewInt(1))
			rest.Add(rest, y)
		}
		if op == "%" {
			z = rest
		}
	}
	return r.bigResult(z)
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
	return r.integers(op, Int(0), v)
}
