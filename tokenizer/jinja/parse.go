// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"errors"
	"slices"
	"strings"
)

// maxParseDepth bounds the nesting of expressions and blocks.
const maxParseDepth = 120

// Template is a parsed template. It is immutable; any number of goroutines may
// use it at once.
type Template struct {
	name  string
	body  []stmt
	scope *names
	names []string // by the numbers that stand for them in the tree
	loads map[string]bool
}

// Parse parses a template. name is for its errors, which are of type [*Error]
// and kind [SyntaxError] or [LimitError].
func Parse(name, text string) (*Template, error) {
	tokens, err := lex(text)
	if err == nil {
		p := &parser{tokens: tokens, ids: map[string]int{}, methods: tablesOfMethods(), t: &Template{name: name, loads: map[string]bool{}}}
		p.t.scope = p.open()
		if p.t.body, err = p.body(); err == nil && len(p.unknown) > 0 {
			err = p.unknown[0].err
		}
		if err == nil {
			p.resolve()
			return p.t, nil
		}
	}
	if e, ok := errors.AsType[*Error](err); ok {
		e.Name = name
	}
	return nil, err
}

// Uses reports whether the template reads a variable of that name anywhere.
func (t *Template) Uses(name string) bool { return t.loads[name] }

type parser struct {
	tokens []token
	at     int
	depth  int
	loop   int // loops around
	ids    map[string]int
	scope  *names // that is being parsed
	scopes []*names
	reads  []read
	macros []*macro // around
	t      *Template

	unknown []unknownName // filters and tests that make the template invalid

	methods methodTables
}

func (p *parser) id(name string) int {
	if id, ok := p.ids[name]; ok {
		return id
	}
	id := len(p.t.names)
	p.ids[name] = id
	p.t.names = append(p.t.names, name)
	return id
}

// unknownName is the use of a filter or test that does not exist.
type unknownName struct {
	scope *names // around the use
	err   error
}

// noSuch records the use of an unknown filter or test. Jinja2 refuses such a template
// when it compiles it, except for uses inside of an if: see [parser.conditional]. Those
// fail with the returned error.
func (p *parser) noSuch(what, name string) func() error {
	p.unknown = append(p.unknown, unknownName{p.scope, p.fail("No %s named '%s'.", what, name)})
	return func() error { return errorf(RuntimeError, "No %s named '%s' found.", what, name) }
}

// conditional accepts the unknown filters and tests behind the first n: they stand in
// an if statement or expression, where they only fail when they are evaluated. Those of
// an inner scope stay refused, as in Jinja2.
func (p *parser) conditional(n int) {
	p.unknown = append(p.unknown[:n], slices.DeleteFunc(p.unknown[n:], func(u unknownName) bool { return u.scope == p.scope })...)
}

// open begins a scope; close ends it.
func (p *parser) open() *names {
	p.scope = &names{around: p.scope}
	p.scopes = append(p.scopes, p.scope)
	return p.scope
}

func (p *parser) close() { p.scope = p.scope.around }

// name returns an expression that reads a variable.
func (p *parser) name(name string) *nameExpr {
	e := &nameExpr{id: p.id(name), name: name}
	p.reads = append(p.reads, read{e, p.scope})
	for _, m := range p.macros {
		m.note(name)
	}
	return e
}

// scoped parses a block with variables of its own.
func (p *parser) scoped(end string) (*names, []stmt, error) {
	s := p.open()
	body, err := p.block(end)
	p.close()
	return s, body, err
}

func (p *parser) peek() *token { return &p.tokens[p.at] }

func (p *parser) next() *token {
	t := &p.tokens[p.at]
	if t.kind != tokEOF {
		p.at++
	}
	return t
}

func (p *parser) fail(format string, a ...any) error {
	e := errorf(SyntaxError, format, a...)
	e.Line = p.peek().line
	return e
}

func (p *parser) isOp(op string) bool {
	t := p.peek()
	return t.kind == tokOp && t.text == op
}

func (p *parser) isName(names ...string) bool {
	t := p.peek()
	return t.kind == tokName && slices.Contains(names, t.text)
}

func (p *parser) skipOp(op string) bool {
	if p.isOp(op) {
		p.at++
		return true
	}
	return false
}

