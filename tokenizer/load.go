// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
)

// Limits for files. The largest vocabularies in use have about 260,000 tokens in 33 MB.
const (
	maxFile   = 128 << 20
	maxIDs    = 1 << 21
	maxMerges = 1 << 22
	maxAdded  = 1 << 16
	maxFrame  = 1 << 10  // special tokens before and behind a text; real files have one or two
	maxText   = 64 << 10 // bytes of one text of a step, or of an added token
	maxNormed = 16 << 20 // bytes of the normal forms of all added tokens
)

// bounded returns an error that names the field if its text is too long. A step may repeat its text
// many times.
func bounded(field, text string) error {
	if len(text) > maxText {
		return fmt.Errorf("%s of %d bytes, more than %d KiB", field, len(text), maxText>>10)
	}
	return nil
}

// ErrUnsupported is in the chain of the error if a file is valid but needs something that kvroute does
// not do exactly, such as a Unigram model.
var ErrUnsupported = errors.New("not supported")

// Load reads the tokenizer of a model from its files: tokenizer.json, else a rank file (*.tiktoken),
// for which c supplements the file; in mistral mode tekken.json or a SentencePiece model. Each file
// may be compressed (.gz).
//
// The error names the file, and the component or the byte where the file is invalid or unsupported; in
// the latter case it wraps [ErrUnsupported]. No file makes Load panic or use more than a few times the
// file's size in memory.
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
	sections, err := section{b: b}.sections()
	if err != nil {
		return nil, fileError(name, err)
	}
	more, doubt, err := auto(fsys, c, sections)
	if err != nil {
		return nil, err
	}
	t, err := parse(sections, more)
	if err != nil {
		return nil, fileError(name, err)
	}
	t.Doubt = cmp.Or(doubt, t.Doubt)
	t.plan()
	return t, nil
}

// ReadFile reads a file of a model, or its compressed form (name.gz).
func ReadFile(fsys fs.FS, name string) ([]byte, error) {
	b, _, err := readFile(fsys, name)
	return b, err
}

// readFile is ReadFile that also returns the name of the file found.
func readFile(fsys fs.FS, name string) (b []byte, found string, err error) {
	f, err := fsys.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		name += ".gz"
		if f, err = fsys.Open(name); errors.Is(err, fs.ErrNotExist) {
			return nil, "", fileError(strings.TrimSuffix(name, ".gz"), fs.ErrNotExist)
		}
	}
	if err != nil {
		return nil, "", fmt.Errorf("tokenizer: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	var in io.Reader = f
	if strings.HasSuffix(name, ".gz") {
		if in, err = gzip.NewReader(f); err != nil {
			return nil, "", fileError(name, err)
		}
	}
	var buf bytes.Buffer
	if info, err := f.Stat(); err == nil {
		if info.Size() > maxFile { // before anything is read
			return nil, "", fmt.Errorf("tokenizer: %s: %d MB, more than %d MB", name, info.Size()>>20, maxFile>>20)
		}
		buf.Grow(int(info.Size()) + bytes.MinRead)
	}
	if _, err := buf.ReadFrom(io.LimitReader(in, maxFile+1)); err != nil {
		return nil, "", fileError(name, err)
	}
	if buf.Len() > maxFile {
		return nil, "", fmt.Errorf("tokenizer: %s: more than %d MB", name, maxFile>>20)
	}
	if bytes.HasPrefix(buf.Bytes(), []byte("version https://git-lfs.github.com/spec/")) {
		return nil, "", fmt.Errorf("tokenizer: %s is a pointer of Git LFS, not the file: run `git lfs pull` in the folder", name)
	}
	return buf.Bytes(), name, nil
}

// fileError returns an error that names the file.
func fileError(name string, err error) error { return fmt.Errorf("tokenizer: %s: %w", name, err) }

// unsupported returns an error that wraps [ErrUnsupported].
func unsupported(format string, a ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrUnsupported}, a...)...)
}

// plan chooses the path by which stretches are encoded: words by scanners, SentencePiece text with
// cuts, or the general path.
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
			t.scan = []splitter{rule{scanAll, classes, false, nil}.splitter()}
		}
		for t.resumes+1 < len(t.steps) && t.steps[t.resumes].anywhere {
			t.resumes++
		}
	case !t.byteLevel && t.normed == nil && t.hasBytes && !t.whole: // whole is of uncut stretches
		if t.cuts = t.planCuts(); t.cuts != nil {
			t.space = t.cuts.space
			t.prepareSingle()
		}
	}
	if t.scan == nil && t.cuts == nil && t.Slow == "" {
		t.Slow = "normalizer and pre_tokenizer: steps that only the general way can do together"
	}
}

// matching returns the steps without leading ones that never match. Gemma's files have such a step: a
// Split on a space after a Replace of each space.
//
// A step sees only text that the last normalizer returned, between added tokens. If that normalizer
// replaces each occurrence of one byte by a text without this byte, no step sees the byte. A Split
// without a match leaves a piece unchanged, unless it is inverted. Steps after other steps stay,
// because those may add the byte.
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

// scanAll returns the whole stretch as one piece.
func scanAll(_ *classTable, _ []byte, _, end int) (j, looked int) { return end, end + 1 }

// Config holds the settings that the files do not contain.
type Config struct {
	// Mode is the engine's option --tokenizer-mode: hf (tokenizer.json or a rank file) or mistral
	// (tekken.json, tokenizer.model.v1 and the like). Empty: mistral if only that can be, or as vLLM
	// recognizes it, by weights named consolidated*.safetensors.
	Mode string
	// Loader is what the engine reads a tokenizer.json with. Default transformers5.
	Loader Loader
	// Pattern splits text into words, for a rank file. It is a regular expression, or the name of a known
	// one: gpt2, cl100k, o200k, kimi. Default: the expression of the published file of that name, or of
	// Kimi's class if tokenizer_config.json names it.
	Pattern string
	// Special holds the special tokens and their ids, for a rank file. Default: added_tokens_decoder of
	// tokenizer_config.json, else the tokens of the published file, else none; in that case the Tokenizer
	// has a Doubt.
	Special map[string]uint32

	// unchanged is set if the engine reads tokenizer.json with the class TokenizersBackend, whatever class the files name.
	unchanged bool
	// reserved is the number of ids after the ranks that are special tokens. A token without a name gets a
	// name made of its id.
	reserved int
	tools    toolsCode
}

// Loader is the library with which an engine reads a model's files.
type Loader string

// The loaders.
const (
	// Transformers5 is AutoTokenizer of transformers 5, which vLLM and SGLang use. It rebuilds the
	// tokenizers of some classes from the vocabulary and the merges.
	Transformers5 Loader = "transformers5"
	// Transformers4 is the loader of transformers 4, which TensorRT-LLM uses.
	Transformers4 Loader = "transformers4"
	// TokenizerJSON uses tokenizer.json alone and unchanged.
	TokenizerJSON Loader = "tokenizer.json"
)
