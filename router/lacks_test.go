// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// A candidate of a hybrid model says in words which group lowers its hit, and by which rule it is lowered.
func TestVerdictNamesTheLimit(t *testing.T) {
	group := func(n int, needs indexer.Needs, block, tokens int) indexer.SideGroup {
		return indexer.SideGroup{Group: n, Needs: needs, Block: block, Tokens: tokens}
	}
	window, other := group(0, indexer.NeedsWindow, 8, 25), group(3, indexer.NeedsWindow, 8, 25)
	state, chunk := group(2, indexer.NeedsState, 8, 0), group(4, indexer.NeedsChunk, 8, 24)
	many := make([]indexer.SideGroup, 17)
	for i := range many {
		many[i] = group(i, indexer.NeedsState, 8, 0)
	}
	const more = ", until a request there makes the rest usable)"
	for name, c := range map[string]struct {
		full    int
		sides   []indexer.SideGroup
		held    map[int]string // by group: the prompt's blocks that it holds
		predict bool
		want    string
	}{
		"a window without blocks":   {8, []indexer.SideGroup{window}, nil, false, "(full prefix 8 blocks, window group 0 → hit 0" + more},
		"a window of a part":        {8, []indexer.SideGroup{window}, map[int]string{0: "abcde"}, false, "(full prefix 8 blocks, window group 0 → hit 5" + more},
		"a state":                   {8, []indexer.SideGroup{state}, map[int]string{2: "c"}, false, "(full prefix 8 blocks, state group 2 → hit 3" + more},
		"a chunk":                   {8, []indexer.SideGroup{chunk}, map[int]string{4: "d"}, false, "(full prefix 8 blocks, chunk group 4 → hit 6" + more},
		"the second of two windows": {8, []indexer.SideGroup{window, other}, map[int]string{0: "abcdefgh", 3: "abcd"}, false, "(full prefix 8 blocks, window group 3 → hit 4" + more},
		"the first of two windows":  {8, []indexer.SideGroup{window, other}, map[int]string{0: "abcd", 3: "abcdefgh"}, false, "(full prefix 8 blocks, window group 0 → hit 4" + more},
		"the state, not the window": {8, []indexer.SideGroup{window, state}, map[int]string{0: "abcdefgh", 2: "e"}, false, "(full prefix 8 blocks, state group 2 → hit 5" + more},
		"nothing is lowered":        {8, []indexer.SideGroup{state}, map[int]string{2: "h"}, false, ""},
		"only rounding":             {24, nil, nil, false, "(holds 8 blocks of the prompt; its hybrid model can use 6" + more},
		"a prediction raises it":    {8, []indexer.SideGroup{state}, map[int]string{2: "c"}, true, ""},
		"too many groups":           {8, many, nil, false, "(its events promise 8 blocks of the prompt; by its responses kvroute counts 0: rule limit)"},
	} {
		t.Run(name, func(t *testing.T) {
			w := &auditWorld{Router: newRouter(t, router.Config{PredictTTL: time.Hour}, 1)}
			one := router.Worker{ID: 1}
			shape := &indexer.Shape{Block: 8, Full: c.full, Sides: c.sides}
			w.ApplyEvent(one, indexer.Event{Kind: indexer.Shaped, Shape: shape})
			store(w.Router, one, "abcdefgh")
			sequence := indexer.AppendSequenceHashes(nil, indexer.AppendLocalHashes(nil, prompt("abcdefgh"), 8, indexer.Seed("", "")))
			for number, letters := range c.held {
				for _, letter := range letters {
					held := []uint64{sequence[letter-'a'] + 1}
					w.ApplyEvent(one, indexer.Event{Kind: indexer.SideStored, Group: number, Shape: shape, Externals: held})
				}
			}
			if c.predict {
				book(t, w.Router, "before", "abcdefghij")
			}
			want := "chosen"
			if c.want != "" {
				want += " " + c.want
			}
			verdictOf(t, w, "abcdefghij", want)
		})
	}
}

// verdictOf decides on a prompt, and compares what the only candidate is said to be, also after a way through JSON.
func verdictOf(t *testing.T, w *auditWorld, letters, want string) {
	t.Helper()
	r := router.Request{Model: "m", Tokens: prompt(letters), Explain: true}
	d, err := w.BestWorker(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	var read router.Decision
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	for _, d := range []*router.Decision{&d, &read} {
		if got := d.Verdict(&d.Candidates[0]); got != want {
			t.Errorf("verdict %q, want %q", got, want)
		}
	}
}

// The rule that the audit learned is named where it lowers the blocks.
func TestVerdictNamesTheRule(t *testing.T) {
	w := newAuditWorld(t, 8)
	store(w.Router, router.Worker{ID: 1}, "abcdefgh")
	for i := range 16 {
		w.respond(prompt("abcdefghij"[:4+i%6]), func(promised int) int { return promised - 8 })
	}
	if got := w.audit().Rule; got != "drop" {
		t.Fatalf("the audit learned %q", got)
	}
	verdictOf(t, w, "abcdefghij", "chosen (its events promise 8 blocks of the prompt; by its responses kvroute counts 7: rule drop)")
	var c router.Candidate
	if err := json.Unmarshal([]byte(`{"rule":"none"}`), &c); err == nil {
		t.Errorf("a rule that does not exist is read as %v", c.Rule)
	}
}

// The names of limits take no memory of a candidate: each decision lists up to 128.
func TestLimitsTakeNoMemory(t *testing.T) {
	var c router.Candidate
	if used := unsafe.Offsetof(c.Input) - unsafe.Offsetof(c.Probed); used != 8 {
		t.Errorf("Probed and the limits take %d bytes, want 8, the bytes of Probed with what aligns the next field", used)
	}
	if got := fmt.Sprint(router.LimitNone); got != "" {
		t.Errorf("no limit has the name %q", got)
	}
}
