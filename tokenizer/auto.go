// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// class is a tokenizer class that transformers 5 rebuilds.
type class struct {
	// Normalizer and Pre replace those of the file. "$prefix" stands for add_prefix_space, $scheme for the
	// prepend_scheme of Metaspace.
	Normalizer json.RawMessage   `json:"normalizer"`
	Pre        json.RawMessage   `json:"pre_tokenizer"`
	Unk        bool              // the model gets the unk_token
	Fallback   bool              `json:"byte_fallback"`    // and byte_fallback and fuse_unk
	Prefix     bool              `json:"add_prefix_space"` // if the configuration does not say
	Special    map[string]string // its default special tokens, by attribute
	Models     []string          // the model types that the class is registered for
	Frames4    string            // transformers 4 puts these tokens around a text, unless the configuration says otherwise
	Not4       []string          // special tokens that transformers 4 does not have by default
	Flags4     bool              // in transformers 4 its own special tokens have flags, so they replace earlier tokens of the same text
}

//go:embed classes.json
var classFile []byte

// auto5 holds the classes and model types of transformers 5.19; tools/golden/auto_golden.py compares.
//
//nolint:gochecknoglobals // a table
var auto5 = sync.OnceValue(func() (t struct {
	// Classes holds the classes that are rebuilt. It also holds TokenizersBackend: models registered for
	// it use the file unchanged, whatever class the files name.
	Classes   map[string]class
	Corrected []string // model types whose registered class counts, whatever the files name
	Others    []string // classes that are rebuilt, but not by kvroute
},
) {
	if err := json.Unmarshal(classFile, &t); err != nil {
		panic(err)
	}
	return t
})

// additions are the tokens that a loader adds to those of a tokenizer.json.
type additions struct {
	batches  [][]addedToken
	before23 bool // see registry
}

// auto changes the sections of a tokenizer.json as the loader does. It returns the tokens that
// the loader adds, and the reason if ids may differ from the engine's.
func auto(fsys fs.FS, c Config, file sections) (added additions, doubt string, err error) {
	loader := cmp.Or(c.Loader, Transformers5)
	if loader == TokenizerJSON {
		return additions{}, "", nil
	}
	var model struct {
		Type  string `json:"model_type"`
		Class string `json:"tokenizer_class"`

		Version string `json:"transformers_version"`
	}
	a := autoConfig{fields: sections{}, loader: loader}
	config, err := readConfig(fsys, "config.json", &model)
	name, err2 := readConfig(fsys, "tokenizer_config.json", &a.fields)
	if err = errors.Join(err, err2); err != nil || config == "" && name == "" {
		return additions{}, "", err
	}
	var class string
	_ = json.Unmarshal(a.fields["tokenizer_class"].b, &class) // what is no text names none
	a.named = strings.TrimSuffix(cmp.Or(class, model.Class), "Fast")
	if loader == Transformers5 {
		if !c.unchanged {
			a.class = a.chosen(model.Type)
		}
		doubt = a.rebuild(file, config == "")
		a.fixMistral(file, config != "", model.Version, model.Type)
	} else {
		doubt = a.adapt4(file)
	}
	added.before23 = loader == Transformers4
	if added.batches, err = a.tokens(fsys, file["added_tokens"]); err != nil {
		return additions{}, "", fileError(name, err)
	}
	if a.class != "" {
		delete(file, "added_tokens")
	}
	if a.flag("split_special_tokens") {
		doubt = "tokenizer_config.json: split_special_tokens is not done here"
	}
	return added, doubt, nil
}

// readConfig reads an optional JSON file of a model. It returns the name of the file found, or "".
func readConfig(fsys fs.FS, name string, into any) (found string, err error) {
	b, found, err := readFile(fsys, name)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err == nil {
		if err = json.Unmarshal(b, into); err != nil {
			err = fileError(found, err)
		}
	}
	return found, err
}

// autoConfig is a tokenizer_config.json.
type autoConfig struct {
	fields sections
	loader Loader
	named  string // the class that the files name
	class  string // the class that transformers 5 rebuilds, "" if it uses the file
	doubt  string
	// late holds the texts of added_tokens.json. In transformers 4 the special tokens do not take the
	// flags of these tokens.
	late map[string]bool
}

func (a *autoConfig) flag(key string) bool { return string(a.fields[key].b) == "true" }

