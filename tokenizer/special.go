// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"fmt"
	"slices"
	"unicode"
	"unicode/utf8"
)

// addedToken is an element of added_tokens.
type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`

	flags bool // a configuration gives them
}

// ways says in which forms of the text an added token is found.
type ways struct{ raw, normed bool }

// registry says in which forms of the text each added token is found. A later token of the same text
// replaces the earlier one.
//
// The library tokenizers before 0.23 instead adds the later form to the earlier one, and ignores all
// forms after that of a special token. It registers the special tokens of a batch before the others,
// and ignores a token that was the same before the batch.
type registry struct {
	before23 bool
	ways     map[string]ways
	tokens   map[string]addedToken
	special  map[string]bool
}

// register adds a batch, and returns the tokens of it that count.
func (r *registry) register(batch []addedToken) []addedToken {
	if !r.before23 {
		for _, a := range batch {
			r.ways[a.Content] = ways{!a.Normalized, a.Normalized}
		}
		return batch
	}
	plain := func(a addedToken) addedToken {
		a.ID, a.flags = 0, false
		return a
	}
	batch = slices.DeleteFunc(slices.Clone(batch), func(a addedToken) bool { return plain(a) == r.tokens[a.Content] })
	add := func(a addedToken) {
		w := r.ways[a.Content]
		r.ways[a.Content] = ways{w.raw || !a.Normalized, w.normed || a.Normalized}
	}
	for _, a := range batch {
		if a.Special && !r.special[a.Content] {
			r.special[a.Content] = true
			add(a)
		}
		r.tokens[a.Content] = plain(a)
	}
	for _, a := range batch {
		if !r.special[a.Content] {
			add(a)
		}
	}
	return batch
}

// readAdded reads the added tokens, and adds batches of more. Their ids count for Size even if the
// vocabulary does not contain them. It returns the ids of all by their texts.
func (t *Tokenizer) readAdded(s section, keys *vocabKeys, more additions) (map[string]uint32, error) {
	var list []addedToken
	if !s.null() {
		if err := s.unmarshal(&list); err != nil {
			return nil, fmt.Errorf("added_tokens: %w", err)
		}
	}
	// The reference takes a token's id from the vocabulary, else the next free one. It ignores the id in
	// the file. Of two tokens with one text or one id the later counts.
	ids, byID := map[string]uint32{}, map[uint32]int{}
	var kept []addedToken
	found := registry{more.before23, map[string]ways{}, map[string]addedToken{}, map[string]bool{}}
	for _, batch := range append([][]addedToken{list}, more.batches...) {
		next := uint32(keys.count)
		for id := range byID {
			next = max(next, id+1)
		}
		for _, a := range found.register(batch) {
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
	room, seen := maxNormed, map[string]bool{}
	for _, a := range kept {
		x := added{id: a.ID, content: []byte(a.Content), lstrip: a.LStrip, rstrip: a.RStrip, singleWord: a.SingleWord}
		if t.vocab.get(x.id) == "" {
			t.vocab.put(x.content, x.id, false)
		}
		if found.ways[a.Content].raw {
			raw = append(raw, x)
		}
		if !found.ways[a.Content].normed {
			continue
		}
		for k := range t.normalizers {
			var err error
			if x.content, err = t.normalizers[k].rewrite(&budget{}, x.content, min(room, maxText)); err != nil {
				return nil, fmt.Errorf("added_tokens: the normal form of %.40q: %w", a.Content, err)
			}
		}
		room -= len(x.content)
		if seen[string(x.content)] {
			t.Doubt = fmt.Sprintf("added_tokens: %.40q and another token have one normal form, of which the reference takes either", a.Content)
		}
		seen[string(x.content)] = true
		normed = append(normed, x)
	}
	for _, tokens := range [][]added{raw, normed} {
		if err := overlapping(tokens); err != nil {
			return nil, unsupported("added_tokens: %w", err)
		}
	}
	t.raw, t.normed = newFinder(raw), newFinder(normed)
	return ids, nil
}

// overlapping returns an error if one token removes white space behind it and another token begins
// with white space. The reference finds both there, and continues after the second.
func overlapping(tokens []added) error {
	takes := slices.IndexFunc(tokens, func(a added) bool { return a.rstrip })
	begins := slices.IndexFunc(tokens, func(a added) bool {
		r, _ := utf8.DecodeRune(a.content)
		return unicode.IsSpace(r)
	})
	if takes < 0 || begins < 0 {
		return nil
	}
	return fmt.Errorf("%.40q takes white space behind it along, %.40q begins with some", tokens[takes].content,
		tokens[begins].content)
}

// readPost returns the special tokens that stand before and behind a text.
func readPost(s section) (before, after []uint32, err error) {
	steps, err := s.steps("processors")
	for _, step := range steps {
		b, a, err := readFrame(step)
		switch {
		case err != nil:
			return nil, nil, err
		case len(b)+len(a) == 0:
			continue
		case len(before)+len(after) > 0:
			// The second puts its ids around each id of the first.
			return nil, nil, unsupported("post_processor: two steps that put ids around a text")
		}
		before, after = b, a
	}
	return before, after, err
}

// readFrame is readPost of one step.
func readFrame(s section) (before, after []uint32, err error) {
	type special struct {
		ID string `json:"id"`
	}
	var c struct {
		Type   string `json:"type"`
		Single []struct {
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
	case "RobertaProcessing", "BertProcessing":
		if before, err = readAround("cls", c.CLS); err == nil {
			after, err = readAround("sep", c.SEP)
		}
		return before, after, err
	case "TemplateProcessing":
	default:
		return nil, nil, unsupported("post_processor: type %q", c.Type)
	}
	seen := false
	for _, x := range c.Single {
		switch {
		case x.Sequence != nil && (seen || x.Sequence.ID != "A"):
			return nil, nil, unsupported("post_processor: the template has more than the text")
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
			side := &before
			if seen {
				side = &after
			}
			*side = append(*side, ids.IDs...)
		}
	}
	if !seen {
		return nil, nil, unsupported("post_processor: the template does not have the text")
	}
	return before, after, nil
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
