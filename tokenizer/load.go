// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
)

// Bounds of what a file may hold. The largest vocabularies that models use have
// some 260,000 tokens in 33 MB.
const (
	maxFile   = 128 << 20
	maxIDs    = 1 << 21
	maxMerges = 1 << 22
	maxAdded  = 1 << 16
	maxFrame  = 1 << 10  // special tokens before and behind a text; real files have one or two
	maxText   = 64 << 10 // bytes of one text of a step, or of an added token
	maxNormed = 16 << 20 // bytes of the normal forms of all added tokens
)

// bounded returns an error that names the field if its text is too long: a step
// repeats the text wherever it applies.
func bounded(field, text string) error {
	if len(text) > maxText {
		return fmt.Errorf("%s of %d bytes, more than %d KiB", field, len(text), maxText>>10)
	}
	return nil
}

// ErrUnsupported is in the chain of the error when a file is sound but asks for
// something that is not done exactly here, such as a Unigram model.
var ErrUnsupported = errors.New("not supported")

// Load reads the tokenizer of the model whose files fsys has: tokenizer.json,
// else a rank file *.tiktoken, for which c says what the file does not; or, in
// mistral mode, tekken.json or a SentencePiece model. Any of them may be
// compressed (.gz).
//
// The error names the file, and the component or the byte at which it is broken
// or cannot be done exactly; the latter wraps [ErrUnsupported]. Nothing in a file
// makes Load panic or use more than a few times the file's size.
func Load(fsys fs.FS, c Config) (*Tokenizer, error) {
	file, is, err := isMistral(fsys, c.Mode)
	if err != nil {
		return nil, err
	}
	if is {
		return loadMistral(fsys, file)
	}
	b, name, err := readFile(fsys, "tokenizer.json")
	if errors.Is(err, fs.ErrNotExist) {
		return loadRanks(fsys, c)
	}
	if err != nil {
		return nil, err
	}
	sections, err := section{b, 0}.sections()
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %s: %w", name, err)
	}
	if c.Loader == "" {
		c.Loader = Transformers5
	}
	more, doubt, err := auto(fsys, c.Loader, sections)
	if err != nil {
		return nil, err
	}
	t, err := parse(sections, more)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %s: %w", name, err)
	}
	if doubt != "" {
		t.Doubt = doubt
	}
	t.plan()
	return t, nil
}

// ReadFile reads a file of a model, or its compressed form (name.gz).
func ReadFile(fsys fs.FS, name string) ([]byte, error) {
	b, _, err := readFile(fsys, name)
	return b, err
}

