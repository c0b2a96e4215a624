// SPDX-License-Identifier: Apache-2.0

// Conformance compares tokenizer and templates with the reference
// implementations, and their speed, as `make conformance` runs it. It prints a
// table and exits 1 on any difference, or if a target of speed is missed.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/tokenizer"
)

type options struct {
	python, shared, out, commit, only, vllm string

	work      string              // a folder for this run
	documents map[string][]string // real texts by their kind, in parts of documentBytes
}

const (
	golden        = "tokenizer/testdata/golden" // the project's own tokenizers
	texts         = 20_000                      // random texts for a real tokenizer
	conversations = 200                         // random conversations for a template
	requests      = 10 * conversations          // random requests for a model
	rounds        = 5                           // of measuring speed
	seed          = 1                           // of everything random

	// The texts that speed is measured on.
	documents     = 240 // of a kind; a round takes 48 of them
	documentBytes = 8 << 10
)

func random(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, stream)) }

func main() {
	var o options
	flag.StringVar(&o.python, "python", "python3", "a Python that has the packages of tools/golden/requirements.txt")
	flag.StringVar(&o.out, "out", "bench/out", "`folder` for the JSON")
	flag.StringVar(&o.commit, "commit", "", "recorded in the JSON")
	flag.StringVar(&o.vllm, "vllm", "", "compare only whole prompts, with the render server of this `program`")
	flag.StringVar(&o.only, "only", "", "compare only what has this in its name")
	flag.Parse()
	bench.Exit("conformance", func() bool { return run(o) })
}

func run(o options) (met bool) {
	o.shared = bench.Must(fixtures.Dir())
	o.work = bench.Must(os.MkdirTemp("", "conformance"))
	defer func() { _ = os.RemoveAll(o.work) }()
	if o.vllm != "" {
		return bench.Must(bench.Report(os.Stdout, o.out, bench.NewRun("vllm", o.commit, "VLLM=1 make conformance", vllm(o))))
	}
	ref := &reference{bench.Must(process.StartLines(exec.Command(o.python, "bench/conformance/reference.py")))}
	defer ref.Stop()
	report := bench.NewRun("conformance", o.commit, "make conformance", nil)
	report.Compared, report.Figures = templates(ref, o), renderFigures(o)
	ref.ask(map[string]any{"op": "documents", "size": documentBytes, "count": documents}, &o.documents)
	if strings.Contains("gpt-oss prompts", o.only) {
		report.Compared = append(report.Compared, harmony(ref, o)...)
	}
	hugging := candidates(o)
	for _, c := range slices.Concat(hugging, mistralFiles(ref), withConfigs(hugging)) {
		if strings.Contains(c.name, o.only) {
			bench.Within(c.name, func() { compareCandidate(&report, ref, c, o) })
		}
	}
	return bench.Must(bench.Report(os.Stdout, o.out, report))
}

// compareCandidate compares one tokenizer and adds the outcome to a report.
func compareCandidate(report *bench.Run, ref *reference, c candidate, o options) {
	path := c.unpacked(o.work)
	m := bench.Must(tokenizer.LoadModel(os.DirFS(filepath.Dir(path)), tokenizer.ModelConfig{}))
	var answer struct{ Error string }
	ref.ask(map[string]any{"op": "load", "path": path, "auto": c.config != ""}, &answer)
	switch doubt := m.Tokenizer().Doubt; {
	case answer.Error != "":
		fmt.Printf("%s: AutoTokenizer does not load it: %s\n", c.name, answer.Error)
		return
	case doubt != "":
		fmt.Printf("%s: not compared, since kvroute says that its ids may differ: %s\n", c.name, doubt)
		return
	}
	report.Compared = append(report.Compared, compare(ref, m.Tokenizer(), c))
	if c.mistral {
		g := chats.Requests{R: random(4), Strict: true}
		report.Compared = append(report.Compared, prompts(ref, m, g, c.name, map[string]any{"op": "mistral"}))
	}
	if c.real && c.config == "" {
		report.Figures = slices.Concat(report.Figures, speeds(ref, m.Tokenizer(), c, o), turnFigures(m.Tokenizer(), c, o), loadFigures(c, path))
	}
}

// reference is the Python process.
type reference struct{ *process.Lines }

func (r *reference) ask(question map[string]any, answer any) {
	bench.NoError(r.Ask(string(bench.Must(json.Marshal(question))), answer))
}

// ids returns the ids that the reference gives for a list of n questions, and how long
// they took.
func (r *reference) ids(question map[string]any, n int) ([][]uint32, time.Duration) {
	var answer struct {
		IDs     [][]uint32
		Seconds float64
	}
	r.ask(question, &answer)
	if len(answer.IDs) != n {
		bench.NoError(errors.New("the reference process answered other questions"))
	}
	return answer.IDs, seconds(answer.Seconds)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
