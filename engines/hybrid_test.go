// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/engines/localindex"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// readVectors calls a function for each line of a file of captured events of hybrid models. It returns false without
// the file.
func readVectors(t *testing.T, file string, line func(text []byte)) bool {
	t.Helper()
	name := fixtures.Path(t, "vectors", file)
	if name == "" {
		return false
	}
	fixtures.EachLine(t, name, line)
	return true
}

// hybridWorker is an engine's events in an index.
type hybridWorker struct {
	t      *testing.T
	size   int
	engine *engines.Engine
	index  *indexer.Index
	local  *localindex.Index // the events as `kvroute publish` keeps them
	last   uint64
}

func newHybridWorker(t *testing.T, size int) *hybridWorker {
	return &hybridWorker{
		t: t, size: size, engine: engines.NewEngine(engines.EngineOptions{BlockSize: size}), index: indexer.New(indexer.Config{}), local: localindex.New(),
	}
}

func (w *hybridWorker) apply(payloads []string) {
	w.t.Helper()
	for _, p := range payloads {
		batch, err := engines.DecodeBatch(unhex(w.t, p))
		if err != nil {
			w.t.Fatal(err)
		}
		evs, _ := w.engine.Apply(&batch)
		for i := range evs {
			w.last++
			evs[i].EventID = w.last
		}
		read, bad, err := events.DecodeEvents(events.AppendEvents(nil, evs))
		if err != nil || bad > 0 || len(read) != len(evs) {
			w.t.Fatalf("%d of %d events are read, %d bad, %v", len(read), len(evs), bad, err)
		}
		for _, ev := range read {
			w.index.Apply(0, ev.Event)
			w.local.Remember(time.Time{}, ev)
		}
	}
}

// restored is the worker with an index made of an answer to a query for all its blocks.
func (w *hybridWorker) restored() *hybridWorker {
	x := *w
	x.index = indexer.New(indexer.Config{})
	for _, ev := range w.local.Answer(&events.Query{})().Events {
		read, bad, err := events.DecodeEvents(events.AppendEvents(nil, []events.RouterEvent{ev}))
		if err != nil || bad > 0 {
			w.t.Fatal(bad, err)
		}
		x.index.Apply(0, read[0].Event)
	}
	return &x
}

// restart continues with the state that a later process loads.
func (w *hybridWorker) restart() {
	w.t.Helper()
	var state indexer.State
	var err error
	if w.engine, w.index, state, err = engines.Restart(w.engine, w.index); state != indexer.StateOK || err != nil {
		w.t.Fatal(state, err)
	}
}

