// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
)

func TestPlotIsWellFormed(t *testing.T) {
	for name, p := range map[string]Plot{
		"empty":     {Title: "nothing"},
		"one point": {Series: []Series{{Name: "a", Points: []Point{{1, 1}}}}},
		"log":       {LogY: true, Series: []Series{{Name: "a<b>&", Points: []Point{{1, .01}, {2, 0}, {3, 120}}, Marks: []string{"x", "y", "z"}}}},
		"odd":       {Series: []Series{{Points: []Point{{1, math.NaN()}, {2, math.Inf(1)}, {2, 5}, {3, 7}}}}},
	} {
		var b bytes.Buffer
		if err := p.WriteSVG(&b); err != nil {
			t.Fatal(err)
		}
		text := b.String()
		for dec := xml.NewDecoder(&b); ; {
			if _, err := dec.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, text)
			}
		}
		if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
			t.Errorf("%s has no numbers:\n%s", name, text)
		}
	}
}

func TestTicksAreRound(t *testing.T) {
	for _, a := range []axis{{low: 0, high: 1}, {low: 3, high: 60}, {low: -.5, high: .5}, {low: 1e5, high: 1.01e5}} {
		if ticks := a.ticks(); len(ticks) < 2 || len(ticks) > plotTicks+1 {
			t.Errorf("%v has the ticks %v", a, ticks)
		}
	}
}