// chosen returns the class that AutoTokenizer of transformers 5 uses, if it rebuilds that class.
func (a *autoConfig) chosen(modelType string) string {
	registered := ""
	for name, c := range auto5().Classes {
		if slices.Contains(c.Models, modelType) {
			registered = name
		}
	}
	switch {
	case registered == "TokenizersBackend":
		return ""
	case a.named == "" && modelType == "code_llama": // a type for tokenizers only
		return ""
	case a.named == "", slices.Contains(auto5().Corrected, modelType):
		return registered
	case a.named == "Phi3Tokenizer":
		return "LlamaTokenizer"
	case a.other():
		a.doubt = "tokenizer_config.json: engines build the tokenizer of the class " + a.named +
			" anew, which is not done here"
	case auto5().Classes[a.named].Pre != nil:
		return a.named
	}
	return ""
}

// rules returns the class that is rebuilt, or, for transformers 4, the class that the files name.
func (a *autoConfig) rules() class {
	if a.loader == Transformers4 {
		return auto5().Classes[a.named]
	}
	return auto5().Classes[a.class]
}

func (a *autoConfig) other() bool {
	return slices.Contains(auto5().Others, strings.TrimSuffix(a.named, "Tokenizer"))
}

// rebuild replaces the sections of the file by the sections of the class.
func (a *autoConfig) rebuild(file sections, guessed bool) (doubt string) {
	if r := a.fields["auto_map"]; !r.null() && bytes.Contains(r.b, []byte("AutoTokenizer")) {
		a.class, a.doubt = "", "tokenizer_config.json: auto_map names code of the model's own, which is not run here"
	}
	c, ok := auto5().Classes[a.class]
	if !ok {
		return a.doubt
	}
	prefix, scheme := c.Prefix, "never"
	if p := a.fields["add_prefix_space"]; !p.null() {
		prefix = string(p.b) == "true"
	}
	if prefix {
		if scheme = "first"; a.flag("legacy") && a.class == "LlamaTokenizer" {
			scheme = "always"
		}
	}
	if bytes.Contains(file["pre_tokenizer"].b, []byte(`"ByteLevel"`)) == c.Fallback {
		doubt = fmt.Sprintf("tokenizer_config.json: %s does not fit the vocabulary", a.class)
		a.class = ""
		return doubt
	}
	fill := func(b []byte) section {
		return section{b: []byte(strings.NewReplacer(`"$prefix"`, strconv.FormatBool(prefix), "$scheme", scheme).Replace(string(b)))}
	}
	flags := map[string]any{"type": "BPE", "byte_fallback": c.Fallback, "fuse_unk": c.Fallback}
	if c.Unk {
		if unk, ok := a.token("unk_token"); ok {
			flags["unk_token"] = unk.Content
		}
	}
	b, _ := json.Marshal(flags) // texts and truth values always marshal
	old := sections{"normalizer": file["normalizer"], "pre_tokenizer": file["pre_tokenizer"]}
	file["normalizer"], file["pre_tokenizer"], file["flags"] = fill(c.Normalizer), fill(c.Pre), section{b: b}
	if guessed && (!same(old["normalizer"], file["normalizer"]) || !same(old["pre_tokenizer"], file["pre_tokenizer"])) {
		doubt = fmt.Sprintf("tokenizer_config.json names %s, whose tokens differ from the file's for some kinds of models; config.json, which says the kind, is missing", a.class)
	}
	switch a.class {
	case "GPTNeoXTokenizer":
		delete(file, "post_processor")
	case "CodeLlamaTokenizer":
		bos, _ := a.token("bos_token")
		delete(file, "post_processor")
		file["bos"] = section{b: []byte(bos.Content)}
	}
	return doubt
}

