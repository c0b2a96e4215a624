// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
)

// maxParseDepth limits the nesting of expressions and blocks.
const maxParseDepth = 120

// parser makes nodes of tokens. Its methods panic with an *Error.
type parser struct {
	t        *Template
	tokens   []token
	at       int
	depth    int
	loops    int    // around the current statement
	setsLoop int    // how many assignments set a variable named loop
	scope    *scope // the current one
	scopes   []*scope
	reads    []read
	macros   []*macro // around the current statement
	unknown  []unknownName
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
	p.t.scope.analyze(nil, func(t *symbols) { t.statements(p.t.body) })
	for _, s := range p.scopes {
		for name, d := range s.slots {
			if up, next := s.around.find(name); next != nil {
				d.up, d.next = up+1, next
			}
		}
	}
	for _, r := range p.reads {
		r.n.up, r.n.decl = r.in.find(r.n.text)
		r.n.again = r.n.decl != nil && r.n.decl.block != r.in.block
		switch {
		case r.n.decl != nil:
		case r.n.text == "self":
			r.n.op, r.n.up, r.n.scope = opSelf, r.in.depth(), r.in.context
		case r.n.text == "super" && r.in.block != "":
			r.n.op, r.n.value = opConst, undefined("there is no parent block called '"+r.in.block+"'.")
		}
	}
}

// conditional accepts the unknown names of this scope from index n on: they fail when they are reached.
func (p *parser) conditional(n int) {
	p.unknown = append(p.unknown[:n],
		slices.DeleteFunc(p.unknown[n:], func(u unknownName) bool { return u.scope == p.scope })...)
}

// open begins a scope.
func (p *parser) open() *scope {
	around := p.scope
	p.scope = &scope{around: around, slots: map[string]*decl{}}
	if p.scope.context = p.scope; around != nil {
		p.scope.context, p.scope.block = around.context, around.block
	}
	p.scopes = append(p.scopes, p.scope)
	return p.scope
}

// name returns an expression that reads a variable.
func (p *parser) name(name string) *node {
	n := &node{op: opName, text: name, line: p.line()}
	p.reads = append(p.reads, read{n, p.scope})
	for _, m := range p.macros {
		s := m.special(name)
		if s == nil || s.read || s.set {
			continue
		}
		switch i := slices.Index(m.names, name); {
		case i < 0:
			s.read, s.slot = true, m.scope.declare(name)
		case name == "caller" && m.defaults[i] == nil:
			p.raise(`When defining macros or call blocks the special "caller" argument must be omitted or be given a default.`)
		}
	}
	return n
}

// sets notes that the macros around set a name.
func (p *parser) sets(name string) {
	for _, m := range p.macros {
		if s := m.special(name); s != nil {
			s.set = true
		}
	}
}

// special returns the variable of a name that has a meaning of its own in macros, nil for other names.
func (m *macro) special(name string) *special {
	switch name {
	case "caller":
		return &m.caller
	case "varargs":
		return &m.varargs
	case "kwargs":
		return &m.kwargs
	}
	return nil
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

// raise ends the parsing with a syntax error in the current line. It never returns.
func (p *parser) raise(format string, a ...any) *node { panic(p.fail(SyntaxError, format, a...)) }

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
		p.raise("expected %q, got %s", op, p.describe())
	}
}

func (p *parser) wantName() string {
	if p.peek().kind != tokName {
		p.raise("expected a name, got %s", p.describe())
	}
	return p.next().text
}

// wantTarget returns a name that can be set.
func (p *parser) wantTarget() string {
	if p.isName("true", "false", "none", "True", "False", "None") {
		p.raise("can't assign to '%s'", p.peek().text)
	}
	return p.wantName()
}

func (p *parser) want(k tokenKind) {
	if p.peek().kind != k {
		p.raise("expected the end of the tag, got %s", p.describe())
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
		p.raise("nested deeper than %d", maxParseDepth)
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
				p.raise("unexpected end of template, expected '%s'", ends[0])
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
