// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"
	"unicode/utf8"
)

// SetRegexTime changes how long the searches of a text may take, for tests that are not about
// this limit, on a busy machine. It returns what restores the limit.
func SetRegexTime(d time.Duration) (restore func()) {
	was := regexTime
	regexTime = d
	return func() { regexTime = was }
}

// Bytes returns the memory of all entries in bytes.
func (c *Cache) Bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

// SetCacheStep makes steps of a cache small enough for texts of tests.
func SetCacheStep(c *Cache, step int) { c.step = step }

// Twin returns an empty cache with the keys of c.
func Twin(c *Cache) *Cache {
	twin := NewCache(c.limit)
	twin.seeds, twin.step = c.seeds, c.step
	return twin
}

// Mix stores about half of the entries of other in c, as a goroutine does that began with an empty cache.
func Mix(c, other *Cache, r *rand.Rand) {
	for _, key := range other.lru.Keys() {
		if e, ok := other.lru.Peek(key); ok && r.IntN(2) == 0 {
			c.store([]cacheKey{key}, []entry{e})
		}
	}
}

// ThreeBytesDiffer returns a character for which the short ways of looking at
// three bytes do not agree with the long ones, 0 if there is none.
func ThreeBytesDiffer() rune {
	for r := rune(0x800); r < 0x10000; r++ {
		s := []byte(string(r))
		if class := classes().ofThree(s, 0, len(s)); class != 0 && class != classes().of(r) {
			return r
		}
		if utf8.ValidRune(r) && isPlain(s) != (plainClasses().of(r) != 0) {
			return r
		}
		if c, ok := threeBytes(s, 0, len(s)); ok && c != r {
			return r
		}
	}
	return 0
}

// MissedPair returns a pair that was put into a set and is not found in it.
func MissedPair(pairs [][2]uint32) (missed [][2]uint32, extra int) {
	var set pairSet
	for _, p := range pairs {
		set.add(p[0], p[1])
	}
	set.fit()
	for _, p := range pairs {
		if !set.has(p[0], p[1]) {
			missed = append(missed, p)
		}
		if set.has(p[0]+1<<24, p[1]) {
			extra++
		}
	}
	return missed, extra
}

// PrefixEach puts a byte before each of n pieces of a byte.
func PrefixEach(n, limit int) error {
	in := pieces{text: make([]byte, n)}
	for k := range uint32(n) {
		in.spans = append(in.spans, span{k, k + 1})
	}
	_, err := (&splitter{prefix: []byte("x")}).split(&budget{}, in, true, limit)
	return err
}

// LoadGeneral loads a tokenizer.json that encodes all text by the general path, as
// the steps stand in the file.
func LoadGeneral(b []byte) (*Tokenizer, error) {
	file, err := section{b: b}.sections()
	if err != nil {
		return nil, err
	}
	return parse(file, additions{})
}

// Split returns the pieces into which an expression parts a text: of a Split that
// keeps the matches apart, or, for a rank file, the matches alone.
func Split(expr, text string, rank bool) (out []string, err error) {
	var steps []splitter
	if rank {
		steps, err = patternSteps(expr)
	} else {
		var re *regex
		re, err = compile(expr)
		steps = []splitter{{regex: re, behavior: "Isolated"}}
	}
	if err != nil {
		return nil, err
	}
	p := pieces{[]byte(text), []span{{0, uint32(len(text))}}}
	for k := range steps {
		if p, err = steps[k].split(&budget{}, p, true, 1<<30); err != nil {
			return nil, err
		}
	}
	for _, s := range p.spans {
		out = append(out, text[s.start:s.end])
	}
	return out, nil
}

// CutsDiffer returns the place in a word at which the quick way of finding cuts
// does not agree with the slow one, -1 if there is none.
func CutsDiffer(t *Tokenizer, word []byte) int {
	c := t.bpe.cuts
	for i := range word {
		n, cuts := c.threes(word, i, len(word))
		for k := 1; k < n; k++ {
			at := i + 3*k
			a, _ := utf8.DecodeRune(word[at-3:])
			b, _ := utf8.DecodeRune(word[at:])
			if cuts>>k&1 == 0 != c.together(word, at-3, at, at+3, a, b) {
				return at
			}
		}
	}
	return -1
}

// KnownWords returns how many short words the scratch memory of t has room for, and how many short and
// other words it knows.
func KnownWords(t *Tokenizer) (room, short, long int) {
	w := t.take()
	defer t.give(w)
	for _, s := range w.short {
		if s.count() != 0 {
			short++
		}
	}
	return len(w.short), short, len(w.long[0]) + len(w.long[1])
}

// Normalize returns what a step of a normalizer makes of text.
func Normalize(kind string, text []byte, limit int) ([]byte, error) {
	n := normalizer{kind: kind}
	return n.rewrite(&budget{}, text, limit)
}

// AppendMarked appends the ids of a text with marks.
func (t *Tokenizer) AppendMarked(ctx context.Context, dst []uint32, text []byte) ([]uint32, error) {
	return t.encode(ctx, dst, text, marked, nil)
}

// AppendMarked is t.AppendMarked with the ids of known beginnings copied.
func (c *Cache) AppendMarked(ctx context.Context, dst []uint32, t *Tokenizer, text []byte) (ids []uint32, reused int, err error) {
	return c.append(ctx, dst, t, text, marked)
}

// QuickPatterns returns the expressions whose scanners have quick words.
func QuickPatterns() (all []string) {
	for pattern, r := range scanners {
		if r.quick != nil {
			all = append(all, pattern)
		}
	}
	return all
}

// WithPattern loads the simulated engine's tokenizer with another expression, and the same without
// quick words.
func WithPattern(t testing.TB, pattern string) (quick, slow *Tokenizer) {
	t.Helper()
	var both [2]*Tokenizer
	for k := range both {
		var err error
		if both[k], err = Load(os.DirFS("../internal/enginesim/model"), Config{}); err != nil {
			t.Fatal(err)
		}
		both[k].scan, both[k].resumes = []splitter{scanners[pattern].splitter()}, 0
	}
	both[1].scan[0].quick = nil
	return both[0], both[1]
}

// Steps returns the ids of a text, and the places to resume at as text.
func (t *Tokenizer) Steps(ctx context.Context, text []byte, step int) (ids []uint32, ends string) {
	rec := recorder{step: step, next: step, last: resume{start: true}}
	ids, err := t.encode(ctx, nil, text, bare, &rec)
	return ids, fmt.Sprint(rec.ends, err)
}
