// SPDX-License-Identifier: Apache-2.0

package jinja

// A block with variables of its own (the template, a loop, a macro, with, set, filter)
// is a scope. Which names it may set is known once it is parsed: each has a slot in the
// frame that holds the block's variables while it runs. A name that is read belongs to
// the nearest frame in which it is set at that time, so a read knows all slots that
// come into question, from the inside out.

// names are the names that a scope may set.
type names struct {
	around *names
	slots  map[int]*decl // by the name's number
}

// decl is a slot for a name, and where to look if it is not set.
type decl struct {
	slot int
	up   int   // frames from this one to that of next
	next *decl // nil: a variable of the rendering
}

// read is a name whose slots are found once all scopes around it are parsed.
type read struct {
	expr *nameExpr
	in   *names
}

// declare returns the slot of a name in s.
func (s *names) declare(id int) int {
	d, ok := s.slots[id]
	if !ok {
		if s.slots == nil {
			s.slots = map[int]*decl{}
		}
		d = &decl{slot: len(s.slots)}
		s.slots[id] = d
	}
	return d.slot
}

// find returns the nearest slot of a name, and how far it is.
func (s *names) find(id int) (up int, d *decl) {
	for ; s != nil; s = s.around {
		if d, ok := s.slots[id]; ok {
			return up, d
		}
		up++
	}
	return 0, nil
}

// resolve finds the slots of all that is read.
func (p *parser) resolve() {
	for _, s := range p.scopes {
		for id, d := range s.slots {
			if up, next := s.around.find(id); next != nil {
				d.up, d.next = up+1, next
			}
		}
	}
	for _, r := range p.reads {
		r.expr.up, r.expr.decl = r.in.find(r.expr.id)
	}
}

// frame holds the variables of a scope that is running.
type frame struct {
	around *frame
	slots  []Value // kindUnset where there is none
	kept   bool    // a macro sees it, perhaps later than the scope runs
}

// newFrame returns an empty frame for the names of s.
func (r *renderer) newFrame(s *names, around *frame) *frame {
	var f *frame
	if n := len(r.frames); n > 0 {
		f = r.frames[n-1]
		r.frames = r.frames[:n-1]
	} else {
		f = &frame{}
		r.hold(64)
	}
	n := len(s.slots)
	if cap(f.slots) < n {
		f.slots = make([]Value, n)
		r.hold(n * valueSize)
	}
	f.around, f.slots = around, f.slots[:n]
	f.clear(0)
	return f
}

// clear unsets the variables from one on.
func (f *frame) clear(from int) {
	for i := from; i < len(f.slots); i++ {
		f.slots[i] = Value{kind: kindUnset}
	}
}

// drop gives a frame back, unless a macro sees it.
func (r *renderer) drop(f *frame) {
	if !f.kept {
		f.around = nil
		r.frames = append(r.frames, f)
	}
}

// keep says that a macro sees f and what is around it.
func (f *frame) keep() {
	for ; f != nil && !f.kept; f = f.around {
		f.kept = true
	}
}

// global returns a variable of the rendering.
func (r *renderer) global(id int) Value {
	v := r.known[id]
	if v.kind != kindUnset {
		return v
	}
	name := r.t.names[id]
	v, ok := r.vars.Get(name)
	if !ok {
		if v, ok = globalTable()[name]; !ok {
			v = undefined("'" + name + "' is undefined")
		}
	}
	r.known[id] = v
	return v
}

func (e *nameExpr) eval(r *renderer) (Value, error) {
	if e.decl == nil {
		return r.global(e.id), nil
	}
	f := r.frame
	for range e.up {
		f = f.around
	}
	for d := e.decl; d != nil; d = d.next {
		if v := f.slots[d.slot]; v.kind != kindUnset {
			return v, nil
		}
		for range d.up {
			f = f.around
		}
	}
	return r.global(e.id), nil
}
