// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"os"
	"slices"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// The ids that are compared for requests of an unconfirmed class are those that the requests have when the class is
// confirmed, and one request in 20 has them.
func TestCheckedIDs(t *testing.T) {
	file, err := os.ReadFile("testdata/golden/bytelevel-qwen2-nfc.json")
	if err != nil {
		t.Fatal(err)
	}
	files := fstest.MapFS{"tokenizer.json": {Data: file}, "chat_template.jinja": {Data: []byte(chatml)}}
	const user, image = `{"role":"user","content":"How is the weather?"}`, `{"role":"user","content":[{"type":"text","text":"What is this?"},{"type":"image_url","image_url":{"url":"data:,x"}}]}`
	for _, profile := range []chat.Profile{chat.VLLM, chat.SGLang} {
		for _, q := range []chat.Request{
			{Messages: []byte("[" + user + "]")},
			{Messages: []byte("[" + user + `,{"role":"assistant","content":"The weather is"}]`), ContinueFinalMessage: []byte("true"), AddGenerationPrompt: []byte("false")},
			{Messages: []byte("[" + user + "," + image + "]")},
			{Messages: []byte("[" + user + "]"), TruncatePromptTokens: []byte("9")},
			{Prompt: []byte(`"How is the weather?"`)},
		} {
			m, err := tokenizer.LoadModel(files, tokenizer.ModelConfig{Profile: profile})
			if err != nil {
				t.Fatal(err)
			}
			want, err := m.Encode(t.Context(), nil, q, time.Now())
			if err != nil || want.Exact == 0 {
				t.Fatal(want, err)
			}
			m.SetConfirmed(want.Class, false)
			for i := range 41 {
				p, err := m.Encode(t.Context(), nil, q, time.Now())
				if err != nil || p.Reason != tokenizer.Drifted || p.Class != want.Class {
					t.Fatal(p, err)
				}
				if checked := p.Checked != nil; checked != (i%20 == 0) || checked && !slices.Equal(p.Checked, want.IDs[:want.Exact]) {
					t.Errorf("%s, %s%s: request %d: %d, want %d", profile, q.Messages, q.Prompt, i, p.Checked, want.IDs[:want.Exact])
				}
			}
		}
	}
}

// Classes that are unconfirmed at the same time each have ids for one request in 20, in whatever order requests come.
func TestEachClassIsChecked(t *testing.T) {
	file, err := os.ReadFile("testdata/golden/bytelevel-qwen2-nfc.json")
	if err != nil {
		t.Fatal(err)
	}
	m, err := tokenizer.LoadModel(fstest.MapFS{"tokenizer.json": {Data: file}, "chat_template.jinja": {Data: []byte(chatml)}}, tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	plain := chat.Request{Path: chat.PathChat, Messages: []byte(`[{"role":"user","content":"How is the weather?"}]`)}
	withKwargs := plain
	withKwargs.ChatTemplateKwargs = []byte(`{"x":1}`)
	requests, checked := []chat.Request{plain, withKwargs}, map[chat.Class]int{}
	for i := range 82 {
		p, err := m.Encode(t.Context(), nil, requests[i%2], time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if i < 2 {
			m.SetConfirmed(p.Class, false)
		} else if p.Checked != nil {
			checked[p.Class]++
		}
	}
	for class, n := range checked {
		if len(checked) != 2 || n != 2 {
			t.Errorf("%d classes have ids; %s for %d of 40 requests, want 2", len(checked), class, n)
		}
	}
}
