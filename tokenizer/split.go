// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"unicode/utf8"
)

// splitter is one step of a pre-tokenizer, for the general path. This path supports every step but
// reports no resume points. Files with scanners only, whose behavior is Isolated, do not use it.
type splitter struct {
	scan     scanner // nil: another kind below
	table    *classTable
	mask     uint8 // if not 0, the pieces of scan are matches whose first characters are of these classes; else all are
	regex    *regex
	literal  []byte
	behavior string // of Split: Isolated, Removed, MergedWithPrevious, …
	invert   bool
	anywhere bool // see rule

	prefix []byte // put before a piece that does not begin with it
	first  bool   // only before the piece at the very start of the text
	space  []byte // Metaspace: what a space becomes
}

// splitter returns a step whose pieces are those of the scanner.
func (r rule) splitter() splitter {
	return splitter{scan: r.scan, table: r.table(), behavior: "Isolated", anywhere: r.anywhere}
}

// pieces are stretches of one text.
type pieces struct {
	text  []byte
	spans []span
}

// split parts the pieces of in. The result may share in's text; more than limit
// bytes of text are an error.
func (p *splitter) split(b *budget, in pieces, atStart bool, limit int) (pieces, error) {
	if p.prefix != nil || p.space != nil {
		return p.prefixed(b, in, atStart, limit)
	}
	out := pieces{text: in.text, spans: make([]span, 0, len(in.spans))}
	for _, s := range in.spans {
		if b.spend(int(s.end-s.start) + 16) {
			return in, b.err
		}
		matches, err := p.matches(b, in.text[s.start:s.end])
		if err != nil {
			return in, err
		}
		out.spans = append(out.spans, p.behave(matches, s)...)
	}
	return out, nil
}

// prefixed copies the pieces and adds the prefix where it is required. The first piece is not at the
// start of the text if the text before it was dropped.
func (p *splitter) prefixed(b *budget, in pieces, atStart bool, limit int) (pieces, error) {
	var out pieces
	for _, s := range in.spans {
		if b.spend(len(p.prefix) + int(s.end-s.start)/quickBytes) {
			return out, b.err
		}
		piece := in.text[s.start:s.end]
		start := uint32(len(out.text))
		begins := p.prefix == nil || bytes.HasPrefix(piece, p.prefix) || p.space != nil && len(piece) > 0 && piece[0] == ' '
		if !begins && (!p.first || atStart && s.start == 0) {
			out.text = append(out.text, p.prefix...)
		}
		if p.space != nil {
			piece = bytes.ReplaceAll(piece, []byte{' '}, p.space)
		}
		out.text = append(out.text, piece...)
		if len(out.text) > limit {
			return out, errGrown
		}
		out.spans = append(out.spans, span{start, uint32(len(out.text))})
	}
	return out, nil
}

// part is a stretch of a piece, matched or not.
type part struct {
	span
	match bool
}

// matches parts text into matches and what lies between them.
func (p *splitter) matches(b *budget, text []byte) (parts []part, err error) {
	if p.scan != nil {
		for i := 0; i < len(text); {
			j, _ := p.scan(p.table, text, i, len(text))
			if b.spend(j - i) {
				return nil, b.err
			}
			class, _ := p.table.at(text, i, len(text))
			parts = append(parts, part{span{uint32(i), uint32(j)}, p.mask == 0 || class&p.mask != 0})
			i = j
		}
		return parts, nil
	}
	var spans []span
	if p.regex != nil {
		if spans, err = p.regex.matches(b, nil, text); err != nil {
			return nil, err
		}
	} else {
		for i := 0; ; {
			k := bytes.Index(text[i:], p.literal)
			if k < 0 {
				break
			}
			if b.spend(len(p.literal) + k/quickBytes) {
				return nil, b.err
			}
			spans = append(spans, span{uint32(i + k), uint32(i + k + len(p.literal))})
			i += k + len(p.literal)
		}
	}
	at := uint32(0)
	for _, s := range spans {
		if s.start > at {
			parts = append(parts, part{span{at, s.start}, p.invert})
		}
		parts = append(parts, part{s, !p.invert})
		at = s.end
	}
	if int(at) < len(text) {
		parts = append(parts, part{span{at, uint32(len(text))}, p.invert})
	}
	return parts, nil
}

