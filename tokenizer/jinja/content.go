// SPDX-License-Identifier: Apache-2.0

package jinja

import "slices"

// Engines give a template the contents of messages as strings, or as lists of
// parts if they see in its tree that it goes over them. What they take for that
// is what counts, not what the template does.

// LoopsOverContent reports whether vLLM 0.32 gives the template lists of parts.
// It does if a loop goes over
//
//   - the content of a variable that some loop takes from messages, or from a
//     variable set to them or to a slice of them;
//   - a parameter of the macro around it, which some call gives such a content;
//   - a variable of the name content, outside of macros.
//
// Filters and slices around either do not matter. A variable that was set to a
// message's content does not count unless it has that name; nor does anything in
// templates that take messages apart into several variables at once.
func (t *Template) LoopsOverContent() bool {
	var nodes []any
	for _, s := range t.body {
		nodes = appendNodes(nodes, s)
	}
	lists, ok := t.listsOfMessages(nodes)
	if !ok {
		return false
	}
	var messages []string
	for _, n := range nodes {
		loop, is := n.(*forStmt)
		if !is || !slices.ContainsFunc(lists, func(name string) bool { return isAccess(loop.iter, name, "") }) {
			continue
		}
		name, ok := t.targetName(loop.target)
		if !ok {
			return false
		}
		messages = append(messages, name)
	}
	isContent := func(e expr) bool {
		return slices.ContainsFunc(messages, func(name string) bool { return isAccess(e, name, "content") })
	}
	parameters := contentParameters(nodes, isContent)
	for _, n := range nodes {
		loop, is := n.(*forStmt)
		if !is {
			continue
		}
		name := ""
		if v, is := loop.iter.(*nameExpr); is {
			name = v.name
		}
		given, inMacro := parameters[loop]
		if isContent(loop.iter) || name != "" && slices.Contains(given, name) || !inMacro && name == "content" {
			_, ok := t.targetName(loop.target)
			return ok
		}
	}
	return false
}

// LoopsOver reports whether some loop goes over what the variable name has under
// key.
func (t *Template) LoopsOver(name, key string) bool {
	var nodes []any
	for _, s := range t.body {
		nodes = appendNodes(nodes, s)
	}
	return slices.ContainsFunc(nodes, func(n any) bool {
		loop, is := n.(*forStmt)
		return is && isAccess(loop.iter, name, key)
	})
}

// maxLists bounds the variables that are taken for the list of messages; templates
// have one or two.
const maxLists = 100

