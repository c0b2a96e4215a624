// SPDX-License-Identifier: Apache-2.0

package attention_test

import (
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/router"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func healthy(id uint64) attention.Worker {
	return attention.Worker{WorkerState: router.WorkerState{Worker: router.Worker{ID: id}, Name: fmt.Sprint("w", id), Model: "m", Health: "healthy"}, EventsLevel: router.EventsOK}
}

// what returns the items in short.
func what(items []attention.Item) (all []string) {
	for i := range items {
		var text strings.Builder
		text.WriteString(string(items[i].Level) + " " + items[i].What)
		for _, also := range items[i].Also {
			text.WriteString(", also " + also.What)
		}
		all = append(all, text.String())
	}
	return all
}

func texts(events []attention.Event) (all []string) {
	for _, e := range events {
		all = append(all, e.Time.Format(time.TimeOnly)+" "+string(e.Level)+" "+e.Text)
	}
	return all
}

// A worker that dies is named with cause, time and advice, until it serves again. The events have its whole story.
func TestStoryOfAWorker(t *testing.T) {
	log := attention.NewLog(attention.DocsOf("v1.2.3"))
	now := start
	s := attention.State{Workers: []attention.Worker{healthy(1), healthy(2)}}
	w := &s.Workers[1]
	observe := func(passed time.Duration) { now = now.Add(passed); log.Observe(now, &s) }
	observe(0)
	if items, events := log.Items(), log.Events(); len(items)+len(events) != 0 {
		t.Errorf("in the beginning: %v, %v", items, events)
	}
	w.Failing, w.AvoidedSince, w.AvoidedUntil, w.AvoidedFor = true, start.Add(500*time.Millisecond), start.Add(3*time.Second), "it gave no response"
	observe(time.Second)
	w.AvoidedFor = "it gave no response: connection refused" // a probe found it
	observe(time.Second)
	w.Failing = false
	for range 599 {
		observe(time.Second)
		items := log.Items()
		if len(items) != 1 || items[0].ID != 2 || items[0].Since != w.AvoidedSince || items[0].Cause != w.AvoidedFor || !strings.Contains(items[0].Text, "w2") ||
			!strings.Contains(items[0].Advice, "start it again") || items[0].Docs != "https://github.com/kvroute/kvroute/blob/v1.2.3/docs/troubleshooting.md#workerfailing" {
			t.Fatalf("after %v: %+v", now.Sub(start), items)
		}
	}
	w.Health, w.HealthSince = "degraded", now
	observe(time.Second)
	w.Health, w.HealthSince, w.Faults = "unhealthy", now, []router.Fault{{What: "silent", Text: attention.Silence + "connection refused at 10.0.0.2:80", Since: now}}
	observe(time.Second)
	if got := what(log.Items()); !slices.Equal(got, []string{"fault silent, also avoided"}) {
		t.Errorf("a dead worker: %v", got)
	}
	s.Left = []attention.LeftWorker{{Left: fleet.Left{ID: 2, Name: "w2", State: fleet.Lost, Time: now, Cause: "connection refused", Address: netip.MustParseAddrPort("10.0.0.2:80")}, Text: "left less than a minute ago: connection refused"}}
	s.Workers = s.Workers[:1]
	observe(time.Second)
	if got := log.Items(); len(got) != 1 || got[0].What != "left" || got[0].Text != "worker w2 at 10.0.0.2:80 left less than a minute ago: connection refused" {
		t.Errorf("a worker that left: %+v", got)
	}
	s.Left, s.Workers = nil, []attention.Worker{healthy(1), healthy(2)}
	observe(time.Second)
	s.Workers[1].AvoidedSince, s.Workers[1].AvoidedFor = now, "it answered 503"
	observe(time.Second)
	s.Workers[1] = healthy(2)
	observe(time.Second)
	s.Workers = s.Workers[:1]
	observe(time.Second)
	if len(log.Items()) != 0 {
		t.Errorf("in the end: %+v", log.Items())
	}
	want := []string{
		"03:14:13 note w2 was removed", "03:14:12 good w2 serves again", "03:14:10 note w2 failed a request: it answered 503", "03:14:10 good w2 came back",
		"03:14:08 fault w2 left without a word: connection refused", "03:14:07 fault w2 gives no sign of life: connection refused at 10.0.0.2:80", "03:14:06 note w2 is degraded", "03:04:05 note w2 refused a request: connection refused",
	}
	got := texts(log.Events())
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("events\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// While a worker is dead, its items replace each other, and no event says that it recovered.
func TestADeadWorkerDoesNotRecover(t *testing.T) {
	log := attention.NewLog("")
	now := start
	s := attention.State{Workers: []attention.Worker{healthy(1)}}
	w := &s.Workers[0]
	observe := func() { now = now.Add(time.Second); log.Observe(now, &s) }
	observe()
	fault := func(what string) { w.Faults = []router.Fault{{What: what, Text: what, Since: now}} }
	w.Failing, w.AvoidedSince, w.AvoidedUntil, w.AvoidedFor = true, now, now.Add(time.Minute), "it gave no response: connection refused"
	fault("no_response")
	observe()
	w.Health, w.HealthSince = "degraded", now
	observe()
	w.Failing, w.AvoidedSince, w.AvoidedUntil, w.AvoidedFor = false, time.Time{}, time.Time{}, ""
	observe()
	w.Health = "unhealthy"
	fault("silent")
	observe()
	for _, e := range log.Events() {
		if e.Level == attention.Good {
			t.Errorf("an event of a dead worker: %s", e.Text)
		}
	}
	s.Workers[0] = healthy(1)
	observe()
	if e := log.Events()[0]; e.Level != attention.Good {
		t.Errorf("the worker is healthy, and the last event is %q", e.Text)
	}
}

// Faults of a replica and of a model have no worker. They begin when they are seen first.
func TestReplicaAndModels(t *testing.T) {
	log := attention.NewLog("")
	s := attention.State{Workers: []attention.Worker{healthy(1)}, Replica: attention.Replica{BusAway: true}}
	for range 3 { // the time of its beginning is unknown
		log.Observe(start, &s)
		if i := log.Items(); len(i) != 1 || !i[0].Since.IsZero() || len(log.Events()) != 0 {
			t.Errorf("%+v", i)
		}
	}
	s.Replica.BusAway = false
	log.Observe(start, &s)
	s.Replica = attention.Replica{BusAway: true, Status: "degraded", Failed: attention.FailedChecks(map[string]bool{"registry": false, "events": true}), Envoy: []envoy.Fault{{What: "unused", Text: "Envoy sends no requests"}}, Pending: []string{"seed"}, Refused: "line 3"}
	s.Models = []router.ModelState{{Model: "m", Checks: router.ChecksDrift}}
	s.Workers[0].EventsLevel, s.Workers[0].EventsText, s.Workers[0].KVEvents = router.EventsFault, "events were lost", "suspect"
	s.Workers[0].Audit = &router.AuditState{Departs: true}
	log.Observe(start.Add(time.Second), &s)
	if got, want := what(log.Items()), []string{"fault bus", "fault envoy", "fault ready", "fault settings", "fault tokens", "fault events, also departs", "note settings"}; !slices.Equal(got, want) {
		t.Errorf("items %v, want %v", got, want)
	}
	for _, i := range log.Items() {
		if !i.Since.Equal(start.Add(time.Second)) || i.Docs == "" {
			t.Errorf("%s begins at %v, documented in %q", i.What, i.Since, i.Docs)
		}
	}
	log.Observe(start.Add(time.Minute), &attention.State{Workers: []attention.Worker{healthy(1)}})
	if got := log.Events(); len(got) != 17 || len(log.Items()) != 0 || got[0].Level != attention.Good {
		t.Errorf("%d events, %d items left", len(got), len(log.Items()))
	}
}

// A dead worker has one item, whatever sources have found something wrong with it, and in whatever order. What explains
// the others comes first; they keep their times, their links and their events.
func TestADeadWorkerHasOneItem(t *testing.T) {
	silent := router.Fault{What: "silent", Text: attention.Silence + "connection refused", Since: start.Add(15 * time.Second)}
	sockets := router.Fault{What: "event_socket_refused", Text: "tcp://10.0.0.2:5557: connection refused", Since: start.Add(time.Second)}
	address := router.Fault{What: "same_address", Text: "it has the address of w1"}
	for name, c := range map[string]struct {
		faults []router.Fault
		change func(*attention.Worker)
		want   string
	}{
		"a killed worker":               {[]router.Fault{sockets, silent}, func(w *attention.Worker) { w.AvoidedSince = start }, "fault silent, also event_socket_refused, also avoided"},
		"in another order":              {[]router.Fault{silent, address, sockets}, func(w *attention.Worker) { w.AvoidedSince = start }, "fault silent, also same_address, also event_socket_refused, also avoided"},
		"before its silence is a fault": {[]router.Fault{sockets}, func(w *attention.Worker) { w.Health, w.AvoidedSince = "degraded", start }, "fault event_socket_refused, also avoided, also health"},
		"lost events":                   {nil, func(w *attention.Worker) { w.EventsLevel, w.AvoidedSince = router.EventsFault, start }, "fault health, also events, also avoided"},
		"no response, also when tried": {
			[]router.Fault{address, {What: "no_response", Text: "x"}}, func(w *attention.Worker) { w.Health, w.Failing, w.AvoidedSince = "healthy", true, start }, "fault no_response, also same_address, also avoided",
		},
		"the same twice": {[]router.Fault{silent, silent}, nil, "fault silent"},
	} {
		log := attention.NewLog("docs/")
		s := attention.State{Workers: []attention.Worker{healthy(1), healthy(2), healthy(3)}}
		log.Observe(start, &s)
		w := &s.Workers[1]
		w.Health, w.HealthSince, w.Faults = "unhealthy", start.Add(15*time.Second), c.faults
		if c.change != nil {
			c.change(w)
		}
		log.Observe(start.Add(20*time.Second), &s)
		items := log.Items()
		if got := what(items); len(got) != 1 || got[0] != c.want || items[0].ID != 2 {
			t.Errorf("%s: %q, want %q", name, got, c.want)
			continue
		}
		whole := append([]attention.Item{items[0]}, items[0].Also...)
		for _, one := range whole {
			if one.Docs == "" || one.Since.IsZero() || one.Name != "w2" {
				t.Errorf("%s: %+v", name, one)
			}
		}
		causes := len(whole)
		if items[0].What == "no_response" { // the event of avoided says it
			causes--
		}
		if events := log.Events(); len(events) != causes {
			t.Errorf("%s: %d events, want one for each cause: %q", name, len(events), texts(events))
		}
	}
}

// A worker that misses probes is named before it is degraded. Its story has no recovery until it has recovered.
func TestStoryOfMissedProbes(t *testing.T) {
	log := attention.NewLog("")
	s := attention.State{Workers: []attention.Worker{healthy(1)}}
	w := &s.Workers[0]
	at := func(seconds int, health, cause string, faults ...router.Fault) {
		w.Health, w.HealthCause, w.Faults = health, cause, faults
		log.Observe(start.Add(time.Duration(seconds)*time.Second), &s)
	}
	at(0, "healthy", "")
	at(5, "healthy", "connection refused")
	if i := log.Items(); len(i) != 1 || i[0].What != "probes" || i[0].Cause != "connection refused" || !i[0].Since.Equal(start.Add(5*time.Second)) || i[0].Advice == "" {
		t.Errorf("after two missed probes: %+v", i)
	}
	at(8, "degraded", "connection refused")
	at(15, "unhealthy", "connection refused", router.Fault{What: "silent", Text: attention.Silence + "connection refused"})
	at(30, "healthy", "")
	at(40, "healthy", "timeout")
	at(43, "healthy", "")
	at(50, "unhealthy", "timeout", router.Fault{What: "silent", Text: attention.Silence + "timeout"})
	at(60, "healthy", "timeout") // an answer to a request; the next probe comes later
	at(61, "healthy", "")
	got := strings.Join(texts(log.Events()), "\n")
	if want := `03:05:06 good w1 answers probes of its health again
03:05:05 good w1 gives signs of life again
03:04:55 fault w1 gives no sign of life: timeout
03:04:48 good w1 answers probes of its health again
03:04:45 note w1 fails the probes of its health: timeout
03:04:35 good w1 gives signs of life again
03:04:20 fault w1 gives no sign of life: connection refused
03:04:10 note w1 fails the probes of its health: connection refused`; got != want {
		t.Errorf("events\n%s\nwant\n%s", got, want)
	}
}

// The events of a worker are not complete again because a worse item takes the place of the one about them.
func TestEventsEndWithoutRecovery(t *testing.T) {
	for _, worse := range []string{"event_socket_refused", "silent", "health"} {
		log := attention.NewLog("")
		s := attention.State{Workers: []attention.Worker{healthy(1)}}
		w := &s.Workers[0]
		at := func(seconds int, level router.EventsLevel, faults ...router.Fault) {
			w.EventsLevel, w.EventsText, w.Faults, w.Health = level, "kvroute is not connected", faults, "healthy"
			if worse == "health" && faults != nil {
				w.Faults, w.Health = nil, "degraded"
			}
			log.Observe(start.Add(time.Duration(seconds)*time.Second), &s)
		}
		at(0, router.EventsOK)
		at(1, router.EventsFault)
		at(4, router.EventsOff, router.Fault{What: worse, Text: "connection refused", Since: start.Add(4 * time.Second)})
		at(9, router.EventsOK)
		got := texts(log.Events())
		if len(got) != 3 || !strings.HasPrefix(got[0], "03:04:14 good w1 ") || strings.Contains(strings.Join(got, "\n"), "complete cache events again") {
			t.Errorf("%s: %q", worse, got)
		}
	}
}

// Texts of events are sentences: no names of faults, no times, no advice, and one event for all ranks and models of a worker.
func TestEventsAreSentences(t *testing.T) {
	docs, err := os.ReadFile("../docs/workers.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(docs), "### Faults of workers")
	table, _, _ = strings.Cut(table, "###")
	var faults []router.Fault
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|").FindAllStringSubmatch(table, -1) {
		faults = append(faults, router.Fault{What: m[1], Text: "10 probes failed; set it", Since: start})
	}
	if len(faults) < 10 {
		t.Fatalf("the table of faults has %d rows", len(faults))
	}
	log := attention.NewLog("")
	ranks := func() []attention.Worker {
		all := []attention.Worker{healthy(1), healthy(1), healthy(1)}
		all[1].DPRank, all[2].Model = 1, "other"
		return all
	}
	log.Observe(start, &attention.State{})
	log.Observe(start, &attention.State{Workers: ranks()})
	bad := ranks()
	for i := range bad {
		w := &bad[i]
		w.Faults, w.AvoidedSince, w.AvoidedFor = faults, start, "it answered 503"
		w.Health, w.HealthSince, w.HealthCause = "not_ready", start.Add(time.Duration(i)), "its pod is not ready"
		w.Audit = &router.AuditState{Departs: w.DPRank > 0}
	}
	log.Observe(start.Add(time.Second), &attention.State{Workers: bad, Replica: attention.Replica{Status: "degraded", Failed: []string{"events"}}})
	log.Observe(start.Add(5*time.Second), &attention.State{Workers: ranks()})
	seen := map[string]bool{}
	for _, e := range log.Events() {
		if seen[e.Text] || strings.Contains(e.Text, "_") || regexp.MustCompile(`fault|it is|set it|\d\d:\d\d|worker w`).MatchString(e.Text) {
			t.Errorf("an event is %q", e.Text)
		}
		seen[e.Text] = true
	}
	for _, want := range []string{"w1 joined", "w1 is not ready: its pod is not ready", "w1 gives no response to requests", "w1 gives no sign of life: 10 probes failed", "w1/1 caches other tokens than kvroute predicts", "the check events of kvroute fails"} {
		if !seen[want] {
			t.Errorf("no event %q in %q", want, texts(log.Events()))
		}
	}
}

// Each source of workers in Kubernetes has one item, in the words of the source, as long as something is wrong with it.
func TestSourcesInKubernetes(t *testing.T) {
	log := attention.NewLog("docs/")
	const rule = `status 403: pods is forbidden; kvroute's service account needs a Role in namespace models with the rule {apiGroups: [""], resources: [pods], verbs: [list, watch]}`
	now, s := start, attention.State{Replica: attention.Replica{Status: "degraded", Failed: []string{"kubernetes"}}}
	sources := func(states ...pods.State) []attention.Item {
		s.Replica.Kubernetes = states
		now = now.Add(time.Second)
		log.Observe(now, &s)
		return log.Items()
	}
	if got := what(sources(pods.State{Source: "pods models/app=llm"})); !slices.Equal(got, []string{"fault ready"}) {
		t.Errorf("before the first answer: %v", got)
	}
	since := now
	overlap, label := "pod models/a: pods models/app=llm selects it, too, and counts", `pod models/b: its label block-size is "large", want a number of tokens: 16 counts`
	bad := pods.State{Source: "pods models/app=llm", Listed: true, Error: rule, Since: since, Problems: []string{label}}
	items := sources(bad, pods.State{Source: "pods models/team=x", Listed: true, Problems: []string{overlap, label + "!"}}, pods.State{Source: "pods models/good", Listed: true, Ready: 1})
	if got := what(items); !slices.Equal(got, []string{"fault kubernetes, also kubernetes", "note kubernetes, also kubernetes"}) {
		t.Fatalf("items %v", got)
	}
	first, second := items[0], items[1]
	if want := "pods models/app=llm cannot be read since " + since.Format("15:04:05 UTC") + "; the known workers stay: " + rule; first.Text != want || first.Cause != rule || !first.Since.Equal(since) {
		t.Errorf("%+v, want %s", first, want)
	}
	if first.Also[0].Text != "pods models/app=llm: "+label || second.Text != "pods models/team=x: "+overlap || second.Also[0].Text != "pods models/team=x: "+label+"!" {
		t.Errorf("%+v", items)
	}
	for _, i := range []attention.Item{first, second} {
		if i.Kind != attention.OfReplica || i.Docs != "docs/troubleshooting.md#workers-in-kubernetes" || i.Advice == "" {
			t.Errorf("%+v", i)
		}
	}
	before := len(log.Events())
	bad.Error = "https://10.0.0.1: connection refused" // it still fails
	if items := sources(bad); items[0].Cause != bad.Error || len(log.Events()) != before+2 {
		t.Errorf("%+v; events %q", items, texts(log.Events()))
	}
	s.Replica.Failed = nil
	if items := sources(pods.State{Source: "pods models/app=llm", Listed: true, Ready: 2}); len(items) != 0 {
		t.Errorf("in the end %+v", items)
	}
	if e := log.Events()[0]; e.Level != attention.Good || !slices.Contains(texts(log.Events()), now.Format(time.TimeOnly)+" good pods models/app=llm can be read again") {
		t.Errorf("%q", texts(log.Events()))
	}
}

// Names of any length, and any number of workers with faults, take bounded memory.
func TestLogIsBounded(t *testing.T) {
	log := attention.NewLog("")
	long := strings.Repeat("\u202e<b>\x1b[31m", 400)
	for round := range 10 {
		var s attention.State
		for i := range 500 {
			w := healthy(uint64(i + 1))
			w.Name, w.Model = long, long
			if round%2 == 1 {
				w.Faults = []router.Fault{{What: "silent", Text: long}, {What: "silent", Text: "again"}}
			}
			s.Workers = append(s.Workers, w)
		}
		log.Observe(start.Add(time.Duration(round)*time.Second), &s)
	}
	items, events := log.Items(), log.Events()
	if len(items) != 257 || items[256].What != "more" || items[256].Text != "and 244 more" || len(events) != 200 {
		t.Errorf("%d items, %d events", len(items), len(events))
	}
	for _, i := range items[:256] {
		for _, one := range append([]attention.Item{i}, i.Also...) {
			if len(one.Text) > 1100 || len(one.Name) > 200 || one.Docs == "" || one.Since.IsZero() {
				t.Fatalf("an item has %d bytes of text and %d of name; %+v", len(one.Text), len(one.Name), i)
			}
		}
	}
	for _, e := range events {
		if len(e.Text) > 1100 || len(e.Name) > 200 {
			t.Fatalf("an event has %d bytes of text", len(e.Text))
		}
	}
}

// sectionExists reports whether a page of the documents has the section of a link.
func sectionExists(t *testing.T, link string) bool {
	t.Helper()
	file, section, _ := strings.Cut(link, "#")
	text, err := os.ReadFile("../docs/" + file)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		if section == regexp.MustCompile(`[^a-z0-9_-]`).ReplaceAllString(strings.ReplaceAll(strings.ToLower(m[1]), " ", "-"), "") {
			return true
		}
	}
	return false
}

// Each link leads to a section of the documents.
func TestSectionsExist(t *testing.T) {
	for what := range attention.Docs {
		if link := attention.SectionOf(what); !sectionExists(t, link) {
			t.Errorf("%s: there is no section %s", what, link)
		}
	}
	for version, want := range map[string]string{"v0.2.0": "v0.2.0", "(devel)": "main", "v0.2.0-3-gabc": "main", "unknown": "main", "v0.2.1-0.20261128123456-abcdefabcdef+dirty": "main"} {
		if got := attention.DocsOf(version); got != "https://github.com/kvroute/kvroute/blob/"+want+"/docs/" {
			t.Errorf("documents of %s: %s", version, got)
		}
	}
}

// A worker that accepts connections and never answers is named with the cause and what to set, and with an event for each
// change of its health.
func TestStoryOfAHungWorker(t *testing.T) {
	log := attention.NewLog("")
	s := attention.State{Workers: []attention.Worker{healthy(1)}}
	w := &s.Workers[0]
	const cause = "timeout: no answer to a probe of its health"
	at := func(seconds int, health string) attention.Item {
		now := start.Add(time.Duration(seconds) * time.Second)
		w.Health, w.HealthSince = health, now
		if w.HealthCause = cause; health == "healthy" {
			w.HealthCause, w.HealthSince = "", time.Time{}
		}
		log.Observe(now, &s)
		if items := log.Items(); len(items) == 1 {
			return items[0]
		}
		return attention.Item{}
	}
	at(0, "healthy")
	at(8, "degraded")
	item := at(16, "unhealthy")
	if want := "worker w1 is unhealthy: it gets requests only if no worker is better: " + cause + "; if its health has another path, or takes longer, set health: {path: …, timeout: …}, or health: none"; item.Text != want || item.Cause != cause || item.Advice == "" {
		t.Errorf("%+v, want %s", item, want)
	}
	if item = at(31, "expired"); !item.Since.Equal(start.Add(8 * time.Second)) {
		t.Errorf("the worker is expired, not healthy since %v", item.Since)
	}
	at(40, "healthy")
	got := strings.Join(texts(log.Events()), "\n")
	if want := `03:04:45 good w1 is healthy again
03:04:36 fault w1 is expired: timeout: no answer to a probe of its health
03:04:21 fault w1 is unhealthy: timeout: no answer to a probe of its health
03:04:13 note w1 is degraded: timeout: no answer to a probe of its health`; got != want {
		t.Errorf("events\n%s\nwant\n%s", got, want)
	}
}

// While the cause of a worker's trouble changes, its item keeps the time at which the first one began. The events have
// the times of each.
func TestSinceTheFirstCause(t *testing.T) {
	log := attention.NewLog("")
	s := attention.State{Workers: []attention.Worker{healthy(1), healthy(2)}}
	w := &s.Workers[0]
	observe := func(seconds int, want string) {
		t.Helper()
		log.Observe(start.Add(time.Duration(seconds)*time.Second), &s)
		items := log.Items()
		if len(items) != 1 || items[0].What != want || !items[0].Since.Equal(start.Add(time.Second)) {
			t.Errorf("after %d s: %+v, want %s since the first second", seconds, items, want)
		}
	}
	log.Observe(start, &s)
	w.Health, w.HealthSince = "degraded", start.Add(time.Second)
	observe(1, "health")
	w.Failing, w.AvoidedSince, w.AvoidedFor = true, start.Add(3*time.Second), "it gave no response: connection refused"
	observe(3, "avoided")
	if also := log.Items()[0].Also; len(also) != 1 || !also[0].Since.Equal(w.HealthSince) {
		t.Errorf("the further causes are %+v", also)
	}
	w.HealthSince = start.Add(4 * time.Second) // it was healthy for a moment
	if observe(4, "avoided"); !log.Items()[0].Also[0].Since.Equal(w.HealthSince) {
		t.Errorf("the further causes are %+v", log.Items()[0].Also)
	}
	w.Failing, w.AvoidedSince, w.AvoidedFor = false, time.Time{}, ""
	w.Health, w.HealthSince, w.Faults = "unhealthy", start.Add(9*time.Second), []router.Fault{{What: "silent", Text: attention.Silence + "timeout", Since: start.Add(10 * time.Second)}}
	observe(10, "silent")
	w.Health, w.HealthSince = "expired", start.Add(31*time.Second)
	observe(31, "silent")
	if got, want := strings.Join(texts(log.Events()), "\n"), "03:04:15 fault w1 gives no sign of life: timeout\n03:04:08 note w1 refused a request: connection refused\n03:04:06 note w1 is degraded"; got != want {
		t.Errorf("events\n%s\nwant\n%s", got, want)
	}
	s.Workers[0] = healthy(1)
	log.Observe(start.Add(40*time.Second), &s)
	w.Health, w.HealthSince = "degraded", start.Add(50*time.Second)
	if log.Observe(start.Add(50*time.Second), &s); !log.Items()[0].Since.Equal(w.HealthSince) {
		t.Errorf("after it was healthy: %+v", log.Items())
	}
}

// What was wrong before the first observation ends without the word again, and so does the start of a worker.
func TestTheFirstEventSaysNoAgain(t *testing.T) {
	log := attention.NewLog("")
	s := attention.State{Replica: attention.Replica{Status: "degraded", Failed: []string{"workers"}}}
	log.Observe(start, &s)
	w := healthy(1)
	w.Health, w.HealthSince, w.HealthCause = "starting", start, "it has answered no probe yet"
	log.Observe(start.Add(time.Second), &attention.State{Workers: []attention.Worker{w}})
	log.Observe(start.Add(3*time.Second), &attention.State{Workers: []attention.Worker{healthy(1)}})
	s.Replica.BusAway = true
	log.Observe(start.Add(4*time.Second), &attention.State{Workers: []attention.Worker{healthy(1)}, Replica: attention.Replica{BusAway: true}})
	log.Observe(start.Add(5*time.Second), &attention.State{Workers: []attention.Worker{healthy(1)}})
	got := texts(log.Events())
	for _, want := range []string{"03:04:06 good the check workers of kvroute passes", "03:04:08 good w1 is healthy", "03:04:10 good kvroute is connected to NATS again"} {
		if !slices.Contains(got, want) {
			t.Errorf("no event %q in %q", want, got)
		}
	}
}

// A sentence has a subject, and the name of a worker that begins with that word once.
func TestSentencesHaveOneSubject(t *testing.T) {
	for name, want := range map[string]string{"gpu-1": "worker gpu-1 is", "worker-3": "worker-3 is", "Worker 4": "Worker 4 is", "": "worker 1 is"} {
		w := healthy(1)
		w.Name, w.Health = name, "degraded"
		if items := attention.JudgeWorker(&w, true); len(items) != 1 || !strings.HasPrefix(items[0].Text, want) {
			t.Errorf("%q: %+v, want %s", name, items, want)
		}
	}
	for _, s := range everything(t) {
		items := attention.JudgeReplica(&s.Replica)
		for i := range items {
			if strings.HasPrefix(items[i].Text, "it") {
				t.Errorf("%s has no subject: %s", items[i].What, items[i].Text)
			}
		}
	}
}
