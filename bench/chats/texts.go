// SPDX-License-Identifier: Apache-2.0

package chats

import (
	_ "embed"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/rangetable"
)

// odd are pieces that tokenizers often handle differently: contractions, spaces, line
// ends, marks, numbers of all scripts, halves of special tokens.
//
//nolint:gochecknoglobals // a table
var odd = []string{
	" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u0085", "\u2003", "\u3000", "'", "'s", "'S", "'ll", "'VE", "'ſ", "’s",
	"é", "e\u0301", "\u0301", "\u0328", "\u1161", "한", "ǅ", "ʰ", "ª", "İ", "ß", "1", "12", "123", "1234", "１２", "٣", "¾", "Ⅷ", "一", ".", "...", "!", "/", "//", "\\", "\"", "(", ")[", "_",
	"<", "<|", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<think>", "</think>", "<tool_call>", "<|im_", "|>", "▁", "▁▁", "\x00", "\x1b", "\x7f",
	"🚀", "👩‍💻", "\ufe0f", "\u200d", "\u200b", "\ufeff", "\U0001e4ec", "\U000105c9\u0307", "\U00011382", "\u0897", "\u1c89", "\ua7cb", "\U0001ccf0",
	"a", "b", "A", "B", "the", " the", "Hello", "HELLO", "helloWorld", "ing", "tion", " and", "x1", "foo_bar", "self.", "return", "{", "}", "};\n", "=> ", "http://", "中文", "日本語", "русский", "العربية", "ไทย", "हिन्दी",
}

// blocks are the first and the last code points of ranges from which random characters come: most
// scripts, code points of the newest versions, and unassigned ones.
//
//nolint:gochecknoglobals // a table
var blocks = []rune{
	0x20, 0x7e, 0x80, 0x24f, 0x250, 0x36f, 0x370, 0x5ff, 0x600, 0x8ff, 0x900, 0xdff,
	0xe00, 0x11ff, 0x1200, 0x1fff, 0x2000, 0x2bff, 0x2c00, 0x30ff, 0x3100, 0x4dbf, 0x4e00, 0x9fff,
	0xa000, 0xabff, 0xac00, 0xd7ff, 0xe000, 0xe0ff, 0xf900, 0xffff, 0x10000, 0x10fff, 0x11000, 0x12fff,
	0x16000, 0x18fff, 0x1b000, 0x1bfff, 0x1d000, 0x1dfff, 0x1e000, 0x1ffff, 0x20000, 0x323af, 0xe0000, 0xe01ff,
}

// Random returns a text of up to a few hundred bytes: of the odd pieces, of the characters of
// one block or several, or of both.
func Random(r *rand.Rand) string {
	var b strings.Builder
	block := 2 * r.IntN(len(blocks)/2)
	kind := r.IntN(4)
	for range 1 + r.IntN(40) {
		if kind == 0 || kind == 1 && r.IntN(2) == 0 {
			b.WriteString(odd[r.IntN(len(odd))])
			continue
		}
		if kind == 2 && r.IntN(4) == 0 {
			block = 2 * r.IntN(len(blocks)/2)
		}
		if c := blocks[block] + r.Int32N(blocks[block+1]-blocks[block]+1); utf8.ValidRune(c) {
			b.WriteRune(c)
		}
	}
	return b.String()
}

// runs are the characters of which texts have long runs: white space, combining marks,
// marks that separate words, digits, letters.
const runs = " \t\n\r\u00a0\u0085\u2003\u3000\u0301\u0323\u0327\u0328\u0e38\u05b0\u0951\u1161\u11a8\u200b\u200d\ufe0f=-_.0一aAé"

// Runs returns a text of long runs of one character or two. Odd pieces stand between some of
// them.
func Runs(r *rand.Rand) string {
	all := []rune(runs)
	var b strings.Builder
	for range 1 + r.IntN(4) {
		run := string(all[r.IntN(len(all))])
		if r.IntN(3) == 0 {
			run += string(all[r.IntN(len(all))])
		}
		n := 1 + r.IntN(80)
		if r.IntN(20) == 0 {
			n *= 50
		}
		b.WriteString(strings.Repeat(run, n))
		if r.IntN(2) == 0 {
			b.WriteString(odd[r.IntN(len(odd))])
		}
	}
	return b.String()
}

// Kind is a kind of text, of which documents are made at random.
type Kind struct {
	words []string
	// Each word is followed by one of these.
	separators []string
}

// The kinds of text.
//
//nolint:gochecknoglobals // tables
var (
	English = Kind{strings.Fields(chatText), spaced}
	Code    = Kind{strings.Split("func (r *Router) |if err != nil {\n\treturn err\n}\n|for i := range |def __init__(self, |self.|import numpy as np\n|return x + 1\n|\t\t|    |const |let result = await |std::vector<int>|() => {|});\n||/* comment */|\"key\": |[0], |0x1f|3.14159, |== |&& |!= null|println!(\"{}\", |class Foo<T> extends Bar|@decorator\n|async |yield |lambda x: x**2|SELECT * FROM users WHERE id = |<div class=\"row\">|</div>\n|npm install --save-dev |git commit -m |snake_case_name |camelCaseName |CONSTANT_VALUE |{}\n\n", "|"), spaced}
	CJK     = Kind{strings.Fields(cjkText), append(slices.Repeat([]string{""}, 35), "，", "，", "，", "。\n", "。\n")}
	spaced  = append(slices.Repeat([]string{" "}, 38), ", ", ".\n\n")
)

//go:embed chat.txt
var chatText string

//go:embed cjk.txt
var cjkText string

// Document returns about size bytes of text of one kind.
func (k Kind) Document(r *rand.Rand, size int) string {
	var b strings.Builder
	for b.Len() < size {
		b.WriteString(k.words[r.IntN(len(k.words))])
		b.WriteString(k.separators[r.IntN(len(k.separators))])
	}
	return b.String()
}

// settled is a mapping for [strings.Map] that drops the code points that Unicode 14 and 15
// added. A template that prints a list writes them as they are or as escapes. That depends on
// the Unicode version of the engine's Python: 14.0 in Python 3.11, 15.0, like ours, in 3.12.
func settled(r rune) rune {
	if unicode.Is(rangetable.Assigned(unicode.Version), r) && !unicode.Is(rangetable.Assigned("13.0.0"), r) {
		return -1
	}
	return r
}
