// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/tokenizer"
)

func mistralFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/mistral/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// mistralOf returns the files of a model in a version of Mistral's formats.
func mistralOf(t testing.TB, name, version string) fstest.MapFS {
	t.Helper()
	b := mistralFile(t, name)
	if name == "tokenizer.model" {
		return fstest.MapFS{name + "." + version: {Data: b}}
	}
	b = bytes.Replace(b, []byte(`"version":"v15"`), []byte(`"version":"`+version+`"`), 1)
	if version != "v15" {
		b = regexp.MustCompile(`,"model_settings_builder":.*}}`).ReplaceAll(b, []byte("}"))
	}
	return fstest.MapFS{name: {Data: b}}
}

type mistralCase struct {
	Version string
	Request *int
	Text    *string
	IDs     []uint32
	Refused *string
}

func mistralCases(t testing.TB, name string) (cases []mistralCase) {
	t.Helper()
	lines := bufio.NewScanner(bytes.NewReader(mistralFile(t, name+".jsonl")))
	for lines.Scan() {
		var c mistralCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		cases = append(cases, c)
	}
	return cases[1:] // the first line says who made them
}

// The package that vLLM uses gave the ids.
func TestMistral(t *testing.T) {
	requests := bytes.Split(bytes.TrimSpace(mistralFile(t, "requests.jsonl")), []byte{'\n'})
	for name, want := range map[string][3]int{"tekken.json": {104, 76, 16}} {
		models := map[string]*tokenizer.Model{}
		equal, refused, texts := 0, 0, 0
		for _, c := range mistralCases(t, name) {
			if c.Text != nil {
				c.Version = "v7"
			}
			m := models[c.Version]
			if m == nil {
				var err error
				if m, err = tokenizer.LoadModel(mistralOf(t, name, c.Version), tokenizer.ModelConfig{Cache: tokenizer.NewCache(1 << 20)}); err != nil {
					t.Fatalf("%s %s: %v", name, c.Version, err)
				}
				models[c.Version] = m
			}
			if c.Text != nil {
				got, err := m.Tokenizer().Append(context.Background(), nil, []byte(*c.Text), true)
				if err != nil || !slices.Equal(got, c.IDs) {
					t.Errorf("%s: %q: got %d, %v; want %d", name, *c.Text, got, err, c.IDs)
				}
				texts++
				continue
			}
			p, err := m.Encode(context.Background(), nil, requestOf(t, requests[*c.Request]), time.Now())
			switch {
			case err != nil:
				t.Fatal(err)
			case c.Refused != nil:
				if refused++; p.Mode != tokenizer.Bytes || p.Reason != tokenizer.TemplateError {
					t.Errorf("%s %s: %s\nmode %s; want it refused: %s", name, c.Version, requests[*c.Request], p.Mode, *c.Refused)
				}
			default:
				if equal++; p.Mode != tokenizer.Exact || !slices.Equal(p.IDs, c.IDs) {
					t.Errorf("%s %s: %s\nmode %s, got %d\nwant %d: %q", name, c.Version, requests[*c.Request], p.Mode, p.IDs, c.IDs, m.Tokenizer().Decode(nil, c.IDs))
				}
			}
		}
		if got := [3]int{equal, refused, texts}; got != want {
			t.Errorf("%s: %d prompts, refusals and texts, want %d", name, got, want)
		}
	}
}

