// SPDX-License-Identifier: Apache-2.0

// Conformance compares tokenizer and templates with the reference
// implementations, and their speed, as `make conformance` runs it. It prints a
// table and exits 1 on any difference, or if a target of speed is missed.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

type options struct {
	python, shared, golden, out, commit, work, only, vllm string
	strings, rounds, conversations                        int
	seed                                                  uint64

	documents map[string][]string // real texts by their kind, in parts of documentBytes
}

// The texts that speed is measured on.
const (
	documents     = 240 // of a kind; a round takes 48 of them
	documentBytes = 8 << 10
)

func main() {
	var o options
	shared, err := fixtures.Dir()
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(2)
	}
	flag.StringVar(&o.python, "python", "python3", "a Python that has the packages of tools/golden/requirements.txt")
	flag.StringVar(&o.shared, "shared", shared, "reference data; what is not there is left out, and said")
	flag.StringVar(&o.golden, "golden", "tokenizer/testdata/golden", "the project's own tokenizers")
	flag.StringVar(&o.out, "out", "bench/out", "where the JSON goes")
	flag.StringVar(&o.commit, "commit", "", "recorded in the JSON")
	flag.IntVar(&o.strings, "strings", 20000, "random texts a tokenizer")
	flag.IntVar(&o.conversations, "conversations", 200, "random conversations a template")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds of measuring speed")
	flag.StringVar(&o.vllm, "vllm", "", "compare whole prompts with the render server of this `program`, and nothing else")
	flag.StringVar(&o.only, "only", "", "compare only what has this in its name")
	flag.Uint64Var(&o.seed, "seed", 1, "of the random texts")
	flag.Parse()
	ok, err := run(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(o options) (bool, error) {
	var err error
	if o.work, err = os.MkdirTemp("", "conformance"); err != nil {
		return false, err
	}
	defer func() { _ = os.RemoveAll(o.work) }()
	if o.vllm != "" {
		figures, err := vllm(o)
		if err != nil {
			return false, err
		}
		return bench.Report(os.Stdout, o.out, bench.NewRun("vllm", o.commit, "VLLM=1 make conformance", figures))
	}
	ref, err := start(o.python)
	if err != nil {
		return false, err
	}
	defer ref.stop()
	report := bench.NewRun("conformance", o.commit, "make conformance", nil)
	if report.Compared, err = templates(ref, o); err != nil {
		return false, err
	}
	if report.Figures, err = renderFigures(o); err != nil {
		return false, err
	}
	if err := ref.ask(map[string]any{"op": "documents", "size": documentBytes, "count": documents}, &o.documents); err != nil {
		return false, err
	}
	if strings.Contains("gpt-oss prompts", o.only) {
		more, err := harmony(ref, o)
		if err != nil {
			return false, err
		}
		report.Compared = append(report.Compared, more...)
	}
	own, err := mistralFiles(ref, o)
	if err != nil {
		return false, err
	}
	hugging := candidates(o)
	for _, c := range slices.Concat(hugging, own, withConfigs(hugging)) {
		if !strings.Contains(c.name, o.only) {
			continue
		}
		if err := hold(&report, ref, c, o); err != nil {
			return false, fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return bench.Report(os.Stdout, o.out, report)
}

// hold adds to a report what one tokenizer shows.
func hold(report *bench.Run, ref *reference, c candidate, o options) error {
	path, err := c.unpacked(o.work)
	if err != nil {
		return err
	}
	m, err := tokenizer.LoadModel(os.DirFS(filepath.Dir(path)), tokenizer.ModelConfig{})
	if err != nil {
		return err
	}
	var answer struct{ Error string }
	if err := ref.ask(map[string]any{"op": "load", "path": path, "auto": c.config != ""}, &answer); err != nil {
		return err
	}
	switch doubt := m.Tokenizer().Doubt; {
	case answer.Error != "":
		fmt.Printf("%s: AutoTokenizer does not load it: %s\n", c.name, answer.Error)
		return nil
	case doubt != "":
		fmt.Printf("%s: not compared, it is said to be in doubt: %s\n", c.name, doubt)
		return nil
	}
	compared, err := compare(ref, m.Tokenizer(), c, o)
	if err != nil {
		return err
	}
	report.Compared = append(report.Compared, compared)
	if c.config != "" {
		return nil
	}
	if c.mistral {
		g := chats.Requests{R: rand.New(rand.NewPCG(o.seed, 4)), Strict: true}
		compared, err := prompts(ref, m, g, c.name, map[string]any{"op": "mistral"}, 10*o.conversations)
		if err != nil {
			return err
		}
		report.Compared = append(report.Compared, compared)
	}
	if !c.real {
		return nil
	}
	for _, measure := range []func() ([]bench.Figure, error){
		func() ([]bench.Figure, error) { return speeds(ref, m.Tokenizer(), c, o) },
		func() ([]bench.Figure, error) { return turnFigures(m.Tokenizer(), c, o) },
		func() ([]bench.Figure, error) { return loadFigures(c, path, o) },
	} {
		figures, err := measure()
		if err != nil {
			return err
		}
		report.Figures = append(report.Figures, figures...)
	}
	return nil
}

// candidate is one tokenizer to compare.
type candidate struct {
	name, file string
	real       bool   // a served model's, large enough to measure speed
	mistral    bool   // a file of Mistral's own
	version    string // that it is turned into; empty leaves it
	config     string // a tokenizer_config.json: it is compared with AutoTokenizer
	model      string // the model_type of a config.json; empty writes none
	words      []string
}

// modelTypes maps each model of the reference data to its model type.
//
//nolint:gochecknoglobals // a table
var modelTypes = map[string]string{"gpt-oss": "gpt_oss", "qwen3": "qwen3", "tinyllama": "llama"}

// newTokens are tokens that only a tokenizer_config.json brings.
//
//nolint:gochecknoglobals // a table
var newTokens = []string{"<|new|>", "<|new_tok|>", "neu ", "é<x>"}

// variants are what transformers finds in a tokenizer_config.json beside a tokenizer.json:
// tokens that the latter lacks, and classes that rebuild it.
//
//nolint:gochecknoglobals // a table
var variants = map[string]string{
	"added_tokens_decoder":      `"added_tokens_decoder": {"400000": {"content": "<|new|>", "special": true}, "400001": {"content": "neu ", "lstrip": true, "rstrip": true, "normalized": true}, "400002": {"content": "é<x>", "single_word": true}}`,
	"additional_special_tokens": `"additional_special_tokens": ["<|new_tok|>", "é<x>"]`,
	"extra_special_tokens":      `"extra_special_tokens": {"image_token": "<|new_tok|>"}`,
	"pad_token":                 `"pad_token": "<|new|>"`,
	"bos and eos":               `"add_bos_token": true, "add_eos_token": true, "bos_token": "<s>", "eos_token": "</s>"`,
	"LlamaTokenizer":            `"tokenizer_class": "LlamaTokenizer"`,
	"LlamaTokenizer, legacy":    `"tokenizer_class": "LlamaTokenizer", "legacy": true, "add_prefix_space": true`,
	"GPT2Tokenizer":             `"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true`,
	"Qwen2Tokenizer":            `"tokenizer_class": "Qwen2Tokenizer"`,
}

// withConfigs are candidates to compare with AutoTokenizer: each file with its own
// tokenizer_config.json, and some with each variant that is for their kind of file.
func withConfigs(all []candidate) (out []candidate) {
	for _, c := range all {
		own, err := readMaybeGzip(filepath.Join(filepath.Dir(c.file), "tokenizer_config.json"))
		if err == nil && c.real {
			out = append(out, candidate{name: c.name + " with its own tokenizer_config.json", file: c.file, config: string(own), model: modelTypes[c.name]})
		}
		if !c.real && !slices.Contains([]string{"bytelevel-gpt2", "bytelevel-qwen2-nfc", "metaspace-first", "prepend-replace"}, c.name) {
			continue
		}
		file, _ := readMaybeGzip(c.file) // the comparison of the file itself says what is wrong with it
		byteLevel := bytes.Contains(file, []byte(`"ByteLevel"`))
		for _, v := range slices.Sorted(maps.Keys(variants)) {
			config := variants[v]
			if strings.Contains(config, "Tokenizer") && strings.Contains(config, "Llama") == byteLevel {
				continue
			}
			class, _, ofClass := strings.Cut(v, "Tokenizer")
			if !ofClass {
				config = `"tokenizer_class": "PreTrainedTokenizerFast", ` + config
				class = ""
			}
			out = append(out, candidate{name: c.name + " with " + v, file: c.file, config: "{" + config + "}", model: strings.ToLower(class), words: newTokens})
		}
	}
	return out
}

// mistralFiles are those that the reference has inside, and the project's own.
func mistralFiles(ref *reference, o options) (all []candidate, err error) {
	var answer struct{ Files []string }
	if err := ref.ask(map[string]any{"op": "files"}, &answer); err != nil {
		return nil, err
	}
	for _, f := range answer.Files {
		if name := filepath.Base(f); strings.HasPrefix(name, "tekken") || strings.Contains(name, ".model") {
			all = append(all, candidate{name: name, file: f, mistral: true})
		}
	}
	// The project's own, in every version.
	for _, v := range chat.MistralVersions {
		n, _ := strconv.Atoi(v[1:])
		if n >= 3 {
			all = append(all, candidate{name: "own tekken " + v, file: filepath.Join(o.golden, "../mistral/tekken.json"), mistral: true, version: v})
		}
		if n <= 7 {
			all = append(all, candidate{name: "own tokenizer.model." + v, file: filepath.Join(o.golden, "../mistral/tokenizer.model"), mistral: true, version: v})
		}
	}
	return all, nil
}

// asVersion returns a tekken.json of version v15 as one of another version.
func asVersion(b []byte, version string) ([]byte, error) {
	var file map[string]json.RawMessage
	if err := json.Unmarshal(b, &file); err != nil {
		return nil, err
	}
	file["config"] = bytes.Replace(file["config"], []byte(`"v15"`), []byte(`"`+version+`"`), 1)
	if version != "v15" {
		delete(file, "model_settings_builder")
	}
	return json.Marshal(file)
}

func candidates(o options) (all []candidate) {
	files, _ := filepath.Glob(filepath.Join(o.shared, "tokenizers/*/tokenizer.json*"))
	if len(files) == 0 {
		fmt.Println("no real tokenizers under", o.shared, "- only the project's own are compared, and no speed")
	}
	for _, f := range files {
		all = append(all, candidate{name: filepath.Base(filepath.Dir(f)), file: f, real: true})
	}
	files, _ = filepath.Glob(filepath.Join(o.golden, "*.json"))
	for _, f := range files {
		all = append(all, candidate{name: strings.TrimSuffix(filepath.Base(f), ".json"), file: f})
	}
	return all
}

// unpacked writes the candidate's file where both sides read it.
func (c candidate) unpacked(work string) (path string, err error) {
	name := "tokenizer.json"
	switch {
	case c.mistral && strings.Contains(c.name, "tekken"):
		name = "tekken.json"
	case c.mistral:
		name = strings.TrimPrefix(c.name, "own ")
	}
	path = filepath.Join(work, c.name, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	b, err := readMaybeGzip(c.file)
	if err == nil && c.version != "" && name == "tekken.json" {
		b, err = asVersion(b, c.version)
	}
	if err != nil {
		return "", err
	}
	if c.config != "" {
		if err := os.WriteFile(filepath.Join(filepath.Dir(path), "tokenizer_config.json"), []byte(c.config), 0o644); err != nil {
			return "", err
		}
	}
	if c.model != "" {
		if err := os.WriteFile(filepath.Join(filepath.Dir(path), "config.json"), fmt.Appendf(nil, `{"model_type": %q}`, c.model), 0o644); err != nil {
			return "", err
		}
	}
	return path, os.WriteFile(path, b, 0o644)
}

// text returns a text for comparisons: at random, of tokens, of long runs, or with the
// candidate's own words in it.
func (c candidate) text(r *rand.Rand, tok *tokenizer.Tokenizer) string {
	switch k := r.IntN(10); {
	case k < 3:
		ids := make([]uint32, 1+r.IntN(30))
		for i := range ids {
			ids[i] = uint32(r.IntN(tok.Size()))
		}
		return strings.ToValidUTF8(string(tok.Decode(nil, ids)), "")
	case k < 4:
		return chats.Runs(r)
	case k < 7 && c.words != nil:
		return chats.Random(r) + c.words[r.IntN(len(c.words))] + chats.Random(r)
	}
	return chats.Random(r)
}

// compare encodes random texts on both sides. Of a difference it prints the
// shortest text that it finds.
func compare(ref *reference, tok *tokenizer.Tokenizer, c candidate, o options) (bench.Comparison, error) {
	n := o.strings
	switch {
	case c.config != "":
		n /= 20
	case !c.real:
		n /= 4
	}
	r := rand.New(rand.NewPCG(o.seed, 1))
	var ours, theirs time.Duration
	different := 0
	for done := 0; done < n; {
		texts := make([]string, min(500, n-done))
		for i := range texts {
			texts[i] = c.text(r, tok)
		}
		special := done%1000 == 500
		ids, took, err := ref.encode(texts, special)
		if err != nil {
			return bench.Comparison{}, err
		}
		theirs += took
		for i, text := range texts {
			start := bench.CPUTime()
			got, err := tok.Append(context.Background(), nil, []byte(text), special)
			ours += bench.CPUTime() - start
			if err != nil {
				return bench.Comparison{}, err
			}
			if slices.Equal(got, ids[i]) {
				continue
			}
			if different++; different <= 3 {
				if err := shrink(c.name, ref, tok, text, special); err != nil {
					return bench.Comparison{}, err
				}
			}
		}
		done += len(texts)
	}
	kind := "tokenizer"
	if c.config != "" {
		kind = "AutoTokenizer"
	}
	return bench.NewComparison(kind, c.name, n, different, ours, theirs), nil
}

// shrink prints a short text on which the two sides differ.
func shrink(name string, ref *reference, tok *tokenizer.Tokenizer, text string, special bool) error {
	differs := func(s string) (bool, []uint32, []uint32, error) {
		ids, _, err := ref.encode([]string{s}, special)
		if err != nil {
			return false, nil, nil, err
		}
		got, err := tok.Append(context.Background(), nil, []byte(s), special)
		return !slices.Equal(got, ids[0]), got, ids[0], err
	}
	runes := []rune(text)
	for n := len(runes) / 2; n > 1; n /= 2 { // large parts first: a run may be long
		for i := 0; i+n <= len(runes); {
			less := slices.Delete(slices.Clone(runes), i, i+n)
			d, _, _, err := differs(string(less))
			if err != nil {
				return err
			}
			if d {
				runes = less
			} else {
				i += n
			}
		}
	}
	for again := true; again; {
		again = false
		for i := range runes {
			less := slices.Delete(slices.Clone(runes), i, i+1)
			d, _, _, err := differs(string(less))
			if err != nil {
				return err
			}
			if d {
				runes, again = less, true
				break
			}
		}
	}
	_, got, want, err := differs(string(runes))
	fmt.Printf("%s: different: %q (%+.300q): got %d, want %d\n", name, string(runes), string(runes), got, want)
	return err
}

// speeds measures both sides, and fastokens, on documents of 8 KB in turn.
func speeds(ref *reference, tok *tokenizer.Tokenizer, c candidate, o options) ([]bench.Figure, error) {
	r := rand.New(rand.NewPCG(o.seed, 2))
	var out []bench.Figure
	for _, kind := range []struct {
		name   string
		target float64
	}{{"prose", 10}, {"Python", 10}, {"Go", 10}, {"Chinese words", 6}} {
		parts := o.documents[kind.name]
		var cold, warm, rate, fastCold, fastWarm []float64
		for range o.rounds {
			texts := make([]string, 48)
			size := 0
			for i := range texts {
				if texts[i] = chats.Document(r, chats.CJKWords, "", documentBytes); len(parts) > 0 {
					texts[i] = parts[r.IntN(len(parts))]
				}
				size += len(texts[i])
			}
			var theirs struct {
				Seconds float64
				Fast    *float64
			}
			if err := ref.ask(map[string]any{"op": "time", "texts": texts}, &theirs); err != nil {
				return nil, err
			}
			first, err := timeAll(tok, texts, true)
			if err != nil {
				return nil, err
			}
			again, err := timeAll(tok, texts, false)
			if err != nil {
				return nil, err
			}
			cold = append(cold, theirs.Seconds/first)
			warm = append(warm, theirs.Seconds/again)
			rate = append(rate, float64(size)/1e6/first)
			if theirs.Fast != nil {
				fastCold = append(fastCold, *theirs.Fast/first)
				fastWarm = append(fastWarm, *theirs.Fast/again)
			}
		}
		of := c.name + ", " + kind.name + ": "
		out = append(out,
			figure(of+"cold, times Hugging Face's speed", "×", kind.target, cold),
			figure(of+"warm, times Hugging Face's speed", "×", 20, warm),
			figure(of+"cold rate", "MB/s", 0, rate),
		)
		if fastCold != nil {
			out = append(out, figure(of+"cold, times the speed of fastokens", "×", 0, fastCold), figure(of+"warm, times the speed of fastokens", "×", 0, fastWarm))
		}
	}
	return out, nil
}

func figure(what, unit string, atLeast float64, values []float64) bench.Figure {
	slices.Sort(values)
	f := bench.Figure{What: what, Unit: unit, Median: values[len(values)/2], Min: values[0], Max: values[len(values)-1]}
	if atLeast > 0 {
		f.Target, f.Met = fmt.Sprintf("≥ %g", atLeast), f.Median >= atLeast
	}
	return f
}

// timeAll returns the seconds that the texts take, cold: each as the first one,
// with no word seen before. What forgets them is not timed.
func timeAll(tok *tokenizer.Tokenizer, texts []string, cold bool) (float64, error) {
	all := make([][]byte, len(texts))
	for i, t := range texts {
		all[i] = []byte(t)
	}
	dst := make([]uint32, 0, 16<<10)
	var took time.Duration
	for _, t := range all {
		if cold {
			if err := forget(tok); err != nil {
				return 0, err
			}
		}
		start := bench.CPUTime()
		var err error
		if dst, err = tok.Append(context.Background(), dst[:0], t, false); err != nil {
			return 0, err
		}
		took += bench.CPUTime() - start
	}
	return took.Seconds(), nil
}

// reference is the Python process.
type reference struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func start(python string) (*reference, error) {
	cmd := exec.Command(python, "bench/conformance/reference.py")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &reference{cmd, in, bufio.NewReaderSize(out, 1<<20)}, nil
}

func (r *reference) ask(question, answer any) error {
	b, err := json.Marshal(question)
	if err != nil {
		return err
	}
	if _, err := r.in.Write(append(b, '\n')); err != nil {
		return err
	}
	line, err := r.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("the reference process ended: %w", err)
	}
	return json.Unmarshal(line, answer)
}

// encode returns the ids of texts, and how long it took.
func (r *reference) encode(texts []string, special bool) ([][]uint32, time.Duration, error) {
	var answer struct {
		IDs     [][]uint32
		Seconds float64
	}
	if err := r.ask(map[string]any{"op": "encode", "texts": texts, "special": special}, &answer); err != nil {
		return nil, 0, err
	}
	if len(answer.IDs) != len(texts) {
		return nil, 0, errors.New("the reference process answered for other texts")
	}
	return answer.IDs, seconds(answer.Seconds), nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func (r *reference) stop() {
	_ = r.in.Close() // ends it
	_ = r.cmd.Wait()
}

func readMaybeGzip(name string) ([]byte, error) {
	return tokenizer.ReadFile(os.DirFS(filepath.Dir(name)), strings.TrimSuffix(filepath.Base(name), ".gz"))
}
