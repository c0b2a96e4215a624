// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/big"
	"strings"
)

func (r *renderer) add(a, b Value) (Value, error) {
	switch {
	case a.kind == kindString && b.kind == kindString:
		if err := r.made(len(a.str) + len(b.str)); err != nil {
			return Value{}, err
		}
		return String(a.str + b.str), nil
	case a.kind == kindUndefined || b.kind == kindUndefined:
		return Value{}, errUndefined(a, b)
	case a.isString() && b.isString():
		x, y := a.str, b.str
		if a.kind == kindString {
			x = r.escaped(x)
		}
		if b.kind == kindString {
			y = r.escaped(y)
		}
		if err := r.made(len(x) + len(y)); err != nil {
			return Value{}, err
		}
		return Value{kind: kindSafe, str: x + y}, nil
	case a.isSequence() && a.kind == b.kind:
		return r.addLists(a, b)
	case a.isString():
		return Value{}, errorf(TypeError, "can only concatenate str (not \"%s\") to str", b.typeName())
	}
	return r.arithmetic("+", a, b)
}

// addLists returns the items of a and of b. A list that is added to again and again
// grows in place: those that it grew from do not see what is behind their ends.
func (r *renderer) addLists(a, b Value) (Value, error) {
	x, y := a.ref.(*list), b.Items()
	n := len(x.items)
	if x.grown != nil && *x.grown == n && cap(x.items)-n >= len(y) {
		if err := r.tick(1 + len(y)*itemSteps); err != nil {
			return Value{}, err
		}
		r.hold(boxSize)
		*x.grown += len(y)
		return Value{kind: a.kind, ref: &list{append(x.items, y...), x.grown}}, nil
	}
	size := n + len(y)
	if err := r.listed(size + size/2); err != nil {
		return Value{}, err
	}
	items := make([]Value, 0, size+size/2)
	return Value{kind: a.kind, ref: &list{append(append(items, x.items...), y...), &size}}, nil
}

// escaped is markupsafe's escape.
func (r *renderer) escaped(s string) string {
	if !r.spend(len(s) / stringStep) {
		return ""
	}
	s = escaped(s)
	r.hold(2 * len(s)) // it grew
	return s
}

func escaped(s string) string {
	var b strings.Builder
	last := 0
	for i := range len(s) {
		var as string
		switch s[i] {
		case '&':
			as = "&amp;"
		case '<':
			as = "&lt;"
		case '>':
			as = "&gt;"
		case '\'':
			as = "&#39;"
		case '"':
			as = "&#34;"
		default:
			continue
		}
		b.WriteString(s[last:i])
		b.WriteString(as)
		last = i + 1
	}
	if last == 0 {
		return s
	}
	b.WriteString(s[last:])
	return b.String()
}

func (r *renderer) arithmetic(op string, a, b Value) (Value, error) {
	switch {
	case a.kind == kindUndefined || b.kind == kindUndefined:
		return Value{}, errUndefined(a, b)
	case op == "%" && a.isString():
		return r.percent(a, b)
	case op == "*" && (a.isString() || a.isSequence()) && b.isInt():
		return r.repeated(a, b.int())
	case op == "*" && (b.isString() || b.isSequence()) && a.isInt():
		return r.repeated(b, a.int())
	case !a.isNumber() || !b.isNumber():
		return Value{}, errorf(TypeError, "unsupported operand type(s) for %s: '%s' and '%s'", op, a.typeName(), b.typeName())
	case a.kind == kindFloat || b.kind == kindFloat:
		x, err := a.toFloat()
		if err != nil {
			return Value{}, err
		}
		y, err := b.toFloat()
		if err != nil {
			return Value{}, err
		}
		return floats(op, x, y)
	case a.isInt() && b.isInt():
		if n, ok := smallInts(op, a.int(), b.int()); ok {
			return Int(n), nil
		}
	}
	return r.integers(op, a.toBig(), b.toBig())
}

func (r *renderer) repeated(v Value, n int64) (Value, error) {
	n = max(n, 0)
	size := len(v.str) + 8*len(v.Items())
	if size > 0 && n > int64(r.o.MaxOutput/size) {
		return Value{}, errorf(LimitError, "a value of more than %d bytes", r.o.MaxOutput)
	}
	if v.isString() {
		if err := r.made(size * int(n)); err != nil {
			return Value{}, err
		}
		return Value{kind: v.kind, str: strings.Repeat(v.str, int(n))}, nil
	}
	var items []Value
	if err := r.listed(len(v.Items()) * int(n)); err != nil {
		return Value{}, err
	}
	if size > 0 {
		items = make([]Value, 0, len(v.Items())*int(n))
		for range n {
			items = append(items, v.Items()...)
		}
	}
	return Value{kind: v.kind, ref: &list{items: items}}, nil
}

