// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/tokenizer"
)

// An expression that the references and our engine read differently is refused, and
// the error says what and where.
func TestRefusedExpressions(t *testing.T) {
	for _, c := range []struct{ expr, want string }{
		{`[a&&]`, "at 2: & in brackets"},
		{`[&&a]`, "at 1: & in brackets"},
		{`[!-&&b]`, "at 1: this range"},
		{`[a[b]]`, "at 2: [ in brackets"},
		{`[a[b`, "at 2: [ in brackets"},
		{`(?i:[a[b]])`, "at 6: [ in brackets"},
		{`[[:alpha:]]+`, "at 1: [ in brackets"},
		{`[a--b]`, "at 1: this range"},
		{`[a~~b]`, "at 2: ~ in brackets"},
		{`[]a]`, "at 1: ]"},
		{`[^]a]`, "at 2: ]"},
		{`[a-b-c]`, "at 4: -"},
		{`[\s-a]`, "at 1: this range"},
		{`[b-a]`, "at 1: this range"},
		{`[a`, "at 0: [ without ]"},
		{`^a`, "at 0: ^"},
		{`\s+$|a`, "at 3: $"},
		{`\Aa`, `at 0: \A`},
		{`a\z`, `at 1: \z`},
		{`a\Z`, `at 1: \Z`},
		{`\ba`, `at 0: \b`},
		{`\Ba`, `at 0: \B`},
		{`\Ga`, `at 0: \G`},
		{`\<a`, `at 0: \<`},
		{`\w+`, `at 0: \w`},
		{`[\d]+`, `at 1: \d`},
		{`\h`, `at 0: \h`},
		{`\x41`, `at 0: \x`},
		{`\é`, `at 0: \é`},
		{`a\`, `at 1: \ at the end`},
		{`(?s).`, "at 0: (?s)"},
		{`(?i)a`, "at 0: (?i)"},
		{`(?<=a)b`, "at 0: (?<="},
		{`(?<n>a)`, "at 0: (?<n"},
		{`(?#x)a`, "at 0: (?#x"},
		{`(a)\1`, `at 3: \1`},
		{`a++`, "at 2: a possessive"},
		{`a{2}+`, "at 4: a possessive"},
		{`a{2}?`, "at 1: {n}?"},
		{`a{,2}`, "at 1: {,2}"},
		{`a{2,1}`, "at 1: {2,1}"},
		{`a{0}b`, "at 1: {0}"},
		{`x{`, "at 1: {"},
		{`*a`, "at 0: *"},
		{`a)`, "at 1: a ) too many"},
		{`(a`, "at 0: ( without )"},
		{`x*|y`, "at 0: a match of the empty text"},
		{`a*`, "at 0: a match of the empty text"},
		{`a|`, "at 0: a match of the empty text"},
		{`(?=a)`, "at 0: a match of the empty text"},
		{`(?:a?){2}b`, "at 6: to repeat what can match nothing"},
		{`\p{Hiragana}`, `at 0: \p{Hiragana}`},
		{`\p{Nd}`, `at 0: \p{Nd}`},
		{`\p{^L}`, `at 0: \p{^L}`},
		{`\pL`, `at 0: \p without`},
		{`[\p{Lo}]`, `at 0: one of \p{Lm} and \p{Lo}`},
		{`(?i:ss)`, "at 5: (?i: with letters"},
		{`(?i:x[fg]i)`, "at 9: (?i: with letters"},
		{`(?i:s)(?i:t)`, "at 6: (?i: with letters"},
		{`(?i:ß)`, "at 4: more than a character of ASCII"},
		{`(?i:[a-z])`, "at 4: more than a character of ASCII"},
		{`(?i:[^a])`, "at 4: [^ in (?i:"},
		{`(?i:s+)`, "at 5: to repeat in (?i:"},
		{`(?i:s){2}`, "at 6: to repeat in (?i:"},
		{strings.Repeat("(", 100) + "a", "a group as deep"},
		{strings.Repeat(`\p{L}`, 3000), "an expression as large"},
		{"a\xff", "not UTF-8"},
	} {
		for _, rank := range []bool{false, true} {
			if _, err := tokenizer.Split(c.expr, "a", rank); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%.40q: %v, want %q", c.expr, err, c.want)
			}
		}
	}
	_, err := loadBytes(withExpression(t, `^a`))
	if !errors.Is(err, tokenizer.ErrUnsupported) {
		t.Errorf("load: %v", err)
	}
}

// The pieces are those of the reference implementations of Split, whose matches
// are kept apart, and of rank files, where what nothing matches is dropped.
func TestExpressions(t *testing.T) {
	for _, c := range []struct {
		expr, text string
		split      string
		rank       string
	}{
		{`a+`, "xaay", "x|aa|y", "aa"},
		{`.+`, "a\r\u2028b\nc", "a\r\u2028b|\n|c", "a\r\u2028b|c"},
		{`\s+`, "a\v\x1c\u0085\u00a0\u180e\u3000b", "a|\v|\x1c|\u0085\u00a0|\u180e|\u3000|b", "\v|\u0085\u00a0|\u3000"},
		{`(?i:'s|k)`, "'ſ\u212a'SK", "'ſ|\u212a|'S|K", "'ſ|\u212a|'S|K"},
		{`(a|ab)(?:c|bcd)`, "abcd", "abcd", "abcd"},
		{`(?>a+)b|\p{Lt}`, "aabǅx", "aab|ǅ|x", "aab|ǅ"},
		{`[\p{Lm}\p{Lo}]+`, "aªʰ漢b", "a|ªʰ漢|b", "ªʰ漢"},
		{`[\u4e00-\u9fa5\-]+|[^\P{P}]`, "a漢-漢!b", "a|漢-漢|!|b", "漢-漢|!"},
	} {
		for _, rank := range []bool{false, true} {
			want := c.split
			if rank {
				want = c.rank
			}
			got, err := tokenizer.Split(c.expr, c.text, rank)
			if err != nil || strings.Join(got, "|") != want {
				t.Errorf("%q, rank file %t: %q, %v, want %q", c.expr, rank, got, err, want)
			}
		}
	}
}

// withExpression returns a tokenizer.json with an expression of the test's.
func withExpression(t *testing.T, expr string) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/golden/bytelevel-regex.json")
	if err != nil {
		t.Fatal(err)
	}
	const old = `\\p{Lu}?\\p{Ll}+|\\p{N}+(?=\\s)|\\s+(?!\\S)`
	if !strings.Contains(string(b), old) {
		t.Fatal("the golden file has another expression")
	}
	return []byte(strings.ReplaceAll(string(b), old, strings.ReplaceAll(expr, `\`, `\\`)))
}

// All searches in a text share one time, which ends with the context's.
func TestExpressionTime(t *testing.T) {
	tok, err := loadBytes(withExpression(t, `a*a*b|.`))
	if err != nil {
		t.Fatal(err)
	}
	text := []byte(strings.Repeat("a", 6000))
	for _, limit := range []time.Duration{50 * time.Millisecond, time.Hour} {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		began := time.Now()
		ids, err := tok.Append(ctx, nil, text, false)
		took := time.Since(began)
		cancel()
		if err == nil || len(ids) > 0 || took > min(limit, 2*time.Second)+3*time.Second {
			t.Errorf("%v: %d ids, %v after %v", limit, len(ids), err, took)
		}
		if late := errors.Is(err, context.DeadlineExceeded); late != (limit < time.Minute) {
			t.Errorf("%v: %v", limit, err)
		}
	}
}

// countdown is a context that ends at a look at it.
type countdown struct {
	context.Context //nolint:containedctx // it is one
	left            int
}

func (c *countdown) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

// looks is a context that counts the looks at it.
type looks struct {
	context.Context //nolint:containedctx // it is one
	n               int
}

func (c *looks) Err() error {
	c.n++
	return nil
}

// Rewriting and parting a large stretch look at the context, too, not only what
// comes behind them: nothing of these texts is left for that.
func TestTimeWithinALargeStretch(t *testing.T) {
	const size, every = 2 << 20, 64 << 10
	for name, char := range map[string]string{"norm-nfkd-strip": " ", "punctuation": "e"} {
		tok := golden(t, name)
		text := bytes.Repeat([]byte(char), size/len(char))
		ctx := &looks{Context: context.Background()}
		if ids, err := tok.Append(ctx, nil, text, false); err != nil || len(ids) > 0 {
			t.Fatalf("%s: %d ids, %v", name, len(ids), err)
		}
		if ctx.n < size/every/2 {
			t.Errorf("%s: %d looks at the context", name, ctx.n)
		}
		half := &countdown{context.Background(), ctx.n / 2}
		if _, err := tok.Append(half, nil, text, false); !errors.Is(err, context.Canceled) || half.left < -4 {
			t.Errorf("%s: %v, %d looks after the end", name, err, -half.left)
		}
	}
}

// Wherever time is up, within a piece too, what was encoded is right as far as it
// goes, and the error is the context's.
func TestTimeUpAnywhere(t *testing.T) {
	defer tokenizer.SetRegexTime(5 * time.Minute)()
	texts := []string{
		strings.Repeat("a", 160_000),
		"the <|im_end|>" + strings.Repeat("the", 50_000) + "<|im_end|> the end",
		strings.Repeat("漢字", 25_000),
		strings.Repeat("the end. ", 17_000),
	}
	toks := goldens(t)
	ranks, err := tokenizer.Load(fstest.MapFS{"a.tiktoken": {Data: []byte("YQ== 0\nYWE= 1\nYWFh 2\nYWFhYQ== 3\n")}}, tokenizer.Config{Pattern: "a+|."})
	if err != nil {
		t.Fatal(err)
	}
	toks["ranks"] = ranks
	for name, tok := range toks {
		for k, text := range texts {
			if tok.Slow != "" {
				text = text[:15_000] // each search looks at the context
			}
			want, err := tok.Append(context.Background(), nil, []byte(text), true)
			if err != nil {
				t.Fatal(name, err)
			}
			for looks := range 4 {
				ctx := &countdown{context.Background(), looks}
				got, err := tok.Append(ctx, nil, []byte(text), true)
				if (looks < 2 && tok.Slow == "" || ctx.left < 0) != errors.Is(err, context.Canceled) || err == nil && len(got) != len(want) {
					t.Errorf("%s: text %d: after %d looks: %v", name, k, looks, err)
				}
				if len(got) > len(want) || !slices.Equal(got, want[:len(got)]) {
					t.Errorf("%s: text %d: after %d looks: %d ids are not the first of %d", name, k, looks, len(got), len(want))
				}
			}
			// Unfinished work leaves nothing behind.
			if again, err := tok.Append(context.Background(), nil, []byte(text), true); err != nil || !slices.Equal(again, want) {
				t.Errorf("%s: text %d: other ids afterwards, %v", name, k, err)
			}
		}
	}
}
