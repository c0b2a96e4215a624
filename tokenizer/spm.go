// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// The types of pieces in a SentencePiece model.
const (
	pieceNormal  = 1
	pieceUnknown = 2
	pieceControl = 3
	pieceUser    = 4
	pieceUnused  = 5
	pieceByte    = 6
)

// piece is one entry of a SentencePiece vocabulary. Its id is its index.
type piece struct {
	text  string
	score float32
	kind  uint64
}

// spmModel holds the fields of a SentencePiece model, a protocol buffer, that have an effect on ids.
type spmModel struct {
	pieces []piece
	kind   uint64 // of the model: 1 Unigram, 2 BPE, …

	prefix       bool // a space is put before each text
	squeeze      bool // a run of spaces becomes one space
	escape       bool // a space is written ▁
	suffix       bool // ▁ stands behind words, not before them
	charsmap     int  // size in bytes of the table of a normal form
	normalRules  int  // size in bytes of the rules of a normal form
	byteFallback bool
}

// parseSentencePiece reads a SentencePiece model of the type BPE.
func parseSentencePiece(b []byte) (*Tokenizer, error) {
	m := spmModel{kind: 1, prefix: true, squeeze: true, escape: true}
	if err := m.read(b); err != nil {
		return nil, err
	}
	kinds := []string{"", "Unigram", "BPE", "Word", "Char"}
	switch {
	case m.kind < uint64(len(kinds)) && m.kind != 2:
		return nil, unsupported(fmt.Errorf("trainer_spec.model_type: %s; only BPE is done exactly", kinds[m.kind]))
	case m.kind != 2:
		return nil, unsupported(fmt.Errorf("trainer_spec.model_type: %d", m.kind))
	case m.squeeze:
		return nil, unsupported(errors.New("normalizer_spec.remove_extra_whitespaces"))
	case !m.escape, m.suffix:
		return nil, unsupported(errors.New("spaces that are not written as ▁ before a word"))
	case m.charsmap > 0, m.normalRules > 0:
		return nil, unsupported(errors.New("normalizer_spec: a normal form"))
	case len(m.pieces) == 0:
		return nil, errors.New("no pieces")
	}
	return m.tokenizer()
}

func (m *spmModel) tokenizer() (*Tokenizer, error) {
	v := newVocab(len(m.pieces))
	t := &Tokenizer{special: map[string]uint32{}}
	t.bpe = bpe{vocab: v, unk: noID, fuseUnk: true}
	var user []added
	bytes := 0
	for i, p := range m.pieces {
		id := uint32(i)
		switch p.kind {
		case pieceNormal:
			if v.id([]byte(p.text)) != noID {
				return nil, fmt.Errorf("piece %d: %.40q is there twice", i, p.text)
			}
		case pieceUnknown:
			t.bpe.unk = id
		case pieceControl:
			if _, twice := t.special[p.text]; twice {
				return nil, fmt.Errorf("piece %d: control token %.40q is there twice", i, p.text)
			}
			t.special[p.text] = id
		case pieceUser:
			if strings.ContainsAny(p.text, " ▁") {
				return nil, unsupported(fmt.Errorf("piece %d: %.40q is a user's, with a space", i, p.text))
			}
			user = append(user, added{id: id, content: []byte(p.text)})
		case pieceByte:
			var c byte
			if n, err := fmt.Sscanf(p.text, "<0x%02X>", &c); n != 1 || err != nil || len(p.text) != 6 {
				return nil, fmt.Errorf("piece %d: %.40q is no byte", i, p.text)
			}
			t.bpe.fallback[c] = id
			bytes++
		default:
			return nil, unsupported(fmt.Errorf("piece %d: type %d", i, p.kind))
		}
		v.put(p.text, id, p.kind == pieceNormal)
	}
	switch {
	case m.byteFallback && bytes != 256:
		return nil, unsupported(fmt.Errorf("byte_fallback with %d of 256 byte pieces", bytes))
	case t.bpe.unk == noID:
		return nil, errors.New("no piece for unknown characters")
	}
	t.bpe.hasBytes = m.byteFallback
	if err := t.bpe.mergesOfScores(m.pieces); err != nil {
		return nil, err
	}
	t.normalizers = []normalizer{{kind: "Replace", from: " ", to: "▁"}}
	if m.prefix {
		t.normalizers = []normalizer{{kind: "Prepend", to: "▁"}, {kind: "Replace", from: " ", to: "▁"}}
	}
	t.user = newFinder(user)
	if t.user != nil && !t.bpe.hasBytes {
		return nil, unsupported(errors.New("a user's pieces in a model without byte_fallback"))
	}
	return t, nil
}

