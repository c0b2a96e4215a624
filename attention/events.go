// SPDX-License-Identifier: Apache-2.0

package attention

import (
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/router"
)

// change has the words of the events of an item about a worker. They continue its name.
type change struct{ begins, ends string }

// changes are the words by what. The items themselves have the details: the cause is part of an event only where it
// needs no further words.
//
//nolint:gochecknoglobals // a table
var changes = map[string]change{
	"answers_errors":       {"answers errors more often than other workers", "answers as few errors as other workers"},
	"avoided":              {"failed a request", "serves again"},
	"block_size":           {"has blocks of another size than its settings", "has blocks of the right size again"},
	"departs":              {"caches other tokens than kvroute predicts", "caches what kvroute predicts again"},
	"engine_flags":         {"has other flags for prompts than its model", "has the flags of its model for prompts again"},
	"event_socket_refused": {"has an event socket that refuses connections", "has open event sockets again"},
	"event_sockets":        {"has other event sockets than its settings", "has the right event sockets again"},
	"events":               {"has incomplete cache events", "has complete cache events again"},
	"health":               {"is not healthy", "is healthy again"},
	"left":                 {"left without a word", "came back"},
	"max_model_len":        {"takes shorter requests than workers of its model", "takes long requests again"},
	"model_not_served":     {"does not serve all of its models", "serves all of its models again"},
	"no_response":          {"gives no response to requests", "responds to requests again"},
	"probes":               {"fails the probes of its health", "answers probes of its health again"},
	"same_address":         {"has the address of another worker", "no longer has the address of another worker"},
	"same_events":          {"publishes the events of another worker", "no longer publishes the events of another worker"},
	"silent":               {"gives no sign of life", "gives signs of life again"},
	"token_ids":            {"makes other token ids than kvroute", "makes the token ids of kvroute again"},
	"unresolved":           {"has no address", "has an address"},
}

// withCause are the items whose cause is short enough for the text of an event.
//
//nolint:gochecknoglobals // a table
var withCause = []string{"avoided", "events", "health", "left", "probes", "silent", "unresolved"}

// begun returns the text of the event of an item's beginning.
func begun(i *Item) string {
	switch {
	case i.source != "" && i.Cause != "":
		return i.source + " cannot be read: " + i.Cause
	case i.What == "ready":
		return "the check " + i.detail + " of kvroute fails"
	case i.Worker == nil:
		return i.Text
	}
	words, known := changes[i.What]
	text := words.begins
	switch {
	case !known:
		text = "has the fault " + i.What
	case i.detail != "":
		text = "is " + strings.ReplaceAll(i.detail, "_", " ")
	case strings.HasPrefix(i.Cause, "it gave no response: connection refused"):
		return "refused a request: connection refused"
	}
	cause, _, _ := strings.Cut(i.Cause, "; ") // the item says what to do
	cause, _, _ = strings.Cut(cause, ": set ")
	if cause == "" || !slices.Contains(withCause, i.What) {
		return text
	}
	return text + ": " + cause
}

// ended returns the text of the event of an item's end.
func ended(i *Item) string {
	words, known := changes[i.What]
	switch {
	case i.detail == router.Starting.String():
		return "is healthy"
	case i.Worker != nil && known:
		return words.ends
	case i.Worker != nil:
		return "no longer has the fault " + i.What
	case i.source != "" && i.Cause != "":
		return i.source + " can be read again"
	case i.What == "bus":
		return "kvroute is connected to NATS again"
	case i.What == "ready":
		return "the check " + i.detail + " of kvroute passes again"
	}
	return "no longer: " + i.Text
}

// event is the event of an item's beginning.
func event(at time.Time, i *Item) Event {
	return Event{at, i.Level, i.What, i.Worker, clip(i.Name, mostName), i.Model, ""}
}

// begins notes the beginning of an item. What began before the first observation is no event, unless its time is known.
func (l *Log) begins(now time.Time, i *Item) *Event {
	if !l.observed && i.Since.IsZero() {
		return nil
	}
	if !i.Since.IsZero() {
		now = i.Since
	}
	return l.add(event(now, i), begun(i))
}

// ends notes the end of an item.
func (l *Log) ends(now time.Time, i *Item) {
	if i.Worker != nil && l.workers[*i.Worker] == "" { // it is gone, or left an hour ago
		return
	}
	e, text := event(now, i), ended(i)
	if e.Level = Good; i.Since.IsZero() { // the time before was not observed
		text = strings.TrimSuffix(text, " again")
	}
	l.add(e, text)
}

// ofRank are the items and events that concern one rank of a worker. Others concern all of its ranks.
//
//nolint:gochecknoglobals // a table
var ofRank = []string{"events", "departs"}

// subject names the worker of an event.
func (e *Event) subject() string {
	w := *e.Worker
	if !slices.Contains(ofRank, e.What) {
		w.DPRank = 0
	}
	return w.Label(e.Name)
}

// say sets the text, which continues the name of the worker if the event has one.
func (e *Event) say(text string) {
	if e.Worker != nil {
		text = e.subject() + " " + text
	}
	e.Text = clip(text, mostText)
}

// add adds an event, whose text continues the name of its worker if it has one. It returns nil if an event of another
// rank or model of the worker says the same.
func (l *Log) add(e Event, text string) *Event {
	e.say(text)
	const together = 2 * time.Second
	for _, other := range l.events {
		same := other.What == e.What && other.Level == e.Level && other.Text == e.Text
		if same && e.Worker != nil && other.Worker != nil && other.ID == e.ID && other.Time.Sub(e.Time).Abs() < together {
			return nil
		}
	}
	l.events = append(l.events[max(0, len(l.events)+1-mostEvents):], &e)
	return &e
}
