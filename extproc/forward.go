// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// A worker that gets a prompt as token ids need not tokenize it again. Wrong ids would give wrong
// responses. So kvroute writes ids into a request's body only if the operator wants it, the ids are
// exact, the model's ids were compared with a worker's and always equal, and the chosen worker's
// engine and version supports them. Otherwise the body is unchanged, and the first reason is counted.

// ForwardAuto is [Config.ForwardTokens] for each form that the chosen worker's engine supports in
// its version.
const ForwardAuto = "auto"

// forms are the forms in use. The value is true if the operator named the form: then kvroute does
// not check the engine's version.
type forms map[openai.Form]bool

// parseForms reads [Config.ForwardTokens].
func parseForms(s string) (forms, error) {
	f := forms{}
	for item := range strings.SplitSeq(s, ",") {
		switch item = strings.TrimSpace(item); item {
		case "":
		case ForwardAuto:
			for _, form := range []openai.Form{openai.FormPrompt, openai.FormKVTransfer, openai.FormTokenIDs} {
				if !f[form] { // a named form stays named
					f[form] = false
				}
			}
		case string(openai.FormPrompt), string(openai.FormKVTransfer), string(openai.FormTokenIDs):
			f[openai.Form(item)] = true
		default:
			return nil, fmt.Errorf("%q is no form of token ids, want auto, prompt, kv_transfer_params or prompt_token_ids", item)
		}
	}
	return f, nil
}

// CheckForwardTokens returns an error for a wrong value of [Config.ForwardTokens].
func CheckForwardTokens(s string) error {
	_, err := parseForms(s)
	return err
}

// Outcomes of forwarding ids.
const (
	forwarded     = "forwarded"
	keptGiven     = "given"     // the client sent ids itself
	keptInexact   = "inexact"   // the ids are not the engine's, or not all of the prompt
	keptOptions   = "options"   // the request needs its prompt as it is: echo, truncation, a list of prompts or ids
	keptUnchecked = "unchecked" // the model's ids were not compared with a worker's, or differed
	keptEngine    = "engine"    // the chosen worker's engine does not take them for such a request
	keptVersion   = "version"   // its version is not known to
	keptEncoding  = "encoding"  // the body is compressed
	keptForm      = "form"      // the form is not in use
	keptMode      = "mode"      // Envoy's processing mode does not allow to change the body
	keptBody      = "body"      // the field has another value already, or the body would be too large
)

// since is the first version of an engine that supports a form; "" for none. vLLM 0.32 was seen to
// take kv_transfer_params; TensorRT-LLM's field came with 1.0.
func since(engine string, form openai.Form) string {
	switch {
	case form == openai.FormPrompt && (engine == router.EngineVLLM || engine == router.EngineSGLang || engine == router.EngineTRTLLM || engine == router.EngineSim):
		return "0"
	case form == openai.FormKVTransfer && engine == router.EngineSim:
		return "0"
	case form == openai.FormKVTransfer && engine == router.EngineVLLM:
		return "0.32.0"
	case form == openai.FormTokenIDs && engine == router.EngineTRTLLM:
		return "1.0.0"
	}
	return ""
}

// forward returns the body with the prompt as ids, nil if the body is unchanged.
func (s *stream) forward(fields *openai.Body, m message, body []byte) (out []byte) {
	t := s.decision.Tokens
	if s.decision.Tokens = nil; t == nil || m != requestBody {
		return nil
	}
	var form openai.Form
	var outcome string
	switch {
	case s.encoding != "":
		outcome = keptEncoding
	case s.flow == ahead, s.truncated: // the rest of the body has its length already
		outcome = keptMode
	default:
		out, form, outcome = s.server.forms.forward(s.endpoint, fields, t, body, s.server.conf.MaxBodyBytes)
	}
	s.server.metrics.forwards.Count(string(form), outcome)
	return out
}

// forward returns the body with the prompt as ids, and the form; or nil and the reason.
func (f forms) forward(e openai.Endpoint, b *openai.Body, t *router.Tokens, body []byte, limit int) (out []byte, form openai.Form, outcome string) {
	switch {
	case e == openai.Completions:
		form = openai.FormPrompt
	case e == openai.ChatCompletions && t.Engine == router.EngineTRTLLM:
		form = openai.FormTokenIDs
	case e == openai.ChatCompletions:
		form = openai.FormKVTransfer
	}
	named, on := f[form]
	first := since(t.Engine, form)
	switch {
	case b.Tokens != nil:
		return nil, form, keptGiven
	case form == "" || first == "":
		return nil, form, keptEngine
	case !on:
		return nil, form, keptForm
	case b.Echo || b.TruncatePromptTokens != nil || b.Prompt != nil && b.Prompt[0] != '"':
		return nil, form, keptOptions
	case len(t.IDs) == 0:
		return nil, form, keptInexact
	// An engine that does not return ids cannot be compared: the operator's setting decides.
	case !t.Agreed && (t.Differs || !named || t.Engine != router.EngineTRTLLM):
		return nil, form, keptUnchecked
	case !named && !atLeast(t.EngineVersion, first):
		return nil, form, keptVersion
	}
	if out = openai.WithTokens(body, form, t.IDs); out == nil || len(out) > limit {
		return nil, form, keptBody
	}
	return out, form, forwarded
}

// atLeast reports whether a version, such as "v0.32.1rc2.dev7+gabc", is not before another one. An
// unreadable version is before all versions but "0".
func atLeast(version, first string) bool {
	if first == "0" {
		return true
	}
	version = strings.TrimPrefix(version, "v")
	rest := version
	for want := range strings.SplitSeq(first, ".") {
		n := 0
		for n < len(rest) && n < 9 && '0' <= rest[n] && rest[n] <= '9' {
			n++
		}
		have, err := strconv.Atoi(rest[:n])
		if err != nil {
			return false
		}
		if need, _ := strconv.Atoi(want); have != need {
			return have > need
		}
		rest = strings.TrimPrefix(rest[n:], ".")
	}
	// Equal so far: a release, or something built after it, but not before it.
	for _, before := range []string{"rc", "dev", "a", "b", ".rc", ".dev"} {
		if strings.HasPrefix(rest, before) {
			return false
		}
	}
	return true
}