// Which files are read, and how, is what vLLM decides.
func TestMistralMode(t *testing.T) {
	tekken, model := &fstest.MapFile{Data: mistralFile(t, "tekken.json")}, &fstest.MapFile{Data: []byte("a SentencePiece model")}
	file, err := os.ReadFile("testdata/golden/bytelevel-qwen2-nfc.json")
	if err != nil {
		t.Fatal(err)
	}
	other := &fstest.MapFile{Data: file}
	for _, c := range []struct {
		name, mode string
		files      fstest.MapFS
		mistral    bool
		err        string
	}{
		{"tekken.json alone", "", fstest.MapFS{"tekken.json": tekken}, true, ""},
		{"a model alone", "", fstest.MapFS{"tokenizer.model.v3": model}, false, "only tekken.json is done exactly"},
		{"a model alone, without version", "", fstest.MapFS{"tokenizer.model": model}, false, "mistral mode only"},
		{"beside a tokenizer.json", "", fstest.MapFS{"tekken.json": tekken, "tokenizer.json": other}, false, ""},
		{"with Mistral's weights", "", fstest.MapFS{"tekken.json": tekken, "tokenizer.json": other, "consolidated-1.safetensors": {}}, true, ""},
		{"a model without version", "", fstest.MapFS{"tokenizer.model": model, "tokenizer.json": other, "consolidated.safetensors": {}}, false, ""},
		{"a model is asked for", "mistral", fstest.MapFS{"tokenizer.model.v3": model, "tokenizer.json": other}, false, "only tekken.json is done exactly"},
		{"not asked for", "hf", fstest.MapFS{"tekken.json": tekken, "tokenizer.json": other}, false, ""},
		{"asked for and not there", "mistral", fstest.MapFS{"tokenizer.json": other}, false, "no tekken.json"},
		{"not asked for and nothing else", "hf", fstest.MapFS{"tekken.json": tekken}, false, "no tokenizer.json"},
		{"an unknown mode", "slow", fstest.MapFS{"tekken.json": tekken}, false, `"slow"`},
		{"the name has no such version", "mistral", fstest.MapFS{"tokenizer.model.v4": model}, false, "no tekken.json"},
	} {
		tok, err := tokenizer.Load(c.files, tokenizer.Config{Mode: c.mode})
		switch {
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v, want an error about %q", c.name, err, c.err)
			}
		case err != nil:
			t.Errorf("%s: %v", c.name, err)
		default:
			if _, is := tok.ID("[INST]"); is != c.mistral {
				t.Errorf("%s: mistral %v, want %v", c.name, is, c.mistral)
			}
		}
	}
}

