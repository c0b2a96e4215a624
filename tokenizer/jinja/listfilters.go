// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
)

// moreFilters are the filters of lists and numbers that few chat templates use.
func moreFilters() map[string]*builtin {
	return map[string]*builtin{
		"abs": plain(absolute), "round": define("precision method", rounded), "sum": define("attribute start", sumOf),
		"min": extreme(-1), "max": extreme(1), "unique": define("case_sensitive attribute", unique),
		"groupby": define("attribute! default case_sensitive", grouped), "batch": define("linecount! fill_with", batched),
		"slice": define("slices! fill_with", sliced), "attr": define("name!", attrOf),
		"filesizeformat": define("binary", fileSize),
	}
}

// attrOf is attr: an attribute, never a key.
func attrOf(r *renderer, v Value, a args) Value {
	name := a.text(0)
	if v.kind == kindDict && r.library.named(name).ofDict == nil {
		return missing(name)
	}
	return r.attr(v, name, r.library.named(name))
}

// extreme returns the filter min (sign -1) or max (sign 1): the first item with the lowest or highest key.
func extreme(sign int) *builtin {
	return define("case_sensitive attribute", func(r *renderer, v Value, a args) Value {
		all := r.keys(r.iterate(v), a.values[1], a.values[0])
		if len(all) == 0 {
			return undefined("No aggregated item, sequence was empty.")
		}
		best := all[0]
		for _, x := range all[1:] {
			if r.compare(x.key, best.key)*sign > 0 {
				best = x
			}
		}
		return best.item
	})
}

func sumOf(r *renderer, v Value, a args) Value {
	total := a.or(1, Int(0))
	if total.isString() {
		raise(TypeError, "sum() can't sum strings [use ''.join(seq) instead]")
	}
	for _, it := range r.iterate(v) {
		total = r.add(total, r.key(it, a.values[0]))
	}
	return total
}

// unique is a generator of the first item of each key.
func unique(r *renderer, v Value, a args) Value {
	attribute, caseSensitive := a.or(1, None()), a.or(0, Bool(false))
	return r.newGenerator(func() (out []Value) {
		seen := &Dict{}
		for _, x := range r.keys(r.iterate(v), attribute, caseSensitive) {
			r.tick(1 + seen.Len()/scanStep)
			if _, ok := r.lookup(seen, x.key); !ok {
				seen.add(x.key, None())
				out = append(out, x.item)
				r.hold(6 * valueSize)
			}
		}
		return out
	})
}

// groupTuple marks the tuples of groupby, which have the attributes grouper and list.
const groupTuple = "_GroupTuple"

// grouped is groupby: tuples of a key and the items that have it, in the order of the keys.
func grouped(r *renderer, v Value, a args) Value {
	attribute, caseSensitive := a.values[0], a.or(2, Bool(false))
	byDefault := a.or(1, None())
	items := r.iterate(v)
	r.listed(6 * len(items))
	all, shown := make([]keyed, len(items)), make([]Value, len(items))
	for i, it := range items {
		shown[i] = r.keyOr(it, attribute, byDefault)
		all[i] = keyed{shown[i], it}
		if shown[i].isString() && !caseSensitive.Truth() {
			r.tick(1 + len(shown[i].str)/stringStep)
			all[i].key = String(lower(shown[i].str))
		}
	}
	order := make([]int, len(all))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return r.compare(all[i].key, all[j].key) })
	var groups, members []Value
	for n, i := range order {
		r.listed(1)
		members = append(members, all[i].item)
		if n+1 < len(order) && r.equal(all[order[n+1]].key, all[i].key) {
			continue
		}
		group := tuple(shown[order[n+1-len(members)]], List(members...))
		group.str = groupTuple
		r.listed(2)
		groups, members = append(groups, group), nil
	}
	return List(groups...)
}

// fill is the argument fill_with of batch and slice.
func (a args) fill() (v Value, given bool) {
	v, given = a.given(1)
	return v, given
}

// batched is a generator of lists of linecount items.
func batched(r *renderer, v Value, a args) Value {
	count := a.values[0]
	fill, filled := a.fill()
	return r.newGenerator(func() (out []Value) {
		var line []Value
		end := func() {
			r.listed(len(line))
			out, line = append(out, List(line...)), nil
		}
		items := r.iterate(v)
		for _, it := range items {
			if r.equal(Int(int64(len(line))), count) {
				end()
			}
			line = append(line, it)
		}
		if len(line) == 0 {
			return out
		}
		if filled && r.compare(Int(int64(len(line))), count) < 0 {
			missing := args{values: []Value{count}}.integer(0, 0) - len(line)
			r.listed(missing)
			line = append(line, slices.Repeat([]Value{fill}, missing)...)
		}
		end()
		return out
	})
}

