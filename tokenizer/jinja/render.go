// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"errors"
	"slices"
	"sync"
	"time"
)

// Options bound a rendering. Zero values take the defaults.
type Options struct {
	// Now is what strftime_now tells, in its own time zone. The zero time is
	// told as it is.
	Now time.Time
	// MaxOutput is the largest text in bytes. Default 12 MiB.
	MaxOutput int
	// MaxSteps is how many statements, iterations and operations may be run.
	// Making and looking through values counts by
	// their size. Default 10 million, about a second.
	MaxSteps int
	// MaxMemory is how many bytes of values a rendering may make, beside its
	// output; values that nobody sees any more count, too. Default 24 MiB. A
	// rendering takes at most this and some three times MaxOutput, for a text grows
	// into a larger copy.
	MaxMemory int
}

const (
	defaultOutput = 12 << 20
	defaultSteps  = 10_000_000
	defaultMemory = 24 << 20
	maxCalls      = 200

	// What one step pays for: bytes that are made, bytes that are looked at. An
	// item of a list takes itemSteps.
	stringStep = 16
	scanStep   = 64
	itemSteps  = 2

	valueSize = 48 // of a Value, in bytes
	boxSize   = 64 // of what a list, dictionary or function is besides its items

	// keptBytes and keptFrames are what a renderer keeps for its next rendering; a
	// prompt seldom has more.
	keptBytes  = 1 << 20
	keptFrames = 64
)

// renderer is one rendering.
type renderer struct {
	t       *Template
	vars    *Dict
	o       Options
	out     []byte
	frame   *frame
	known   []Value // variables of the rendering, by the name's number
	frames  []*frame
	left    int // steps; negative once anything has stopped the rendering
	room    int // bytes of values
	calls   int
	block   Value // what a filter without an operand is applied to
	free    []*args
	filters map[string]filter
	tests   map[string]test
	methods methodTables
	deep    int   // of the values that are walked through
	longest int   // that the text which is being written may get, with what is before it
	broken  error // what stopped the rendering; every step fails with it
}

//nolint:gochecknoglobals // memory to be used again
var renderers = sync.Pool{New: func() any { return &renderer{} }}

// Render appends the text of the template with the given variables to dst. The
// variables are only read. An error is of type [*Error]; dst is then returned as it
// was.
func (t *Template) Render(dst []byte, vars *Dict, o Options) ([]byte, error) {
	if vars == nil {
		vars = &Dict{}
	}
	r := renderers.Get().(*renderer)
	r.begin(t, vars, o)
	defer r.end()
	_, err := r.run(t.body)
	if err == nil {
		err = r.written()
	}
	if err = r.sound(err); err != nil {
		if e, ok := errors.AsType[*Error](err); ok && e.Name == "" {
			e.Name = t.name
		}
		return dst, err
	}
	if dst == nil && len(r.out) > keptBytes {
		dst, r.out = r.out, nil
		return dst, nil
	}
	return append(dst, r.out...), nil
}

func (r *renderer) begin(t *Template, vars *Dict, o Options) {
	o = o.withDefaults()
	r.t, r.vars, r.o = t, vars, o
	r.filters, r.tests, r.methods = filterTable(), testTable(), tablesOfMethods()
	r.left, r.room = o.MaxSteps, o.MaxMemory
	r.known = slices.Grow(r.known[:0], len(t.names))[:len(t.names)]
	for i := range r.known {
		r.known[i] = Value{kind: kindUnset}
	}
	r.frame = r.newFrame(t.scope, nil)
}

func (o Options) withDefaults() Options {
	if o.MaxOutput <= 0 {
		o.MaxOutput = defaultOutput
	}
	if o.MaxSteps <= 0 {
		o.MaxSteps = defaultSteps
	}
	if o.MaxMemory <= 0 {
		o.MaxMemory = defaultMemory
	}
	return o
}

// end forgets the rendering and keeps its memory for others.
func (r *renderer) end() {
	clear(r.known)
	for _, f := range r.frames {
		clear(f.slots[:cap(f.slots)])
	}
	next := renderer{out: r.out[:0], known: r.known[:0], frames: r.frames, free: r.free}
	if cap(next.out) > keptBytes {
		next.out = nil
	}
	if cap(next.known) > keptFrames*keptFrames {
		next.known = nil
	}
	if len(next.frames) > keptFrames {
		next.frames = nil
	}
	if len(next.free) > keptFrames {
		next.free = nil
	}
	*r = next
	renderers.Put(r)
}

