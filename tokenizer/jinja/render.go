// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"errors"
	"math"
	"math/big"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Options bound a rendering. Zero values take the defaults.
type Options struct {
	// Now is what strftime_now tells, in its own time zone. The zero time is
	// told as it is.
	Now time.Time
	// MaxOutput is the largest text in bytes. Default 64 MiB.
	MaxOutput int
	// MaxSteps is how many statements, iterations and operations may be run.
	// Making and looking through values counts by
	// their size. Default 10 million, about a second.
	MaxSteps int
}

const (
	defaultOutput = 64 << 20
	defaultSteps  = 10_000_000
	maxCalls      = 200

	// What one step pays for: bytes that are made, bytes that are looked at. An
	// item of a list, of some 50 bytes, takes itemSteps.
	stringStep = 16
	scanStep   = 64
	itemSteps  = 2
)

// renderer is one rendering.
type renderer struct {
	t       *Template
	vars    *Dict
	o       Options
	out     []byte
	base    int // of out, where this rendering begins
	scope   *scope
	steps   int
	calls   int
	block   Value // what a filter without an operand is applied to
	filters map[string]filter
	tests   map[string]test
	free    []*args // to be used again
	deep    int     // of the values that are walked through
	longest int     // that the text which is being written may get, with what is before it
	broken  error   // what stopped a walk; every step fails with it
	kept    int     // scopes that a macro has kept
}

// scope holds the variables of one block. Names that it lacks are its parent's.
type scope struct {
	parent *scope
	ids    []int
	values []Value
}

func (s *scope) set(id int, v Value) {
	for i, have := range s.ids {
		if have == id {
			s.values[i] = v
			return
		}
	}
	s.ids, s.values = append(s.ids, id), append(s.values, v)
}

// get returns also how many variables it looked at.
func (s *scope) get(id int) (v Value, ok bool, looked int) {
	for ; s != nil; s = s.parent {
		for i, have := range s.ids {
			if have == id {
				return s.values[i], true, looked + i
			}
		}
		looked += len(s.ids)
	}
	return Value{}, false, looked
}

// Render appends the text of the template with the given variables to dst. The
// variables are only read. An error is of type [*Error]; dst is then returned as
// far as it got, which nobody should use.
func (t *Template) Render(dst []byte, vars *Dict, o Options) ([]byte, error) {
	if o.MaxOutput <= 0 {
		o.MaxOutput = defaultOutput
	}
	if o.MaxSteps <= 0 {
		o.MaxSteps = defaultSteps
	}
	if vars == nil {
		vars = &Dict{}
	}
	r := &renderer{t: t, vars: vars, o: o, out: dst, base: len(dst), scope: &scope{}, filters: filterTable(), tests: testTable()}
	_, err := r.run(t.body)
	if err = r.sound(err); err != nil {
		if e, ok := errors.AsType[*Error](err); ok && e.Name == "" {
			e.Name = t.name
		}
	}
	return r.out, err
}

// at gives an error its line, unless it has one.
func at(line int, err error) error {
	if e, ok := errors.AsType[*Error](err); ok && e.Line == 0 {
		e.Line = line
	}
	return err
}

// tick counts n steps. It fails once anything has stopped the rendering.
func (r *renderer) tick(n int) error {
	if r.broken != nil {
		return r.broken
	}
	if n < 0 || n > r.o.MaxSteps-r.steps {
		r.broken = errorf(LimitError, "more than %d steps", r.o.MaxSteps)
	} else if r.steps += n; len(r.out)-r.base > r.o.MaxOutput {
		r.broken = errorf(LimitError, "more than %d bytes of output", r.o.MaxOutput)
	}
	return r.broken
}

// spend is tick for what returns no errors: it reports whether to go on. Whoever
// called that asks sound or a later tick for the error.
func (r *renderer) spend(n int) bool { return n == 0 && r.broken == nil || r.tick(n) == nil }

// sound returns what stopped the rendering, else err, which may only follow from it.
func (r *renderer) sound(err error) error {
	if r.broken != nil {
		return r.broken
	}
	return err
}

