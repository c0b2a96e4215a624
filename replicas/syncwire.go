// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/router"
)

// syncTopic is the topic of the event plane on which replicas publish their requests.
const syncTopic = "active_sequences_events"

// sessionTopic is the topic on which replicas publish where sessions are bound.
const sessionTopic = "session_affinity_events"

// Bounds of a message.
const (
	maxSyncID = 1024 // bytes
)

// syncEvent is one change of a request as it travels.
type syncEvent struct {
	router  uint64 // the owner of the request; the worker's id if a worker publishes a first token
	started bool   // of SlotTaken in a list: the request has its first token
	router.Change
}

// appendSyncEvent appends the encoding of an event: the map that Dynamo's routers send,
// with its keys in their order, and behind these the keys that only kvroute has.
func appendSyncEvent(b []byte, e *syncEvent) []byte {
	n := uint32(5)
	if e.Abandoned {
		n++
	}
	b = msgp.AppendString(msgp.AppendMapHeader(b, n), "request_id")
	b = msgp.AppendString(msgp.AppendString(b, e.ID), "worker")
	b = msgp.AppendString(msgp.AppendMapHeader(b, 2), "worker_id")
	b = msgp.AppendString(msgp.AppendUint64(b, e.Worker.ID), "dp_rank")
	b = msgp.AppendString(msgp.AppendUint32(b, e.Worker.DPRank), "data")
	switch e.Kind {
	case router.SlotTaken:
		b = appendSyncAdd(b, e)
	case router.FirstToken:
		b = msgp.AppendString(b, "MarkPrefillCompleted")
	case router.SlotMoved:
		b = msgp.AppendString(msgp.AppendMapHeader(b, 1), "SlotMoved")
		b = msgp.AppendString(msgp.AppendMapHeader(b, 1), "cached_tokens")
		b = msgp.AppendInt(b, e.CachedTokens)
	case router.SlotFreed:
		b = msgp.AppendString(b, "Free")
	}
	b = msgp.AppendUint64(msgp.AppendString(b, "router_id"), e.router)
	b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
	if e.Abandoned {
		b = msgp.AppendBool(msgp.AppendString(b, "abandoned"), true)
	}
	return b
}

func appendSyncAdd(b []byte, e *syncEvent) []byte {
	b = msgp.AppendString(msgp.AppendMapHeader(b, 1), "AddRequest")
	n := uint32(6)
	if e.Guessed {
		n++
	}
	if e.started {
		n++
	}
	b = msgp.AppendString(msgp.AppendMapHeader(b, n), "token_sequence")
	if e.Sequence == nil {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendArrayHeader(b, uint32(len(e.Sequence)))
		for _, h := range e.Sequence {
			b = msgp.AppendUint64(b, h)
		}
	}
	// For readers that do not know the key started: nothing is left to compute.
	tracked := !e.PrefillUntracked && !e.started
	b = msgp.AppendBool(msgp.AppendString(b, "track_prefill_tokens"), tracked)
	b = msgp.AppendString(b, "expected_output_tokens")
	if e.ExpectedOutput > 0 {
		b = msgp.AppendInt(b, e.ExpectedOutput)
	} else {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendString(b, "prefill_load_hint")
	if tracked {
		b = msgp.AppendString(msgp.AppendMapHeader(b, 2), "initial_effective_prefill_tokens")
		b = msgp.AppendInt(b, max(0, e.PromptTokens-e.CachedTokens))
		b = msgp.AppendNil(msgp.AppendString(b, "expected_prefill_duration"))
	} else {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "isl"), e.PromptTokens)
	b = msgp.AppendInt(msgp.AppendString(b, "overlap"), e.OverlapBlocks)
	if e.Guessed {
		b = msgp.AppendBool(msgp.AppendString(b, "guessed"), true)
	}
	if e.started {
		b = msgp.AppendBool(msgp.AppendString(b, "started"), true)
	}
	return b
}

