// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvroute/kvroute/tokenizer"
)

// proto builds a message of a protocol buffer.
type proto []byte

func (p proto) number(field, value uint64) proto {
	return binary.AppendUvarint(binary.AppendUvarint(p, field<<3), value)
}

func (p proto) bytes(field uint64, value string) proto {
	return append(binary.AppendUvarint(binary.AppendUvarint(p, field<<3|2), uint64(len(value))), value...)
}

func (p proto) float(field uint64, value float32) proto {
	return binary.LittleEndian.AppendUint32(binary.AppendUvarint(p, field<<3|5), math.Float32bits(value))
}

func spmPiece(text string, score float32, kind uint64) string {
	return string(proto(nil).bytes(1, text).float(2, score).number(3, kind))
}

// spmFile is a small model: unk, <s>, </s>, the bytes, and what more gives.
func spmFile(trainer, normalizer proto, more ...string) []byte {
	var p proto
	for _, s := range append([]string{spmPiece("<unk>", 0, 2), spmPiece("<s>", 0, 3), spmPiece("</s>", 0, 3)}, more...) {
		p = p.bytes(1, s)
	}
	return p.bytes(2, string(trainer)).bytes(3, string(normalizer))
}

var (
	spmBPE  = proto(nil).number(3, 2)
	spmNorm = proto(nil).number(4, 0)
)

func loadSPM(b []byte) (*tokenizer.Tokenizer, error) {
	return tokenizer.Load(fstest.MapFS{"tokenizer.model": {Data: b}}, tokenizer.Config{Mode: "mistral"})
}

// Of equal scores the leftmost merges first; a merge of characters that are no
// pieces alone, or of strings that are no pieces, does not happen.
func TestSentencePieceOrder(t *testing.T) {
	tok, err := loadSPM(spmFile(spmBPE, spmNorm, spmPiece("▁", -9, 1), spmPiece("a", -9, 1), spmPiece("b", -9, 1), spmPiece("ba", -1, 1), spmPiece("ab", -1, 1), spmPiece("aba", -2, 1), spmPiece("▁▁", -3, 1)))
	if err != nil {
		t.Fatal(err)
	}
	const space, a, b, ba, aba, spaces = 3, 4, 5, 6, 8, 9
	for text, want := range map[string][]uint32{
		"":      nil,
		"a":     {space, a},
		"aba":   {space, aba},
		"bab":   {space, ba, b},
		"babab": {space, ba, ba, b},
		" a":    {spaces, a},
		"   ":   {spaces, spaces},
		"ac日b":  {space, a, 0, b}, // unknown characters side by side are one
		"<s>":   {space, 0},
		"▁":     {spaces},
	} {
		got, err := tok.Append(context.Background(), nil, []byte(text), false)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %d, %v; want %d", text, got, err, want)
		}
	}
}