func (p *parser) skipName(name string) bool {
	if p.isName(name) {
		p.at++
		return true
	}
	return false
}

func (p *parser) wantOp(op string) error {
	if !p.skipOp(op) {
		return p.fail("expected %q, got %s", op, describe(p.peek()))
	}
	return nil
}

func (p *parser) wantName() (string, error) {
	if p.peek().kind != tokName {
		return "", p.fail("expected a name, got %s", describe(p.peek()))
	}
	return p.next().text, nil
}

func (p *parser) want(k tokenKind) error {
	if p.peek().kind != k {
		return p.fail("expected the end of the tag, got %s", describe(p.peek()))
	}
	p.at++
	return nil
}

func describe(t *token) string {
	switch t.kind {
	case tokEOF:
		return "the end of the template"
	case tokBlockEnd, tokVarEnd:
		return "the end of the tag"
	case tokNumber:
		return "a number"
	}
	return "'" + t.text + "'"
}

func (p *parser) enter() error {
	if p.depth++; p.depth > maxParseDepth {
		return p.fail("nested deeper than %d", maxParseDepth)
	}
	return nil
}

// body parses up to a block that begins with one of the names in ends, which is
// left to the caller with its name as the next token, or to the end.
func (p *parser) body(ends ...string) ([]stmt, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	var body []stmt
	for {
		switch t := p.next(); t.kind {
		case tokEOF:
			if len(ends) > 0 {
				return nil, p.fail("unexpected end of template, expected '%s'", ends[0])
			}
			return body, nil
		case tokData:
			body = append(body, &dataStmt{text: t.text})
		case tokVarBegin:
			e, err := p.tuple()
			if err != nil {
				return nil, err
			}
			if err := p.want(tokVarEnd); err != nil {
				return nil, err
			}
			body = append(body, newOutput(e, t.line))
		case tokBlockBegin:
			if p.isName(ends...) {
				return body, nil
			}
			s, err := p.statement()
			if err != nil {
				return nil, err
			}
			if s != nil {
				body = append(body, s)
			}
		}
	}
}

// block parses a body and the tag that ends it.
func (p *parser) block(end string) ([]stmt, error) {
	if err := p.want(tokBlockEnd); err != nil {
		return nil, err
	}
	body, err := p.body(end)
	if err != nil {
		return nil, err
	}
	p.at++
	return body, p.want(tokBlockEnd)
}

func (p *parser) statement() (stmt, error) {
	line := p.peek().line
	name, err := p.wantName()
	if err != nil {
		return nil, err
	}
	switch name {
	case "if":
		return p.ifBlock()
	case "for":
		return p.forBlock(line)
	case "set":
		return p.setBlock(line)
	case "macro":
		return p.macroBlock()
	case "call":
		return p.callBlock(line)
	case "with":
		return p.withBlock()
	case "filter":
		f, err := p.filters(nil, false)
		if err != nil {
			return nil, err
		}
		s, body, err := p.scoped("endfilter")
		return &filterStmt{names: s, body: body, filter: f, line: line}, err
	case "generation":
		loop := p.loop
		p.loop = 0
		s, body, err := p.scoped("endgeneration")
		p.loop = loop
		return &scopeStmt{s, body}, err
	case "break", "continue":
		if p.loop == 0 {
			return nil, p.fail("'%s' outside of a loop", name)
		}
		return &jumpStmt{name == "break"}, p.want(tokBlockEnd)
	}
	return nil, p.fail("unknown tag '%s'", name)
}

func (p *parser) ifBlock() (stmt, error) {
	s := &ifStmt{}
	defer p.conditional(len(p.unknown))
	for {
		cond, err := p.tuple()
		if err != nil {
			return nil, err
		}
		if err := p.want(tokBlockEnd); err != nil {
			return nil, err
		}
		body, err := p.body("endif", "elif", "else")
		if err != nil {
			return nil, err
		}
		s.branches = append(s.branches, branch{cond, body})
		switch p.next().text {
		case "elif":
			continue
		case "else":
			s.otherwise, err = p.block("endif")
			return s, err
		}
		return s, p.want(tokBlockEnd)
	}
}

