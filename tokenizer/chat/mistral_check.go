// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"regexp"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

//nolint:gochecknoglobals // tables
var (
	mistralName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}\n?$`)
	mistralID   = regexp.MustCompile(`^[a-zA-Z0-9]{9}\n?$`)

	// mistralNext are the roles that may follow each role.
	mistralNext = map[string]string{
		"system": "user assistant system", "user": "assistant system user", "assistant": "assistant user tool",
		"tool": "assistant tool user",
	}
)

// check refuses what the engine refuses: a wrong order of roles, wrong contents, calls without
// results and results without calls. It does not check the schema of a tool's parameters.
func (m *mistral) check(turns []turn, tools []jinja.Value) {
	if len(turns) == 1 && turns[0].role != "user" && turns[0].role != "system" {
		refuse("the conversation begins with the role %s", turns[0].role)
	}
	for i, t := range turns {
		if i > 0 && !slices.Contains(strings.Fields(mistralNext[turns[i-1].role]), t.role) {
			refuse("messages[%d]: the role %s behind %s", i, t.role, turns[i-1].role)
		}
	}
	m.checkResults(turns)
	for i, t := range turns {
		m.checkTurn(i, t)
	}
	for _, t := range tools {
		checkName(t.Get("function").Get("name"))
	}
}

func checkName(v jinja.Value) {
	if name, _ := v.Text(); !mistralName.MatchString(name) {
		refuse("a tool has the name %.80q", name)
	}
}

// checkResults checks that calls and results match: by number, and from v11 on by id. It ignores
// the first message.
func (m *mistral) checkResults(turns []turn) {
	due, got := map[string]bool{}, map[string]bool{}
	open := 0
	for i, t := range turns[1:] {
		switch {
		case t.role == "tool" && m.version < 11:
			open--
		case t.role == "tool":
			if got[t.callID] || !due[t.callID] {
				refuse("messages[%d] is the result of no call, or the second one", i+1)
			}
			got[t.callID] = true
		case t.role != "assistant":
		case open != 0, len(due) != len(got):
			refuse("messages[%d]: not as many results as calls", i+1)
		case m.version < 11:
			open = len(t.calls)
		default:
			clear(due)
			clear(got)
			for _, c := range t.calls {
				if due[c.id] {
					refuse("messages[%d] has two calls of one id", i+1)
				}
				due[c.id] = true
			}
		}
	}
}

func (m *mistral) checkTurn(i int, t turn) {
	defer inside("messages[%d]", i)
	for _, c := range t.content {
		ok := c.kind == "text"
		switch {
		case c.kind == "item" && strings.HasPrefix(c.text, "image"):
			ok = m.Images && (t.role == "user" || t.role == "tool" && m.version >= 15)
		case c.kind == "item":
			ok = m.Audio && (t.role == "user" && m.version >= 7 || t.role == "tool" && m.version >= 15)
		case c.kind == "thinking":
			ok = t.role == "assistant" && m.version >= 13 || t.role == "system" && m.version == 13
		}
		if !ok {
			refuse("a %s of the role %s", c.kind, t.role)
		}
	}
	switch t.role {
	case "tool":
		if _, ok := t.name.Text(); ok {
			checkName(t.name)
		}
		m.checkID(t.callID)
	case "assistant":
		empty := len(t.content) == 0 || len(t.content) == 1 && t.content[0].kind == "text" && t.content[0].text == ""
		if m.version < 7 && !empty == (len(t.calls) > 0) {
			refuse("either content or calls")
		}
		for _, c := range t.calls {
			checkName(jinja.String(c.name))
			m.checkID(c.id)
		}
	}
}

func (m *mistral) checkID(id string) {
	if m.version >= 13 && (id == "" || id == "null") || m.version < 13 && !mistralID.MatchString(id) {
		refuse("the id of a call is %.40q", id)
	}
}