func floats(op string, x, y float64) (Value, error) {
	switch op {
	case "+":
		return Float(x + y), nil
	case "-":
		return Float(x - y), nil
	case "*":
		return Float(x * y), nil
	case "**":
		z := math.Pow(x, y)
		switch {
		case x == 0 && y < 0:
			return Value{}, errorf(ZeroDivision, "0.0 cannot be raised to a negative power")
		case x < 0 && y != math.Trunc(y) && !math.IsInf(x, 0):
			return Value{}, errorf(LimitError, "complex numbers")
		case math.IsInf(z, 0) && !math.IsInf(x, 0) && !math.IsInf(y, 0):
			return Value{}, errorf(OverflowError, "(34, 'Numerical result out of range')")
		}
		return Float(z), nil
	}
	if y == 0 {
		return Value{}, errorf(ZeroDivision, "division by zero")
	}
	switch op {
	case "/":
		return Float(x / y), nil
	case "//":
		return Float(math.Floor(x / y)), nil
	}
	m := math.Mod(x, y)
	if m != 0 && (m < 0) != (y < 0) {
		m += y
	}
	return Float(m), nil
}

// quotient is the float nearest to x / y.
func quotient(x, y *big.Int) (Value, error) {
	if y.Sign() == 0 {
		return Value{}, errorf(ZeroDivision, "division by zero")
	}
	f, _ := new(big.Rat).SetFrac(x, y).Float64()
	if math.IsInf(f, 0) {
		return Value{}, errorf(OverflowError, "integer division result too large for a float")
	}
	return Float(f), nil
}

// smallInts computes what cannot overflow.
func smallInts(op string, x, y int64) (int64, bool) {
	const limit = 1 << 31
	if x < -limit || x >= limit || y < -limit || y >= limit {
		return 0, false
	}
	switch op {
	case "+":
		return x + y, true
	case "-":
		return x - y, true
	case "*":
		return x * y, true
	case "//", "%":
		if y == 0 {
			return 0, false
		}
		q, m := x/y, x%y
		if m != 0 && (m < 0) != (y < 0) { // rounded towards zero; Python rounds down
			q, m = q-1, m+y
		}
		if op == "%" {
			return m, true
		}
		return q, true
	}
	return 0, false
}

func (r *renderer) integers(op string, x, y *big.Int) (Value, error) {
	if err := r.tick((x.BitLen() + y.BitLen()) / 16); err != nil {
		return Value{}, err
	}
	r.hold((x.BitLen()+y.BitLen())/4 + boxSize)
	z := new(big.Int)
	switch op {
	case "/":
		return quotient(x, y)
	case "+":
		return bigInt(z.Add(x, y)), nil
	case "-":
		return bigInt(z.Sub(x, y)), nil
	case "*":
		if err := r.made((x.BitLen() + y.BitLen()) / 8); err != nil {
			return Value{}, err
		}
		if x.BitLen()+y.BitLen() > 1<<16 {
			return Value{}, errorf(LimitError, "an integer of more than %d bits", 1<<16)
		}
		return bigInt(z.Mul(x, y)), nil
	case "**":
		if y.Sign() < 0 {
			return floats(op, bigInt(x).number(), bigInt(y).number())
		}
		if !y.IsInt64() || x.BitLen() > 1 && y.Int64() > int64(1<<16/x.BitLen()) {
			return Value{}, errorf(LimitError, "an integer of more than %d bits", 1<<16)
		}
		if err := r.tick(x.BitLen() * int(min(y.Int64(), 1<<16)) / 16); err != nil {
			return Value{}, err
		}
		return bigInt(z.Exp(x, y, nil)), nil
	}
	if y.Sign() == 0 {
		return Value{}, errorf(ZeroDivision, "integer division or modulo by zero")
	}
	m := new(big.Int)
	z.QuoRem(x, y, m)
	if m.Sign() != 0 && m.Sign() != y.Sign() { // rounded towards zero; Python rounds down
		z.Sub(z, big.NewInt(1))
		m.Add(m, y)
	}
	if op == "//" {
		return bigInt(z), nil
	}
	return bigInt(m), nil
}
