// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"fmt"
	"html"
	"io"
	"math"
)

// Plot is a line chart.
type Plot struct {
	Title, X, Y string // captions
	LogY        bool   // values of Y below or at 0 are left out
	Series      []Series
}

// Series is one line of a [Plot].
type Series struct {
	Name   string
	Points []Point // in the order in which they are joined
	Marks  []string
}

// Point is a point of a series.
type Point struct{ X, Y float64 }

// The canvas, in pixels.
const (
	plotWidth, plotHeight      = 720, 420
	plotLeft, plotRight        = 64, 190 // margins; the legend is in the right one
	plotTop, plotBottom        = 40, 52
	plotInnerX, plotInnerY     = plotWidth - plotLeft - plotRight, plotHeight - plotTop - plotBottom
	plotTicks              int = 6
)

// lineColours tell the series apart, also for most of those who see fewer colours.
var lineColours = [...]string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"} //nolint:gochecknoglobals // a table

// WriteSVG draws the plot. The same plot gives the same bytes.
func (p *Plot) WriteSVG(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n",
		plotWidth, plotHeight, plotWidth, plotHeight)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", plotWidth, plotHeight)
	text(&b, plotLeft, 22, "start", 14, p.Title)
	text(&b, plotLeft+plotInnerX/2, plotHeight-12, "middle", 12, p.X)
	fmt.Fprintf(&b, `<g transform="translate(16 %d) rotate(-90)">`, plotTop+plotInnerY/2)
	text(&b, 0, 0, "middle", 12, p.Y)
	b.WriteString("</g>\n")

	x, y := p.scales()
	for _, v := range x.ticks() {
		at := plotLeft + x.at(v)*plotInnerX
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#e0e0e0"/>`+"\n", at, plotTop, at, plotTop+plotInnerY)
		text(&b, at, plotTop+plotInnerY+18, "middle", 11, number(v))
	}
	for _, v := range y.ticks() {
		at := plotTop + (1-y.at(v))*plotInnerY
		fmt.Fprintf(&b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#e0e0e0"/>`+"\n", plotLeft, at, plotLeft+plotInnerX, at)
		text(&b, plotLeft-8, at+4, "end", 11, number(v))
	}
	fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#404040"/>`+"\n", plotLeft, plotTop, plotInnerX, plotInnerY)
	for i, s := range p.Series {
		colour := lineColours[i%len(lineColours)]
		var path bytes.Buffer
		for j, q := range s.Points {
			if !p.drawn(q) {
				continue
			}
			cx, cy := plotLeft+x.at(q.X)*plotInnerX, plotTop+(1-y.at(q.Y))*plotInnerY
			fmt.Fprintf(&path, "%.1f,%.1f ", cx, cy)
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", cx, cy, colour)
			if j < len(s.Marks) {
				text(&b, cx+6, cy-6, "start", 10, s.Marks[j])
			}
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", bytes.TrimSpace(path.Bytes()), colour)
		row := float64(plotTop + 10 + 20*i)
		fmt.Fprintf(&b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="%s" stroke-width="3"/>`+"\n",
			plotLeft+plotInnerX+12, row, plotLeft+plotInnerX+32, row, colour)
		text(&b, plotLeft+plotInnerX+38, row+4, "start", 12, s.Name)
	}
	b.WriteString("</svg>\n")
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("replay: write plot: %w", err)
	}
	return nil
}

func text(b *bytes.Buffer, x, y float64, anchor string, size int, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" font-size="%d" fill="#202020">%s</text>`+"\n", x, y, anchor, size, html.EscapeString(s))
}

func number(v float64) string { return fmt.Sprintf("%.3g", v) }

func (p *Plot) drawn(q Point) bool {
	return !math.IsNaN(q.X+q.Y) && !math.IsInf(q.X+q.Y, 0) && (!p.LogY || q.Y > 0)
}

// axis maps values to 0..1.
type axis struct {
	low, high float64
	log       bool
}

func (p *Plot) scales() (x, y axis) {
	x, y = axis{low: math.Inf(1), high: math.Inf(-1)}, axis{low: math.Inf(1), high: math.Inf(-1), log: p.LogY}
	for _, s := range p.Series {
		for _, q := range s.Points {
			if p.drawn(q) {
				x.low, x.high = min(x.low, q.X), max(x.high, q.X)
				y.low, y.high = min(y.low, q.Y), max(y.high, q.Y)
			}
		}
	}
	x.widen()
	if !y.log {
		y.low = min(0, y.low)
	}
	y.widen()
	return x, y
}

func (a *axis) widen() {
	switch {
	case a.low > a.high:
		a.low, a.high = 0, 1
		a.log = false
	case a.log:
		a.low, a.high = math.Pow(10, math.Floor(math.Log10(a.low))), math.Pow(10, math.Ceil(math.Log10(a.high)))
		if a.low == a.high {
			a.high *= 10
		}
	case a.low == a.high:
		a.low, a.high = a.low-.5, a.high+.5
	}
}

func (a *axis) at(v float64) float64 {
	if a.log {
		return math.Log(v/a.low) / math.Log(a.high/a.low)
	}
	return (v - a.low) / (a.high - a.low)
}

// ticks are round values within the axis.
func (a *axis) ticks() (out []float64) {
	if a.log {
		for v := a.low; v <= a.high*1.0001; v *= 10 {
			out = append(out, v)
		}
		return out
	}
	step := math.Pow(10, math.Floor(math.Log10((a.high-a.low)/float64(plotTicks))))
	for _, times := range []float64{1, 2, 5, 10} {
		if (a.high-a.low)/(step*times) <= float64(plotTicks) {
			step *= times
			break
		}
	}
	for k := math.Ceil(a.low/step - 1e-9); k*step <= a.high+step*1e-9; k++ {
		out = append(out, k*step)
	}
	return out
}
