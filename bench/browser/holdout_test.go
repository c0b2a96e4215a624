// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"regexp"
	"strings"
	"testing"
)

// The comparison of --holdout-share on the page is that of the API: before there are enough requests for an interval,
// and afterwards.
func TestHoldoutIsThatOfTheAPI(t *testing.T) {
	s := serve(t, "", "--holdout-share", "0.5")
	s.engines(t, 2)
	p := open(t, s, 1280, 900, "light")
	p.live()
	p.wait(`document.querySelector('#holdout-note').dataset.value === '0.5'`)
	s.agree(t, p) // no model is compared yet
	next := 0
	for _, done := range []func(comparison object) bool{
		func(c object) bool { return c != nil },
		func(c object) bool { return c["difference_ms"] != nil },
	} {
		until(t, "the comparison", func() (string, bool) {
			next++
			s.chat(t, fmt.Sprint("chat-", next), 0, next) // each is a conversation, which has one side
			var live object
			s.read(t, "/v1/live", &live)
			models := list(live["holdout"].(object), "models")
			return fmt.Sprint(models), len(models) == 1 && done(models[0])
		})
		compared := s.agree(t, p)
		s.checkHoldout(t, p)
		t.Logf("%d figures of the page equal the API's after %d requests", compared, next)
	}
	p.looks("holdout")
}

// inSentence finds the times in the sentence of a comparison.
var inSentence = regexp.MustCompile(`[0-9.,]+ (?:µs|ms|s)\b`)

// checkHoldout compares the sentence, the exact figures and the bars of each comparison with the API.
func (s *service) checkHoldout(t *testing.T, p *page) {
	t.Helper()
	var live object
	s.read(t, "/v1/live", &live)
	shown := eval[map[string]struct {
		Text, Title string
		Bars        [2][]float64
	}](p, `Object.fromEntries([...document.querySelectorAll('#holdout figure')].map((figure) => [figure.dataset.key, {
		text: figure.querySelector('.lead').textContent, title: figure.querySelector('.lead').title,
		bars: [0, 1].map((side) => [...figure.querySelectorAll('.side-' + side)].map((e) => +e.getAttribute('height'))),
	}]))`)
	for _, m := range list(live["holdout"].(object), "models") {
		of, words := shown[m["model"].(string)], "No difference is computed yet"
		title := ""
		if m["difference_ms"] != nil {
			title = fmt.Sprintf("%s ms, %s to %s ms", m["difference_ms"], m["low_ms"], m["high_ms"])
			switch low, high := number(m, "low_ms"), number(m, "high_ms"); {
			case low > 0:
				words = "sooner"
			case high < 0:
				words = "later"
			default:
				words = "No difference is shown yet"
			}
			times := inSentence.FindAllString(of.Text, -1)
			wants := []string{"difference_ms", "low_ms", "high_ms"}
			if words == "later" { // the sentence has positive times, the smaller one first
				wants = []string{"difference_ms", "high_ms", "low_ms"}
			}
			for i, want := range wants {
				if value := fmt.Sprint(math.Abs(number(m, want))); len(times) != len(wants) || !nearTime(times[i], value) {
					t.Errorf("%s: the sentence is %q, want the %s %s", m["model"], of.Text, want, m[want])
				}
			}
		}
		if why, missing := m["why"].(string); missing {
			words = why
		}
		if !strings.Contains(of.Text, words) || of.Title != title {
			t.Errorf("%s: the sentence is %q with the title %q, want %q and %q", m["model"], of.Text, of.Title, words, title)
		}
		checkBars(t, of.Bars, list(m, "buckets"))
	}
}

// checkBars compares the heights of the bars in pixels with the shares of each side's requests in the buckets. The highest
// bar fills its half of the drawing.
func checkBars(t *testing.T, bars [2][]float64, buckets []object) {
	t.Helper()
	const half = 52
	var shares [2][]float64
	top := 0.
	for side, field := range []string{"routed", "round_robin"} {
		sum := 0.
		for _, b := range buckets {
			sum += number(b, field)
		}
		for _, b := range buckets {
			share := number(b, field) / max(1, sum)
			shares[side], top = append(shares[side], share), max(top, share)
		}
	}
	for side := range shares {
		if len(bars[side]) != len(buckets) || len(buckets) == 0 {
			t.Errorf("side %d has %d bars for %d buckets", side, len(bars[side]), len(buckets))
			continue
		}
		for i, share := range shares[side] {
			if want := half * share / top; math.Abs(bars[side][i]-want) > 0.06 {
				t.Errorf("side %d: bar %d has %v pixels, want %v", side, i, bars[side][i], want)
			}
		}
	}
}
