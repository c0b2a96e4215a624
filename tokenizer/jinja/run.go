// SPDX-License-Identifier: Apache-2.0

package jinja

import "slices"

// jump says how the statements of a loop's body ended.
type jump uint8

const (
	onward jump = iota
	jumpContinue
	jumpBreak
)

// run runs statements.
func (r *renderer) run(body []*node) jump {
	for _, n := range body {
		r.tick(1)
		if j := r.statement(n); j != onward {
			return j
		}
	}
	return onward
}

func (r *renderer) statement(n *node) jump {
	switch n.op {
	case opData:
		r.out = append(r.out, n.text...)
		r.scanned(len(n.text))
		r.checkOutput()
	case opOutput:
		r.output(n)
	case opIf:
		if r.holds(n.kids[0]) {
			return r.run(n.body)
		}
		return r.run(n.other)
	case opFor:
		return r.loop(n)
	case opSet:
		v := r.eval(n.kids[1])
		r.line = n.line
		r.assign(n.kids[0], v)
	case opWith:
		return r.with(n)
	case opBlock:
		r.line = n.line
		r.block(n, r.above(n.up))
	case opAutoescape:
		if r.eval(n.kids[0]).Truth() {
			r.line = n.line
			raise(Unsupported, "the block 'autoescape'")
		}
		return r.within(n.scope, n.body)
	case opLoad:
		r.load(n)
	case opMacro:
		r.frame.slots[n.slot] = r.newMacro(n.macro)
	case opBreak:
		return jumpBreak
	case opContinue:
		return jumpContinue
	}
	return onward
}

// block runs a block with the variables of the frame around.
func (r *renderer) block(n *node, around *frame) {
	if n.again {
		raise(RuntimeError, "Required block '%s' not found", n.text)
	}
	if r.calls++; r.calls > maxCalls {
		raise(RecursionError, "maximum recursion depth exceeded")
	}
	outer := r.frame
	r.frame = r.newFrame(n.scope, around)
	r.run(n.body)
	r.drop(r.frame)
	r.frame = outer
	r.calls--
}

// blocks is the variable "self": its attributes render the template's blocks with the variables of a scope.
func (r *renderer) blocks(s *scope, around *frame) Value {
	around.keep()
	v := r.newFunc("self", nil)
	v.ref.(*function).attribute = func(r *renderer, name string) (Value, bool) {
		n := r.template.blocks[name]
		if n == nil {
			return Value{}, false
		}
		return r.newFunc(name, func(r *renderer, a args) Value {
			if len(a.values) > 0 {
				raise(TypeError, "a block takes no arguments")
			}
			if s != r.template.scope && s != n.scope.around {
				raise(Unsupported, "the block '%s' with the variables of another one", name)
			}
			start := len(r.out)
			r.block(n, r.unset(n.scope.around, s, around))
			return String(r.cut(start))
		}), true
	}
	return v
}

// unset returns a frame of the scope s in which only the variables of the scope around it are set.
func (r *renderer) unset(s, around *scope, f *frame) *frame {
	if s == around {
		return f
	}
	return r.newFrame(s, r.unset(s.around, around, f))
}

// load is include, import and extends. As in Jinja2, no template is found without a loader.
func (r *renderer) load(n *node) {
	v := r.eval(n.kids[0])
	r.line = n.line
	if n.text == "include" && !v.isString() && v.kind != kindUndefined && !v.Truth() {
		if n.again {
			return
		}
		raise(NotFound, "Tried to select from an empty list of templates.")
	}
	raise(TypeError, "no loader for this environment specified")
}

// output writes an expression. The strings of a sum are written as they come.
func (r *renderer) output(n *node) {
	var v Value
	if n.kids[0].op == opSum {
		start := len(r.out)
		if v = r.sum(n.kids[0], start); v.kind == kindUnset {
			return
		}
	} else {
		v = r.eval(n.kids[0])
	}
	r.line = n.line
	r.write(v)
}

// sum writes a sum of strings and returns an unset value, or returns the sum and
// writes nothing.
func (r *renderer) sum(n *node, start int) Value {
	v := Value{kind: kindUnset}
	for i, k := range n.kids {
		right := r.eval(k)
		r.line = n.line
		switch {
		case v.kind != kindUnset:
			v = r.add(v, right)
		case right.kind == kindString:
			r.write(right)
		case i == 0:
			r.defined(right)
			v = right
		default:
			v = r.add(String(r.cut(start)), right)
		}
	}
	return v
}

// within runs a body in a scope of its own.
func (r *renderer) within(s *scope, body []*node) jump {
	r.frame = r.newFrame(s, r.frame)
	j := r.run(body)
	r.drop(r.frame)
	return j
}

// with runs a body in a scope in which variables are set. Their values are those around it.
func (r *renderer) with(n *node) jump {
	values := make([]Value, len(n.kids)/2)
	r.hold(len(values) * valueSize)
	for i := range values {
		values[i] = r.eval(n.kids[2*i+1])
	}
	r.line = n.line
	r.frame = r.newFrame(n.scope, r.frame)
	for i, v := range values {
		r.assign(n.kids[2*i], v)
	}
	j := r.run(n.body)
	r.drop(r.frame)
	return j
}

