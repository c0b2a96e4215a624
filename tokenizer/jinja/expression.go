// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
	"strings"
)

// tuple parses an expression, or several with commas between them.
func (p *parser) tuple() *node { return p.items(p.expression) }

// items is tuple for elements that one parses. A last comma may stand before ends.
func (p *parser) items(one func() *node, ends ...string) *node {
	first := one()
	if !p.isOp(",") {
		return first
	}
	n := newNode(opTuple, p.line(), first)
	for p.skipOp(",") {
		if k := p.peek().kind; k == tokBlockEnd || k == tokVarEnd || p.isOp(")", "]") || p.isName(ends...) {
			break
		}
		n.kids = append(n.kids, one())
	}
	return folded(n)
}

// folded makes a list, tuple, dictionary or sign of constants a constant.
func folded(n *node) *node {
	for i, k := range n.kids {
		isKey := n.op == opDict && i%2 == 0
		if k.op != opConst || isKey && !k.value.isString() || n.op == opSign && !k.value.isNumber() {
			return n
		}
	}
	r := &renderer{steps: 1 << 40, memory: 1 << 40, Options: Options{MaxOutput: 1 << 40}}
	return &node{op: opConst, value: r.eval(n), line: n.line}
}

func (p *parser) expression() *node {
	p.enter()
	defer p.leave()
	unknown := len(p.unknown)
	n := p.or()
	for p.isName("if") {
		line := p.next().line
		condition := p.or()
		var other *node
		if p.skipName("else") {
			other = p.expression()
		}
		n = newNode(opIfElse, line, condition, n, other)
		p.conditional(unknown)
	}
	return n
}

func (p *parser) or() *node {
	n := p.and()
	for p.skipName("or") {
		n = newNode(opOr, 0, n, p.and())
	}
	return n
}

func (p *parser) and() *node {
	n := p.not()
	for p.skipName("and") {
		n = newNode(opAnd, 0, n, p.not())
	}
	return n
}

func (p *parser) not() *node {
	if !p.skipName("not") {
		return p.comparison()
	}
	p.enter()
	defer p.leave()
	return newNode(opNot, 0, p.not())
}

func (p *parser) comparison() *node {
	n := newNode(opCompare, p.line(), p.binary(0))
	for {
		next := p.tokens[min(p.at+1, len(p.tokens)-1)]
		switch {
		case p.isOp("==", "!=", "<", "<=", ">", ">="), p.isName("in"):
			n.names = append(n.names, p.next().text)
		case p.isName("not") && next.kind == tokName && next.text == "in":
			n.names = append(n.names, "not in")
			p.at += 2
		case len(n.names) == 0:
			return n.kids[0]
		default:
			return n
		}
		n.kids = append(n.kids, p.binary(0))
	}
}

// levels are the binary operators, from low to high precedence.
//
//nolint:gochecknoglobals // a table
var levels = [][]string{{"+", "-"}, {"~"}, {"*", "/", "//", "%"}}

// binary parses chains of the operators of a level. The operands of + and ~ are joined
// in one node: a long text is written without being added two by two.
func (p *parser) binary(level int) *node {
	if level == len(levels) {
		n := p.unary(true)
		for p.isOp("**") { // from left to right, unlike Python
			t := p.next()
			n = newNode(opArith, t.line, n, p.unary(true))
			n.text = t.text
		}
		return n
	}
	n := p.binary(level + 1)
	for p.isOp(levels[level]...) {
		t := p.next()
		op := opArith
		switch t.text {
		case "+":
			op = opSum
		case "~":
			op = opConcat
		}
		right := p.binary(level + 1)
		if op != opArith && n.op == op {
			n.kids = append(n.kids, right)
		} else {
			n = newNode(op, t.line, n, right)
			n.text = t.text
		}
	}
	return n
}

func (p *parser) unary(withFilters bool) *node {
	p.enter()
	defer p.leave()
	var n *node
	if p.isOp("-", "+") {
		t := p.next()
		n = newNode(opSign, t.line, p.unary(false))
		n.text = t.text
		n = folded(n)
	} else {
		n = p.primary()
	}
	n = p.postfix(n)
	if withFilters {
		n = p.filters(n)
	}
	return n
}

func (p *parser) primary() *node {
	line := p.line()
	constant := func(v Value) *node { return &node{op: opConst, value: v, line: line} }
	switch t := p.peek(); {
	case t.kind == tokName:
		p.at++
		switch t.text {
		case "true", "True":
			return constant(Bool(true))
		case "false", "False":
			return constant(Bool(false))
		case "none", "None":
			return constant(None())
		}
		return p.name(t.text)
	case t.kind == tokString:
		var s strings.Builder
		for p.peek().kind == tokString {
			t := p.next()
			if t.unsupported != "" {
				n := newNode(opUnsupported, t.line)
				n.text = t.unsupported
				return n
			}
			s.WriteString(t.text)
		}
		return constant(String(s.String()))
	case t.kind == tokNumber:
		return constant(p.next().value)
	case p.skipOp("("):
		if p.skipOp(")") {
			return constant(tuple())
		}
		n := p.tuple()
		p.wantOp(")")
		return n
	case p.skipOp("["):
		n := newNode(opList, line)
		p.list("]", func() { n.kids = append(n.kids, p.expression()) })
		return folded(n)
	case p.skipOp("{"):
		n := newNode(opDict, line)
		p.list("}", func() {
			key := p.expression()
			p.wantOp(":")
			n.kids = append(n.kids, key, p.expression())
		})
		return folded(n)
	}
	return p.raise("unexpected %s", p.describe())
}

