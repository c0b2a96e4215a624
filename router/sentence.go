// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	_ "embed" // for the texts
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

//go:embed texts.tmpl
var textsFile string

// texts are the templates of the texts about a decision. A template with the name of a reason, mode or
// cost is executed for decisions with it.
//
//nolint:gochecknoglobals // a table
var texts = template.Must(template.New("").Funcs(template.FuncMap{
	"label":    labelOf,
	"plural":   plural[int],
	"pluralOf": plural[string],
	"figure":   Figure,
	"rounded":  Rounded,
	"percent":  func(x float64) string { return strconv.FormatFloat(100*x, 'g', 3, 64) },
}).Parse(textsFile))

// Sentence says in words why the request goes to its worker, in one sentence or a few short ones. It
// compares the worker with another candidate if the decision has its candidates.
func (d *Decision) Sentence() string {
	e := explain(d)
	parts := []string{"beginning", "reason " + string(d.Reason), "only", "legs"}
	fixed := d.Reason == ReasonSession || d.Reason == ReasonPreferred || d.Reason == ReasonPinned && e.Eligible == 0
	if d.Equal == 0 && e.Eligible != 1 && !fixed {
		parts = append(parts, "mode "+string(d.Mode))
	}
	parts = append(parts, "blocks")
	if e.Differ != nil {
		parts = append(parts, "facts "+e.cost())
	}
	if d.Equal > 0 && e.Eligible != 1 {
		parts = append(parts, "cost")
	}
	text := ". " + e.text(append(parts, "left out")...)
	return strings.NewReplacer(". worker ", ". Worker ", ". group ", ". Group ").Replace(text)[2:]
}

// SettingsText lists the settings that the costs of the decision depend on. It is empty if no costs were
// compared.
func (d *Decision) SettingsText() string {
	if d.Policy == "" || d.Settings == nil {
		return ""
	}
	e := explanation{D: d}
	return e.text("settings", "settings "+e.cost(), "settings of all")
}

// ModeText is the mode with its inputs.
func (d *Decision) ModeText() string {
	return (&explanation{D: d}).text("mode")
}

// FirstTokenText says how kvroute noticed the first token. It is empty until then.
func (d *Decision) FirstTokenText() string {
	return (&explanation{D: d}).text("first token " + string(d.FirstTokenBy))
}

// explanation is a decision with what its sentence names.
type explanation struct {
	D     *Decision
	Name  string // of the worker; see labelOf
	Drawn bool   // by a temperature
	Least bool   // the lowest cost was to win

	// Of the candidates that could be chosen; nil and 0 if the decision has no candidates.
	Chosen, Lowest *side // Lowest has the lowest cost
	Eligible       int
	All            bool           // Eligible counts all of them
	Place          uint64         // of the chosen one among all, for round-robin
	LeftOut        map[string]int // number of the others by the reason, unless the reason of the choice says it

	// Other is the candidate that the chosen one is compared with: the one with the fewest tokens to
	// compute if it has fewer than the chosen one, else the one with the lowest cost. Differ has the
	// numbers in which the two differ.
	Other  *side
	Differ map[string]pair
}

// side is a candidate that a sentence names.
type side struct {
	C         *Candidate
	Name      string
	ToCompute int               // tokens of the prompt that it would compute
	Numbers   map[string]string // what costs count; of a router group, the mean of its workers
	Full      bool              // its engine has almost as many requests as it computes at a time
}

// pair is a number of the chosen worker, and that of another one with its name.
type pair struct{ Own, Others string }

// explain finds what the sentence of a decision names.
func explain(d *Decision) *explanation {
	e := &explanation{D: d, Name: labelOf(d.Worker, d.WorkerName, d.Group), LeftOut: map[string]int{}}
	if d.Policy != "" && d.Reason != ReasonPreferred {
		e.Drawn = d.Settings.Temperature > 0
		e.Least = !e.Drawn
	}
	var eligible []*Candidate
	for i := range d.Candidates {
		c := &d.Candidates[i]
		switch c.Excluded {
		case "":
			eligible = append(eligible, c)
			if c.Worker == d.Worker {
				e.Chosen = d.side(c)
			}
		case ExcludedRole, ExcludedPin, ExcludedSession:
		default:
			e.LeftOut[c.Excluded.Text()]++
		}
	}
	e.Eligible = len(eligible)
	e.All = d.Omitted == 0 || e.Eligible < keptCandidates
	if e.All && e.Eligible > 0 {
		e.Place = d.Turn%uint64(e.Eligible) + 1
	}
	if d.Equal == 0 || e.Eligible < 2 {
		return e // nothing is compared
	}
	slices.SortStableFunc(eligible, func(a, b *Candidate) int { return cmp.Compare(a.Cost, b.Cost) })
	e.Lowest = d.side(eligible[0])
	other := eligible[0]
	if other.Worker == d.Worker {
		other = eligible[1]
	}
	fewest := slices.MinFunc(eligible, func(a, b *Candidate) int { return d.toCompute(a.OverlapBlocks) - d.toCompute(b.OverlapBlocks) })
	if e.Chosen != nil && !e.Decodes() && d.toCompute(fewest.OverlapBlocks) < e.Chosen.ToCompute {
		other = fewest
	}
	e.Other = d.side(other)
	if e.Chosen != nil && d.Policy != "" {
		e.Differ = map[string]pair{}
		for of, x := range e.Chosen.Numbers {
			if y := e.Other.Numbers[of]; x != y {
				e.Differ[of] = pair{x, y + " on " + e.Other.Name}
			}
		}
	}
	return e
}

