// SPDX-License-Identifier: Apache-2.0

package jinja

// symbols are the names of a scope, in the order in which Jinja2's compiler finds them. The first use of a name decides
// what it is before the scope sets it. If the scope reads the name, or sets it inside an if, it is the variable of that
// name around. If the scope sets it elsewhere, it is undefined, also for the scopes inside, even if the rendering has
// such a variable.
type symbols struct {
	around *symbols        // of the scope around; nil for templates and blocks
	known  map[string]bool // the names; true: undefined until the scope sets it
	ifs    int             // around the current statement
	inside []func()        // analyses the scopes inside, which need all names of this one
}

// analyze marks the names of a scope, and of those inside, that are undefined until they are set.
func (s *scope) analyze(around *symbols, visit func(*symbols)) {
	t := &symbols{around: around, known: map[string]bool{}}
	visit(t)
	for name, undefined := range t.known {
		if d := s.slots[name]; d != nil {
			d.undefined = undefined
		}
	}
	for _, f := range t.inside {
		f()
	}
}

// within analyses a scope inside of this one later.
func (t *symbols) within(s *scope, visit func(*symbols)) {
	t.inside = append(t.inside, func() { s.analyze(t, visit) })
}

// has reports whether the scope or one around it has a name.
func (t *symbols) has(name string) bool {
	for ; t != nil; t = t.around {
		if _, ok := t.known[name]; ok {
			return true
		}
	}
	return false
}

func (t *symbols) store(name string) {
	if _, ok := t.known[name]; !ok {
		t.known[name] = t.ifs == 0 && !t.around.has(name)
	}
}

// read finds the names in expressions.
func (t *symbols) read(list ...*node) {
	for _, n := range list {
		switch {
		case n == nil:
			continue
		case n.op == opName:
			if !t.has(n.text) {
				t.known[n.text] = false
			}
		case n.op == opBody:
			t.within(n.scope, func(t *symbols) { t.statements(n.body) })
		case n.op == opCaller:
			t.macro(n.macro)
		}
		t.read(n.kids...)
		t.read(n.args...)
		t.read(n.spread[:]...)
	}
}

func (t *symbols) macro(m *macro) {
	t.within(m.scope, func(t *symbols) {
		for _, name := range m.names {
			t.known[name] = false
		}
		t.read(m.defaults...)
		t.statements(m.body)
	})
}

// targets finds the names that are set. Those of loops and with are set before anything else.
func (t *symbols) targets(target *node, first bool) {
	switch target.op {
	case opTuple:
		for _, k := range target.kids {
			t.targets(k, first)
		}
	case opAttr:
		t.read(target.kids...)
	default:
		if t.store(target.text); first {
			t.known[target.text] = false
		}
	}
}

func (t *symbols) statements(list []*node) {
	for _, n := range list {
		switch n.op {
		case opIf:
			t.read(n.kids...)
			t.ifs++
			t.statements(n.body)
			t.statements(n.other)
			t.ifs--
		case opFor:
			t.read(n.kids[1])
			t.within(n.scope, func(t *symbols) {
				t.targets(n.kids[0], true)
				t.read(n.kids[2])
				t.statements(n.body)
			})
			t.within(n.others, func(t *symbols) { t.statements(n.other) })
		case opSet:
			t.read(n.kids[1])
			t.targets(n.kids[0], false)
		case opWith:
			for i := 1; i < len(n.kids); i += 2 {
				t.read(n.kids[i])
			}
			t.within(n.scope, func(t *symbols) {
				for i := 0; i < len(n.kids); i += 2 {
					t.targets(n.kids[i], true)
				}
				t.statements(n.body)
			})
		case opMacro:
			t.store(n.macro.name)
			t.macro(n.macro)
		case opBlock:
			t.inside = append(t.inside, func() { n.scope.analyze(nil, func(t *symbols) { t.statements(n.body) }) })
		case opAutoescape:
			t.within(n.scope, func(t *symbols) {
				t.read(n.kids...)
				t.statements(n.body)
			})
		default:
			t.read(n.kids...)
			for _, name := range n.names { // of imports
				t.store(name)
			}
		}
	}
}
