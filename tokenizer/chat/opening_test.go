// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"strings"
	"testing"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// The opening ends with the first message of the user, so that later turns of a chat have the same one.
func TestOpening(t *testing.T) {
	const system, user = `{"role": "system", "content": "say \"user\" \\"}`, `{"content": [{"type": "text", "text": "}]"}], "role": "user", "name": "a"}`
	for _, c := range []struct{ messages, want string }{
		{`[` + system + `, ` + user + `]`, `[` + system + `, ` + user},
		{`[` + system + `, ` + user + `, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]`, `[` + system + `, ` + user},
		{`[` + user + `]`, `[` + user},
		{`[{"role":"user","content":"a"},{"role":"user","content":"b"}]`, `[{"role":"user","content":"a"}`},
		{`[` + system + `,{"role": "assistant"}]`, `[` + system},
		{`[]`, `[]`},
		{`"text"`, `"text"`},
		{`[{"role": "user", "content": "never en`, `[{"role": "user", "content": "never en`},
		{`[{"role`, `[{"role`},
		{``, ``},
		{`[{"role": "user", "content": "\`, `[{"role": "user", "content": "\`},
	} {
		if got := string(chat.Opening([]byte(c.messages))); got != c.want {
			t.Errorf("the opening of %s is %s, want %s", c.messages, got, c.want)
		}
	}
	for i := range len(`[` + system + `, ` + user + `]`) { // no part of a list makes it panic
		text := (`[` + system + `, ` + user + `]`)[:i]
		if got := string(chat.Opening([]byte(text))); !strings.HasPrefix(text, got) {
			t.Errorf("the opening of %s is %s", text, got)
		}
	}
}