func (p *parser) forBlock(line int) (stmt, error) {
	outer := p.scope
	s := &forStmt{line: line, names: p.open()}
	inner := p.scope
	defer func() { p.scope = outer }()
	var err error
	if s.target, err = p.target(false); err != nil {
		return nil, err
	}
	s.loop = s.names.declare(p.id("loop"))
	s.always = len(s.names.slots)
	if !p.skipName("in") {
		return nil, p.fail("expected 'in', got %s", describe(p.peek()))
	}
	p.scope = outer
	if s.iter, err = p.items(p.or, "recursive"); err != nil {
		return nil, err
	}
	p.scope = inner
	if p.skipName("if") {
		if s.test, err = p.expression(); err != nil {
			return nil, err
		}
	}
	s.recursive = p.skipName("recursive")
	if err := p.want(tokBlockEnd); err != nil {
		return nil, err
	}
	p.loop++
	s.body, err = p.body("endfor", "else")
	p.loop--
	if err != nil {
		return nil, err
	}
	p.scope = outer
	s.others = p.open()
	if p.next().text == "else" {
		s.otherwise, err = p.block("endfor")
		return s, err
	}
	return s, p.want(tokBlockEnd)
}

func (p *parser) setBlock(line int) (stmt, error) {
	target, err := p.target(true)
	if err != nil {
		return nil, err
	}
	if p.skipOp("=") {
		e, err := p.tuple()
		if err != nil {
			return nil, err
		}
		return &setStmt{target: target, value: e, line: line}, p.want(tokBlockEnd)
	}
	s := &setBlockStmt{target: target, line: line}
	if p.isOp("|") {
		if s.filter, err = p.filters(nil, true); err != nil {
			return nil, err
		}
	}
	s.names, s.body, err = p.scoped("endset")
	return s, err
}

// parameters parses "(a, b=1)".
func (p *parser) parameters(m *macro) error {
	if err := p.wantOp("("); err != nil {
		return err
	}
	for !p.skipOp(")") {
		if len(m.params) > 0 {
			if err := p.wantOp(","); err != nil {
				return err
			}
		}
		name, err := p.wantName()
		if err != nil {
			return err
		}
		if slices.Contains(m.names, name) {
			return p.fail("duplicate argument '%s' in a macro", name)
		}
		m.params, m.names = append(m.params, p.scope.declare(p.id(name))), append(m.names, name)
		var def expr
		if p.skipOp("=") {
			if def, err = p.expression(); err != nil {
				return err
			}
		} else if len(m.defaults) > 0 && m.defaults[len(m.defaults)-1] != nil {
			return p.fail("non-default argument follows default argument")
		}
		m.defaults = append(m.defaults, def)
	}
	return nil
}

// macroOf begins a macro, and its scope.
func (p *parser) macroOf(name string) *macro {
	s := p.open()
	return &macro{name: name, scope: s, varargs: s.declare(p.id("varargs")), kwargs: s.declare(p.id("kwargs")), caller: s.declare(p.id("caller"))}
}

func (p *parser) macroBlock() (stmt, error) {
	name, err := p.wantName()
	if err != nil {
		return nil, err
	}
	slot := p.scope.declare(p.id(name))
	m := p.macroOf(name)
	defer p.close()
	if err := p.parameters(m); err != nil {
		return nil, err
	}
	loop := p.loop
	p.loop = 0
	p.macros = append(p.macros, m)
	m.body, err = p.block("endmacro")
	p.macros = p.macros[:len(p.macros)-1]
	p.loop = loop
	if i := slices.Index(m.names, "caller"); err == nil && m.reads.ownCaller && m.defaults[i] == nil {
		return nil, p.fail("When defining macros or call blocks the special \"caller\" argument must be omitted or be given a default.")
	}
	return &macroStmt{slot: slot, macro: m}, err
}

