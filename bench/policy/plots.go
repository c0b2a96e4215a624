// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

// drawAll draws the plots.
func (b *Bench) drawAll(dir string, axes map[string][]Measured) {
	if dir == "" {
		return
	}
	bench.NoError(os.MkdirAll(dir, 0o755))
	for _, name := range []string{"chat", "synthetic", "generated"} {
		p := &replay.Plot{Title: "Mean time to first token, " + name + " trace, 8 workers of 32B", X: "% of the load that the oracle bears", Y: "s", LogY: true}
		for _, rule := range []string{"round-robin", rivalRule, defaultRule, oracleRule} {
			s := replay.Series{Name: shortName(rule)}
			for i, m := range of(axes["load, "+name], rule) {
				s.Points = append(s.Points, replay.Point{X: 100 * levels[i], Y: m.TTFT.Mean})
			}
			p.Series = append(p.Series, s)
		}
		draw(filepath.Join(dir, "ttft-"+name+".svg"), p)
	}
	p := &replay.Plot{Title: "What alpha buys: first token against the tokens after it", X: "mean time between tokens, ms", Y: "mean TTFT, s"}
	for _, cell := range b.recorded(2, 2000) {
		s := replay.Series{Name: cell.name}
		for _, alpha := range alphas {
			m := find(axes[alphaAxis], cell.name, alphaRule(alpha))
			s.Points = append(s.Points, replay.Point{X: m.TPOT.Mean, Y: m.TTFT.Mean})
			s.Marks = append(s.Marks, fmt.Sprintf("%g", alpha))
		}
		p.Series = append(p.Series, s)
	}
	draw(filepath.Join(dir, "alpha.svg"), p)
}

func shortName(rule string) string {
	if rule == defaultRule {
		return "tokens + attention"
	}
	return rule
}

// of returns what a rule did, in the order of the cells.
func of(all []Measured, rule string) (out []Measured) {
	for i := range all {
		if all[i].Rule == rule {
			out = append(out, all[i])
		}
	}
	return out
}

func draw(name string, p *replay.Plot) {
	file := bench.Must(os.Create(name))
	bench.NoError(errors.Join(p.WriteSVG(file), file.Close()))
}
