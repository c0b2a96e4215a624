// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/internal/msgpack"
	"github.com/kvroute/kvroute/router"
)

// Topics of Dynamo's event plane.
const (
	syncTopic    = "active_sequences_events" // changes of requests
	sessionTopic = "session_affinity_events" // bindings of sessions
)

// presenceTopic is the topic of presences in kvroute's own subjects.
const presenceTopic = "presence"

// Presence is the message that a router replica runs.
type Presence struct {
	RouterID  uint64 `json:"router_id"`
	StartedMS int64  `json:"started_ms"`
	Version   string `json:"version,omitempty"`
	// Replica is its name, the same after a restart. Group is the name of its router group.
	Replica string `json:"replica,omitempty"`
	Group   string `json:"group,omitempty"`

	// SyncSeq is the number of its next message about requests. A presence without it is ignored.
	// ActiveRequests is the number of its requests in flight after the messages before.
	SyncSeq        *uint64 `json:"sync_seq,omitempty"`
	ActiveRequests int     `json:"active_requests,omitempty"`
	// Leaving is set in its last presence: its requests have ended.
	Leaving bool `json:"leaving,omitempty"`
}

const maxSyncID = 1024 // bytes of a request's id or a session's name

// syncEvent is a change of a request in a message.
type syncEvent struct {
	router  uint64 // the owner of the request; the worker's id if a worker publishes a first token
	started bool   // of SlotTaken in a list: the request has its first token
	router.Change
}

// changeNames are the kinds of changes without further data, as Dynamo's routers name them.
//
//nolint:gochecknoglobals // a table
var changeNames = [...]string{
	router.FirstToken: "MarkPrefillCompleted", router.PrefillFailed: "PrefillFailed", router.SlotFreed: "Free",
}

// appendSyncEvent appends an event as Dynamo's routers encode it, with their keys in their
// order. Keys that only kvroute has follow.
func appendSyncEvent(b []byte, e *syncEvent) []byte {
	w := msgpack.Writer{B: b}
	w.Map(5 + one(e.Abandoned) + one(e.Left))
	w.Text("request_id", e.ID)
	w.Entries("worker", 2)
	w.Uint("worker_id", e.Worker.ID)
	w.Uint("dp_rank", uint64(e.Worker.DPRank))
	switch e.Kind {
	case router.SlotTaken:
		w.Entries("data", 1)
		writeAddition(&w, e)
	case router.SlotMoved:
		w.Entries("data", 1)
		w.Entries("SlotMoved", 1)
		w.Uint("cached_tokens", number(e.CachedTokens))
	default:
		w.Text("data", changeNames[e.Kind])
	}
	w.Uint("router_id", e.router)
	w.Null("lora_name")
	if e.Abandoned {
		w.Flag("abandoned", true)
	}
	if e.Left {
		w.Flag("left", true)
	}
	return w.B
}

// one returns 1 for true: the number of an optional entry.
func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

// number is the form of a count in a message.
func number(n int) uint64 { return uint64(max(0, n)) }

func writeAddition(w *msgpack.Writer, e *syncEvent) {
	w.Entries("AddRequest", 6+one(e.Guessed)+one(e.started))
	if e.Sequence == nil {
		w.Null("token_sequence")
	} else {
		w.Uints("token_sequence", e.Sequence)
	}
	// A reader that does not know the key started must not count tokens to compute.
	tracked := !e.PrefillUntracked && !e.started
	w.Flag("track_prefill_tokens", tracked)
	w.Optional("expected_output_tokens", e.ExpectedOutput > 0, number(e.ExpectedOutput))
	if tracked {
		w.Entries("prefill_load_hint", 2)
		w.Uint("initial_effective_prefill_tokens", number(e.PromptTokens-e.CachedTokens))
		w.Null("expected_prefill_duration")
	} else {
		w.Null("prefill_load_hint")
	}
	w.Uint("isl", number(e.PromptTokens))
	w.Uint("overlap", number(e.OverlapBlocks))
	if e.Guessed {
		w.Flag("guessed", true)
	}
	if e.started {
		w.Flag("started", true)
	}
}

// syncReader reads payloads. It reuses its memory: an event and its hashes are valid until
// the next event.
type syncReader struct {
	e      syncEvent
	hashes []uint64
	add    syncAdd
}

// syncAdd are numbers of an AddRequest in a message.
type syncAdd struct {
	hint, isl, overlap int // -1 = absent
	tracked            bool
}

// syncPayload is the position of a message in a list.
type syncPayload struct{ part, parts int }

// read calls yield for each event of a payload: one event, or a map with a list of "events".
// bad is the number of events that cannot be read; the others count. An error means that
// the payload cannot be read to its end.
func (r *syncReader) read(data []byte, yield func(*syncEvent)) (p syncPayload, bad int, err error) {
	batched := false
	rest, err := msgpack.ReadFields(data, []msgpack.Field{
		{Key: "events", Found: &batched, Value: func(list []byte) (rest []byte, err error) {
			bad, rest, err = r.events(list, yield)
			return rest, err
		}},
		{Key: "part", Value: &p.part},
		{Key: "parts", Value: &p.parts},
	})
	if err != nil {
		return p, bad, fmt.Errorf("read a message of a replica: %w", err)
	}
	if batched {
		return p, bad, nil
	}
	if _, err := r.event(data[:len(data)-len(rest)]); err != nil {
		return p, bad + 1, nil //nolint:nilerr // the caller counts it
	}
	yield(&r.e)
	return p, bad, nil
}

