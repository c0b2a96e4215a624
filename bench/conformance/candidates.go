// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// candidate is one tokenizer to compare, in a folder of its own.
type candidate struct {
	name    string
	file    string // in the folder: tokenizer.json, or a file of Mistral's
	source  string // the path of the file's contents
	real    bool   // a served model's, large enough to measure speed
	version string // to write into a tekken.json; empty leaves its own
	config  string // a tokenizer_config.json: it is compared with AutoTokenizer
	model   string // the model_type of a config.json; empty writes none
	words   []string
}

func (c candidate) mistral() bool { return c.file != "tokenizer.json" }

// candidates are the tokenizers of the reference data, and the project's own.
func candidates(o options) (all []candidate) {
	files, _ := filepath.Glob(filepath.Join(o.shared, "tokenizers/*/tokenizer.json*"))
	if len(files) == 0 {
		fmt.Println("no real tokenizers under", o.shared, "- only the project's own are compared, and no speed")
	}
	for _, f := range files {
		all = append(all, candidate{name: filepath.Base(filepath.Dir(f)), file: "tokenizer.json", source: f, real: true})
	}
	files, _ = filepath.Glob(filepath.Join(golden, "*.json"))
	for _, f := range files {
		all = append(all, candidate{name: strings.TrimSuffix(filepath.Base(f), ".json"), file: "tokenizer.json", source: f})
	}
	return all
}

// mistralFiles are the files in the reference's package, and the project's own in every
// version.
func mistralFiles(ref *reference) (all []candidate) {
	var answer struct{ Files []string }
	ref.ask(map[string]any{"op": "files"}, &answer)
	for _, f := range answer.Files {
		if name := filepath.Base(f); strings.HasPrefix(name, "tekken") { // kvroute reads no SentencePiece models
			all = append(all, candidate{name: name, file: "tekken.json", source: f})
		}
	}
	for _, v := range chat.MistralVersions {
		all = append(all, candidate{name: "own tekken " + v, file: "tekken.json", source: filepath.Join(golden, "../mistral/tekken.json"), version: v})
	}
	return all
}

// variants are what transformers finds in a tokenizer_config.json beside a tokenizer.json:
// tokens that the latter lacks, and classes that rebuild it.
//
//nolint:gochecknoglobals // a table
var variants = []struct{ name, class, fields string }{ // fields of JSON, with a comma after each
	{"GPT2Tokenizer", "GPT2", `"add_prefix_space": true, `},
	{"LlamaTokenizer", "Llama", ""},
	{"LlamaTokenizer, legacy", "Llama", `"legacy": true, "add_prefix_space": true, `},
	{"Qwen2Tokenizer", "Qwen2", ""},
	{"added_tokens_decoder", "", `"added_tokens_decoder": {"400000": {"content": "<|new|>", "special": true}, "400001": {"content": "neu ", "lstrip": true, "rstrip": true, "normalized": true}, "400002": {"content": "é<x>", "single_word": true}}, `},
	{"additional_special_tokens", "", `"additional_special_tokens": ["<|new_tok|>", "é<x>"], `},
	{"bos and eos", "", `"add_bos_token": true, "add_eos_token": true, "bos_token": "<s>", "eos_token": "</s>", `},
	{"extra_special_tokens", "", `"extra_special_tokens": {"image_token": "<|new_tok|>"}, `},
	{"pad_token", "", `"pad_token": "<|new|>", `},
}

// withConfigs are candidates to compare with AutoTokenizer: each file with its own
// tokenizer_config.json, and some with each variant that is for their kind of file.
func withConfigs(all []candidate) (out []candidate) {
	modelTypes := map[string]string{"gpt-oss": "gpt_oss", "qwen3": "qwen3", "tinyllama": "llama"}
	for _, c := range all {
		own, err := readFile(filepath.Join(filepath.Dir(c.source), "tokenizer_config.json"))
		if err == nil && c.real {
			out = append(out, candidate{name: c.name + " with its own tokenizer_config.json", file: c.file, source: c.source, config: string(own), model: modelTypes[c.name]})
		}
		if !c.real && !slices.Contains([]string{"bytelevel-gpt2", "bytelevel-qwen2-nfc", "metaspace-first", "prepend-replace"}, c.name) {
			continue
		}
		file, _ := readFile(c.source) // the comparison of the file itself reports the error
		byteLevel := bytes.Contains(file, []byte(`"ByteLevel"`))
		for _, v := range variants {
			if v.class != "" && (v.class == "Llama") == byteLevel {
				continue
			}
			class := v.class + "Tokenizer"
			if v.class == "" {
				class = "PreTrainedTokenizerFast"
			}
			out = append(out, candidate{
				name: c.name + " with " + v.name, file: c.file, source: c.source, model: strings.ToLower(v.class),
				config: fmt.Sprintf(`{%s"tokenizer_class": %q}`, v.fields, class),
				words:  []string{"<|new|>", "<|new_tok|>", "neu ", "é<x>"}, // the tokens that only the variants add
			})
		}
	}
	return out
}

// load writes the candidate's folder, and loads it on both sides. It returns nil if there is
// nothing to compare, and prints the reason.
func (c candidate) load(ref *reference, dir string) *tokenizer.Model {
	data := bench.Must(readFile(c.source))
	if c.version != "" { // of a tekken.json of version v15
		var file map[string]json.RawMessage
		bench.NoError(json.Unmarshal(data, &file))
		file["config"] = bytes.Replace(file["config"], []byte(`"v15"`), []byte(`"`+c.version+`"`), 1)
		if c.version != "v15" {
			delete(file, "model_settings_builder")
		}
		data = bench.Must(json.Marshal(file))
	}
	files := map[string][]byte{c.file: data, "tokenizer_config.json": []byte(c.config)}
	if c.model != "" {
		files["config.json"] = fmt.Appendf(nil, `{"model_type": %q}`, c.model)
	}
	writeFolder(dir, files)
	m := bench.Must(tokenizer.LoadModel(os.DirFS(dir), tokenizer.ModelConfig{}))
	var answer struct{ Error string }
	ref.ask(map[string]any{"op": "load", "path": filepath.Join(dir, c.file), "auto": c.config != ""}, &answer)
	if answer.Error != "" {
		fmt.Printf("%s: AutoTokenizer does not load it: %s\n", c.name, answer.Error)
		return nil
	}
	if doubt := m.Tokenizer().Doubt; doubt != "" {
		fmt.Printf("%s: not compared, since kvroute says that its ids may differ: %s\n", c.name, doubt)
		return nil
	}
	return m
}
