// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
)

const (
	// window is the time over which rates are averaged, in seconds.
	window = 10
	// maxCell limits the characters of a cell, and maxID those of the id of a request, which fits.
	maxCell, maxID = 40, 80
	// maxModels limits the lines about models.
	maxModels = 5
)

// picture is what is known of a kvroute: the sections of /v1/live. A kvroute may lack some.
type picture struct {
	Replica   *api.Replica       `json:"replica"`
	Workers   []api.Worker       `json:"workers"`
	Left      []api.LeftWorker   `json:"left"`
	Decisions []api.Decision     `json:"decisions"`
	History   []outcomes.Sample  `json:"history"` // the newest ones, oldest first
	Attention []attention.Item   `json:"attention"`
	Benefit   []outcomes.Benefit `json:"benefit"`
	Holdout   *outcomes.Holdout  `json:"holdout"`
}

// apply applies a JSON object of sections.
func (p *picture) apply(sections []byte) error {
	var n picture
	if err := json.Unmarshal(sections, &n); err != nil {
		return fmt.Errorf("this version of kvroute top cannot read /v1/live: %w", err)
	}
	p.Replica = cmp.Or(n.Replica, p.Replica)
	if n.Workers != nil {
		p.Workers = n.Workers
	}
	if n.Left != nil {
		p.Left = n.Left
	}
	if n.Decisions != nil {
		p.Decisions = n.Decisions
	}
	if n.Attention != nil {
		p.Attention = n.Attention
	}
	if n.Benefit != nil {
		p.Benefit = n.Benefit
	}
	p.Holdout = cmp.Or(n.Holdout, p.Holdout)
	for _, sample := range n.History { // after a new connection known ones, too
		if last := len(p.History) - 1; last < 0 || p.History[last].TimeMS < sample.TimeMS {
			p.History = append(p.History, sample)
		}
	}
	p.History = p.History[max(0, len(p.History)-window):]
	return nil
}

// head returns the lines above the tables.
func (p *picture) head() []string {
	r := cmp.Or(p.Replica, &api.Replica{})
	first := []string{"kvroute " + cmp.Or(r.Replica, strconv.FormatUint(r.RouterID, 10)), r.Version, r.Ready.Status}
	for _, check := range slices.Sorted(maps.Keys(r.Ready.Checks)) {
		if !r.Ready.Checks[check] {
			first = append(first, "check failed: "+check)
		}
	}
	lines := append([]string{strings.Join(first, "  "), p.rates(r.NowMS)}, p.models()...)
	if len(r.Peers) > 0 {
		active := []string{fmt.Sprintf("active requests of replicas  %d here", r.ActiveRequests)}
		for _, peer := range r.Peers {
			active = append(active,
				fmt.Sprintf("%d of %s", peer.ActiveRequests, cmp.Or(peer.Replica, strconv.FormatUint(peer.RouterID, 10))))
		}
		lines = append(lines, strings.Join(active, "  "))
	}
	return append(append(lines, p.notices()...), "")
}

// models returns a line for each model and router group: what routing by cache saves by estimate, and for each model
// the measured difference from round robin.
func (p *picture) models() (lines []string) {
	for i := range p.Benefit {
		b := &p.Benefit[i]
		if i == maxModels {
			lines = append(lines, "and "+counted(len(p.Benefit)-i, "more model"))
			break
		}
		name := clip(b.Model, maxCell)
		if b.Group != "" {
			name += " on group " + clip(b.Group, maxCell)
		}
		line := fmt.Sprintf("%s  no estimate of what is saved: %s", name, b.Why)
		if b.SavedShare != nil {
			line = fmt.Sprintf("%s  saves %s of the prefill by estimate", name, percent(*b.SavedShare, 1))
		}
		if b.SavedShare != nil && b.Rated > 0 {
			line += fmt.Sprintf(", %.0f ms of each first token", b.SavedTime)
		}
		lines = append(lines, line)
	}
	if p.Holdout == nil {
		return lines
	}
	for i := range p.Holdout.Models[:min(len(p.Holdout.Models), maxModels)] {
		c := &p.Holdout.Models[i]
		line := fmt.Sprintf("%s  mean TTFT %.0f ms, of round-robin requests %.0f ms",
			clip(c.Model, maxCell), c.Routed.Mean, c.RoundRobin.Mean)
		if c.Difference != nil {
			line += fmt.Sprintf(": %.0f ms more, %.0f to %.0f with %.0f %% confidence",
				*c.Difference, *c.Low, *c.High, 100*p.Holdout.Confidence)
		} else {
			line += " (" + c.Why + ")"
		}
		lines = append(lines, line)
	}
	return lines
}

// maxNotices limits the lines about what needs attention, and maxAlso the further ones of one item.
const maxNotices, maxAlso = 6, 3