// sliced is a generator of lists: as many as slices says, of nearly equal lengths.
func sliced(r *renderer, v Value, a args) Value {
	wanted := a.values[0]
	fill, filled := a.fill()
	return r.newGenerator(func() (out []Value) {
		items := r.iterate(v)
		length := Int(int64(len(items)))
		each, longer := r.arithmetic("//", length, wanted), r.arithmetic("%", length, wanted)
		n := args{values: []Value{wanted}}.integer(0, 0)
		r.listed(n + len(items))
		for i := range max(n, 0) {
			size := int(each.int())
			more := i < int(longer.int())
			if more {
				size++
			}
			part := slices.Clone(items[:size])
			if items = items[size:]; filled && !more {
				part = append(part, fill)
			}
			r.hold(boxSize)
			out = append(out, List(part...))
		}
		return out
	})
}

func absolute(_ *renderer, v Value) Value {
	switch {
	case !v.isNumber():
		raise(TypeError, "bad operand type for abs(): '%s'", v.typeName())
	case v.kind == kindFloat:
		return Float(math.Abs(v.float()))
	case v.kind == kindBig:
		return integer(strings.TrimPrefix(v.str, "-"))
	case v.int() == math.MinInt64:
		return integer(strings.TrimPrefix(strconv.FormatInt(v.int(), 10), "-"))
	}
	return Int(max(v.int(), -v.int()))
}

// rounded is round. An integer stays one with the method common.
func rounded(_ *renderer, v Value, a args) Value {
	precision, method := a.or(0, Int(0)), a.or(1, String("common"))
	switch {
	case !slices.Contains([]string{"common", "ceil", "floor"}, method.str) || !method.isString():
		raise(FilterError, "method must be common, ceil or floor")
	case !v.isNumber():
		raise(TypeError, "type %s doesn't define __round__ method", v.typeName())
	}
	if method.str != "common" {
		scale := math.Pow(10, toFloat(Int(int64(args{values: []Value{precision}}.integer(0, 0)))))
		f := toFloat(v) * scale
		if f = math.Ceil(f); method.str == "floor" {
			f = math.Floor(toFloat(v) * scale)
		}
		truncated(f) // fails for what is not finite
		return Float(f / scale)
	}
	if precision.IsNone() {
		if v.kind == kindFloat {
			return truncated(math.RoundToEven(v.float()))
		}
		return integer(digitsOf(v))
	}
	n := args{values: []Value{precision}}.integer(0, 0)
	switch {
	case v.kind != kindFloat && n >= 0:
		return integer(digitsOf(v))
	case v.kind != kindFloat:
		x, _ := new(big.Int).SetString(digitsOf(v), 10)
		return integer(roundToTens(new(big.Rat).SetInt(x), -n))
	case math.IsInf(v.float(), 0) || math.IsNaN(v.float()) || n > 330:
		return v
	case n < 0:
		f, _ := strconv.ParseFloat(roundToTens(new(big.Rat).SetInt(intPart(v.float())), -n), 64)
		return Float(math.Copysign(f, v.float()))
	}
	f, _ := strconv.ParseFloat(strconv.FormatFloat(v.float(), 'f', n, 64), 64) // correctly rounded
	return Float(f)
}

// digitsOf returns the decimal digits of an integer.
func digitsOf(v Value) string {
	if v.kind == kindBig {
		return v.str
	}
	return strconv.FormatInt(v.int(), 10)
}

// intPart returns a finite float without its fraction, but not rounded up to the half of a ten.
func intPart(f float64) *big.Int {
	x, _ := big.NewFloat(f).Int(nil)
	return x
}

// roundToTens returns the digits of a number rounded to a multiple of a power of ten, half to even.
func roundToTens(x *big.Rat, tens int) string {
	if tens > 400 {
		return "0"
	}
	unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(tens)), nil)
	q, rest := new(big.Int).QuoRem(x.Num(), unit, new(big.Int))
	twice := new(big.Int).Abs(rest)
	twice.Lsh(twice, 1)
	if c := twice.Cmp(unit); c > 0 || c == 0 && q.Bit(0) == 1 {
		q.Add(q, big.NewInt(int64(x.Sign())))
	}
	return q.Mul(q, unit).String()
}

// fileSize is filesizeformat.
func fileSize(r *renderer, v Value, a args) Value {
	var size float64
	switch {
	case v.isNumber():
		size = toFloat(v)
	case v.isString():
		f, err := strconv.ParseFloat(r.numeral(v.str), 64)
		if err != nil && !math.IsInf(f, 0) {
			raise(ValueError, "could not convert string to float: %s", r.repr(v))
		}
		size = f
	default:
		r.defined(v)
		raise(TypeError, "float() argument must be a string or a real number, not '%s'", v.typeName())
	}
	base, units := 1000., strings.Fields("kB MB GB TB PB EB ZB YB")
	if a.or(0, Bool(false)).Truth() {
		base, units = 1024, strings.Fields("KiB MiB GiB TiB PiB EiB ZiB YiB")
	}
	switch {
	case size == 1:
		return String("1 Byte")
	case size < base:
		return String(truncatedText(size) + " Bytes")
	}
	unit := base
	for i, name := range units {
		unit *= base
		if size < unit || i == len(units)-1 {
			return String(strconv.FormatFloat(base*size/unit, 'f', 1, 64) + " " + name)
		}
	}
	return Value{} // not reached
}

// truncatedText is the text of a float as an integer.
func truncatedText(f float64) string { return digitsOf(truncated(f)) }
