// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvroute/kvroute/tokenizer"
)

// autoCase is a folder of a model, and what AutoTokenizer makes of it.
type autoCase struct {
	Name, Base, Error string
	Files             map[string]json.RawMessage
	Cases             [][2]json.RawMessage
	Special           []uint32
}

// files returns the folder.
func (c autoCase) files(t testing.TB) fstest.MapFS {
	t.Helper()
	base, err := os.ReadFile("testdata/golden/" + c.Base + ".json")
	if err != nil {
		t.Fatal(err)
	}
	files := fstest.MapFS{"tokenizer.json": {Data: base}}
	for name, b := range c.Files {
		files[name] = &fstest.MapFile{Data: b}
	}
	return files
}

func autoCases(t testing.TB, path string) (all []autoCase) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var c autoCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		if c.Name != "" {
			all = append(all, c)
		}
	}
	if len(all) < 20 {
		t.Fatalf("%s: %d folders", path, len(all))
	}
	return all
}

// Ids are those of AutoTokenizer of the engine's version of transformers, which reads more than
// tokenizer.json.
func TestAuto(t *testing.T) {
	for _, loader := range []tokenizer.Loader{tokenizer.Transformers5, tokenizer.Transformers4} {
		for _, c := range autoCases(t, "testdata/auto/"+string(loader)+".jsonl") {
			t.Run(string(loader)+"/"+c.Name, func(t *testing.T) {
				tok, err := tokenizer.Load(c.files(t), tokenizer.Config{Loader: loader})
				if err != nil {
					t.Fatal(err)
				}
				unclear := c.Error != "" || loader == tokenizer.Transformers4 && !strings.Contains(string(c.Files["tokenizer_config.json"]), "tokenizer_class")
				if doubted := tok.Doubt != ""; doubted != unclear {
					t.Errorf("doubt %q; want one: %t", tok.Doubt, unclear)
				}
				if unclear {
					return
				}
				check := func(text string, special bool, want []uint32) {
					if got, err := tok.Append(context.Background(), nil, []byte(text), special); err != nil || !slices.Equal(got, want) {
						t.Errorf("%q, special tokens %t: %d, %v; want %d", text, special, got, err, want)
					}
				}
				check("a b", true, c.Special)
				for _, x := range c.Cases {
					var text string
					var want []uint32
					if err := errors.Join(json.Unmarshal(x[0], &text), json.Unmarshal(x[1], &want)); err != nil {
						t.Fatal(err)
					}
					check(text, false, want)
				}
			})
		}
	}
}

// Whatever the configuration is, loading gives a tokenizer or an error.
func FuzzAuto(f *testing.F) {
	for _, c := range autoCases(f, "testdata/auto/transformers5.jsonl") {
		f.Add([]byte(c.Files["tokenizer_config.json"]), []byte(c.Files["config.json"]), []byte(c.Files["special_tokens_map.json"]), []byte(c.Files["added_tokens.json"]))
	}
	base := autoCase{Base: "metaspace-first"}.files(f)["tokenizer.json"]
	f.Fuzz(func(t *testing.T, config, model, special, added []byte) {
		files := fstest.MapFS{"tokenizer.json": base}
		for name, b := range map[string][]byte{"tokenizer_config.json": config, "config.json": model, "special_tokens_map.json": special, "added_tokens.json": added} {
			if len(b) > 0 {
				files[name] = &fstest.MapFile{Data: b}
			}
		}
		for _, loader := range []tokenizer.Loader{tokenizer.Transformers5, tokenizer.Transformers4} {
			if tok, err := tokenizer.Load(files, tokenizer.Config{Loader: loader}); (tok == nil) == (err == nil) {
				t.Fatalf("a tokenizer and an error: %v", err)
			}
		}
	})
}

// transformers 5 replaces the expression of Mistral's large vocabularies if the configuration asks for it. The ids are those of the
// same file with the other expression.
func TestMistralRegex(t *testing.T) {
	b, err := os.ReadFile("testdata/golden/bytelevel-qwen2-nfc.json")
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	marshal := func() []byte {
		b, err := json.Marshal(file)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	model := file["model"].(map[string]any)
	vocab := model["vocab"].(map[string]any)
	vocab["xX"] = len(vocab) // only one of the expressions parts it
	model["merges"] = append([]any{[]string{"x", "X"}}, model["merges"].([]any)...)
	small := marshal()
	for n := len(vocab); n <= 100_000; n++ {
		vocab[fmt.Sprintf("~%d~", n)] = n
	}
	large := marshal()
	file["pre_tokenizer"].(map[string]any)["pretokenizers"].([]any)[0].(map[string]any)["pattern"] = map[string]any{"Regex": `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`}
	fixed := marshal()
	ids := func(files fstest.MapFS) []uint32 {
		tok, err := tokenizer.Load(files, tokenizer.Config{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := tok.Append(context.Background(), nil, []byte("a xXylophone"), false)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	before, after := ids(fstest.MapFS{"tokenizer.json": {Data: large}}), ids(fstest.MapFS{"tokenizer.json": {Data: fixed}})
	if slices.Equal(before, after) {
		t.Fatal("the text does not show the expression")
	}
	for _, c := range []struct {
		name, config, flag string
		file               []byte
		fixed              bool
	}{
		{"an old file of Mistral", `{"model_type":"mistral3","transformers_version":"4.57.3"}`, "true", large, true},
		{"without a version", `{"model_type":"mistral"}`, "true", large, true},
		{"without a kind", `{"transformers_version":"4.57.3"}`, "true", large, true},
		{"a candidate of version 5", `{"model_type":"pixtral","transformers_version":"5.0.0rc1"}`, "true", large, true},
		{"version 5", `{"model_type":"mistral3","transformers_version":"5.0.0"}`, "true", large, false},
		{"another kind", `{"model_type":"llama4","transformers_version":"4.57.3"}`, "true", large, false},
		{"without the flag", `{"model_type":"mistral3","transformers_version":"4.57.3"}`, "false", large, false},
		{"a small vocabulary", `{"model_type":"mistral3","transformers_version":"4.57.3"}`, "true", small, false},
	} {
		want := before
		if c.fixed {
			want = after
		}
		got := ids(fstest.MapFS{
			"tokenizer.json": {Data: c.file}, "config.json": {Data: []byte(c.config)},
			"tokenizer_config.json": {Data: []byte(`{"tokenizer_class":"PreTrainedTokenizerFast","fix_mistral_regex":` + c.flag + `}`)},
		})
		if !slices.Equal(got, want) {
			t.Errorf("%s: got %d, want %d", c.name, got, want)
		}
	}
}
