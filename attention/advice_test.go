// SPDX-License-Identifier: Apache-2.0

package attention_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// section returns a section of a page of the documents, without its subsections.
func section(t *testing.T, page, title string) string {
	t.Helper()
	text, err := os.ReadFile("../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "\n"+title+"\n")
	if !found {
		t.Fatalf("docs/%s has no section %s", page, title)
	}
	rest, _, _ = strings.Cut(rest, "\n#")
	return rest
}

// named returns the first cells of the rows of all tables in a text that match a pattern.
func named(t *testing.T, text, pattern string, least int) (all []string) {
	t.Helper()
	for _, m := range regexp.MustCompile("(?m)^\\| `?("+pattern+")`? \\|").FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	if len(all) < least {
		t.Fatalf("the table has %d rows, want at least %d: %q", len(all), least, all)
	}
	return all
}

// everything returns one state for each thing that can need attention.
func everything(t *testing.T) (states []attention.State) {
	worker := func(change func(*attention.Worker)) {
		w := healthy(1)
		change(&w)
		states = append(states, attention.State{Workers: []attention.Worker{w}})
	}
	for _, what := range named(t, section(t, "workers.md", "### Faults of workers"), "[a-z_]+", 13)[1:] { // without the title
		worker(func(w *attention.Worker) { w.Faults = []router.Fault{{What: what, Text: "the values differ"}} })
	}
	for _, health := range named(t, section(t, "workers.md", "## Health"), "degraded|starting|unhealthy|not_ready|expired", 5) {
		worker(func(w *attention.Worker) { w.Health = health })
		worker(func(w *attention.Worker) { w.Health, w.HealthCause = health, "timeout: no answer" })
	}
	worker(func(w *attention.Worker) { w.HealthCause = "timeout: no answer" })
	for _, events := range named(t, section(t, "protocol.md", "### States of a rank"), "partial|suspect|block_size_mismatch|none", 4) {
		for _, transport := range []string{"zmq", "nats"} {
			worker(func(w *attention.Worker) {
				w.KVEvents, w.Transport, w.BlockSize = indexer.State(events), transport, 16
				w.EventsLevel, w.EventsText = router.EventsState(&w.WorkerState, false)
				if w.EventsLevel != router.EventsFault {
					t.Fatalf("the state %s is no fault", events)
				}
			})
		}
	}
	worker(func(w *attention.Worker) { // it was connected
		w.KVEvents, w.Transport, w.CachedBlocks = "none", "zmq", 7
		w.EventsLevel, w.EventsText = router.EventsState(&w.WorkerState, false)
	})
	worker(func(w *attention.Worker) { w.Failing, w.AvoidedSince, w.AvoidedFor = true, start, "it answered 503" })
	worker(func(w *attention.Worker) { w.AvoidedSince, w.AvoidedFor = start, "it answered 503" })
	worker(func(w *attention.Worker) { w.Audit = &router.AuditState{Departs: true} })
	for _, state := range []fleet.Departure{fleet.Lost, fleet.Unresolved} {
		states = append(states, attention.State{Left: []attention.LeftWorker{{Left: fleet.Left{ID: 1, State: state}, Text: "left"}}})
	}
	model := func(m router.ModelState) {
		m.Model = "m"
		states = append(states, attention.State{Workers: []attention.Worker{healthy(1)}, Models: []router.ModelState{m}})
	}
	model(router.ModelState{Checks: router.ChecksDrift})
	model(router.ModelState{Checks: router.ChecksDiffers, Classes: []confirm.ClassState{{Class: "chat", Unconfirmed: true}}})
	model(router.ModelState{TokenState: router.TokenState{TokenMode: tokenizer.Bytes, Why: "the template is unknown"}})
	model(router.ModelState{TokenState: router.TokenState{TokenMode: tokenizer.Bytes, TokenReason: tokenizer.NoTokenizer, Why: "no folder"}})
	replica := func(r attention.Replica) { states = append(states, attention.State{Replica: r}) }
	replica(attention.Replica{BusAway: true})
	replica(attention.Replica{Pending: []string{"seed"}})
	replica(attention.Replica{Refused: "line 3"})
	replica(attention.Replica{Kubernetes: []pods.State{{Source: "pods a", Error: "status 403"}, {Source: "pods b", Problems: []string{"pod x: bad"}}}})
	for _, check := range []string{"workers", "healthy_workers", "nats", "registry", "events", "event_store", "kubernetes", "other"} {
		replica(attention.Replica{Status: "degraded", Failed: []string{check}})
	}
	for _, what := range named(t, section(t, "envoy.md", "## Is kvroute used?"), "unused|bypassed|ignored|settings|unanswered", 5) {
		replica(attention.Replica{Envoy: []envoy.Fault{{What: what, Text: "Envoy sends no requests"}, {What: what, Text: "Envoy sends no requests: check that it can"}}})
	}
	var many attention.State
	for i := range 300 {
		w := healthy(uint64(i + 1))
		w.Health = "expired"
		many.Workers = append(many.Workers, w)
	}
	return append(states, many)
}

// Each thing that can need attention says what to do, once, and links to a section that exists.
func TestEachItemHasAdvice(t *testing.T) {
	seen := map[string]bool{"models": true, "workers": true, "": true} // of doctor alone
	for _, s := range everything(t) {
		log := attention.NewLog("docs/")
		log.Observe(start, &attention.State{})
		log.Observe(start, &s)
		if len(log.Items()) == 0 {
			t.Errorf("nothing needs attention: %+v", s)
		}
		for _, item := range log.Items() {
			for _, i := range append([]attention.Item{item}, item.Also...) {
				seen[i.What] = true
				if i.Advice == "" || strings.Contains(i.Text, i.Advice) || !sectionExists(t, strings.TrimPrefix(i.Docs, "docs/")) {
					t.Errorf("%s %s: %q, what to do: %q, docs: %q", i.Kind, i.What, i.Text, i.Advice, i.Docs)
				}
			}
		}
	}
	for _, what := range slices.Sorted(maps.Keys(attention.Docs)) {
		if !seen[what] {
			t.Errorf("no item is about %s", what)
		}
	}
}

// The end of a fault's text that says what to do becomes its advice.
func TestAdviceIsCutFromTheText(t *testing.T) {
	for text, want := range map[string]string{
		"block_size is 8, and its engine has blocks of 16 tokens: set block_size to 16": "set block_size to 16",
		"it takes at most 5 tokens, w2 takes 9; start both with the same limit; or not": "start both with the same limit; or not",
		"it answers errors: 503, starting at noon":                                      "look at the process and the log of the worker; start it again, or remove it",
	} {
		w := healthy(1)
		w.Faults = []router.Fault{{What: "no_response", Text: "it gave no response: kvroute avoids it; start it, or remove it"}}
		if i := attention.JudgeWorker(&w, true)[0]; i.Cause != "it gave no response: kvroute avoids it" || !strings.Contains(i.Advice, "start it again") {
			t.Errorf("%+v", i)
		}
		w.Faults = []router.Fault{{What: "block_size", Text: text}}
		items := attention.JudgeWorker(&w, true)
		if len(items) != 1 || items[0].Advice != want || strings.Contains(items[0].Text+items[0].Cause, want) || !strings.HasPrefix(items[0].Text, "worker w1 has the fault block_size: "+items[0].Cause) {
			t.Errorf("%s: %+v", text, items)
		}
	}
}