func (p *parser) callBlock(line int) (stmt, error) {
	m := p.macroOf("caller")
	inner := p.scope
	defer func() { p.scope = inner.around }()
	if p.isOp("(") {
		if err := p.parameters(m); err != nil {
			return nil, err
		}
	}
	p.scope = inner.around
	e, err := p.expression()
	if err != nil {
		return nil, err
	}
	p.scope = inner
	call, ok := e.(*callExpr)
	if !ok {
		return nil, p.fail("expected call")
	}
	loop := p.loop
	p.loop = 0
	p.macros = append(p.macros, m)
	m.body, err = p.block("endcall")
	p.macros = p.macros[:len(p.macros)-1]
	p.loop = loop
	return &callStmt{call: call, caller: m, line: line}, err
}

func (p *parser) withBlock() (stmt, error) {
	s := &withStmt{names: p.open()}
	inner := p.scope
	defer func() { p.scope = inner.around }()
	for p.peek().kind != tokBlockEnd {
		if len(s.values) > 0 {
			if err := p.wantOp(","); err != nil {
				return nil, err
			}
		}
		t, err := p.target(false)
		if err != nil {
			return nil, err
		}
		if err := p.wantOp("="); err != nil {
			return nil, err
		}
		p.scope = inner.around
		e, err := p.expression()
		if err != nil {
			return nil, err
		}
		p.scope = inner
		s.targets, s.values = append(s.targets, t), append(s.values, e)
	}
	var err error
	s.body, err = p.block("endwith")
	return s, err
}

// target parses what is assigned to: a name, names, or an attribute of a namespace.
func (p *parser) target(withNamespace bool) (target, error) {
	first, err := p.oneTarget(withNamespace)
	if err != nil || !p.isOp(",") {
		return first, err
	}
	all := []target{first}
	for p.skipOp(",") {
		if p.isName("in") || p.isOp("=") || p.isOp(")") || p.peek().kind == tokBlockEnd {
			break
		}
		t, err := p.oneTarget(withNamespace)
		if err != nil {
			return target{}, err
		}
		all = append(all, t)
	}
	return target{parts: all}, nil
}

// oneTarget parses a name, or targets in parentheses.
func (p *parser) oneTarget(withNamespace bool) (target, error) {
	if p.skipOp("(") {
		if err := p.enter(); err != nil {
			return target{}, err
		}
		defer func() { p.depth-- }()
		t, err := p.target(withNamespace)
		if err != nil {
			return target{}, err
		}
		return t, p.wantOp(")")
	}
	name, err := p.wantName()
	if err != nil {
		return target{}, err
	}
	t := target{id: p.id(name)}
	if withNamespace && p.skipOp(".") {
		if t.attr, err = p.wantName(); err != nil {
			return target{}, err
		}
		t.of = p.name(name)
		return t, nil
	}
	t.slot = p.scope.declare(t.id)
	return t, nil
}

// tuple parses an expression, or several with commas between them: a tuple.
func (p *parser) tuple() (expr, error) { return p.items(p.expression) }

func (p *parser) items(one func() (expr, error), ends ...string) (expr, error) {
	first, err := one()
	if err != nil || !p.isOp(",") {
		return first, err
	}
	items := []expr{first}
	for p.skipOp(",") {
		t := p.peek()
		if t.kind == tokBlockEnd || t.kind == tokVarEnd || p.isOp(")") || p.isName(ends...) {
			break
		}
		e, err := one()
		if err != nil {
			return nil, err
		}
		items = append(items, e)
	}
	return folded(&listExpr{items: items, tuple: true}), nil
}

// folded makes a list, tuple or dictionary of constants one constant: nothing can
// change it.
func folded(e expr) expr {
	constants := func(of []expr) ([]Value, bool) {
		values := make([]Value, len(of))
		for i, e := range of {
			c, ok := e.(*constExpr)
			if !ok {
				return nil, false
			}
			values[i] = c.value
		}
		return values, true
	}
	switch e := e.(type) {
	case *listExpr:
		if items, ok := constants(e.items); ok && e.tuple {
			return &constExpr{tupleOf(items...)}
		} else if ok {
			return &constExpr{List(items...)}
		}
	case *dictExpr:
		keys, ok := constants(e.keys)
		values, also := constants(e.values)
		if !ok || !also || slices.ContainsFunc(keys, func(k Value) bool { return !k.isString() }) {
			return e
		}
		d := NewDict(len(keys))
		for i, k := range keys {
			d.Set(k.str, values[i])
		}
		return &constExpr{FromDict(d)}
	case *unaryExpr:
		if c, ok := e.of.(*constExpr); ok && e.minus && (c.value.kind == kindFloat || c.value.kind == kindInt && c.value.num != 1<<63) {
			if c.value.kind == kindFloat {
				return &constExpr{Float(-c.value.float())}
			}
			return &constExpr{Int(-c.value.int())}
		}
	}
	return e
}

