// SPDX-License-Identifier: Apache-2.0

package jinja

import "slices"

// eval returns the value of an expression.
func (r *renderer) eval(n *node) Value {
	switch n.op {
	case opConst:
		return n.value
	case opName:
		return r.variable(n)
	case opList, opTuple:
		return r.makeList(n)
	case opDict:
		return r.makeDict(n)
	case opAttr, opItem:
		v := r.eval(n.kids[0])
		r.tick(1)
		// The common case: a key of a dictionary that is not named like a method.
		if d, ok := v.ref.(*Dict); ok && v.kind == kindDict && n.methods != nil && (n.op == opItem || n.methods.ofDict == nil) {
			if i := d.find(n.text); i >= 0 {
				return d.values[i]
			}
			if n.methods.ofDict == nil {
				return missing(n.text)
			}
		}
		return r.evalAccess(n, v)
	case opSlice:
		return r.evalSlice(n)
	case opCall:
		return r.evalCall(n)
	case opFilter, opTest:
		return r.evalBuiltin(n)
	case opCompare, opNot:
		return Bool(r.holds(n))
	case opAnd, opOr:
		r.tick(1)
		if v := r.eval(n.kids[0]); v.Truth() == (n.op == opOr) {
			return v
		}
		return r.eval(n.kids[1])
	}
	return r.evalOperator(n)
}

// evalOperator is eval for the less frequent operators: its frame is large.
func (r *renderer) evalOperator(n *node) Value {
	switch n.op {
	case opIfElse:
		r.tick(1)
		switch {
		case r.holds(n.kids[0]):
			return r.eval(n.kids[1])
		case n.kids[2] != nil:
			return r.eval(n.kids[2])
		}
		return undefined("the inline if-expression evaluated to false and no else section was defined.")
	case opBody:
		start := len(r.out)
		r.within(n.scope, n.body)
		r.line = n.line
		return String(r.cut(start))
	case opCaller:
		return r.newMacro(n.macro)
	case opSelf:
		return r.blocks(n.scope, r.above(n.up))
	case opUnsupported:
		r.line = n.line
		return raise(Unsupported, "%s", n.text)
	case opSum:
		start := len(r.out)
		if v := r.sum(n, start); v.kind != kindUnset {
			return v
		}
		return String(r.cut(start))
	case opArith:
		a, b := r.eval(n.kids[0]), r.eval(n.kids[1])
		r.line = n.line
		r.tick(1)
		return r.arithmetic(n.text, a, b)
	case opConcat:
		start := len(r.out)
		for _, k := range n.kids {
			v := r.eval(k)
			r.line = n.line
			r.write(v)
		}
		return String(r.cut(start))
	}
	v := r.eval(n.kids[0]) // opSign
	r.line = n.line
	return r.sign(n.text, v)
}

func (r *renderer) makeList(n *node) Value {
	r.listed(len(n.kids))
	items := make([]Value, len(n.kids))
	for i, k := range n.kids {
		items[i] = r.eval(k)
	}
	if n.op == opTuple {
		return tuple(items...)
	}
	return List(items...)
}

func (r *renderer) makeDict(n *node) Value {
	r.listed(3 * len(n.kids) / 2)
	d := NewDict(len(n.kids) / 2)
	for i := 0; i < len(n.kids); i += 2 {
		k, v := r.eval(n.kids[i]), r.eval(n.kids[i+1])
		r.line = n.line
		r.setKey(d, k, v)
	}
	return FromDict(d)
}

// evalAccess is v.name or v[index].
func (r *renderer) evalAccess(n *node, v Value) Value {
	if n.op == opItem {
		index := r.eval(n.kids[1])
		r.line = n.line
		return r.item(v, index)
	}
	r.line = n.line
	return r.attr(v, n.text, n.methods)
}

