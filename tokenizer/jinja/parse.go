// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
)

// maxParseDepth limits the nesting of expressions and blocks.
const maxParseDepth = 120

// parser makes nodes of tokens. Its methods panic with an *Error.
type parser struct {
	t       *Template
	tokens  []token
	at      int
	depth   int
	loops   int    // around the current statement
	scope   *scope // the current one
	scopes  []*scope
	reads   []read
	macros  []*macro // around the current statement
	unknown []unknownName
}

// read is a name whose slots are looked up when all scopes around it are parsed.
type read struct {
	n  *node
	in *scope
}

// unknownName is the use of a filter or test that does not exist. Jinja2 refuses such a
// template, unless the use stands in an if statement or expression of the same scope:
// then it fails when it is reached.
type unknownName struct {
	scope *scope
	err   *Error
}

func (p *parser) parse() {
	p.t.scope = p.open()
	p.t.body = p.body()
	if len(p.unknown) > 0 {
		panic(p.unknown[0].err)
	}
	for _, s := range p.scopes {
		for name, d := range s.slots {
			if up, next := s.around.find(name); next != nil {
				d.up, d.next = up+1, next
			}
		}
	}
	for _, r := range p.reads {
		r.n.up, r.n.decl = r.in.find(r.n.text)
	}
}

// conditional accepts the unknown names of this scope from index n on: they fail when they are reached.
func (p *parser) conditional(n int) {
	p.unknown = append(p.unknown[:n],
		slices.DeleteFunc(p.unknown[n:], func(u unknownName) bool { return u.scope == p.scope })...)
}

// open begins a scope.
func (p *parser) open() *scope {
	p.scope = &scope{around: p.scope, slots: map[string]*decl{}}
	p.scopes = append(p.scopes, p.scope)
	return p.scope
}

// name returns an expression that reads a variable.
func (p *parser) name(name string) *node {
	n := &node{op: opName, text: name, line: p.line()}
	p.reads = append(p.reads, read{n, p.scope})
	for _, m := range p.macros {
		if name == "caller" || !slices.Contains(m.names, name) && (name == "varargs" || name == "kwargs") {
			p.raise(Unsupported, "'%s' in a macro", name)
		}
	}
	return n
}

func (p *parser) peek() *token { return &p.tokens[p.at] }
func (p *parser) line() int    { return p.peek().line }

func (p *parser) next() *token {
	t := p.peek()
	if t.kind != tokEOF {
		p.at++
	}
	return t
}

func (p *parser) fail(k Kind, format string, a ...any) *Error {
	e := errorf(k, format, a...)
	e.Line = p.line()
	return e
}

// raise ends the parsing with an error in the current line. It never returns.
func (p *parser) raise(k Kind, format string, a ...any) *node { panic(p.fail(k, format, a...)) }

func (p *parser) isOp(ops ...string) bool {
	t := p.peek()
	return t.kind == tokOp && slices.Contains(ops, t.text)
}

func (p *parser) isName(names ...string) bool {
	t := p.peek()
	return t.kind == tokName && slices.Contains(names, t.text)
}

// isAssignment reports whether the tokens are a name and "=".
func (p *parser) isAssignment() bool {
	next := p.tokens[min(p.at+1, len(p.tokens)-1)]
	return p.peek().kind == tokName && next.kind == tokOp && next.text == "="
}

func (p *parser) skipOp(op string) bool {
	is := p.isOp(op)
	if is {
		p.at++
	}
	return is
}

func (p *parser) skipName(name string) bool {
	is := p.isName(name)
	if is {
		p.at++
	}
	return is
}

func (p *parser) wantOp(op string) {
	if !p.skipOp(op) {
		p.raise(SyntaxError, "expected %q, got %s", op, p.describe())
	}
}

func (p *parser) wantName() string {
	if p.peek().kind != tokName {
		p.raise(SyntaxError, "expected a name, got %s", p.describe())
	}
	return p.next().text
}

func (p *parser) want(k tokenKind) {
	if p.peek().kind != k {
		p.raise(SyntaxError, "expected the end of the tag, got %s", p.describe())
	}
	p.at++
}

// describe names the current token.
func (p *parser) describe() string {
	switch t := p.peek(); t.kind {
	case tokEOF:
		return "the end of the template"
	case tokBlockEnd, tokVarEnd:
		return "the end of the tag"
	case tokNumber:
		return "a number"
	default:
		return "'" + t.text + "'"
	}
}

// list parses elements with commas between them up to a closing bracket, which is read.
func (p *parser) list(end string, element func()) {
	for first := true; !p.skipOp(end); first = false {
		if !first {
			if p.wantOp(","); p.skipOp(end) {
				return
			}
		}
		element()
	}
}

// enter counts a level of nesting; leave goes back.
func (p *parser) enter() {
	if p.depth++; p.depth > maxParseDepth {
		p.raise(SyntaxError, "nested deeper than %d", maxParseDepth)
	}
}

func (p *parser) leave() { p.depth-- }

// body parses up to the end, or up to a block that begins with one of the names in
// ends: the name is the next token then.
func (p *parser) body(ends ...string) (body []*node) {
	p.enter()
	defer p.leave()
	for {
		switch t := p.next(); t.kind {
		case tokEOF:
			if len(ends) > 0 {
				p.raise(SyntaxError, "unexpected end of template, expected '%s'", ends[0])
			}
			return body
		case tokData:
			body = append(body, &node{op: opData, text: t.text})
		case tokVarBegin:
			body = append(body, newNode(opOutput, t.line, p.tuple()))
			p.want(tokVarEnd)
		case tokBlockBegin:
			if p.isName(ends...) {
				return body
			}
			body = append(body, p.statement())
		}
	}
}

