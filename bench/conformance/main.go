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
	ok, err := run(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(o options) (ok bool, err error) {
	if o.shared, err = fixtures.Dir(); err != nil {
		return false, err
	}
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
	lines, err := process.StartLines(exec.Command(o.python, "bench/conformance/reference.py"))
	if err != nil {
		return false, err
	}
	defer lines.Stop()
	ref := &reference{lines}
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
	own, err := mistralFiles(ref)
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

// hold compares one tokenizer and adds the outcome to a report.
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
		fmt.Printf("%s: not compared, since kvroute says that its ids may differ: %s\n", c.name, doubt)
		return nil
	}
	compared, err := compare(ref, m.Tokenizer(), c)
	if err != nil {
		return err
	}
	report.Compared = append(report.Compared, compared)
	if c.mistral {
		g := chats.Requests{R: random(4), Strict: true}
		compared, err := prompts(ref, m, g, c.name, map[string]any{"op": "mistral"})
		if err != nil {
			return err
		}
		report.Compared = append(report.Compared, compared)
	}
	if !c.real || c.config != "" {
		return nil
	}
	for _, measure := range []func() ([]bench.Figure, error){
		func() ([]bench.Figure, error) { return speeds(ref, m.Tokenizer(), c, o) },
		func() ([]bench.Figure, error) { return turnFigures(m.Tokenizer(), c, o) },
		func() ([]bench.Figure, error) { return loadFigures(c, path) },
	} {
		figures, err := measure()
		if err != nil {
			return err
		}
		report.Figures = append(report.Figures, figures...)
	}
	return nil
}

// reference is the Python process.
type reference struct{ *process.Lines }

func (r *reference) ask(question map[string]any, answer any) error {
	b, err := json.Marshal(question)
	if err != nil {
		return err
	}
	return r.Ask(string(b), answer)
}

// ids returns the ids that the reference gives for a list of n questions, and how long
// they took.
func (r *reference) ids(question map[string]any, n int) ([][]uint32, time.Duration, error) {
	var answer struct {
		IDs     [][]uint32
		Seconds float64
	}
	if err := r.ask(question, &answer); err != nil {
		return nil, 0, err
	}
	if len(answer.IDs) != n {
		return nil, 0, errors.New("the reference process answered other questions")
	}
	return answer.IDs, seconds(answer.Seconds), nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
