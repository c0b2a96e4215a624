// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode"
)

func numberFilters() map[string]filterOf {
	return map[string]filterOf{
		"abs": {"", func(_ *renderer, v Value, _ *args) (Value, error) {
			switch {
			case v.kind == kindUndefined:
				return Value{}, errorf(TypeError, "bad operand type for abs(): 'Undefined'")
			case v.kind == kindFloat:
				return Float(math.Abs(v.float())), nil
			case v.isNumber():
				return bigInt(new(big.Int).Abs(v.toBig())), nil
			}
			return Value{}, errorf(TypeError, "bad operand type for abs(): '%s'", v.typeName())
		}},
		"round": {"precision method", round}, "int": {"default base", toInteger},
		"float": {"default", func(r *renderer, v Value, a *args) (Value, error) {
			if err := r.tick(len(v.str) / 8); err != nil {
				return Value{}, err
			}
			switch {
			case v.kind == kindUndefined:
				return Value{}, errUndefined(v)
			case v.isNumber():
				f, err := v.toFloat()
				return Float(f), err
			case v.isString():
				if f, ok := parseFloat(v.str); ok {
					return Float(f), nil
				}
			}
			if d, ok := a.get(0, "default"); ok {
				return d, nil
			}
			return Float(0), nil
		}},
		"filesizeformat": {"binary", fileSize},
	}
}

// toFloat returns a number as a float, as Python converts it.
func (v Value) toFloat() (float64, error) {
	f := v.number()
	if v.kind == kindBig && math.IsInf(f, 0) {
		return 0, errorf(OverflowError, "int too large to convert to float")
	}
	return f, nil
}

// truncated returns a float as an integer.
func (v Value) truncated() (Value, error) {
	f := v.float()
	switch {
	case math.IsInf(f, 0):
		return Value{}, errorf(OverflowError, "cannot convert float infinity to integer")
	case math.IsNaN(f):
		return Value{}, errorf(ValueError, "cannot convert float NaN to integer")
	}
	n, _ := new(big.Float).SetFloat64(f).Int(nil)
	return bigInt(n), nil
}

