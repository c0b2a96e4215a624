// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"strings"
	"sync"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Path is the kind of API that a request uses.
type Path uint8

// The kinds. UnknownPath counts as PathCompletions if the request has a prompt that is no chat, else as PathChat.
const (
	UnknownPath Path = iota
	PathChat
	PathCompletions
	PathResponses
	PathMessages
	PathGenerate
)

// Class says which code of an engine makes the prompt of a request: it is the request's path and some traits.
// Requests of one class are converted alike. 0 is no class. All classes are below [Classes].
type Class uint8

// Classes is one more than the largest class.
const Classes = 256

// The traits. The path is in the bits above them.
const (
	WithTools     Class = 1 << iota
	WithSystem          // a system or developer message behind the first message
	WithReasoning       // an assistant's reasoning, a reasoning effort, or disabled thinking
	WithItems           // an image, audio or video
	WithKwargs          // chat_template_kwargs
	pathUnit
)

// PlainChat is the class of a chat without traits.
const PlainChat = Class(PathChat) * pathUnit

// class returns the class of a request, without the traits that are in its messages.
func (q *Request) class() Class {
	path := q.Path
	switch {
	case path != UnknownPath:
	case q.Prompt != nil:
		path = PathCompletions
	default:
		path = PathChat
	}
	c := Class(path) * pathUnit
	if len(q.Tools) > len("[]") {
		c |= WithTools
	}
	if len(q.ChatTemplateKwargs) > len("{}") {
		c |= WithKwargs
	}
	if q.ReasoningEffort != nil || q.NoThinking {
		c |= WithReasoning
	}
	return c
}

// traitsOf returns the traits of a message. A system message counts as one behind the first message.
func traitsOf(message jinja.Value) (c Class) {
	if role := textAt(message, "role"); role == "system" || role == "developer" {
		c |= WithSystem
	}
	for _, name := range [...]string{"reasoning", "reasoning_content", "thinking"} {
		if !message.Get(name).IsUndefined() {
			c |= WithReasoning
		}
	}
	return c
}

// classNames are the names of all classes.
//
//nolint:gochecknoglobals // a table
var classNames = sync.OnceValue(func() (names [Classes]string) {
	paths := [...]string{"none", "chat", "completions", "responses", "messages", "generate", "other", "other"}
	for c := range names {
		parts := []string{paths[Class(c)/pathUnit]}
		for i, trait := range [...]string{"tools", "system_inside", "reasoning", "items", "kwargs"} {
			if c>>i&1 == 1 {
				parts = append(parts, trait)
			}
		}
		names[c] = strings.Join(parts, "+")
	}
	return names
})

// String returns the name of the class: the path and the traits, joined by "+", as in "chat+tools".
func (c Class) String() string { return classNames()[c] }
