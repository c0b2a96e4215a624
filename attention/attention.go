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
	"github.com/kvroute/kvroute/internal/engine"
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

	source string // the source of workers in Kubernetes that the item is about
	detail string // the health, or the check of /readyz, that the item is about
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

// docs are the sections of the documentation, by what.
//
//nolint:gochecknoglobals // a table
var docs = map[string]string{
	"":               "workers.md#faults-of-workers", // every fault of a worker that is not listed
	"answers_errors": "workers.md#workers-that-answer-errors",
	"avoided":        "troubleshooting.md#workerfailing",
	"bus":            "troubleshooting.md#nats-and-replicas",
	"departs":        "troubleshooting.md#indexdeparts",
	"envoy":          "envoy.md#is-kvroute-used",
	"events":         "protocol.md#states-of-a-rank",
	"health":         "workers.md#health",
	"kubernetes":     "troubleshooting.md#workers-in-kubernetes",
	"left":           "workers.md#workers-that-died-or-left",
	"models":         "requests.md#models",
	"no_response":    "troubleshooting.md#workerfailing",
	"probes":         "workers.md#health",
	"ready":          "operations.md#degraded-states",
	"settings":       "troubleshooting.md#settings-and-access",
	"silent":         "troubleshooting.md#workerunhealthy",
	"tokens":         "troubleshooting.md#tokenizerdrift",
	"unresolved":     "workers.md#workers-that-died-or-left",
	"workers":        "troubleshooting.md#workers",
}

// DocsOf returns the address of the documentation of a version of kvroute: of the tag of a release, else of the main branch.
func DocsOf(version string) string {
	ref := "main"
	if digits, found := strings.CutPrefix(version, "v"); found && strings.Trim(digits, "0123456789.") == "" {
		ref = version
	}
	return "https://github.com/kvroute/kvroute/blob/" + ref + "/docs/"
}

// SectionOf returns the section of the documentation about an item's what, below the address of [DocsOf].
func SectionOf(what string) string {
	section, known := docs[what]
	if !known {
		section = docs[""]
	}
	return section
}

// Silence begins the text of the fault silent, before its cause.
const Silence = "it gets requests only if no worker is better: "

const (
	mendWorker = "look at the process and the log of the worker; start it again, or remove it"
	checkNATS  = "start NATS, or correct nats-url"
	mendSource = "grant the rule in the text, create the missing object, or let kvroute's pods reach the API server"
	mendPod    = "correct the labels and annotations of the pod, or the source in kubernetes.sources"
)

