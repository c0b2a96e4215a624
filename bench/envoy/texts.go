// SPDX-License-Identifier: Apache-2.0

package main

import (
	_ "embed"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
)

// texts makes prompts of prose and code: a shared beginning and an end of their own. Common
// words are far more frequent than others, and a few are new each time: names, numbers,
// identifiers. No two prompts are equal.
type texts struct {
	rng    *rand.Rand
	often  *rand.Zipf // of words
	shared string
}

func newTexts(rng *rand.Rand) *texts {
	t := &texts{rng: rng, often: rand.NewZipf(rng, 1.1, 6, uint64(len(words)-1))}
	t.shared = t.text(1 << 20)
	return t
}

func (t *texts) text(size int) string {
	var b strings.Builder
	for b.Len() < size {
		if t.rng.IntN(5) == 0 {
			t.code(&b)
		} else {
			t.paragraph(&b)
		}
	}
	return b.String()[:size]
}

func (t *texts) paragraph(b *strings.Builder) {
	for range 2 + t.rng.IntN(4) {
		words := make([]string, 5+t.rng.IntN(18))
		for i := range words {
			if words[i] = t.word(); t.rng.IntN(10) == 0 {
				words[i] += ","
			}
		}
		text := strings.Join(words, " ")
		b.WriteString(strings.ToUpper(text[:1]) + text[1:] + []string{". ", ". ", ". ", "? ", ": "}[t.rng.IntN(5)])
	}
	b.WriteString("\n\n")
}

func (t *texts) code(b *strings.Builder) {
	fmt.Fprintf(b, "func %s(%s int) error {\n", t.name(), t.word())
	for range 2 + t.rng.IntN(6) {
		fmt.Fprintf(b, "\tif %s := %s.%s(%q, %d); %s != nil {\n\t\treturn %s\n\t}\n", t.word(), t.word(), t.name(), t.word(), t.rng.IntN(1000), t.word(), t.name())
	}
	b.WriteString("}\n\n")
}

// word returns a word. One of 40 words is new.
func (t *texts) word() string {
	switch t.rng.IntN(120) {
	case 0:
		return t.name()
	case 1:
		return strconv.Itoa(t.rng.IntN(100_000))
	case 2:
		return strconv.FormatUint(t.rng.Uint64()>>32, 16)
	}
	return words[t.often.Uint64()]
}

// name is an identifier of a program.
func (t *texts) name() string {
	w := words[t.rng.IntN(len(words))]
	return words[t.rng.IntN(len(words))] + strings.ToUpper(w[:1]) + w[1:]
}

// body is a chat request of about size bytes; seven tenths of it are the same in all.
func (t *texts) body(size, tokens int) []byte {
	return fmt.Appendf(nil, bodyBegin+`"stream":%v,"messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`,
		tokens, tokens > 0, t.shared[:size*7/10], t.text(size*3/10))
}

// words are frequent English words, then words of typical prompts.
//
//nolint:gochecknoglobals // a table
var words = strings.Fields(wordList)

//go:embed words.txt
var wordList string
