// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// Report prints a run as a table whose last line is "N of M targets met", and writes it
// as JSON to dir/NAME.json. It returns whether all targets were met. A run without
// figures is an error: a filter that matches nothing meets no target.
func Report(w io.Writer, dir string, r Run) (met bool, err error) {
	if r.Name == "" || strings.ContainsAny(r.Name, `/\`) {
		return false, fmt.Errorf("bench: the name of a run is %q, want one without slashes", r.Name)
	}
	if len(r.Figures) == 0 {
		return false, fmt.Errorf("bench: %s: nothing was measured: check that the reference data is there and that the requested name exists", r.Name)
	}
	reached, targets, err := r.print(w)
	if err == nil {
		err = r.write(filepath.Join(dir, r.Name+".json"))
	}
	if err == nil {
		_, err = fmt.Fprintf(w, "%d of %d targets met\n", reached, targets)
	}
	if err != nil {
		return false, fmt.Errorf("bench: report %s: %w", r.Name, err)
	}
	return reached == targets, nil
}

// Run is a set of figures with the command, the commit and the date.
type Run struct {
	Name    string    `json:"name"`    // of the make target, as in "bench-index"
	Commit  string    `json:"commit"`  // "" if unknown
	Command string    `json:"command"` // that repeats the run
	Date    time.Time `json:"date"`
	Cores   int       `json:"cores"`
	Figures []Figure  `json:"figures"`
}

// NewRun returns a run of today on this machine.
func NewRun(name, commit, command string, figures []Figure) Run {
	return Run{Name: name, Commit: commit, Command: command, Date: time.Now().UTC().Truncate(time.Second), Cores: runtime.GOMAXPROCS(0), Figures: figures}
}

// Part names a run after the part that ONLY selects, so that its file does not replace that of a whole run. It returns the
// run itself if only is empty.
func (r Run) Part(only string) Run {
	if only != "" {
		part := strings.FieldsFunc(only, func(c rune) bool { return !unicode.IsLetter(c) && !unicode.IsDigit(c) })
		r.Name, r.Command = strings.Join(append([]string{r.Name}, part...), "-"), fmt.Sprintf("%s ONLY='%s'", r.Command, only)
	}
	return r
}

// print writes the table and counts the targets.
func (r *Run) print(w io.Writer) (reached, targets int, err error) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "what\ttarget\tmedian\tmin – max\tmet")
	for _, f := range r.Figures {
		verdict := "–"
		if f.Target != "" {
			targets++
			verdict = "no"
		}
		switch {
		case f.Unknown:
			verdict = "unknown"
		case f.Met:
			reached++
			verdict = "yes"
		}
		fmt.Fprintf(t, "%s\t%s\t%.4g %s\t%.4g – %.4g\t%s\n", f.What, f.Target, f.Median, f.Unit, f.Min, f.Max, verdict)
	}
	return reached, targets, t.Flush()
}

func (r *Run) write(name string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, append(data, '\n'), 0o644)
}

// Figure is one measured quantity with its target. A figure without a target is for
// information and is not counted.
type Figure struct {
	What   string  `json:"what"`
	Target string  `json:"target,omitempty"` // as in "≤ 5 ms"
	Unit   string  `json:"unit,omitempty"`
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	Met    bool    `json:"met"`
	// Unknown means that the rounds differ too much to say whether the target is met. It counts as not met.
	Unknown bool `json:"unknown,omitempty"`
}

// NewFigure returns the figure of a quantity of which each round gave one value.
func NewFigure(what, unit string, t Target, rounds ...float64) Figure {
	v := slices.Sorted(slices.Values(rounds))
	return t.Figure(what, unit, v[len(v)/2], v[0], v[len(v)-1])
}

// Row is a figure that is yet to be measured.
type Row struct {
	What, Unit string
	Target     Target
}

// NewRow returns a row. With the zero target it has no target.
func NewRow(what, unit string, t Target) Row { return Row{what, unit, t} }

// Rounds measures rows together. Each round gives a value for each row; a row without values has
// no figure.
func Rounds(n int, rows []Row, round func() []float64) (out []Figure) {
	values := make([][]float64, len(rows))
	for range n {
		for i, v := range round() {
			values[i] = append(values[i], v)
		}
	}
	for i, r := range rows {
		if len(values[i]) > 0 {
			out = append(out, NewFigure(r.What, r.Unit, r.Target, values[i]...))
		}
	}
	return out
}

// Target is a bound of a figure. The zero value is no target.
type Target struct {
	text   string
	met    func(median float64) bool
	spread float64 // the largest max ÷ min of the rounds; 0 for any
}

// AtMost is an upper bound.
func AtMost(v float64) Target { return bound("≤", v, func(got float64) bool { return got <= v }) }

// AtLeast is a lower bound.
func AtLeast(v float64) Target { return bound("≥", v, func(got float64) bool { return got >= v }) }

// Below is an upper bound that is missed itself.
func Below(v float64) Target { return bound("<", v, func(got float64) bool { return got < v }) }

// Above is a lower bound that is missed itself.
func Above(v float64) Target { return bound(">", v, func(got float64) bool { return got > v }) }

// Exactly is the only accepted value.
func Exactly(v float64) Target { return bound("=", v, func(got float64) bool { return got == v }) }

func bound(sign string, v float64, met func(float64) bool) Target {
	return Target{text: fmt.Sprintf("%s %g", sign, v), met: met}
}

// Within returns the target, which is unknown if the largest value of the rounds is more than spread times the
// smallest one.
func (t Target) Within(spread float64) Target {
	t.spread = spread
	return t
}

// IsSet reports whether there is a target.
func (t Target) IsSet() bool { return t.met != nil }

// Figure returns a figure with this target; the middle of the range is compared with it.
func (t Target) Figure(what, unit string, middle, low, high float64) Figure {
	unknown := t.spread > 0 && high > t.spread*low
	return Figure{
		What: what, Unit: unit, Target: t.text, Median: middle, Min: low, Max: high,
		Met: t.IsSet() && t.met(middle) && !unknown, Unknown: unknown,
	}
}

// Quantiles describe a set of measured values.
type Quantiles struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
}

// NewQuantiles sorts the values and takes quantiles by nearest rank. Without values all
// are 0.
func NewQuantiles(v []float64) Quantiles {
	if len(v) == 0 {
		return Quantiles{}
	}
	slices.Sort(v)
	sum := 0.
	for _, x := range v {
		sum += x
	}
	at := func(percent int) float64 { return v[min(len(v)-1, len(v)*percent/100)] }
	return Quantiles{Mean: sum / float64(len(v)), P50: at(50), P90: at(90), P99: at(99)}
}

// Heap returns the bytes of the heap that are in use.
func Heap() float64 {
	runtime.GC()
	runtime.GC() // the first one may leave objects with finalizers
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}
