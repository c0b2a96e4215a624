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
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
)

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
	report := bench.NewRun("conformance", o.commit, "make conformance", renderFigures(o))
	report.Compared = templates(ref, o)
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
	m := c.load(ref, filepath.Join(o.work, c.name))
	if m == nil {
		return
	}
	report.Compared = append(report.Compared, tokenIDs(ref, m.Tokenizer(), c))
	if c.mistral() {
		report.Compared = append(report.Compared, prompts(ref, m, c.name, true, map[string]any{"op": "mistral"}))
	}
	if c.real && c.config == "" {
		path := filepath.Join(o.work, c.name, c.file)
		report.Figures = slices.Concat(report.Figures, speeds(ref, m.Tokenizer(), c, o), turnFigures(m.Tokenizer(), c, o), loadFigures(c, path))
	}
}