func TestSentencePieceFilesThatAreRefused(t *testing.T) {
	good := spmFile(spmBPE, spmNorm, spmPiece("▁", 0, 1))
	for _, c := range []struct {
		name        string
		file        []byte
		want        string
		unsupported bool
	}{
		{"empty", nil, "Unigram", true},
		{"Unigram", spmFile(proto(nil).number(3, 1), spmNorm), "Unigram", true},
		{"no model type", spmFile(nil, spmNorm), "Unigram", true},
		{"words", spmFile(proto(nil).number(3, 3), spmNorm), "Word", true},
		{"unknown model type", spmFile(proto(nil).number(3, 77), spmNorm), "77", true},
		{"spaces become one", spmFile(spmBPE, nil), "remove_extra_whitespaces", true},
		{"a normal form", spmFile(spmBPE, spmNorm.bytes(2, "table")), "normal form", true},
		{"rules of a normal form", spmFile(spmBPE, spmNorm.bytes(6, "table")), "normal form", true},
		{"spaces stay", spmFile(spmBPE, spmNorm.number(5, 0)), "▁", true},
		{"spaces behind words", spmFile(spmBPE.number(24, 1), spmNorm), "▁", true},
		{"bytes missing", spmFile(spmBPE.number(35, 1), spmNorm, spmPiece("<0x00>", 0, 6)), "1 of 256", true},
		{"no byte", spmFile(spmBPE, spmNorm, spmPiece("<0xZZ>", 0, 6)), "piece 3", false},
		{"an unused piece", spmFile(spmBPE, spmNorm, spmPiece("a", 0, 5)), "piece 3: type 5", true},
		{"a piece twice", spmFile(spmBPE, spmNorm, spmPiece("a", 0, 1), spmPiece("a", 0, 1)), "piece 4", false},
		{"a control token twice", spmFile(spmBPE, spmNorm, spmPiece("<s>", 0, 3)), "piece 3", false},
		{"an empty piece", spmFile(spmBPE, spmNorm, spmPiece("", 0, 1)), "piece 3", false},
		{"a piece that is no text", spmFile(spmBPE, spmNorm, spmPiece("\xff", 0, 1)), "piece 3", false},
		{"a score that is no number", spmFile(spmBPE, spmNorm, spmPiece("a", float32(math.NaN()), 1)), "piece 3", false},
		{"a user's piece with a space", spmFile(spmBPE, spmNorm, spmPiece("a▁b", 0, 4)), "piece 3", true},
		{"a user's piece without bytes", spmFile(spmBPE, spmNorm, spmPiece("ab", 0, 4)), "user's", true},
		{"a character that is no piece", spmFile(spmBPE, spmNorm, spmPiece("ab", 0, 1)), "piece 3", true},
		{"no <s>", proto(nil).bytes(1, spmPiece("<unk>", 0, 2)).bytes(2, string(spmBPE)).bytes(3, string(spmNorm)), "<s>", false},
		{"no unknown", proto(nil).bytes(1, spmPiece("a", 0, 1)).bytes(2, string(spmBPE)).bytes(3, string(spmNorm)), "unknown", false},
		{"cut in a field", good[:20], "at byte", false},
		{"cut in a number", append(slices.Clone(good), 0x08, 0x80), "number at byte", false},
		{"a field that is too long", append(slices.Clone(good), 0x0a, 0xff, 0xff, 0xff, 0x7f), "at byte", false},
		{"a group", append(slices.Clone(good), 0x0b), "kind of field at byte", false},
		{"JSON", []byte(`{"model":{}}`), "at byte 1", false},
	} {
		tok, err := loadSPM(c.file)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "tokenizer.model") || errors.Is(err, tokenizer.ErrUnsupported) != c.unsupported {
			t.Errorf("%s: %v, %v; want an error about %q, unsupported %v", c.name, tok != nil, err, c.want, c.unsupported)
		}
	}
	if _, err := loadSPM(good); err != nil {
		t.Errorf("the file that the others are made of: %v", err)
	}
}

// Whatever a file holds, loading it gives a tokenizer or an error that names it.
func FuzzSentencePiece(f *testing.F) {
	f.Add(mistralFile(f, "tokenizer.model"), "[REF] and so on")
	f.Add(spmFile(spmBPE, spmNorm, spmPiece("▁", 0, 1), spmPiece("a", -1, 1), spmPiece("▁a", -2, 1)), "a a")
	f.Add([]byte(spmBPE), "")
	f.Fuzz(func(t *testing.T, file []byte, text string) {
		tok, err := loadSPM(file)
		encodeLoaded(t, "tokenizer.model", tok, err, text)
	})
}

func FuzzTekken(f *testing.F) {
	f.Add(mistralFile(f, "tekken.json"), "Hello [INST] there")
	f.Add([]byte(`{"config":{"pattern":"a","default_vocab_size":257,"default_num_special_tokens":1,"version":"v3"},"vocab":[{"rank":0,"token_bytes":"AA=="}]}`), "")
	f.Fuzz(func(t *testing.T, file []byte, text string) {
		tok, err := tokenizer.Load(fstest.MapFS{"tekken.json": {Data: file}}, tokenizer.Config{})
		encodeLoaded(t, "tekken.json", tok, err, text)
	})
}

func encodeLoaded(t *testing.T, name string, tok *tokenizer.Tokenizer, err error, text string) {
	if err != nil {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("the error does not name the file: %v", err)
		}
		return
	}
	ids, err := tok.Append(context.Background(), nil, []byte(text), true)
	if err != nil {
		return // an expression that takes too long
	}
	for _, id := range ids {
		if int(id) >= tok.Size() {
			t.Errorf("%q: id %d of %d", text, id, tok.Size())
		}
	}
	if strings.Contains(text, "\xff") {
		return // it may have marks
	}
	marked, err := tok.AppendMarked(context.Background(), nil, []byte(text))
	if err != nil || len(marked) > len(ids) {
		t.Errorf("%q: %d ids with marks, %d without, %v", text, len(marked), len(ids), err)
	}
}
