// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"math"
	"math/big"
	"slices"
	"strings"
	"unicode/utf8"
)

func (e *constExpr) eval(*renderer) (Value, error) { return e.value, nil }

func (e *listExpr) eval(r *renderer) (Value, error) {
	if err := r.listed(len(e.items)); err != nil {
		return Value{}, err
	}
	items := make([]Value, len(e.items))
	for i, it := range e.items {
		var err error
		if items[i], err = it.eval(r); err != nil {
			return Value{}, err
		}
	}
	if e.tuple {
		return tupleOf(items...), nil
	}
	return List(items...), nil
}

func (e *dictExpr) eval(r *renderer) (Value, error) {
	if err := r.listed(3 * len(e.keys)); err != nil {
		return Value{}, at(e.line, err)
	}
	d := NewDict(len(e.keys))
	for i := range e.keys {
		k, err := e.keys[i].eval(r)
		if err != nil {
			return Value{}, err
		}
		v, err := e.values[i].eval(r)
		if err != nil {
			return Value{}, err
		}
		if !r.hashable(k) {
			return Value{}, at(e.line, r.sound(errorf(TypeError, "unhashable type: '%s'", k.typeName())))
		}
		d.set(r, k, v)
	}
	return FromDict(d), at(e.line, r.broken)
}

func (r *renderer) hashable(v Value) bool {
	switch v.kind {
	case kindList, kindDict:
		return false
	case kindTuple:
		defer r.leave()
		if !r.enter() {
			return false
		}
		for _, it := range v.Items() {
			if !r.spend(1) || !r.hashable(it) {
				return false
			}
		}
	}
	return true
}

func (e *attrExpr) eval(r *renderer) (Value, error) {
	v, err := e.of.eval(r)
	if err != nil {
		return Value{}, err
	}
	if v.kind == kindDict && e.methods.ofDict == nil && !e.changes {
		if x, ok := v.ref.(*Dict).Get(e.name); ok {
			return x, at(e.line, r.tick(1))
		}
		return noAttribute(v, e.name), at(e.line, r.tick(1))
	}
	r.spend(1)
	v, err = r.attr(v, e.name, &e.methods)
	return v, at(e.line, r.sound(err))
}

// attr is v.name: an attribute, else an item. m are the methods of that name.
func (r *renderer) attr(v Value, name string, m *methods) (Value, error) {
	switch v.kind {
	case kindUndefined:
		return Value{}, errUndefined(v)
	case kindLoop:
		if x, ok := r.attrOfLoop(v.ref.(*loop), name); ok {
			return x, nil
		}
	case kindNamespace:
		x, ok := v.ref.(*Dict).Get(name)
		switch {
		case ok && strings.HasPrefix(name, "_"): // the sandbox guards it
			x = noAttribute(v, name)
			x.num |= isUnsafe
			return x, nil
		case ok:
			return x, nil
		}
	default:
		if f := m.of(v); f != nil {
			return r.bound(v, name, f), nil
		}
		if v.kind == kindDict && !changes(v, name) {
			if x, ok := v.ref.(*Dict).Get(name); ok {
				return x, nil
			}
		}
		if v.kind == kindFunc {
			if x, ok := r.attrOfFunction(v, name); ok {
				return x, nil
			}
		}
		if x, ok := field(v, name); ok {
			return x, nil
		}
	}
	return noAttribute(v, name), nil
}

// Of an undefined value, num says why it is: what its message is made of only when
// somebody asks.
const (
	isUnsafe  = 1 << 0 // Python's own attribute, which the sandbox guards
	isMissing = 1 << 1 // str is an attribute, and num>>kindShift the kind of what lacks it
	kindShift = 8
)

// noAttribute is what comes of a name that v does not have.
func noAttribute(v Value, name string) Value {
	u := Value{num: isMissing | uint64(v.kind)<<kindShift, str: name}
	if strings.HasPrefix(name, "__") || changes(v, name) {
		u.num |= isUnsafe
	}
	return u
}

// hint says what is undefined.
func (v Value) hint() string {
	if v.num&isMissing == 0 {
		return v.str
	}
	of := Value{kind: kind(v.num >> kindShift)}
	name := "None"
	if of.kind != kindNone {
		name = of.typeName() + " object"
	}
	return "'" + name + "' has no attribute '" + v.str + "'"
}

