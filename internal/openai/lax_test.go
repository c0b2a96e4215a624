// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/kvroute/kvroute/internal/openai"
)

// What a front like that of the engines accepts, kvroute accepts and reads in the same way, and it finds the field that
// steers. tools/golden/front_golden.py writes the table, with FastAPI and pydantic.
func TestBodiesAsTheEnginesFrontReadsThem(t *testing.T) {
	table, err := os.Open("testdata/front.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	lines, accepted := bufio.NewScanner(table), 0
	lines.Buffer(nil, 1<<20)
	lines.Scan() // versions
	for lines.Scan() {
		var line struct {
			Body  []byte
			Type  string // of the content, if it is odd
			Reads *struct {
				Model         string
				Stream, Usage bool
				N             json.Number
				MaxTokens     json.Number `json:"max_tokens"`
			}
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		want := line.Reads
		if want == nil {
			continue // kvroute may accept more
		}
		accepted++
		if line.Type != "" {
			if known := !strings.HasSuffix(line.Type, "latin-1") && !strings.HasSuffix(line.Type, "cp037"); openai.UnknownCharset(line.Type) == known {
				t.Errorf("%s: the charset is known: %v", line.Type, !known)
			}
			continue
		}
		text := openai.UTF8(line.Body)
		if bytes.Equal(text, line.Body) != openai.IsUTF8(line.Body) && !bytes.HasPrefix(line.Body, []byte("\xef\xbb\xbf")) {
			t.Errorf("%.90q: UTF-8: %v", line.Body, openai.IsUTF8(line.Body))
		}
		got, bad := openai.Parse(openai.ChatCompletions, text)
		if bad != nil {
			t.Errorf("%.90q: %v", line.Body, bad)
			continue
		}
		if got.Stream != want.Stream || got.IncludeUsage != want.Usage || got.Model != want.Model && !strings.Contains(want.Model, "\ufffd") {
			t.Errorf("%.90q: read as %q, stream %v, usage %v; want %+v", line.Body, got.Model, got.Stream, got.IncludeUsage, want)
		}
		if max(1, got.Choices) != max(1, countOf(want.N)) || got.MaxTokens != countOf(want.MaxTokens) {
			t.Errorf("%.90q: %d responses of %d tokens, want %s of %s", line.Body, got.Choices, got.MaxTokens, want.N, want.MaxTokens)
		}
		if got.Steering == 0 || bytes.Contains(openai.RemoveSteering(text, allFields), []byte("priority")) {
			t.Errorf("%.90q: the field that steers stays", line.Body)
		}
	}
	if err := lines.Err(); err != nil || accepted < 170 {
		t.Errorf("%d bodies, %v", accepted, err)
	}
}

// How deep engines read depends on their version of Python: kvroute reads every depth, in little memory.
func TestDeepBodies(t *testing.T) {
	for _, levels := range []int{513, 1497, 9998, 1 << 17} {
		for open, end := range map[string]string{"[": "]", `{"a":`: "}", `[{"a":`: "}]"} {
			deep := strings.Repeat(open, levels) + "1" + strings.Repeat(end, levels)
			for _, place := range []string{`"x":` + deep, `"tools":` + deep, `"chat_template_kwargs":` + deep, `"messages":[{"content":` + deep + `}]`} {
				body := []byte(`{"model":"m","messages":[{"role":"user","content":"x"}],` + place + `,"priority":7}`)
				got, bad := openai.Parse(openai.ChatCompletions, body)
				if bad != nil || got.Steering == 0 {
					t.Fatalf("%d levels of %s in %.30s: %v", levels, open, place, bad)
				}
				if want := bytes.Replace(body, []byte(`,"priority":7`), nil, 1); !bytes.Equal(openai.RemoveSteering(body, allFields), want) {
					t.Errorf("%d levels of %s in %.30s: the field that steers stays", levels, open, place)
				}
				if _, bad := openai.Parse(openai.ChatCompletions, body[:len(body)-len(`1},"priority":7`)-1]); bad == nil {
					t.Errorf("%d levels of %s in %.30s: an open level is accepted", levels, open, place)
				}
			}
		}
	}
}

// A salt that is no string, as SGLang's list, separates the request from all others.
func TestSalts(t *testing.T) {
	for members, want := range map[string]string{
		`"cache_salt":"s"`: "s", `"cache_salt":"\u0073"`: "s", `"cache_salt":5`: "5", `"cache_salt":["a","b"]`: `["a","b"]`,
		`"cache_salt":null`: "", `"cache_salt":""`: "", `"cache_salt":"s","nvext":{"cache_salt":7}`: "7", `"cache_salt":"s","nvext":{"cache_salt":""}`: "s",
	} {
		b, bad := openai.Parse(openai.Completions, []byte(`{"model":"m","prompt":["a","b"],`+members+`}`))
		if bad != nil || b.CacheSalt != want {
			t.Errorf("%s: salt %q, %v; want %q", members, b.CacheSalt, bad, want)
		}
	}
}

// Endpoints without a response in parts ignore the fields of streams.
func TestFieldsThatAnEndpointDoesNotHave(t *testing.T) {
	for e := openai.Other; e <= openai.CloseSession; e++ {
		for field, ignored := range map[string]bool{`"stream":"maybe"`: true, `"stream_options":{"include_usage":7}`: true, `"model":7`: false} {
			body := []byte(`{"model":"m","input":"x","prompt":"x","messages":[1],` + field + `}`)
			if _, bad := openai.Parse(e, body); (bad == nil) != (ignored && e >= openai.Load) {
				t.Errorf("endpoint %d, %s: %v", e, field, bad)
			}
		}
	}
}

// vLLM accepts a list without messages; its template may refuse it. Such a request is routed by the size of its body.
func TestListsWithoutMessages(t *testing.T) {
	for body, c := range map[string]struct {
		e              openai.Endpoint
		inexact, keeps string
	}{
		`{"model":"m","messages":[]}`:                                 {openai.ChatCompletions, openai.NoPrompt, ""},
		`{"model":"m","messages":[ ],"tools":[{"type":"function"}]}`:  {openai.ChatCompletions, openai.NoPrompt, ""},
		`{"model":"m","messages":[],"system":"s"}`:                    {openai.Messages, openai.NoPrompt, ""},
		`{"model":"m","input":[]}`:                                    {openai.Responses, openai.NoPrompt, ""},
		`{"model":"m","input":[],"previous_response_id":"r"}`:         {openai.Responses, openai.NoHistory, "r"},
		`{"model":"m","input":[],"conversation":"c","stream":"True"}`: {openai.Responses, openai.NoHistory, "c"},
	} {
		b, bad := openai.Parse(c.e, []byte(body))
		if bad != nil || b.Size != len(body) || b.Inexact != c.inexact || b.Held != c.keeps || b.Model != "m" {
			t.Errorf("%s: size %d, %s, needs %q, %v", body, b.Size, b.Inexact, b.Held, bad)
		}
	}
}

// countOf returns a number, 0 if it is no 32-bit count.
func countOf(n json.Number) int {
	i, err := n.Int64()
	if err != nil || i < 0 || i >= 1<<32 {
		return 0
	}
	return int(i)
}

// FuzzUTF8 makes a text of UTF-16 readable again, and reads any bytes.
func FuzzUTF8(f *testing.F) {
	f.Add([]byte(`{"a":"é中😀"}`))
	f.Add([]byte("\xff\xfe{\x00}\x00"))
	f.Add([]byte("\x00\x00\xfe\xff\x00\x00\x00{\x00\x11\x00\x00"))
	f.Fuzz(func(t *testing.T, body []byte) {
		if text := openai.UTF8(body); len(text) > len(body)*3/2 {
			t.Fatalf("%q becomes %q", body, text)
		}
		units := utf16.Encode([]rune("{" + string(body))) // the first byte of a JSON text is ASCII
		var little []byte
		for _, u := range units {
			little = append(little, byte(u), byte(u>>8))
		}
		if want := "{" + strings.ToValidUTF8(string([]rune(string(body))), "\ufffd"); len(units) > 1 && units[1] != 0 {
			if got := openai.UTF8(little); string(got) != want || openai.IsUTF8(little) {
				t.Fatalf("%q becomes %q", want, got)
			}
		}
	})
}
