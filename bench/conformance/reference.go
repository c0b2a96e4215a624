// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/tokenizer"
)

type options struct {
	python, shared, templates, out, commit, only, engines, vllm string

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
	day           = "2026-08-22"                // the date of the prompts: some contain it

	// The texts that speed is measured on.
	documents     = 240 // of a kind; half of them are encoded first
	documentBytes = 8 << 10
)

func today() time.Time { return bench.Must(time.Parse(time.DateOnly, day)).Add(12 * time.Hour) }

func random(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, stream)) }

// reference is the Python process.
type reference struct{ *process.Lines }

func (r *reference) ask(question map[string]any, answer any) {
	bench.NoError(r.Ask(string(bench.Must(json.Marshal(question))), answer))
}

// answers are the reference's answers to a list of questions.
type answers struct {
	IDs      [][]uint32
	Outcomes []struct{ Out, Err *string } // of templates; Err is "Class: message"
}

// askAll asks n questions at a time.
func (r *reference) askAll(question map[string]any, n int) (all answers) {
	r.ask(question, &all)
	if len(all.IDs)+len(all.Outcomes) != n {
		bench.NoError(errors.New("the reference process answered other questions"))
	}
	return all
}

// templateTexts returns the templates of the reference data and of the folder of more templates, by name.
func templateTexts(o options) map[string]string {
	all := map[string]string{}
	b, err := os.ReadFile(filepath.Join(o.shared, "templates/templates.json"))
	if !errors.Is(err, fs.ErrNotExist) {
		bench.NoError(err)
		bench.NoError(json.Unmarshal(b, &all))
	}
	if o.templates == "" {
		return all
	}
	folder := os.DirFS(o.templates)
	bench.NoError(fs.WalkDir(folder, ".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(name) != ".jinja" {
			return err
		}
		b, err := fs.ReadFile(folder, name)
		all[strings.TrimSuffix(name, ".jinja")] = string(b)
		return err
	}))
	return all
}

// writeFolder writes the files that are not empty.
func writeFolder(dir string, files map[string][]byte) {
	bench.NoError(os.MkdirAll(dir, 0o755))
	for name, data := range files {
		if len(data) > 0 {
			bench.NoError(os.WriteFile(filepath.Join(dir, name), data, 0o644))
		}
	}
}

// readFile reads a file that may be compressed.
func readFile(name string) ([]byte, error) {
	return tokenizer.ReadFile(os.DirFS(filepath.Dir(name)), strings.TrimSuffix(filepath.Base(name), ".gz"))
}