// mergesOfScores makes a merge for each way to cut a piece into two pieces or characters. A
// merge of a higher score has a lower rank. Equal scores have equal ranks: the leftmost pair in
// the text is merged first.
func (b *bpe) mergesOfScores(pieces []piece) error {
	order := make([]int, 0, len(pieces))
	for i, p := range pieces {
		if p.kind == pieceNormal {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(x, y int) int { return cmp.Compare(pieces[y].score, pieces[x].score) })
	var all []mergeSlot
	rank := uint64(0)
	for n, i := range order {
		if n > 0 && pieces[i].score != pieces[order[n-1]].score {
			rank++
		}
		text := []byte(pieces[i].text)
		for k, r := range pieces[i].text {
			if b.vocab.id(text[k:k+utf8.RuneLen(r)]) == noID {
				return unsupported(fmt.Errorf("piece %d: %.40q has a character that is no piece", i, text))
			}
		}
		if all = b.vocab.appendMerges(all, rank, uint32(i)); len(all) > maxMerges {
			return fmt.Errorf("more than %d merges", maxMerges)
		}
	}
	b.merges = newMerges(all)
	return nil
}

// read reads the fields of the model that have an effect on ids.
func (m *spmModel) read(b []byte) error {
	return eachField(b, 0, func(f field) error {
		switch f.number {
		case 1:
			if len(m.pieces) >= maxIDs {
				return fmt.Errorf("more than %d pieces at byte %d", maxIDs, f.at)
			}
			p := piece{kind: pieceNormal}
			err := eachField(f.bytes, f.at, func(f field) error {
				switch f.number {
				case 1:
					p.text = string(f.bytes)
				case 2:
					p.score = math.Float32frombits(uint32(f.value))
				case 3:
					p.kind = f.value
				}
				return nil
			})
			switch {
			case err != nil:
				return err
			case p.text == "", len(p.text) >= 1<<16, !utf8.ValidString(p.text), p.score != p.score:
				return fmt.Errorf("piece %d is empty, has 64 KiB or more, is not UTF-8 or has no score, at byte %d", len(m.pieces), f.at)
			}
			m.pieces = append(m.pieces, p)
		case 2: // trainer_spec
			return eachField(f.bytes, f.at, func(f field) error {
				switch f.number {
				case 3:
					m.kind = f.value
				case 24:
					m.suffix = f.value != 0
				case 35:
					m.byteFallback = f.value != 0
				}
				return nil
			})
		case 3: // normalizer_spec
			return eachField(f.bytes, f.at, func(f field) error {
				switch f.number {
				case 2:
					m.charsmap = len(f.bytes)
				case 3:
					m.prefix = f.value != 0
				case 4:
					m.squeeze = f.value != 0
				case 5:
					m.escape = f.value != 0
				case 6:
					m.normalRules = len(f.bytes)
				}
				return nil
			})
		}
		return nil
	})
}

// field is a field of a protocol buffer: a number in value, or bytes.
type field struct {
	number uint64
	value  uint64
	bytes  []byte
	at     int // of the value, in the file
}

// eachField calls f with each field of a message that begins at base in the file.
func eachField(b []byte, base int, f func(field) error) error {
	for i := 0; i < len(b); {
		number, kind, n := protowire.ConsumeTag(b[i:])
		if n < 0 {
			return fmt.Errorf("no field of a SentencePiece model at byte %d", base+i)
		}
		i += n
		size := protowire.ConsumeFieldValue(number, kind, b[i:])
		switch {
		case kind == protowire.StartGroupType, kind == protowire.EndGroupType, kind > protowire.Fixed32Type:
			return fmt.Errorf("unknown kind of field at byte %d", base+i)
		case size < 0:
			return fmt.Errorf("the file ends in a field or number at byte %d", base+i)
		}
		x := field{number: uint64(number), at: base + i}
		switch kind {
		case protowire.VarintType:
			x.value, _ = protowire.ConsumeVarint(b[i:])
		case protowire.Fixed32Type:
			x.value = uint64(binary.LittleEndian.Uint32(b[i:]))
		case protowire.BytesType:
			x.bytes, _ = protowire.ConsumeBytes(b[i:])
			x.at += size - len(x.bytes)
		default:
		}
		i += size
		if err := f(x); err != nil {
			return err
		}
	}
	return nil
}