// postfix parses attributes, indexes and calls behind n.
func (p *parser) postfix(n *node) *node {
	for {
		line := p.line()
		switch {
		case p.skipOp("."):
			switch t := p.peek(); t.kind {
			case tokName:
				n = newNode(opAttr, line, n)
				n.text, n.methods = t.text, p.t.library.named(t.text)
			case tokNumber:
				n = newNode(opItem, line, n, &node{op: opConst, value: t.value})
			default:
				p.raise("expected name or number, got %s", p.describe())
			}
			p.at++
		case p.skipOp("["):
			n = p.subscript(n, line)
		case p.isOp("("):
			n = p.arguments(newNode(opCall, line, n))
		default:
			return n
		}
	}
}

func (p *parser) subscript(of *node, line int) *node {
	var parts [3]*node
	colons := 0
	for !p.skipOp("]") {
		if p.skipOp(":") {
			if colons++; colons > 2 {
				p.raise("too many colons in a slice")
			}
			continue
		}
		if parts[colons] != nil {
			p.raise("expected ']', got %s", p.describe())
		}
		if parts[colons] = p.tuple(); parts[colons].op == opTuple && colons > 0 {
			p.raise("a tuple in a slice")
		}
	}
	if colons > 0 {
		return newNode(opSlice, line, of, parts[0], parts[1], parts[2])
	}
	if parts[0] == nil {
		p.raise("expected subscript expression")
	}
	n := newNode(opItem, line, of, parts[0])
	if c := parts[0]; c.op == opConst && c.value.isString() {
		n.text, n.methods = c.value.str, p.t.library.named(c.value.str)
	}
	return n
}

// arguments parses "(a, b=c)" into n.
func (p *parser) arguments(n *node) *node {
	p.wantOp("(")
	p.list(")", func() {
		switch {
		case p.isOp("*", "**"):
			of := &n.spread[len(p.next().text)-1]
			if *of != nil || n.spread[1] != nil && of == &n.spread[0] {
				p.raise("invalid syntax for function call expression")
			}
			*of = p.expression()
		case p.isAssignment():
			if slices.Contains(n.names, p.peek().text) {
				p.raise("keyword argument repeated: %s", p.peek().text)
			}
			n.names = append(n.names, p.next().text)
			p.at++
			n.args = append(n.args, p.expression())
		case len(n.names) > 0:
			p.raise("positional argument follows keyword argument")
		default:
			n.args = append(n.args, p.expression())
		}
	})
	return n
}

// filters parses the filters, tests and calls behind n.
func (p *parser) filters(n *node) *node {
	for count := 0; ; count++ {
		if count > 4*maxParseDepth {
			p.raise("more than %d filters in a row", 4*maxParseDepth)
		}
		line := p.line()
		switch {
		case p.skipOp("|"):
			name := p.dotted()
			n = newNode(opFilter, line, n)
			n.text, n.builtin = name, p.builtin("filter", name, p.t.library.filters)
			if p.isOp("(") {
				p.arguments(n)
			}
		case p.isName("is"):
			n = p.test(n)
		case p.isOp("("):
			n = p.arguments(newNode(opCall, line, n))
		default:
			return n
		}
	}
}

// dotted parses the name of a filter or test.
func (p *parser) dotted() string {
	parts := []string{p.wantName()}
	for p.skipOp(".") {
		parts = append(parts, p.wantName())
	}
	return strings.Join(parts, ".")
}

// builtin returns a filter or test. One that does not exist is an error unless
// conditional takes it back.
func (p *parser) builtin(what, name string, of map[string]*builtin) *builtin {
	if b := of[name]; b != nil {
		return b
	}
	err := p.fail(SyntaxError, "No %s named '%s'.", what, name)
	p.unknown = append(p.unknown, unknownName{p.scope, err})
	return define("*", func(*renderer, Value, args) Value {
		return raise(RuntimeError, "No %s named '%s' found.", what, name)
	})
}

func (p *parser) test(of *node) *node {
	line := p.next().line
	not := p.skipName("not")
	name := p.dotted()
	n := newNode(opTest, line, of)
	n.text, n.builtin = name, p.builtin("test", name, p.t.library.tests)
	switch k := p.peek().kind; {
	case p.isOp("("):
		p.arguments(n)
	case p.isName("is"):
		p.raise("You cannot chain multiple tests with is")
	case k == tokString, k == tokNumber, p.isOp("[", "{"), k == tokName && !p.isName("else", "or", "and"):
		n.args = []*node{p.postfix(p.primary())}
	}
	if not {
		return newNode(opNot, 0, n)
	}
	return n
}
