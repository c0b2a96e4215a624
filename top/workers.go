// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/router"
)

// tone says how bad the state of a worker is.
type tone int

const (
	good tone = iota
	quiet
	warn
	bad
)

// row is a worker in the table, in the words of the dashboard: see Workers.health in dashboard/workers.js.
type row struct {
	*api.Worker
	label, health, events string
	tone                  tone
}

// order is an order of workers: the largest figure first, then by name.
type order struct {
	name   string
	figure func(*row) int
}

func orders() []order {
	return []order{
		{"health", func(r *row) int { return int(r.tone) }},
		{"name", func(*row) int { return 0 }},
		{"active requests", func(r *row) int { return r.ActiveRequests }},
		{"pending tokens", func(r *row) int { return r.PendTokens }},
		{"cached blocks", func(r *row) int { return r.CachedBlocks + r.GuessedBlocks }},
		{"routed requests", func(r *row) int { return int(r.Routed) }},
		{"failures", func(r *row) int { return int(r.Failures) }},
	}
}

// rows returns the workers in an order.
func (p *picture) rows(by int) []row {
	items := make(map[router.Worker][]*attention.Item)
	for i := range p.Attention {
		if item := &p.Attention[i]; item.Worker != nil && item.Kind == attention.OfWorker {
			items[*item.Worker] = append(items[*item.Worker], item)
			for j := range item.Also {
				items[*item.Worker] = append(items[*item.Worker], &item.Also[j])
			}
		}
	}
	all := make([]row, 0, len(p.Workers))
	for i := range p.Workers {
		w := &p.Workers[i]
		r := row{Worker: w, label: w.Worker.Label(w.Name)}
		if w.Group != "" {
			r.label = "group " + w.Group
		}
		r.setEvents()
		r.setHealth(items[w.Worker])
		all = append(all, r)
	}
	figure := orders()[by].figure
	slices.SortFunc(all, func(a, b row) int {
		return cmp.Or(cmp.Compare(figure(&b), figure(&a)), compareNames(a.label, b.label))
	})
	return all
}

// compareNames compares names, and numbers within them as numbers: worker-2 comes before worker-10.
func compareNames(a, b string) int {
	whole := strings.Compare(a, b)
	for a != "" && b != "" {
		x, y := digits(a), digits(b)
		if len(x) > 0 && len(y) > 0 {
			n, m := strings.TrimLeft(x, "0"), strings.TrimLeft(y, "0")
			if c := cmp.Or(cmp.Compare(len(n), len(m)), strings.Compare(n, m)); c != 0 {
				return c
			}
			a, b = a[len(x):], b[len(y):]
			continue
		}
		if a[0] != b[0] {
			return cmp.Compare(a[0], b[0])
		}
		a, b = a[1:], b[1:]
	}
	return cmp.Or(cmp.Compare(len(a), len(b)), whole)
}

// digits returns the digits that a text begins with.
func digits(s string) string { return s[:len(s)-len(strings.TrimLeft(s, "0123456789"))] }

// setHealth sets the health with the words of the items about the worker, and the tone.
func (r *row) setHealth(items []*attention.Item) {
	switch r.Health {
	case router.Unhealthy.String(), router.Expired.String():
		r.tone = bad
	case router.Degraded.String(), router.Starting.String():
		r.tone = max(r.tone, warn)
	case router.NotReady.String():
		r.tone = max(r.tone, quiet)
	}
	words := []string{strings.ReplaceAll(r.Health, "_", " ")}
	if r.Draining {
		words = append(words, "draining")
		r.tone = max(r.tone, quiet)
	}
	add := func(what string) {
		if what != "health" && !slices.Contains(words, what) {
			words = append(words, what)
		}
	}
	for _, item := range items {
		add(item.What)
		r.tone = max(r.tone, warn)
		if item.Level == attention.Fault {
			r.tone = bad
		}
	}
	for i := range r.Faults {
		add(r.Faults[i].What)
		r.tone = bad
	}
	if r.Failing {
		r.tone = max(r.tone, warn)
	}
	r.health = [...]string{"● ", "◌ ", "▲ ", "✕ "}[r.tone] + strings.Join(words, ", ")
}

// setEvents sets the state of the events, and the tone that it has.
func (r *row) setEvents() {
	events := string(r.KVEvents)
	switch {
	case r.Summary != nil && r.Summary.Stale:
		events, r.tone = "stale", warn
	case r.NeverHeard:
		events = "never heard"
	case r.Audit != nil && r.Audit.Departs:
		events, r.tone = events+", departs", warn
	case r.Audit != nil && r.Audit.Rule != "":
		events += ", rule " + r.Audit.Rule
	}
	if r.EventsLevel == router.EventsFault {
		events, r.tone = "! "+events, warn
	}
	r.events = events
}

// workerTable returns the titles and a line for each worker in an order, and the tone of each line.
func (p *picture) workerTable(by, width int) (lines []string, tones []tone) {
	rows := [][]string{{
		"worker", "health", "active", "pending", " cached", " routed", "failed", "events", "model", "address",
	}}
	tones = []tone{good}
	for _, r := range p.rows(by) {
		tones = append(tones, r.tone)
		rows = append(rows, []string{
			r.label, r.health, fmt.Sprintf("%6d", r.ActiveRequests), fmt.Sprintf("%7d", r.PendTokens),
			fmt.Sprintf("%7d", r.CachedBlocks+r.GuessedBlocks), fmt.Sprintf("%7d", r.Routed),
			fmt.Sprintf("%6d", r.Failures), r.events, r.Model, r.Address.String(),
		})
	}
	return table(rows, width), tones
}
