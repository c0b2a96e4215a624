// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
)

const (
	// maxStreams limits the open streams of /v1/live.
	maxStreams = 256
	// liveDecisions is the number of decisions in /v1/live.
	liveDecisions = 50
	// livePeriod is the time between two states of a stream.
	livePeriod = time.Second
)

// live serves /v1/live. While streams are open, one goroutine encodes the sections once a second
// for all of them.
type live struct {
	conf     *Config
	sections []section // without history

	mu sync.Mutex
	// mu guards the fields below.
	streams int
	feed    *feed // nil while no stream is open

	known atomic.Pointer[knownReasons]
}

// knownReasons has the reasons of the decisions that were read last, and of their prefill legs. It does not change.
type knownReasons struct {
	reasons map[knownDecision][2]string
	until   time.Time // of the newest decision
}

// knownDecision names a decision. A leg that failed changes its reason.
type knownDecision struct {
	id    string
	time  time.Time
	noLeg router.NoLeg
}

// section is a part of /v1/live.
type section struct {
	name  string
	read  func() any
	every uint64 // states from one reading to the next one; 0 = 1
}

// feed is what the streams that are open at the same time have in common.
type feed struct {
	state atomic.Pointer[liveState]
	over  chan struct{} // closed when the last stream has ended
}

// liveState is the content of /v1/live at one moment. It does not change.
type liveState struct {
	number  uint64        // 0 = nothing is encoded yet
	parts   []livePart    // the sections, as server-sent events
	samples []livePart    // the history, as JSON
	newest  int64         // time of the last sample
	next    chan struct{} // closed when there is a newer state
}

type livePart struct {
	text  []byte
	since uint64 // number of the state in which it changed
}

func newLive(c *Config) *live {
	l := &live{conf: c}
	l.known.Store(new(knownReasons))
	l.sections = []section{
		{name: "replica", read: c.replica},
		{name: "workers", read: c.workers}, // before attention and events, which it changes
		{name: "left", read: func() any { return c.left() }},
		{name: "models", read: func() any { return c.Router.Models() }},
		{name: "decisions", read: l.decisions},
		{name: "prefixes", read: c.Prefixes, every: 5}, // it sorts hundreds of prompts, and a hot prefix stays hot
	}
	if log := c.Attention; log != nil {
		l.sections = append(l.sections,
			section{name: "attention", read: func() any { return log.Items() }},
			section{name: "events", read: func() any { return log.Events() }})
	}
	if r := c.Outcomes; r != nil {
		l.sections = append(l.sections,
			section{name: "totals", read: func() any { return r.Totals() }},
			section{name: "benefit", read: func() any { return r.Benefits() }},
			section{name: "worker_charts", read: func() any { return r.Charts() }})
		if c.Holdout > 0 {
			l.sections = append(l.sections, section{name: "holdout", read: func() any { return r.Holdout(c.Holdout) }})
		}
	}
	l.sections = slices.DeleteFunc(l.sections, func(s section) bool { return s.read == nil })
	return l
}

// decisions returns the newest decisions without candidates, settings and mode in words. Their reasons, which
// name candidates, are made once for each decision: only then its candidates are read.
func (l *live) decisions() any {
	old, now := l.known.Load(), &knownReasons{reasons: map[knownDecision][2]string{}}
	list := []Decision{} // an empty list in JSON, not null
	for _, d := range l.conf.Router.BriefDecisions(liveDecisions, old.until) {
		key := knownDecision{d.ID, d.Time, d.NoLeg}
		reasons, known := old.reasons[key]
		if !known {
			if !d.Time.After(old.until) {
				if whole, kept := l.conf.Router.Decision(d.ID); kept && whole.Time.Equal(d.Time) {
					d = whole
				}
			}
			reasons[0] = d.Sentence()
			if d.Prefill != nil {
				reasons[1] = d.Prefill.Sentence()
			}
		}
		s := listed(&d, reasons[0])
		if d.Prefill != nil {
			s.Prefill = new(listed(d.Prefill, reasons[1]))
		}
		now.reasons[key], list = reasons, append(list, s)
		if d.Time.After(now.until) {
			now.until = d.Time
		}
	}
	l.known.Store(now)
	return list
}

// listed returns a decision as the list shows it.
func listed(d *router.Decision, reason string) Decision {
	return Decision{Decision: *d.Brief(), ReasonText: reason, FirstTokenText: d.FirstTokenText()}
}

