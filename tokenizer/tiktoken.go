// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// published holds the patterns and special tokens of OpenAI's rank files, by file name.
//
//nolint:gochecknoglobals // a table
var published = map[string]Config{
	"cl100k_base.tiktoken": {Pattern: "cl100k", Special: map[string]uint32{
		"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260,
		"<|endofprompt|>": 100276,
	}},
	"o200k_base.tiktoken": {
		Pattern: "o200k", Special: map[string]uint32{"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
	},
}

// loadRanks reads a rank file. Each line has the token's bytes in base64, a space and its rank,
// which is its id. Two neighbours merge if together they are a token; the token of the lowest
// rank is made first.
func loadRanks(fsys fs.FS, c Config) (*Tokenizer, error) {
	var names []string
	for _, glob := range []string{"*.tiktoken", "*.tiktoken.gz", "tiktoken.model"} {
		found, _ := fs.Glob(fsys, glob) // only a bad pattern is an error
		names = append(names, found...)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("tokenizer: no tokenizer.json and no *.tiktoken: %w", fs.ErrNotExist)
	}
	name := strings.TrimSuffix(slices.Min(names), ".gz")
	b, found, err := readFile(fsys, name)
	if err != nil {
		return nil, err
	}
	if c, err = completed(fsys, c, name); err != nil {
		return nil, err
	}
	t, err := parseRanks(b, c)
	if err != nil {
		return nil, fileError(found, err)
	}
	if c.Special == nil && c.reserved == 0 {
		t.Doubt = found + ": no special tokens: no tokenizer_config.json has them, so a text with one is encoded as any other"
	}
	return t, nil
}

// completed returns c with the empty fields set from the file's name and tokenizer_config.json.
func completed(fsys fs.FS, c Config, name string) (Config, error) {
	known := published[name]
	c.Pattern = cmp.Or(c.Pattern, known.Pattern)
	var file struct {
		Added   map[uint32]addedToken `json:"added_tokens_decoder"`
		AutoMap map[string]any        `json:"auto_map"`
	}
	if _, err := readConfig(fsys, "tokenizer_config.json", &file); err != nil {
		return c, err
	}
	module := kimiModule(file.AutoMap["AutoTokenizer"])
	kimi := module != ""
	if kimi {
		c.Pattern = cmp.Or(c.Pattern, "kimi")
		var err error
		if c.tools, err = kimiTools(fsys, module+".py"); err != nil {
			return c, err
		}
	}
	if c.Pattern == "" {
		return c, fileError(name, unsupported("a rank file without a pattern"))
	}
	c.Pattern = cmp.Or(patterns[c.Pattern], c.Pattern)
	if c.Special != nil {
		return c, nil
	}
	c.Special = known.Special
	if kimi {
		c.reserved = kimiReserved
	}
	if len(file.Added) == 0 {
		return c, nil
	}
	c.Special = map[string]uint32{}
	for id, a := range file.Added {
		c.Special[a.Content] = id
	}
	return c, nil
}

// kimiReserved is the number of special tokens that Kimi's class makes after the ranks.
const kimiReserved = 258

// kimiModule returns the name of the module of a class that an auto_map names if the class is Kimi's, whose code contains the
// pattern, else "". Other models have a class of the same name, so the name of the module decides.
func kimiModule(class any) string {
	if list, ok := class.([]any); ok && len(list) > 0 {
		class = list[0]
	}
	name, _ := class.(string)
	if _, behind, ok := strings.Cut(name, "--"); ok { // the repository that has the code
		name = behind
	}
	if module, ok := strings.CutSuffix(name, ".TikTokenTokenizer"); ok && (module == "tokenization_kimi" || module == "tokenization_moonshot") {
		return module
	}
	return ""
}

// toolsCode is what code of the model does with the tools of a chat before the template sees them.
type toolsCode int

const (
	toolsUnchanged toolsCode = iota
	toolsSorted              // all objects in the tools are sorted by their keys
	toolsUnknown             // the code is missing, or does more
)

// kimiTools returns what Kimi's code does with tools. Kimi K2's code sorts them, and later code also writes them as TypeScript.
func kimiTools(fsys fs.FS, file string) (toolsCode, error) {
	code, err := ReadFile(fsys, file)
	has := func(text string) bool { return bytes.Contains(code, []byte(text)) }
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return toolsUnknown, nil
	case err != nil:
		return toolsUnknown, err
	case !has("def apply_chat_template"):
		return toolsUnchanged, nil
	case has("tools = deep_sort_dict(tools)") && !has("typescript"):
		return toolsSorted, nil
	}
	return toolsUnknown, nil
}