// promised returns the tokens of a prompt, in hex, that the worker has cached.
func (w *hybridWorker) promised(prompt, salt string) int {
	w.t.Helper()
	b, err := hex.DecodeString(prompt)
	if err != nil {
		w.t.Fatal(err)
	}
	tokens := make([]uint32, len(b)/4)
	for i := range tokens {
		tokens[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	m := indexer.Matches{Device: make([]int32, 1), Tokens: len(tokens)}
	w.index.FindMatches(&m, indexer.AppendLocalHashes(nil, tokens, w.size, indexer.Seed("", salt)))
	return min(int(m.Device[0]), (len(tokens)-1)/w.size) * w.size
}

// The events of a running vLLM with hybrid models promise what its responses report as cached. The one exception is a
// request after a reset of the cache, which vLLM publishes with its next step.
func TestHitsOfHybridModels(t *testing.T) {
	for _, c := range []struct {
		file      string
		size      int
		requests  int
		different string // the only step with another hit
	}{
		{"window", 32, 30, ""},
		{"window", 16, 30, ""},
		{"state", 640, 25, "store_after_reset"},
		{"state", 32, 25, "store_after_reset"},
		{"state", 64, 25, "store_after_reset"},
		{"disabled", 32, 7, ""},
	} {
		w, n := newHybridWorker(t, c.size), 0
		if !readVectors(t, "hybrid-vllm-0.32.0/"+c.file+".jsonl.gz", func(text []byte) {
			var line struct {
				Step     string
				Requests []struct {
					Prompt string `json:"prompt_token_ids"`
					Cached int    `json:"cached_tokens"`
					Extra  struct {
						Salt string `json:"cache_salt"`
					}
				}
				Payloads []string `json:"payloads_hex"`
			}
			if err := json.Unmarshal(text, &line); err != nil {
				t.Fatal(err)
			}
			if len(line.Requests) > 0 && line.Requests[0].Prompt != "" { // further ones are sent at the same time
				q := line.Requests[0]
				n++
				got := w.promised(q.Prompt, q.Extra.Salt)
				if got != q.Cached && line.Step != c.different {
					t.Errorf("%s, blocks of %d, %s: %d tokens, want %d", c.file, c.size, line.Step, got, q.Cached)
				}
				if after := w.restored().promised(q.Prompt, q.Extra.Salt); after != got {
					t.Errorf("%s, blocks of %d, %s: %d tokens by an answer with all blocks, want %d", c.file, c.size, line.Step, after, got)
				}
				w.restart()
				if after := w.promised(q.Prompt, q.Extra.Salt); after != got {
					t.Errorf("%s, blocks of %d, %s: %d tokens after a restart, want %d", c.file, c.size, line.Step, after, got)
				}
			}
			w.apply(line.Payloads)
		}) {
			return
		}
		if n != c.requests {
			t.Errorf("%s: %d requests, want %d", c.file, n, c.requests)
		}
	}
}

// The same for the cache manager of vLLM 0.33 with other layouts. exact is how many of 21 hits are the promised ones;
// the others are longer.
func TestHitsOfVLLMsCacheManager(t *testing.T) {
	exact := map[string]int{
		"swa1024_b16_default": 21, "swa1024_b16_dense": 21, "sizes_16_and_64": 21, "mamba_b528_default": 21, "full_swa_mamba": 21,
		"local8192_b16": 21, "sizes_dsv4": 21, "mamba_b528_unit16": 13,
	}
	var w *hybridWorker
	right := map[string]int{}
	if !readVectors(t, "hybrid-vllm-0.33.0/manager.jsonl.gz", func(text []byte) {
		var line struct {
			Case     string
			Groups   []json.RawMessage
			Step     int      `json:"scheduler_block_size"`
			Prompt   string   `json:"prompt_token_ids"`
			Cached   int      `json:"cached_tokens"`
			Payloads []string `json:"payloads_hex"`
		}
		if err := json.Unmarshal(text, &line); err != nil {
			t.Fatal(err)
		}
		if line.Groups != nil {
			w = newHybridWorker(t, line.Step)
			return
		}
		got := w.promised(line.Prompt, "")
		if after := w.restored().promised(line.Prompt, ""); after != got {
			t.Errorf("%s: %d tokens by an answer with all blocks, want %d", line.Case, after, got)
		}
		w.restart()
		if after := w.promised(line.Prompt, ""); after != got {
			t.Errorf("%s: %d tokens after a restart, want %d", line.Case, after, got)
		}
		switch eagle := strings.HasSuffix(line.Case, "eagle"); {
		case got == line.Cached:
			right[line.Case]++
		case got > line.Cached && !eagle: // events do not say that EAGLE drops a block
			t.Errorf("%s: %d tokens, want %d", line.Case, got, line.Cached)
		}
		w.apply(line.Payloads)
	}) {
		return
	}
	for name, want := range exact {
		if right[name] < want {
			t.Errorf("%s: %d of 21 hits, want %d", name, right[name], want)
		}
	}
	t.Log(right)
}

// The process that an engine restarts as may have other groups and block sizes than the one before. An index that
// misses all events of the new process is right after an answer with all blocks.
func TestRestartForgetsGroups(t *testing.T) {
	e, x := engines.NewEngine(engines.EngineOptions{BlockSize: 2}), indexer.New(indexer.Config{})
	local, late, id := localindex.New(), indexer.New(indexer.Config{}), uint64(0)
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	hashes := indexer.AppendLocalHashes(nil, tokens, 2, indexer.Seed("", ""))
	stored := func(group, size int, kind string, hashes ...uint64) engines.EngineEvent {
		return engines.EngineEvent{
			Kind: engines.EngineStored, Group: group, Spec: kind, Window: 3, BlockSize: size, Tokens: tokens, Hashes: hashes, Usable: len(hashes),
		}
	}
	state := []engines.EngineEvent{stored(0, 4, "full_attention", 14, 18), stored(1, 4, "mamba", 18)}
	for i, c := range []struct {
		batch []engines.EngineEvent
		want  int32 // blocks of a prompt with a token more
	}{
		{state, 4},
		{[]engines.EngineEvent{stored(0, 2, "full_attention", 12, 14, 16, 18)}, 4},
		{[]engines.EngineEvent{stored(0, 2, "sliding_window", 16), stored(1, 2, "full_attention", 12, 14, 16, 18)}, 3},
		{state, 4},
		{[]engines.EngineEvent{stored(0, 2, "", 12, 14, 16, 18)}, 4},
		{[]engines.EngineEvent{stored(0, 4, "full_attention", 14, 18)}, 4},
	} {
		cleared := e.Clear(0)
		evs, _ := e.Apply(&engines.EngineBatch{Events: c.batch})
		for _, ev := range append([]events.RouterEvent{cleared}, evs...) {
			x.Apply(0, ev.Event)
			id++
			ev.EventID = id
			local.Remember(time.Time{}, ev)
		}
		late.Apply(0, indexer.Event{Kind: indexer.Cleared})
		for n, ev := range local.Answer(&events.Query{})().Events {
			if late.Apply(0, ev.Event); n == 0 && len(c.batch) > 1 && ev.Event.Kind != indexer.Shaped {
				t.Errorf("process %d: an answer begins with %+v, want the shape", i, ev.Event)
			}
		}
		for name, x := range map[string]*indexer.Index{"all events": x, "an answer": late} {
			m := indexer.Matches{Device: make([]int32, 1), Tokens: len(tokens) + 1}
			if x.FindMatches(&m, hashes); m.Device[0] != c.want {
				t.Errorf("process %d by %s: %d blocks, want %d", i, name, m.Device[0], c.want)
			}
			if sides := len(c.batch) > 1; x.Boundaries(0).Sides != sides {
				t.Errorf("process %d by %s: side groups %v, want %v", i, name, !sides, sides)
			}
		}
	}
	// The engine clears its cache: the next blocks tell the shape again, for a reader that missed it.
	for range 2 {
		evs, _ := e.Apply(&engines.EngineBatch{Events: append([]engines.EngineEvent{{Kind: engines.EngineCleared}}, state...)})
		if len(evs) < 2 || evs[0].Event.Kind != indexer.Cleared || evs[1].Event.Kind != indexer.Shaped {
			t.Errorf("events %+v, want a clear and a shape first", evs)
		}
	}
}

// Events of side groups that make no sense are counted, and the worker hits nothing rather than too much.
func TestBadSideGroups(t *testing.T) {
	hashes := indexer.AppendLocalHashes(nil, seq(0, 8), 4, indexer.Seed("", ""))
	full := blockStored(list{1, 2}, nil, seq(0, 8), 4, "group_idx", 0, "kv_cache_spec_kind", "full_attention")
	second := blockStored(list{1, 2}, nil, seq(0, 8), 4, "group_idx", 1, "kv_cache_spec_kind", "full_attention")
	side := func(group, size int, kind string, window any) fields {
		return blockStored(list{2}, nil, seq(0, 8), size, "group_idx", group, "kv_cache_spec_kind", kind, "kv_cache_spec_sliding_window", window)
	}
	for name, c := range map[string]struct {
		events list
		drops  string
		want   int32
	}{
		"a window that is there":        {list{full, side(1, 4, "sliding_window", 4)}, "", 2},
		"before any full block":         {list{side(1, 4, "mamba", nil), full}, "", 2},
		"only side blocks":              {list{side(1, 4, "mamba", nil)}, "", 0},
		"blocks of no tokens":           {list{full, side(1, 4, "mamba", nil), side(2, 0, "mamba", nil)}, "group=1", 2},
		"blocks of 2^31-1 tokens":       {list{full, side(1, 1<<31-1, "mamba", nil)}, "", 0},
		"blocks of 2^31 tokens":         {list{full, side(1, 1<<31, "mamba", nil)}, "bad=1", 2},
		"group 9,999":                   {list{full, side(9999, 4, "mamba", nil)}, "bad=1", 2},
		"a kind that becomes another":   {list{full, side(1, 4, "mamba", nil), side(1, 4, "sliding_window", 9)}, "group_kind=1", 0},
		"a kind that becomes unknown":   {list{full, side(1, 4, "mamba", nil), side(1, 4, "new", nil)}, "group_kind=2", 0},
		"an unknown kind that is known": {list{full, side(1, 4, "new", nil), side(1, 4, "mamba", nil)}, "group_kind=2", 2},
		"a kind that is unknown once":   {list{full, side(1, 4, "mamba", nil), side(1, 4, "new", nil), side(1, 4, "mamba", nil)}, "group_kind=3", 2},
		"another window":                {list{full, side(1, 4, "sliding_window", 4), side(1, 4, "sliding_window", 5)}, "", 2},
		"a window that becomes full":    {list{full, side(1, 4, "sliding_window", 9), second}, "group_kind=1", 2},
		"full that becomes a state":     {list{full, side(0, 4, "mamba", nil)}, "group_kind=1", 0},
		"one of two that becomes one":   {list{full, second, side(1, 4, "mamba", nil), full}, "group_kind=1", 2},
		"full blocks of no tokens":      {list{full, side(1, 4, "mamba", nil), side(0, 0, "full_attention", nil)}, "group=1", 2},
		"full blocks of 2^31-1 tokens":  {list{full, side(1, 4, "mamba", nil), side(0, 1<<31-1, "full_attention", nil)}, "size=1", 2},
		"full blocks of 2^31 tokens":    {list{full, side(1, 4, "mamba", nil), side(0, 1<<31, "full_attention", nil)}, "bad=1", 2},
		"a block of 2^63":               {list{full, side(1, 4, "mamba", nil), blockRemoved(list{uint64(1) << 63}, "group_idx", 1)}, "", 2},
		"a window of no tokens":         {list{full, side(1, 4, "sliding_window", 0)}, "", 0},
		"a removal of another's block":  {list{full, side(1, 4, "mamba", nil), blockRemoved(list{7, 8}, "group_idx", 1)}, "", 2},
		"more removals than copies":     {list{full, side(1, 4, "mamba", nil), blockRemoved(list{2, 2, 2}, "group_idx", 1), side(1, 4, "mamba", nil)}, "", 2},
		"a removal of an unknown group": {list{full, blockRemoved(list{2}, "group_idx", 3)}, "group=1", 2},
	} {
		e, x := engines.NewEngine(engines.EngineOptions{BlockSize: 4}), indexer.New(indexer.Config{})
		batch, err := engines.DecodeBatch(encode(nil, list{1755000000.5, c.events, 0}))
		if err != nil {
			t.Fatal(name, err)
		}
		evs, drops := e.Apply(&batch)
		for _, ev := range evs {
			x.Apply(0, ev.Event)
		}
		m := indexer.Matches{Device: make([]int32, 1), Tokens: 9}
		if x.FindMatches(&m, hashes); m.Device[0] != c.want || dropped(drops) != c.drops {
			t.Errorf("%s: %d blocks, dropped %q; want %d, %q", name, m.Device[0], dropped(drops), c.want, c.drops)
		}
	}
	// More groups than any engine has: the index has no rule for them.
	e, x := engines.NewEngine(engines.EngineOptions{BlockSize: 4}), indexer.New(indexer.Config{})
	for group := range 256 {
		evs := list{full}
		if group > 0 {
			evs = append(evs, side(group, 4, "mamba", nil))
		}
		batch, err := engines.DecodeBatch(encode(nil, list{1755000000.5, evs, 0}))
		if err != nil {
			t.Fatal(err)
		}
		out, _ := e.Apply(&batch)
		for _, ev := range out {
			x.Apply(0, ev.Event)
		}
	}
	m := indexer.Matches{Device: make([]int32, 1), Tokens: 9}
	if x.FindMatches(&m, hashes); m.Device[0] != 0 || x.SideBlocks(0) > 1 {
		t.Errorf("255 side groups: %d blocks of %d, want 0", m.Device[0], x.SideBlocks(0))
	}
}

// A rank whose groups change again and again: 32 changes are followed. Then no prompt counts as cached until the engine
// restarts, whatever its events say, and the changes are counted.
func TestGroupsThatChangeAgainAndAgain(t *testing.T) {
	full := blockStored(list{1, 2}, nil, seq(0, 8), 4, "group_idx", 0, "kv_cache_spec_kind", "full_attention")
	second := blockStored(list{1, 2}, nil, seq(0, 8), 4, "group_idx", 1, "kv_cache_spec_kind", "full_attention")
	side := func(group, size int, kind string, window any) fields {
		return blockStored(list{2}, nil, seq(0, 8), size, "group_idx", group, "kv_cache_spec_kind", kind, "kv_cache_spec_sliding_window", window)
	}
	state := side(1, 4, "mamba", nil)
	for name, c := range map[string]struct {
		again  func(n int) list // makes two changes at least
		shapes int              // the most shapes that the index gets
		want   int32            // while the changes are followed
	}{
		"kinds": {func(int) list { return list{side(1, 4, "sliding_window", 4), state, full} }, 36, 2},
		"windows": {func(n int) list {
			return list{side(1, 4, "sliding_window", 1000+n), side(1, 4, "sliding_window", 4), full}
		}, 36, 2},
		"a window that grows": {func(n int) list {
			return list{full, side(1, 4, "sliding_window", 9+2*n), side(1, 4, "sliding_window", 10+2*n)}
		}, 36, 0},
		"sizes":                   {func(n int) list { return list{full, side(1, 8+8*n, "mamba", nil), side(1, 12+8*n, "mamba", nil)} }, 36, 0},
		"full attention":          {func(int) list { return list{full, state, second} }, 1000, 2},
		"a group that is full":    {func(int) list { return list{full, side(2, 4, "mamba", nil), side(0, 4, "mamba", nil), full} }, 1000, 2},
		"sizes of full attention": {func(n int) list { return list{sized(8 * (n + 1)), sized(8*n + 12)} }, 36, 0},
		"a group of no named blocks": {func(int) list {
			return list{full, blockStored(list{}, nil, list{}, 4, "group_idx", 1, "kv_cache_spec_kind", "mamba"), side(1, 4, "sliding_window", 4)}
		}, 36, 2},
	} {
		e, x := engines.NewEngine(engines.EngineOptions{BlockSize: 4}), indexer.New(indexer.Config{})
		shapes, kinds := 0, 0
		apply := func(evs list) int32 {
			batch, err := engines.DecodeBatch(encode(nil, list{1755000000.5, evs, 0}))
			if err != nil {
				t.Fatal(name, err)
			}
			out, drops := e.Apply(&batch)
			for _, ev := range out {
				if x.Apply(0, ev.Event); ev.Event.Kind == indexer.Shaped {
					shapes++
				}
			}
			kinds += drops[engines.DropGroupKind]
			m := indexer.Matches{Device: make([]int32, 1), Tokens: 9}
			x.FindMatches(&m, locals(seq(0, 8), 4, indexer.Seed("", "")))
			return m.Device[0]
		}
		for n := range 100 {
			if hit := apply(c.again(n)); n < 5 && hit != c.want || n > 32 && hit != 0 {
				t.Errorf("%s: %d blocks after %d rounds", name, hit, n+1)
			}
		}
		if shapes > c.shapes || kinds == 0 {
			t.Errorf("%s: %d shapes, %d counted; want at most %d, and some", name, shapes, kinds, c.shapes)
		}
		for _, evs := range []list{{full}, {cleared, full, second}, {full, state}} {
			if hit := apply(evs); hit != 0 {
				t.Errorf("%s: %d blocks in the end, want 0", name, hit)
			}
		}
		x.Apply(0, e.Clear(0).Event)
		if hit := apply(list{full, state}); hit != 2 {
			t.Errorf("%s: %d blocks after a restart, want 2", name, hit)
		}
	}
}

// sized is an event of full attention with one block of so many tokens.
func sized(tokens int) fields {
	return blockStored(list{1000 + tokens}, nil, seq(0, tokens), tokens, "group_idx", 0, "kv_cache_spec_kind", "full_attention")
}

// A plain worker whose blocks are larger than those of the index: on each tier hits end with one of its blocks. Its
// block size is that of blocks on the device that are indexed.
func TestTiersOfLargerBlocks(t *testing.T) {
	stored := func(tier indexer.Tier, from, size int, hashes ...uint64) engines.EngineEvent {
		ev := engines.EngineEvent{
			Kind: engines.EngineStored, Tier: tier, Spec: "full_attention", BlockSize: size, Hashes: hashes, Usable: len(hashes),
			Tokens: seq(from, size*len(hashes)),
		}
		if ev.HasParent = from > 0; ev.HasParent {
			ev.Parent = uint64(from)
		}
		return ev
	}
	lost := stored(indexer.Device, 99, 16, 99) // its parent is unknown
	cut := stored(indexer.Device, 0, 32, 32)
	cut.Tokens = cut.Tokens[:16]
	named := stored(indexer.Device, 0, 32, 32)
	named.LoRA, named.HasLoRAID = "", true
	keyed := stored(indexer.Device, 0, 32, 32)
	keyed.Usable = 0
	odd := stored(indexer.Device, 0, 30, 30)
	for name, c := range map[string]struct {
		events []engines.EngineEvent
		want   [4]int32 // blocks of 4 tokens on each tier, of a prompt of 38 tokens
	}{
		"the device":                 {[]engines.EngineEvent{stored(0, 0, 16, 16, 32, 48)}, [4]int32{8}},
		"host memory":                {[]engines.EngineEvent{stored(0, 0, 16, 16), stored(1, 16, 16, 32, 48)}, [4]int32{4, 4}},
		"the disk":                   {[]engines.EngineEvent{stored(0, 0, 8, 8), stored(1, 8, 8, 16), stored(2, 16, 8, 24, 32, 40)}, [4]int32{2, 2, 4}},
		"another tier":               {[]engines.EngineEvent{stored(0, 0, 16, 16), stored(3, 16, 16, 32, 48)}, [4]int32{4, 0, 0, 4}},
		"larger ones in host memory": {[]engines.EngineEvent{stored(0, 0, 4, 4, 8, 12, 16, 20), stored(1, 20, 16, 36)}, [4]int32{5, 4}},
		"without a known parent":     {[]engines.EngineEvent{lost, stored(0, 0, 4, 4, 8, 12)}, [4]int32{3}},
		"too few tokens":             {[]engines.EngineEvent{cut, stored(0, 0, 4, 4, 8, 12)}, [4]int32{3}},
		"an adapter without a name":  {[]engines.EngineEvent{named, stored(0, 0, 4, 4, 8, 12)}, [4]int32{3}},
		"unknown keys":               {[]engines.EngineEvent{keyed, stored(0, 0, 4, 4, 8, 12)}, [4]int32{3}},
		"no multiple":                {[]engines.EngineEvent{odd, stored(0, 0, 4, 4, 8, 12)}, [4]int32{3}},
		"no blocks":                  {[]engines.EngineEvent{stored(0, 0, 64), stored(0, 0, 4, 4, 8, 12)}, [4]int32{3}},
	} {
		e, x := engines.NewEngine(engines.EngineOptions{BlockSize: 4}), indexer.New(indexer.Config{})
		evs, _ := e.Apply(&engines.EngineBatch{Events: c.events})
		for _, ev := range evs {
			x.Apply(0, ev.Event)
		}
		m := indexer.Matches{Device: make([]int32, 1), Tokens: 38}
		for t := range m.Lower {
			m.Lower[t] = make([]int32, 1)
		}
		x.FindMatches(&m, locals(seq(0, 38), 4, indexer.Seed("", "")))
		if got := [4]int32{m.Device[0], m.Lower[0][0], m.Lower[1][0], m.Lower[2][0]}; got != c.want {
			t.Errorf("%s: %d blocks by tier, want %d", name, got, c.want)
		}
	}
}

// With an offloading tier vLLM publishes blocks of full attention in host memory, and placeholders for side groups. Only
// what all groups have on the device counts.
func TestHybridBlocksInHostMemory(t *testing.T) {
	full := func(hashes list, parent any, from int, medium string) fields {
		return blockStored(hashes, parent, seq(from, 4*len(hashes)), 4, "group_idx", 0, "kv_cache_spec_kind", "full_attention", "medium", medium)
	}
	side := blockStored(list{2}, nil, seq(0, 8), 4, "group_idx", 1, "kv_cache_spec_kind", "mamba", "medium", "GPU")
	placeholder := blockStored(list{3}, nil, list{}, 0, "group_idx", 1, "kv_cache_spec_kind", "mamba", "medium", "CPU")
	e, x := engines.NewEngine(engines.EngineOptions{BlockSize: 4}), indexer.New(indexer.Config{})
	for i, c := range []struct {
		events list
		drops  string
		want   int32
	}{
		{list{full(list{1, 2}, nil, 0, "GPU"), side}, "", 2},
		{list{full(list{3}, 2, 8, "CPU"), placeholder}, "group=1", 2},
		{list{blockRemoved(list{3}, "group_idx", 1, "medium", "CPU")}, "", 2},
		{list{full(list{2}, 1, 4, "CPU"), blockRemoved(list{2}, "group_idx", 1, "medium", "GPU")}, "", 0},
	} {
		batch, err := engines.DecodeBatch(encode(nil, list{1755000000.5, c.events, 0}))
		if err != nil {
			t.Fatal(err)
		}
		evs, drops := e.Apply(&batch)
		for _, ev := range evs {
			x.Apply(0, ev.Event)
		}
		m := indexer.Matches{Device: make([]int32, 1), Tokens: 13}
		m.Lower[0] = make([]int32, 1)
		x.FindMatches(&m, indexer.AppendLocalHashes(nil, seq(0, 12), 4, indexer.Seed("", "")))
		if m.Device[0] != c.want || m.Lower[0][0] != 0 || dropped(drops) != c.drops {
			t.Errorf("batch %d: %d blocks, %d in host memory, dropped %q; want %d, 0, %q", i, m.Device[0], m.Lower[0][0], dropped(drops), c.want, c.drops)
		}
	}
}

// Blocks that vLLM offloads are announced without the kind of their group, unless self_describing_kv_events is set; some
// connectors name tokens, too. The group keeps the kind that the device has named: neither does a side group become one
// of full attention, nor are removals of full attention ignored. A new process may have other groups.
func TestGroupsKeepTheirKind(t *testing.T) {
	for _, full := range []int{0, 1, 5} {
		side := map[bool]int{true: 1, false: 0}[full == 0]
		kinds := map[int]fields{
			full: {"kv_cache_spec_kind", "full_attention"}, side: {"kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", 5},
		}
		stored := func(group int, tokens any, size int, further ...any) fields {
			return blockStored(list{1, 2, 3}, nil, tokens, size, append(further, "group_idx", group)...)
		}
		w := newHybridWorker(t, 4)
		prompt := hex.EncodeToString(bytesOf(seq(0, 13)))
		step := func(want int, evs ...any) {
			t.Helper()
			w.apply([]string{hex.EncodeToString(encode(nil, list{1755000000.5, append(list{}, evs...), 0}))})
			if got := w.promised(prompt, ""); got != want {
				t.Errorf("full group %d: %d tokens, want %d", full, got, want)
			}
		}
		device := list{stored(full, seq(0, 12), 4, kinds[full]...), stored(side, seq(0, 12), 4, kinds[side]...)}
		step(12, device...)
		for range 40 { // more often than changes are followed
			for _, group := range []int{full, side} {
				step(12, stored(group, list{}, 0, "medium", "CPU"))
				step(12, stored(group, seq(0, 12), 4, "medium", "CPU"))
				step(12, blockRemoved(list{1, 2, 3}, "medium", "CPU", "group_idx", group))
			}
			step(12, device...)
		}
		step(12, stored(full, list{}, 0, "medium", "CPU"))
		for n := range 41 { // as many copies
			step(map[bool]int{false: 12, true: 4}[n == 40], blockRemoved(list{2, 3}, "group_idx", full))
		}
		w.engine.Clear(0)
		w.index.Apply(0, indexer.Event{Kind: indexer.Cleared})
		step(0, stored(0, seq(0, 12), 4, "medium", "CPU"))
		if n := w.index.Blocks(); n != 3 {
			t.Errorf("full group %d: %d blocks of a new process in host memory, want 3", full, n)
		}
	}
}

// With set semantics one removal of a side group's block removes all of its copies, also in an index that gets the events
// over the bus, after a restart, and from an answer with all blocks.
func TestSetLikeSideGroups(t *testing.T) {
	full := blockStored(list{1, 2}, nil, seq(0, 8), 4, "group_idx", 0, "kv_cache_spec_kind", "full_attention")
	for name, side := range map[string]fields{
		"equal blocks":   blockStored(list{1, 2}, nil, seq(0, 8), 4, "group_idx", 1, "kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", 6),
		"shorter blocks": blockStored(list{7, 1, 8, 2}, nil, seq(0, 8), 2, "group_idx", 1, "kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", 6),
	} {
		for setLike, want := range map[bool][2]int{false: {8, 4}, true: {4, 4}} {
			w := newHybridWorker(t, 4)
			w.engine = engines.NewEngine(engines.EngineOptions{BlockSize: 4, SetLike: setLike})
			payload := func(evs ...any) []string {
				return []string{hex.EncodeToString(encode(nil, list{1755000000.5, append(list{}, evs...), 0}))}
			}
			prompt := hex.EncodeToString(bytesOf(seq(0, 9)))
			w.apply(payload(full, side, side))
			for i, want := range want {
				w.apply(payload(blockRemoved(list{2}, "group_idx", 1)))
				if got := w.promised(prompt, ""); got != want {
					t.Errorf("%s, set-like %v: %d tokens after %d removals, want %d", name, setLike, got, i+1, want)
				}
				if got := w.restored().promised(prompt, ""); got != want {
					t.Errorf("%s, set-like %v: %d tokens by an answer with all blocks, want %d", name, setLike, got, want)
				}
				w.restart()
				if got := w.promised(prompt, ""); got != want {
					t.Errorf("%s, set-like %v: %d tokens after a restart, want %d", name, setLike, got, want)
				}
			}
			w.apply(payload(side)) // stored again
			if got := w.promised(prompt, ""); got != 8 {
				t.Errorf("%s, set-like %v: %d tokens after a new store, want 8", name, setLike, got)
			}
		}
	}
}

func bytesOf(tokens []uint32) (b []byte) {
	for _, token := range tokens {
		b = binary.LittleEndian.AppendUint32(b, token)
	}
	return b
}

// A rank of a hybrid model has the same hits after a restart of kvroute as before: windows, states and blocks of other
// sizes, and copies of a block.
func TestHybridRanksComeBack(t *testing.T) {
	tokens := seq(1, 16)
	stored := func(group, size int, kind string, hashes ...uint64) engines.EngineEvent {
		return engines.EngineEvent{
			Kind: engines.EngineStored, Group: group, Spec: kind, Window: 9, BlockSize: size, Tokens: tokens, Hashes: hashes, Usable: len(hashes),
		}
	}
	removed := func(group int, hashes ...uint64) engines.EngineEvent {
		return engines.EngineEvent{Kind: engines.EngineRemoved, Group: group, Hashes: hashes}
	}
	full := stored(0, 4, "full_attention", 14, 18, 112, 116)
	second := stored(1, 4, "full_attention", 14, 18, 112, 116)
	large := stored(0, 8, "full_attention", 18, 116)
	for name, c := range map[string]struct {
		before, after []engines.EngineEvent
		want, then    int32 // blocks of 4 tokens, before and after the restart, and after the events that follow
	}{
		"a window":           {[]engines.EngineEvent{full, stored(1, 4, "sliding_window", 112, 116)}, []engines.EngineEvent{removed(1, 116)}, 4, 0},
		"a state":            {[]engines.EngineEvent{full, stored(1, 4, "mamba", 18)}, []engines.EngineEvent{stored(1, 4, "mamba", 116)}, 2, 4},
		"two groups":         {[]engines.EngineEvent{full, stored(1, 4, "mamba", 18, 116), stored(2, 4, "sliding_window", 14, 18)}, []engines.EngineEvent{stored(2, 4, "sliding_window", 112, 116)}, 2, 4},
		"copies":             {[]engines.EngineEvent{full, stored(1, 4, "mamba", 116), stored(1, 4, "mamba", 116)}, []engines.EngineEvent{removed(1, 116)}, 4, 4},
		"the last copy":      {[]engines.EngineEvent{full, stored(1, 4, "mamba", 116), stored(1, 4, "mamba", 116)}, []engines.EngineEvent{removed(1, 116), removed(1, 116)}, 4, 0},
		"larger full blocks": {[]engines.EngineEvent{large, stored(1, 4, "sliding_window", 14, 18, 112, 116)}, []engines.EngineEvent{removed(1, 112)}, 4, 2},
		"larger states":      {[]engines.EngineEvent{full, stored(1, 8, "mamba", 18)}, []engines.EngineEvent{removed(1, 18)}, 2, 0},
		"two full groups":    {[]engines.EngineEvent{full, second, removed(1, 116)}, []engines.EngineEvent{second}, 3, 4},
		"the other of two":   {[]engines.EngineEvent{full, second, removed(0, 116)}, []engines.EngineEvent{full}, 3, 4},
		"stored again":       {[]engines.EngineEvent{full, second, removed(1, 116), second}, []engines.EngineEvent{removed(0, 116)}, 4, 3},
		"an unknown kind":    {[]engines.EngineEvent{full, stored(1, 4, "another", 116)}, []engines.EngineEvent{stored(2, 4, "mamba", 116)}, 0, 0},
	} {
		e, x := engines.NewEngine(engines.EngineOptions{BlockSize: 4}), indexer.New(indexer.Config{})
		apply := func(batch []engines.EngineEvent) {
			evs, _ := e.Apply(&engines.EngineBatch{Events: batch})
			for _, ev := range evs {
				x.Apply(0, ev.Event)
			}
		}
		hit := func() int32 {
			m := indexer.Matches{Device: make([]int32, 1), Tokens: len(tokens) + 1}
			x.FindMatches(&m, locals(tokens, 4, indexer.Seed("", "")))
			return m.Device[0]
		}
		apply(c.before)
		before := hit()
		var state indexer.State
		var err error
		if e, x, state, err = engines.Restart(e, x); state != indexer.StateOK || err != nil {
			t.Fatal(name, state, err)
		}
		after := hit()
		if apply(c.after); before != c.want || after != c.want || hit() != c.then {
			t.Errorf("%s: hits of %d blocks, of %d after the restart, and then of %d; want %d, %d and %d", name, before, after, hit(), c.want, c.want, c.then)
		}
	}
}