// at gives an error its line, unless it has one.
func at(line int, err error) error {
	if err == nil {
		return nil
	}
	return lined(line, err)
}

func lined(line int, err error) error {
	if e, ok := errors.AsType[*Error](err); ok && e.Line == 0 {
		e.Line = line
	}
	return err
}

// tick counts n steps. It fails once anything has stopped the rendering.
func (r *renderer) tick(n int) error {
	if n >= 0 && n <= r.left {
		r.left -= n
		return nil
	}
	return r.stop(errorf(LimitError, "more than %d steps", r.o.MaxSteps))
}

// stop makes all that follows fail with err, or with what stopped it before.
func (r *renderer) stop(err error) error {
	if r.broken == nil {
		r.broken = err
	}
	r.left = -1
	return r.broken
}

// spend is tick for what returns no errors: it reports whether to go on. Whoever
// called that asks sound or a later tick for the error.
func (r *renderer) spend(n int) bool { return r.tick(n) == nil }

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
	if r.deep++; r.deep > maxNesting {
		_ = r.stop(errorf(RecursionError, "maximum recursion depth exceeded"))
	}
	return r.spend(1)
}

func (r *renderer) leave() { r.deep-- }

// fits counts one step of writing a value and reports whether to go on.
func (r *renderer) fits(n int) bool {
	if n > r.longest {
		_ = r.stop(errorf(LimitError, "a value of more than %d bytes", r.o.MaxOutput))
	}
	return r.spend(1)
}

// hold counts n bytes that a value takes. Whoever makes many asks for the error.
func (r *renderer) hold(n int) bool {
	if r.room -= n; r.room < 0 || n < 0 {
		_ = r.stop(errorf(LimitError, "more than %d bytes of values", r.o.MaxMemory))
		return false
	}
	return true
}

// made counts the making of a string of n bytes.
func (r *renderer) made(n int) error {
	if n > r.o.MaxOutput {
		return errorf(LimitError, "a value of more than %d bytes", r.o.MaxOutput)
	}
	r.hold(n)
	return r.tick(1 + n/stringStep)
}

// listed counts the making of a list of n items. It comes before the list.
func (r *renderer) listed(n int) error {
	if n > r.o.MaxMemory/valueSize {
		return r.stop(errorf(LimitError, "more than %d bytes of values", r.o.MaxMemory))
	}
	r.hold(boxSize + n*valueSize)
	return r.tick(1 + n*itemSteps)
}

// scanned counts looking through n bytes.
func (r *renderer) scanned(n int) error { return r.tick(n / scanStep) }

// written fails if the output is too long.
func (r *renderer) written() error {
	if len(r.out) > r.o.MaxOutput {
		return r.stop(errorf(LimitError, "more than %d bytes of output", r.o.MaxOutput))
	}
	return r.broken
}

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

// within runs a body with variables of its own.
func (r *renderer) within(s *names, body []stmt) (jump, error) {
	outer := r.frame
	inner := r.newFrame(s, outer)
	r.frame = inner
	j, err := r.run(body)
	r.frame = outer
	r.drop(inner)
	return j, err
}

// cut takes what was written from start on back.
func (r *renderer) cut(start int) string {
	n := len(r.out) - start
	if !r.hold(n) || !r.spend(n/stringStep) {
		return ""
	}
	text := string(r.out[start:])
	r.out = r.out[:start]
	return text
}

// write appends what Python's str gives to the output.
func (r *renderer) write(v Value) error {
	if v.isString() {
		if err := r.tick(len(v.str) / stringStep); err != nil {
			return err
		}
		r.out = append(r.out, v.str...)
	} else {
		r.out = r.appendStr(r.out, v)
	}
	return r.written()
}

// captured returns the text of a body that runs with variables of its own.
func (r *renderer) captured(s *names, body []stmt) (string, error) {
	start := len(r.out)
	_, err := r.within(s, body)
	return r.cut(start), r.sound(err)
}

