// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"slices"
	"strings"
)

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
	case "call":
		p.callBlock(n)
	case "with":
		p.withBlock(n)
	case "filter":
		n.op = opOutput
		body := newNode(opBody, n.line)
		n.kids = []*node{p.filtersOf(body, false)}
		p.text(body, "endfilter")
	case "print":
		all := newNode(opConcat, n.line)
		for p.peek().kind != tokBlockEnd {
			if len(all.kids) > 0 {
				p.wantOp(",")
			}
			all.kids = append(all.kids, p.expression())
		}
		n.op, n.kids = opOutput, []*node{all}
		p.want(tokBlockEnd)
	case "generation": // as in the reference, a block that is called
		n.op, n.kids = opOutput, []*node{newNode(opCall, n.line, p.callerOf(&macro{scope: p.open()}, "endgeneration"))}
	case "break", "continue":
		if p.loops == 0 {
			p.raise("'%s' outside of a loop", name)
		}
		if n.op = opBreak; name == "continue" {
			n.op = opContinue
		}
		p.want(tokBlockEnd)
	case "block":
		n.op = opBlock
		p.blockBlock(n)
	case "autoescape":
		n.op, n.scope = opAutoescape, p.open()
		n.kids = []*node{p.expression()}
		n.body = p.block("endautoescape")
		p.scope = n.scope.around
	case "include", "import", "from", "extends":
		n.op, n.text = opLoad, name
		p.loadTag(n)
	default:
		p.raise("unknown tag '%s'", name)
	}
	return n
}

// blockBlock parses a block. Without inheritance it is rendered where it stands.
func (p *parser) blockBlock(n *node) {
	n.text = p.wantName()
	if p.t.blocks[n.text] != nil {
		p.raise("block '%s' defined twice", n.text)
	}
	p.t.blocks[n.text] = n
	outer, loops, macros := p.scope, p.loops, p.macros
	around := outer.context
	if p.skipName("scoped") {
		around = outer
	}
	n.again = p.skipName("required")
	p.want(tokBlockEnd)
	n.up = 0
	for s := outer; s != around; s = s.around {
		n.up++
	}
	p.scope = around
	n.scope = p.open()
	n.scope.context, n.scope.block = around, n.text
	p.loops, p.macros = 0, nil
	n.body = p.body("endblock")
	p.at++
	p.skipName(n.text)
	p.want(tokBlockEnd)
	p.scope, p.loops, p.macros = outer, loops, macros
	if n.again && slices.ContainsFunc(n.body, func(b *node) bool { return b.op != opData || strings.TrimFunc(b.text, isSpace) != "" }) {
		p.raise("Required blocks can only contain comments or whitespace")
	}
}

// loadTag parses a tag that reads another template. There is no loader: the tag fails when it is reached.
func (p *parser) loadTag(n *node) {
	if n.text == "extends" && p.scope != p.t.scope {
		p.raise("cannot use extend from a non top-level scope")
	}
	n.kids = []*node{p.expression()}
	context := func() bool {
		next := p.tokens[min(p.at+1, len(p.tokens)-1)]
		is := p.isName("with", "without") && next.kind == tokName && next.text == "context"
		if is {
			p.at += 2
		}
		return is
	}
	switch n.text {
	case "include":
		if next := p.tokens[min(p.at+1, len(p.tokens)-1)]; p.isName("ignore") && next.kind == tokName && next.text == "missing" {
			n.again = true
			p.at += 2
		}
		context()
	case "import":
		if !p.skipName("as") {
			p.raise("expected 'as', got %s", p.describe())
		}
		n.names = append(n.names, p.wantTarget())
		p.scope.declare(n.names[0])
		context()
	case "from":
		if !p.skipName("import") {
			p.raise("expected 'import', got %s", p.describe())
		}
		for first := true; first || p.skipOp(","); first = false {
			if context() {
				break
			}
			name := p.wantTarget()
			if strings.HasPrefix(name, "_") {
				p.raise("names starting with an underline can not be imported")
			}
			if p.skipName("as") {
				name = p.wantTarget()
			}
			n.names = append(n.names, name)
			p.scope.declare(name)
			if context() {
				break
			}
		}
	}
	p.want(tokBlockEnd)
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
	sets := p.setsLoop
	defer func() {
		if p.setsLoop > sets {
			p.raise("Can't assign to special loop variable in for-loop target")
		}
	}()
	n.scope = p.open()
	outer := n.scope.around
	target := p.target(false)
	n.slot = n.scope.declare("loop")
	if !p.skipName("in") {
		p.raise("expected 'in', got %s", p.describe())
	}
	p.scope = outer
	n.kids = []*node{target, p.items(p.or, "recursive"), nil}
	p.scope = n.scope
	if p.skipName("if") {
		n.kids[2] = p.expression()
	}
	n.again = p.skipName("recursive")
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
	body := newNode(opBody, n.line)
	n.op, n.kids = opSet, []*node{target, p.filtersOf(body, true)}
	p.text(body, "endset")
}