func (p *parser) expression() (expr, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	unknown := len(p.unknown)
	e, err := p.or()
	if err != nil {
		return nil, err
	}
	for p.skipName("if") {
		defer p.conditional(unknown)
		cond, err := p.or()
		if err != nil {
			return nil, err
		}
		var other expr
		if p.skipName("else") {
			if other, err = p.expression(); err != nil {
				return nil, err
			}
		}
		e = &condExpr{cond, e, other}
	}
	return e, nil
}

func (p *parser) or() (expr, error) {
	e, err := p.and()
	for err == nil && p.skipName("or") {
		var r expr
		r, err = p.and()
		e = &logicExpr{left: e, right: r, or: true}
	}
	return e, err
}

func (p *parser) and() (expr, error) {
	e, err := p.not()
	for err == nil && p.skipName("and") {
		var r expr
		r, err = p.not()
		e = &logicExpr{left: e, right: r}
	}
	return e, err
}

func (p *parser) not() (expr, error) {
	if p.isName("not") {
		p.at++
		if err := p.enter(); err != nil {
			return nil, err
		}
		defer func() { p.depth-- }()
		e, err := p.not()
		return &notExpr{e}, err
	}
	return p.comparison()
}

func (p *parser) comparison() (expr, error) {
	e, err := p.sum()
	if err != nil {
		return nil, err
	}
	c := &compareExpr{first: e, line: p.peek().line}
	for {
		op := noComparison
		switch t := p.peek(); {
		case t.kind == tokOp:
			if op = comparisonOf(t.text); op != noComparison {
				p.at++
			}
		case p.isName("in"):
			op = isIn
			p.at++
		case p.isName("not") && p.tokens[p.at+1].kind == tokName && p.tokens[p.at+1].text == "in":
			op = notIn
			p.at += 2
		}
		if op == noComparison {
			break
		}
		r, err := p.sum()
		if err != nil {
			return nil, err
		}
		c.ops, c.rest = append(c.ops, op), append(c.rest, r)
	}
	if len(c.ops) == 0 {
		return e, nil
	}
	return c, nil
}

// binary parses a chain of operators of one level.
func (p *parser) binary(of func() (expr, error), ops ...string) (expr, error) {
	e, err := of()
	for err == nil {
		t := p.peek()
		if t.kind != tokOp || !slices.Contains(ops, t.text) {
			break
		}
		p.at++
		var r expr
		r, err = of()
		e = &binaryExpr{op: t.text, left: e, right: r, line: t.line}
	}
	return e, err
}

func (p *parser) sum() (expr, error) { return p.binary(p.concat, "+", "-") }

func (p *parser) concat() (expr, error) {
	e, err := p.product()
	if err != nil || !p.isOp("~") {
		return e, err
	}
	c := &concatExpr{items: []expr{e}}
	for p.skipOp("~") {
		if e, err = p.product(); err != nil {
			return nil, err
		}
		c.items = append(c.items, e)
	}
	return c, nil
}

func (p *parser) product() (expr, error) { return p.binary(p.power, "*", "/", "//", "%") }

func (p *parser) power() (expr, error) {
	return p.binary(func() (expr, error) { return p.unary(true) }, "**")
}

func (p *parser) unary(withFilters bool) (expr, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	var e expr
	var err error
	switch {
	case p.isOp("-"), p.isOp("+"):
		t := p.next()
		e, err = p.unary(false)
		if err == nil {
			e = folded(&unaryExpr{minus: t.text == "-", of: e, line: t.line})
		}
	default:
		e, err = p.primary()
	}
	if err == nil {
		e, err = p.postfix(e)
	}
	if err == nil && withFilters {
		e, err = p.filters(e, true)
	}
	return e, err
}