// enter goes one level down in a value, which may hold itself; leave undoes it,
// also when enter failed.
func (r *renderer) enter() bool {
	if r.deep++; r.deep > maxNesting && r.broken == nil {
		r.broken = errorf(RecursionError, "maximum recursion depth exceeded")
	}
	return r.spend(1)
}

func (r *renderer) leave() { r.deep-- }

// fits counts one step of writing a value and reports whether to go on.
func (r *renderer) fits(n int) bool {
	if n > r.longest && r.broken == nil {
		r.broken = errorf(LimitError, "a value of more than %d bytes", r.o.MaxOutput)
	}
	return r.spend(1)
}

// made counts the making of a string of n bytes.
func (r *renderer) made(n int) error {
	if n > r.o.MaxOutput {
		return errorf(LimitError, "a value of more than %d bytes", r.o.MaxOutput)
	}
	return r.tick(1 + n/stringStep)
}

// listed counts the making of a list of n items. It comes before the list.
func (r *renderer) listed(n int) error {
	if n > r.o.MaxOutput/8 {
		return errorf(LimitError, "a value of more than %d bytes", r.o.MaxOutput)
	}
	return r.tick(1 + n*itemSteps)
}

// scanned counts looking through n bytes.
func (r *renderer) scanned(n int) error { return r.tick(n / scanStep) }

func (r *renderer) run(body []stmt) (jump, error) {
	for _, s := range body {
		if err := r.tick(1); err != nil {
			return onward, err
		}
		if j, err := s.run(r); err != nil || j != onward {
			return j, err
		}
	}
	return onward, nil
}

// within runs a body in a scope of its own.
func (r *renderer) within(body []stmt) (jump, error) {
	outer := r.scope
	r.scope = &scope{parent: outer}
	j, err := r.run(body)
	r.scope = outer
	return j, err
}

// cut takes what was written from start on back.
func (r *renderer) cut(start int) string {
	r.spend((len(r.out) - start) / stringStep)
	text := string(r.out[start:])
	r.out = r.out[:start]
	return text
}

// write appends what Python's str gives to the output.
func (r *renderer) write(v Value) error {
	r.out = r.appendStr(r.out, v)
	return r.broken
}

// captured returns the text of a body that runs in a scope of its own.
func (r *renderer) captured(body []stmt) (string, error) {
	start := len(r.out)
	_, err := r.within(body)
	return r.cut(start), r.sound(err)
}

func (s *dataStmt) run(r *renderer) (jump, error) {
	r.out = append(r.out, s.text...)
	return onward, r.scanned(len(s.text))
}

func (s *outputStmt) run(r *renderer) (jump, error) {
	if len(s.parts) == 1 {
		v, err := s.parts[0].eval(r)
		if err != nil {
			return onward, at(s.line, err)
		}
		return onward, at(s.line, r.write(v))
	}
	if err := r.tick(len(s.parts)); err != nil {
		return onward, at(s.line, err)
	}
	var few [12]Value
	values := few[:0]
	plain := true
	for _, p := range s.parts {
		v, err := p.eval(r)
		if err != nil {
			return onward, at(s.line, err)
		}
		plain = plain && v.kind == kindString
		values = append(values, v)
	}
	if plain {
		for _, v := range values {
			if err := r.write(v); err != nil {
				return onward, at(s.line, err)
			}
		}
		return onward, nil
	}
	sum := values[0]
	for _, v := range values[1:] {
		var err error
		if sum, err = r.add(sum, v); err != nil {
			return onward, at(s.line, err)
		}
	}
	return onward, at(s.line, r.write(sum))
}

func (s *groupStmt) run(r *renderer) (jump, error) { return r.run(s.body) }

func (s *ifStmt) run(r *renderer) (jump, error) {
	for i := range s.branches {
		v, err := s.branches[i].cond.eval(r)
		if err != nil {
			return onward, err
		}
		if v.truth() {
			return r.run(s.branches[i].body)
		}
		if err := r.tick(1); err != nil {
			return onward, err
		}
	}
	return r.run(s.otherwise)
}

func (s *jumpStmt) run(*renderer) (jump, error) {
	if s.isBreak {
		return jumpBreak, nil
	}
	return jumpContinue, nil
}

