// SPDX-License-Identifier: Apache-2.0

// Package attention says in words what needs a person's attention: workers, models and settings with a fault, what to
// do about each, and which section of the documentation describes it. The HTTP API, the dashboard, `kvroute top` and
// `kvroute doctor` have their sentences from here.
//
// A [Log] notes when each of these begins and ends. It may be used by any number of goroutines; the functions have no
// state.
package attention

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// Level says how serious an item or an event is.
type Level string

// The levels.
const (
	Fault Level = "fault" // a person must mend it
	Note  Level = "note"  // allowed, but possibly unexpected
	Good  Level = "good"  // an event: a fault or a note has ended
)

// Kind says what an item is about.
type Kind string

// The kinds.
const (
	OfWorker  Kind = "worker"
	OfLeft    Kind = "left" // a worker that is gone
	OfModel   Kind = "model"
	OfReplica Kind = "replica" // this router replica, its NATS, its Envoy or its settings
)

// Item is something that needs attention.
type Item struct {
	Level Level  `json:"level"`
	Kind  Kind   `json:"kind"`
	What  string `json:"what"` // one word; for a fault of a worker its name
	*router.Worker
	Name  string `json:"name,omitempty"`  // of the worker
	Model string `json:"model,omitempty"` // of the worker, or the model itself
	Text  string `json:"text"`            // what is the matter, in a sentence
	// Cause is the part of the text that says why, and Advice says what to do. They are empty if the text is all.
	Cause  string `json:"cause,omitempty"`
	Advice string `json:"advice,omitempty"`
	// Since is when it began. It is zero if the time is unknown.
	Since time.Time `json:"since,omitzero"`
	Docs  string    `json:"docs,omitempty"` // link to the section of the documentation
	// Also has the further items about the same worker, or about the same source of workers in Kubernetes; see [group].
	Also []Item `json:"also,omitempty"`

	source string    // the source of workers in Kubernetes that the item is about
	first  time.Time // when the first of the stages began that led to the item
	detail string    // the health, or the check of /readyz, that the item is about
}

// Worker is the state of a worker with the judgement of its events.
type Worker struct {
	router.WorkerState

	EventsLevel router.EventsLevel `json:"kv_events_level"`
	EventsText  string             `json:"kv_events_text"`
	// TTFT is the mean time to the first token in ms, of the last 20 s with one; 0 = none.
	TTFT float64 `json:"ttft_ms,omitempty"`
}

// LeftWorker is a worker that is gone, with its departure in words.
type LeftWorker struct {
	fleet.Left

	Text string `json:"text"`
}

// Replica is what is judged of a router replica.
type Replica struct {
	BusAway bool     // it is not connected to NATS
	Status  string   // of /readyz
	Failed  []string // checks of /readyz, in order
	// Kubernetes has the state of each source of workers there.
	Kubernetes []pods.State
	Envoy      []envoy.Fault
	Pending    []string // changed settings that need a restart
	Refused    string   // why the configuration file cannot be used
}

// JudgeReplica returns what needs attention at a replica itself.
func JudgeReplica(r *Replica) (found []Item) {
	add := func(level Level, what, advice, format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		found = append(found, Item{Level: level, Kind: OfReplica, What: what, Advice: advice, Text: text})
	}
	if r.BusAway {
		add(Fault, "bus", checkNATS, "NATS is away: kvroute hears neither of workers nor of other replicas")
	}
	sources, unread := judgeSources(r.Kubernetes)
	found = append(found, sources...)
	for _, check := range r.Failed {
		if check != "kubernetes" || !unread { // else the items about the sources say why
			add(Fault, "ready", adviceOfCheck(check), "kvroute is %s: the check %q fails", r.Status, check)
			found[len(found)-1].detail = check
		}
	}
	if len(r.Pending) > 0 {
		add(Note, "settings", "restart kvroute", "kvroute's configuration file has changes that need a restart: %s",
			strings.Join(r.Pending, ", "))
	}
	if r.Refused != "" {
		add(Fault, "settings", "correct the file",
			"kvroute's configuration file has changed, and cannot be used; a start would fail: %s", r.Refused)
	}
	for _, f := range r.Envoy {
		text, advice := cutAdvice("envoy", f.Text)
		add(Fault, "envoy", advice, "%s", text)
	}
	return found
}