func (p *parser) primary() (expr, error) {
	t := p.next()
	switch t.kind {
	case tokName:
		switch t.text {
		case "true", "True":
			return &constExpr{Bool(true)}, nil
		case "false", "False":
			return &constExpr{Bool(false)}, nil
		case "none", "None":
			return &constExpr{None()}, nil
		}
		p.t.loads[t.text] = true
		return p.name(t.text), nil
	case tokString:
		var s strings.Builder
		s.WriteString(t.text)
		for p.peek().kind == tokString {
			s.WriteString(p.next().text)
		}
		return &constExpr{String(s.String())}, nil
	case tokNumber:
		return &constExpr{t.value}, nil
	case tokOp:
		switch t.text {
		case "(":
			if p.skipOp(")") {
				return folded(&listExpr{tuple: true}), nil
			}
			e, err := p.tuple()
			if err != nil {
				return nil, err
			}
			return e, p.wantOp(")")
		case "[":
			l := &listExpr{}
			for !p.skipOp("]") {
				if len(l.items) > 0 {
					if err := p.wantOp(","); err != nil {
						return nil, err
					}
					if p.skipOp("]") {
						break
					}
				}
				e, err := p.expression()
				if err != nil {
					return nil, err
				}
				l.items = append(l.items, e)
			}
			return folded(l), nil
		case "{":
			return p.dict()
		}
	}
	p.at--
	return nil, p.fail("unexpected %s", describe(t))
}

func (p *parser) dict() (expr, error) {
	d := &dictExpr{line: p.peek().line}
	for !p.skipOp("}") {
		if len(d.keys) > 0 {
			if err := p.wantOp(","); err != nil {
				return nil, err
			}
			if p.skipOp("}") {
				break
			}
		}
		k, err := p.expression()
		if err != nil {
			return nil, err
		}
		if err := p.wantOp(":"); err != nil {
			return nil, err
		}
		v, err := p.expression()
		if err != nil {
			return nil, err
		}
		d.keys, d.values = append(d.keys, k), append(d.values, v)
	}
	return folded(d), nil
}

func (p *parser) postfix(e expr) (expr, error) {
	for {
		line := p.peek().line
		switch {
		case p.skipOp("."):
			switch t := p.next(); t.kind {
			case tokName:
				e = &attrExpr{of: e, name: t.text, methods: p.methods.named(t.text), changes: changes(Value{kind: kindDict}, t.text), line: line}
			case tokNumber:
				e = &indexExpr{of: e, index: &constExpr{t.value}, line: line}
			default:
				p.at--
				return nil, p.fail("expected name or number, got %s", describe(t))
			}
		case p.skipOp("["):
			var err error
			if e, err = p.subscript(e, line); err != nil {
				return nil, err
			}
		case p.isOp("("):
			c, err := p.callArgs()
			if err != nil {
				return nil, err
			}
			e = &callExpr{of: e, args: c, line: line}
		default:
			return e, nil
		}
	}
}

func (p *parser) subscript(e expr, line int) (expr, error) {
	var parts [3]expr
	n := 0
	slice := false
	for !p.skipOp("]") {
		if p.skipOp(":") {
			slice = true
			if n++; n > 2 {
				return nil, p.fail("too many colons in a slice")
			}
			continue
		}
		if parts[n] != nil {
			return nil, p.fail("expected ']', got %s", describe(p.peek()))
		}
		var err error
		if parts[n], err = p.expression(); err != nil {
			return nil, err
		}
		if p.isOp(",") && !slice { // a tuple as the key
			l := &listExpr{items: []expr{parts[0]}, tuple: true}
			for p.skipOp(",") && !p.isOp("]") {
				item, err := p.expression()
				if err != nil {
					return nil, err
				}
				l.items = append(l.items, item)
			}
			parts[0] = folded(l)
		}
	}
	switch {
	case slice:
		return &sliceExpr{of: e, start: parts[0], stop: parts[1], step: parts[2], line: line}, nil
	case parts[0] == nil:
		return nil, p.fail("expected subscript expression")
	}
	x := &indexExpr{of: e, index: parts[0], line: line}
	if c, ok := parts[0].(*constExpr); ok && c.value.isString() {
		x.key, x.methods = c.value.str, p.methods.named(c.value.str)
	}
	return x, nil
}

