// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Loader is the library with which an engine reads a model's files.
type Loader string

// The loaders.
const (
	// Transformers5 is AutoTokenizer of transformers 5, which vLLM and SGLang use. It builds the
	// tokenizers of some classes anew from the vocabulary and the merges.
	Transformers5 Loader = "transformers5"
	// Transformers4 is the loader of transformers 4, which TensorRT-LLM uses.
	Transformers4 Loader = "transformers4"
	// TokenizerJSON takes tokenizer.json as it stands.
	TokenizerJSON Loader = "tokenizer.json"
)

// class is a tokenizer class that transformers 5 rebuilds: the sections that replace those of
// tokenizer.json, and its default special tokens. %[1]s is add_prefix_space, %[2]s Metaspace's scheme.
type class struct {
	normalizer, pre string
	unk             bool              // the model gets the unk_token
	fallback        bool              // and byte_fallback and fuse_unk
	special         map[string]string // by attribute
	prefix          bool              // add_prefix_space if the configuration does not say
	models          string            // the model types that the class is registered for
	frames4         string            // transformers 4 puts these tokens around a text, unless the configuration says otherwise
	not4            string            // special tokens that transformers 4 does not have by default
}

// The sections that several classes have.
const (
	preBytes     = `{"type":"ByteLevel","add_prefix_space":%[1]s,"use_regex":true}`
	preMetaspace = `{"type":"Metaspace","replacement":"▁","prepend_scheme":"%[2]s","split":false}`
	preSplit     = `{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"(?i:'s|'t|'re|'ve|'m|'ll|'d)|%s|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},"behavior":"Isolated","invert":false},` +
		`{"type":"ByteLevel","add_prefix_space":%%[1]s,"use_regex":false}]}`
	normNFC = `{"type":"NFC"}`
)

