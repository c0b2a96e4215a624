// SPDX-License-Identifier: Apache-2.0

package jinja

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
		if m := of.methods.of(v); m != nil {
			if err := r.evalArgs(e.args, a); err != nil {
				return Value{}, at(e.line, err)
			}
			v, err = m(r, v, a)
			return v, at(e.line, r.sound(err))
		}
		if f, err = r.attr(v, of.name, &of.methods); err != nil {
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
	is, err := e.holds(r)
	return Bool(is), err
}

func (e *testExpr) holds(r *renderer) (bool, error) {
	v, err := e.of.eval(r)
	if err != nil {
		return false, err
	}
	if e.quick != nil {
		return e.quick(v) != e.not, at(e.line, r.tick(1))
	}
	a := r.argsFor()
	defer r.done(a)
	if err := r.evalArgs(e.args, a); err != nil {
		return false, at(e.line, err)
	}
	ok, err := e.test(r, v, a)
	return ok != e.not, at(e.line, r.sound(err))
}