// judgeSources returns what needs attention at sources of workers in Kubernetes. unread: a source cannot be read.
func judgeSources(sources []pods.State) (found []Item, unread bool) {
	for i := range sources {
		s := &sources[i]
		item := Item{Kind: OfReplica, What: "kubernetes", source: s.Source}
		if s.Error != "" {
			unread = true
			item.Level, item.Advice, item.Since, item.Cause = Fault, mendSource, s.Since, s.Error
			item.Text = fmt.Sprintf("%s cannot be read since %s; the known workers stay: %s",
				s.Source, s.Since.UTC().Format("15:04:05 UTC"), s.Error)
			found = append(found, item)
		}
		item.Level, item.Advice, item.Since, item.Cause = Note, mendPod, time.Time{}, ""
		for _, problem := range s.Problems {
			item.Text = s.Source + ": " + problem
			found = append(found, item)
		}
	}
	return found, unread
}

// JudgeWorker returns what needs attention at a worker. Without lasting, the state of its events does not count.
func JudgeWorker(w *Worker, lasting bool) (found []Item) {
	id, name := w.Worker, w.Worker.Label(w.Name)
	subject := called(name)
	add := func(level Level, what string, since time.Time, cause, advice, format string, args ...any) {
		found = append(found, Item{
			Level: level, Kind: OfWorker, What: what, Worker: &id, Name: w.Name, Model: w.Model,
			Text: fmt.Sprintf(format, args...), Since: since, Cause: cause, Advice: advice,
		})
		if what == "health" {
			found[len(found)-1].detail = w.Health
		}
	}
	has := func(what string) bool {
		return slices.ContainsFunc(w.Faults, func(f router.Fault) bool { return f.What == what })
	}
	none := time.Time{}
	text, advice := cutAdvice("events", w.EventsText)
	switch {
	case !lasting || w.EventsLevel != router.EventsFault || has("event_socket_refused"):
	case w.Unheard():
		add(Fault, "events", none, text, HowToPublish(&w.WorkerState), "events of %s: %s", name, text)
	case w.KVEvents == "none":
		add(Fault, "events", none, text, advices["event_socket_refused"], "events of %s: %s", name, text)
	default:
		add(Fault, "events", none, text, advice, "events of %s are %s: %s", name, w.KVEvents, text)
	}
	for _, f := range w.Faults {
		text, advice := cutAdvice(f.What, f.Text)
		cause := strings.TrimPrefix(text, Silence)
		add(Fault, f.What, f.Since, cause, advice, "%s has the fault %s: %s", subject, f.What, text)
	}
	cause := strings.TrimSuffix(": "+w.HealthCause+HowToProbe(w.HealthCause), ": ")
	switch dead := w.Health == router.Unhealthy.String() || w.Health == router.Expired.String(); {
	case dead && !has("silent"):
		add(Fault, "health", w.HealthSince, w.HealthCause, mendWorker, "%s is %s: %s%s",
			subject, w.Health, strings.TrimSuffix(Silence, ": "), cause)
	case !dead && w.Health != router.Healthy.String():
		add(Note, "health", w.HealthSince, w.HealthCause, adviceOfHealth(w.Health), "%s is %s%s", subject, w.Health, cause)
	case !dead && w.HealthCause != "":
		add(Note, "probes", none, w.HealthCause, mendWorker, "%s fails the probes of its health%s", subject, cause)
	}
	switch {
	case w.Failing:
		add(Note, "avoided", w.AvoidedSince, w.AvoidedFor, mendWorker, "%s is avoided until %s: %s",
			subject, w.AvoidedUntil.UTC().Format("15:04:05 UTC"), w.AvoidedFor)
	case !w.AvoidedSince.IsZero() && !has("no_response"):
		add(Note, "avoided", w.AvoidedSince, w.AvoidedFor, mendWorker,
			"%s failed and has served no request since: %s", subject, w.AvoidedFor)
	}
	if w.Audit != nil && w.Audit.Departs {
		add(Note, "departs", none, "", advices["departs"], "%s caches other tokens than kvroute predicts, "+
			"by the usage in its responses: kvroute reads its events again", subject)
	}
	return found
}

// called names a worker in a sentence, also if its name begins with the word.
func called(name string) string {
	if strings.HasPrefix(strings.ToLower(name), "worker") {
		return name
	}
	return "worker " + name
}

// JudgeLeft returns what needs attention about a worker that is gone; found is false if nothing does.
func JudgeLeft(l *LeftWorker) (item Item, found bool) {
	at := ""
	if l.Address.IsValid() {
		at = " at " + l.Address.String()
	}
	w := router.Worker{ID: l.ID, DPRank: l.Rank}
	item = Item{
		Level: Fault, Kind: OfLeft, What: string(l.State), Worker: &w, Name: l.Name, Since: l.Time, Cause: l.Cause,
		Text: called(w.Label(l.Name)) + at + " " + l.Text, Advice: mendWorker,
	}
	if len(l.Models) > 0 {
		item.Model = l.Models[0]
	}
	if l.State == fleet.Unresolved {
		item.Advice = "correct the name, or the DNS server"
	}
	return item, l.IsFault()
}