func (e *indexExpr) eval(r *renderer) (Value, error) {
	v, err := e.of.eval(r)
	if err != nil {
		return Value{}, err
	}
	if e.key != "" {
		switch v.kind {
		case kindDict:
			if x, ok := v.ref.(*Dict).Get(e.key); ok {
				return x, nil
			}
		case kindString:
			if e.methods.ofString == nil {
				return noAttribute(v, e.key), nil
			}
		}
	}
	k, err := e.index.eval(r)
	if err != nil {
		return Value{}, err
	}
	v, err = r.item(v, k)
	return v, at(e.line, err)
}

// item is v[k]: an item, else an attribute.
func (r *renderer) item(v, k Value) (Value, error) {
	switch v.kind {
	case kindUndefined:
		return Value{}, errUndefined(v)
	case kindDict:
		if x, ok := v.ref.(*Dict).get(r, k); ok {
			return x, nil
		}
	case kindList, kindTuple:
		if k.isInt() {
			if i, ok := position(k.int(), len(v.Items())); ok {
				return v.Items()[i], nil
			}
		}
	case kindRange:
		if s := v.ref.(*span); k.isInt() {
			if i, ok := position(k.int(), s.count); ok {
				return s.item(i), nil
			}
		}
	case kindString, kindSafe:
		if k.isInt() {
			r.spend(len(v.str) / scanStep)
			if i, ok := position(k.int(), utf8.RuneCountInString(v.str)); ok {
				for at, c := range v.str {
					if i--; i < 0 {
						return Value{kind: v.kind, str: v.str[at : at+utf8.RuneLen(c)]}, nil
					}
				}
			}
		}
	}
	if k.isString() {
		r.spend(len(k.str) / stringStep)
		if v.kind == kindLoop || v.kind == kindNamespace || v.kind == kindFunc {
			return r.attr(v, k.str, &methods{})
		}
		return r.attribute(v, k.str), nil
	}
	return undefined(v.typeName() + " object has no element " + r.repr(k)), nil
}

func position(i int64, n int) (int, bool) {
	if i < 0 {
		i += int64(n)
	}
	return int(i), i >= 0 && i < int64(n)
}

func (e *sliceExpr) eval(r *renderer) (Value, error) {
	v, err := e.of.eval(r)
	if err != nil {
		return Value{}, err
	}
	var bounds [3]Value
	for i, b := range []expr{e.start, e.stop, e.step} {
		bounds[i] = None()
		if b == nil {
			continue
		}
		if bounds[i], err = b.eval(r); err != nil {
			return Value{}, err
		}
		if !bounds[i].isInt() && !bounds[i].IsNone() {
			if bounds[i].kind == kindUndefined || v.kind == kindUndefined {
				return Value{}, at(e.line, errUndefined(v, bounds[i]))
			}
			return e.failed(errorf(TypeError, "slice indices must be integers or None"))
		}
	}
	switch v.kind {
	case kindUndefined, kindString, kindSafe, kindList, kindTuple, kindRange:
		v, err = r.slice(v, bounds)
		return v, at(e.line, err)
	case kindDict:
		return e.failed(errorf(TypeError, "unhashable type: 'slice'"))
	}
	return e.failed(errorf(TypeError, "'%s' object is not subscriptable", v.typeName()))
}

// failed is the error of a slice that cannot be. One of constants is undefined instead:
// Jinja makes it ahead, in another way.
func (e *sliceExpr) failed(err *Error) (Value, error) {
	for _, part := range []expr{e.of, e.start, e.stop, e.step} {
		if _, constant := part.(*constExpr); part != nil && !constant {
			return Value{}, at(e.line, err)
		}
	}
	return undefined(err.Message), nil
}