// numeral returns the text of a number with all digits as those of ASCII, without
// the underscores that may stand between two digits; !ok if others stand there.
func numeral(s string) (out string, ok bool) {
	s = strings.TrimFunc(s, isSpace)
	var b strings.Builder
	digit := func(c rune) bool { return c < 128 && (c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z') }
	before, gap := rune(0), false
	for _, c := range s {
		if c >= 128 && unicode.IsDigit(c) {
			c = '0' + digitValue(c)
		}
		if c == '_' {
			if gap || !digit(before) {
				return "", false
			}
			gap = true
			continue
		}
		if gap && !digit(c) {
			return "", false
		}
		gap, before = false, c
		b.WriteRune(c)
	}
	return b.String(), !gap
}

// digitValue is the value of a decimal digit: each script has ten in a row.
func digitValue(c rune) rune {
	for _, x := range unicode.Nd.R16 {
		if rune(x.Lo) <= c && c <= rune(x.Hi) {
			return (c - rune(x.Lo)) % 10
		}
	}
	for _, x := range unicode.Nd.R32 {
		if rune(x.Lo) <= c && c <= rune(x.Hi) {
			return (c - rune(x.Lo)) % 10
		}
	}
	return 0
}

// parseFloat is Python's float of a string.
func parseFloat(s string) (float64, bool) {
	s, ok := numeral(s)
	if !ok || strings.ContainsAny(s, "xXpP") {
		return 0, false
	}
	f, err := strconv.ParseFloat(s, 64)
	return f, err == nil || math.IsInf(f, 0)
}

// parseInt is Python's int of a string in a base; of base 0 its prefix says which.
func parseInt(s string, base int) (*big.Int, bool) {
	s, ok := numeral(s)
	if !ok || len(s) > 4300 {
		return nil, false
	}
	sign := ""
	if s != "" && (s[0] == '-' || s[0] == '+') {
		sign, s = s[:1], s[1:]
	}
	prefixes := map[string]int{"0b": 2, "0o": 8, "0x": 16}
	if len(s) > 2 {
		if of := prefixes[strings.ToLower(s[:2])]; of != 0 && (base == of || base == 0) {
			s, base = s[2:], of
		}
	}
	switch {
	case s == "" || s[0] == '-' || s[0] == '+':
		return nil, false
	case base == 0 && s[0] == '0' && strings.Trim(s, "0") != "":
		return nil, false
	case base == 0:
		base = 10
	}
	return new(big.Int).SetString(sign+s, base)
}

func toInteger(r *renderer, v Value, a *args) (Value, error) {
	d, ok := a.get(0, "default")
	if !ok {
		d = Int(0)
	}
	base, err := a.count(1, "base", 10)
	if err == nil {
		err = r.tick(len(v.str) / 4)
	}
	switch {
	case err != nil:
		return Value{}, err
	case v.kind == kindUndefined:
		return Value{}, errUndefined(v)
	case v.kind == kindBig:
		return v, nil
	case v.isInt():
		return Int(v.int()), nil
	case v.kind == kindFloat:
		if math.IsNaN(v.float()) {
			return d, nil
		}
		return v.truncated()
	case v.isString():
		if base == 0 || base >= 2 && base <= 36 {
			if n, ok := parseInt(v.str, base); ok {
				return bigInt(n), nil
			}
		}
		if f, ok := parseFloat(v.str); ok {
			if n, err := Float(f).truncated(); err == nil {
				return n, nil
			}
		}
	}
	return d, nil
}

func round(_ *renderer, v Value, a *args) (Value, error) {
	how, err := a.word("round", 1, "method", "common")
	if err != nil || how != "common" && how != "ceil" && how != "floor" {
		return Value{}, errorf(FilterError, "method must be common, ceil or floor")
	}
	if p, given := a.get(0, "precision"); given && p.IsNone() && how == "common" && v.isNumber() {
		if v.kind != kindFloat {
			return bigInt(v.toBig()), nil
		}
		return Float(math.RoundToEven(v.float())).truncated()
	}
	n, err := a.count(0, "precision", 0)
	switch {
	case err != nil:
		return Value{}, err
	case v.kind == kindUndefined:
		return Value{}, errorf(TypeError, "type Undefined doesn't define __round__ method")
	case !v.isNumber():
		return Value{}, errorf(TypeError, "type %s doesn't define __round__ method", v.typeName())
	case v.kind != kindFloat && how == "common":
		return roundInt(v.toBig(), -n), nil
	}
	n = min(max(n, -400), 400)
	x, err := v.toFloat()
	if err != nil {
		return Value{}, err
	}
	if how == "common" {
		return roundFloat(x, n), nil
	}
	f := math.Floor
	if how == "ceil" {
		f = math.Ceil
	}
	// As the reference computes it: by an integer, or by a fraction if n is negative.
	scale := math.Pow(10, float64(n))
	if n < 0 {
		scale = 1 / math.Pow(10, float64(-n))
	}
	y := x * scale
	if _, err := Float(f(y)).truncated(); err != nil {
		return Value{}, err
	}
	return Float(f(y) / scale), nil
}

// roundFloat is Python's round of a float: correctly rounded.
func roundFloat(x float64, n int) Value {
	if math.IsInf(x, 0) || math.IsNaN(x) {
		return Float(x)
	}
	if n >= 0 {
		f, _ := strconv.ParseFloat(strconv.FormatFloat(x, 'f', n, 64), 64)
		return Float(f)
	}
	whole, _ := new(big.Float).SetFloat64(math.Trunc(x)).Int(nil)
	unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(-n)), nil)
	rest := new(big.Int)
	q, _ := new(big.Int).QuoRem(whole, unit, rest)
	rest.Abs(rest).Lsh(rest, 1)
	c := rest.Cmp(unit)
	if c > 0 || c == 0 && (q.Bit(0) == 1 || x != math.Trunc(x)) {
		q.Add(q, big.NewInt(int64(math.Copysign(1, x))))
	}
	f, _ := new(big.Float).SetInt(q.Mul(q, unit)).Float64()
	return Float(math.Copysign(math.Abs(f), x))
}

// roundInt makes the last zeros digits of x zeros, halves to even.
func roundInt(x *big.Int, zeros int) Value {
	if zeros <= 0 {
		return bigInt(x)
	}
	if zeros > x.BitLen() { // 2**bits is less than half of 10**zeros
		return Int(0)
	}
	unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(zeros)), nil)
	rest := new(big.Int)
	q, _ := new(big.Int).DivMod(x, unit, rest) // rounded down
	if c := rest.Lsh(rest, 1).Cmp(unit); c > 0 || c == 0 && q.Bit(0) == 1 {
		q.Add(q, big.NewInt(1))
	}
	return bigInt(q.Mul(q, unit))
}

func fileSize(_ *renderer, v Value, a *args) (Value, error) {
	size := v.number()
	switch {
	case v.isString():
		f, ok := parseFloat(v.str)
		if !ok {
			return Value{}, errorf(ValueError, "could not convert string to float")
		}
		size = f
	case v.kind == kindUndefined:
		return Value{}, errUndefined(v)
	case !v.isNumber():
		return Value{}, errorf(TypeError, "float() argument must be a string or a real number, not '%s'", v.typeName())
	}
	base, middle := 1000.0, "B"
	if binary, _ := a.get(0, "binary"); binary.truth() {
		base, middle = 1024, "iB"
	}
	switch {
	case size == 1:
		return String("1 Byte"), nil
	case size < base:
		n, err := Float(size).truncated()
		if err != nil {
			return Value{}, err
		}
		return String(n.toBig().String() + " Bytes"), nil
	}
	letters := "kMGTPEZY"
	if base == 1024 {
		letters = "KMGTPEZY"
	}
	for i := range len(letters) {
		unit := math.Pow(base, float64(i+2))
		if size < unit || i == len(letters)-1 {
			return String(strconv.FormatFloat(base*size/unit, 'f', 1, 64) + " " + letters[i:i+1] + middle), nil
		}
	}
	return Value{}, nil
}
