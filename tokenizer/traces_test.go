// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/tokenizer"
)

// traceTexts returns the text of each request of the first conversations of real
// agents, which resend all that was said before.
func traceTexts(t testing.TB, files int) (conversations [][][]byte) {
	t.Helper()
	path := fixtures.Path(t, "traces", "lmcache_agent_traces.tar.gz")
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for archive := tar.NewReader(unzipped); len(conversations) < files; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		var turns [][]byte
		lines := bufio.NewScanner(archive)
		lines.Buffer(nil, 1<<26)
		for lines.Scan() {
			turns = append(turns, textOf(t, lines.Bytes()))
		}
		conversations = append(conversations, turns)
	}
	return conversations
}

// textOf joins all strings of a JSON line, which is as good a text as any.
func textOf(t testing.TB, line []byte) []byte {
	t.Helper()
	var text bytes.Buffer
	dec := json.NewDecoder(bytes.NewReader(line))
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return text.Bytes()
		}
		if err != nil {
			t.Fatal(err)
		}
		if s, ok := tok.(string); ok && len(s) > 20 {
			text.WriteString("<|im_start|>" + s + "<|im_end|>\n")
		}
	}
}

// On the real conversations of agents the cache changes no id, and each turn
// costs little more than what is new in it.
func TestTraces(t *testing.T) {
	files := 12
	if testing.Short() {
		files = 2
	}
	conversations := traceTexts(t, files)
	tok := reference(t, "qwen3")
	if conversations == nil || tok == nil {
		return
	}
	c := tokenizer.NewCache(64 << 20)
	turns, size, reusedAll := 0, 0, 0
	for _, conversation := range conversations {
		for i, text := range conversation {
			got, reused, err := c.Append(context.Background(), nil, tok, text, false)
			if err != nil {
				t.Fatal(err)
			}
			want, err := tok.Append(context.Background(), nil, text, false)
			if err != nil || !slices.Equal(got, want) {
				t.Fatalf("turn %d of %d bytes: %v, differs at %d", i, len(text), err, tokenizer.FirstDiff(got, want))
			}
			if back := tok.Decode(nil, got); !bytes.Equal(back, text) {
				t.Errorf("turn %d: decoding gives another text", i)
			}
			turns, size, reusedAll = turns+1, size+len(text), reusedAll+reused
		}
	}
	t.Logf("%d turns, %d bytes, of which %d were reused", turns, size, reusedAll)
	if turns < 10 || reusedAll < size/2 {
		t.Errorf("%d turns, %d of %d bytes reused", turns, reusedAll, size)
	}
}
