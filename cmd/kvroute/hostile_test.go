// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/telemetry"
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

// Names and ids of clients and workers change neither the terminal nor the text around them, and none is longer than a
// line: in kvroute top, kvroute explain and the log. The escape sequence, the mark that reverses the direction of text and
// the line breaks become visible characters.
func TestHostileNames(t *testing.T) {
	t.Parallel() // mostly waits
	const evil = "<b>x\x1b[2J\u202e\u2028\u009b\r\n"
	quoted := func(text string) string {
		b, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	harmless := func(what, text string, longest int) {
		t.Helper()
		for line := range strings.Lines(text) {
			if n := utf8.RuneCountInString(line); n > longest {
				t.Errorf("%s: a line has %d characters, want at most %d: %.100q", what, n, longest, line)
			}
			if at := strings.IndexFunc(strings.TrimSuffix(line, "\n"), func(r rune) bool { return !unicode.IsPrint(r) }); at >= 0 {
				t.Errorf("%s: %q can change the terminal", what, line[at:min(len(line), at+20)])
			}
		}
	}
	marked := "<img>\u202e" + strings.Repeat("w", 200) // the longest names of records have 256 bytes, and no control characters
	k := serveFile(t, writeFile(t, fmt.Sprintf("version: 1\nworkers: [{name: \"%s\", address: \"127.0.0.1:1\", models: [\"%s\", short], block_size: 16, health: none}]\n", marked, marked)))
	url := "http://" + k.At.HTTP
	best := func(model, id string) (status int, text string) {
		t.Helper()
		resp, text := whole(t, http.MethodPost, url+"/v1/best_worker", fmt.Sprintf(`{"model":%s,"request_id":%s,"token_ids":[1,2,3],"required_taints":[]}`, quoted(model), quoted(id)), nil)
		return resp.StatusCode, text
	}
	id := evil + strings.Repeat("i", 900)
	if status, text := best("short", id); status != http.StatusOK {
		t.Fatalf("status %d: %s", status, text)
	}
	for name, c := range map[string]struct{ model, id string }{"id": {"short", strings.Repeat(evil, 200)}, "model": {strings.Repeat(evil, 200), "unknown"}} {
		if status, text := best(c.model, c.id); status < 400 || status > 499 || len(text) > 2000 {
			t.Errorf("a long %s: status %d, and %d bytes: %.200s", name, status, len(text), text)
		}
	}
	status, out, stderr := runs(t, "top", "--once", "--url", url)
	if harmless("top", out, 1200); status != 0 || !strings.Contains(out, "<img>?www") || !strings.Contains(out, "<b>x?[2J") || !strings.Contains(out, "…") {
		t.Errorf("top: %s%s", out, stderr)
	}
	for _, of := range []string{"last", id} {
		status, out, stderr := runs(t, "explain", "--url", url, of)
		if harmless("explain", out, 1400); status != 0 || !strings.Contains(out, "<b>x?[2J") || !strings.Contains(out, "<img>?www") {
			t.Errorf("explain: %s%s", out, stderr)
		}
	}
	for _, unknown := range []string{evil, strings.Repeat(evil, 200)} {
		status, out, stderr := runs(t, "explain", "--url", url, unknown)
		if harmless("explain of an unknown id", stderr, 400); status == 0 || out != "" {
			t.Errorf("explain of an unknown id: status %d, %s%s", status, out, stderr)
		}
	}
	lines, err := os.ReadFile(k.Log)
	if err != nil {
		t.Fatal(err)
	}
	if harmless("log", string(lines), 2000); !strings.Contains(string(lines), "<img>") {
		t.Errorf("the log does not name the model: %s", lines)
	}

	var log bytes.Buffer
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.SetWorker(router.WorkerInfo{ID: 1, Address: netip.MustParseAddrPort("10.0.0.7:8000"), Models: []string{"sim"}, BlockSize: 16}); err != nil {
		t.Fatal(err)
	}
	x, err := extproc.New(extproc.Config{MaxBodyBytes: 16 << 20, Log: telemetry.NewLogger(&log, slog.LevelDebug, "text", nil)}, r)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(x.ServerOptions()...)
	x.Register(g)
	link := envoytest.Serve(t, g)
	for _, model := range []string{evil, strings.Repeat(evil, 200)} {
		e := link.Do(envoytest.Request{Path: chatPath, Body: fmt.Appendf(nil, `{"model":%s,"messages":[{"role":"user","content":"a"}]}`, quoted(model))})
		if e.End(); e.Refusal == nil || e.Refusal.Status != http.StatusNotFound || len(e.Refusal.Body) > 2000 {
			t.Errorf("an unknown model: %+v", e.Refusal)
		}
	}
	if harmless("log of requests", log.String(), 1000); strings.Count(log.String(), "request refused") != 2 {
		t.Errorf("the log is %s", log.String())
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