func (s *setStmt) run(r *renderer) (jump, error) {
	v, err := s.value.eval(r)
	if err == nil {
		err = r.assign(s.target, v)
	}
	return onward, at(s.line, err)
}

func (s *setBlockStmt) run(r *renderer) (jump, error) {
	text, err := r.captured(s.body)
	if err != nil {
		return onward, at(s.line, err)
	}
	v := String(text)
	if s.filter != nil {
		if v, err = r.filtered(s.filter, v); err != nil {
			return onward, at(s.line, err)
		}
	}
	return onward, at(s.line, r.assign(s.target, v))
}

// filtered applies a chain of filters to the text of a block.
func (r *renderer) filtered(chain expr, v Value) (Value, error) {
	outer := r.block
	r.block = v
	v, err := chain.eval(r)
	r.block = outer
	return v, err
}

func (r *renderer) assign(t target, v Value) error {
	switch {
	case t.parts != nil:
		items, err := r.iterate(v)
		if err != nil {
			return err
		}
		if len(items) != len(t.parts) {
			return errorf(ValueError, "%d values to unpack, expected %d", len(items), len(t.parts))
		}
		for i, part := range t.parts {
			if err := r.assign(part, items[i]); err != nil {
				return err
			}
		}
	case t.attr != "":
		ns, ok := r.lookup(t.id)
		if !ok || ns.kind != kindNamespace {
			return errorf(RuntimeError, "cannot assign attribute on non-namespace object")
		}
		ns.ref.(*Dict).Set(t.attr, v)
	default:
		r.scope.set(t.id, v)
		return r.scanned(8 * len(r.scope.ids))
	}
	return nil
}

func (s *filterStmt) run(r *renderer) (jump, error) {
	text, err := r.captured(s.body)
	if err != nil {
		return onward, at(s.line, err)
	}
	v, err := r.filtered(s.filter, String(text))
	if err != nil {
		return onward, at(s.line, err)
	}
	return onward, at(s.line, r.write(v))
}

func (s *withStmt) run(r *renderer) (jump, error) {
	inner := &scope{parent: r.scope}
	for i, e := range s.values {
		v, err := e.eval(r)
		if err != nil {
			return onward, err
		}
		outer := r.scope
		r.scope = inner
		err = r.assign(s.targets[i], v)
		r.scope = outer
		if err != nil {
			return onward, err
		}
	}
	outer := r.scope
	r.scope = inner
	j, err := r.run(s.body)
	r.scope = outer
	return j, err
}

func (s *macroStmt) run(r *renderer) (jump, error) {
	r.scope.set(s.id, r.closure(s.macro))
	return onward, nil
}

// closure returns a macro as a value that sees the variables around it.
func (r *renderer) closure(m *macro) Value {
	around := r.scope
	r.kept++
	return funcOf(m.name, func(r *renderer, a *args) (Value, error) { return r.callMacro(m, around, a) })
}

func (r *renderer) callMacro(m *macro, around *scope, a *args) (Value, error) {
	if r.calls++; r.calls > maxCalls {
		return Value{}, errorf(RecursionError, "maximum recursion depth exceeded")
	}
	defer func() { r.calls-- }()
	if err := r.tick(len(a.pos) + (1+len(a.kw))*(1+len(m.names))/8); err != nil {
		return Value{}, err
	}
	inner := &scope{parent: around}
	outer := r.scope
	defer func() { r.scope = outer }()
	r.scope = inner
	if len(a.pos) > len(m.params) {
		inner.set(m.varargs, tupleOf(slices.Clone(a.pos[len(m.params):])...))
	} else {
		inner.set(m.varargs, tupleOf())
	}
	kwargs := &Dict{}
	for i, name := range a.kwNames {
		known := name == "caller"
		for _, param := range m.names {
			known = known || param == name
		}
		if !known {
			kwargs.Set(name, a.kw[i])
		}
	}
	inner.set(m.kwargs, FromDict(kwargs))
	if c, ok := a.named("caller"); ok {
		inner.set(m.caller, c)
	} else {
		inner.set(m.caller, undefined("No caller defined"))
	}
	for i, id := range m.params {
		v, ok := a.get(i, m.names[i])
		if !ok {
			if m.defaults[i] != nil {
				var err error
				if v, err = m.defaults[i].eval(r); err != nil {
					return Value{}, err
				}
			} else {
				v = undefined("parameter '" + m.names[i] + "' was not provided")
			}
		}
		inner.set(id, v)
	}
	start := len(r.out)
	_, err := r.run(m.body)
	return String(r.cut(start)), r.sound(err)
}