func (l *live) serve(w http.ResponseWriter, req *http.Request) {
	if !strings.Contains(req.Header.Get("Accept"), "text/event-stream") {
		all := map[string]any{}
		for _, s := range l.sections {
			all[s.name] = s.read()
		}
		if l.conf.Outcomes != nil {
			all["history"] = append([]outcomes.Sample{}, l.conf.Outcomes.History()...) // a list in JSON, not null
		}
		write(w, http.StatusOK, all)
		return
	}
	f := l.enter()
	if f == nil {
		e := failure(http.StatusServiceUnavailable, openai.Unavailable, "", fmt.Sprintf("%d streams of /v1/live are open, which is the limit: close a dashboard or a kvroute top, or read /v1/live without Accept: text/event-stream", maxStreams))
		e.Retry = 5
		e.Write(w)
		return
	}
	defer l.leave()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	control := http.NewResponseController(w)
	out := &patient{w, control, l.conf.stall}
	for sent := uint64(0); ; {
		state := f.state.Load()
		if l.send(out, state, sent) != nil || control.Flush() != nil {
			return
		}
		sent = state.number
		select {
		case <-state.next:
		case <-req.Context().Done():
			return
		case <-l.conf.Draining:
			return
		}
	}
}

// enter adds a stream. It returns nil if there are too many.
func (l *live) enter() *feed {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.streams == maxStreams {
		return nil
	}
	l.streams++
	if l.feed == nil {
		l.feed = &feed{over: make(chan struct{})}
		l.feed.state.Store(&liveState{parts: make([]livePart, len(l.sections)), next: make(chan struct{})})
		go l.encode(l.feed)
	}
	return l.feed
}

func (l *live) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.streams--; l.streams == 0 {
		close(l.feed.over)
		l.feed = nil
	}
}

// encode gives a feed a new state each second until its last stream has ended.
func (l *live) encode(f *feed) {
	ticks := l.conf.ticks
	if ticks == nil {
		t := time.NewTicker(livePeriod)
		defer t.Stop()
		ticks = t.C
	}
	for {
		old := f.state.Load()
		f.state.Store(l.after(old))
		close(old.next)
		select {
		case <-ticks:
		case <-f.over:
			return
		}
	}
}

// after encodes the state that follows another one. A section that cannot be encoded stays as it
// was.
func (l *live) after(old *liveState) *liveState {
	s := &liveState{number: old.number + 1, parts: slices.Clone(old.parts), samples: old.samples, newest: old.newest, next: make(chan struct{})}
	for i, part := range l.sections {
		if part.every > 1 && s.number%part.every != 1 {
			continue
		}
		text, err := encode(part.read())
		if text = event(part.name, text); err == nil && !bytes.Equal(text, s.parts[i].text) {
			s.parts[i] = livePart{text, s.number}
		}
	}
	if l.conf.Outcomes == nil {
		return s
	}
	history := l.conf.Outcomes.History()
	for _, sample := range history {
		if sample.TimeMS <= s.newest {
			continue
		}
		if text, err := encode(sample); err == nil {
			s.samples = append(s.samples, livePart{bytes.TrimSpace(text), s.number}) // older states do not see it
			s.newest = sample.TimeMS
		}
	}
	s.samples = s.samples[max(0, len(s.samples)-len(history)):]
	return s
}

// event returns a server-sent event with a line of data.
func event(name string, data []byte) []byte {
	return fmt.Appendf(nil, "event: %s\ndata: %s\n\n", name, bytes.TrimSpace(data))
}

// send writes what has changed since the state with the number sent. A reader that is slow misses
// the states in between.
func (l *live) send(out io.Writer, state *liveState, sent uint64) error {
	for _, part := range state.parts {
		if part.since > sent {
			if _, err := out.Write(part.text); err != nil {
				return err
			}
		}
	}
	var list [][]byte
	for _, sample := range state.samples {
		if sample.since > sent {
			list = append(list, sample.text)
		}
	}
	if first := sent == 0 && state.number > 0 && l.conf.Outcomes != nil; len(list) == 0 && !first {
		return nil
	}
	_, err := out.Write(event("history", slices.Concat([]byte("["), bytes.Join(list, []byte(",")), []byte("]"))))
	return err
}
