// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"
)

// parse reads the sections of a tokenizer.json, and adds batches of more tokens. The resulting
// tokenizer uses the general path until plan chooses another.
func parse(file sections, more additions) (*Tokenizer, error) {
	t := &Tokenizer{}
	var err error
	if t.normalizers, err = readNormalizers(file["normalizer"]); err != nil {
		return nil, unsupported("normalizer: %w", err)
	}
	t.steps, t.byteLevel, err = readSplitters(file["pre_tokenizer"])
	if err == nil && slices.ContainsFunc(t.steps, func(p splitter) bool { return p.first }) {
		err = keepFirst(t.normalizers)
	}
	if err != nil {
		return nil, unsupported("pre_tokenizer: %w", err)
	}
	keys, err := t.readModel(file["model"], file["flags"])
	if err != nil {
		return nil, err
	}
	if t.special, err = t.readAdded(file["added_tokens"], keys, more); err != nil {
		return nil, err
	}
	if t.before, t.after, err = readPost(file["post_processor"]); err != nil {
		return nil, err
	}
	for key, around := range map[string]*[]uint32{"bos": &t.before, "eos": &t.after} { // of a class, not of the file
		if content := file[key].b; content != nil {
			id, ok := t.special[string(content)]
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

// vocabKeys finds ids by the keys of the file while the file is loaded.
type vocabKeys struct {
	vocab    *vocab
	alphabet alphabet          // of a byte-level vocabulary; else nil
	others   map[string]uint32 // ids of byte-level keys with a character that stands for no byte
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

// readModel reads the vocabulary and the merges. If flags is not null, it replaces all other fields of
// the model.
func (t *Tokenizer) readModel(s, flags section) (*vocabKeys, error) {
	if s.null() {
		return nil, errors.New("no model")
	}
	model, err := s.sections()
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	var c struct {
		Type         string  `json:"type"`
		Dropout      float64 `json:"dropout"`
		UnkToken     string  `json:"unk_token"`
		Prefix       string  `json:"continuing_subword_prefix"`
		Suffix       string  `json:"end_of_word_suffix"`
		FuseUnk      bool    `json:"fuse_unk"`
		ByteFallback bool    `json:"byte_fallback"`
		IgnoreMerges bool    `json:"ignore_merges"`
	}
	small := map[string]json.RawMessage{}
	for key, v := range model {
		if key != "vocab" && key != "merges" {
			small[key] = v.b
		}
	}
	b, _ := json.Marshal(small) // its values are valid JSON
	if !flags.null() {
		b = flags.b
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("model: %w at byte %d", err, s.base)
	}
	switch {
	case c.Type != "" && c.Type != "BPE":
		return nil, unsupported("model: type %q; only BPE is done exactly", c.Type)
	case c.Type == "" && model["merges"].null():
		return nil, unsupported("model: no type and no merges; only BPE is done exactly")
	case c.Dropout != 0:
		return nil, unsupported("model: dropout")
	case c.Prefix+c.Suffix != "":
		return nil, unsupported("model: continuing_subword_prefix or end_of_word_suffix")
	}
	keys, err := readVocab(model["vocab"], t.byteLevel)
	if err != nil {
		return nil, fmt.Errorf("model.vocab: %w", err)
	}
	v := keys.vocab
	t.bpe = bpe{vocab: v, whole: c.IgnoreMerges, unk: noID, fuseUnk: c.FuseUnk}
	if c.UnkToken != "" {
		if t.unk = v.id([]byte(c.UnkToken)); t.unk == noID {
			return nil, fmt.Errorf("model: unk_token %q is not in the vocabulary", c.UnkToken)
		}
	}
	if err := t.readMerges(model["merges"], keys.alphabet); err != nil {
		return nil, fmt.Errorf("model.merges: %w", err)
	}
	if t.byteLevel {
		if t.prepareBytes(); t.partial && c.ByteFallback {
			return nil, unsupported("model: byte_fallback in a byte-level vocabulary without some bytes")
		}
		return keys, nil
	}
	if c.ByteFallback {
		return keys, t.prepareFallback()
	}
	return keys, nil
}

// readVocab reads the tokens. In a byte-level vocabulary each character of a key
// stands for a byte.
func readVocab(s section, byteLevel bool) (*vocabKeys, error) {
	if s.null() {
		return nil, errors.New("missing")
	}
	k := &vocabKeys{vocab: newVocab(len(s.b) / 32), others: map[string]uint32{}}
	if byteLevel {
		k.alphabet = byteAlphabet()
	}
	r := s.reader()
	var token []byte
	err := r.Object(func(quoted []byte) error {
		key, err := r.unquoted(quoted)
		if err != nil {
			return err
		}
		var ok bool
		if token, ok = toBytes(token[:0], key, k.alphabet); !ok {
			token = append(token[:0], key...) // no word can be this token
		}
		id, err := r.id()
		switch {
		case err != nil:
			return err
		case id >= maxIDs:
			return r.Fail(fmt.Sprintf("id %d, more than %d", id, maxIDs))
		case len(token) >= 1<<16:
			return r.Fail("a token of more than 64 KiB")
		}
		if !ok {
			k.others[string(token)] = id
		}
		k.count++
		k.vocab.put(token, id, ok)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if k.count == 0 {
		return nil, r.Fail("no tokens")
	}
	return k, nil
}

// toBytes appends the bytes that the characters of text stand for.
func toBytes(dst, text []byte, alphabet alphabet) ([]byte, bool) {
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
		if int(r) >= len(alphabet) || alphabet[r] < 0 {
			return dst, false
		}
		dst = append(dst, byte(alphabet[r]))
	}
	return dst, true
}

// alphabet has the byte that each character of a byte-level key stands for, and -1 for other characters.
type alphabet []int16

// byteAlphabet is the alphabet of byte-level vocabularies, from GPT-2: a byte
// that is a visible Latin-1 character stands for itself, the others for the code
// points from 256 on, in order.
func byteAlphabet() alphabet {
	a := slices.Repeat(alphabet{-1}, 256)
	for b := range int16(256) {
		if b <= ' ' || 0x7f <= b && b <= 0xa0 || b == 0xad {
			a = append(a, b)
		} else {
			a[b] = b
		}
	}
	return a
}

// readMerges reads the merges. A pair is a list of two tokens, or a string with a space between them.
func (b *bpe) readMerges(s section, alphabet alphabet) error {
	if s.null() {
		return errors.New("missing")
	}
	all := make([]mergeSlot, 0, len(s.b)/16)
	count := 0
	var both, buf []byte
	r := s.reader()
	err := r.List(func() error {
		at := r.At
		left, right, err := r.pair(buf)
		buf = left
		if err != nil {
			return err
		}
		if count++; count > maxMerges {
			return r.Fail(fmt.Sprintf("more than %d merges", maxMerges))
		}
		var ok, ok2 bool
		both, ok = toBytes(both[:0], left, alphabet)
		n := len(both)
		both, ok2 = toBytes(both, right, alphabet)
		if !ok || !ok2 {
			return nil // no text has such a pair: a character of it stands for no byte
		}
		l, rr, to := b.vocab.id(both[:n]), b.vocab.id(both[n:]), b.vocab.id(both)
		if l == noID || rr == noID || to == noID {
			r.At = at
			return r.Fail(fmt.Sprintf("merge %d of %q and %q needs a token that is not in the vocabulary", count-1, left, right))
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
	if r.Peek() == '[' {
		n := 0
		err := r.List(func() error {
			s, err := r.text()
			if n++; n == 1 {
				left = append(buf[:0], s...)
			}
			right = s
			return err
		})
		if err == nil && n != 2 {
			err = r.Fail("want a list of two tokens")
		}
		return left, right, err
	}
	s, err := r.text()
	if err != nil {
		return nil, nil, err
	}
	left, right, ok := bytes.Cut(s, []byte{' '})
	if !ok || bytes.IndexByte(right, ' ') >= 0 {
		return nil, nil, r.Fail("want two tokens with one space between them")
	}
	return append(buf[:0], left...), right, nil
}
