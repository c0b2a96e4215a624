// SPDX-License-Identifier: Apache-2.0

package jinja

import "fmt"

// Kind says what kind of error a template met, by Python's names where there is one.
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
	LimitError     Kind = "LimitError" // a limit of ours, which the reference does not have
	ZeroDivision   Kind = "ZeroDivisionError"
	KeyError       Kind = "KeyError"
	IndexError     Kind = "IndexError"
	AttributeError Kind = "AttributeError"
	AssertionError Kind = "AssertionError"
	FilterError    Kind = "FilterArgumentError"
	RunError       Kind = "RuntimeError"
)

// Error is what parsing and rendering return.
type Error struct {
	Kind    Kind
	Message string
	Name    string // of the template
	Line    int    // in the template, from 1; 0 if unknown
}

func (e *Error) Error() string {
	return fmt.Sprintf("jinja: %s:%d: %s: %s", e.Name, e.Line, e.Kind, e.Message)
}

func errorf(k Kind, format string, a ...any) *Error {
	return &Error{Kind: k, Message: fmt.Sprintf(format, a...)}
}

// errUndefined is the error of an operation with an undefined value among values.
func errUndefined(values ...Value) *Error {
	for _, v := range values {
		switch {
		case v.kind != kindUndefined:
		case v.num&isUnsafe != 0:
			return errorf(SecurityError, "%s", v.hint())
		case v.str != "":
			return errorf(UndefinedError, "%s", v.hint())
		}
	}
	return errorf(UndefinedError, "the value is undefined")
}
