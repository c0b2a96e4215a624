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

// Run says what was measured, where and how.
type Run struct {
	Name    string    `json:"name"`    // of the target without "make ", as in "bench-index"
	Commit  string    `json:"commit"`  // "" if unknown
	Command string    `json:"command"` // that repeats it
	Date    time.Time `json:"date"`
	Cores   int       `json:"cores"`
	Figures []Figure  `json:"figures"`
}

// NewRun returns a run of today on this machine.
func NewRun(name, commit, command string, figures []Figure) Run {
	return Run{Name: name, Commit: commit, Command: command, Date: time.Now().UTC().Truncate(time.Second), Cores: runtime.GOMAXPROCS(0), Figures: figures}
}

// Report prints a run as a table whose last line is "N of M targets met", and
// writes it as JSON to dir/NAME.json. It tells whether all targets were met.
func Report(w io.Writer, dir string, r Run) (met bool, err error) {
	if r.Name == "" || strings.ContainsAny(r.Name, `/\`) {
		return false, fmt.Errorf("bench: the name of a run is %q, want one without slashes", r.Name)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "what\ttarget\tmedian\tmin – max\tmet")
	reached, targets := 0, 0
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
