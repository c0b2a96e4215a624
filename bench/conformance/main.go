// SPDX-License-Identifier: Apache-2.0

// Conformance compares tokenizer and templates with the reference
// implementations, and their speed, as `make conformance` runs it. It prints a
// table and exits 1 on any difference, or if a target of speed is missed.
package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
)

func main() {
	var o options
	flag.StringVar(&o.python, "python", "python3", "a Python that has the packages of tools/golden/requirements.txt")
	flag.StringVar(&o.templates, "templates", "", "a `folder` with more chat templates, one for each file *.jinja")
	flag.StringVar(&o.out, "out", "bench/out", "`folder` for the JSON")
	flag.StringVar(&o.commit, "commit", "", "recorded in the JSON")
	flag.StringVar(&o.only, "only", "", "compare only what has this in its name")
	flag.StringVar(&o.engines, "engines", "", "`folders` of engines' releases to compare with, and with nothing else; tools/engines.sh makes them")
	flag.StringVar(&o.vllm, "vllm", ".cache/vllm", "`folder` with a vLLM for the CPU, for its compiled code")
	flag.Parse()
	bench.Exit("conformance", func() bool {
		o.shared = bench.Must(fixtures.Dir())
		o.work = bench.Must(os.MkdirTemp("", "conformance"))
		defer func() { _ = os.RemoveAll(o.work) }()
		return bench.Must(bench.Report(os.Stdout, o.out, bench.NewRun("conformance", o.commit, "make conformance", compareAll(o))))
	})
}

// compareAll compares everything with the reference.
func compareAll(o options) []bench.Figure {
	if o.engines != "" {
		return compareEngines(o)
	}
	ref := &reference{bench.Must(process.StartLines(exec.Command(o.python, "bench/conformance/reference.py")))}
	defer ref.Stop()
	figures := append(renderFigures(o), templates(ref, o)...)
	ref.ask(map[string]any{"op": "documents", "size": documentBytes, "count": documents}, &o.documents)
	if strings.Contains("gpt-oss prompts", o.only) {
		figures = append(figures, harmony(ref, o)...)
	}
	hugging := candidates(o)
	for _, c := range slices.Concat(hugging, mistralFiles(ref), withConfigs(hugging)) {
		if strings.Contains(c.name, o.only) {
			bench.Within(c.name, func() { figures = append(figures, compareCandidate(ref, c, o)...) })
		}
	}
	return figures
}

// compareCandidate compares one tokenizer.
func compareCandidate(ref *reference, c candidate, o options) []bench.Figure {
	m := c.load(ref, filepath.Join(o.work, c.name))
	if m == nil {
		return nil
	}
	figures := []bench.Figure{tokenIDs(ref, m.Tokenizer(), c)}
	if c.mistral() {
		figures = append(figures, referencePrompts(ref, m, c.name, chats.Requests{Strict: true}, map[string]any{"op": "mistral"}))
	}
	if c.real && c.config == "" {
		path := filepath.Join(o.work, c.name, c.file)
		figures = slices.Concat(figures, speeds(ref, m.Tokenizer(), c, o), turnFigures(m.Tokenizer(), c, o), loadFigures(c, path))
	}
	return figures
}
