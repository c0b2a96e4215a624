// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/outcomes"
)

const (
	// maxStreams limits the open streams of /v1/live.
	maxStreams = 256
	// liveDecisions is the number of decisions in /v1/live.
	liveDecisions = 50
	// livePeriod is the time between two states of a stream.
	livePeriod = time.Second
)

// section is a part of /v1/live.
type section struct {
	name string
	read func() any
}

// sections returns the sections except history.
func (c *Config) sections() []section {
	list := []section{
		{"replica", func() any { return c.describe() }},
		{"workers", func() any { return c.Router.Workers() }},
		{"models", func() any { return c.Router.Models() }},
		{"decisions", func() any { return c.Router.BriefDecisions(liveDecisions) }},
	}
	if c.Prefixes != nil {
		list = append(list, section{"prefixes", c.Prefixes})
	}
	if c.Totals != nil {
		list = append(list, section{"totals", c.Totals})
	}
	return list
}

// live serves /v1/live. While streams are open, one goroutine encodes the sections once a second
// for all of them.
type live struct {
	conf     *Config
	sections []section

	mu sync.Mutex
	// mu guards the fields below.
	streams int
	feed    *feed // nil while no stream is open
}

// feed is what the streams that are open at the same time have in common.
type feed struct {
	state atomic.Pointer[liveState]
	over  chan struct{} // closed when the last stream has ended
}

// liveState is the content of /v1/live at one moment. It does not change.
type liveState struct {
	events   [][]byte      // of each section, as server-sent events; nil = not encoded
	versions []uint64      // of events, counted from 1
	samples  []liveSample  // nil = no history
	next     chan struct{} // closed when there is a newer state
}

type liveSample struct {
	timeMS int64
	text   []byte
}

func (l *live) serve(w http.ResponseWriter, req *http.Request) {
	if !strings.Contains(req.Header.Get("Accept"), "text/event-stream") {
		all := map[string]any{}
		for _, s := range l.sections {
			all[s.name] = s.read()
		}
		if l.conf.History != nil {
			all["history"] = append([]outcomes.Sample{}, l.conf.History()...) // a list in JSON, not null
		}
		write(w, http.StatusOK, all)
		return
	}
	f := l.enter()
	if f == nil {
		e := openai.Error{Status: http.StatusServiceUnavailable, Type: openai.Unavailable, Retry: 5, Message: fmt.Sprintf("%d streams of /v1/live are open, which is the limit: close a dashboard or a kvroute top, or read /v1/live without Accept: text/event-stream", maxStreams)}
		e.Write(w)
		return
	}
	defer l.leave()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	control := http.NewResponseController(w)
	s := stream{out: &patient{w, control, l.conf.stall}, sent: make([]uint64, len(l.sections))}
	for {
		state := f.state.Load()
		if s.send(state) != nil || control.Flush() != nil {
			return
		}
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
		n := len(l.sections)
		l.feed = &feed{over: make(chan struct{})}
		l.feed.state.Store(&liveState{events: make([][]byte, n), versions: make([]uint64, n), next: make(chan struct{})})
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
	s := &liveState{events: slices.Clone(old.events), versions: slices.Clone(old.versions), samples: old.samples, next: make(chan struct{})}
	for i, part := range l.sections {
		text, err := encode(part.read())
		if event := event(part.name, text); err == nil && !bytes.Equal(event, s.events[i]) {
			s.events[i] = event
			s.versions[i]++
		}
	}
	if l.conf.History == nil {
		return s
	}
	if s.samples == nil {
		s.samples = []liveSample{}
	}
	history := l.conf.History()
	for len(history) > 0 && len(s.samples) > 0 && s.samples[0].timeMS < history[0].TimeMS {
		s.samples = s.samples[1:]
	}
	for _, sample := range history {
		if n := len(s.samples); n > 0 && s.samples[n-1].timeMS >= sample.TimeMS {
			continue
		}
		if text, err := encode(sample); err == nil {
			s.samples = append(s.samples, liveSample{sample.TimeMS, text}) // older states do not see it
		}
	}
	return s
}

func event(name string, data []byte) []byte {
	return fmt.Appendf(nil, "event: %s\ndata: %s\n\n", name, bytes.TrimSpace(data))
}

// stream is one reader of a feed. It remembers only what it has sent, not the data.
type stream struct {
	out     *patient
	sent    []uint64 // versions of the sections
	history int64    // time of the last sample
	begun   bool     // the history was sent
}

// send writes what has changed since the last call. A reader that is slow misses the states in
// between.
func (s *stream) send(state *liveState) error {
	for i, event := range state.events {
		if s.sent[i] == state.versions[i] {
			continue
		}
		if _, err := s.out.Write(event); err != nil {
			return err
		}
		s.sent[i] = state.versions[i]
	}
	var list [][]byte
	for _, sample := range state.samples {
		if !s.begun || sample.timeMS > s.history {
			list = append(list, bytes.TrimSpace(sample.text))
		}
	}
	if n := len(state.samples); n > 0 {
		s.history = state.samples[n-1].timeMS
	}
	if len(list) == 0 && (s.begun || state.samples == nil) {
		return nil
	}
	s.begun = true
	_, err := s.out.Write(event("history", slices.Concat([]byte("["), bytes.Join(list, []byte(",")), []byte("]"))))
	return err
}
