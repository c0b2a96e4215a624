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
	lines.Scan() // versions
	for lines.Scan() {
		var line struct {
			Body  []byte
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
	if err := lines.Err(); err != nil || accepted < 150 {
		t.Errorf("%d bodies, %v", accepted, err)
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
