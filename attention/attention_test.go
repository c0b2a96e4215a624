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
	"github.com/kvroute/kvroute/router"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func healthy(id uint64) attention.Worker {
	return attention.Worker{WorkerState: router.WorkerState{Worker: router.Worker{ID: id}, Name: fmt.Sprint("w", id), Model: "m", Health: "healthy"}, EventsLevel: router.EventsOK}
}

// what returns the items in short.
func what(items []attention.Item) (all []string) {
	for i := range items {
		all = append(all, string(items[i].Level)+" "+items[i].What)
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
	if got := what(log.Items()); !slices.Equal(got, []string{"fault silent", "note avoided"}) {
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
		"03:14:13 note w2 was removed", "03:14:12 good w2 serves again", "03:14:10 note w2 failed a request: it answered 503", "03:14:10 note w2 joined", "03:14:10 good w2 came back",
		"03:14:08 fault w2 left without a word: connection refused", "03:14:07 fault w2 gives no sign of life: connection refused at 10.0.0.2:80", "03:14:06 note worker w2 is degraded", "03:04:05 note w2 refused a request: connection refused",
	}
	got := texts(log.Events())
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("events\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
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
	if got, want := what(log.Items()), []string{"fault bus", "fault envoy", "fault events", "fault ready", "fault settings", "fault tokens", "note departs", "note settings"}; !slices.Equal(got, want) {
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
	got := strings.Join(texts(log.Events()), "\n")
	if want := `03:04:48 good w1 answers probes of its health again
03:04:45 note worker w1 fails the probes of its health: timeout; if its health has another path, or takes longer, set health: {path: …, timeout: …}, or health: none
03:04:35 good w1 gives signs of life again
03:04:20 fault w1 gives no sign of life: connection refused
03:04:13 note worker w1 is degraded: connection refused
03:04:10 note worker w1 fails the probes of its health: connection refused`; got != want {
		t.Errorf("events\n%s\nwant\n%s", got, want)
	}
}

// Names of any length, and any number of workers with faults, take bounded memory.
func TestLogIsBounded(t *testing.T) {
	log := attention.NewLog("")
	long := strings.Repeat("‮<b>\x1b[31m", 400)
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
	if len(items) != 257 || items[256].What != "more" || items[256].Text != "and 744 more" || len(events) != 200 {
		t.Errorf("%d items, %d events", len(items), len(events))
	}
	for _, i := range items[:256] {
		if len(i.Text) > 1100 || len(i.Name) > 200 || i.Docs == "" || i.Since.IsZero() {
			t.Fatalf("an item has %d bytes of text and %d of name; %+v", len(i.Text), len(i.Name), i)
		}
	}
	for _, e := range events {
		if len(e.Text) > 1100 || len(e.Name) > 200 {
			t.Fatalf("an event has %d bytes of text", len(e.Text))
		}
	}
}

// Each link leads to a section of the documents.
func TestSectionsExist(t *testing.T) {
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	for _, of := range []string{
		"block_size", "answers_errors", "avoided", "bus", "departs", "envoy", "events", "health", "left", "models", "no_response", "probes", "ready", "settings", "silent", "tokens", "unresolved", "workers",
	} {
		file, section, _ := strings.Cut(attention.SectionOf(of), "#")
		text, err := os.ReadFile("../docs/" + file)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, m := range heading.FindAllStringSubmatch(string(text), -1) {
			found = found || section == strings.Trim(regexp.MustCompile(`[^a-z0-9_-]`).ReplaceAllString(strings.ReplaceAll(strings.ToLower(m[1]), " ", "-"), ""), "")
		}
		if !found {
			t.Errorf("%s: docs/%s has no section %s", of, file, section)
		}
	}
	for version, want := range map[string]string{"v0.2.0": "v0.2.0", "(devel)": "main", "v0.2.0-3-gabc": "main", "unknown": "main", "v0.2.1-0.20261128123456-abcdefabcdef+dirty": "main"} {
		if got := attention.DocsOf(version); got != "https://github.com/kvroute/kvroute/blob/"+want+"/docs/" {
			t.Errorf("documents of %s: %s", version, got)
		}
	}
}
