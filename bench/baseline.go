// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"math"
	"slices"
	"strings"
)

// baseline is what an independent sketch of the same engine model measured for a
// rule in the seven cells: mean TTFT in s, mean E2E in s and token hit rate. A
// rule without a value there has 0.
type baseline struct {
	rule  string
	cells [7][3]float64
}

// asSketched is how the sketch ran a rule where it took it otherwise than package
// scorer does: what tells equals apart, and who counts the requests that wait.
func asSketched(rule string) string {
	switch rule {
	case "random", "round-robin", "power-of-two", "session-hash", "session-sticky", oracleRule:
		return ""
	case "least-requests", "longest-prefix", "aibrix-prefix-cache", "two-tier-8":
		return rule + ":ties=requests"
	case "vllm-dp", "gie-3-2-2-2":
		return rule + ":inputs=engine,ties=draw"
	case "chwbl-1.25":
		return "chwbl-1.25-scattered"
	case "dualmap":
		return "dualmap-first"
	}
	if strings.Contains(rule, ":") {
		return rule + ",ties=draw"
	}
	return rule + ":ties=draw"
}

// The noise of the sketch: the relative difference that its values have from one
// run to the next.
const (
	noiseOpen    = .05
	noiseAgentic = .15
	noiseTwoTier = .30 // on the synthetic trace
)