// listsOfMessages returns the variables that are messages, or set to them. ok is
// false if one is set together with others, or is an attribute.
func (t *Template) listsOfMessages(nodes []any) (names []string, ok bool) {
	names = []string{"messages"}
	for k := 0; k < len(names) && k < maxLists; k++ {
		for _, n := range nodes {
			set, is := n.(*setStmt)
			if !is || !isAccess(set.value, names[k], "") {
				continue
			}
			name, ok := t.targetName(set.target)
			if !ok {
				return nil, false
			}
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names, true
}

// contentParameters returns, of each loop in a macro, the macro's parameters that
// some call gives a message's content.
func contentParameters(nodes []any, isContent func(expr) bool) map[*forStmt][]string {
	calls := map[string][]*callExpr{}
	for _, n := range nodes {
		if call, is := n.(*callExpr); is {
			if f, is := call.of.(*nameExpr); is {
				calls[f.name] = append(calls[f.name], call)
			}
		}
	}
	loops := map[*forStmt][]string{}
	for _, n := range nodes {
		m, is := n.(*macroStmt)
		if !is {
			continue
		}
		var given []string
		for _, call := range calls[m.macro.name] {
			for i, arg := range call.args.pos {
				if i < len(m.macro.names) && isContent(arg) {
					given = append(given, m.macro.names[i])
				}
			}
			for i, name := range call.args.kwNames {
				if slices.Contains(m.macro.names, name) && isContent(call.args.kw[i]) {
					given = append(given, name)
				}
			}
		}
		var inside []any
		for _, s := range m.macro.body {
			inside = appendNodes(inside, s)
		}
		for _, n := range inside {
			if loop, is := n.(*forStmt); is && (given != nil || loops[loop] == nil) {
				loops[loop] = given
			}
		}
	}
	return loops
}

// targetName returns the one variable that t is.
func (t *Template) targetName(to target) (string, bool) {
	if to.parts != nil || to.attr != "" {
		return "", false
	}
	return t.names[to.id], true
}

// isAccess reports whether e is the variable name or, with a key, what it has under
// it; filters, tests and slices around that do not matter.
func isAccess(e expr, name, key string) bool {
	for {
		switch x := e.(type) {
		case *filterExpr:
			e = x.of
			continue
		case *testExpr:
			if x.not {
				return false
			}
			e = x.of
			continue
		case *sliceExpr:
			e = x.of
			continue
		case *nameExpr:
			return key == "" && x.name == name
		case *attrExpr:
			return key != "" && x.name == key && isName(x.of, name)
		case *indexExpr:
			c, is := x.index.(*constExpr)
			return key != "" && is && c.value.isString() && c.value.str == key && isName(x.of, name)
		}
		return false
	}
}

func isName(e expr, name string) bool {
	n, is := e.(*nameExpr)
	return is && n.name == name
}

// appendNodes appends n and all below it, each before what it holds.
func appendNodes(dst []any, n any) []any {
	dst = append(dst, n)
	each := func(below ...any) {
		for _, n := range below {
			dst = appendNodes(dst, n)
		}
	}
	exprs := func(list ...expr) {
		for _, e := range list {
			if e != nil {
				dst = appendNodes(dst, e)
			}
		}
	}
	body := func(list []stmt) {
		for _, s := range list {
			dst = appendNodes(dst, s)
		}
	}
	args := func(a *argsExpr) {
		if a != nil {
			exprs(a.pos...)
			exprs(a.kw...)
			exprs(a.star, a.starKw)
		}
	}
	switch n := n.(type) {
	case *outputStmt:
		exprs(n.parts...)
	case *scopeStmt:
		body(n.body)
	case *ifStmt:
		for _, b := range n.branches {
			exprs(b.cond)
			body(b.body)
		}
		body(n.otherwise)
	case *forStmt:
		exprs(n.iter)
		body(n.body)
		body(n.otherwise)
		exprs(n.test)
	case *setStmt:
		exprs(n.value)
	case *setBlockStmt:
		exprs(n.filter)
		body(n.body)
	case *macroStmt:
		exprs(n.macro.defaults...)
		body(n.macro.body)
	case *callStmt:
		each(n.call)
		exprs(n.caller.defaults...)
		body(n.caller.body)
	case *withStmt:
		exprs(n.values...)
		body(n.body)
	case *filterStmt:
		body(n.body)
		exprs(n.filter)
	case *listExpr:
		exprs(n.items...)
	case *dictExpr:
		exprs(n.keys...)
		exprs(n.values...)
	case *attrExpr:
		exprs(n.of)
	case *indexExpr:
		exprs(n.of, n.index)
	case *sliceExpr:
		exprs(n.of, n.start, n.stop, n.step)
	case *callExpr:
		exprs(n.of)
		args(n.args)
	case *filterExpr:
		exprs(n.of)
		args(n.args)
	case *testExpr:
		exprs(n.of)
		args(n.args)
	case *condExpr:
		exprs(n.cond, n.yes, n.no)
	case *logicExpr:
		exprs(n.left, n.right)
	case *notExpr:
		exprs(n.of)
	case *compareExpr:
		exprs(n.first)
		exprs(n.rest...)
	case *binaryExpr:
		exprs(n.left, n.right)
	case *concatExpr:
		exprs(n.items...)
	case *unaryExpr:
		exprs(n.of)
	}
	return dst
}