// adapt4 changes what transformers 4 does: the tokens around a text, and add_prefix_space.
func (a *autoConfig) adapt4(file sections) (doubt string) {
	c := a.rules()
	defer func() {
		if a.flag("fix_mistral_regex") {
			doubt = cmp.Or(doubt, "tokenizer_config.json: fix_mistral_regex is not done here for transformers 4")
		}
	}()
	prefix := a.fields["add_prefix_space"]
	switch {
	case a.named == "":
		doubt = "tokenizer_config.json names no tokenizer_class"
	case !prefix.null() && strings.HasSuffix(a.named, "LlamaTokenizer"), a.other():
		doubt = "tokenizer_config.json: engines build the tokenizer anew, which is not done here for transformers 4"
	}
	var pre map[string]any
	if json.Unmarshal(file["pre_tokenizer"].b, &pre) == nil && pre["type"] == "ByteLevel" {
		pre["add_prefix_space"] = string(prefix.b) == "true"
		b, _ := json.Marshal(pre) // it was read from JSON
		file["pre_tokenizer"] = section{b: b}
	} else if a.named == "CohereTokenizer" && string(prefix.b) == "true" { // it also changes the steps of a sequence
		var compact bytes.Buffer
		if json.Compact(&compact, file["pre_tokenizer"].b) != nil {
			return "tokenizer.json has no pre_tokenizer, to which add_prefix_space could apply"
		}
		file["pre_tokenizer"] = section{b: bytes.ReplaceAll(compact.Bytes(), []byte(`"add_prefix_space":false`), []byte(`"add_prefix_space":true`))}
	}
	if c.Frames4 == "" {
		return doubt
	}
	delete(file, "post_processor")
	for _, side := range []string{"bos", "eos"} {
		flag := a.fields["add_"+side+"_token"]
		if t, ok := a.token(side + "_token"); ok && (flag.null() && c.Frames4 == side || string(flag.b) == "true") {
			file[side] = section{b: []byte(t.Content)}
		}
	}
	return doubt
}

// same reports whether two sections mean the same.
func same(a, b section) bool {
	var x, y any
	if a.null() || b.null() {
		return a.null() && b.null()
	}
	if json.Unmarshal(a.b, &x) != nil || json.Unmarshal(b.b, &y) != nil {
		return false
	}
	trim(x)
	trim(y)
	return reflect.DeepEqual(x, y)
}

// trim removes what has no effect on ids.
func trim(x any) {
	switch x := x.(type) {
	case map[string]any:
		delete(x, "trim_offsets")
		for _, v := range x {
			trim(v)
		}
	case []any:
		for _, v := range x {
			trim(v)
		}
	}
}

// autoToken is a token of a configuration: a text, or an object.
type autoToken struct {
	addedToken
	Normalized *bool `json:"normalized"`
}

// readToken reads a token. One that is only a text is special, and special ones are found in the
// text as it is.
func readToken(s section, special bool) (addedToken, bool) {
	t := autoToken{addedToken: addedToken{Special: special}}
	if s.null() {
		return addedToken{}, false
	}
	if json.Unmarshal(s.b, &t.Content) == nil {
		return addedToken{Content: t.Content, Special: true}, true
	}
	if json.Unmarshal(s.b, &t) != nil || t.Content == "" {
		return addedToken{}, false
	}
	t.flags, t.addedToken.Normalized = true, !t.Special
	if t.Normalized != nil {
		t.addedToken.Normalized = *t.Normalized
	}
	return t.addedToken, true
}

// token returns a special token of the configuration, or the class's.
func (a *autoConfig) token(key string) (addedToken, bool) {
	if s, ok := a.fields[key]; ok {
		return readToken(s, false)
	}
	if a.loader == Transformers4 && slices.Contains(a.rules().Not4, key) {
		return addedToken{}, false
	}
	content := a.rules().Special[key]
	return addedToken{Content: content, Special: true}, content != ""
}

// tokens returns the batches of tokens that the loader adds. If the class is rebuilt, they include the
// tokens of the file.
func (a *autoConfig) tokens(fsys fs.FS, inFile section) ([][]addedToken, error) {
	var fromFile []autoToken
	if !inFile.null() {
		if err := inFile.unmarshal(&fromFile); err != nil {
			return nil, fmt.Errorf("added_tokens: %w", err)
		}
	}
	decoder := map[int]addedToken{}
	if s, ok := a.fields["added_tokens_decoder"]; ok {
		var all map[int]json.RawMessage
		if err := s.unmarshal(&all); err != nil {
			return nil, fmt.Errorf("added_tokens_decoder: %w", err)
		}
		for id, b := range all {
			t, ok := readToken(section{b: b}, false)
			if !ok {
				return nil, fmt.Errorf("added_tokens_decoder: id %d", id)
			}
			decoder[id] = t
		}
	} else if err := a.legacy(fsys, decoder, fromFile); err != nil {
		return nil, err
	}
	var add []addedToken
	for _, id := range slices.Sorted(maps.Keys(decoder)) {
		add = append(add, decoder[id])
	}
	known := map[string]addedToken{}
	for _, t := range add {
		known[t.Content] = t
	}
	special := a.special(known)
	if a.class == "" {
		for _, t := range fromFile {
			known[t.Content] = t.addedToken
		}
	}
	seen := map[string]bool{}
	for _, t := range special {
		k, ok := known[t.Content]
		if a.loader == Transformers4 { // of two with one text the first counts, and its flags if it has any
			ok = ok && (!t.flags || k == t) || seen[t.Content]
			seen[t.Content] = true
		}
		if !ok { // else the later
			add = append(add, t)
		}
	}
	switch a.class { // two classes add them once more, one of them without flags
	case "CohereTokenizer":
		return [][]addedToken{add, special}, nil
	case "Qwen2Tokenizer":
		for k := range special {
			special[k] = addedToken{Content: special[k].Content}
		}
		return [][]addedToken{add, special}, nil
	}
	return [][]addedToken{add}, nil
}

