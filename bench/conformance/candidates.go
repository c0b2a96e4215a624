// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// candidate is one tokenizer to compare.
type candidate struct {
	name, file string
	real       bool   // a served model's, large enough to measure speed
	mistral    bool   // a file of Mistral's own
	version    string // that it is turned into; empty leaves it
	config     string // a tokenizer_config.json: it is compared with AutoTokenizer
	model      string // the model_type of a config.json; empty writes none
	words      []string
}

// modelTypes maps each model of the reference data to its model type.
//
//nolint:gochecknoglobals // a table
var modelTypes = map[string]string{"gpt-oss": "gpt_oss", "qwen3": "qwen3", "tinyllama": "llama"}

// newTokens are tokens that only a tokenizer_config.json brings.
//
//nolint:gochecknoglobals // a table
var newTokens = []string{"<|new|>", "<|new_tok|>", "neu ", "é<x>"}

// variants are what transformers finds in a tokenizer_config.json beside a tokenizer.json:
// tokens that the latter lacks, and classes that rebuild it.
//
//nolint:gochecknoglobals // a table
var variants = map[string]string{
	"added_tokens_decoder":      `"added_tokens_decoder": {"400000": {"content": "<|new|>", "special": true}, "400001": {"content": "neu ", "lstrip": true, "rstrip": true, "normalized": true}, "400002": {"content": "é<x>", "single_word": true}}`,
	"additional_special_tokens": `"additional_special_tokens": ["<|new_tok|>", "é<x>"]`,
	"extra_special_tokens":      `"extra_special_tokens": {"image_token": "<|new_tok|>"}`,
	"pad_token":                 `"pad_token": "<|new|>"`,
	"bos and eos":               `"add_bos_token": true, "add_eos_token": true, "bos_token": "<s>", "eos_token": "</s>"`,
	"LlamaTokenizer":            `"tokenizer_class": "LlamaTokenizer"`,
	"LlamaTokenizer, legacy":    `"tokenizer_class": "LlamaTokenizer", "legacy": true, "add_prefix_space": true`,
	"GPT2Tokenizer":             `"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true`,
	"Qwen2Tokenizer":            `"tokenizer_class": "Qwen2Tokenizer"`,
}

// withConfigs are candidates to compare with AutoTokenizer: each file with its own
// tokenizer_config.json, and some with each variant that is for their kind of file.
func withConfigs(all []candidate) (out []candidate) {
	for _, c := range all {
		own, err := readMaybeGzip(filepath.Join(filepath.Dir(c.file), "tokenizer_config.json"))
		if err == nil && c.real {
			out = append(out, candidate{name: c.name + " with its own tokenizer_config.json", file: c.file, config: string(own), model: modelTypes[c.name]})
		}
		if !c.real && !slices.Contains([]string{"bytelevel-gpt2", "bytelevel-qwen2-nfc", "metaspace-first", "prepend-replace"}, c.name) {
			continue
		}
		file, _ := readMaybeGzip(c.file) // the comparison of the file itself reports the error
		byteLevel := bytes.Contains(file, []byte(`"ByteLevel"`))
		for _, v := range slices.Sorted(maps.Keys(variants)) {
			config := variants[v]
			if strings.Contains(config, "Tokenizer") && strings.Contains(config, "Llama") == byteLevel {
				continue
			}
			class, _, ofClass := strings.Cut(v, "Tokenizer")
			if !ofClass {
				config = `"tokenizer_class": "PreTrainedTokenizerFast", ` + config
				class = ""
			}
			out = append(out, candidate{name: c.name + " with " + v, file: c.file, config: "{" + config + "}", model: strings.ToLower(class), words: newTokens})
		}
	}
	return out
}

// mistralFiles are the files in the reference's package, and the project's own.
func mistralFiles(ref *reference) (all []candidate) {
	var answer struct{ Files []string }
	ref.ask(map[string]any{"op": "files"}, &answer)
	for _, f := range answer.Files {
		if name := filepath.Base(f); strings.HasPrefix(name, "tekken") || strings.Contains(name, ".model") {
			all = append(all, candidate{name: name, file: f, mistral: true})
		}
	}
	// The project's own, in every version.
	for _, v := range chat.MistralVersions {
		n, _ := strconv.Atoi(v[1:])
		if n >= 3 {
			all = append(all, candidate{name: "own tekken " + v, file: filepath.Join(golden, "../mistral/tekken.json"), mistral: true, version: v})
		}
		if n <= 7 {
			all = append(all, candidate{name: "own tokenizer.model." + v, file: filepath.Join(golden, "../mistral/tokenizer.model"), mistral: true, version: v})
		}
	}
	return all
}

// asVersion returns a tekken.json of version v15 as one of another version.
func asVersion(b []byte, version string) []byte {
	var file map[string]json.RawMessage
	bench.NoError(json.Unmarshal(b, &file))
	file["config"] = bytes.Replace(file["config"], []byte(`"v15"`), []byte(`"`+version+`"`), 1)
	if version != "v15" {
		delete(file, "model_settings_builder")
	}
	return bench.Must(json.Marshal(file))
}

func candidates(o options) (all []candidate) {
	files, _ := filepath.Glob(filepath.Join(o.shared, "tokenizers/*/tokenizer.json*"))
	if len(files) == 0 {
		fmt.Println("no real tokenizers under", o.shared, "- only the project's own are compared, and no speed")
	}
	for _, f := range files {
		all = append(all, candidate{name: filepath.Base(filepath.Dir(f)), file: f, real: true})
	}
	files, _ = filepath.Glob(filepath.Join(golden, "*.json"))
	for _, f := range files {
		all = append(all, candidate{name: strings.TrimSuffix(filepath.Base(f), ".json"), file: f})
	}
	return all
}

// unpacked writes the candidate's file to a folder that both sides read.
func (c candidate) unpacked(work string) (path string) {
	name := "tokenizer.json"
	switch {
	case c.mistral && strings.Contains(c.name, "tekken"):
		name = "tekken.json"
	case c.mistral:
		name = strings.TrimPrefix(c.name, "own ")
	}
	path = filepath.Join(work, c.name, name)
	bench.NoError(os.MkdirAll(filepath.Dir(path), 0o755))
	b := bench.Must(readMaybeGzip(c.file))
	if c.version != "" && name == "tekken.json" {
		b = asVersion(b, c.version)
	}
	write := func(name string, data []byte) {
		bench.NoError(os.WriteFile(filepath.Join(filepath.Dir(path), name), data, 0o644))
	}
	if c.config != "" {
		write("tokenizer_config.json", []byte(c.config))
	}
	if c.model != "" {
		write("config.json", fmt.Appendf(nil, `{"model_type": %q}`, c.model))
	}
	write(name, b)
	return path
}

func readMaybeGzip(name string) ([]byte, error) {
	return tokenizer.ReadFile(os.DirFS(filepath.Dir(name)), strings.TrimSuffix(filepath.Base(name), ".gz"))
}
