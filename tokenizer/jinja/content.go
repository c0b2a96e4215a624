// SPDX-License-Identifier: Apache-2.0

package jinja

import "slices"

// Engines give a template the contents of messages as strings, or as lists of parts if the
// template's syntax tree has a loop over a content. The functions below apply the engines' rules,
// which may be wrong about what the template does.

// LoopsOverContent reports whether vLLM 0.32 gives the template lists of parts. It does
// if a loop goes over
//
//   - the content of a variable that some loop takes from messages, or from a
//     variable set to them or to a slice of them;
//   - a parameter of the macro around it, which some call gives such a content;
//   - a variable named content, outside of macros.
//
// Filters and slices around either do not matter. A variable that was set to a
// message's content does not count unless it has that name. Nothing counts in
// templates that assign messages to several variables at once.
func (t *Template) LoopsOverContent() bool {
	all := nodes(nil, t.body...)
	lists, ok := listsOfMessages(all)
	if !ok {
		return false
	}
	var messages []string
	for _, loop := range all {
		if loop.op != opFor || !slices.ContainsFunc(lists, func(name string) bool { return isAccess(loop.kids[1], name, "") }) {
			continue
		}
		if loop.kids[0].op != opName {
			return false
		}
		messages = append(messages, loop.kids[0].text)
	}
	isContent := func(n *node) bool {
		return slices.ContainsFunc(messages, func(name string) bool { return isAccess(n, name, "content") })
	}
	parameters := contentParameters(all, isContent)
	for _, loop := range all {
		if loop.op != opFor {
			continue
		}
		name, items := "", loop.kids[1]
		if items.op == opName {
			name = items.text
		}
		given, inMacro := parameters[loop]
		if isContent(items) || name != "" && slices.Contains(given, name) || !inMacro && name == "content" {
			return loop.kids[0].op == opName
		}
	}
	return false
}

// LoopsOver reports whether some loop goes over the value that the variable name has
// under key.
func (t *Template) LoopsOver(name, key string) bool {
	return slices.ContainsFunc(nodes(nil, t.body...), func(n *node) bool {
		return n.op == opFor && isAccess(n.kids[1], name, key)
	})
}

// maxLists limits the variables that are taken for the list of messages; templates
// have one or two.
const maxLists = 100

// listsOfMessages returns the variables that are messages, or set to them. ok is
// false if one is set together with others, or is an attribute.
func listsOfMessages(all []*node) (names []string, ok bool) {
	names = []string{"messages"}
	for k := 0; k < len(names) && k < maxLists; k++ {
		for _, n := range all {
			if n.op != opSet || !isAccess(n.kids[1], names[k], "") {
				continue
			}
			if n.kids[0].op != opName {
				return nil, false
			}
			if !slices.Contains(names, n.kids[0].text) {
				names = append(names, n.kids[0].text)
			}
		}
	}
	return names, true
}

// contentParameters returns, for each loop in a macro, the macro's parameters that
// some call gives a message's content.
func contentParameters(all []*node, isContent func(*node) bool) map[*node][]string {
	calls := map[string][]*node{}
	for _, n := range all {
		if n.op == opCall && n.kids[0].op == opName {
			calls[n.kids[0].text] = append(calls[n.kids[0].text], n)
		}
	}
	loops := map[*node][]string{}
	for _, n := range all {
		if n.op != opMacro {
			continue
		}
		var given []string
		for _, call := range calls[n.macro.name] {
			positional := len(call.args) - len(call.names)
			for i, arg := range call.args {
				names := n.macro.names[min(i, len(n.macro.names)):]
				if i >= positional {
					names = call.names[i-positional:]
				}
				if len(names) > 0 && slices.Contains(n.macro.names, names[0]) && isContent(arg) {
					given = append(given, names[0])
				}
			}
		}
		for _, loop := range nodes(nil, n.macro.body...) {
			if loop.op == opFor && (given != nil || loops[loop] == nil) {
				loops[loop] = given
			}
		}
	}
	return loops
}

// isAccess reports whether n is the variable name or, with a key, the variable's value under the
// key. It ignores filters, tests and slices around n.
func isAccess(n *node, name, key string) bool {
	for n != nil && (n.op == opFilter || n.op == opTest || n.op == opSlice) {
		n = n.kids[0]
	}
	if n == nil || key == "" {
		return n != nil && n.op == opName && n.text == name
	}
	return (n.op == opAttr || n.op == opItem) && n.text == key && isAccess(n.kids[0], name, "") && n.kids[0].op == opName
}

// nodes appends list and all nodes below, each before those that it holds.
func nodes(dst []*node, list ...*node) []*node {
	for _, n := range list {
		if n == nil {
			continue
		}
		dst = nodes(append(dst, n), n.kids...)
		dst = nodes(dst, n.args...)
		dst = nodes(dst, n.spread[:]...)
		dst = nodes(dst, n.body...)
		dst = nodes(dst, n.other...)
		if n.macro != nil {
			dst = nodes(dst, n.macro.defaults...)
			dst = nodes(dst, n.macro.body...)
		}
	}
	return dst
}