// events calls yield for each event of a list. It returns the number of events that cannot be read,
// and the bytes behind the list.
func (r *syncReader) events(list []byte, yield func(*syncEvent)) (bad int, rest []byte, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(list)
	if err != nil {
		return 0, rest, err
	}
	for i := range n {
		after, err := r.event(rest)
		if err == nil {
			rest = after
			yield(&r.e)
			continue
		}
		if rest, err = msgp.Skip(rest); err != nil {
			return bad + int(n-i), rest, err
		}
		bad++
	}
	return bad, rest, nil
}

// event reads one event into e, and returns the bytes behind it. An event of an unknown kind
// has the Kind 0.
func (r *syncReader) event(data []byte) (rest []byte, err error) {
	r.e = syncEvent{}
	e := &r.e
	rest, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "request_id", Value: &e.ID, Required: true},
		{
			Key: "worker", Value: []msgpack.Field{
				{Key: "worker_id", Value: &e.Worker.ID}, {Key: "dp_rank", Value: &e.Worker.DPRank},
			}, Required: true,
		},
		{Key: "data", Value: r.data, Required: true},
		{Key: "router_id", Value: &e.router, Required: true},
		{Key: "abandoned", Value: &e.Abandoned},
		{Key: "left", Value: &e.Left},
	})
	if err == nil && (e.ID == "" || len(e.ID) > maxSyncID || e.router == 0) {
		err = fmt.Errorf("%w: an id of %d bytes, of router %d", errShape, len(e.ID), e.router)
	}
	return rest, err
}

// data reads what happened to the request of e.
func (r *syncReader) data(data []byte) (rest []byte, err error) {
	e := &r.e
	if msgp.NextType(data) == msgp.StrType {
		kind, rest, err := msgp.ReadStringZC(data)
		for k, name := range changeNames {
			if name != "" && string(kind) == name {
				e.Kind = router.ChangeKind(k)
			}
		}
		return rest, err
	}
	var added, moved bool
	rest, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "AddRequest", Value: r.addition, Found: &added},
		{Key: "SlotMoved", Value: []msgpack.Field{{Key: "cached_tokens", Value: &e.CachedTokens}}, Found: &moved},
	})
	switch {
	case added:
		e.Kind = router.SlotTaken
	case moved:
		e.Kind = router.SlotMoved
	}
	return rest, err
}

func (r *syncReader) addition(data []byte) (rest []byte, err error) {
	add, e := &r.add, &r.e
	*add = syncAdd{tracked: true, hint: -1, isl: -1, overlap: -1}
	rest, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "token_sequence", Value: r.sequence},
		{Key: "track_prefill_tokens", Value: &add.tracked},
		{Key: "expected_output_tokens", Value: &e.ExpectedOutput},
		{Key: "prefill_load_hint", Value: []msgpack.Field{{Key: "initial_effective_prefill_tokens", Value: &add.hint}}},
		{Key: "isl", Value: &add.isl},
		{Key: "overlap", Value: &add.overlap},
		{Key: "guessed", Value: &e.Guessed},
		{Key: "started", Value: &e.started},
	})
	add.fill(e)
	return rest, err
}

// fill sets an event's numbers. If isl is absent, the tokens to compute count as the prompt.
func (a *syncAdd) fill(e *syncEvent) {
	e.OverlapBlocks = max(0, a.overlap)
	e.PromptTokens = max(a.isl, a.hint, 0)
	e.PrefillUntracked = !a.tracked && !e.started
	switch {
	case a.hint >= 0:
		e.CachedTokens = e.PromptTokens - a.hint
	case a.isl >= 0 && a.overlap >= 0:
		e.CachedTokens = -1 // the tokens of the overlapping blocks
	}
}

// sequence reads the hashes of a prompt.
func (r *syncReader) sequence(data []byte) (rest []byte, err error) {
	if msgp.IsNil(data) {
		return msgp.Skip(data)
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil {
		return rest, err
	}
	if int64(n) > int64(len(rest)) { // each hash has a byte at least
		return rest, fmt.Errorf("%w: %d hashes in %d bytes", errShape, n, len(rest))
	}
	const wide = 0xcf // the encoding of nearly all hashes: uint64
	all := slices.Grow(r.hashes[:0], int(n))
	for range n {
		if len(rest) >= 9 && rest[0] == wide {
			all = append(all, binary.BigEndian.Uint64(rest[1:]))
			rest = rest[9:]
			continue
		}
		var h uint64
		if h, rest, err = msgp.ReadUint64Bytes(rest); err != nil {
			return rest, err
		}
		all = append(all, h)
	}
	r.hashes, r.e.Sequence = all, all
	return rest, nil
}

// encodeSession encodes a session binding of a router, as Dynamo's routers do. Only kvroute
// has the key final; Dynamo takes that message for another use of the session.
func encodeSession(s *router.SessionBinding, from uint64) []byte {
	var w msgpack.Writer
	w.Map(4 + one(s.Over))
	w.Text("session_id", s.Session)
	w.Uint("worker_id", s.Worker.ID)
	w.Uint("dp_rank", uint64(s.Worker.DPRank))
	w.Uint("router_id", from)
	if s.Over {
		w.Flag("final", true)
	}
	return w.B
}

// readSession reads a session binding.
func readSession(data []byte) (s router.SessionBinding, from uint64, err error) {
	_, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "session_id", Value: &s.Session},
		{Key: "worker_id", Value: &s.Worker.ID},
		{Key: "dp_rank", Value: &s.Worker.DPRank},
		{Key: "router_id", Value: &from},
		{Key: "final", Value: &s.Over},
	})
	if err == nil && (s.Session == "" || len(s.Session) > maxSyncID || s.Worker.ID == 0 || from == 0) {
		err = fmt.Errorf("%w: a field of the binding is missing, or the session's name has %d bytes", errShape,
			len(s.Session))
	}
	return s, from, err
}