func (s *callStmt) run(r *renderer) (jump, error) {
	f, err := s.call.of.eval(r)
	if err != nil {
		return onward, at(s.line, err)
	}
	a := r.argsFor()
	defer r.done(a)
	if err := r.evalArgs(s.call.args, a); err != nil {
		return onward, at(s.line, err)
	}
	a.kwNames, a.kw = append(a.kwNames, "caller"), append(a.kw, r.closure(s.caller))
	v, err := r.call(f, a)
	if err != nil {
		return onward, at(s.line, err)
	}
	return onward, at(s.line, r.write(v))
}

// loop is the variable of that name.
type loop struct {
	items   []Value
	at      int
	depth   int
	changed []Value
	again   *function // of a recursive loop
}

func (s *forStmt) run(r *renderer) (jump, error) {
	v, err := s.iter.eval(r)
	if err != nil {
		return onward, at(s.line, err)
	}
	return onward, at(s.line, s.over(r, v, 1))
}

// over runs the loop for the items of v.
func (s *forStmt) over(r *renderer, v Value, depth int) error {
	items, err := r.iterate(v)
	if err != nil {
		return err
	}
	outer := r.scope
	defer func() { r.scope = outer }()
	if s.test != nil {
		var kept []Value
		for _, it := range items {
			r.scope = &scope{parent: outer}
			if err := r.assign(s.target, it); err != nil {
				return err
			}
			ok, err := s.test.eval(r)
			if err != nil {
				return err
			}
			if ok.truth() {
				kept = append(kept, it)
			}
			if err := r.tick(1); err != nil {
				return err
			}
		}
		items = kept
	}
	if len(items) == 0 {
		r.scope = &scope{parent: outer}
		_, err := r.run(s.otherwise)
		return err
	}
	l := &loop{items: items, depth: depth}
	if s.recursive {
		l.again = &function{name: "loop", call: func(r *renderer, a *args) (Value, error) {
			v, ok := a.get(0, "iterable")
			if !ok {
				return Value{}, errorf(TypeError, "loop() takes an iterable")
			}
			if r.calls++; r.calls > maxCalls {
				return Value{}, errorf(RecursionError, "maximum recursion depth exceeded")
			}
			defer func() { r.calls-- }()
			start := len(r.out)
			around := r.scope
			r.scope = outer
			err := s.over(r, v, depth+1)
			r.scope = around
			return String(r.cut(start)), r.sound(err)
		}}
	}
	loopValue := Value{kind: kindLoop, ref: l}
	inner, kept := &scope{parent: outer}, r.kept
	for i, it := range items {
		if err := r.tick(1); err != nil {
			return err
		}
		l.at = i
		if r.kept != kept { // a macro may want the last one
			inner, kept = &scope{parent: outer}, r.kept
		}
		inner.ids, inner.values = inner.ids[:0], inner.values[:0]
		r.scope = inner
		r.scope.set(s.loopID, loopValue)
		if err := r.assign(s.target, it); err != nil {
			return err
		}
		j, err := r.run(s.body)
		if err != nil {
			return err
		}
		if j == jumpBreak {
			break
		}
	}
	return nil
}

