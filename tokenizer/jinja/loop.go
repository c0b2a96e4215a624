// SPDX-License-Identifier: Apache-2.0

package jinja

import "unicode/utf8"

// loop is the variable of that name.
type loop struct {
	items   []Value // what is gone over, or
	steps   *span   // a range, or
	text    Value   // the characters of a string
	at      int
	count   int
	from    int // of the character in text
	to      int
	depth   int
	changed []Value
	again   *function // of a recursive loop
}

// current returns the item that the loop is at.
func (l *loop) current() Value { return l.item(0) }

// item returns the item before, at or behind the one that the loop is at.
func (l *loop) item(by int) Value {
	switch {
	case l.steps != nil:
		return l.steps.item(l.at + by)
	case l.text.kind == kindUndefined:
		return l.items[l.at+by]
	}
	s := l.text.str
	switch by {
	case -1:
		_, n := utf8.DecodeLastRuneInString(s[:l.from])
		s = s[l.from-n : l.from]
	case 0:
		s = s[l.from:l.to]
	default:
		_, n := utf8.DecodeRuneInString(s[l.to:])
		s = s[l.to : l.to+n]
	}
	return Value{kind: l.text.kind, str: s}
}

// next goes on to the item at i.
func (l *loop) next(i int) {
	l.at = i
	if l.text.kind != kindUndefined {
		_, n := utf8.DecodeRuneInString(l.text.str[l.to:])
		l.from, l.to = l.to, l.to+n
	}
}

// loopOver returns a loop over the items of v, of which the values of a range and
// the characters of a string need not be made.
func (r *renderer) loopOver(v Value) (*loop, error) {
	l := &loop{}
	switch v.kind {
	case kindRange:
		l.steps = v.ref.(*span)
		l.count = l.steps.count
	case kindString, kindSafe:
		l.text = v
		l.count = utf8.RuneCountInString(v.str)
		return l, r.scanned(len(v.str))
	default:
		items, err := r.iterate(v)
		if err != nil {
			return nil, err
		}
		l.items, l.count = items, len(items)
	}
	return l, nil
}

func (s *forStmt) run(r *renderer) (jump, error) {
	v, err := s.iter.eval(r)
	if err != nil {
		return onward, at(s.line, err)
	}
	return onward, at(s.line, s.over(r, v, 1))
}

// over runs the loop for the items of v, and what stands behind "else" unless an item's
// turn came to its end: that is how Jinja tells that there was none, so a break or continue
// in each looks to it as no item does.
func (s *forStmt) over(r *renderer, v Value, depth int) error {
	l, err := r.loopOver(v)
	if err != nil {
		return err
	}
	outer := r.frame
	defer func() { r.frame = outer }()
	if s.test != nil {
		if err := s.filter(r, l); err != nil {
			return err
		}
	}
	l.depth = depth
	r.hold(2 * boxSize)
	if s.recursive {
		l.again = s.again(outer, depth)
	}
	loopValue := Value{kind: kindLoop, ref: l}
	inner := r.newFrame(s.names, outer)
	through := false // some item's turn ended without a break or continue
	for i := range l.count {
		if err := r.tick(1); err != nil {
			return err
		}
		l.next(i)
		switch {
		case inner.kept: // a macro may want the last one
			inner = r.newFrame(s.names, outer)
		case i > 0:
			inner.clear(s.always)
		}
		r.frame = inner
		inner.slots[s.loop] = loopValue
		if s.target.parts == nil { // an attribute cannot be a loop's
			inner.slots[s.target.slot] = l.current()
		} else if err := r.assign(&s.target, l.current()); err != nil {
			return err
		}
		j, err := r.run(s.body)
		if err != nil {
			return err
		}
		if j == jumpBreak {
			break
		}
		through = through || j == onward
	}
	r.drop(inner)
	if through {
		return nil
	}
	r.frame = outer
	_, err = r.within(s.others, s.otherwise)
	return err
}

// filter leaves the items for which the loop's test is true.
func (s *forStmt) filter(r *renderer, l *loop) error {
	outer := r.frame
	defer func() { r.frame = outer }()
	var kept []Value
	for i := range l.count {
		l.next(i)
		it := l.current()
		inner := r.newFrame(s.names, outer)
		r.frame = inner
		if err := r.assign(&s.target, it); err != nil {
			return err
		}
		ok, err := s.test.eval(r)
		if err != nil {
			return err
		}
		if ok.truth() {
			kept = append(kept, it)
			r.hold(2 * valueSize)
		}
		if err := r.tick(1); err != nil {
			return err
		}
		r.frame = outer
		r.drop(inner)
	}
	*l = loop{items: kept, count: len(kept)}
	return nil
}

