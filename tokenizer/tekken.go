// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Mistral's own tokenizer files: tekken.json, a list of tokens by rank, and
// SentencePiece models whose names end in a version. Engines that read them insert control
// tokens into a prompt by id. A text never becomes a control token.

var mistralModel = regexp.MustCompile(`^[^.]+\.model(\.(v1|v2|v3|v7|v11|v13|v15)(m1)?)?$`)

// mistralFile returns the file that the engine reads in mistral mode, or "".
func mistralFile(fsys fs.FS) (string, error) {
	entries, err := fs.ReadDir(fsys, ".")
	if err != nil {
		return "", fmt.Errorf("tokenizer: %w", err)
	}
	best := ""
	for _, e := range entries {
		switch name := strings.TrimSuffix(e.Name(), ".gz"); {
		case name == "tekken.json":
			return name, nil
		case mistralModel.MatchString(name):
			best = max(best, name)
		}
	}
	return best, nil
}

// isMistral reports whether the engine reads fsys in mistral mode, and the name of the file that it reads.
func isMistral(fsys fs.FS, mode string) (name string, is bool, err error) {
	switch mode {
	case "hf":
		return "", false, nil
	case "", "mistral":
	default:
		return "", false, fmt.Errorf("tokenizer: unknown mode %q; known are hf and mistral", mode)
	}
	if name, err = mistralFile(fsys); err != nil || mode == "mistral" {
		if name == "" && err == nil {
			err = fmt.Errorf("tokenizer: no tekken.json and no *.model: %w", fs.ErrNotExist)
		}
		return name, true, err
	}
	if name == "" {
		return "", false, nil
	}
	for _, glob := range []string{"tokenizer.json*", "*.tiktoken*", "tiktoken.model*"} {
		if found, _ := fs.Glob(fsys, glob); len(found) > 0 {
			weights, _ := fs.Glob(fsys, "consolidated*.safetensors")
			return name, len(weights) > 0 && !strings.HasSuffix(name, ".model"), nil
		}
	}
	if strings.HasSuffix(name, ".model") {
		// In hf mode engines convert the file; the result has other ids.
		return "", false, fileError(name, unsupported("without a tokenizer.json it is read in mistral mode only"))
	}
	return name, true, nil
}

func loadMistral(fsys fs.FS, name string) (*Tokenizer, error) {
	if name != "tekken.json" {
		return nil, fileError(name, unsupported("a SentencePiece model; only tekken.json is done exactly"))
	}
	b, found, err := readFile(fsys, name)
	if err != nil {
		return nil, err
	}
	t, err := parseTekken(b)
	if err != nil {
		return nil, fileError(found, err)
	}
	for _, text := range []string{"<s>", "</s>"} {
		if _, ok := t.special[text]; !ok {
			return nil, fmt.Errorf("tokenizer: %s: no control token %s", found, text)
		}
	}
	t.before = []uint32{t.special["<s>"]}
	t.plan()
	return t, nil
}

// tekkenConfig is the section config of tekken.json.
type tekkenConfig struct {
	Pattern string `json:"pattern"`
	Size    int    `json:"default_vocab_size"`
	Special int    `json:"default_num_special_tokens"`
	Version string `json:"version"`
}

// oldTekkenTokens are the control tokens of files that do not list them.
//
//nolint:gochecknoglobals // a table
var oldTekkenTokens = strings.Fields("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] " +
	"[TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] " +
	"[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]")