// baselines are 8 workers of 32B, one router, fresh signals.
func baselines() []baseline {
	return []baseline{
		{"random", [7][3]float64{{17.5, 35, .051}, {52.9, 118, .077}, {24.5, 46, .036}, {40.0, 94, .068}}},
		{"round-robin", [7][3]float64{{12.4, 29, .052}, {35.6, 102, .080}, {23.2, 43, .029}, {37.6, 88, .074}, {15.1, 43, .322}, {21.9, 60, .257}, {9.69, 38, .651}}},
		{"power-of-two", [7][3]float64{{3.05, 17.2, .054}, {10.1, 78, .080}, {16.2, 36, .033}, {33.7, 80, .072}, {16.3, 41, .324}, {18.4, 52, .286}, {9.77, 31, .651}}},
		{"least-requests", [7][3]float64{{2.10, 15.6, .052}, {7.36, 75, .077}, {17.3, 37, .026}, {35.4, 85, .062}, {13.6, 34, .351}, {15.7, 46, .306}, {7.76, 27, .659}}},
		{"vllm-dp", [7][3]float64{{1.94, 15.6, .052}, {8.51, 80, .079}, {17.2, 38, .029}, {34.1, 83, .066}}},
		{"least-pending", [7][3]float64{{1.09, 16.1, .052}, {4.47, 74, .079}, {14.8, 37, .032}, {32.5, 88, .062}, {11.2, 39, .308}, {12.0, 50, .272}, {5.75, 30, .654}}},
		{"longest-prefix", [7][3]float64{{2961, 2987, .045}, {1508, 1595, .088}, {5.97, 18.8, .161}, {1.83, 7.8, .515}, {.93, 11.3, .961}, {1.54, 14.7, .947}, {1.02, 13.3, .961}}},
		{"session-hash", [7][3]float64{4: {1.80, 14.2, .942}, 5: {2.90, 18.5, .919}, 6: {1.15, 13.6, .961}}},
		{"session-sticky", [7][3]float64{4: {1.67, 11.7, .938}, 5: {1.61, 13.4, .940}, 6: {1.52, 13.2, .943}}},
		{"chwbl-1.25", [7][3]float64{{3.46, 17.7, .086}, {5.08, 38, .189}, {10.4, 27, .136}, {7.39, 24, .324}}},
		{"sglang-cache-aware", [7][3]float64{{6.58, 22, .106}, {4.52, 34, .215}, {12.4, 30, .119}, {6.74, 21, .355}, {1.53, 12.9, .953}, {2.33, 16.2, .942}, {1.54, 14.5, .958}}},
		{"aibrix-prefix-cache", [7][3]float64{{1.88, 14.1, .104}, {2.23, 25, .233}, {8.22, 24, .111}, {3.02, 15.0, .378}, {2.32, 12.4, .912}, {2.89, 14.9, .902}, {2.05, 13.9, .928}}},
		{"gie-3-2-2-2", [7][3]float64{{1.30, 14.1, .115}, {1.66, 22, .268}, {9.72, 29, .111}, {2.77, 10.3, .503}, {1.08, 11.5, .959}, {1.25, 13.3, .956}, {1.02, 13.1, .961}}},
		{"dualmap", [7][3]float64{{2.70, 17.7, .107}, {2.73, 36, .248}, {9.04, 25, .167}, {2.40, 12.2, .497}}},
		{"two-tier-8", [7][3]float64{{1.92, 13.9, .109}, {2.16, 23, .247}, {8.03, 23, .131}, {2.79, 11.8, .437}, {.98, 11.2, .959}, {1.28, 13.1, .956}, {1.21, 13.1, .958}}},
		{"token-aware-18s", [7][3]float64{{1.05, 14.5, .105}, {1.12, 24, .252}, {1.72, 11.0, .241}, {1.17, 8.3, .523}, {1.05, 11.9, .958}, {1.33, 14.4, .950}, {.95, 14.1, .960}}},
		{"token-aware-2s", [7][3]float64{{1.01, 14.9, .092}, {1.04, 29, .206}, {3.81, 19.2, .139}, {1.68, 12.4, .427}, {.95, 11.9, .953}, {1.15, 13.9, .950}, {.91, 14.3, .956}}},
		{rivalRule, [7][3]float64{{1.09, 15.0, .071}, {1.31, 35, .152}, {5.61, 25, .107}, {3.96, 34, .263}, {4.78, 17.4, .724}, {6.95, 28, .638}, {2.82, 16.2, .850}}},
		{"dynamo:weight=4", [7][3]float64{{.99, 14.7, .081}, {1.17, 34, .164}, {4.71, 24, .112}, {1.93, 15.8, .349}, {1.22, 11.2, .934}, {1.77, 14.4, .907}, {1.34, 13.1, .929}}},
		{"dynamo:weight=32", [7][3]float64{{.96, 14.6, .086}, {1.05, 30, .181}, {5.87, 23, .101}, {1.93, 14.8, .380}, {.95, 11.3, .949}, {1.15, 13.6, .948}, {.96, 13.0, 0}}}, // one value is missing
		{"dynamo-agentic", [7][3]float64{{.97, 14.0, .090}, {1.04, 27, .194}, {4.48, 22, .122}, {1.44, 10.7, .427}, {1.13, 10.9, .945}, {1.41, 13.2, .935}, {1.46, 13.0, .932}}},
		{"lmetric", [7][3]float64{{1.00, 13.5, .085}, {1.06, 28, .183}, {7.23, 24, .084}, {1.68, 13.3, .359}, {1.12, 11.4, .939}, {1.38, 13.7, .932}, {1.10, 13.1, .943}}},
		{"predicted_ttft", [7][3]float64{{.97, 14.3, .089}, {1.01, 27, .200}, {4.15, 21, .122}, {1.36, 10.2, .443}, {.92, 11.3, .960}, {1.07, 13.4, .956}, {.91, 13.1, .959}}},
		{"predicted_ttft:alpha=.1", [7][3]float64{{1.00, 12.9, .095}, {1.00, 21, .232}, {1.83, 9.8, .196}, {1.00, 6.8, .470}, {.94, 11.1, .959}, {1.05, 13.1, .957}, {.95, 12.7, .959}}},
		{"predicted_ttft:alpha=.25", [7][3]float64{{1.12, 12.5, .099}, {1.11, 20, .242}, {1.96, 8.7, .212}, {1.14, 6.6, .484}, {.95, 11.3, .958}, {1.05, 12.9, .958}, {1.02, 12.9, .959}}},
		{"tokens", [7][3]float64{{.97, 13.3, .092}, {.96, 23, .225}, {2.05, 12.1, .174}, {1.19, 8.2, .444}, {.96, 11.3, .951}, {1.08, 13.2, .953}, {.96, 13.3, .954}}},
		{defaultRule, [7][3]float64{{1.02, 12.8, .098}, {1.02, 21, .236}, {1.65, 8.5, .202}, {1.01, 6.7, .482}, {.95, 11.2, .958}, {1.06, 13.0, .958}, {.92, 12.7, .960}}},
		{oracleRule, [7][3]float64{{1.04, 12.1, .113}, {.95, 18.6, .271}, {1.38, 7.0, .257}, {.79, 5.6, .525}, {.72, 9.5, .961}, {.76, 11.1, .961}, {.75, 11.1, .961}}},
	}
}

