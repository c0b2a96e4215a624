// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"compress/gzip"
	"io"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// zeros is a reader of n zero bytes.
func zeros(n int64) io.Reader { return io.LimitReader(zeroReader{}, n) }

type zeroReader struct{}

func (zeroReader) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// Broken or malicious files of a model: the error names the file and the place in it, and the file
// cannot make kvroute use much memory or time.
func TestHostileModelFiles(t *testing.T) {
	const good = `{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]},"added_tokens":[{"id":3,"content":"<s>"}],"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false}}`
	with := func(old, replacement string) map[string]string {
		return map[string]string{"tokenizer.json": strings.Replace(good, old, replacement, 1)}
	}
	config := func(text string) map[string]string {
		return map[string]string{"tokenizer.json": good, "tokenizer_config.json": text}
	}
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	if _, err := io.Copy(z, zeros(200<<20)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	deep := strings.Repeat("[", 1<<20)
	for _, c := range []struct {
		name  string
		files map[string]string
		large string // name of an additional file of 4 GB
		want  string
	}{
		{"empty", map[string]string{"tokenizer.json": ""}, "", "tokenizer.json: want '{' at byte 0"},
		{"truncated", map[string]string{"tokenizer.json": good[:60]}, "", "tokenizer.json: want a colon at byte 60"},
		{"no JSON", map[string]string{"tokenizer.json": "<html>"}, "", "tokenizer.json: want '{' at byte 0"},
		{"deep", with(`"added_tokens":[`, `"x":`+deep), "", "tokenizer.json: nested too deep at byte"},
		{"an id that is a text", with(`"a":0`, `"a":"x"`), "", "tokenizer.json: model.vocab: want a token id at byte 36"},
		{"an id below zero", with(`"ab":2`, `"ab":-1`), "", "tokenizer.json: model.vocab: want a token id at byte 49"},
		{"an id beyond any vocabulary", with(`"ab":2`, `"ab":4000000000`), "", "tokenizer.json: model.vocab: id 4000000000, more than"},
		{"merges that are an object", with(`["a b"]`, `{"a":1}`), "", "tokenizer.json: model.merges: want '[' at byte 61"},
		{"a merge of unknown tokens", with(`"a b"`, `"a z"`), "", `tokenizer.json: model.merges: merge 0 of "a" and "z" needs a token that is not in the vocabulary at byte`},
		{"added tokens that are a number", with(`"added_tokens":[`, `"added_tokens":5,"x":[`), "", "tokenizer.json: added_tokens: json"},
		{"half a surrogate pair", with(`"ab":2`, `"\ud800":2`), "", "half a surrogate pair at byte 53"},
		{"a vocabulary of 4 GB", nil, "tokenizer.json", "tokenizer.json: 4096 MB, more than 128 MB"},
		{"a vocabulary that grows", map[string]string{"tokenizer.json.gz": bomb.String()}, "", "tokenizer.json.gz: more than 128 MB"},
		{"a template of 4 GB", map[string]string{"tokenizer.json": good}, "chat_template.jinja", "chat_template.jinja: 4096 MB, more than 128 MB"},
		{"a configuration that ends early", config(`{"chat_template":"`), "", "tokenizer_config.json: unexpected end of JSON input at byte 18"},
		{"a configuration of 4 GB", map[string]string{"tokenizer.json": good}, "tokenizer_config.json", "tokenizer_config.json: 4096 MB, more than 128 MB"},
		{"nothing", nil, "", "no tokenizer.json"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range c.files {
				if err := os.WriteFile(dir+"/"+name, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if c.large != "" {
				if err := os.WriteFile(dir+"/"+c.large, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				if err := os.Truncate(dir+"/"+c.large, 4<<30); err != nil { // sparse: needs no space on disk
					t.Fatal(err)
				}
			}
			conf := defaults()
			conf.Models = []modelConfig{{Name: "m", Tokenizer: dir}}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := conf.loadCards(tokenizer.NewCache(1<<20), slog.New(slog.DiscardHandler))
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "models[0].tokenizer") || !strings.Contains(err.Error(), dir) {
				t.Errorf("error %v, want one with %q, the model and the folder", err, c.want)
			}
			if err != nil && len(err.Error()) > 1000 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
			most := uint64(96 << 20)
			if c.name == "a vocabulary that grows" {
				most = 1 << 30 // what doubling a buffer up to the bound takes, with the race detector's share
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > most {
				t.Errorf("%d MB were allocated", n>>20)
			}
		})
	}
}

// A template that never ends costs each of its requests a bounded time, and the requests are still
// routed.
func TestAnEndlessTemplateEnds(t *testing.T) {
	const loop = `{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{{ a }}{% endfor %}{% endfor %}{% endfor %}`
	card := func(template string) (*tokenizer.Model, error) {
		file := writeFile(t, template)
		c, err := loadCard(modelConfig{Name: "m", Tokenizer: modelFolder(t), ChatTemplate: file}, tokenizer.NewCache(1<<20), slog.New(slog.DiscardHandler))
		return c.Prompts, err
	}
	for _, template := range []string{loop, `{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('a') }}`, `{{ 'a' * 4000000000 }}`, `{{ range(99999) | list | string * 99999 }}`} {
		m, err := card(template)
		if err != nil {
			t.Fatal(err)
		}
		p, err := m.Encode(t.Context(), nil, router.Prompt{Messages: []byte(`[{"role":"user","content":"hello"}]`)}, time.Now())
		if err != nil || p.Mode != tokenizer.Bytes || p.Reason != tokenizer.Unsupported || m.Degraded() == "" {
			t.Errorf("%s: mode %s, reason %s (%s), %v", template, p.Mode, p.Reason, m.Degraded(), err)
		}
	}
}