func parseRanks(b []byte, c Config) (*Tokenizer, error) {
	v := newVocab(min(bytes.Count(b, []byte{'\n'}), maxIDs))
	token := make([]byte, 0, 256)
	ranks := 0
	n := 0
	for line := range bytes.Lines(b) {
		n++
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		text, rank, ok := bytes.Cut(line, []byte{' '})
		id, err := strconv.ParseUint(string(rank), 10, 32)
		if !ok || err != nil || id >= maxIDs || len(text) > 1<<16 {
			return nil, fmt.Errorf("line %d: want a token in base64 and a rank below %d", n, maxIDs)
		}
		if token, err = base64.StdEncoding.AppendDecode(token[:0], text); err != nil || len(token) == 0 {
			return nil, fmt.Errorf("line %d: token in base64: %w", n, err)
		}
		v.put(token, uint32(id), true)
		ranks++
	}
	if len(v.token) == 0 {
		return nil, errors.New("no tokens")
	}
	c.Special = withReserved(c, ranks)
	t := &Tokenizer{
		special: c.Special, byteLevel: true, tools: c.tools, chops: c.reserved > 0,
		bpe: bpe{vocab: v, whole: true, unk: noID},
	}
	t.mergesOfRanks()
	var err error
	if t.steps, err = patternSteps(c.Pattern); err != nil {
		return nil, unsupported("%w", err)
	}
	var special []added
	for _, content := range slices.Sorted(maps.Keys(c.Special)) {
		id := c.Special[content]
		if content == "" || id >= maxIDs {
			return nil, fmt.Errorf("special token %q with id %d", content, id)
		}
		special = append(special, added{id: id, content: []byte(content)})
		if v.get(id) == "" {
			v.put([]byte(content), id, false)
		}
	}
	t.raw = newFinder(special)
	t.plan()
	return t, nil
}

// withReserved returns the special tokens of c and the reserved tokens, whose ids begin with first.
func withReserved(c Config, first int) map[string]uint32 {
	all, named := map[string]uint32{}, map[uint32]bool{}
	for content, id := range c.Special {
		all[content], named[id] = id, true
	}
	for id := first; id < first+c.reserved; id++ {
		if !named[uint32(id)] {
			all[fmt.Sprintf("<|reserved_token_%d|>", id)] = uint32(id)
		}
	}
	return all
}

// patternSteps returns the step that splits text by the expression of a rank file.
func patternSteps(pattern string) ([]splitter, error) {
	if r := scanners[pattern]; r.scan != nil {
		return []splitter{r.splitter()}, nil
	}
	re, err := compile(pattern)
	if err != nil {
		return nil, err
	}
	// Text that no alternative matches is not part of the result.
	return []splitter{{regex: re, behavior: "Removed", invert: true}}, nil
}

// mergesOfRanks makes a merge for each way to cut a token into two tokens.
func (b *bpe) mergesOfRanks() {
	var all []mergeSlot
	for id, text := range b.vocab.token {
		token := []byte(text)
		for k := 1; k < len(token); k++ {
			left, right := b.vocab.id(token[:k]), b.vocab.id(token[k:])
			if left != noID && right != noID {
				all = append(all, mergeOf(left, right, uint64(id), uint32(id)))
			}
		}
	}
	b.merges = newMerges(all)
	b.prepareBytes()
}
