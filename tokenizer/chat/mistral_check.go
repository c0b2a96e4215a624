// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"regexp"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

var (
	mistralName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}\n?$`)
	mistralID   = regexp.MustCompile(`^[a-zA-Z0-9]{9}\n?$`)
)

// mistralNext are the roles that may follow each role.
//
//nolint:gochecknoglobals // a table
var mistralNext = map[string]string{"system": "user assistant system", "user": "assistant system user", "assistant": "assistant user tool", "tool": "assistant tool user"}

// check refuses what the engine refuses: an order of roles, contents, and calls
// without results, or results without calls. It does not look at what a tool's
// parameters say.
func (m *mistral) check(turns []turn, tools []jinja.Value) error {
	if len(turns) == 1 && turns[0].role != "user" && turns[0].role != "system" {
		return refused("the conversation begins with the role %s", turns[0].role)
	}
	for i := 1; i < len(turns); i++ {
		if !slices.Contains(strings.Fields(mistralNext[turns[i-1].role]), turns[i].role) {
			return refused("messages[%d]: the role %s behind %s", i, turns[i].role, turns[i-1].role)
		}
	}
	if err := m.checkResults(turns); err != nil {
		return err
	}
	for i, t := range turns {
		if err := m.checkContent(t); err != nil {
			return refused("messages[%d]: %v", i, err)
		}
	}
	for _, t := range tools {
		if name, _ := at(at(t, "function"), "name").Text(); !mistralName.MatchString(name) {
			return refused("a tool has the name %.80q", name)
		}
	}
	return nil
}

// checkResults counts the results of calls: by their ids from v11 on. Calls of the
// very first message do not count.
func (m *mistral) checkResults(turns []turn) error {
	due, got := map[string]bool{}, map[string]bool{}
	open := 0
	for i, t := range turns[1:] {
		switch {
		case t.role == "tool" && m.version < 11:
			open--
		case t.role == "tool":
			if got[t.callID] || !due[t.callID] {
				return refused("messages[%d] is the result of no call, or the second one", i+1)
			}
			got[t.callID] = true
		case t.role != "assistant":
		case open != 0, len(due) != len(got):
			return refused("messages[%d]: not as many results as calls", i+1)
		default:
			clear(due)
			clear(got)
			if open = len(t.calls); m.version < 11 {
				continue
			}
			open = 0
			for _, c := range t.calls {
				if due[c.id] {
					return refused("messages[%d] has two calls of one id", i+1)
				}
				due[c.id] = true
			}
		}
	}
	if m.version == 2 {
		return oneResult(turns)
	}
	return nil
}

// oneResult refuses a second result of one turn, which version 2 does not know,
// behind the last user.
func oneResult(turns []turn) error {
	count, calls := 0, false
	for i, t := range turns {
		switch t.role {
		case "assistant":
			count = 0
			calls = len(t.calls) > 0
		case "tool":
			if !calls {
				continue
			}
			if count++; count > 1 && !slices.ContainsFunc(turns[i:], func(t turn) bool { return t.role == "user" }) {
				return refused("messages[%d]: a second result", i)
			}
		case "user":
			count, calls = 0, false
		}
	}
	return nil
}

func (m *mistral) checkContent(t turn) error {
	for _, c := range t.content {
		ok := c.kind == "text"
		switch {
		case c.kind == "item" && strings.HasPrefix(c.text, "image"):
			ok = m.Images && (t.role == "user" && m.version >= 3 || t.role == "tool" && m.version >= 15)
		case c.kind == "item":
			ok = m.Audio && (t.role == "user" && m.version >= 7 || t.role == "tool" && m.version >= 15)
		case c.kind == "thinking":
			ok = t.role == "assistant" && m.version >= 13 || t.role == "system" && m.version == 13
		}
		if !ok {
			return refused("a %s of the role %s", c.kind, t.role)
		}
	}
	switch t.role {
	case "tool":
		if name, ok := t.name.Text(); ok && !mistralName.MatchString(name) {
			return refused("a tool has the name %.80q", name)
		}
		return m.checkID(t.callID)
	case "assistant":
		if has := len(t.content) > 0 && (len(t.content) > 1 || t.content[0].kind != "text" || t.content[0].text != ""); m.version < 7 && has == (len(t.calls) > 0) {
			return refused("either content or calls")
		}
		if m.version == 1 && len(t.calls) > 0 {
			return refused("version 1 has no tools")
		}
		for _, c := range t.calls {
			if !mistralName.MatchString(c.name) {
				return refused("a call of %.80q", c.name)
			}
			if err := m.checkID(c.id); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *mistral) checkID(id string) error {
	if m.version >= 13 && (id == "" || id == "null") || m.version >= 3 && m.version < 13 && !mistralID.MatchString(id) {
		return refused("the id of a call is %.40q", id)
	}
	return nil
}