func (r *renderer) attrOfLoop(l *loop, name string) (Value, bool) {
	n := len(l.items)
	switch name {
	case "index":
		return Int(int64(l.at + 1)), true
	case "index0":
		return Int(int64(l.at)), true
	case "revindex":
		return Int(int64(n - l.at)), true
	case "revindex0":
		return Int(int64(n - l.at - 1)), true
	case "first":
		return Bool(l.at == 0), true
	case "last":
		return Bool(l.at == n-1), true
	case "length":
		return Int(int64(n)), true
	case "depth":
		return Int(int64(l.depth)), true
	case "depth0":
		return Int(int64(l.depth - 1)), true
	case "previtem":
		if l.at == 0 {
			return undefined("there is no previous item"), true
		}
		return l.items[l.at-1], true
	case "nextitem":
		if l.at == n-1 {
			return undefined("there is no next item"), true
		}
		return l.items[l.at+1], true
	case "cycle":
		return funcOf("cycle", func(_ *renderer, a *args) (Value, error) {
			if len(a.pos) == 0 {
				return Value{}, errorf(TypeError, "no items for cycling given")
			}
			return a.pos[l.at%len(a.pos)], nil
		}), true
	case "changed":
		return funcOf("changed", func(r *renderer, a *args) (Value, error) {
			same := l.changed != nil && r.equal(tupleOf(l.changed...), tupleOf(a.pos...))
			l.changed = append([]Value{}, a.pos...)
			return Bool(!same), nil
		}), true
	}
	return Value{}, false
}

// iterate returns the items that Python gets of a value.
func (r *renderer) iterate(v Value) ([]Value, error) {
	switch v.kind {
	case kindUndefined:
		return nil, nil
	case kindList, kindTuple:
		return v.Items(), nil
	case kindDict:
		return v.ref.(*Dict).keys, nil
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
	}
	return nil, errorf(TypeError, "'%s' object is not iterable", v.typeName())
}

func (e *constExpr) eval(*renderer) (Value, error) { return e.value, nil }

func (e *nameExpr) eval(r *renderer) (Value, error) {
	if v, ok := r.lookup(e.id); ok {
		return v, nil
	}
	return undefined("'" + e.name + "' is undefined"), nil
}

func (r *renderer) lookup(id int) (Value, bool) {
	v, ok, looked := r.scope.get(id)
	r.spend(looked / scanStep)
	if ok {
		return v, true
	}
	if v, ok := r.vars.Get(r.t.names[id]); ok {
		return v, true
	}
	v, ok = globalTable()[r.t.names[id]]
	return v, ok
}

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
	r.spend(1)
	v, err = r.attr(v, e.name)
	return v, at(e.line, r.sound(err))
}

// attr is v.name: an attribute, else an item.
func (r *renderer) attr(v Value, name string) (Value, error) {
	switch v.kind {
	case kindUndefined:
		return Value{}, errUndefined(v)
	case kindLoop:
		if x, ok := r.attrOfLoop(v.ref.(*loop), name); ok {
			return x, nil
		}
	case kindNamespace:
		if x, ok := v.ref.(*Dict).Get(name); ok {
			return x, nil
		}
	default:
		if m, ok := method(v, name); ok {
			return m, nil
		}
		if v.kind == kindDict {
			if x, ok := v.ref.(*Dict).Get(name); ok {
				return x, nil
			}
		}
		if v.kind == kindFunc {
			if x, ok := attrOfFunction(v, name); ok {
				return x, nil
			}
		}
	}
	return noAttribute(v, name), nil
}

// noAttribute is what comes of a name that v does not have.
func noAttribute(v Value, name string) Value {
	of := v.typeName() + " object"
	if v.kind == kindNone {
		of = "None"
	}
	v = undefined("'" + of + "' has no attribute '" + name + "'")
	if strings.HasPrefix(name, "__") { // Python's own, which the sandbox guards
		v.num = 1
	}
	return v
}

func (e *indexExpr) eval(r *renderer) (Value, error) {
	v, err := e.of.eval(r)
	if err != nil {
		return Value{}, err
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
			return r.attr(v, k.str)
		}
		if m, ok := method(v, k.str); ok {
			return m, nil
		}
		return noAttribute(v, k.str), nil
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
			return undefined("slice indices must be integers or None"), nil
		}
	}
	v, err = r.slice(v, bounds)
	return v, at(e.line, err)
}

func (r *renderer) slice(v Value, b [3]Value) (Value, error) {
	var items []Value
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
	default:
		return undefined(v.typeName() + " object cannot be sliced"), nil
	}
	step := int64(1)
	if !b[2].IsNone() {
		step = b[2].int()
	}
	if step == 0 {
		return Value{}, errorf(ValueError, "slice step cannot be zero")
	}
	n := int64(len(items))
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
	return Value{kind: v.kind, ref: &list{out}}, nil
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
	c, err := e.cond.eval(r)
	switch {
	case err != nil:
		return Value{}, err
	case c.truth():
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
	v, err := e.of.eval(r)
	return Bool(!v.truth()), err
}