// JudgeReplica returns what needs attention at a replica itself.
func JudgeReplica(r *Replica) (found []Item) {
	add := func(level Level, what, advice, format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		found = append(found, Item{Level: level, Kind: OfReplica, What: what, Advice: advice, Text: text})
	}
	if r.BusAway {
		add(Fault, "bus", checkNATS, "NATS is away: it neither hears of workers nor of other replicas")
	}
	sources, unread := judgeSources(r.Kubernetes)
	found = append(found, sources...)
	for _, check := range r.Failed {
		if check != "kubernetes" || !unread { // else the items about the sources say why
			add(Fault, "ready", adviceOfCheck(check), "it is %s: the check %q fails", r.Status, check)
			found[len(found)-1].detail = check
		}
	}
	if len(r.Pending) > 0 {
		add(Note, "settings", "restart kvroute", "its configuration file has changes that need a restart: %s",
			strings.Join(r.Pending, ", "))
	}
	if r.Refused != "" {
		add(Fault, "settings", "correct the file",
			"its configuration file has changed, and cannot be used; a start would fail: %s", r.Refused)
	}
	for _, f := range r.Envoy {
		add(Fault, "envoy", "", "%s", f.Text)
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

// adviceOfCheck says what to do if a check of /readyz fails.
func adviceOfCheck(check string) string {
	switch check {
	case "workers":
		return "start a worker, or add one to the configuration"
	case "healthy_workers":
		return mendWorker
	case "nats", "registry":
		return checkNATS
	case "events", "event_store":
		return "look at the log of kvroute for what it cannot read from JetStream"
	}
	return "look at the log of kvroute"
}

// JudgeWorker returns what needs attention at a worker. Without lasting, the state of its events does not count.
func JudgeWorker(w *Worker, lasting bool) (found []Item) {
	id, name := w.Worker, w.Worker.Label(w.Name)
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
	switch {
	case !lasting || w.EventsLevel != router.EventsFault || has("event_socket_refused"):
	case w.Unheard():
		add(Fault, "events", none, w.EventsText, "", "events of %s: %s; %s", name, w.EventsText, HowToPublish(&w.WorkerState))
	default:
		add(Fault, "events", none, w.EventsText, "", "events of %s are %s: %s", name, w.KVEvents, w.EventsText)
	}
	for _, f := range w.Faults {
		advice, cause := "", f.Text
		if f.What == "silent" {
			advice, cause = mendWorker, strings.TrimPrefix(cause, Silence)
		}
		add(Fault, f.What, f.Since, cause, advice, "worker %s has the fault %s: %s", name, f.What, f.Text)
	}
	switch dead := w.Health == router.Unhealthy.String() || w.Health == router.Expired.String(); {
	case dead && !has("silent"):
		add(Fault, "health", w.HealthSince, w.HealthCause, mendWorker, "worker %s is %s: it gets no requests", name, w.Health)
	case !dead && w.Health != router.Healthy.String():
		cause := ""
		if w.HealthCause != "" {
			cause = ": " + w.HealthCause + HowToProbe(w.HealthCause)
		}
		add(Note, "health", w.HealthSince, w.HealthCause, "", "worker %s is %s%s", name, w.Health, cause)
	case !dead && w.HealthCause != "":
		add(Note, "probes", none, w.HealthCause, mendWorker, "worker %s fails the probes of its health: %s%s",
			name, w.HealthCause, HowToProbe(w.HealthCause))
	}
	switch {
	case w.Failing:
		add(Note, "avoided", w.AvoidedSince, w.AvoidedFor, mendWorker, "worker %s is avoided until %s: %s",
			name, w.AvoidedUntil.UTC().Format("15:04:05 UTC"), w.AvoidedFor)
	case !w.AvoidedSince.IsZero() && !has("no_response"):
		add(Note, "avoided", w.AvoidedSince, w.AvoidedFor, mendWorker,
			"worker %s failed and has served no request since: %s", name, w.AvoidedFor)
	}
	if w.Audit != nil && w.Audit.Departs {
		add(Note, "departs", none, "", "", "worker %s caches other tokens than kvroute predicts, "+
			"by the usage in its responses: kvroute reads its events again", name)
	}
	return found
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
		Text: fmt.Sprintf("worker %s%s %s", w.Label(l.Name), at, l.Text), Advice: mendWorker,
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
	const what = "tokens"
	add := func(level Level, model, format string, args ...any) {
		found = append(found, Item{Level: level, Kind: OfModel, What: what, Model: model, Text: fmt.Sprintf(format, args...)})
	}
	for i := range models {
		m := &models[i]
		missing := m.TokenReason == tokenizer.NoTokenizer
		if m.Why != "" && m.TokenMode != tokenizer.None && !missing && m.TokenReason != tokenizer.Drifted {
			add(Note, m.Model, "model %s: %s", m.Model, m.Why)
		}
		own := func(w Worker) bool { return w.Model == m.Model && w.Group == "" }
		if missing && slices.ContainsFunc(workers, own) {
			add(Note, m.Model, "model %s has no tokenizer, so kvroute finds cached prompts only by their text: %s; "+
				"name the folder of its tokenizer under models", m.Model, m.Why)
		}
		differs := false
		for i := range m.Classes {
			if c := &m.Classes[i]; c.Unconfirmed {
				differs = true
				add(Fault, m.Model, "model %s: %s", m.Model, tokensDiffer(c))
			}
		}
		if !differs && (m.Checks == router.ChecksDrift || m.Checks == router.ChecksDiffers) {
			add(Fault, m.Model, "model %s: its workers make other token ids than kvroute (%s): compare tokenizer "+
				"and chat template with the engine's; kvroute tokenize shows the ids", m.Model, m.Checks)
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
	return text + "; such requests are routed by their text. Compare profile, chat template and engine version"
}

// HowToProbe tells an operator what to do if an engine that serves answers the probes of its health with an error, or
// too late. It is empty for other causes.
func HowToProbe(cause string) string {
	if strings.Contains(cause, "with status") || strings.HasPrefix(cause, "timeout") {
		return "; if its health has another path, or takes longer, set health: {path: …, timeout: …}, or health: none"
	}
	return ""
}

// HowToPublish tells an operator what to do when no event of a worker was ever heard. It names the sockets
// that the worker's record has.
func HowToPublish(w *router.WorkerState) string {
	e := engine.Of(w.Engine)
	if e.HowToPublish == "" {
		e = engine.Of(engine.VLLM)
	}
	text := e.HowToPublish
	if w.Endpoint != "" {
		text = withSocket(text, `"endpoint":"`, w.Endpoint)
		text = withSocket(text, `,"replay_endpoint":"`, w.Replay)
	}
	if w.NeverHeard {
		transport := "zmq"
		if e.Polled {
			transport = "http_poll"
		}
		text += " and set events: {transport: " + transport +
			"} for the worker, or events: {transport: none} if it publishes none"
	} else if w.Endpoint != "" {
		text = fmt.Sprintf("kvroute reads %s; %s, or set events.endpoint of the worker to the engine's socket",
			w.Endpoint, text)
	}
	return text
}

// withSocket replaces the engine's address behind a key: it binds the port of the address that kvroute connects
// to. Without an address it removes the key.
func withSocket(text, key, address string) string {
	before, rest, has := strings.Cut(text, key)
	_, after, ends := strings.Cut(rest, `"`)
	switch {
	case !has || !ends:
		return text
	case address == "":
		return before + after
	}
	if port := strings.LastIndexByte(address, ':'); strings.HasPrefix(address, "tcp://") && port > len("tcp:") {
		address = "tcp://*" + address[port:]
	}
	return before + key + address + `"` + after
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
// one, with the others in Also. Items with the text of another one are left out.
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
		case groups[at].Text != item.Text &&
			!slices.ContainsFunc(groups[at].Also, func(a Item) bool { return a.Text == item.Text }):
			groups[at].Also = append(groups[at].Also, *item)
		}
	}
	return groups
}
