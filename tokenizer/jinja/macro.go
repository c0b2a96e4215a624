// SPDX-License-Identifier: Apache-2.0

package jinja

func (s *macroStmt) run(r *renderer) (jump, error) {
	r.frame.slots[s.slot] = r.closure(s.macro)
	return onward, nil
}

// closure returns a macro as a value that sees the variables around it.
func (r *renderer) closure(m *macro) Value {
	around := r.frame
	around.keep()
	r.hold(boxSize)
	return Value{kind: kindFunc, ref: &function{
		name: m.name, macro: m,
		call: func(r *renderer, a *args) (Value, error) { return r.callMacro(m, around, a) },
	}}
}

func (r *renderer) callMacro(m *macro, around *frame, a *args) (Value, error) {
	if r.calls++; r.calls > maxCalls {
		return Value{}, errorf(RecursionError, "maximum recursion depth exceeded")
	}
	defer func() { r.calls-- }()
	if err := r.tick(len(a.pos) + (1+len(a.kw))*(1+len(m.names))/8); err != nil {
		return Value{}, err
	}
	inner, outer := r.newFrame(m.scope, around), r.frame
	defer func() { r.frame = outer }()
	r.frame = inner
	if err := r.bind(m, inner, a); err != nil {
		return Value{}, err
	}
	start := len(r.out)
	_, err := r.run(m.body)
	r.drop(inner)
	return String(r.cut(start)), r.sound(err)
}

// bind gives a macro's parameters their values.
func (r *renderer) bind(m *macro, f *frame, a *args) error {
	more := a.pos[min(len(a.pos), len(m.params)):]
	if len(more) > 0 && !m.reads.varargs {
		return errorf(TypeError, "macro '%s' takes not more than %d argument(s)", m.name, len(m.params))
	}
	if m.reads.varargs {
		if err := r.listed(len(more)); err != nil {
			return err
		}
		f.slots[m.varargs] = tupleOf(append([]Value(nil), more...)...)
	}
	if m.reads.caller {
		f.slots[m.caller] = undefined("No caller defined")
	}
	if m.reads.kwargs {
		r.hold(2 * boxSize)
		f.slots[m.kwargs] = FromDict(&Dict{})
	}
	for i, name := range a.kwNames {
		if known, err := r.bindNamed(m, f, a, i); err != nil {
			return err
		} else if known {
			continue
		}
		switch {
		case name == "caller" && m.reads.caller:
			f.slots[m.caller] = a.kw[i]
		case name == "caller":
			return errorf(TypeError, "macro '%s' was invoked with two values for the special caller argument. This is most likely a bug.", m.name)
		case m.reads.kwargs:
			r.put(f.slots[m.kwargs].ref.(*Dict), name, a.kw[i])
		default:
			return errorf(TypeError, "macro '%s' takes no keyword argument '%s'", m.name, name)
		}
	}
	for i, slot := range m.params {
		switch {
		case i < len(a.pos):
			f.slots[slot] = a.pos[i]
		case f.slots[slot].kind != kindUnset:
		case m.defaults[i] != nil:
			v, err := m.defaults[i].eval(r)
			if err != nil {
				return err
			}
			f.slots[slot] = v
		default:
			f.slots[slot] = undefined("parameter '" + m.names[i] + "' was not provided")
		}
	}
	return nil
}

// bindNamed gives a parameter the value of the keyword i, if there is one of its name.
func (r *renderer) bindNamed(m *macro, f *frame, a *args, i int) (bool, error) {
	for k, name := range m.names {
		if name != a.kwNames[i] {
			continue
		}
		if k < len(a.pos) {
			return false, errorf(TypeError, "macro '%s' got multiple values for argument '%s'", m.name, name)
		}
		f.slots[m.params[k]] = a.kw[i]
		return true, nil
	}
	return false, nil
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
