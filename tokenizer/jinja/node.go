// SPDX-License-Identifier: Apache-2.0

package jinja

import "slices"

// expr is a node that has a value, stmt one that has an effect.
type (
	expr interface {
		eval(r *renderer) (Value, error)
	}
	stmt interface {
		run(r *renderer) (jump, error)
	}
)

// jump says how the statements of a loop's body ended.
type jump uint8

const (
	onward jump = iota
	jumpContinue
	jumpBreak
)

type (
	constExpr struct{ value Value }
	nameExpr  struct {
		id   int
		name string
		up   int   // frames to the first one that may have it
		decl *decl // in that one; nil: a variable of the rendering
	}
	listExpr struct {
		items []expr
		tuple bool
	}
	dictExpr struct {
		keys, values []expr
		line         int
	}
	attrExpr struct {
		of      expr
		name    string
		methods methods // of that name
		changes bool    // a method of a dictionary that the sandbox forbids has that name
		line    int
	}
	indexExpr struct {
		of, index expr
		key       string // that index is, if it is a constant
		methods   methods
		line      int
	}
	sliceExpr struct {
		of, start, stop, step expr
		line                  int
	}
	argsExpr struct {
		pos          []expr
		kwNames      []string
		kw           []expr
		star, starKw expr
	}
	callExpr struct {
		of   expr
		args *argsExpr
		line int
	}
	filterExpr struct {
		of     expr // nil: the text of a block
		name   string
		filter filter
		args   *argsExpr
		line   int
	}
	testExpr struct {
		of    expr
		name  string
		test  test
		quick func(Value) bool // test, if it asks of nothing but the value
		not   bool
		args  *argsExpr
		line  int
	}
	condExpr  struct{ cond, yes, no expr }
	logicExpr struct {
		left, right expr
		or          bool
	}
	notExpr     struct{ of expr }
	compareExpr struct {
		first expr
		ops   []comparison
		rest  []expr
		line  int
	}
	binaryExpr struct {
		op          string
		left, right expr
		line        int
	}
	concatExpr struct{ items []expr }
	unaryExpr  struct {
		minus bool
		of    expr
		line  int
	}
)

type (
	dataStmt   struct{ text string }
	outputStmt struct {
		parts []expr // of a sum of strings, or one expression
		line  int
	}
	scopeStmt struct {
		names *names
		body  []stmt
	}
	branch struct {
		cond expr
		body []stmt
	}
	ifStmt struct {
		branches  []branch
		otherwise []stmt
	}
	forStmt struct {
		target    target
		iter      expr
		test      expr
		body      []stmt
		names     *names // of target, test and body
		otherwise []stmt
		others    *names // of otherwise
		recursive bool
		loop      int // the slot of that name
		always    int // so many slots, from the first, are set for each item
		line      int
	}
	setStmt struct {
		target target
		value  expr
		line   int
	}
	setBlockStmt struct {
		target target
		filter expr
		names  *names
		body   []stmt
		line   int
	}
	macroStmt struct {
		slot  int
		macro *macro
	}
	callStmt struct {
		call   *callExpr
		caller *macro
		line   int
	}
	withStmt struct {
		targets []target
		values  []expr
		names   *names
		body    []stmt
	}
	filterStmt struct {
		names  *names
		body   []stmt
		filter expr
		line   int
	}
	jumpStmt struct{ isBreak bool }
)

// target is what is assigned to.
type target struct {
	id    int
	slot  int
	attr  string    // of a namespace
	of    *nameExpr // the namespace
	parts []target  // of a tuple
}

// macro is the code of a macro, or of a call block. Parameters are slots.
type macro struct {
	name                    string
	params                  []int
	names                   []string
	scope                   *names
	defaults                []expr
	body                    []stmt
	varargs, kwargs, caller int
	reads                   special
}

// special says which of a macro's variables of these names its body reads: it takes
// no others than those.
type special struct{ varargs, kwargs, caller, ownCaller bool }

// note tells m that its body reads a variable.
func (m *macro) note(name string) {
	switch name {
	case "varargs":
		m.reads.varargs = !slices.Contains(m.names, name)
	case "kwargs":
		m.reads.kwargs = !slices.Contains(m.names, name)
	case "caller":
		m.reads.ownCaller = slices.Contains(m.names, name)
		m.reads.caller = !m.reads.ownCaller
	}
}

// newOutput makes a sum of which every operand may be a string into parts, so
// that the strings need not be joined to be written.
func newOutput(e expr, line int) stmt {
	var parts []expr
	for {
		b, ok := e.(*binaryExpr)
		if !ok || b.op != "+" {
			break
		}
		parts = append(parts, b.right)
		e = b.left
	}
	parts = append(parts, e)
	for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
		parts[i], parts[j] = parts[j], parts[i]
	}
	return &outputStmt{parts, line}
}