func (e *compareExpr) eval(r *renderer) (Value, error) {
	left, err := e.first.eval(r)
	if err != nil {
		return Value{}, err
	}
	for i, op := range e.ops {
		right, err := e.rest[i].eval(r)
		if err != nil {
			return Value{}, err
		}
		ok, err := r.compared(op, left, right)
		r.spend(1)
		err = r.sound(err)
		if err != nil {
			return Value{}, at(e.line, err)
		}
		if !ok {
			return Bool(false), nil
		}
		left = right
	}
	return Bool(true), nil
}

func (r *renderer) compared(op string, a, b Value) (bool, error) {
	switch op {
	case "==":
		return r.equal(a, b), nil
	case "!=":
		return !r.equal(a, b), nil
	case "in", "not in":
		is, err := r.contains(b, a)
		return is == (op == "in"), err
	}
	if a.kind == kindFloat && math.IsNaN(a.float()) || b.kind == kindFloat && math.IsNaN(b.float()) {
		return false, nil
	}
	c, err := r.compare(a, b)
	switch op {
	case "<":
		return c < 0, err
	case "<=":
		return c <= 0, err
	case ">":
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
	case kindList, kindTuple:
		for i, it := range of.Items() {
			if r.equal(it, v) {
				return true, r.tick(i / 4)
			}
			if r.broken != nil {
				return false, r.broken
			}
		}
		return false, r.tick(len(of.Items()) / 4)
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
			x = escaped(x)
		}
		if b.kind == kindString {
			y = escaped(y)
		}
		return Value{kind: kindSafe, str: x + y}, r.made(len(x) + len(y))
	case a.isSequence() && a.kind == b.kind:
		x, y := a.Items(), b.Items()
		if err := r.listed(len(x) + len(y)); err != nil {
			return Value{}, err
		}
		items := make([]Value, 0, len(x)+len(y))
		return Value{kind: a.kind, ref: &list{append(append(items, x...), y...)}}, nil
	case a.isString():
		return Value{}, errorf(TypeError, "can only concatenate str (not \"%s\") to str", b.typeName())
	}
	return r.arithmetic("+", a, b)
}

func escaped(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "'", "&#39;", `"`, "&#34;").Replace(s)
}