func (r *renderer) slice(v Value, b [3]Value) (Value, error) {
	var items []Value
	n := int64(0)
	switch v.kind {
	case kindUndefined:
		return Value{}, errUndefined(v)
	case kindString, kindSafe:
		if step := b[2]; step.IsNone() || step.int() == 1 {
			return Value{kind: v.kind, str: sliceString(v.str, b[0], b[1])}, r.scanned(4 * len(v.str))
		}
		var err error
		if items, err = r.iterate(v); err != nil {
			return Value{}, err
		}
	case kindList, kindTuple:
		items = v.Items()
	case kindRange:
		n = int64(v.ref.(*span).count)
	}
	step := int64(1)
	if !b[2].IsNone() {
		step = b[2].int()
	}
	if step == 0 {
		return Value{}, errorf(ValueError, "slice step cannot be zero")
	}
	if v.kind != kindRange {
		n = int64(len(items))
	}
	lo, hi := int64(0), n
	if step < 0 {
		lo, hi = n-1, -1
	}
	bound := func(v Value, def int64) int64 {
		if v.IsNone() {
			return def
		}
		i := v.int()
		if i < 0 {
			i = max(i+n, -1)
			if step > 0 {
				i = max(i, 0)
			}
		}
		if step > 0 {
			return min(i, n)
		}
		return min(i, n-1)
	}
	lo, hi = bound(b[0], lo), bound(b[1], hi)
	if v.kind == kindRange {
		s := v.ref.(*span)
		by := s.step * step
		if by/step != s.step {
			by = step // one item at most
		}
		return r.rangeOf(s.start+lo*s.step, s.start+hi*s.step, by)
	}
	if step == 1 && v.kind == kindList {
		if lo >= hi {
			return List(), nil
		}
		return List(items[lo:hi:hi]...), nil
	}
	// As if it took all: a slice with a step is rare.
	if err := r.listed(len(items)); err != nil {
		return Value{}, err
	}
	var out []Value
	for i := lo; step > 0 && i < hi || step < 0 && i > hi; i += step {
		out = append(out, items[i])
		if step > n || step < -n {
			break
		}
	}
	if v.isString() {
		var s strings.Builder
		for _, it := range out {
			s.WriteString(it.str)
		}
		return Value{kind: v.kind, str: s.String()}, nil
	}
	return Value{kind: v.kind, ref: &list{items: out}}, nil
}

// sliceString is s[lo:hi] in characters.
func sliceString(s string, lo, hi Value) string {
	offset := func(v Value, def int) int {
		if v.IsNone() {
			return def
		}
		i := v.int()
		if i >= 0 {
			for at := range s {
				if i == 0 {
					return at
				}
				i--
			}
			return len(s)
		}
		at := len(s)
		for ; i < 0 && at > 0; i++ {
			_, n := utf8.DecodeLastRuneInString(s[:at])
			at -= n
		}
		return at
	}
	from, to := offset(lo, 0), offset(hi, len(s))
	if from >= to {
		return ""
	}
	return s[from:to]
}

func (e *condExpr) eval(r *renderer) (Value, error) {
	if err := r.tick(1); err != nil {
		return Value{}, err
	}
	is, err := r.truthOf(e.cond)
	switch {
	case err != nil:
		return Value{}, err
	case is:
		return e.yes.eval(r)
	case e.no == nil:
		return undefined("the inline if-expression evaluated to false and no else section was defined."), nil
	}
	return e.no.eval(r)
}

func (e *logicExpr) eval(r *renderer) (Value, error) {
	if err := r.tick(1); err != nil {
		return Value{}, err
	}
	v, err := e.left.eval(r)
	if err != nil || v.truth() == e.or {
		return v, err
	}
	return e.right.eval(r)
}

func (e *notExpr) eval(r *renderer) (Value, error) {
	is, err := r.truthOf(e.of)
	return Bool(!is), err
}

// truthOf evaluates what only counts as true or false.
func (r *renderer) truthOf(e expr) (bool, error) {
	switch e := e.(type) {
	case *notExpr:
		is, err := r.truthOf(e.of)
		return !is, err
	case *logicExpr:
		if err := r.tick(1); err != nil {
			return false, err
		}
		is, err := r.truthOf(e.left)
		if err != nil || is == e.or {
			return is, err
		}
		return r.truthOf(e.right)
	case *compareExpr:
		return e.holds(r)
	case *testExpr:
		return e.holds(r)
	}
	v, err := e.eval(r)
	return v.truth(), err
}

func (e *compareExpr) eval(r *renderer) (Value, error) {
	is, err := e.holds(r)
	return Bool(is), err
}

func (e *compareExpr) holds(r *renderer) (bool, error) {
	left, err := e.first.eval(r)
	if err != nil {
		return false, err
	}
	for i, op := range e.ops {
		right, err := e.rest[i].eval(r)
		if err != nil {
			return false, err
		}
		if op <= isUnequal && len(e.ops) == 1 && left.kind == kindString && right.kind == kindString {
			return (left.str == right.str) == (op == isEqual), at(e.line, r.tick(1+min(len(left.str), len(right.str))/scanStep))
		}
		ok, err := r.compared(op, left, right)
		r.spend(1)
		if err = r.sound(err); err != nil {
			return false, at(e.line, err)
		}
		if !ok {
			return false, nil
		}
		left = right
	}
	return true, nil
}