// side returns what a sentence reports of a candidate.
func (d *Decision) side(c *Candidate) *side {
	workers := float64(max(1, c.Members))
	requests := float64(c.ActiveRequests) / workers
	s := &side{
		C: c, Name: labelOf(c.Worker, c.WorkerName, c.Group), ToCompute: d.toCompute(c.OverlapBlocks), Numbers: map[string]string{},
		Full: c.MaxRequests > 0 && requests+1 > .9*float64(c.MaxRequests),
	}
	for name, x := range map[string]float64{
		"added":    float64(c.AdditionalBlocks),
		"delay":    c.DecodeDelay,
		"held":     float64(c.DecodeTokens+c.WaitingTokens) / workers,
		"lower":    float64(c.HostBlocks + c.DiskBlocks),
		"needed":   float64(c.ActiveBlocks)/workers + float64(c.AdditionalBlocks),
		"overlap":  float64(c.OverlapBlocks),
		"pending":  float64(c.PendTokens) / workers,
		"requests": requests,
		"speed":    100 * cmp.Or(c.Speed, 1),
		"taints":   c.TaintWeight,
		"use":      100 * c.KVUse,
	} {
		s.Numbers[name] = Figure(math.Round(10*x) / 10)
	}
	return s
}

// Decodes reports whether the computation of the prompt does not count, as for a decode worker.
func (e *explanation) Decodes() bool {
	s := e.D.Settings
	return s != nil && !s.TrackPrefill && s.Policy != scorer.PredictedTTFT && s.Policy != scorer.Weighted
}

// cost is the name of the cost in the names of templates.
func (e *explanation) cost() string {
	if e.Decodes() {
		return string(e.D.Policy) + " untracked"
	}
	return string(e.D.Policy)
}

// text executes the templates of these names, as far as they exist.
func (e *explanation) text(names ...string) string {
	var b strings.Builder
	for _, name := range names {
		if t := texts.Lookup(name); t != nil {
			_ = t.Execute(&b, e) // tests execute all lines of the templates
			b.WriteByte(' ')
		}
	}
	return strings.Join(strings.Fields(b.String()), " ")
}

// labelOf names a worker, or the router group that it stands for, in a sentence.
func labelOf(w Worker, name, group string) string {
	switch {
	case group != "":
		return "group " + group
	case name == "":
		return "worker " + w.Label("")
	}
	return w.Label(name)
}

// Costs compares the cost of the chosen worker with another one.
func (e *explanation) Costs(other *side) pair {
	x, y := Figure(e.D.Cost), Figure(other.C.Cost)
	if more := other.C.Cost - e.D.Cost; x == y && more > 0 {
		y = Figure(more) + " more"
	} else if x == y && more < 0 {
		y = Figure(-more) + " less"
	}
	return pair{x, y + " on " + other.Name}
}

// Figure returns a number for people: with at most four significant digits, but a whole number with all of its digits.
func Figure(x float64) string {
	if x == math.Trunc(x) {
		return strconv.FormatFloat(x+0, 'f', -1, 64) // not -0
	}
	text := strconv.FormatFloat(x, 'g', 4, 64)
	if math.Abs(x) < 1e4 {
		return text
	}
	rounded, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return text
	}
	return strconv.FormatFloat(rounded, 'f', -1, 64) // without an exponent
}

// Rounded returns a duration for people: with at most four significant digits.
func Rounded(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for d.Abs() >= 10_000*unit {
		unit *= 10
	}
	return d.Round(unit)
}

// plural returns a number with its noun.
func plural[N int | string](n N, noun string) string {
	text := fmt.Sprint(n)
	if text != "1" {
		noun += "s"
	}
	return text + " " + noun
}