// cells are the seven of the baseline table, in its order.
func (b *PolicyBench) cells() []cell {
	return []cell{
		b.chatCell(1.5, 600), b.chatCell(2, 2000), b.syntheticCell(1.5, 600), b.syntheticCell(2, 2000),
		b.agenticCell(32, 1334), b.agenticCell(64, 1334), b.agenticCell(64, 5000),
	}
}

// noise returns the relative noise of the values of a rule in one of the cells.
func noise(rule string, cell int) float64 {
	switch {
	case cell >= 4:
		return noiseAgentic
	case rule == "two-tier-8" && cell >= 2:
		return noiseTwoTier
	default:
		return noiseOpen
	}
}

// Deviation is a value of the baseline table that was not met within its noise.
type Deviation struct {
	Rule     string  `json:"rule"`
	Cell     string  `json:"cell"`
	What     string  `json:"what"`
	Baseline float64 `json:"baseline"`
	Measured Range   `json:"measured"`
	// Why is the experiment that gave the value within its noise, and Then what it
	// gave; "" if none did.
	Why  string `json:"why,omitempty"`
	Then Range  `json:"then"`

	cell int
}

// values are what the table has of a rule in a cell, in its order.
func (m *Measured) values() [3]Range { return [3]Range{m.TTFT, m.E2E, m.HitRate} }

var valueNames = [3]string{"TTFT", "E2E", "hits"} //nolint:gochecknoglobals // a table

// met says whether a value of the table lies within what was measured, widened by
// the noise. The table rounds to two or three digits.
func met(want float64, got Range, noise float64) bool {
	slack := noise*want + math.Pow(10, math.Floor(math.Log10(want))-1)/2
	return want >= got.Min-slack && want <= got.Max+slack
}

// deviations compares with the baseline table. It returns how many values there
// are, and those that were not met.
func deviations(cells []cell, all []Measured) (values int, out []Deviation) {
	for _, b := range baselines() {
		for i, c := range cells {
			m := find(all, c.name, b.rule)
			if m == nil {
				continue
			}
			for j, got := range m.values() {
				want := b.cells[i][j]
				if want == 0 {
					continue
				}
				if values++; !met(want, got, noise(b.rule, i)) {
					out = append(out, Deviation{Rule: b.rule, Cell: c.name, What: valueNames[j], Baseline: want, Measured: got, cell: i})
				}
			}
		}
	}
	return values, out
}

// manySeeds is for what three seeds are too few for.
const manySeeds = 10

// explain looks for what makes the difference of each deviation. The experiments are
// the same for all of them: more seeds; then also the rule as the sketch ran it. The
// first that gives the value within its noise is the reason.
func (b *PolicyBench) explain(ctx context.Context, cells []cell, off []Deviation) error {
	wide := *b
	wide.Seeds = manySeeds
	for _, e := range []struct {
		why string
		as  func(rule string) string
	}{
		{"ten seeds", func(rule string) string { return rule }},
		{"ten seeds, ties and inputs as the sketch took them", asSketched},
	} {
		for i, c := range cells {
			var rules []string
			for _, d := range off {
				if as := e.as(d.Rule); d.cell == i && d.Why == "" && as != "" && !slices.Contains(rules, as) {
					rules = append(rules, as)
				}
			}
			if len(rules) == 0 {
				continue
			}
			all, err := wide.play(ctx, []cell{c}, rules)
			if err != nil {
				return err
			}
			for k := range off {
				d := &off[k]
				m := find(all, c.name, e.as(d.Rule))
				if d.cell != i || d.Why != "" || m == nil {
					continue
				}
				if d.Then = m.values()[slices.Index(valueNames[:], d.What)]; met(d.Baseline, d.Then, noise(d.Rule, i)) {
					d.Why = e.why
				}
			}
		}
	}
	return nil
}