// comparison is an operator that compares.
type comparison uint8

const (
	noComparison comparison = iota
	isEqual
	isUnequal
	isLess
	isAtMost
	isMore
	isAtLeast
	isIn
	notIn
)

func comparisonOf(op string) comparison {
	switch op {
	case "==":
		return isEqual
	case "!=":
		return isUnequal
	case "<":
		return isLess
	case "<=":
		return isAtMost
	case ">":
		return isMore
	case ">=":
		return isAtLeast
	}
	return noComparison
}

func (r *renderer) compared(op comparison, a, b Value) (bool, error) {
	switch op {
	case isEqual:
		return r.equal(a, b), nil
	case isUnequal:
		return !r.equal(a, b), nil
	case isIn, notIn:
		is, err := r.contains(b, a)
		return is == (op == isIn), err
	}
	if a.kind == kindFloat && math.IsNaN(a.float()) || b.kind == kindFloat && math.IsNaN(b.float()) {
		return false, nil
	}
	c, err := r.compare(a, b)
	switch op {
	case isLess:
		return c < 0, err
	case isAtMost:
		return c <= 0, err
	case isMore:
		return c > 0, err
	}
	return c >= 0, err
}

// contains is Python's "v in of".
func (r *renderer) contains(of, v Value) (bool, error) {
	switch of.kind {
	case kindUndefined:
		return false, nil
	case kindString, kindSafe:
		if !v.isString() {
			if v.kind == kindUndefined {
				return false, errUndefined(v)
			}
			return false, errorf(TypeError, "'in <string>' requires string as left operand, not %s", v.typeName())
		}
		return strings.Contains(of.str, v.str), r.scanned(len(of.str))
	case kindList, kindTuple, kindView:
		for i, it := range of.Items() {
			if r.equal(it, v) {
				return true, r.tick(i / 4)
			}
			if r.broken != nil {
				return false, r.broken
			}
		}
		return false, r.tick(len(of.Items()) / 4)
	case kindRange:
		s := of.ref.(*span)
		if !v.isInt() || s.count == 0 {
			items, err := r.iterate(of)
			return err == nil && slices.ContainsFunc(items, func(it Value) bool { return r.equal(it, v) }), err
		}
		n := v.int() - s.start
		return n%s.step == 0 && n/s.step >= 0 && n/s.step < int64(s.count), nil
	case kindGenerator:
		items, err := r.iterate(of)
		return err == nil && slices.ContainsFunc(items, func(it Value) bool { return r.equal(it, v) }), err
	case kindDict:
		if !r.hashable(v) {
			return false, errorf(TypeError, "unhashable type: '%s'", v.typeName())
		}
		return of.ref.(*Dict).find(r, v) >= 0, nil
	}
	return false, errorf(TypeError, "argument of type '%s' is not iterable", of.typeName())
}

func (e *concatExpr) eval(r *renderer) (Value, error) {
	var b []byte
	for _, it := range e.items {
		v, err := it.eval(r)
		if err != nil {
			return Value{}, err
		}
		if b = r.appendStr(b, v); len(b) > r.o.MaxOutput {
			break
		}
		r.spend(1)
	}
	return String(string(b)), r.made(len(b))
}

func (e *unaryExpr) eval(r *renderer) (Value, error) {
	if err := r.tick(1); err != nil {
		return Value{}, err
	}
	v, err := e.of.eval(r)
	if err != nil {
		return Value{}, err
	}
	switch {
	case v.kind == kindUndefined:
		return Value{}, at(e.line, errUndefined(v))
	case !v.isNumber():
		return Value{}, at(e.line, errorf(TypeError, "bad operand type for unary -: '%s'", v.typeName()))
	case v.kind == kindFloat && e.minus:
		return Float(-v.float()), nil
	case e.minus:
		return bigInt(new(big.Int).Neg(v.toBig())), nil
	case v.kind == kindBool:
		return Int(v.int()), nil
	}
	return v, nil
}

func (e *binaryExpr) eval(r *renderer) (Value, error) {
	if err := r.tick(1); err != nil {
		return Value{}, err
	}
	a, err := e.left.eval(r)
	if err != nil {
		return Value{}, err
	}
	b, err := e.right.eval(r)
	if err != nil {
		return Value{}, err
	}
	var v Value
	if e.op == "+" {
		v, err = r.add(a, b)
	} else {
		v, err = r.arithmetic(e.op, a, b)
	}
	return v, at(e.line, err)
}
