// SPDX-License-Identifier: Apache-2.0

package attention

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvroute/kvroute/router"
)

const (
	// mostItems limits the items that are shown, and mostEvents those that are kept.
	mostItems, mostEvents = 256, 200
	// mostText and mostName limit texts and names, in bytes: they may come from a worker's record.
	mostText, mostName = 1024, 128
)

// Event is something that began or ended.
type Event struct {
	Time  time.Time `json:"time"`
	Level Level     `json:"level"`
	What  string    `json:"what"` // as of an item, or "joined" and "removed" of a worker
	*router.Worker
	Name  string `json:"name,omitempty"`
	Model string `json:"model,omitempty"`
	Text  string `json:"text"` // a sentence that names the worker
}

// State is what a replica knows at one moment.
type State struct {
	Replica Replica
	Workers []Worker
	Left    []LeftWorker
	Models  []router.ModelState
}

// items returns all that needs attention.
func (s *State) items() (all []Item) {
	all = JudgeReplica(&s.Replica)
	for i := range s.Workers {
		all = append(all, JudgeWorker(&s.Workers[i], true)...)
	}
	for i := range s.Left {
		if item, found := JudgeLeft(&s.Left[i]); found {
			all = append(all, item)
		}
	}
	all = append(all, JudgeModels(s.Models, s.Workers)...)
	sortItems(all)
	return all
}

// key names an item among those of one moment.
type key struct {
	kind   Kind
	what   string
	worker router.Worker
	about  string // model; of the replica the text without the cause, which may change
}

func keyOf(i *Item) key {
	k := key{kind: i.Kind, what: i.What, about: i.Model}
	if i.Worker != nil {
		k.worker = *i.Worker
	} else if i.Kind == OfReplica {
		k.about = strings.TrimSuffix(i.Text, i.Cause)
	}
	return k
}

// open is an item that has not ended.
type open struct {
	Item
	event *Event // of its beginning; nil if it began before the first observation, or another event says it
}

// Log notes what needs attention, and when each of these began and ended. Its memory is bounded by the number of
// workers and models. The zero value is not ready: see [NewLog].
type Log struct {
	docs string

	mu sync.Mutex
	// mu guards the fields below.
	observed bool
	open     map[key]*open
	workers  map[router.Worker]string // labels of the known workers, without rank
	items    []Item                   // of the last observation
	events   []*Event                 // oldest first
}

// NewLog returns a log. docs is the address of the documentation, as of [DocsOf].
func NewLog(docs string) *Log {
	return &Log{docs: docs, open: map[key]*open{}, workers: map[router.Worker]string{}}
}

// Observe compares the state with the one before. It is to be called about once a second.
func (l *Log) Observe(now time.Time, s *State) {
	items := s.items()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.observeWorkers(now, s)
	still, all := make(map[key]*open, len(items)), make(map[key]*Item, len(items))
	for i := range items {
		all[keyOf(&items[i])] = &items[i]
	}
	for i := range items {
		item := &items[i]
		k := keyOf(item)
		o := l.open[k]
		item.Docs = l.docs + SectionOf(item.What)
		item.Text, item.Name = clip(item.Text, mostText), clip(item.Name, mostName)
		item.Cause, item.Advice = clip(item.Cause, mostText), clip(item.Advice, mostText)
		if again := still[k]; again != nil { // another class of requests of the same model
			item.Since = again.Since
			continue
		}
		if o == nil {
			o = new(open)
			if !repeats(k, l.open, all) {
				o.event = l.begins(now, item)
			}
			if o.Since = item.Since; l.observed && o.Since.IsZero() {
				o.Since = now
			}
		} else if o.detail != item.detail {
			o.event = l.begins(now, item)
		} else if o.event != nil && o.Cause != item.Cause && now.Sub(o.event.Time) < 10*time.Second {
			o.event.say(begun(item)) // the cause was found meanwhile
		}
		if item.Since.IsZero() {
			item.Since = o.Since
		}
		item.first = earliest(k, item.Since, l.open, all)
		o.Item = *item
		still[k] = o
	}
	for k, o := range l.open {
		if still[k] == nil && !worsened(k, still) && !worsened(k, l.open) && !hidden(k, l.open, still) {
			l.ends(now, &o.Item)
		}
	}
	l.open, l.items, l.observed = still, group(items), true
}

