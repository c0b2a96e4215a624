// SPDX-License-Identifier: Apache-2.0

// Package jinja renders chat templates as Jinja2 renders them for the engines.
//
// It has the part of Jinja2 that chat templates use, with Python's values: they print,
// compare, add and fail as in Python. An unsupported feature gives an error of the kind
// [Unsupported] when a rendering reaches it. A template can read only its variables. Steps,
// depth, memory and output are limited.
//
// The environment is that of the reference: an immutable sandbox, trim_blocks and
// lstrip_blocks, loop controls, and the block "generation", which only renders its
// body. It has no loader: a template that reaches include, import or extends fails.
//
// The package is pure. A [Template] and the values given to it are only read, so
// any number of goroutines may render it at once.
package jinja

import "sync"

// Template is a parsed template. It is immutable; any number of goroutines may
// use it at once.
type Template struct {
	name    string
	body    []*node
	scope   *scope
	blocks  map[string]*node
	library *library
}

// library is all that a template can use by name.
type library struct {
	filters, tests map[string]*builtin
	methods        map[string]*methods
	globals        map[string]Value
}

//nolint:gochecknoglobals // a table
var theLibrary = sync.OnceValue(func() *library {
	return &library{filters: filters(), tests: tests(), methods: allMethods(), globals: globals()}
})

// Parse parses a template. name is for its errors, which are of type [*Error]
// and kind [SyntaxError] or [LimitError].
func Parse(name, text string) (t *Template, err error) {
	l := &lexer{}
	defer catch(&err, name, &l.line)
	l.lex(text)
	p := &parser{tokens: l.tokens, t: &Template{name: name, blocks: map[string]*node{}, library: theLibrary()}}
	p.parse()
	return p.t, nil
}