// text parses the end of a tag and a body, which becomes a text.
func (p *parser) text(n *node, end string) {
	p.scope = n.scope
	n.body = p.outsideLoops(end)
	p.scope = n.scope.around
}

// filtersOf parses the filters behind a text. The first one may stand without "|".
func (p *parser) filtersOf(n *node, withBar bool) *node {
	n.scope = p.open()
	p.scope = n.scope.around
	unknown := len(p.unknown)
	defer func() {
		for i := range p.unknown[unknown:] {
			p.unknown[unknown+i].scope = n.scope // an if around it does not take them back
		}
	}()
	if !withBar {
		p.tokens[p.at-1] = token{kind: tokOp, text: "|", line: p.line()}
		p.at--
	}
	if !p.isOp("|") {
		return n
	}
	return p.filters(n)
}

// withBlock parses variables and the block that they are set in.
func (p *parser) withBlock(n *node) {
	n.op = opWith
	outer := p.scope
	n.scope = p.open()
	for p.peek().kind != tokBlockEnd {
		if len(n.kids) > 0 {
			p.wantOp(",")
		}
		sets := p.setsLoop
		target := p.target(false)
		p.setsLoop = sets // with may set it
		p.wantOp("=")
		p.scope = outer
		n.kids = append(n.kids, target, p.expression())
		p.scope = n.scope
	}
	n.body = p.block("endwith")
	p.scope = outer
}

// callBlock parses a call whose macro gets the block as the macro "caller".
func (p *parser) callBlock(n *node) {
	m := &macro{scope: p.open()}
	if p.isOp("(") {
		p.parameters(m)
	}
	p.scope = m.scope.around
	call := p.expression()
	if call.op != opCall {
		p.raise("expected call")
	}
	n.op, n.kids = opOutput, []*node{call}
	p.scope = m.scope
	call.args, call.names = append(call.args, p.callerOf(m, "endcall")), append(call.names, "caller")
}

// callerOf parses a block as the body of a macro, and returns the macro as an expression.
func (p *parser) callerOf(m *macro, end string) *node {
	n := newNode(opCaller, p.line())
	n.macro = m
	p.macros = append(p.macros, m)
	m.body = p.outsideLoops(end)
	p.macros = p.macros[:len(p.macros)-1]
	p.scope = m.scope.around
	return n
}

// parameters parses "(a, b=1)".
func (p *parser) parameters(m *macro) {
	p.wantOp("(")
	p.list(")", func() {
		name := p.wantTarget()
		if p.sets(name); slices.Contains(m.names, name) {
			p.raise("duplicate argument '%s' in a macro", name)
		}
		m.params, m.names = append(m.params, p.scope.declare(name)), append(m.names, name)
		var byDefault *node
		if p.skipOp("=") {
			byDefault = p.expression()
		} else if n := len(m.defaults); n > 0 && m.defaults[n-1] != nil {
			p.raise("non-default argument follows default argument")
		}
		m.defaults = append(m.defaults, byDefault)
	})
}

func (p *parser) macroBlock(n *node) {
	name := p.wantTarget()
	n.slot = p.scope.declare(name)
	m := &macro{name: name, scope: p.open()}
	n.macro = m
	p.parameters(m)
	p.callerOf(m, "endmacro")
}

// target parses the left side of an assignment: a name, names, or an attribute of a namespace.
func (p *parser) target(withNamespace bool) *node {
	all := []*node{p.oneTarget(withNamespace)}
	if !p.isOp(",") {
		return all[0]
	}
	for p.skipOp(",") {
		if p.isName("in") || p.isOp(")") || p.peek().kind == tokBlockEnd {
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
	if next := p.tokens[min(p.at+1, len(p.tokens)-1)]; withNamespace && p.peek().kind == tokName && next.kind == tokOp && next.text == "." {
		of := p.name(p.wantTarget())
		p.wantOp(".")
		return &node{op: opAttr, text: p.wantName(), kids: []*node{of}}
	}
	name := p.wantTarget()
	if p.sets(name); name == "loop" {
		p.setsLoop++
	}
	return &node{op: opName, text: name, slot: p.scope.declare(name)}
}