func (p *parser) callArgs() (*argsExpr, error) {
	if err := p.wantOp("("); err != nil {
		return nil, err
	}
	a := &argsExpr{}
	for n := 0; !p.skipOp(")"); n++ {
		if n > 0 {
			if err := p.wantOp(","); err != nil {
				return nil, err
			}
			if p.skipOp(")") {
				break
			}
		}
		var err error
		switch {
		case p.skipOp("**"):
			a.starKw, err = p.expression()
		case p.skipOp("*"):
			a.star, err = p.expression()
		case p.peek().kind == tokName && p.tokens[p.at+1].kind == tokOp && p.tokens[p.at+1].text == "=":
			a.kwNames = append(a.kwNames, p.next().text)
			p.at++
			var e expr
			e, err = p.expression()
			a.kw = append(a.kw, e)
		default:
			if len(a.kw) > 0 {
				return nil, p.fail("positional argument follows keyword argument")
			}
			var e expr
			e, err = p.expression()
			a.pos = append(a.pos, e)
		}
		if err != nil {
			return nil, err
		}
	}
	return a, nil
}

// filters parses the filters, tests and calls behind e. With no e the first
// filter has no bar before it unless bar is set, and its value comes from a block.
func (p *parser) filters(e expr, bar bool) (expr, error) {
	started := e != nil
	for n := 0; ; n++ {
		if n > 4*maxParseDepth {
			return nil, p.fail("more than %d filters in a row", 4*maxParseDepth)
		}
		line := p.peek().line
		switch {
		case !started && !bar && n == 0, p.isOp("|"):
			p.skipOp("|")
			name, err := p.wantName()
			if err != nil {
				return nil, err
			}
			for p.skipOp(".") {
				part, err := p.wantName()
				if err != nil {
					return nil, err
				}
				name += "." + part
			}
			f, ok := filterTable()[name]
			if !ok {
				fail := p.noSuch("filter", name)
				if !started { // a block's filter belongs to the block's own scope
					return nil, p.unknown[len(p.unknown)-1].err
				}
				f = func(*renderer, Value, *args) (Value, error) { return Value{}, fail() }
			}
			a := &argsExpr{}
			if p.isOp("(") {
				if a, err = p.callArgs(); err != nil {
					return nil, err
				}
			}
			e = &filterExpr{of: e, name: name, filter: f, args: a, line: line}
		case started && p.isName("is"):
			var err error
			if e, err = p.test(e); err != nil {
				return nil, err
			}
		case started && p.isOp("("):
			a, err := p.callArgs()
			if err != nil {
				return nil, err
			}
			e = &callExpr{of: e, args: a, line: line}
		default:
			return e, nil
		}
	}
}

func (p *parser) test(e expr) (expr, error) {
	line := p.next().line
	not := p.skipName("not")
	name, err := p.wantName()
	if err != nil {
		return nil, err
	}
	for p.skipOp(".") {
		part, err := p.wantName()
		if err != nil {
			return nil, err
		}
		name += "." + part
	}
	t, ok := testTable()[name]
	if !ok {
		fail := p.noSuch("test", name)
		t = func(*renderer, Value, *args) (bool, error) { return false, fail() }
	}
	x := &testExpr{of: e, name: name, test: t, not: not, args: &argsExpr{}, line: line}
	switch next := p.peek(); {
	case p.isOp("("):
		x.args, err = p.callArgs()
	case p.isName("else", "or", "and", "if"):
	case p.isName("is"):
		return nil, p.fail("You cannot chain multiple tests with is")
	case next.kind == tokName && !p.isName("in", "not", "recursive"), next.kind == tokString, next.kind == tokNumber, p.isOp("["), p.isOp("{"):
		var arg expr
		if arg, err = p.primary(); err == nil {
			arg, err = p.postfix(arg)
		}
		x.args.pos = append(x.args.pos, arg)
	}
	if err != nil {
		return nil, err
	}
	if a := x.args; len(a.pos) == 0 && len(a.kw) == 0 && a.star == nil && a.starKw == nil {
		x.quick = quickTests()[name]
	}
	return x, nil
}
