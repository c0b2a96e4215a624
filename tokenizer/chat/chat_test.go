// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

func TestAppendText(t *testing.T) {
	for _, c := range []struct {
		name, messages, tools, want string
	}{
		{
			name:     "roles and contents",
			messages: `[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi \u00e9\n"}]`,
			want:     "<|system|>\nBe brief.\n<|user|>\nHi é\n\n<|assistant|>\n",
		},
		{
			name:     "parts",
			messages: `[{"role":"user","content":[{"type":"text","text":"a"},"b",{"type":"image_url","image_url":{"url":"x"}}]}]`,
			want:     "<|user|>\na\nb\n<|item " + standIn(`{"type":"image_url","image_url":{"url":"x"}}`) + "\n<|assistant|>\n",
		},
		{
			name:     "tools come first, calls with their message",
			tools:    `[{"type":"function"}]`,
			messages: `[{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]},{"role":"tool","name":"f","tool_call_id":"1","content":"ok"}]`,
			want:     "<|tools|>\n" + `[{"type":"function"}]` + "\n<|assistant|>\n\n" + `[{"id":"1"}]` + "\n<|tool f for 1|>\nok\n<|assistant|>\n",
		},
		{name: "no content", messages: `[{"role":"assistant"}]`, want: "<|assistant|>\n\n<|assistant|>\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := chat.AppendText(nil, chat.Request{Messages: []byte(c.messages), Tools: []byte(c.tools)})
			if err != nil || string(got) != c.want {
				t.Errorf("got %q, %v\nwant %q", got, err, c.want)
			}
		})
	}
}

// standIn is what stands for an image: the first half of its JSON's SHA-256.
func standIn(item string) string {
	sum := sha256.Sum256([]byte(item))
	return hex.EncodeToString(sum[:16])
}

// The condition for a conversation's next turn to find its blocks.
func TestTextOfAConversationGrowsAtTheEnd(t *testing.T) {
	turns := []string{
		`{"role":"system","content":"You help."}`,
		`{"role":"user","content":"One?"}`,
		`{"role":"assistant","content":"Uno."}`,
		`{"role":"user","content":"Two?"}`,
	}
	var before []byte
	for n := 2; n <= len(turns); n += 2 {
		text, err := chat.AppendText(nil, chat.Request{Messages: []byte("[" + strings.Join(turns[:n], ",") + "]")})
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(text, before) {
			t.Errorf("after %d messages the text is %q, which does not begin with %q", n, text, before)
		}
		before = text
	}
}

func TestAppendTextNamesWhatItCannotRead(t *testing.T) {
	for messages, want := range map[string]string{
		`[{"role":"user","content":5}]`:                   "messages[0].content",
		`[{"role":"user","content":"a"},{"content":[5]}]`: "messages[1].content: part 0",
		`[{"role":5}]`: "messages",
		`"hi"`:         "messages",
		``:             "messages",
		`[{"role":"user","content":[{"text":{"deep":"x"}}]}]`: "messages[0].content: part 0",
	} {
		if _, err := chat.AppendText(nil, chat.Request{Messages: []byte(messages)}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one about %q", messages, err, want)
		}
	}
}