// classes5 are the classes that transformers 5.19 rebuilds; tools/golden/auto_golden.py compares.
//
//nolint:gochecknoglobals // a table
var classes5 = map[string]class{
	"LlamaTokenizer": {
		pre: preMetaspace, fallback: true, prefix: true, models: "idefics idefics2", frames4: "bos",
		special: map[string]string{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
	},
	"CodeLlamaTokenizer": {
		pre: preMetaspace, fallback: true, unk: true, prefix: true, models: "code_llama", frames4: "bos",
		special: map[string]string{
			"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>", "fill_token": "<FILL_ME>",
		},
	},
	"GemmaTokenizer": {
		normalizer: `{"type":"Replace","pattern":{"String":" "},"content":"▁"}`, pre: `{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false}`,
		fallback: true, unk: true, models: "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma zaya",
		frames4: "bos", not4: "mask_token", special: map[string]string{"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
	},
	"Qwen2Tokenizer": {
		normalizer: normNFC, pre: fmt.Sprintf(preSplit, `[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*`), special: endOfText("eos_token", "unk_token", "pad_token"),
		models: "audioflamingo3 colqwen2 cosmos3_omni fun_asr_nano hunyuan_vl internvl lighton_ocr ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe " +
			"qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
	},
	"Qwen3_5Tokenizer": {
		normalizer: normNFC, pre: fmt.Sprintf(preSplit, `[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*`), special: endOfText("eos_token", "unk_token", "pad_token"),
		models: "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
	},
	"GPT2Tokenizer": {
		pre: preBytes, special: endOfText("bos_token", "eos_token", "unk_token"),
		models: "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt phi starcoder2",
	},
	"GPTNeoXTokenizer": {
		normalizer: normNFC, pre: preBytes, models: "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm", frames4: "none", not4: "pad_token",
		special: map[string]string{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|padding|>"},
	},
	"CohereTokenizer": {
		normalizer: normNFC, pre: `{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},` + preBytes + `]}`, models: "aya_vision cohere cohere2", frames4: "bos",
		not4: "pad_token cls_token sep_token mask_token",
		special: map[string]string{
			"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>", "pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>",
		},
	},
	// Those of these models are as in the file, whatever class it names.
	"TokenizersBackend": {
		models: "EvollaModel aria bigbird_pegasus canary flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared " +
			"kimi_k25 kimi_linear kosmos-2 mimo_v2_flash minicpmv4_6 minicpmv4_7 ministral ministral3 mistral mistral3 mixtral nystromformer olmo2 olmo3 olmo_hybrid pegasus_x persimmon pix2struct pixtral " +
			"stablelm umt5 voxtral voxtral_realtime xlm-roberta-xl deepseek_v2 deepseek_ocr2 arctic deepseek_vl_v2 nemotron minimax_m2 chameleon step3p5 janus minicpm3 deepseek_vl_hybrid openvla phimoe molmo " +
			"fuyu camembertv2-base opencua deepseek_ocr deepseek_v4 modernbert-decoder phi3 jamba nvfp4 internlm2 hyperclovax_vlm llava paddleocr_vl chatlm modernbert ernie4_5_moe vipllava ernie4_5 minicpmv " +
			"step3_vl deepseek_v32 h2ovl_chat deepseek_vl llava_next phi3_v cohere_asr molmo2 smolvlm hyperclovax deepseek_v3",
	},
}

// corrected are the model types whose registered class counts, whatever the files name; others are
// the classes that transformers 5 rebuilds but kvroute does not.
const (
	corrected = "qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp hyperclovax_vision_v2"
	others    = "Bart Blenderbot CLIP CodeGen Deberta Esmc Herbert LED Nllb Nougat OpenAIGPT Reformer Roberta Siglip2 Whisper"
)

func endOfText(attributes ...string) map[string]string {
	m := map[string]string{}
	for _, a := range attributes {
		m[a] = "<|endoftext|>"
	}
	return m
}

func contains(list, word string) bool { return slices.Contains(strings.Fields(list), word) }

// auto changes the sections of a tokenizer.json to what the loader makes of them, and returns the
// tokens that it adds, in batches, and what it leaves open.
func auto(fsys fs.FS, loader Loader, file map[string]section) (added [][]addedToken, doubt string, err error) {
	if loader == TokenizerJSON {
		return nil, "", nil
	}
	var model struct {
		Type  string `json:"model_type"`
		Class string `json:"tokenizer_class"`
	}
	b, config, err := readOptional(fsys, "config.json")
	if err == nil && b != nil {
		if err = json.Unmarshal(b, &model); err != nil {
			return nil, "", fmt.Errorf("tokenizer: %s: %w", config, err)
		}
	}
	b, name, err2 := readOptional(fsys, "tokenizer_config.json")
	if err = errors.Join(err, err2); err != nil || config == "" && name == "" {
		return nil, "", err
	}
	a := autoConfig{fields: map[string]section{}, loader: loader}
	if b != nil {
		if a.fields, err = (section{b, 0}).sections(); err != nil {
			return nil, "", fmt.Errorf("tokenizer: %s: %w", name, err)
		}
	}
	a.named = strings.TrimSuffix(cmp.Or(a.text("tokenizer_class"), model.Class), "Fast")
	if loader == Transformers5 {
		a.class = a.chosen(model.Type)
		doubt, err = a.rebuild(file, config == "")
	} else {
		doubt, err = a.adapt4(file)
	}
	if err != nil {
		return nil, "", fmt.Errorf("tokenizer: %s: %w", name, err)
	}
	if added, err = a.tokens(fsys, file["added_tokens"]); err != nil {
		return nil, "", fmt.Errorf("tokenizer: %s: %w", name, err)
	}
	if a.class != "" {
		delete(file, "added_tokens")
	}
	if a.flag("split_special_tokens") {
		doubt = "tokenizer_config.json: split_special_tokens is not done here"
	}
	return added, doubt, nil
}

func readOptional(fsys fs.FS, name string) ([]byte, string, error) {
	b, found, err := readFile(fsys, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil
	}
	return b, found, err
}

// autoConfig is a tokenizer_config.json.
type autoConfig struct {
	fields map[string]section
	loader Loader
	named  string // the class that the files name
	class  string // the class that transformers 5 rebuilds, "" if it uses the file
	doubt  string
}

func (a *autoConfig) text(key string) (s string) {
	if json.Unmarshal(a.fields[key].b, &s) != nil {
		return ""
	}
	return s
}

func (a *autoConfig) flag(key string) bool { return string(a.fields[key].b) == "true" }

// chosen returns the class that AutoTokenizer of transformers 5 uses, if it rebuilds that class.
func (a *autoConfig) chosen(modelType string) string {
	named := a.named
	registered := ""
	for name, c := range classes5 {
		if contains(c.models, modelType) {
			registered = name
		}
	}
	switch {
	case registered == "TokenizersBackend":
		return ""
	case named == "" && modelType == "code_llama": // a type for tokenizers only
		return ""
	case named == "", contains(corrected, modelType):
		return registered
	case named == "Phi3Tokenizer":
		return "LlamaTokenizer"
	case contains(others, strings.TrimSuffix(named, "Tokenizer")):
		a.doubt = "tokenizer_config.json: engines build the tokenizer of the class " + named + " anew, which is not done here"
	case classes5[named].pre != "":
		return named
	}
	return ""
}

// rebuild replaces the sections of the file by the sections of the class.
func (a *autoConfig) rebuild(file map[string]section, guessed bool) (doubt string, err error) {
	if r := a.fields["auto_map"]; !r.null() && bytes.Contains(r.b, []byte("AutoTokenizer")) {
		a.class, a.doubt = "", "tokenizer_config.json: auto_map names code of the model's own, which is not run here"
	}
	c, ok := classes5[a.class]
	if !ok {
		return a.doubt, nil
	}
	prefix, scheme := c.prefix, "never"
	if p := a.fields["add_prefix_space"]; !p.null() {
		prefix = string(p.b) == "true"
	}
	if prefix {
		if scheme = "first"; a.flag("legacy") && a.class == "LlamaTokenizer" {
			scheme = "always"
		}
	}
	if bytes.Contains(file["pre_tokenizer"].b, []byte(`"ByteLevel"`)) == c.fallback {
		doubt = fmt.Sprintf("tokenizer_config.json: %s does not fit the vocabulary", a.class)
		a.class = ""
		return doubt, nil
	}
	fill := func(s string) section {
		if s == "" {
			s = "null"
		}
		return section{b: []byte(strings.NewReplacer("%[1]s", strconv.FormatBool(prefix), "%[2]s", scheme).Replace(s))}
	}
	flags := map[string]any{"type": "BPE", "byte_fallback": c.fallback, "fuse_unk": c.fallback}
	if c.unk {
		if unk, ok := a.token("unk_token", c.special); ok {
			flags["unk_token"] = unk.Content
		}
	}
	b, err := json.Marshal(flags)
	if err != nil {
		return "", err
	}
	old := map[string]section{"normalizer": file["normalizer"], "pre_tokenizer": file["pre_tokenizer"]}
	file["normalizer"], file["pre_tokenizer"], file["flags"] = fill(c.normalizer), fill(c.pre), section{b: b}
	if guessed && (!same(old["normalizer"], file["normalizer"]) || !same(old["pre_tokenizer"], file["pre_tokenizer"])) {
		doubt = fmt.Sprintf("tokenizer_config.json names %s, whose tokens differ from the file's for some kinds of models; config.json, which says the kind, is missing", a.class)
	}
	switch a.class {
	case "GPTNeoXTokenizer":
		delete(file, "post_processor")
	case "CodeLlamaTokenizer":
		bos, _ := a.token("bos_token", c.special)
		delete(file, "post_processor")
		file["bos"] = section{b: []byte(bos.Content)}
	}
	return doubt, nil
}

// adapt4 changes what transformers 4 does: the tokens around a text, and add_prefix_space.
func (a *autoConfig) adapt4(file map[string]section) (doubt string, err error) {
	c := classes5[a.named]
	prefix := a.fields["add_prefix_space"]
	switch {
	case a.named == "":
		doubt = "tokenizer_config.json names no tokenizer_class"
	case !prefix.null() && strings.HasSuffix(a.named, "LlamaTokenizer"), contains(others, strings.TrimSuffix(a.named, "Tokenizer")):
		doubt = "tokenizer_config.json: engines build the tokenizer anew, which is not done here for transformers 4"
	}
	var pre map[string]any
	if json.Unmarshal(file["pre_tokenizer"].b, &pre) == nil && pre["type"] == "ByteLevel" {
		pre["add_prefix_space"] = string(prefix.b) == "true"
		b, err := json.Marshal(pre)
		if err != nil {
			return "", err
		}
		file["pre_tokenizer"] = section{b: b}
	}
	if c.frames4 == "" {
		return doubt, nil
	}
	delete(file, "post_processor")
	for _, side := range []string{"bos", "eos"} {
		flag := a.fields["add_"+side+"_token"]
		if t, ok := a.token(side+"_token", c.special); ok && (flag.null() && c.frames4 == side || string(flag.b) == "true") {
			file[side] = section{b: []byte(t.Content)}
		}
	}
	return doubt, nil
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
	Special    bool  `json:"special"`
}

// readToken reads a token. One that is only a text is special, and special ones are found in the
// text as it is.
func readToken(s section, special bool) (addedToken, bool) {
	t := autoToken{Special: special}
	if s.null() {
		return addedToken{}, false
	}
	if json.Unmarshal(s.b, &t.Content) == nil {
		return addedToken{Content: t.Content}, true
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

// attributes are the special tokens that every tokenizer has, in the order in which they are added.
//
//nolint:gochecknoglobals // a table
var attributes = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// named returns a special token of the configuration, or the class's.
func (a *autoConfig) token(key string, defaults map[string]string) (addedToken, bool) {
	if s, ok := a.fields[key]; ok {
		return readToken(s, false)
	}
	if a.loader == Transformers4 && contains(classes5[a.named].not4, key) {
		return addedToken{}, false
	}
	return addedToken{Content: defaults[key]}, defaults[key] != ""
}

// tokens returns the tokens that the loader adds. Those of the file are added anew for a class that
// is built anew.
func (a *autoConfig) tokens(fsys fs.FS, inFile section) ([][]addedToken, error) {
	var fromFile []autoToken
	if !inFile.null() {
		if err := inFile.unmarshal(&fromFile); err != nil {
			return nil, fmt.Errorf("added_tokens: %w", err)
		}
	}
	decoder := map[int]addedToken{}
	if s, ok := a.fields["added_tokens_decoder"]; ok {
		var all map[string]json.RawMessage
		if err := s.unmarshal(&all); err != nil {
			return nil, fmt.Errorf("added_tokens_decoder: %w", err)
		}
		for id, b := range all {
			n, err := strconv.Atoi(id)
			t, ok := readToken(section{b: b}, false)
			if err != nil || !ok {
				return nil, fmt.Errorf("added_tokens_decoder: id %q", id)
			}
			decoder[n] = t
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
	defaults := classes5[a.class].special
	if a.loader == Transformers4 {
		defaults = classes5[a.named].special
	}
	for _, key := range attributes {
		if t, ok := a.token(key, defaults); ok {
			if k, ok := known[t.Content]; ok {
				t = k
			}
			all = append(all, t)
		}
	}
	// Those of the model's own, in the order of the file, and the class's.
	var keys []string
	for key := range a.fields {
		if strings.HasSuffix(key, "_token") && !slices.Contains(attributes, key) && (a.loader == Transformers5 || defaults[key] != "") {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(x, y string) int { return a.fields[x].base - a.fields[y].base })
	for _, key := range []string{"prefix_token", "middle_token", "suffix_token", "eot_token", "fill_token"} {
		if _, ok := a.fields[key]; !ok && defaults[key] != "" {
			keys = append(keys, key)
		}
	}
	for _, key := range keys {
		if t, ok := a.token(key, defaults); ok {
			all = append(all, t)
		}
	}
	extra, list := a.fields["extra_special_tokens"], a.fields["additional_special_tokens"]
	if a.loader == Transformers5 && !extra.null() && string(extra.b) != "[]" && string(extra.b) != "{}" {
		list = extra
	}
	var texts []json.RawMessage
	if json.Unmarshal(list.b, &texts) == nil {
		for _, b := range texts {
			if t, ok := readToken(section{b: b}, true); ok {
				all = append(all, t)
			}
		}
	}
	if more, err := extra.sections(); err == nil { // named ones
		for _, key := range slices.SortedFunc(maps.Keys(more), func(x, y string) int { return more[x].base - more[y].base }) {
			if t, ok := readToken(more[key], true); ok {
				all = append(all, t)
			}
		}
	}
	return all
}

// legacy reads what counts where the configuration has no added_tokens_decoder:
// special_tokens_map.json, added_tokens.json and the tokens of tokenizer.json.
func (a *autoConfig) legacy(fsys fs.FS, decoder map[int]addedToken, fromFile []autoToken) error {
	b, name, err := readOptional(fsys, "special_tokens_map.json")
	if err != nil {
		return err
	}
	if b != nil {
		more, err := (section{b, 0}).sections()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fields := maps.Clone(a.fields)
		for key, s := range more {
			var t autoToken
			if json.Unmarshal(s.b, &t) == nil && t.Content != "" {
				t.Special = true // whatever the file says
				if s.b, err = json.Marshal(t); err != nil {
					return err
				}
			}
			fields[key] = s
		}
		a.fields = fields
	}
	b, name, err = readOptional(fsys, "added_tokens.json")
	if err != nil {
		return err
	}
	if b != nil {
		var ids map[string]int
		if err := json.Unmarshal(b, &ids); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		special := a.special(nil)
		for content, id := range ids {
			decoder[id] = addedToken{Content: content, Normalized: !slices.ContainsFunc(special, func(t addedToken) bool { return t.Content == content })}
		}
	}
	for _, t := range fromFile {
		x := t.addedToken
		x.ID, x.Normalized = 0, t.Normalized != nil && *t.Normalized
		decoder[int(t.ID)] = x
	}
	return nil
}
