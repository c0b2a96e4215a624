// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
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

// addedToken is an element of added_tokens.
type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`

	flags bool // a configuration gives them
}

// parse reads the sections of a tokenizer.json, and adds more tokens, in batches. Its
// result encodes by the general path until plan has chosen another.
func parse(file sections, more [][]addedToken) (*Tokenizer, error) {
	t := &Tokenizer{}
	normalizers, err := readNormalizers(file["normalizer"])
	if err != nil {
		return nil, unsupported(err)
	}
	t.normalizers = normalizers
	if t.steps, t.byteLevel, err = readSplitters(file["pre_tokenizer"]); err != nil {
		return nil, unsupported(err)
	}
	for k := range t.steps {
		if t.steps[k].first {
			if err := keepFirst(normalizers); err != nil {
				return nil, unsupported(err)
			}
		}
	}
	keys, err := t.readModel(file["model"], file["flags"])
	if err != nil {
		return nil, err
	}
	ids, err := t.readAdded(file["added_tokens"], keys, more)
	if err != nil {
		return nil, err
	}
	if t.before, t.after, err = readPost(file["post_processor"], 0); err != nil {
		return nil, err
	}
	for key, around := range map[string]*[]uint32{"bos": &t.before, "eos": &t.after} { // of a class, not of the file
		if content := file[key].b; content != nil {
			id, ok := ids[string(content)]
			if !ok {
				id, ok = keys.id(string(content))
			}
			if ok {
				*around = []uint32{id}
			}
		}
	}
	return t, nil
}

func unsupported(err error) error { return fmt.Errorf("%w: %w", ErrUnsupported, err) }

// vocabKeys is the vocabulary by the keys of the file, which loading needs.
type vocabKeys struct {
	vocab    *vocab
	alphabet map[rune]byte     // what the characters of a byte-level key stand for, else nil
	others   map[string]uint32 // keys that no bytes spell
	count    int
}

func (k *vocabKeys) id(key string) (uint32, bool) {
	if token, ok := toBytes(nil, []byte(key), k.alphabet); ok {
		id := k.vocab.id(token)
		return id, id != noID
	}
	id, ok := k.others[key]
	return id, ok
}

// readModel reads the vocabulary and the merges. flags replaces what else the model has.
func (t *Tokenizer) readModel(s, flags section) (*vocabKeys, error) {
	if s.null() {
		return nil, errors.New("no model")
	}
	model, err := s.sections()
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	var c struct {
		Type         string   `json:"type"`
		Dropout      *float64 `json:"dropout"`
		UnkToken     *string  `json:"unk_token"`
		Prefix       *string  `json:"continuing_subword_prefix"`
		Suffix       *string  `json:"end_of_word_suffix"`
		FuseUnk      bool     `json:"fuse_unk"`
		ByteFallback bool     `json:"byte_fallback"`
		IgnoreMerges bool     `json:"ignore_merges"`
	}
	small := map[string]json.RawMessage{}
	for key, v := range model {
		if key != "vocab" && key != "merges" {
			small[key] = v.b
		}
	}
	b, err := json.Marshal(small)
	if err != nil {
		return nil, fmt.Errorf("model: %w at byte %d", err, s.base)
	}
	if !flags.null() {
		b = flags.b
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("model: %w at byte %d", err, s.base)
	}
	set := func(s *string) bool { return s != nil && *s != "" }
	switch {
	case c.Type != "" && c.Type != "BPE":
		return nil, unsupported(fmt.Errorf("model: type %q; only BPE is done exactly", c.Type))
	case c.Type == "" && model["merges"].null():
		return nil, unsupported(errors.New("model: no type and no merges; only BPE is done exactly"))
	case c.Dropout != nil && *c.Dropout != 0:
		return nil, unsupported(errors.New("model: dropout"))
	case set(c.Prefix), set(c.Suffix):
		return nil, unsupported(errors.New("model: continuing_subword_prefix or end_of_word_suffix"))
	}
	keys, err := readVocab(model["vocab"], t.byteLevel)
	if err != nil {
		return nil, fmt.Errorf("model.vocab: %w", err)
	}
	v := keys.vocab
	t.bpe = bpe{vocab: v, whole: c.IgnoreMerges, unk: noID, fuseUnk: c.FuseUnk}
	if set(c.UnkToken) {
		if t.bpe.unk = v.id([]byte(*c.UnkToken)); t.bpe.unk == noID {
			return nil, fmt.Errorf("model: unk_token %q is not in the vocabulary", *c.UnkToken)
		}
	}
	if err := t.bpe.readMerges(model["merges"], keys.alphabet); err != nil {
		return nil, fmt.Errorf("model.merges: %w", err)
	}
	if t.byteLevel {
		if t.bpe.prepareBytes(); t.bpe.partial && c.ByteFallback {
			return nil, unsupported(errors.New("model: byte_fallback in a byte-level vocabulary without some bytes"))
		}
		return keys, nil
	}
	if c.ByteFallback {
		return keys, t.bpe.prepareFallback()
	}
	return keys, nil
}

// readVocab reads the tokens. In a byte-level vocabulary each character of a key
// stands for a byte.
func readVocab(s section, byteLevel bool) (*vocabKeys, error) {
	if s.null() {
		return nil, errors.New("missing")
	}
	k := &vocabKeys{vocab: newVocab(len(s.b) / 64), others: map[string]uint32{}}
	if byteLevel {
		k.alphabet = byteAlphabet()
	}
	r := s.reader()
	var token []byte
	err := r.object(func(key []byte) error {
		var ok bool
		if token, ok = toBytes(token[:0], key, k.alphabet); !ok {
			token = append(token[:0], key...) // no word can be this token
		}
		id, err := r.uint()
		switch {
		case err != nil:
			return err
		case id >= maxIDs:
			return r.fail(fmt.Sprintf("id %d, more than %d", id, maxIDs))
		case len(token) >= 1<<16:
			return r.fail("a token of more than 64 KiB")
		}
		if !ok {
			k.others[string(token)] = id
		}
		k.count++
		k.vocab.put(string(token), id, ok)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if k.count == 0 {
		return nil, r.fail("no tokens")
	}
	return k, nil
}

// toBytes appends the bytes that the characters of text stand for.
func toBytes(dst, text []byte, alphabet map[rune]byte) ([]byte, bool) {
	if alphabet == nil {
		return append(dst, text...), true
	}
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRune(text[i:])
		i += n
		if r > ' ' && r < 0x7f {
			dst = append(dst, byte(r))
			continue
		}
		b, ok := alphabet[r]
		if !ok {
			return dst, false
		}
		dst = append(dst, b)
	}
	return dst, true
}

// byteAlphabet is the alphabet of byte-level vocabularies, from GPT-2: a byte
// that is a visible Latin-1 character stands for itself, the others for the code
// points from 256 on, in order.
func byteAlphabet() map[rune]byte {
	m := make(map[rune]byte, 256)
	next := rune(256)
	for b := range 256 {
		r := rune(b)
		if b <= ' ' || 0x7f <= b && b <= 0xa0 || b == 0xad {
			r = next
			next++
		}
		m[r] = byte(b)
	}
	return m
}

// readMerges reads the merges, the pairs as lists or as strings with a space.
func (b *bpe) readMerges(s section, alphabet map[rune]byte) error {
	if s.null() {
		return errors.New("missing")
	}
	all := make([]mergeSlot, 0, len(s.b)/16)
	count := 0
	var both, buf []byte
	r := s.reader()
	err := r.list(func() error {
		at := r.i
		left, right, err := r.pair(buf)
		buf = left
		if err != nil {
			return err
		}
		if count++; count > maxMerges {
			return r.fail(fmt.Sprintf("more than %d merges", maxMerges))
		}
		var ok, ok2 bool
		both, ok = toBytes(both[:0], left, alphabet)
		n := len(both)
		both, ok2 = toBytes(both, right, alphabet)
		if !ok || !ok2 {
			return nil // of characters that no byte becomes: it never happens
		}
		l, rr, to := b.vocab.id(both[:n]), b.vocab.id(both[n:]), b.vocab.id(both)
		if l == noID || rr == noID || to == noID {
			r.i = at
			return r.fail(fmt.Sprintf("merge %d of %q and %q needs a token that is not in the vocabulary", count-1, left, right))
		}
		all = append(all, mergeOf(l, rr, uint64(count-1), to))
		return nil
	})
	b.merges = newMerges(all)
	return err
}

// pair reads a merge: a list of two tokens, or a string of two with a space between them.
// left is in buf if that is large enough.
func (r *reader) pair(buf []byte) (left, right []byte, err error) {
	if r.space(); r.i < len(r.b) && r.b[r.i] == '[' {
		n := 0
		err := r.list(func() error {
			s, err := r.string()
			if n++; n == 1 {
				left = append(buf[:0], s...)
			}
			right = s
			return err
		})
		if err == nil && n != 2 {
			err = r.fail("want a list of two tokens")
		}
		return left, right, err
	}
	s, err := r.string()
	if err != nil {
		return nil, nil, err
	}
	left, right, ok := bytes.Cut(s, []byte{' '})
	if !ok || bytes.IndexByte(right, ' ') >= 0 {
		return nil, nil, r.fail("want two tokens with one space between them")
	}
	return append(buf[:0], left...), right, nil
}

// prepareBytes makes the tables for words of bytes.
func (b *bpe) prepareBytes() {
	for c := range 256 {
		b.byteID[c] = b.vocab.id([]byte{byte(c)})
		b.partial = b.partial || b.byteID[c] == noID
	}
	b.bytePair = make([]uint64, 1<<16)
	for k := range b.bytePair {
		b.bytePair[k] = noMerge
		if l, r := b.byteID[k>>8], b.byteID[k&0xff]; l != noID && r != noID {
			b.bytePair[k] = b.merges.get(l, r)
		}
	}
	b.cuts = newWordCuts(b.vocab)
	b.prepareSingle()
}

// prepareFallback finds the tokens that stand for single bytes.
func (b *bpe) prepareFallback() error {
	n := 0
	for c := range 256 {
		if b.fallback[c] = b.vocab.id(fmt.Appendf(nil, "<0x%02X>", c)); b.fallback[c] != noID {
			n++
		}
	}
	if n != 0 && n != 256 {
		return unsupported(fmt.Errorf("model: byte_fallback with %d of 256 byte tokens", n))
	}
	b.hasBytes = n == 256
	return nil
}

// readAdded reads the added tokens, and adds those of more. Their ids count for Size
// even if the vocabulary does not have them. It returns the ids of all.
func (t *Tokenizer) readAdded(s section, keys *vocabKeys, more [][]addedToken) (map[string]uint32, error) {
	var list []addedToken
	if !s.null() {
		if err := s.unmarshal(&list); err != nil {
			return nil, fmt.Errorf("added_tokens: %w", err)
		}
	}
	// The reference goes by the vocabulary, then by the order, and not by the id that the
	// file gives. Of two tokens of one text or one id it knows the later.
	ids, byID := map[string]uint32{}, map[uint32]int{}
	var kept []addedToken
	for _, batch := range append([][]addedToken{list}, more...) {
		next := uint32(keys.count)
		for id := range byID {
			next = max(next, id+1)
		}
		for _, a := range batch {
			if a.Content == "" {
				continue
			}
			if err := bounded("content", a.Content); err != nil {
				return nil, fmt.Errorf("added_tokens: %w", err)
			}
			id, ok := ids[a.Content]
			if !ok {
				if id, ok = keys.id(a.Content); !ok {
					id, next = next, next+1
				}
			}
			if id >= maxIDs {
				return nil, fmt.Errorf("added_tokens: id %d of %q, more than %d", id, a.Content, maxIDs)
			}
			a.ID, ids[a.Content] = id, id
			if k, taken := byID[id]; taken {
				kept[k] = a
				continue
			}
			byID[id] = len(kept)
			if kept = append(kept, a); len(kept) > maxAdded {
				return nil, fmt.Errorf("added_tokens: more than %d", maxAdded)
			}
		}
	}
	var raw, normed []added
	room, forms := maxNormed, map[string]bool{}
	for _, a := range kept {
		x := added{id: a.ID, content: []byte(a.Content), lstrip: a.LStrip, rstrip: a.RStrip, singleWord: a.SingleWord}
		if t.bpe.vocab.get(x.id) == "" {
			t.bpe.vocab.put(a.Content, x.id, false)
		}
		if !a.Normalized {
			raw = append(raw, x)
			continue
		}
		for k := range t.normalizers {
			var err error
			if x.content, err = t.normalizers[k].rewrite(&budget{}, x.content, min(room, maxText)); err != nil {
				return nil, fmt.Errorf("added_tokens: the normal form of %.40q: %w", a.Content, err)
			}
		}
		room -= len(x.content)
		if forms[string(x.content)] {
			t.Doubt = fmt.Sprintf("added_tokens: %.40q and another token have one normal form, of which the reference takes either", a.Content)
		}
		forms[string(x.content)] = true
		normed = append(normed, x)
	}
	for _, tokens := range [][]added{raw, normed} {
		if err := overlapping(tokens); err != nil {
			return nil, unsupported(fmt.Errorf("added_tokens: %w", err))
		}
	}
	t.raw, t.normed = newFinder(raw), newFinder(normed)
	return ids, nil
}

// overlapping returns an error if a token may take along the white space that another one
// begins with: the reference finds both there, and goes on behind the second one.
func overlapping(tokens []added) error {
	takes := slices.IndexFunc(tokens, func(a added) bool { return a.rstrip })
	begins := slices.IndexFunc(tokens, func(a added) bool {
		r, _ := utf8.DecodeRune(a.content)
		return unicode.IsSpace(r)
	})
	if takes < 0 || begins < 0 {
		return nil
	}
	return fmt.Errorf("%.40q takes white space behind it along, %.40q begins with some", tokens[takes].content, tokens[begins].content)
}

// readPost returns the special tokens that stand before and behind a text.
func readPost(s section, depth int) (before, after []uint32, err error) {
	if s.null() {
		return nil, nil, nil
	}
	type special struct {
		ID string `json:"id"`
	}
	var c struct {
		Type       string            `json:"type"`
		Processors []json.RawMessage `json:"processors"`
		Single     []struct {
			SpecialToken *special `json:"SpecialToken"`
			Sequence     *special `json:"Sequence"`
		} `json:"single"`
		SpecialTokens map[string]struct {
			IDs []uint32 `json:"ids"`
		} `json:"special_tokens"`
		CLS json.RawMessage `json:"cls"`
		SEP json.RawMessage `json:"sep"`
	}
	if err := s.unmarshal(&c); err != nil {
		return nil, nil, fmt.Errorf("post_processor: %w", err)
	}
	switch c.Type {
	case "ByteLevel":
		return nil, nil, nil
	case "Sequence":
		if depth > maxDepth || len(c.Processors) > maxDepth {
			return nil, nil, errors.New("post_processor: too many steps")
		}
		for _, raw := range c.Processors {
			b, a, err := readPost(section{raw, s.base}, depth+1)
			switch {
			case err != nil:
				return nil, nil, err
			case len(b)+len(a) == 0:
				continue
			case len(before)+len(after) > 0:
				// The second puts its ids around each id of the first.
				return nil, nil, unsupported(errors.New("post_processor: two steps that put ids around a text"))
			}
			before, after = b, a
		}
		return before, after, nil
	case "RobertaProcessing", "BertProcessing":
		if before, err = readAround("cls", c.CLS); err == nil {
			after, err = readAround("sep", c.SEP)
		}
		return before, after, err
	case "TemplateProcessing":
		seen := false
		for _, x := range c.Single {
			switch {
			case x.Sequence != nil && (seen || x.Sequence.ID != "A"):
				return nil, nil, unsupported(errors.New("post_processor: the template has more than the text"))
			case x.Sequence != nil:
				seen = true
			case x.SpecialToken != nil:
				ids, ok := c.SpecialTokens[x.SpecialToken.ID]
				if !ok {
					return nil, nil, fmt.Errorf("post_processor: special token %q has no ids", x.SpecialToken.ID)
				}
				if len(before)+len(after)+len(ids.IDs) > maxFrame {
					return nil, nil, fmt.Errorf("post_processor: more than %d ids around a text", maxFrame)
				}
				if seen {
					after = append(after, ids.IDs...)
				} else {
					before = append(before, ids.IDs...)
				}
			}
		}
		if !seen {
			return nil, nil, unsupported(errors.New("post_processor: the template does not have the text"))
		}
		return before, after, nil
	}
	return nil, nil, unsupported(fmt.Errorf("post_processor: type %q", c.Type))
}

// readAround reads one of the two tokens around a text: its text and its id.
func readAround(name string, raw json.RawMessage) ([]uint32, error) {
	var content string
	var id uint32
	pair := []any{&content, &id}
	if err := json.Unmarshal(raw, &pair); err != nil || len(pair) != 2 {
		return nil, fmt.Errorf("post_processor: %s is no pair of a token and its id", name)
	}
	return []uint32{id}, nil
}

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
	case t.byteLevel && (t.nfc || len(t.normalizers) == 0) && t.allScanners():
		if t.scan = t.steps; len(t.scan) == 0 {
			t.scan = []splitter{rule{scanAll, classes}.splitter()}
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

func (t *Tokenizer) allScanners() bool {
	for k := range t.steps {
		if t.steps[k].scan == nil || t.steps[k].behavior != "Isolated" {
			return false
		}
	}
	return true
}

// planCuts returns where SentencePiece-style text may be cut, nil if its files
// are of another kind.
func (t *Tokenizer) planCuts() *cuts {
	c := &cuts{}
	var space string
	switch {
	case len(t.normalizers) == 2 && len(t.steps) == 0:
		p, r := t.normalizers[0], t.normalizers[1]
		if p.kind != "Prepend" || r.kind != "Replace" || r.regex != nil || r.from != " " || r.to != p.to {
			return nil
		}
		space, c.force = r.to, true
	case len(t.normalizers) == 1 && len(t.steps) == 0:
		r := t.normalizers[0]
		if r.kind != "Replace" || r.regex != nil || r.from != " " {
			return nil
		}
		space, c.never = r.to, true
	case len(t.normalizers) == 0 && len(t.steps) > 0 && t.steps[0].space != nil:
		p := t.steps[0]
		if len(t.steps) == 2 && string(t.steps[1].literal) == string(p.space) && t.steps[1].behavior == "MergedWithNext" {
			c.split = true
		} else if len(t.steps) != 1 {
			return nil
		}
		space, c.never, c.first = string(p.space), p.prefix == nil, p.first
	default:
		return nil
	}
	c.space = []byte(space)
	var n int
	if c.rune, n = utf8.DecodeRuneInString(space); n != len(space) || space == "" {
		return nil
	}
	for _, token := range t.bpe.vocab.token {
		a, n := utf8.DecodeRuneInString(token)
		for _, b := range token[n:] {
			c.add(a, b)
			a = b
		}
	}
	c.pairs.fit()
	// A merge of byte tokens would cross a cut between characters.
	for _, m := range t.bpe.merges.slots {
		if m.key == 0 {
			continue
		}
		for _, id := range []uint32{uint32((m.key - 1) >> 32), uint32(m.key - 1)} {
			if b := t.bpe.vocab.get(id); len(b) == 6 && strings.HasPrefix(b, "<0x") {
				return nil
			}
		}
	}
	return c
}

// Decode appends the text of ids to dst, with the space that some files put before a
// text. It may end inside of a character, if the ids do. Unknown ids have no text.
func (t *Tokenizer) Decode(dst []byte, ids []uint32) []byte {
	for _, id := range ids {
		b := t.bpe.vocab.get(id)
		switch c := slices.Index(t.bpe.fallback[:], id); {
		case t.byteLevel:
			dst = append(dst, b...)
		case t.bpe.hasBytes && c >= 0:
			dst = append(dst, byte(c))
		default:
			dst = append(dst, strings.ReplaceAll(b, "▁", " ")...)
		}
	}
	return dst
}