// syncReader reads payloads. Its memory is used again: an event and its hashes are valid
// until the next event.
type syncReader struct {
	e      syncEvent
	hashes []uint64
	add    syncAdd
}

// syncAdd are the numbers of an AddRequest as they are on the wire.
type syncAdd struct {
	hint, isl, overlap int // -1 = absent
	tracked            bool
}

// syncPayload is what a message has beside its events: its part of a list.
type syncPayload struct{ part, parts int }

// read calls yield for each event of a payload: a map of one event, or one of many
// under "events". bad counts those that cannot be read, each of which is skipped by
// itself; an error means that the payload as a whole is no such thing.
func (r *syncReader) read(data []byte, yield func(*syncEvent)) (p syncPayload, bad int, err error) {
	batched := false
	rest, err := eachField(data, func(key, value []byte) ([]byte, error) {
		var err error
		switch string(key) {
		case "events":
			batched = true
			var n uint32
			if n, value, err = msgp.ReadArrayHeaderBytes(value); err != nil {
				return value, err
			}
			for i := range n {
				// Only the end of an unreadable event is searched for: that reads it twice.
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

// event reads one event into e, and returns what follows it. One of an unknown kind has
// the Kind 0.
func (r *syncReader) event(data []byte) (rest []byte, err error) {
	r.e = syncEvent{}
	e := &r.e
	var id, worker, what bool
	rest, err = eachField(data, func(key, value []byte) (rest []byte, err error) {
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
		case "Free":
			e.Kind = router.SlotFreed
		}
		return rest, err
	}
	return eachField(data, func(key, value []byte) (rest []byte, err error) {
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
	rest, err = eachField(data, func(key, value []byte) (rest []byte, err error) {
		if string(key) == "token_sequence" && !msgp.IsNil(value) {
			e.Sequence, rest, err = r.sequence(value)
			return rest, err
		}
		return readField(key, value, fields)
	})
	add.fill(e)
	return rest, err
}

// fill derives an event's numbers. Dynamo's versions leave some of them out: without isl
// the prompt counts as long as what is left to compute.
func (a *syncAdd) fill(e *syncEvent) {
	e.OverlapBlocks = max(0, a.overlap)
	e.PromptTokens = max(a.isl, a.hint, 0)
	e.PrefillUntracked = !a.tracked && !e.started
	switch {
	case a.hint >= 0:
		e.CachedTokens = e.PromptTokens - a.hint
	case a.isl >= 0 && a.overlap >= 0:
		e.CachedTokens = -1 // those of the overlapping blocks
	}
}

func (r *syncReader) sequence(data []byte) (all []uint64, rest []byte, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil {
		return nil, rest, err
	}
	if int64(n) > int64(len(rest)) { // each takes a byte at least
		return nil, rest, fmt.Errorf("%w: %d hashes in %d bytes", errShape, n, len(rest))
	}
	const wide = 0xcf // uint64: the form of nearly all hashes
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

// sessionFields are the form of a session binding, as Dynamo's routers publish it. The
// key final is kvroute's own: Dynamo takes that message for one more use of the session.
func sessionFields(s *router.SessionBinding, from *uint64) []field {
	return []field{
		{"session_id", &s.Session},
		{"worker_id", &s.Worker.ID},
		{"dp_rank", &s.Worker.DPRank},
		{"router_id", from},
		{"final", &s.Over},
	}
}

// encodeSession encodes a session binding of a router.
func encodeSession(s *router.SessionBinding, from uint64) []byte {
	fields := sessionFields(s, &from)
	if !s.Over {
		fields = fields[:4]
	}
	return appendFields(nil, fields)
}

// readSession reads a session binding.
func readSession(data []byte) (s router.SessionBinding, from uint64, err error) {
	_, err = readFields(data, sessionFields(&s, &from))
	if err == nil && (s.Session == "" || len(s.Session) > maxSyncID || s.Worker.ID == 0 || from == 0) {
		err = fmt.Errorf("%w: a field of the binding is missing, or the session's name has %d bytes", errShape, len(s.Session))
	}
	return s, from, err
}