func (r *renderer) arithmetic(op string, a, b Value) (Value, error) {
	switch {
	case a.kind == kindUndefined || b.kind == kindUndefined:
		return Value{}, errUndefined(a, b)
	case op == "%" && a.isString():
		s, err := r.percent(a.str, b)
		return Value{kind: a.kind, str: s}, err
	case op == "*" && (a.isString() || a.isSequence()) && b.isInt():
		return r.repeated(a, b.int())
	case op == "*" && (b.isString() || b.isSequence()) && a.isInt():
		return r.repeated(b, a.int())
	case !a.isNumber() || !b.isNumber():
		return Value{}, errorf(TypeError, "unsupported operand type(s) for %s: '%s' and '%s'", op, a.typeName(), b.typeName())
	case a.kind == kindFloat || b.kind == kindFloat || op == "/":
		return floats(op, a.number(), b.number())
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
	return Value{kind: v.kind, ref: &list{items}}, nil
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
		return Float(math.Pow(x, y)), nil
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

func (r *renderer) integers(op string, x, y *big.Int) (Value, error) {
	if err := r.tick((x.BitLen() + y.BitLen()) / 16); err != nil {
		return Value{}, err
	}
	z := new(big.Int)
	switch op {
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

// args are the arguments of a call.
type args struct {
	pos     []Value
	kwNames []string
	kw      []Value
	few     [4]Value
}

func (a *args) named(name string) (Value, bool) {
	for i, n := range a.kwNames {
		if n == name {
			return a.kw[i], true
		}
	}
	return Value{}, false
}

// get returns the argument at a position or of a name.
func (a *args) get(i int, name string) (Value, bool) {
	if i < len(a.pos) {
		return a.pos[i], true
	}
	return a.named(name)
}

// argsFor returns empty arguments, to be given back by done. What is called must
// not keep them, or a part of a.pos.
func (r *renderer) argsFor() *args {
	if n := len(r.free); n > 0 {
		a := r.free[n-1]
		r.free = r.free[:n-1]
		return a
	}
	a := &args{}
	a.pos = a.few[:0]
	return a
}

func (r *renderer) done(a *args) {
	clear(a.pos)
	clear(a.kw)
	a.pos, a.kwNames, a.kw = a.pos[:0], a.kwNames[:0], a.kw[:0]
	r.free = append(r.free, a)
}

func (r *renderer) evalArgs(e *argsExpr, a *args) error {
	for _, p := range e.pos {
		v, err := p.eval(r)
		if err != nil {
			return err
		}
		a.pos = append(a.pos, v)
	}
	if e.star != nil {
		v, err := e.star.eval(r)
		if err != nil {
			return err
		}
		items, err := r.iterate(v)
		if err != nil {
			return err
		}
		if err := r.listed(len(items)); err != nil {
			return err
		}
		a.pos = append(a.pos, items...)
	}
	for i, name := range e.kwNames {
		v, err := e.kw[i].eval(r)
		if err != nil {
			return err
		}
		a.kwNames, a.kw = append(a.kwNames, name), append(a.kw, v)
	}
	if e.starKw != nil {
		v, err := e.starKw.eval(r)
		if err != nil {
			return err
		}
		d := v.Dict()
		if d == nil {
			return errorf(TypeError, "argument after ** must be a mapping, not %s", v.typeName())
		}
		if err := r.listed(2 * d.Len()); err != nil {
			return err
		}
		for i, k := range d.keys {
			a.kwNames, a.kw = append(a.kwNames, r.text(k)), append(a.kw, d.values[i])
		}
	}
	return r.tick(1)
}

func (e *callExpr) eval(r *renderer) (Value, error) {
	var f Value
	var err error
	a := r.argsFor()
	defer r.done(a)
	// A method is called without being made a value first.
	switch of := e.of.(type) {
	case *attrExpr:
		v, err := of.of.eval(r)
		if err != nil {
			return Value{}, err
		}
		if m := methodOf(v, of.name); m != nil {
			if err := r.evalArgs(e.args, a); err != nil {
				return Value{}, at(e.line, err)
			}
			v, err = m(r, v, a)
			return v, at(e.line, r.sound(err))
		}
		if f, err = r.attr(v, of.name); err != nil {
			return Value{}, at(e.line, err)
		}
	default:
		if f, err = e.of.eval(r); err != nil {
			return Value{}, err
		}
	}
	if err := r.evalArgs(e.args, a); err != nil {
		return Value{}, at(e.line, err)
	}
	v, err := r.call(f, a)
	return v, at(e.line, r.sound(err))
}

func (r *renderer) call(f Value, a *args) (Value, error) {
	switch f.kind {
	case kindFunc:
		return f.ref.(*function).call(r, a)
	case kindLoop:
		if again := f.ref.(*loop).again; again != nil {
			return again.call(r, a)
		}
		return Value{}, errorf(TypeError, "the loop must have the 'recursive' marker to be called recursively")
	case kindUndefined:
		return Value{}, errUndefined(f)
	}
	return Value{}, errorf(TypeError, "'%s' object is not callable", f.typeName())
}

func (e *filterExpr) eval(r *renderer) (Value, error) {
	v := r.block
	if e.of != nil {
		var err error
		if v, err = e.of.eval(r); err != nil {
			return Value{}, err
		}
	}
	a := r.argsFor()
	defer r.done(a)
	if err := r.evalArgs(e.args, a); err != nil {
		return Value{}, at(e.line, err)
	}
	v, err := e.filter(r, v, a)
	return v, at(e.line, r.sound(err))
}

func (e *testExpr) eval(r *renderer) (Value, error) {
	v, err := e.of.eval(r)
	if err != nil {
		return Value{}, err
	}
	a := r.argsFor()
	defer r.done(a)
	if err := r.evalArgs(e.args, a); err != nil {
		return Value{}, at(e.line, err)
	}
	ok, err := e.test(r, v, a)
	return Bool(ok != e.not), at(e.line, r.sound(err))
}
