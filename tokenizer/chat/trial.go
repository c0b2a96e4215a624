// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"errors"
	"time"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Trouble is a kind of chat whose prompts kvroute cannot make, although the engine may.
type Trouble struct {
	Chats string // which ones
	Err   *jinja.Error
}

// AllChats is the name of chats without anything special.
const AllChats = "chats"

// trials are short chats of the kinds that templates treat differently.
//
//nolint:gochecknoglobals // a table
var trials = []struct {
	chats    string
	messages string
	tools    string
}{
	{AllChats, `[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]`, ""},
	{"chats with tools", `[{"role":"user","content":"a"}]`, trialTools},
	{"chats with results of tools", `[{"role":"user","content":"a"},
		{"role":"assistant","content":"b","tool_calls":[{"id":"call12345","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]},
		{"role":"tool","tool_call_id":"call12345","content":"c"}]`, trialTools},
}

const trialTools = `[{"type":"function","function":{"name":"f","description":"d",` +
	`"parameters":{"type":"object","properties":{"x":{"type":"integer","description":"e"}},"required":["x"]}}}]`

// Try renders a chat, one with tools and one with a tool's result, within the limits of a request. It returns the
// first kind of chats that reaches a template that cannot be read, a feature that kvroute does not have, or a limit; nil
// if there is none. A template that refuses a trial is no trouble: the engine refuses such a chat, too.
func (r *Renderer) Try() *Trouble {
	if r.template.Template == nil && r.template.unreadable == nil {
		return nil // code makes the prompts
	}
	for _, t := range trials {
		q := Request{Messages: []byte(t.messages)}
		if t.tools != "" {
			q.Tools = []byte(t.tools)
		}
		_, err := r.Render(nil, q, time.Unix(0, 0).UTC())
		if e, ok := errors.AsType[*jinja.Error](err); ok && (e.Lacking() || errors.Is(err, ErrNoTemplate)) {
			return &Trouble{t.chats, e}
		}
	}
	return nil
}