func (s *dataStmt) run(r *renderer) (jump, error) {
	r.out = append(r.out, s.text...)
	if err := r.scanned(len(s.text)); err != nil {
		return onward, err
	}
	return onward, r.written()
}

// run writes the strings of a sum as they come. Once one of them is something else
// the sum is made as such, of what was written and the rest.
func (s *outputStmt) run(r *renderer) (jump, error) {
	start := len(r.out)
	var sum Value
	for i, p := range s.parts {
		v, err := p.eval(r)
		switch {
		case err != nil:
			return onward, at(s.line, err)
		case sum.kind != kindUndefined:
			if sum, err = r.add(sum, v); err != nil {
				return onward, at(s.line, err)
			}
		case v.kind == kindString || len(s.parts) == 1:
			if err := r.write(v); err != nil {
				return onward, at(s.line, err)
			}
		case i == 0 && v.kind != kindUndefined:
			sum = v
		case i == 0:
			return onward, at(s.line, errUndefined(v))
		default:
			if sum, err = r.add(String(r.cut(start)), v); err != nil {
				return onward, at(s.line, err)
			}
		}
	}
	if sum.kind == kindUndefined {
		return onward, nil
	}
	return onward, at(s.line, r.write(sum))
}

func (s *scopeStmt) run(r *renderer) (jump, error) { return r.within(s.names, s.body) }

func (s *ifStmt) run(r *renderer) (jump, error) {
	for i := range s.branches {
		is, err := r.truthOf(s.branches[i].cond)
		if err != nil {
			return onward, err
		}
		if is {
			return r.run(s.branches[i].body)
		}
		if err := r.tick(1); err != nil {
			return onward, err
		}
	}
	if len(s.otherwise) == 0 {
		return onward, nil
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
		err = r.assign(&s.target, v)
	}
	return onward, at(s.line, err)
}

func (s *setBlockStmt) run(r *renderer) (jump, error) {
	text, err := r.captured(s.names, s.body)
	if err != nil {
		return onward, at(s.line, err)
	}
	v := String(text)
	if s.filter != nil {
		if v, err = r.filtered(s.filter, v); err != nil {
			return onward, at(s.line, err)
		}
	}
	return onward, at(s.line, r.assign(&s.target, v))
}

// filtered applies a chain of filters to the text of a block.
func (r *renderer) filtered(chain expr, v Value) (Value, error) {
	outer := r.block
	r.block = v
	v, err := chain.eval(r)
	r.block = outer
	return v, err
}

// assign sets variables of the frame that is running.
func (r *renderer) assign(t *target, v Value) error {
	switch {
	case t.parts != nil:
		items, err := r.iterate(v)
		if err != nil {
			return err
		}
		switch {
		case len(items) > len(t.parts):
			return errorf(ValueError, "too many values to unpack (expected %d)", len(t.parts))
		case len(items) < len(t.parts):
			return errorf(ValueError, "not enough values to unpack (expected %d, got %d)", len(t.parts), len(items))
		}
		for i := range t.parts {
			if err := r.assign(&t.parts[i], items[i]); err != nil {
				return err
			}
		}
	case t.attr != "":
		ns, err := t.of.eval(r)
		if err != nil {
			return err
		}
		if ns.kind != kindNamespace {
			return errorf(RuntimeError, "cannot assign attribute on non-namespace object")
		}
		r.put(ns.ref.(*Dict), t.attr, v)
		return r.tick(1)
	default:
		r.frame.slots[t.slot] = v
	}
	return nil
}

// put sets a key of a dictionary that the rendering made.
func (r *renderer) put(d *Dict, key string, v Value) {
	n := len(d.keys)
	d.set(r, String(key), v)
	if len(d.keys) > n {
		r.hold(3 * valueSize)
	}
}

func (s *filterStmt) run(r *renderer) (jump, error) {
	text, err := r.captured(s.names, s.body)
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
	outer := r.frame
	inner := r.newFrame(s.names, outer)
	defer func() { r.frame = outer }()
	for i, e := range s.values {
		v, err := e.eval(r)
		if err != nil {
			return onward, err
		}
		r.frame = inner
		if err := r.assign(&s.targets[i], v); err != nil {
			return onward, err
		}
		r.frame = outer
	}
	r.frame = inner
	j, err := r.run(s.body)
	r.drop(inner)
	return j, err
}
