// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// syncTopic is the topic of the event plane on which replicas tell of their requests.
const syncTopic = "active_sequences_events"

// sessionTopic is the topic on which replicas tell where sessions are bound.
const sessionTopic = "session_affinity_events"

// Bounds on what is believed of a message.
const (
	maxSyncID     = 1024
	maxSyncTokens = math.MaxInt32
)

var errSyncShape = errors.New("unexpected shape")

// syncEvent is one change of a request as it travels.
type syncEvent struct {
	router  uint64 // whose request it is; of a worker's own mark the worker's id
	started bool   // of a SlotTaken: the first token was there already
	router.Change
}

// appendSyncEvent appends the encoding of an event: the map that Dynamo's routers send,
// with its keys in their order. What only we know stands behind that.
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
	// Of a request whose prompt is computed nothing is to be computed, says the flag to
	// those who do not know started.
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

// syncReader reads payloads. Its memory is used again: an event and its hashes are good
// until the next one.
type syncReader struct {
	e      syncEvent
	hashes []uint64
	add    syncAdd
}

type syncAdd struct {
	hint, isl, overlap int // -1 = not said
	untracked          bool
}

// syncPayload is what a message says beside its events.
type syncPayload struct{ part, parts int }

// read calls yield for each event of a payload: a map of one event, or one of many
// under "events". bad counts those that cannot be read, each of which is skipped by
// itself; an error means that the payload as a whole is no such thing.
func (r *syncReader) read(data []byte, yield func(*syncEvent)) (p syncPayload, bad int, err error) {
	batched := false
	rest, err := eachSyncField(data, func(key, value []byte) ([]byte, error) {
		var err error
		switch string(key) {
		case "events":
			batched = true
			var n uint32
			if n, value, err = msgp.ReadArrayHeaderBytes(value); err != nil {
				return value, err
			}
			for i := range n {
				// Most can be read: to find the end of one first is to read it twice.
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
			p.part, value, err = readSyncInt(value)
		case "parts":
			p.parts, value, err = readSyncInt(value)
		default:
			value, err = msgp.Skip(value)
		}
		return value, err
	})
	if err != nil {
		return p, bad, fmt.Errorf("replicas: read a message of a replica: %w", err)
	}
	if batched {
		return p, bad, nil
	}
	if _, err := r.event(data[:len(data)-len(rest)]); err != nil {
		return p, bad + 1, nil //nolint:nilerr // it is counted
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
	rest, err = eachSyncField(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "request_id":
			id = true
			e.ID, rest, err = msgp.ReadStringBytes(value)
		case "worker":
			worker = true
			return eachSyncField(value, func(key, value []byte) (rest []byte, err error) {
				switch string(key) {
				case "worker_id":
					e.Worker.ID, rest, err = msgp.ReadUint64Bytes(value)
				case "dp_rank":
					e.Worker.DPRank, rest, err = msgp.ReadUint32Bytes(value)
				default:
					rest, err = msgp.Skip(value)
				}
				return rest, err
			})
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
		err = fmt.Errorf("%w: a field of the event is missing", errSyncShape)
	case e.ID == "" || len(e.ID) > maxSyncID:
		err = fmt.Errorf("%w: an id of %d bytes", errSyncShape, len(e.ID))
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
	return eachSyncField(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "AddRequest":
			e.Kind = router.SlotTaken
			return r.addition(value, e)
		case "SlotMoved":
			e.Kind = router.SlotMoved
			return eachSyncField(value, func(key, value []byte) (rest []byte, err error) {
				if string(key) == "cached_tokens" {
					e.CachedTokens, rest, err = readSyncInt(value)
					return rest, err
				}
				return msgp.Skip(value)
			})
		}
		return msgp.Skip(value)
	})
}

func (r *syncReader) addition(data []byte, e *syncEvent) (rest []byte, err error) {
	r.add = syncAdd{hint: -1, isl: -1, overlap: -1}
	rest, err = eachSyncField(data, func(key, value []byte) (rest []byte, err error) {
		switch {
		case string(key) == "track_prefill_tokens":
			var tracked bool
			tracked, rest, err = msgp.ReadBoolBytes(value)
			r.add.untracked = !tracked
		case string(key) == "guessed":
			e.Guessed, rest, err = msgp.ReadBoolBytes(value)
		case string(key) == "started":
			e.started, rest, err = msgp.ReadBoolBytes(value)
		case msgp.IsNil(value):
			rest, err = msgp.Skip(value)
		case string(key) == "token_sequence":
			e.Sequence, rest, err = r.sequence(value)
		case string(key) == "expected_output_tokens":
			e.ExpectedOutput, rest, err = readSyncInt(value)
		case string(key) == "isl":
			r.add.isl, rest, err = readSyncInt(value)
		case string(key) == "overlap":
			r.add.overlap, rest, err = readSyncInt(value)
		case string(key) == "prefill_load_hint":
			rest, err = eachSyncField(value, func(key, value []byte) (rest []byte, err error) {
				if string(key) == "initial_effective_prefill_tokens" && !msgp.IsNil(value) {
					r.add.hint, rest, err = readSyncInt(value)
					return rest, err
				}
				return msgp.Skip(value)
			})
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
	r.add.fill(e)
	return rest, err
}

// fill says what the numbers of an addition mean. Older and newer Dynamo leave some out:
// then the prompt is as long as what is left of it, and of that the rest is unknown.
func (a *syncAdd) fill(e *syncEvent) {
	e.OverlapBlocks = max(0, a.overlap)
	e.PromptTokens = max(a.isl, a.hint, 0)
	e.PrefillUntracked = a.untracked && !e.started
	switch {
	case a.hint >= 0:
		e.CachedTokens = e.PromptTokens - a.hint
	case a.isl >= 0 && a.overlap >= 0:
		e.CachedTokens = -1 // as many as the blocks have
	}
}

func (r *syncReader) sequence(data []byte) (all []uint64, rest []byte, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil {
		return nil, rest, err
	}
	if int64(n) > int64(len(rest)) { // each takes a byte at least
		return nil, rest, fmt.Errorf("%w: %d hashes in %d bytes", errSyncShape, n, len(rest))
	}
	const wide = 0xcf // a number of 8 bytes follows, as of all but few hashes
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

// readSyncInt reads a number of tokens, blocks or parts.
func readSyncInt(data []byte) (int, []byte, error) {
	n, rest, err := msgp.ReadUint64Bytes(data)
	if err == nil && n > maxSyncTokens {
		err = fmt.Errorf("%w: the number %d", errSyncShape, n)
	}
	return int(min(n, maxSyncTokens)), rest, err
}

// eachSyncField calls f for each field of a map with all that follows the key; f
// returns what follows the value.
func eachSyncField(data []byte, f func(key, value []byte) (rest []byte, err error)) (rest []byte, err error) {
	n, rest, err := msgp.ReadMapHeaderBytes(data)
	if err != nil {
		return rest, err
	}
	for range n {
		var key []byte
		if key, rest, err = msgp.ReadStringZC(rest); err != nil {
			return rest, err
		}
		if rest, err = f(key, rest); err != nil {
			return rest, err
		}
	}
	return rest, nil
}

// readLegacy reads a change as Dynamo 0.8 sends it: JSON without an envelope, the router
// a text, whose hash stands for it. There is nothing that says how long ago it was.
func readLegacy(data []byte) (e syncEvent, err error) {
	var said struct {
		ID     string `json:"request_id"`
		Worker *router.Worker
		Data   json.RawMessage
		Router string `json:"router_id"`
	}
	if err = json.Unmarshal(data, &said); err != nil {
		return e, fmt.Errorf("replicas: read a message of a replica: %w", err)
	}
	if said.Worker == nil || said.Router == "" || said.ID == "" || len(said.ID) > maxSyncID {
		return e, fmt.Errorf("%w: a field of the event is missing, or the id has %d bytes", errSyncShape, len(said.ID))
	}
	e.ID, e.Worker, e.router = said.ID, *said.Worker, wire.WorkerID(said.Router)
	switch string(said.Data) {
	case `"MarkPrefillCompleted"`:
		e.Kind = router.FirstToken
		return e, nil
	case `"Free"`:
		e.Kind = router.SlotFreed
		return e, nil
	}
	var kind struct {
		AddRequest *struct {
			Sequence []uint64 `json:"token_sequence"`
			Tokens   int      `json:"isl"`
			Overlap  int      `json:"overlap"`
			Output   int      `json:"expected_output_tokens"`
		}
	}
	if bytes.HasPrefix(said.Data, []byte("{")) {
		if err := json.Unmarshal(said.Data, &kind); err != nil {
			return e, fmt.Errorf("replicas: read a message of a replica: %w", err)
		}
	}
	if a := kind.AddRequest; a != nil {
		for _, n := range []int{a.Tokens, a.Overlap, a.Output} {
			if n < 0 || n > maxSyncTokens {
				return e, fmt.Errorf("%w: the number %d", errSyncShape, n)
			}
		}
		e.Kind, e.Sequence, e.ExpectedOutput = router.SlotTaken, a.Sequence, a.Output
		add := syncAdd{hint: -1, isl: a.Tokens, overlap: a.Overlap}
		add.fill(&e)
	}
	return e, nil // or of a kind to come
}

// encodeSession returns where a session of a router's is bound, as Dynamo's routers say
// it. That it is over only we say; others take the message for another use.
func encodeSession(s *router.SessionBinding, from uint64) []byte {
	n := uint32(4)
	if s.Over {
		n++
	}
	b := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, n), "session_id"), s.Session)
	b = msgp.AppendUint64(msgp.AppendString(b, "worker_id"), s.Worker.ID)
	b = msgp.AppendUint32(msgp.AppendString(b, "dp_rank"), s.Worker.DPRank)
	b = msgp.AppendUint64(msgp.AppendString(b, "router_id"), from)
	if s.Over {
		b = msgp.AppendBool(msgp.AppendString(b, "final"), true)
	}
	return b
}

// readSession reads that.
func readSession(data []byte) (s router.SessionBinding, from uint64, err error) {
	var worker bool
	_, err = eachSyncField(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "session_id":
			s.Session, rest, err = msgp.ReadStringBytes(value)
		case "worker_id":
			worker = true
			s.Worker.ID, rest, err = msgp.ReadUint64Bytes(value)
		case "dp_rank":
			if msgp.IsNil(value) {
				return msgp.Skip(value)
			}
			s.Worker.DPRank, rest, err = msgp.ReadUint32Bytes(value)
		case "router_id":
			from, rest, err = msgp.ReadUint64Bytes(value)
		case "final":
			s.Over, rest, err = msgp.ReadBoolBytes(value)
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
	if err == nil && (s.Session == "" || len(s.Session) > maxSyncID || !worker || from == 0) {
		err = fmt.Errorf("%w: a field of the binding is missing, or the session's name has %d bytes", errSyncShape, len(s.Session))
	}
	return s, from, err
}

// digestOf is a request's part of the digest of a replica's requests: FNV-1a of the
// id, the worker and whether it has its first token, numbers little-endian, mixed as
// MurmurHash3 ends. Since the worker is in it, the exclusive or of all compares the
// requests of every worker at once.
func digestOf(id string, w router.Worker, started bool) uint64 {
	h := uint64(0xcbf29ce484222325)
	add := func(b byte) { h = (h ^ uint64(b)) * 0x100000001b3 }
	for i := range len(id) {
		add(id[i])
	}
	for i := range 8 {
		add(byte(w.ID >> (8 * i)))
	}
	for i := range 4 {
		add(byte(w.DPRank >> (8 * i)))
	}
	if started {
		add(1)
	} else {
		add(0)
	}
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
