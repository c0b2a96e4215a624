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

// appendSyncEvent appends an event as Dynamo's routers encode it, with their keys in their
// order. Keys that only kvroute has follow.
func appendSyncEvent(b []byte, e *syncEvent) []byte {
	p := packer{b}
	p.header(5 + one(e.Abandoned))
	p.text("request_id", e.ID)
	p.key("worker")
	p.header(2)
	p.uint("worker_id", e.Worker.ID)
	p.uint("dp_rank", uint64(e.Worker.DPRank))
	switch e.Kind {
	case router.SlotTaken:
		p.key("data")
		p.addRequest(e)
	case router.FirstToken:
		p.text("data", "MarkPrefillCompleted")
	case router.PrefillFailed:
		p.text("data", "PrefillFailed")
	case router.SlotMoved:
		p.key("data")
		p.header(1)
		p.key("SlotMoved")
		p.header(1)
		p.count("cached_tokens", e.CachedTokens)
	case router.SlotFreed:
		p.text("data", "Free")
	}
	p.uint("router_id", e.router)
	p.null("lora_name")
	if e.Abandoned {
		p.flag("abandoned", true)
	}
	return p.b
}

// one returns 1 for true: the number of an optional entry.
func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (p *packer) addRequest(e *syncEvent) {
	p.header(1)
	p.key("AddRequest")
	p.header(6 + one(e.Guessed) + one(e.started))
	if e.Sequence == nil {
		p.null("token_sequence")
	} else {
		p.key("token_sequence")
		b := msgp.AppendArrayHeader(p.b, uint32(len(e.Sequence)))
		for _, h := range e.Sequence {
			b = msgp.AppendUint64(b, h)
		}
		p.b = b
	}
	// A reader that does not know the key started must not count tokens to compute.
	tracked := !e.PrefillUntracked && !e.started
	p.flag("track_prefill_tokens", tracked)
	if e.ExpectedOutput > 0 {
		p.count("expected_output_tokens", e.ExpectedOutput)
	} else {
		p.null("expected_output_tokens")
	}
	if tracked {
		p.key("prefill_load_hint")
		p.header(2)
		p.count("initial_effective_prefill_tokens", e.PromptTokens-e.CachedTokens)
		p.null("expected_prefill_duration")
	} else {
		p.null("prefill_load_hint")
	}
	p.count("isl", e.PromptTokens)
	p.count("overlap", e.OverlapBlocks)
	if e.Guessed {
		p.flag("guessed", true)
	}
	if e.started {
		p.flag("started", true)
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
	rest, err := msgpack.WalkFields(data, func(key, value []byte) ([]byte, error) {
		var err error
		switch string(key) {
		case "events":
			batched = true
			var n uint32
			if n, value, err = msgp.ReadArrayHeaderBytes(value); err != nil {
				return value, err
			}
			for i := range n {
				rest, err := r.event(value)
				if err == nil {
					value = rest
					yield(&r.e)
					continue
				}
				if value, err = msgp.Skip(value); err != nil {
					bad += int(n - i)
					return value, err
				}
				bad++
			}
			return value, nil
		case "part":
			p.part, value, err = readCount(value)
		case "parts":
			p.parts, value, err = readCount(value)
		default:
			value, err = msgp.Skip(value)
		}
		return value, err
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

// event reads one event into e, and returns the bytes behind it. An event of an unknown kind
// has the Kind 0.
func (r *syncReader) event(data []byte) (rest []byte, err error) {
	r.e = syncEvent{}
	e := &r.e
	var id, worker, what bool
	rest, err = msgpack.WalkFields(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "request_id":
			id = true
			e.ID, rest, err = msgp.ReadStringBytes(value)
		case "worker":
			worker = true
			return readFields(value, []field{{"worker_id", &e.Worker.ID}, {"dp_rank", &e.Worker.DPRank}})
		case "data":
			what = true
			rest, err = r.data(value, e)
		case "router_id":
			e.router, rest, err = msgp.ReadUint64Bytes(value)
		case "abandoned":
			e.Abandoned, rest, err = msgp.ReadBoolBytes(value)
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
	switch {
	case err != nil:
	case !id || !worker || !what || e.router == 0:
		err = fmt.Errorf("%w: a field of the event is missing", errShape)
	case e.ID == "" || len(e.ID) > maxSyncID:
		err = fmt.Errorf("%w: an id of %d bytes", errShape, len(e.ID))
	}
	return rest, err
}

func (r *syncReader) data(data []byte, e *syncEvent) (rest []byte, err error) {
	if msgp.NextType(data) == msgp.StrType {
		kind, rest, err := msgp.ReadStringZC(data)
		switch string(kind) {
		case "MarkPrefillCompleted":
			e.Kind = router.FirstToken
		case "PrefillFailed":
			e.Kind = router.PrefillFailed
		case "Free":
			e.Kind = router.SlotFreed
		}
		return rest, err
	}
	return msgpack.WalkFields(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "AddRequest":
			e.Kind = router.SlotTaken
			return r.addition(value, e)
		case "SlotMoved":
			e.Kind = router.SlotMoved
			return readFields(value, []field{{"cached_tokens", &e.CachedTokens}})
		}
		return msgp.Skip(value)
	})
}

func (r *syncReader) addition(data []byte, e *syncEvent) (rest []byte, err error) {
	add := &r.add
	*add = syncAdd{tracked: true, hint: -1, isl: -1, overlap: -1}
	fields := []field{
		{"track_prefill_tokens", &add.tracked},
		{"expected_output_tokens", &e.ExpectedOutput},
		{"prefill_load_hint", []field{{"initial_effective_prefill_tokens", &add.hint}}},
		{"isl", &add.isl},
		{"overlap", &add.overlap},
		{"guessed", &e.Guessed},
		{"started", &e.started},
	}
	rest, err = msgpack.WalkFields(data, func(key, value []byte) (rest []byte, err error) {
		if string(key) == "token_sequence" && !msgp.IsNil(value) {
			e.Sequence, rest, err = r.sequence(value)
			return rest, err
		}
		return readField(key, value, fields)
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

func (r *syncReader) sequence(data []byte) (all []uint64, rest []byte, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil {
		return nil, rest, err
	}
	if int64(n) > int64(len(rest)) { // each hash has a byte at least
		return nil, rest, fmt.Errorf("%w: %d hashes in %d bytes", errShape, n, len(rest))
	}
	const wide = 0xcf // the encoding of nearly all hashes: uint64
	all = slices.Grow(r.hashes[:0], int(n))
	for range n {
		if len(rest) >= 9 && rest[0] == wide {
			all = append(all, binary.BigEndian.Uint64(rest[1:]))
			rest = rest[9:]
			continue
		}
		var h uint64
		if h, rest, err = msgp.ReadUint64Bytes(rest); err != nil {
			return nil, rest, err
		}
		all = append(all, h)
	}
	r.hashes = all
	return all, rest, nil
}

// encodeSession encodes a session binding of a router, as Dynamo's routers do. Only kvroute
// has the key final; Dynamo takes that message for another use of the session.
func encodeSession(s *router.SessionBinding, from uint64) []byte {
	var p packer
	p.header(4 + one(s.Over))
	p.text("session_id", s.Session)
	p.uint("worker_id", s.Worker.ID)
	p.uint("dp_rank", uint64(s.Worker.DPRank))
	p.uint("router_id", from)
	if s.Over {
		p.flag("final", true)
	}
	return p.b
}

// readSession reads a session binding.
func readSession(data []byte) (s router.SessionBinding, from uint64, err error) {
	_, err = readFields(data, []field{{"session_id", &s.Session}, {"worker_id", &s.Worker.ID}, {"dp_rank", &s.Worker.DPRank}, {"router_id", &from}, {"final", &s.Over}})
	if err == nil && (s.Session == "" || len(s.Session) > maxSyncID || s.Worker.ID == 0 || from == 0) {
		err = fmt.Errorf("%w: a field of the binding is missing, or the session's name has %d bytes", errShape, len(s.Session))
	}
	return s, from, err
}