// again is what a recursive loop is when it is called.
func (s *forStmt) again(outer *frame, depth int) *function {
	outer.keep()
	return &function{name: "loop", call: func(r *renderer, a *args) (Value, error) {
		v, ok := a.get(0, "iterable")
		if !ok {
			return Value{}, errorf(TypeError, "loop() takes an iterable")
		}
		if r.calls++; r.calls > maxCalls {
			return Value{}, errorf(RecursionError, "maximum recursion depth exceeded")
		}
		defer func() { r.calls-- }()
		start := len(r.out)
		around := r.frame
		r.frame = outer
		err := s.over(r, v, depth+1)
		r.frame = around
		return String(r.cut(start)), r.sound(err)
	}}
}

func (r *renderer) attrOfLoop(l *loop, name string) (Value, bool) {
	switch name {
	case "index":
		return Int(int64(l.at + 1)), true
	case "index0":
		return Int(int64(l.at)), true
	case "revindex":
		return Int(int64(l.count - l.at)), true
	case "revindex0":
		return Int(int64(l.count - l.at - 1)), true
	case "first":
		return Bool(l.at == 0), true
	case "last":
		return Bool(l.at == l.count-1), true
	case "length":
		return Int(int64(l.count)), true
	case "depth":
		return Int(int64(l.depth)), true
	case "depth0":
		return Int(int64(l.depth - 1)), true
	case "previtem":
		if l.at == 0 {
			return undefined("there is no previous item"), true
		}
		return l.item(-1), true
	case "nextitem":
		if l.at == l.count-1 {
			return undefined("there is no next item"), true
		}
		return l.item(1), true
	case "cycle":
		return r.funcOf("cycle", func(_ *renderer, a *args) (Value, error) {
			if len(a.pos) == 0 {
				return Value{}, errorf(TypeError, "no items for cycling given")
			}
			return a.pos[l.at%len(a.pos)], nil
		}), true
	case "changed":
		return r.funcOf("changed", func(r *renderer, a *args) (Value, error) {
			same := l.changed != nil && r.equal(tupleOf(l.changed...), tupleOf(a.pos...))
			l.changed = append([]Value{}, a.pos...)
			return Bool(!same), r.listed(len(a.pos))
		}), true
	}
	return Value{}, false
}

// span is a range.
type span struct {
	start, stop, step int64
	count             int
}

func (s *span) item(i int) Value { return Int(s.start + int64(i)*s.step) }

// generator is what gives its items once, made when they are asked for.
type generator struct {
	name  string
	items func() ([]Value, error)
}

// generated returns a generator of what f makes.
func (r *renderer) generated(name string, f func() ([]Value, error)) Value {
	r.hold(2 * boxSize)
	return Value{kind: kindGenerator, ref: &generator{name, f}}
}

// iterate returns the items that Python gets of a value. They must not be changed.
func (r *renderer) iterate(v Value) ([]Value, error) {
	switch v.kind {
	case kindUndefined:
		return nil, nil
	case kindList, kindTuple, kindView:
		return v.Items(), nil
	case kindDict:
		return v.ref.(*Dict).keys, nil
	case kindGenerator:
		g := v.ref.(*generator)
		f := g.items
		if f == nil {
			return nil, nil
		}
		g.items = nil
		return f()
	case kindString, kindSafe:
		n := utf8.RuneCountInString(v.str)
		if err := r.listed(n); err != nil {
			return nil, err
		}
		items := make([]Value, 0, n)
		for i, c := range v.str {
			items = append(items, Value{kind: v.kind, str: v.str[i : i+utf8.RuneLen(c)]})
		}
		return items, nil
	case kindRange:
		s := v.ref.(*span)
		if err := r.listed(s.count); err != nil {
			return nil, err
		}
		items := make([]Value, s.count)
		for i := range items {
			items[i] = s.item(i)
		}
		return items, nil
	}
	return nil, errorf(TypeError, "'%s' object is not iterable", v.typeName())
}