// stages are the items about a worker that follow each other, the worst last.
//
//nolint:gochecknoglobals // a table
var stages = []string{"avoided", "no_response", "probes", "health", "silent"}

// earliest returns when the first stage of a worker began that has led to an item without an end in between; zero for
// an item that is no stage.
func earliest(k key, since time.Time, before map[key]*open, now map[key]*Item) time.Time {
	if !slices.Contains(stages, k.what) {
		return time.Time{}
	}
	for _, k.what = range stages {
		if o := before[k]; o != nil && !o.first.IsZero() && o.first.Before(since) {
			since = o.first
		}
		if i := now[k]; i != nil && !i.Since.IsZero() && i.Since.Before(since) {
			since = i.Since
		}
	}
	return since
}

// worsened reports whether an item is among others that are worse and about the same worker: a silent worker is not
// healthy again, and a worker that is no longer avoided because it fails probes does not serve again.
func worsened(k key, among map[key]*open) bool {
	worse := func(what string) bool {
		k.what = what
		return among[k] != nil
	}
	at := slices.Index(stages, k.what)
	return at >= 0 && slices.ContainsFunc(stages[at+1:], worse)
}

// hidden reports whether an item about events ends because a new one takes its place: a worker that is not healthy, or
// whose event sockets refuse connections, does not have complete events again.
func hidden(k key, before, now map[key]*open) bool {
	return k.what == "events" && slices.ContainsFunc([]string{"event_socket_refused", "health", "silent"}, func(what string) bool {
		k.what = what
		return before[k] == nil && now[k] != nil
	})
}

// repeats reports whether an item has the same event as an earlier one about its worker, or one of the same moment: a
// worker that gives no response has failed a request, and one that is degraded has failed probes. One that has just
// given a sign of life failed its last probes before that.
func repeats(k key, before map[key]*open, now map[key]*Item) bool {
	switch k.what {
	case "probes":
		return slices.ContainsFunc(stages[slices.Index(stages, k.what)+1:], func(worse string) bool {
			k.what = worse
			return before[k] != nil
		})
	case "no_response":
		k.what = "avoided"
	case "health":
		k.what = "probes"
	default:
		return false
	}
	return before[k] != nil || now[k] != nil
}

// left reports whether an open item says that a worker left.
func (l *Log) left(id uint64) bool {
	for k := range l.open {
		if k.kind == OfLeft && k.worker.ID == id {
			return true
		}
	}
	return false
}

// observeWorkers notes workers that joined or were removed.
func (l *Log) observeWorkers(now time.Time, s *State) {
	known := make(map[router.Worker]string, len(s.Workers))
	for i := range s.Workers {
		w := &s.Workers[i]
		known[w.Worker] = clip(router.Worker{ID: w.ID}.Label(w.Name), mostName)
		if l.observed && l.workers[w.Worker] == "" && !l.left(w.ID) { // else it comes back
			e := Event{now, Note, "joined", new(w.Worker), clip(w.Name, mostName), w.Model, ""}
			l.add(e, "joined")
		}
	}
	for w, label := range l.workers {
		left := func(l LeftWorker) bool { return l.ID == w.ID && l.IsFault() }
		if known[w] != "" || slices.ContainsFunc(s.Left, left) {
			continue
		}
		l.add(Event{now, Note, "removed", &w, label, "", ""}, "was removed")
	}
	l.workers = known
}

// Items returns what needed attention at the last observation, faults first: one item for each worker, and for each
// source of workers in Kubernetes. Of more than 256 it returns the first ones and an item with their number.
func (l *Log) Items() []Item {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := append([]Item{}, l.items...) // an empty list in JSON, not null
	if more := len(all) - mostItems; more > 0 {
		text := fmt.Sprintf("and %d more", more)
		all = append(all[:mostItems], Item{
			Level: Note, Kind: OfReplica, What: "more", Text: text,
			Advice: "kvroute doctor shows all of them with --json", Docs: l.docs + SectionOf("more"),
		})
	}
	return all
}

// Events returns the latest events, the newest first.
func (l *Log) Events() []Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]Event, 0, len(l.events))
	for _, e := range slices.Backward(l.events) {
		all = append(all, *e)
	}
	slices.SortStableFunc(all, func(a, b Event) int { return b.Time.Compare(a.Time) })
	return all
}