// JudgeModels returns what needs attention at the models of a replica's workers.
func JudgeModels(models []router.ModelState, workers []Worker) (found []Item) {
	add := func(level Level, model, advice, format string, args ...any) {
		text := "model " + model + fmt.Sprintf(format, args...)
		found = append(found, Item{Level: level, Kind: OfModel, What: "tokens", Model: model, Text: text, Advice: advice})
	}
	for i := range models {
		m := &models[i]
		missing := m.TokenReason == tokenizer.NoTokenizer
		if m.Why != "" && m.TokenMode != tokenizer.None && !missing && m.TokenReason != tokenizer.Drifted {
			add(Note, m.Model, advices["tokens"], ": %s", m.Why)
		}
		own := func(w Worker) bool { return w.Model == m.Model && w.Group == "" }
		if missing && slices.ContainsFunc(workers, own) {
			add(Note, m.Model, "name the folder of its tokenizer under models",
				" has no tokenizer, so kvroute finds cached prompts only by their text: %s", m.Why)
		}
		differs := false
		for i := range m.Classes {
			if c := &m.Classes[i]; c.Unconfirmed {
				differs = true
				add(Fault, m.Model, "compare profile, chat template and engine version", ": %s", tokensDiffer(c))
			}
		}
		if !differs && (m.Checks == router.ChecksDrift || m.Checks == router.ChecksDiffers) {
			add(Fault, m.Model, advices["tokens"], ": its workers make other token ids than kvroute (%s)", m.Checks)
		}
	}
	return found
}

// tokensDiffer says where the tokens of a class differ.
func tokensDiffer(c *confirm.ClassState) string {
	text := fmt.Sprintf("its workers make other tokens than kvroute for requests of the class %s "+
		"(%d unconfirmed, %d confirmed)", c.Class, c.Requests[confirm.Unmatched.String()], c.Requests[confirm.Confirmed.String()])
	switch {
	case c.Theirs != "":
		text += fmt.Sprintf(": at token %d the engine has %q, kvroute %q", c.Position, c.Theirs, c.Ours)
	case c.Position >= 0:
		text += fmt.Sprintf(": the first different token is number %d (--explain-drift shows the texts)", c.Position)
	default:
		text += fmt.Sprintf(": the first different token is in block %d", c.Block)
	}
	return text + "; such requests are routed by their text"
}

// clip limits a text that may come from a worker's record.
func clip(text string, most int) string {
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most] + "…"
}

// FailedChecks returns the names of the checks that fail, in order.
func FailedChecks(checks map[string]bool) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(checks)), func(name string) bool { return checks[name] })
}

// Items about a worker that explain others, and those that others explain. All other items stand between them.
//
//nolint:gochecknoglobals // tables
var (
	explaining = []string{"silent", "no_response", "avoided", "probes", "health", "answers_errors"}
	explained  = []string{"event_socket_refused", "events", "departs"}
)

// weight orders items by what they explain.
func weight(what string) int {
	if at := slices.Index(explaining, what); at >= 0 {
		return at - len(explaining)
	}
	return 1 + slices.Index(explained, what)
}

// sortItems orders items: faults first, then those that explain others, then by what and name.
func sortItems(items []Item) {
	slices.SortStableFunc(items, func(a, b Item) int {
		return cmp.Or(cmp.Compare(a.Level, b.Level), cmp.Compare(weight(a.What), weight(b.What)), cmp.Compare(a.What, b.What),
			cmp.Compare(a.Model, b.Model), cmp.Compare(a.Name, b.Name))
	})
}

// group makes one item of all items about a worker, and one of those about a source of workers in Kubernetes: the first
// one, with the others in Also. Items with the text of another one are left out. The first one has the time of the stage
// with which it began.
func group(items []Item) (groups []Item) {
	type subject struct {
		worker router.Worker
		source string
	}
	places := make(map[subject]int)
	for i := range items {
		item := &items[i]
		s := subject{source: item.source}
		if item.Kind == OfWorker {
			s.worker = *item.Worker
		}
		at, known := places[s]
		switch {
		case item.Kind != OfWorker && item.source == "":
			groups = append(groups, *item)
		case !known:
			places[s] = len(groups)
			groups = append(groups, *item)
			if !item.first.IsZero() {
				groups[len(groups)-1].Since = item.first
			}
		case groups[at].Text != item.Text &&
			!slices.ContainsFunc(groups[at].Also, func(a Item) bool { return a.Text == item.Text }):
			groups[at].Also = append(groups[at].Also, *item)
		}
	}
	return groups
}