func (r *renderer) evalSlice(n *node) Value {
	parts := [4]Value{}
	for i, k := range n.kids {
		if parts[i] = None(); k != nil {
			parts[i] = r.eval(k)
		}
	}
	r.line = n.line
	return r.slice(parts[0], parts[1], parts[2], parts[3])
}

// holds reports whether an expression is true. Conditions do not make values of their parts.
func (r *renderer) holds(n *node) bool {
	switch n.op {
	case opNot:
		return !r.holds(n.kids[0])
	case opAnd, opOr:
		r.tick(1)
		if r.holds(n.kids[0]) == (n.op == opOr) {
			return n.op == opOr
		}
		return r.holds(n.kids[1])
	case opCompare:
		return r.compared(n)
	}
	return r.eval(n).Truth()
}

// compared is the result of a chain of comparisons.
func (r *renderer) compared(n *node) bool {
	left := r.eval(n.kids[0])
	for i, op := range n.names {
		right := r.eval(n.kids[i+1])
		r.line = n.line
		r.tick(1)
		if left.kind == kindString && right.kind == kindString && op == "==" && len(n.names) == 1 {
			r.tick(min(len(left.str), len(right.str)) / scanStep)
			return left.str == right.str
		}
		if !r.compareBy(op, left, right) {
			return false
		}
		left = right
	}
	return true
}

// evalCall is a call. A method is called without being made a value first.
func (r *renderer) evalCall(n *node) Value {
	of := n.kids[0]
	start := len(r.stack)
	var f Value
	var method *builtin
	if of.op == opAttr {
		f = r.eval(of.kids[0])
		if method = of.methods.of(f); method == nil {
			r.line = of.line
			f = r.attr(f, of.text, of.methods)
		}
	} else {
		f = r.eval(of)
	}
	a := r.arguments(n)
	r.line = n.line
	if method != nil {
		f = r.invoke(method, f, a)
	} else {
		f = r.call(f, a)
	}
	r.stack = r.stack[:start]
	return f
}

// evalBuiltin is a filter or a test.
func (r *renderer) evalBuiltin(n *node) Value {
	v := r.eval(n.kids[0])
	if len(n.args)+len(n.builtin.parameters) == 0 && n.spread == [2]*node{} {
		r.line = n.line
		r.tick(1)
		return n.builtin.f(r, v, args{})
	}
	start := len(r.stack)
	a := r.arguments(n)
	r.line = n.line
	v = r.invoke(n.builtin, v, a)
	r.stack = r.stack[:start]
	return v
}

// arguments puts the arguments of a call onto the stack.
func (r *renderer) arguments(n *node) args {
	r.tick(1)
	start := len(r.stack)
	for _, k := range n.args {
		v := r.eval(k)
		r.stack = append(r.stack, v)
	}
	if n.spread != [2]*node{} {
		return r.spreadArguments(n, r.stack[start:])
	}
	return args{r.stack[start:], n.names}
}

// spreadArguments adds the arguments behind * and ** to those of a call.
func (r *renderer) spreadArguments(n *node, given []Value) args {
	positional := slices.Clone(given[:len(given)-len(n.names)])
	named, names := slices.Clone(given[len(given)-len(n.names):]), slices.Clone(n.names)
	if n.spread[0] != nil {
		items := r.iterate(r.eval(n.spread[0]))
		r.listed(len(items))
		positional = append(positional, items...)
	}
	if n.spread[1] != nil {
		v := r.eval(n.spread[1])
		r.defined(v)
		if v.kind != kindDict {
			raise(TypeError, "argument after ** must be a mapping, not %s", v.typeName())
		}
		d := v.Dict()
		r.listed(2 * d.Len())
		for i, k := range d.keys {
			switch {
			case !k.isString():
				raise(TypeError, "keywords must be strings")
			case slices.Contains(names, k.str):
				raise(TypeError, "got multiple values for keyword argument '%s'", k.str)
			}
			names, named = append(names, k.str), append(named, d.values[i])
		}
	}
	return args{append(positional, named...), names}
}
