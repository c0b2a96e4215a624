// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"cmp"
	"time"
)

// Options limit a rendering. Zero values take the defaults.
type Options struct {
	// Now is the time that strftime_now formats, in its own time zone.
	Now time.Time
	// MaxOutput is the largest text in bytes. Default 12 MiB.
	MaxOutput int
	// MaxSteps is the number of statements, iterations and operations. An operation on
	// a large value counts by its size. Default 10 million, which take about a second.
	MaxSteps int
	// MaxMemory is the number of bytes of all values that a rendering makes, without
	// its output; values that are no longer in use count, too. Default 24 MiB. A
	// rendering uses at most this and three times MaxOutput, because a text grows into
	// a larger copy.
	MaxMemory int
}

const (
	defaultOutput = 12 << 20
	defaultSteps  = 10_000_000
	defaultMemory = 24 << 20
	maxCalls      = 200 // nested calls of macros
	maxNesting    = 900 // nested values; Python's own limit is near a thousand

	// The amount of work that counts as one step.
	stringStep = 16 // bytes of a new string
	scanStep   = 64 // bytes of a string that is only read
	itemSteps  = 2  // steps for each item of a list

	valueSize = 48 // bytes of a Value
	boxSize   = 64 // bytes of a list, dictionary or function without its items
)

// renderer is the state of one rendering. Its methods panic with an *Error.
type renderer struct {
	Options
	library  *library
	template *Template
	vars     *Dict
	out      []byte
	line     int      // of the node that is evaluated, for errors
	frame    *frame   // variables of the innermost scope
	free     []*frame // frames to be used again
	stack    []Value  // arguments of the calls that are running
	steps    int      // that are left
	memory   int      // bytes that are left
	calls    int      // nested calls of macros
	nesting  int      // of the value that is printed or compared
	longest  int      // maximum length of the buffer that a value is printed to
}

// Render appends the text of the template with the given variables to dst. The
// variables are only read. An error is of type [*Error]; dst is then returned
// unchanged.
func (t *Template) Render(dst []byte, vars *Dict, o Options) (text []byte, err error) {
	o.MaxOutput, o.MaxSteps, o.MaxMemory = cmp.Or(o.MaxOutput,
		defaultOutput), cmp.Or(o.MaxSteps, defaultSteps), cmp.Or(o.MaxMemory, defaultMemory)
	r := &renderer{library: t.library, template: t, vars: vars, Options: o, out: dst, steps: o.MaxSteps, memory: o.MaxMemory}
	if vars == nil {
		r.vars = &Dict{}
	}
	text = dst //nolint:wastedassign // the result if the rendering panics
	defer catch(&err, t.name, &r.line)
	r.frame = r.newFrame(t.scope, nil)
	r.run(t.body)
	r.checkOutput()
	return r.out, nil
}

// tick counts n steps.
func (r *renderer) tick(n int) {
	if uint(n) > uint(r.steps) {
		r.outOfSteps()
	}
	r.steps -= n
}

func (r *renderer) outOfSteps() {
	raise(LimitError, "more than %d steps", r.MaxSteps)
}

// hold counts n bytes of values.
func (r *renderer) hold(n int) {
	if r.memory -= n; r.memory < 0 || n < 0 {
		raise(LimitError, "more than %d bytes of values", r.MaxMemory)
	}
}

// made counts a string of n bytes. Call it before a string is made that may be larger
// than its parts.
func (r *renderer) made(n int) {
	if n > r.MaxOutput {
		raise(LimitError, "a value of more than %d bytes", r.MaxOutput)
	}
	r.hold(n)
	r.tick(1 + n/stringStep)
}

// listed counts a list of n items. Call it before the list is made.
func (r *renderer) listed(n int) {
	r.hold(boxSize + min(n, 1<<40)*valueSize)
	r.tick(1 + n*itemSteps)
}

// scanned counts reading n bytes.
func (r *renderer) scanned(n int) { r.tick(1 + n/scanStep) }

// enter counts a level of a nested value, which may contain itself; leave goes back.
func (r *renderer) enter() {
	if r.nesting++; r.nesting > maxNesting {
		raise(RecursionError, "maximum recursion depth exceeded")
	}
	r.tick(1)
}

func (r *renderer) leave() { r.nesting-- }

// fits checks the length of the buffer that a value is printed to.
func (r *renderer) fits(n int) {
	if n > r.longest {
		raise(LimitError, "a value of more than %d bytes", r.MaxOutput)
	}
	r.tick(1)
}

// checkOutput checks the length of the output.
func (r *renderer) checkOutput() {
	if len(r.out) > r.MaxOutput {
		raise(LimitError, "more than %d bytes of output", r.MaxOutput)
	}
}

// cut removes the output from start on and returns it.
func (r *renderer) cut(start int) string {
	n := len(r.out) - start
	r.hold(n)
	r.tick(n / stringStep)
	text := string(r.out[start:])
	r.out = r.out[:start]
	return text
}

// put sets a key of a dictionary that the rendering made.
func (r *renderer) put(d *Dict, key string, v Value) {
	n := len(d.keys)
	if d.Set(key, v); len(d.keys) > n {
		r.hold(3 * valueSize)
	}
}

// newFunc returns a function that the rendering makes.
func (r *renderer) newFunc(name string, call func(r *renderer, a args) Value) Value {
	r.hold(2 * boxSize)
	return Value{kind: kindFunc, ref: &function{name: name, call: call}}
}

// newGenerator returns a generator of the items that f makes when they are used.
func (r *renderer) newGenerator(f func() []Value) Value {
	r.hold(2 * boxSize)
	return Value{kind: kindGenerator, str: "generator", ref: &generator{f}}
}
