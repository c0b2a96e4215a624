// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"cmp"
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
	anywhere bool   // see rule
	quick    *quick // nil: none

	prefix []byte // put before a piece that does not begin with it
	first  bool   // only before the piece at the very start of the text
	space  []byte // Metaspace: what a space becomes
}

// splitter returns a step whose pieces are those of the scanner.
func (r rule) splitter() splitter {
	p := splitter{scan: r.scan, table: r.table(), behavior: "Isolated", anywhere: r.anywhere}
	if r.quick != nil {
		p.quick = r.quick()
	}
	return p
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

// readSplitters returns the steps of a pre-tokenizer. byteLevel is true if one of
// them turns text into the alphabet of bytes.
func readSplitters(s section) (all []splitter, byteLevel bool, err error) {
	steps, err := s.steps("pretokenizers")
	for _, step := range steps {
		c := splitConfig{AddPrefixSpace: true, UseRegex: true, Split: true}
		if err := step.unmarshal(&c); err != nil {
			return nil, false, err
		}
		read := c.splitters
		if byteLevel {
			read = c.behindBytes
		}
		more, err := read()
		if err != nil {
			return nil, false, err
		}
		all, byteLevel = append(all, more...), byteLevel || c.Type == "ByteLevel"
	}
	return all, byteLevel, err
}

// splitConfig is a step of a pre-tokenizer in a file.
type splitConfig struct {
	Type             string  `json:"type"`
	Pattern          pattern `json:"pattern"`
	Behavior         string  `json:"behavior"`
	Invert           bool    `json:"invert"`
	AddPrefixSpace   bool    `json:"add_prefix_space"`
	UseRegex         bool    `json:"use_regex"`
	IndividualDigits bool    `json:"individual_digits"`
	Replacement      string  `json:"replacement"`
	PrependScheme    string  `json:"prepend_scheme"`
	Split            bool    `json:"split"`
	Delimiter        string  `json:"delimiter"`
}

// most is the number of digits in a piece.
func (c *splitConfig) most() int {
	if c.IndividualDigits {
		return 1
	}
	return math.MaxInt
}

func (c *splitConfig) splitters() (steps []splitter, err error) {
	p := splitter{behavior: "Removed"}
	switch c.Type {
	case "Split":
		p, err = c.readSplit()
	case "ByteLevel":
		if c.AddPrefixSpace {
			steps = append(steps, splitter{prefix: []byte{' '}})
		}
		if c.UseRegex {
			steps = append(steps, scanners[patterns["gpt2"]].splitter())
		}
		return steps, nil
	case "Digits":
		p = rule{runs(classNumber, c.most()), digitClasses, true, nil}.splitter()
	case "Punctuation":
		p = splitter{
			scan: runs(classSign, 1), table: signClasses(), mask: classSign, behavior: cmp.Or(c.Behavior, "Isolated"),
			anywhere: true,
		}
		switch {
		case !slices.Contains(behaviors, p.behavior):
			err = fmt.Errorf("step Punctuation: unknown behavior %q", c.Behavior)
		case p.behavior == "Contiguous":
			p.behavior, p.scan = "Isolated", runs(classSign, math.MaxInt)
		}
	case "CharDelimiterSplit":
		if p.literal = []byte(c.Delimiter); utf8.RuneCountInString(c.Delimiter) != 1 {
			err = fmt.Errorf("CharDelimiterSplit: delimiter %q is not one character", c.Delimiter)
		}
	case "Whitespace":
		p.scan, p.table, p.mask = runs(classWord|classSpace, math.MaxInt), wordClasses(), classSpace
	case "WhitespaceSplit":
		p.scan, p.table, p.mask = runs(classSpace, math.MaxInt), classes(), classSpace
	case "Metaspace":
		return c.metaspace()
	default:
		err = fmt.Errorf("cannot do %q exactly", c.Type)
	}
	return []splitter{p}, err
}

// readSplit returns the step Split.
func (c *splitConfig) readSplit() (p splitter, err error) {
	if err := bounded("pattern", c.Pattern.String); err != nil {
		return p, fmt.Errorf("Split: %w", err)
	}
	p = splitter{behavior: c.Behavior, invert: c.Invert}
	switch known := scanners[c.Pattern.Regex]; {
	case !slices.Contains(behaviors, c.Behavior):
		err = fmt.Errorf("Split: unknown behavior %q", c.Behavior)
	case c.Pattern.Regex == "" && c.Pattern.String == "":
		err = errors.New("Split without a pattern")
	case c.Pattern.Regex == "":
		p.literal = []byte(c.Pattern.String)
	case known.scan != nil && c.Behavior == "Isolated":
		p = known.splitter() // inverted or not, parts are pieces
	default:
		if p.regex, err = compile(c.Pattern.Regex); err != nil {
			err = fmt.Errorf("Split: %w", err)
		}
	}
	return p, err
}

// behindBytes returns a step behind ByteLevel. Such a step sees one character for each byte, so
// only steps that are defined on bytes are supported.
func (c *splitConfig) behindBytes() ([]splitter, error) {
	r := rule{scan: scanThousands, table: classes}
	switch {
	case c.Type == "Digits":
		r.scan = byteDigits(c.most())
	case c.Type == "Split" && c.Pattern.Regex == "[0-9][0-9][0-9]" && c.Behavior == "Isolated":
	default:
		return nil, fmt.Errorf("%q behind ByteLevel cannot be done exactly", c.Type)
	}
	return []splitter{r.splitter()}, nil
}

// metaspace returns the steps of Metaspace. Old files have add_prefix_space
// instead of a scheme.
func (c *splitConfig) metaspace() ([]splitter, error) {
	space := []byte(cmp.Or(c.Replacement, "▁"))
	if utf8.RuneCount(space) != 1 {
		return nil, fmt.Errorf("step Metaspace: replacement %q is not one character", space)
	}
	p := splitter{prefix: space, space: space}
	switch {
	case c.PrependScheme == "always", c.PrependScheme == "" && c.AddPrefixSpace:
	case c.PrependScheme == "first":
		p.first = true
	case c.PrependScheme == "never", c.PrependScheme == "":
		p.prefix = nil
	default:
		return nil, fmt.Errorf("step Metaspace: unknown prepend_scheme %q", c.PrependScheme)
	}
	steps := []splitter{p}
	if c.Split {
		steps = append(steps, splitter{literal: space, behavior: "MergedWithNext"})
	}
	return steps, nil
}