// readFile is ReadFile that also tells which of the two it was.
func readFile(fsys fs.FS, name string) (b []byte, found string, err error) {
	f, err := fsys.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		name += ".gz"
		if f, err = fsys.Open(name); errors.Is(err, fs.ErrNotExist) {
			return nil, "", fmt.Errorf("tokenizer: %s: %w", strings.TrimSuffix(name, ".gz"), fs.ErrNotExist)
		}
	}
	if err != nil {
		return nil, "", fmt.Errorf("tokenizer: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	var in io.Reader = f
	if strings.HasSuffix(name, ".gz") {
		if in, err = gzip.NewReader(f); err != nil {
			return nil, "", fmt.Errorf("tokenizer: %s: %w", name, err)
		}
	}
	var buf bytes.Buffer
	if info, err := f.Stat(); err == nil && info.Size() <= maxFile {
		buf.Grow(int(info.Size()) + bytes.MinRead)
	} else if err == nil {
		return nil, "", fmt.Errorf("tokenizer: %s: %d MB, more than %d MB", name, info.Size()>>20, maxFile>>20)
	}
	if _, err := buf.ReadFrom(io.LimitReader(in, maxFile+1)); err != nil {
		return nil, "", fmt.Errorf("tokenizer: %s: %w", name, err)
	}
	if buf.Len() > maxFile {
		return nil, "", fmt.Errorf("tokenizer: %s: more than %d MB", name, maxFile>>20)
	}
	return buf.Bytes(), name, nil
}

func unsupported(err error) error { return fmt.Errorf("%w: %w", ErrUnsupported, err) }

// plan chooses how stretches are encoded.
func (t *Tokenizer) plan() {
	t.identity = identities.Add(1) << 8 // the low bits are for what else tells texts apart
	t.nfc = len(t.normalizers) == 1 && t.normalizers[0].kind == "NFC"
	t.steps = t.matching()
	for k := range t.steps {
		if t.steps[k].regex != nil {
			t.Slow = fmt.Sprintf("pre_tokenizer: no scanner for %q", t.steps[k].regex.expr)
		}
	}
	for k := range t.normalizers {
		if t.normalizers[k].regex != nil {
			t.Slow = "normalizer: Replace with an expression"
		}
	}
	switch {
	case t.byteLevel && (t.nfc || len(t.normalizers) == 0) && !slices.ContainsFunc(t.steps, func(p splitter) bool { return p.scan == nil || p.behavior != "Isolated" }):
		if t.scan = t.steps; len(t.scan) == 0 {
			t.scan = []splitter{rule{scanAll, classes, false}.splitter()}
		}
		for t.resumes+1 < len(t.steps) && t.steps[t.resumes].anywhere {
			t.resumes++
		}
	case !t.byteLevel && t.normed == nil && t.bpe.hasBytes && !t.bpe.whole: // whole is of uncut stretches
		if t.cuts = t.planCuts(); t.cuts != nil {
			t.bpe.space = t.cuts.space
			t.bpe.prepareSingle()
		}
	}
	if t.scan == nil && t.cuts == nil && t.Slow == "" {
		t.Slow = "normalizer and pre_tokenizer: steps that only the general way can do together"
	}
}

// matching returns the steps without the first ones that never match, as Gemma's
// files have: a Split on a space behind a Replace of each space.
//
// All text that a step sees is a part of what the last normalizer returned, between
// whatever added tokens. If that one replaces each occurrence of one byte by a text
// without the byte, no part has it: a literal of one byte cannot come to be where
// two texts meet. A Split without a match leaves a piece as it is, unless it is
// inverted. Steps behind others stay, since those may put the byte back.
func (t *Tokenizer) matching() []splitter {
	if len(t.normalizers) == 0 {
		return t.steps
	}
	r, steps := t.normalizers[len(t.normalizers)-1], t.steps
	if r.kind != "Replace" || r.regex != nil || len(r.from) != 1 || strings.Contains(r.to, r.from) {
		return steps
	}
	for len(steps) > 0 && string(steps[0].literal) == r.from && !steps[0].invert {
		steps = steps[1:]
	}
	return steps
}

// scanAll takes all of a stretch for one piece.
func scanAll(_ *classTable, _ []byte, _, end int) (j, looked int) { return end, end + 1 }

// Config says what the files do not.
type Config struct {
	// Mode is the engine's option --tokenizer-mode: hf (tokenizer.json or a rank file) or mistral
	// (tekken.json, tokenizer.model.v1 and the like). Empty: mistral if only that can be, or as vLLM
	// recognizes it, by weights named consolidated*.safetensors.
	Mode string
	// Loader is what the engine reads a tokenizer.json with. Default transformers5.
	Loader Loader
	// Pattern, for a rank file, parts the text into words: a regular expression, or the name of a
	// known one: gpt2, cl100k, o200k, kimi. Empty: that of the file's name, if it is
	// one of the published files, or of the class that tokenizer_config.json names, if
	// that is Kimi's.
	Pattern string
	// Special, for a rank file, are the special tokens and their ids. Nil: added_tokens_decoder of
	// tokenizer_config.json, else those of the published file, else none, which is
	// told by the Tokenizer's Doubt.
	Special map[string]uint32

	// reserved is how many ids behind the ranks are special tokens, those without a name
	// under one made of the id.
	reserved int
}

// Loader is the library with which an engine reads a model's files.
type Loader string

// The loaders.
const (
	// Transformers5 is AutoTokenizer of transformers 5, which vLLM and SGLang use. It builds the
	// tokenizers of some classes anew from the vocabulary and the merges.
	Transformers5 Loader = "transformers5"
	// Transformers4 is the loader of transformers 4, which TensorRT-LLM uses.
	Transformers4 Loader = "transformers4"
	// TokenizerJSON takes tokenizer.json as it stands.
	TokenizerJSON Loader = "tokenizer.json"
)
