// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"
)

// Figure is one measured quantity with its target. A target may be missing; then
// the figure is for information and is not counted.
type Figure struct {
	What   string  `json:"what"`
	Target string  `json:"target,omitempty"` // as in "≤ 5 ms"
	Unit   string  `json:"unit,omitempty"`
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	Met    bool    `json:"met"`
}

// Comparison is one thing that was held against its reference: how many of the cases
// are equal, and what they took, in turn, in the same run. Any difference is a target
// that was missed.
type Comparison struct {
	Kind      string `json:"kind"` // "tokenizer", "template", "prompts"
	Name      string `json:"name"`
	Cases     int    `json:"cases"`
	Equal     int    `json:"equal"`
	Different int    `json:"different"`
	Refused   int    `json:"refused,omitempty"` // of the equal ones: by both
	// Micros is what a case took, in µs, and Ratio how many times that it took the
	// reference.
	Micros float64 `json:"us"`
	Ratio  float64 `json:"ratio"`
}

// NewComparison fills in what follows from the rest: the cases that differ, and the
// times of both sides for all of them.
func NewComparison(kind, name string, cases, different int, ours, theirs time.Duration) Comparison {
	return Comparison{
		Kind: kind, Name: name, Cases: cases, Equal: cases - different, Different: different,
		Micros: float64(ours.Nanoseconds()) / 1e3 / float64(max(1, cases)), Ratio: float64(theirs) / float64(max(1, ours)),
	}
}

// Run says what was measured, where and how.
type Run struct {
	Name    string    `json:"name"`    // of the target without "make ", as in "bench-index"
	Commit  string    `json:"commit"`  // "" if unknown
	Command string    `json:"command"` // that repeats it
	Date    time.Time `json:"date"`
	Cores   int       `json:"cores"`
	Figures []Figure  `json:"figures"`

	Compared []Comparison `json:"compared,omitempty"`
}

// NewRun returns a run of today on this machine.
func NewRun(name, commit, command string, figures []Figure) Run {
	return Run{Name: name, Commit: commit, Command: command, Date: time.Now().UTC().Truncate(time.Second), Cores: runtime.GOMAXPROCS(0), Figures: figures}
}

// Report prints a run as a table whose last line is "N of M targets met", and
// writes it as JSON to dir/NAME.json. It tells whether all targets were met. A run
// without figures is an error: a filter that fits nothing meets no target.
func Report(w io.Writer, dir string, r Run) (met bool, err error) {
	if r.Name == "" || strings.ContainsAny(r.Name, `/\`) {
		return false, fmt.Errorf("bench: the name of a run is %q, want one without slashes", r.Name)
	}
	if len(r.Compared)+len(r.Figures) == 0 {
		return false, fmt.Errorf("bench: %s: nothing was measured: is the reference data there, and does the name asked for exist?", r.Name)
	}
	reached, targets := 0, 0
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(r.Compared) > 0 {
		fmt.Fprintln(t, "kind\tname\tcases\tequal\tdifferent\tµs a case\ttimes the reference's speed")
	}
	for _, c := range r.Compared {
		targets++
		if c.Different == 0 {
			reached++
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%.3g\t%.3g\n", c.Kind, c.Name, c.Cases, c.Equal, c.Different, c.Micros, c.Ratio)
	}
	if len(r.Compared) > 0 {
		if err := t.Flush(); err != nil {
			return false, fmt.Errorf("bench: print %s: %w", r.Name, err)
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(t, "what\ttarget\tmedian\tmin – max\tmet")
	for _, f := range r.Figures {
		verdict := "–"
		if f.Target != "" {
			targets++
			verdict = "no"
			if f.Met {
				reached++
				verdict = "yes"
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%.4g %s\t%.4g – %.4g\t%s\n", f.What, f.Target, f.Median, f.Unit, f.Min, f.Max, verdict)
	}
	if err := t.Flush(); err != nil {
		return false, fmt.Errorf("bench: print %s: %w", r.Name, err)
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return false, fmt.Errorf("bench: write %s: %w", r.Name, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return false, fmt.Errorf("bench: write %s: %w", r.Name, err)
	}
	if err := os.WriteFile(filepath.Join(dir, r.Name+".json"), append(data, '\n'), 0o644); err != nil {
		return false, fmt.Errorf("bench: write %s: %w", r.Name, err)
	}
	_, err = fmt.Fprintf(w, "%d of %d targets met\n", reached, targets)
	return reached == targets, err
}