// A longer conversation has a longer prompt, so turns share their beginnings.
func TestMistralReuse(t *testing.T) {
	m, err := tokenizer.LoadModel(mistralOf(t, "tekken.json", "v13"), tokenizer.ModelConfig{Cache: tokenizer.NewCache(1 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("The router reads the prompt. ", 300)
	turn := func(more string) tokenizer.Prompt {
		p, err := m.Encode(context.Background(), nil, requestOf(t, []byte(`{"messages":[{"role":"system","content":"`+long+`"},{"role":"user","content":"Hi."}`+more+`]}`)), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	one := turn("")
	two := turn(`,{"role":"assistant","content":"Hello."},{"role":"user","content":"What is it?"}`)
	if at := tokenizer.FirstDiff(one.IDs, two.IDs); at != len(one.IDs) || two.Reused < len(long)-4<<10 {
		t.Errorf("the second turn goes another way at %d of %d, with %d bytes reused", at, len(one.IDs), two.Reused)
	}
}

// Of an image only the engine knows how many tokens it takes.
func TestMistralImage(t *testing.T) {
	files := mistralOf(t, "tekken.json", "v11")
	body := `{"messages":[{"role":"system","content":"Look."},{"role":"user","content":[{"type":"text","text":"What is it?"},{"type":"image_url","image_url":{"url":"http://localhost/x.png"}}]}]}`
	encode := func() tokenizer.Prompt {
		m, err := tokenizer.LoadModel(files, tokenizer.ModelConfig{})
		if err != nil {
			t.Fatal(err)
		}
		p, err := m.Encode(context.Background(), nil, requestOf(t, []byte(body)), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if p := encode(); p.Mode != tokenizer.Bytes {
		t.Errorf("a model without eyes: %+v", p)
	}
	for name, f := range files {
		files[name] = &fstest.MapFile{Data: bytes.Replace(f.Data, []byte(`"special_tokens"`), []byte(`"image":{"image_patch_size":16,"max_image_size":1024},"special_tokens"`), 1)}
	}
	if p := encode(); p.Mode != tokenizer.ExactPrefix || p.Reason != tokenizer.Items || p.Exact == 0 {
		t.Errorf("mode %s, %s, %d exact", p.Mode, p.Reason, p.Exact)
	}
}

func TestMistralFilesThatAreRefused(t *testing.T) {
	tekken := string(mistralFile(t, "tekken.json"))
	replaced := func(old, with string) string {
		if !strings.Contains(tekken, old) {
			t.Fatalf("no %q in the file", old)
		}
		return strings.Replace(tekken, old, with, 1)
	}
	for _, c := range []struct {
		name, file, want string
		unsupported      bool
	}{
		{"cut", tekken[:5000], "at byte 5000", false},
		{"no config", `{"vocab":[]}`, "config", false},
		{"unknown version", replaced(`"version":"v15"`, `"version":"v16"`), "v16", true},
		{"no version", replaced(`"version":"v15"`, `"x":1`), "version", true},
		{"more special tokens than tokens", replaced(`"default_num_special_tokens":40`, `"default_num_special_tokens":400`), "default_num_special_tokens", false},
		{"negative", replaced(`"default_num_special_tokens":40`, `"default_num_special_tokens":-1`), "default_num_special_tokens", false},
		{"huge", replaced(`"default_num_special_tokens":40`, `"default_num_special_tokens":4000000000`), "default_num_special_tokens", false},
		{"fewer tokens than said", replaced(`"default_vocab_size":`, `"default_vocab_size":9`), "vocab: ", false},
		{"ranks out of order", replaced(`"rank":5,`, `"rank":6,`), "rank 6, want 5", false},
		{"no rank", replaced(`"rank":5,`, ``), "rank -1, want 5", false},
		{"no bytes", replaced(`"token_bytes":"AA==",`, ``), "token 0", false},
		{"another byte", replaced(`"token_bytes":"AQ=="`, `"token_bytes":"AA=="`), "token 1", false},
		{"no base64", replaced(`"token_bytes":"AQ=="`, `"token_bytes":"???"`), "base64", false},
		{"a token twice", regexp.MustCompile(`("rank":300,"token_bytes":)"[^"]*"`).ReplaceAllString(tekken, `$1"AA=="`), "token 300 is there twice", false},
		{"a special token twice", replaced(`"[INST]"`, `"<s>"`), "twice", false},
		{"special tokens out of order", replaced(`{"rank":2,"token_str":"</s>"`, `{"rank":3,"token_str":"</s>"`), "special_tokens", false},
		{"no <s>", replaced(`"<s>"`, `"<t>"`), "<s>", false},
		{"no special tokens", regexp.MustCompile(`"special_tokens":\[.*?\],`).ReplaceAllString(tekken, ""), "special_tokens: missing", false},
		{"no settings", regexp.MustCompile(`,"model_settings_builder":.*}}`).ReplaceAllString(tekken, "}"), "model_settings_builder", false},
		{"a broken pattern", replaced(`"pattern":"`, `"pattern":"(`), "pattern", true},
		{"no control token for tools", replaced(`"[ARGS]"`, `"[BARGS]"`), "[ARGS]", false},
	} {
		m, err := tokenizer.LoadModel(fstest.MapFS{"tekken.json": {Data: []byte(c.file)}}, tokenizer.ModelConfig{})
		if err == nil || !strings.Contains(err.Error(), c.want) || errors.Is(err, tokenizer.ErrUnsupported) != c.unsupported {
			t.Errorf("%s: %v, %v; want an error about %q, unsupported %v", c.name, m != nil, err, c.want, c.unsupported)
		}
	}
}