// special returns the special tokens of the configuration, those that every tokenizer has with
// the flags of known ones.
func (a *autoConfig) special(known map[string]addedToken) (all []addedToken) {
	defaults := a.rules().Special
	for _, key := range chat.SpecialTokens {
		if t, ok := a.token(key); ok {
			_, given := a.fields[key]
			takes := a.loader != Transformers4 || !a.late[t.Content] && (given || !a.rules().Flags4)
			if k, ok := known[t.Content]; ok && takes {
				t = k
			} else if a.loader == Transformers4 && a.rules().Flags4 && slices.Contains(chat.SpecialTokens[:5], key) && key != "sep_token" {
				t.flags = true
			}
			all = append(all, t)
		}
	}
	// Those of the model's own, in the order of the file, and the class's.
	var keys []string
	for key := range a.fields {
		if strings.HasSuffix(key, "_token") && !slices.Contains(chat.SpecialTokens, key) && (a.loader == Transformers5 || defaults[key] != "") {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, a.fields.compare)
	for key := range strings.FieldsSeq("prefix_token middle_token suffix_token eot_token fill_token") {
		if _, ok := a.fields[key]; !ok && defaults[key] != "" {
			keys = append(keys, key)
		}
	}
	add := func(t addedToken, ok bool) {
		if ok {
			all = append(all, t)
		}
	}
	for _, key := range keys {
		add(a.token(key))
	}
	extra, list := a.fields["extra_special_tokens"], a.fields["additional_special_tokens"]
	if a.loader == Transformers5 && !extra.null() && string(extra.b) != "[]" && string(extra.b) != "{}" {
		list = extra
	}
	var texts []json.RawMessage
	if json.Unmarshal(list.b, &texts) == nil {
		for _, b := range texts {
			add(readToken(section{b: b}, true))
		}
	}
	if more, err := extra.sections(); err == nil { // named ones
		for _, key := range slices.SortedFunc(maps.Keys(more), more.compare) {
			add(readToken(more[key], true))
		}
	}
	return all
}

// legacy reads what counts where the configuration has no added_tokens_decoder:
// special_tokens_map.json, added_tokens.json and the tokens of tokenizer.json.
func (a *autoConfig) legacy(fsys fs.FS, decoder map[int]addedToken, fromFile []autoToken) error {
	var more sections
	if _, err := readConfig(fsys, "special_tokens_map.json", &more); err != nil {
		return err
	}
	for key, s := range more {
		var t autoToken
		if json.Unmarshal(s.b, &t) == nil && t.Content != "" {
			t.Special = true         // whatever the file says
			s.b, _ = json.Marshal(t) // it was read from JSON
		}
		a.fields[key] = s
	}
	var ids map[string]int
	if _, err := readConfig(fsys, "added_tokens.json", &ids); err != nil {
		return err
	}
	special := a.special(nil)
	a.late = map[string]bool{}
	for content, id := range ids {
		is := slices.ContainsFunc(special,
			func(t addedToken) bool { return t.Content == content && (a.loader == Transformers5 || !t.flags) })
		decoder[id] = addedToken{Content: content, Normalized: !is, Special: is}
		a.late[content] = true
	}
	for _, t := range fromFile {
		x := t.addedToken
		delete(a.late, t.Content)
		x.ID, x.Normalized = 0, t.Normalized != nil && *t.Normalized
		decoder[int(t.ID)] = x
	}
	return nil
}
