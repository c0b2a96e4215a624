// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
)

const (
	// mistralPattern replaces the first step of Mistral's tokenizers in fixMistral.
	mistralPattern = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// mistralLeast is the number of tokens that a vocabulary must exceed.
	mistralLeast = 100_000
)

// fixMistral replaces the expression of the pre-tokenizer if tokenizer_config.json has "fix_mistral_regex": true. transformers 5 does
// so for large vocabularies of Mistral's model types whose config.json was written by an older version.
func (a *autoConfig) fixMistral(file sections, config bool, version, modelType string) {
	mistral := modelType == "" || slices.Contains(strings.Fields("mistral mistral3 voxtral ministral pixtral"), modelType)
	if !a.flag("fix_mistral_regex") || !config || !mistral || file["pre_tokenizer"].null() {
		return
	}
	major, rest, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	early := version != "" && err == nil && (n < 5 || n == 5 && strings.HasPrefix(rest, "0.0") && strings.ContainsAny(rest, "abcdr"))
	if version != "" && !early || !large(file) {
		return
	}
	split, _ := json.Marshal(map[string]any{"type": "Split", "pattern": map[string]string{"Regex": mistralPattern}, "behavior": "Isolated", "invert": false})
	var pre struct {
		Type  string            `json:"type"`
		Steps []json.RawMessage `json:"pretokenizers"`
	}
	_ = json.Unmarshal(file["pre_tokenizer"].b, &pre) // the parser reports an error
	current := json.RawMessage(file["pre_tokenizer"].b)
	switch {
	case pre.Type == "Sequence" && len(pre.Steps) > 0:
		pre.Steps[0] = split
	case pre.Type == "Metaspace":
		current = json.RawMessage(`{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}`)
		fallthrough
	default:
		pre.Steps = []json.RawMessage{split, current}
	}
	b, err := json.Marshal(map[string]any{"type": "Sequence", "pretokenizers": pre.Steps})
	if err == nil { // else the parser reports the error
		file["pre_tokenizer"] = section{b: b}
	}
}

// large reports whether the vocabulary has more than mistralLeast tokens.
func large(file sections) bool {
	var model struct{ Vocab map[string]json.RawMessage }
	var added []addedToken
	if json.Unmarshal(file["model"].b, &model) != nil {
		return false // the parser reports the error
	}
	n := len(model.Vocab)
	if json.Unmarshal(file["added_tokens"].b, &added) == nil {
		for _, t := range added {
			if _, ok := model.Vocab[t.Content]; !ok {
				n++
			}
		}
	}
	return n > mistralLeast
}