// behave makes pieces of the parts of the piece of. As in the reference, a match that joins a
// neighbour does not bring another match with it.
func (p *splitter) behave(parts []part, of span) []span {
	var out []span
	for k, x := range parts {
		joins := false // the part before
		switch p.behavior {
		case "Removed":
			if x.match {
				continue
			}
		case "Contiguous":
			joins = k > 0 && parts[k-1].match == x.match
		case "MergedWithPrevious":
			joins = k > 0 && x.match && !parts[k-1].match
		case "MergedWithNext":
			joins = k > 0 && !x.match && parts[k-1].match
		}
		if joins {
			out[len(out)-1].end = of.start + x.end
		} else {
			out = append(out, span{of.start + x.start, of.start + x.end})
		}
	}
	return out
}

// behaviors are what Split can do with what it matches.
//
//nolint:gochecknoglobals // a table
var behaviors = []string{"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}

// readSplitters returns the steps of a pre-tokenizer. bytes is true if one of
// them turns text into the alphabet of bytes.
func readSplitters(s section) (steps []splitter, byteLevel bool, err error) {
	if s.null() {
		return nil, false, nil
	}
	var c struct {
		Type             string            `json:"type"`
		Pretokenizers    []json.RawMessage `json:"pretokenizers"`
		Pattern          pattern           `json:"pattern"`
		Behavior         string            `json:"behavior"`
		Invert           bool              `json:"invert"`
		AddPrefixSpace   *bool             `json:"add_prefix_space"`
		UseRegex         *bool             `json:"use_regex"`
		IndividualDigits bool              `json:"individual_digits"`
		Replacement      string            `json:"replacement"`
		PrependScheme    string            `json:"prepend_scheme"`
		Split            *bool             `json:"split"`
		Delimiter        string            `json:"delimiter"`
	}
	if err := s.unmarshal(&c); err != nil {
		return nil, false, fmt.Errorf("pre_tokenizer: %w", err)
	}
	isTrue := func(b *bool) bool { return b == nil || *b }
	switch c.Type {
	case "Sequence":
		for _, raw := range c.Pretokenizers {
			read := readSplitters
			if byteLevel {
				read = readBehindBytes
			}
			more, b, err := read(section{raw, s.base})
			if err != nil {
				return nil, false, err
			}
			byteLevel = byteLevel || b
			if steps = append(steps, more...); len(steps) > maxDepth {
				return nil, false, fmt.Errorf("pre_tokenizer: more than %d steps", maxDepth)
			}
		}
		return steps, byteLevel, nil
	case "Split":
		p, err := readSplit(c.Pattern, c.Behavior, c.Invert)
		return []splitter{p}, false, err
	case "ByteLevel":
		if isTrue(c.AddPrefixSpace) {
			steps = append(steps, splitter{prefix: []byte{' '}})
		}
		if isTrue(c.UseRegex) {
			steps = append(steps, rule{(*classTable).gpt2, classes, false}.splitter())
		}
		return steps, true, nil
	case "Digits":
		most := math.MaxInt
		if c.IndividualDigits {
			most = 1
		}
		return []splitter{rule{runs(classNumber, most), digitClasses, true}.splitter()}, false, nil
	case "Punctuation":
		p := splitter{scan: runs(classSign, 1), table: signClasses(), mask: classSign, behavior: cmp.Or(c.Behavior, "Isolated"), anywhere: true}
		switch {
		case !slices.Contains(behaviors, p.behavior):
			return nil, false, fmt.Errorf("pre_tokenizer: Punctuation: unknown behavior %q", c.Behavior)
		case p.behavior == "Contiguous":
			p.behavior, p.scan = "Isolated", runs(classSign, math.MaxInt)
		}
		return []splitter{p}, false, nil
	case "CharDelimiterSplit":
		if utf8.RuneCountInString(c.Delimiter) != 1 {
			return nil, false, fmt.Errorf("pre_tokenizer: CharDelimiterSplit: delimiter %q is not one character", c.Delimiter)
		}
		return []splitter{{literal: []byte(c.Delimiter), behavior: "Removed"}}, false, nil
	case "Whitespace":
		return []splitter{{scan: runs(classWord|classSpace, math.MaxInt), table: wordClasses(), mask: classSpace, behavior: "Removed"}}, false, nil
	case "WhitespaceSplit":
		return []splitter{{scan: runs(classSpace, math.MaxInt), table: classes(), mask: classSpace, behavior: "Removed"}}, false, nil
	case "Metaspace":
		return metaspace(c.Replacement, c.PrependScheme, isTrue(c.AddPrefixSpace), isTrue(c.Split))
	}
	return nil, false, fmt.Errorf("pre_tokenizer: cannot do %q exactly", c.Type)
}

// readSplit returns the step Split.
func readSplit(of pattern, behavior string, invert bool) (p splitter, err error) {
	if err := bounded("pattern", of.String); err != nil {
		return p, fmt.Errorf("pre_tokenizer: Split: %w", err)
	}
	p = splitter{behavior: behavior, invert: invert}
	switch {
	case !slices.Contains(behaviors, behavior):
		err = fmt.Errorf("pre_tokenizer: Split: unknown behavior %q", behavior)
	case of.Regex == "" && of.String == "":
		err = errors.New("pre_tokenizer: Split without a pattern")
	case of.Regex == "":
		p.literal = []byte(of.String)
	case scanners[of.Regex].scan != nil && behavior == "Isolated":
		p = scanners[of.Regex].splitter() // inverted or not, parts are pieces
	default:
		if p.regex, err = compile(of.Regex); err != nil {
			err = fmt.Errorf("pre_tokenizer: Split: %w", err)
		}
	}
	return p, err
}

// readBehindBytes returns a step behind ByteLevel. Such a step sees one character for each byte, so
// only steps that are defined on bytes are supported.
func readBehindBytes(s section) ([]splitter, bool, error) {
	var c struct {
		Type             string  `json:"type"`
		Pattern          pattern `json:"pattern"`
		Behavior         string  `json:"behavior"`
		IndividualDigits bool    `json:"individual_digits"`
	}
	if err := s.unmarshal(&c); err != nil {
		return nil, false, fmt.Errorf("pre_tokenizer: %w", err)
	}
	scan := byteDigits(math.MaxInt)
	switch {
	case c.Type == "Digits" && c.IndividualDigits:
		scan = byteDigits(1)
	case c.Type == "Digits":
	case c.Type == "Split" && c.Pattern.Regex == "[0-9][0-9][0-9]" && c.Behavior == "Isolated":
		scan = scanThousands
	default:
		return nil, false, fmt.Errorf("pre_tokenizer: %q behind ByteLevel cannot be done exactly", c.Type)
	}
	return []splitter{rule{scan, classes, false}.splitter()}, true, nil
}

// metaspace makes the steps of Metaspace. Old files have add_prefix_space
// instead of a scheme.
func metaspace(replacement, scheme string, prefix, split bool) ([]splitter, bool, error) {
	if replacement == "" {
		replacement = "▁"
	}
	if scheme == "" && prefix {
		scheme = "always"
	}
	if utf8.RuneCountInString(replacement) != 1 {
		return nil, false, fmt.Errorf("pre_tokenizer: Metaspace: replacement %q is not one character", replacement)
	}
	p := splitter{prefix: []byte(replacement), space: []byte(replacement)}
	switch scheme {
	case "always":
	case "first":
		p.first = true
	case "never", "":
		p.prefix = nil
	default:
		return nil, false, fmt.Errorf("pre_tokenizer: Metaspace: unknown prepend_scheme %q", scheme)
	}
	steps := []splitter{p}
	if split {
		steps = append(steps, splitter{literal: []byte(replacement), behavior: "MergedWithNext"})
	}
	return steps, false, nil
}
