// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
)

func TestMend(t *testing.T) {
	for _, c := range []struct{ cut, want string }{
		{`{"model":"m","messages":[{"role":"user","content":"hel`, `{"model":"m","messages":[{"role":"user","content":"hel"}]}`},
		{`{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"us`, `{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"us"}]}`},
		{`{"model":"m","messages":[{"role":"user","content":"hi"},{"ro`, `{"model":"m","messages":[{"role":"user","content":"hi"},{}]}`},
		{`{"model":"m","messages":[{"role":"user","content":"hi"},`, `{"model":"m","messages":[{"role":"user","content":"hi"}]}`},
		{`{"model":"m","messages":[{"role":"user","content"`, `{"model":"m","messages":[{"role":"user"}]}`},
		{`{"model":"m","messages":[{"role":"user","content":`, `{"model":"m","messages":[{"role":"user"}]}`},
		{`{"model":"m","n":1`, `{"model":"m"}`},
		{`{"model":"m","n":12,`, `{"model":"m","n":12}`},
		{`{"model":"m","stream":tru`, `{"model":"m"}`},
		{`{"model":"m","stream":true}`, `{"model":"m","stream":true}`},
		{`{"model":"m\`, `{"model":"m"}`},
		{`{"model":"m\u00`, `{"model":"m"}`},
		{`{"model":"m\n`, `{"model":"m\n"}`},
		{`{"model":"m\ud83d`, `{"model":"m"}`},
		{`{"model":"m\ud83d\ude`, `{"model":"m"}`},
		{`{"model":"m\ud83d\ude00`, `{"model":"m\ud83d\ude00"}`},
		{`{"model":"m\ud83dx`, `{"model":"m\ud83dx"}`},
		{"{\"model\":\"\xe2\x82", `{"model":""}`},
		{`{"prompt":[1,2,3`, `{"prompt":[1,2]}`},
		{`{"prompt":[[1,2],[3,`, `{"prompt":[[1,2],[3]]}`},
		{`  {`, `  {}`},
		{``, ""},
		{`[1`, ""},
		{`nonsense`, ""},
		{`{"a":]`, ""},
		{strings.Repeat(`{"a":`, 600), ""},
	} {
		if got := string(openai.Mend([]byte(c.cut))); got != c.want {
			t.Errorf("Mend(%.80s) = %s, want %s", c.cut, got, c.want)
		}
	}
}

// Whatever a valid text is cut at, what is left is valid, and says nothing that the
// text does not say.
func FuzzMend(f *testing.F) {
	f.Add(`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a\"\\\ud83d\ude00é"}]}],"n":[1,-2.5e3,null,true,{}]}`, uint16(40))
	f.Add(`{"a":{"b":[[],{}]}}`, uint16(9))
	f.Fuzz(func(t *testing.T, text string, at uint16) {
		body := []byte(text)[:min(int(at), len(text))]
		for _, e := range []openai.Endpoint{openai.ChatCompletions, openai.Completions, openai.Responses, openai.Messages, openai.Load} {
			_, rest, err := openai.ParseBeginning(e, body)
			if err != nil || rest == nil {
				continue
			}
			for q := range rest {
				if q.Messages == nil && q.Prompt == nil {
					t.Errorf("%q may be the beginning of a request without a prompt", body)
				}
			}
		}
		got := openai.Mend(body)
		if got == nil {
			return
		}
		if len(got) > len(body)+512+1 {
			t.Errorf("%d bytes of %d", len(got), len(body))
		}
		var whole, part map[string]any
		if json.Unmarshal([]byte(text), &whole) != nil || !once(text) {
			return // not a valid text that was cut, or one that says a thing twice
		}
		if err := json.Unmarshal(got, &part); err != nil {
			t.Fatalf("Mend(%q) = %q: %v", body, got, err)
		}
		if !within(part, whole) {
			t.Errorf("Mend(%q) = %q, which says more", body, got)
		}
	})
}

// within reports whether part is a beginning of whole.
func within(part, whole any) bool {
	switch p := part.(type) {
	case map[string]any:
		w, ok := whole.(map[string]any)
		for k, v := range p {
			ok = ok && within(v, w[k])
		}
		return ok
	case []any:
		w, ok := whole.([]any)
		for i, v := range p {
			ok = ok && i < len(w) && within(v, w[i])
		}
		return ok
	case string:
		w, ok := whole.(string)
		return ok && strings.HasPrefix(w, p)
	}
	return part == whole
}

// once reports whether no object of a text has two members of one name.
func once(text string) bool {
	d := json.NewDecoder(strings.NewReader(text))
	var open []map[string]bool // nil for lists
	name := false
	for {
		token, err := d.Token()
		if err != nil {
			return true
		}
		top := func() map[string]bool {
			if len(open) == 0 {
				return nil
			}
			return open[len(open)-1]
		}
		switch v := token.(type) {
		case json.Delim:
			switch v {
			case '{':
				open, name = append(open, map[string]bool{}), true
				continue
			case '[':
				open = append(open, nil)
				name = false
				continue
			}
			open = open[:len(open)-1]
		case string:
			if names := top(); name && names != nil {
				if names[v] {
					return false
				}
				names[v], name = true, false
				continue
			}
		}
		name = top() != nil
	}
}