// parseTekken reads tekken.json. The first ids are control tokens. The other tokens follow in
// the order of their ranks, up to default_vocab_size ids in all; later tokens are not used.
func parseTekken(b []byte) (*Tokenizer, error) {
	file, err := section{b: b}.sections()
	if err != nil {
		return nil, err
	}
	var c tekkenConfig
	if err := file["config"].unmarshal(&c); err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	words := c.Size - c.Special
	switch {
	case !slices.Contains(chat.MistralVersions, c.Version):
		return nil, unsupported("config.version: %.40q is none of %q", c.Version, chat.MistralVersions)
	case c.Special < 1 || c.Special >= maxIDs || words < 256 || words >= maxIDs-c.Special:
		return nil, fmt.Errorf("config: default_vocab_size %d with default_num_special_tokens %d", c.Size, c.Special)
	}
	t := &Tokenizer{byteLevel: true, special: map[string]uint32{}}
	v := newVocab(min(words, len(file["vocab"].b)/64))
	t.bpe = bpe{vocab: v, whole: true, unk: noID}
	if err := readTekkenVocab(file["vocab"], v, words, c.Special); err != nil {
		return nil, fmt.Errorf("vocab: %w", err)
	}
	t.mergesOfRanks()
	if t.steps, err = patternSteps(c.Pattern); err != nil {
		return nil, unsupported("config.pattern: %w", err)
	}
	if err := t.readTekkenSpecial(file, c); err != nil {
		return nil, fmt.Errorf("special_tokens: %w", err)
	}
	t.mistral = &chat.Mistral{
		Version: c.Version, Images: !file["image"].null() || !file["multimodal"].null(), Audio: !file["audio"].null(),
	}
	return t, t.readTekkenSettings(file["model_settings_builder"])
}

// readTekkenVocab reads the first count tokens: an object each, with rank and
// token_bytes.
func readTekkenVocab(s section, v *vocab, count, shift int) error {
	if s.null() {
		return fmt.Errorf("missing")
	}
	n := 0
	r := s.reader()
	err := r.List(func() error {
		token, err := r.Value()
		if err != nil || n == count {
			return err
		}
		x := struct {
			Rank  int
			Bytes []byte `json:"token_bytes"` // in base64
		}{Rank: -1}
		wrong := ""
		switch err := json.Unmarshal(token, &x); {
		case err != nil:
			wrong = err.Error()
		case x.Rank != n:
			wrong = fmt.Sprintf("rank %d, want %d", x.Rank, n)
		case len(x.Bytes) == 0 || len(x.Bytes) >= 1<<16 || n < 256 && string(x.Bytes) != string([]byte{byte(n)}):
			wrong = fmt.Sprintf("token %d is empty, has 64 KiB or more, or is not the byte of its rank", n)
		case v.id(x.Bytes) != noID:
			wrong = fmt.Sprintf("token %d is there twice", n)
		}
		if wrong != "" {
			r.At -= len(token)
			return r.Fail(wrong)
		}
		v.put(x.Bytes, uint32(n+shift), true)
		n++
		return nil
	})
	if err == nil && n < count {
		err = r.Fail(fmt.Sprintf("%d tokens, want %d", n, count))
	}
	return err
}

// readTekkenSpecial reads the texts of the control tokens, which have the first ids.
func (t *Tokenizer) readTekkenSpecial(file sections, c tekkenConfig) error {
	names := oldTekkenTokens
	if s := file["special_tokens"]; !s.null() {
		var list []struct {
			Rank int    `json:"rank"`
			Text string `json:"token_str"`
		}
		if err := s.unmarshal(&list); err != nil {
			return err
		}
		names = make([]string, len(list))
		for i, x := range list {
			if x.Rank != i || x.Text == "" {
				return fmt.Errorf("token %d has rank %d and the text %.40q", i, x.Rank, x.Text)
			}
			names[i] = x.Text
		}
	} else if version, _ := strconv.Atoi(c.Version[1:]); version > 7 {
		return fmt.Errorf("missing, and version %s must have them", c.Version)
	}
	if len(names) > c.Special {
		return fmt.Errorf("%d, more than default_num_special_tokens %d", len(names), c.Special)
	}
	for i, name := range names {
		if _, twice := t.special[name]; twice {
			return fmt.Errorf("%.40q is there twice", name)
		}
		t.special[name] = uint32(i)
		t.vocab.put([]byte(name), uint32(i), false)
	}
	return nil
}

// readTekkenSettings reads what a file of version 15 says about the reasoning
// efforts that the model knows.
func (t *Tokenizer) readTekkenSettings(s section) error {
	if s.null() {
		if t.mistral.Version == "v15" {
			return fmt.Errorf("no model_settings_builder")
		}
		return nil
	}
	var builder struct {
		Effort struct {
			Default string
			Values  []string
		} `json:"reasoning_effort"`
	}
	if err := s.unmarshal(&builder); err != nil {
		return fmt.Errorf("model_settings_builder: %w", err)
	}
	t.mistral.Effort, t.mistral.Efforts = builder.Effort.Default, builder.Effort.Values
	return nil
}