// assign sets the variables of a target.
func (r *renderer) assign(target *node, v Value) {
	switch target.op {
	case opTuple:
		items := r.iterate(v)
		switch n := len(target.kids); {
		case len(items) > n:
			raise(ValueError, "too many values to unpack (expected %d)", n)
		case len(items) < n:
			raise(ValueError, "not enough values to unpack (expected %d, got %d)", n, len(items))
		}
		for i, t := range target.kids {
			r.assign(t, items[i])
		}
	case opAttr:
		of := r.eval(target.kids[0])
		if of.kind != kindNamespace {
			raise(RuntimeError, "cannot assign attribute on non-namespace object")
		}
		r.put(of.Dict(), target.text, v)
	default:
		r.frame.slots[target.slot] = v
	}
}

// loop runs a for statement. As in Jinja2, the else block runs unless the body ended at
// least once without break or continue.
func (r *renderer) loop(n *node) jump {
	v := r.eval(n.kids[1])
	r.line = n.line
	return r.loopOver(n, v, 0)
}

// loopOver runs a for statement for the items of v. depth is the number of calls of a recursive loop around.
func (r *renderer) loopOver(n *node, v Value, depth int) jump {
	l := &loop{items: r.iterate(v), depth: depth}
	r.hold(2 * boxSize)
	target, test, outer := n.kids[0], n.kids[2], r.frame
	if n.again {
		outer.keep()
		l.again = func(r *renderer, v Value) Value {
			if r.calls++; r.calls > maxCalls {
				raise(RecursionError, "maximum recursion depth exceeded")
			}
			around, start := r.frame, len(r.out)
			r.frame = outer
			r.loopOver(n, v, depth+1)
			r.frame = around
			r.calls--
			return String(r.cut(start))
		}
	}
	inner := r.newFrame(n.scope, outer)
	next := func(item Value) {
		r.tick(1)
		if inner.kept {
			inner = r.newFrame(n.scope, outer) // a macro may read the one before
		} else {
			inner.reset()
		}
		r.frame = inner
		r.line = n.line
		r.assign(target, item)
	}
	if test != nil {
		items := l.items
		l.items = nil
		for _, item := range items {
			r.hold(4 * valueSize)
			if next(item); r.holds(test) {
				l.items = append(l.items, r.unpacked(target, item))
			}
		}
	}
	ended := false
	for i, item := range l.items {
		next(item)
		l.at = i
		inner.slots[n.slot] = Value{kind: kindLoop, ref: l}
		j := r.run(n.body)
		if j == jumpBreak {
			break
		}
		ended = ended || j == onward
	}
	r.drop(inner)
	if !ended {
		return r.within(n.others, n.other)
	}
	return onward
}

// unpacked returns an item with the parts that a target takes as tuples.
func (r *renderer) unpacked(target *node, item Value) Value {
	if target.op != opTuple {
		return item
	}
	parts := slices.Clone(r.iterate(item))
	r.listed(len(parts))
	for i, t := range target.kids {
		parts[i] = r.unpacked(t, parts[i])
	}
	return tuple(parts...)
}

// newMacro returns a macro as a value that reads the variables around it.
func (r *renderer) newMacro(m *macro) Value {
	around := r.frame
	around.keep()
	v := r.newFunc(m.name, func(r *renderer, a args) Value { return r.callMacro(m, around, a) })
	v.ref.(*function).macro = m
	return v
}

func (r *renderer) callMacro(m *macro, around *frame, a args) Value {
	if r.calls++; r.calls > maxCalls {
		raise(RecursionError, "maximum recursion depth exceeded")
	}
	r.tick(len(a.values) * (1 + len(m.names)/8))
	outer := r.frame
	inner := r.newFrame(m.scope, around)
	r.frame = inner
	r.bindMacro(m, inner, a)
	start := len(r.out)
	r.run(m.body)
	r.drop(inner)
	r.frame = outer
	r.calls--
	return String(r.cut(start))
}

// bindMacro sets the parameters of a macro.
func (r *renderer) bindMacro(m *macro, f *frame, a args) {
	given := a.positional()
	more := given[min(len(given), len(m.params)):]
	if len(more) > 0 && !m.varargs.read {
		raise(TypeError, "macro '%s' takes not more than %d argument(s)", m.name, len(m.params))
	}
	if given = given[:len(given)-len(more)]; m.varargs.read {
		r.listed(len(more))
		f.slots[m.varargs.slot] = tuple(slices.Clone(more)...)
	}
	others := NewDict(0)
	if m.kwargs.read {
		f.slots[m.kwargs.slot] = FromDict(others)
	}
	if m.caller.read {
		f.slots[m.caller.slot] = undefined("No caller defined")
	}
	for i, v := range given {
		f.slots[m.params[i]] = v
	}
	for k, name := range a.names {
		v := a.values[len(a.positional())+k]
		switch i := slices.Index(m.names, name); {
		case i >= 0 && i < len(given):
			raise(TypeError, "macro '%s' got multiple values for argument '%s'", m.name, name)
		case i >= 0:
			f.slots[m.params[i]] = v
		case name == "caller" && m.caller.read:
			f.slots[m.caller.slot] = v
		case m.kwargs.read:
			r.put(others, name, v)
		default:
			raise(TypeError, "macro '%s' takes no keyword argument '%s'", m.name, name)
		}
	}
	for i, slot := range m.params {
		switch {
		case f.slots[slot].kind != kindUnset:
		case m.defaults[i] != nil:
			f.slots[slot] = r.eval(m.defaults[i])
		default:
			f.slots[slot] = undefined("parameter '" + m.names[i] + "' was not provided")
		}
	}
}
