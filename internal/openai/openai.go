// SPDX-License-Identifier: Apache-2.0

// Package openai reads the parts of an OpenAI request that routing needs, and writes errors in
// OpenAI's form.
//
// # Guarantees
//
// A body is read once, front to back, in linear time, without maps. Only strings with escapes are allocated. A valid
// body is exactly one JSON object with any number of levels, as Python's json module reads it: NaN and Infinity are
// numbers. If a field appears twice the last one counts, as in the engines. Booleans and counts may have other forms,
// such as "True" and "2", which pydantic accepts. Scalars become Go values, and prompts stay raw spans of the body.
// Prompts of [Responses] and [Messages] become chats made of the same spans. A prompt with too many values is not
// read. Nothing of a body is kept, but the messages of chats by a [Reader] with a cache.
//
// Of a truncated body [ParseTruncated] reads the complete fields, but no prompt.
//
// [Edit] replaces members of a body in a copy.
//
// # Not checked
//
// The engine judges the meaning of a field beyond its JSON type, and whether its strings are
// UTF-8. Names are compared exactly, letter case included.
//
// Everything here is pure and may be called by any number of goroutines.
package openai

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Endpoint is a kind of request.
type Endpoint uint8

// The endpoints. kvroute does not route requests of kind Other.
const (
	Other           Endpoint = iota
	ChatCompletions          // /v1/chat/completions
	Completions              // /v1/completions
	Responses                // /v1/responses
	Messages                 // /v1/messages, Anthropic's
	Generate                 // /generate, SGLang's
	Ids                      // /inference/v1/generate, vLLM's
	Load                     // embeddings, ranking and the like: no prefix to route by, only load
	Text                     // tokenizing, rendering, counting: the model computes nothing
	OpenSession              // /open_session, SGLang's
	CloseSession             // /close_session, SGLang's
)

// path returns the kind of API in [chat.Request].
func (e Endpoint) path() chat.Path {
	switch e {
	case ChatCompletions:
		return chat.PathChat
	case Completions:
		return chat.PathCompletions
	case Responses:
		return chat.PathResponses
	case Messages:
		return chat.PathMessages
	case Generate, Ids:
		return chat.PathGenerate
	case Other, Load, Text, OpenSession, CloseSession:
	}
	return chat.UnknownPath
}

// NeedsModel reports whether requests of a kind must name their model if there are several. Others need not: the worker
// uses its own.
func (e Endpoint) NeedsModel() bool { return e <= Messages }

// endpoints are the paths of requests that kvroute knows.
//
//nolint:gochecknoglobals // a table
var endpoints = map[string]Endpoint{
	"/v1/chat/completions": ChatCompletions,
	"/v1/completions":      Completions,
	"/v1/responses":        Responses,
	"/v1/messages":         Messages,

	"/generate":              Generate,
	"/inference/v1/generate": Ids,

	"/tokenize":                   Text,
	"/v1/tokenize":                Text,
	"/detokenize":                 Text,
	"/v1/detokenize":              Text,
	"/v1/messages/count_tokens":   Text,
	"/v1/chat/completions/render": Text,
	"/v1/completions/render":      Text,
	"/v1/responses/render":        Text,

	"/v1/embeddings": Load,
	"/v2/embed":      Load,
	"/pooling":       Load,
	"/classify":      Load,
	"/v1/classify":   Load,
	"/score":         Load,
	"/v1/score":      Load,
	"/rerank":        Load,
	"/v1/rerank":     Load,
	"/v2/rerank":     Load,
}

// sessionEndpoints are the paths of SGLang's sessions. Each open session takes memory of its worker, so the operator
// decides whether clients may open one.
//
//nolint:gochecknoglobals // a table
var sessionEndpoints = map[string]Endpoint{"/open_session": OpenSession, "/close_session": CloseSession}

// Paths returns the paths of all endpoints but Other and those of sessions, sorted.
func Paths() []string { return slices.Sorted(maps.Keys(endpoints)) }

// Classify returns the endpoint of a request, by method and path; it ignores a query string. It compares the path in
// normal form, as engines' servers read it. A wrong method on an endpoint, or on the list of models, is an error with
// status 405: its body would pass unchecked. OPTIONS is not wrong: a browser requests with it whether it may POST,
// and engines answer that.
func Classify(method, target string) (Endpoint, *Error) {
	p := normalPath(target)
	e := cmp.Or(endpoints[p], sessionEndpoints[p])
	switch {
	case e == Other && method != http.MethodGet && method != http.MethodHead && method != http.MethodOptions && isModelsPath(p):
		return e, wrongMethod(method, p, http.MethodGet)
	case e == Other:
		return e, wrongOnHeld(method, p)
	case method == http.MethodPost, method == http.MethodPut && e >= Generate: // SGLang serves PUT on some of these paths
		return e, nil
	case method == http.MethodOptions:
		return Other, nil
	}
	return e, wrongMethod(method, p, http.MethodPost)
}

func wrongMethod(method, path, use string) *Error {
	return &Error{
		Status:  http.StatusMethodNotAllowed,
		Message: fmt.Sprintf("%s is not allowed on %s, use %s", method[:min(len(method), 64)], path[:min(len(path), 256)], use),
		Type:    InvalidRequest,
		Code:    "method_not_allowed",
		allow:   use,
	}
}

// normalPath returns the path without query and fragment, with percent-encoded
// characters decoded once, repeated slashes merged, and the segments "." and ".."
// resolved. A path with an invalid escape stays encoded: no endpoint has one.
func normalPath(p string) string {
	if i := strings.IndexAny(p, "?#"); i >= 0 {
		p = p[:i]
	}
	if !strings.Contains(p, "%") && !strings.Contains(p, "//") && !strings.Contains(p, "/.") {
		return p
	}
	if plain, err := url.PathUnescape(p); err == nil {
		p = plain
	}
	return path.Clean(p)
}
