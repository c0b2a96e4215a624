// SPDX-License-Identifier: Apache-2.0

package jinja

// op says what a node is. The comments name the operands, in the order of kids.
type op uint8

const (
	opConst   op = iota // value
	opName              // text
	opList              // items
	opTuple             // items
	opDict              // key, value, key, value, …
	opAttr              // of; text is the attribute
	opItem              // of, index
	opSlice             // of, start, stop, step; parts may be nil
	opCall              // of; args
	opFilter            // of; builtin, args
	opTest              // of; builtin, args; opNot around it for "is not"
	opIfElse            // condition, yes, no; no may be nil
	opAnd               // left, right
	opOr                // left, right
	opNot               // of
	opCompare           // first, second, …; operators are in names
	opSum               // operands of a chain of +
	opArith             // left, right; text is the operator
	opConcat            // operands of ~
	opSign              // of; text is + or -
	opBody              // body, in a scope of its own, as a text
	opCaller            // macro: a macro as a value

	opData   // text
	opOutput // expression
	opIf     // condition; body, other
	opFor    // target, items, test; test may be nil; body, other
	opSet    // target, value
	opMacro  // macro, slot
	opWith   // target, value, target, value, …; body
	opBreak
	opContinue
	opBlock       // text is the name; body, in a scope of its own; again: it is required
	opAutoescape  // condition; body, in a scope of its own
	opLoad        // template; text is the tag; again: a missing template is ignored
	opUnsupported // text is the error
	opSelf        // the blocks of the template
)

// node is a statement or an expression.
type node struct {
	op      op
	line    int
	text    string
	value   Value
	kids    []*node
	args    []*node  // the last len(names) are given by name
	names   []string // of arguments, or operators
	builtin *builtin // of a filter or test
	methods *methods // named like an attribute or a constant index
	again   bool     // a loop may call itself; a name is read in a block and declared around it
	spread  [2]*node // arguments behind * and ** of a call; nil without them
	body    []*node
	other   []*node // else
	scope   *scope  // of body
	others  *scope  // of other, in a loop
	macro   *macro
	slot    int   // of a name that is set
	up      int   // frames from the reading one to the first that may have the name
	decl    *decl // in that frame; nil: a variable of the rendering
}

// newNode returns a node with its operands.
func newNode(op op, line int, kids ...*node) *node { return &node{op: op, line: line, kids: kids} }

// macro is the code of a macro. Parameters are slots.
type macro struct {
	name     string // "" for that of a block
	params   []int
	names    []string
	defaults []*node
	body     []*node
	scope    *scope

	// The names with a meaning of their own.
	caller, varargs, kwargs special
}

// special is a name with a meaning of its own in macros: caller, varargs or kwargs.
type special struct {
	slot int
	read bool // the body reads the name
	set  bool // the body sets the name before: it is a variable as any other
}

// scope is a block with its own variables: the template, a loop, a macro or a set block. The
// parser finds the names that the block may set. Each has a slot in the frame that holds the
// variables while the block runs. Reading a name gives the variable of the innermost frame in
// which the name is set at that time.
type scope struct {
	around *scope
	slots  map[string]*decl
	// context is the scope whose variables a block sees in this place: that of the template, or that around a
	// block with "scoped".
	context *scope
	block   string // the name of the innermost block around
}

// decl is the slot of a name, and where to look if it is not set.
type decl struct {
	slot      int
	undefined bool   // until it is set: no other is looked for
	block     string // of the scope
	up        int    // frames from this one to that of next
	next      *decl  // nil: a variable of the rendering
}

// declare returns the slot of a name.
func (s *scope) declare(name string) int {
	d, ok := s.slots[name]
	if !ok {
		d = &decl{slot: len(s.slots), block: s.block}
		s.slots[name] = d
	}
	return d.slot
}

// find returns the nearest slot of a name, and how many scopes it is away.
func (s *scope) find(name string) (up int, d *decl) {
	for ; s != nil; s = s.around {
		if d, ok := s.slots[name]; ok {
			return up, d
		}
		up++
	}
	return 0, nil
}

// depth returns the number of frames from one of this scope to that of its context.
func (s *scope) depth() (up int) {
	for at := s; at != s.context; at = at.around {
		up++
	}
	return up
}

// frame holds the variables of a scope while it runs.
type frame struct {
	around *frame
	slots  []Value
	kept   bool // a macro may read it after the scope has ended
}

func (r *renderer) newFrame(s *scope, around *frame) *frame {
	var f *frame
	if last := len(r.free) - 1; last >= 0 {
		f, r.free = r.free[last], r.free[:last]
	} else {
		r.hold(boxSize)
		f = &frame{}
	}
	n := len(s.slots)
	if cap(f.slots) < n {
		r.hold(n * valueSize)
		f.slots = make([]Value, n)
	}
	f.around, f.slots = around, f.slots[:n]
	f.reset()
	return f
}

// drop ends the scope of a frame. The next newFrame uses the frame again, unless a macro
// may read it.
func (r *renderer) drop(f *frame) {
	if r.frame = f.around; !f.kept {
		r.free = append(r.free, f)
	}
}

// reset unsets all variables.
func (f *frame) reset() {
	for i := range f.slots {
		f.slots[i] = Value{kind: kindUnset}
	}
}

// keep marks a frame and those around it as read by a macro.
func (f *frame) keep() {
	for ; f != nil && !f.kept; f = f.around {
		f.kept = true
	}
}

// above returns the frame that is so many frames above the current one.
func (r *renderer) above(up int) *frame {
	f := r.frame
	for range up {
		f = f.around
	}
	return f
}

// variable returns the value of a name that is read.
func (r *renderer) variable(n *node) Value {
	f := r.above(n.up)
	for d := n.decl; d != nil; d = d.next {
		if v := f.slots[d.slot]; v.kind != kindUnset {
			return v
		}
		if d.undefined && d.block == n.decl.block && !n.again { // a block sees only what is set around it
			return Value{num: isVariable, str: n.text}
		}
		for range d.up {
			f = f.around
		}
	}
	v, ok := r.vars.Get(n.text)
	if !ok {
		if v, ok = r.library.globals[n.text]; !ok {
			v = Value{num: isVariable, str: n.text}
		}
	}
	return v
}
