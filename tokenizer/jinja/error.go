// SPDX-License-Identifier: Apache-2.0

package jinja

import "fmt"

// Kind is the kind of an error, by Python's name where Python has one.
type Kind string

// The kinds of errors.
const (
	Raise          Kind = "TemplateError" // raise_exception: the message is the template's
	UndefinedError Kind = "UndefinedError"
	TypeError      Kind = "TypeError"
	ValueError     Kind = "ValueError"
	SecurityError  Kind = "SecurityError"
	OverflowError  Kind = "OverflowError"
	RecursionError Kind = "RecursionError"
	RuntimeError   Kind = "TemplateRuntimeError"
	SyntaxError    Kind = "TemplateSyntaxError"
	ZeroDivision   Kind = "ZeroDivisionError"
	AttributeError Kind = "AttributeError"
	FilterError    Kind = "FilterArgumentError"
	AssertionError Kind = "AssertionError"
	KeyError       Kind = "KeyError"
	ObjectError    Kind = "RuntimeError" // Python's own, not that of templates
	IndexError     Kind = "IndexError"
	NotFound       Kind = "TemplatesNotFound"

	LimitError  Kind = "LimitError"  // a limit of this package, which the reference does not have
	Unsupported Kind = "Unsupported" // a feature of the reference that this package does not have
)

// Error is what parsing and rendering return.
type Error struct {
	Kind    Kind
	Message string
	Name    string // of the template
	Line    int    // in the template, from 1
}

func (e *Error) Error() string {
	return fmt.Sprintf("jinja: %s:%d: %s: %s", e.Name, e.Line, e.Kind, e.Message)
}

// Lacking reports whether the reference may have rendered the template: e is about a feature or a limit of this package.
func (e *Error) Lacking() bool { return e.Kind == Unsupported || e.Kind == LimitError }

// errorf returns an error without name and line. Code below Parse and Render panics
// with it, and catch turns the panic into the error that the caller gets.
func errorf(k Kind, format string, a ...any) *Error {
	return &Error{Kind: k, Message: fmt.Sprintf(format, a...)}
}

// raise ends the rendering with an error, as Python's raise does. It never returns: its result only
// ends functions that return a Value. Other functions end with panic(errorf(…)).
func raise(k Kind, format string, a ...any) Value { panic(errorf(k, format, a...)) }

// catch is deferred. It ends a panic with an *Error and stores the error with the
// template's name and, if the error has no line, the line.
func catch(into *error, name string, line *int) {
	switch e := recover().(type) {
	case nil:
	case *Error:
		e.Name = name
		if e.Line == 0 {
			e.Line = *line
		}
		*into = e
	default:
		panic(e)
	}
}