// block parses the end of a tag, a body and the tag that ends it.
func (p *parser) block(end string) []*node {
	p.want(tokBlockEnd)
	body := p.body(end)
	p.at++
	p.want(tokBlockEnd)
	return body
}

// outsideLoops parses a block in which break and continue cannot end a loop around it.
func (p *parser) outsideLoops(end string) []*node {
	loops := p.loops
	p.loops = 0
	body := p.block(end)
	p.loops = loops
	return body
}

func (p *parser) statement() *node {
	n := &node{line: p.line()}
	switch name := p.wantName(); name {
	case "if":
		n.op = opIf
		p.ifBlock(n)
	case "for":
		n.op = opFor
		p.forBlock(n)
	case "set":
		p.setBlock(n)
	case "macro":
		n.op = opMacro
		p.macroBlock(n)
	case "call", "with", "filter":
		p.raise(Unsupported, "the tag '%s'", name)
	case "generation":
		n.op, n.scope = opScope, p.open()
		n.body = p.outsideLoops("endgeneration")
		p.scope = n.scope.around
	case "break", "continue":
		if p.loops == 0 {
			p.raise(SyntaxError, "'%s' outside of a loop", name)
		}
		if n.op = opBreak; name == "continue" {
			n.op = opContinue
		}
		p.want(tokBlockEnd)
	default:
		p.raise(SyntaxError, "unknown tag '%s'", name)
	}
	return n
}

// ifBlock makes each elif an if in the else of the one before it.
func (p *parser) ifBlock(n *node) {
	unknown := len(p.unknown)
	for {
		n.kids = []*node{p.tuple()}
		p.want(tokBlockEnd)
		n.body = p.body("endif", "elif", "else")
		switch line := p.line(); p.next().text {
		case "elif":
			next := newNode(opIf, line)
			n.other = []*node{next}
			n = next
			continue
		case "else":
			n.other = p.block("endif")
		default:
			p.want(tokBlockEnd)
		}
		p.conditional(unknown)
		return
	}
}

func (p *parser) forBlock(n *node) {
	n.scope = p.open()
	outer := n.scope.around
	target := p.target(false)
	n.slot = n.scope.declare("loop")
	if !p.skipName("in") {
		p.raise(SyntaxError, "expected 'in', got %s", p.describe())
	}
	p.scope = outer
	n.kids = []*node{target, p.items(p.or, "recursive"), nil}
	p.scope = n.scope
	if p.skipName("if") {
		n.kids[2] = p.expression()
	}
	if p.isName("recursive") {
		p.raise(Unsupported, "recursive loops")
	}
	p.want(tokBlockEnd)
	p.loops++
	n.body = p.body("endfor", "else")
	p.loops--
	p.scope = outer
	n.others = p.open()
	if p.next().text == "else" {
		n.other = p.block("endfor")
	} else {
		p.want(tokBlockEnd)
	}
	p.scope = outer
}

func (p *parser) setBlock(n *node) {
	target := p.target(true)
	if p.skipOp("=") {
		n.op, n.kids = opSet, []*node{target, p.tuple()}
		p.want(tokBlockEnd)
		return
	}
	if p.isOp("|") {
		p.raise(Unsupported, "a filter of a set block")
	}
	n.op, n.kids = opSetBlock, []*node{target}
	n.scope = p.open()
	n.body = p.block("endset")
	p.scope = n.scope.around
}

// parameters parses "(a, b=1)".
func (p *parser) parameters(m *macro) {
	p.wantOp("(")
	p.list(")", func() {
		name := p.wantName()
		if slices.Contains(m.names, name) {
			p.raise(SyntaxError, "duplicate argument '%s' in a macro", name)
		}
		m.params, m.names = append(m.params, p.scope.declare(name)), append(m.names, name)
		var byDefault *node
		if p.skipOp("=") {
			byDefault = p.expression()
		} else if n := len(m.defaults); n > 0 && m.defaults[n-1] != nil {
			p.raise(SyntaxError, "non-default argument follows default argument")
		}
		m.defaults = append(m.defaults, byDefault)
	})
}

func (p *parser) macroBlock(n *node) {
	name := p.wantName()
	n.slot = p.scope.declare(name)
	m := &macro{name: name, scope: p.open()}
	n.macro = m
	p.parameters(m)
	p.macros = append(p.macros, m)
	m.body = p.outsideLoops("endmacro")
	p.macros = p.macros[:len(p.macros)-1]
	p.scope = m.scope.around
}

// target parses the left side of an assignment: a name, names, or an attribute of a namespace.
func (p *parser) target(withNamespace bool) *node {
	all := []*node{p.oneTarget(withNamespace)}
	if !p.isOp(",") {
		return all[0]
	}
	for p.skipOp(",") {
		if p.isName("in") || p.isOp("=", ")") || p.peek().kind == tokBlockEnd {
			break
		}
		all = append(all, p.oneTarget(withNamespace))
	}
	return &node{op: opTuple, kids: all}
}

func (p *parser) oneTarget(withNamespace bool) *node {
	if p.skipOp("(") {
		p.enter()
		defer p.leave()
		t := p.target(withNamespace)
		p.wantOp(")")
		return t
	}
	name := p.wantName()
	if withNamespace && p.skipOp(".") {
		return &node{op: opAttr, text: p.wantName(), kids: []*node{p.name(name)}}
	}
	return &node{op: opName, text: name, slot: p.scope.declare(name)}
}
