// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"golang.org/x/text/unicode/rangetable"

	"github.com/kvroute/kvroute/tokenizer"
)

// Normal forms equal those of x/text where x/text follows Unicode: up to 30 marks, and
// characters of Unicode 9.0.
func TestNormalForms(t *testing.T) {
	forms := map[string]norm.Form{"NFC": norm.NFC, "NFD": norm.NFD, "NFKC": norm.NFKC, "NFKD": norm.NFKD}
	var all, marks []rune
	rangetable.Visit(rangetable.Assigned("9.0.0"), func(r rune) {
		if !utf8.ValidRune(r) {
			return
		}
		all = append(all, r)
		if norm.NFD.PropertiesString(string(r)).CCC() > 0 {
			marks = append(marks, r)
		}
	})
	texts := make([]string, 0, len(all)+20000)
	for _, r := range all {
		texts = append(texts, string(r))
	}
	rng := rand.New(rand.NewPCG(1, 2))
	some := []rune("aeuAou가각각 Å\xff")
	for range 20000 {
		var b strings.Builder
		for range 1 + rng.IntN(9) {
			switch rng.IntN(4) {
			case 0:
				b.WriteRune(all[rng.IntN(len(all))])
			case 1:
				b.WriteRune(some[rng.IntN(len(some))])
			default:
				b.WriteRune(marks[rng.IntN(len(marks))])
			}
		}
		texts = append(texts, b.String())
	}
	for kind, form := range forms {
		for _, text := range texts {
			got, err := tokenizer.Normalize(kind, []byte(text), 1<<20)
			if want := form.String(text); err != nil || string(got) != want {
				t.Fatalf("%s of %x: %x, %v; want %x", kind, text, got, err, want)
			}
		}
	}
}

// A run of marks as long as a prompt is ordered in linear time, and the bound on the
// normal form holds.
func TestLongRunsOfMarks(t *testing.T) {
	const n = 1 << 20
	text := append([]byte("a"), bytes.Repeat([]byte("\u0301\u0323"), n)...)
	want := "\u1ea1" + strings.Repeat("\u0323", n-1) + strings.Repeat("\u0301", n)
	if got, err := tokenizer.Normalize("NFC", text, len(text)); err != nil || string(got) != want {
		t.Errorf("%d bytes, %v; want %d bytes", len(got), err, len(want))
	}
	if got, err := tokenizer.Normalize("NFKC", bytes.Repeat([]byte("\ufdfa"), n), n); err == nil || len(got) > 0 {
		t.Errorf("a form beyond the bound: %d bytes, %v", len(got), err)
	}
}
