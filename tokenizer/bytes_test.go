// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

func TestEncode(t *testing.T) {
	for _, c := range []struct {
		name string
		in   chat.Request
		want []uint32
	}{
		{"text is bytes", chat.Request{Prompt: []byte(`"aé"`)}, []uint32{'a', 0xc3, 0xa9}},
		{"ids are taken as they are", chat.Request{Prompt: []byte(`[5, 4294967295]`)}, []uint32{5, 4294967295}},
		{"of several lists the longest", chat.Request{Prompt: []byte(` [[1],[2,3],[4]]`)[1:]}, []uint32{2, 3}},
		{"of several texts the longest", chat.Request{Prompt: []byte(`["a","bc"]`)}, []uint32{'b', 'c'}},
		{"no prompts", chat.Request{Prompt: []byte(`[]`)}, nil},
		{"empty text", chat.Request{Prompt: []byte(`""`)}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := tokenizer.Encode(nil, c.in)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("Encode = %d, %v; want %d", got, err, c.want)
			}
		})
	}
}

func TestEncodeNamesWhatItCannotRead(t *testing.T) {
	for prompt, want := range map[string]string{
		`[1, -1]`:      "prompt as token ids",
		`[1, "a"]`:     "prompt as token ids",
		`[4294967296]`: "prompt as token ids",
		`["a", 1]`:     "prompt",
		`{}`:           "prompt",
		`true`:         "prompt",
	} {
		dst := []uint32{7}
		got, err := tokenizer.Encode(dst, chat.Request{Prompt: []byte(prompt)})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one about %q", prompt, err, want)
		}
		if !slices.Equal(got, dst) {
			t.Errorf("%s: dst became %d, want it unchanged", prompt, got)
		}
	}
}