// notices returns a line for each item that needs attention, with what to do, and a line for each of its further causes.
func (p *picture) notices() (lines []string) {
	for i := range p.Attention {
		if len(lines) >= maxNotices {
			return append(lines, fmt.Sprintf("! and %d more", len(p.Attention)-i))
		}
		item := &p.Attention[i]
		lines = append(lines, strings.TrimSuffix("! "+notice(item)+"; "+item.Advice, "; "))
		for j := range item.Also {
			if j == maxAlso {
				lines = append(lines, fmt.Sprintf("!   and %d more", len(item.Also)-j))
				break
			}
			lines = append(lines, "!   also "+notice(&item.Also[j]))
		}
	}
	return lines
}

// notice returns the text of an item, with the time when it began.
func notice(item *attention.Item) string {
	if item.Since.IsZero() {
		return item.Text
	}
	return item.Since.Local().Format(time.TimeOnly) + " " + item.Text
}

// rates returns the figures of the last 10 s.
func (p *picture) rates(nowMS int64) string {
	var requests, failed, prompt, cached int
	rate, ttft := "-", "-"
	for _, s := range p.History {
		if s.TimeMS > nowMS-1000*window {
			requests, failed, prompt, cached = requests+s.Requests, failed+s.Failed, prompt+s.PromptTokens, cached+s.CachedTokens
			if s.TTFT > 0 {
				ttft = fmt.Sprintf("mean %.0f ms, p90 %.0f ms", s.TTFT, s.TTFTP90)
			}
		}
	}
	if len(p.History) > 0 {
		rate = fmt.Sprintf("%.1f  failed/s  %.1f", float64(requests)/window, float64(failed)/window)
	}
	return fmt.Sprintf("requests/s  %s  TTFT  %s  cached  %s", rate, ttft, percent(float64(cached), float64(prompt)))
}

// decisionTable returns the titles and a line for each decision, the newest first.
func (p *picture) decisionTable(width int) []string {
	rows := [][]string{{"time", "worker", " prompt", "cached", "TTFT ms", "reason", "model", "request"}}
	for i := range p.Decisions {
		d := &p.Decisions[i]
		to := d.Worker.Label(d.WorkerName)
		if d.Prefill != nil {
			to = d.Prefill.Worker.Label(d.Prefill.WorkerName) + " > " + to
		}
		rows = append(rows, []string{
			d.Time.Local().Format(time.TimeOnly), to, fmt.Sprintf("%7d", d.PromptTokens),
			fmt.Sprintf("%6s", percent(float64(d.CachedTokens), float64(d.PromptTokens))),
			fmt.Sprintf("%7s", firstToken(&d.Decision)), string(d.Reason), d.Model, d.ID,
		})
	}
	return table(rows, width)
}

// firstToken returns the time to the first token of a decision in ms. Nobody saw one with a mark: "~" marks one that was
// inferred, "<" the time of the whole response.
func firstToken(d *router.Decision) string {
	if d.FirstToken.IsZero() {
		return "-"
	}
	mark := ""
	switch d.FirstTokenBy { //nolint:exhaustive // the others were seen
	case router.SignOrder, router.SignRate:
		mark = "~"
	case router.SignEnd:
		mark = "<"
	}
	return mark + strconv.FormatInt(d.FirstToken.Sub(d.Time).Milliseconds(), 10)
}

// text returns the whole picture as text.
func (p *picture) text() string {
	workers, _ := p.workerTable(0, 0)
	lines := slices.Concat(p.head(), workers, []string{""}, p.decisionTable(0))
	for i := range lines {
		lines[i] = clip(lines[i], len(lines[i])) + "\n"
	}
	return strings.Join(lines, "")
}

// table aligns the cells of rows, and leaves out columns at the right until the lines fit into width;
// 0 = any width.
func table(rows [][]string, width int) []string {
	for n := len(rows[0]); ; n-- {
		var text strings.Builder
		w := tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
		for _, row := range rows {
			for i, cell := range row[:n] {
				most, end := maxCell, "\t"
				if rows[0][i] == "request" {
					most = maxID
				}
				if i == n-1 {
					end = "\n"
				}
				fmt.Fprint(w, clip(cell, most), end)
			}
		}
		_ = w.Flush() // a builder takes everything
		lines := strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
		if n == 1 || width == 0 || !slices.ContainsFunc(lines, func(l string) bool { return utf8.RuneCountInString(l) > width }) {
			return lines
		}
	}
}

// clip returns at most n characters of a text, without control characters: the text may come from
// a worker's record.
func clip(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:max(0, n-1)]) + "…"
}

func percent(part, of float64) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f %%", 100*part/of)
}

// counted returns a number with its noun.
func counted(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprint(n, " ", noun)
}
