// SPDX-License-Identifier: Apache-2.0

package events

import (
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// RouterEvent is one event of a worker's cache in a message.
type RouterEvent struct {
	WorkerID uint64
	DPRank   uint32
	// EventID grows by one with each event of a (worker, rank, publisher).
	EventID uint64
	// Foreign events have an id, and are about blocks that are not the worker's.
	Foreign bool
	Event   indexer.Event
	// Body is a batch of an engine, in place of Event.
	Body []byte
}

// Envelope is one message of the event plane.
type Envelope struct {
	PublisherID uint64 // new at each start of a publisher
	Sequence    uint64 // of the publisher's messages on the topic, from 0
	PublishedAt uint64 // unix ms
	Topic       string
	Payload     []byte
}

// tiers are the names of the storage tiers on the wire, by [indexer.Tier].
//
//nolint:gochecknoglobals // a table
var tiers = [...]string{"device", "host_pinned", "disk", "external"}

// AppendEnvelope appends the encoding of e to dst: a map with its keys in the
// order of the fields.
func AppendEnvelope(dst []byte, e Envelope) []byte {
	w := msgpack.Writer{B: dst}
	w.Map(5)
	w.Uint("publisher_id", e.PublisherID)
	w.Uint("sequence", e.Sequence)
	w.Uint("published_at", e.PublishedAt)
	w.Text("topic", e.Topic)
	w.Key("payload")
	return msgp.AppendBytes(w.B, e.Payload)
}

// DecodeEnvelope reads a message. The payload aliases it. An envelope without a
// publisher or payload is an error that names what is missing.
func DecodeEnvelope(data []byte) (Envelope, error) {
	var e Envelope
	rest, err := msgpack.ReadFields(data, []msgpack.Field{
		{Key: "publisher_id", Value: &e.PublisherID, Required: true},
		{Key: "sequence", Value: &e.Sequence},
		{Key: "published_at", Value: &e.PublishedAt},
		{Key: "topic", Value: &e.Topic},
		{Key: "payload", Value: &e.Payload, Required: true},
	})
	switch {
	case err != nil:
		return e, fmt.Errorf("events: decode envelope: %w", err)
	case len(rest) > 0:
		return e, fmt.Errorf("events: decode envelope: %d bytes follow it", len(rest))
	}
	return e, nil
}

// AppendEvents appends the encoding of a payload: an array of events.
func AppendEvents(dst []byte, evs []RouterEvent) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(evs)))
	for i := range evs {
		dst = AppendEvent(dst, &evs[i])
	}
	return dst
}

// AppendEvent appends the encoding of one event.
func AppendEvent(dst []byte, r *RouterEvent) []byte {
	w := msgpack.Writer{B: dst}
	w.Map(4)
	w.Uint("worker_id", r.WorkerID)
	w.Text("storage_tier", tiers[min(int(r.Event.Tier), len(tiers)-1)])
	w.Text("residency_domain", "worker")
	side := r.Event.Kind > indexer.Cleared
	w.Entries("event", map[bool]int{false: 3, true: 4}[side])
	w.Uint("event_id", r.EventID)
	w.Key("data")
	writeData(&w, &r.Event)
	if side {
		writeSide(&w, &r.Event)
	}
	w.Uint("dp_rank", uint64(r.DPRank))
	return w.B
}

func writeData(w *msgpack.Writer, ev *indexer.Event) {
	switch ev.Kind {
	case indexer.Stored:
		w.Map(1)
		w.Entries("stored", 3)
		w.Optional("parent_hash", ev.HasParent, ev.Parent)
		w.Null("start_position")
		w.List("blocks", len(ev.Blocks))
		for _, b := range ev.Blocks {
			w.B = msgp.AppendUint64(append(w.B, plainBlockBegin...), b.External)
			w.B = msgp.AppendUint64(append(w.B, plainBlockMiddle...), b.Local)
			w.B = append(w.B, plainBlockEnd...)
		}
	case indexer.Removed:
		w.Map(1)
		w.Entries("removed", 1)
		w.Uints("block_hashes", ev.Externals)
	case indexer.Shaped, indexer.SideStored, indexer.SideRemoved: // for other readers: no blocks are removed
		w.Map(1)
		w.Entries("removed", 1)
		w.Uints("block_hashes", nil)
	default:
		w.Key("cleared")
	}
}

// DecodeEvents reads a payload: an array of events. It counts an event that it cannot read in
// bad, and reads the others. An error means that the payload is no array.
func DecodeEvents(data []byte) (evs []RouterEvent, bad int, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil {
		return nil, 0, fmt.Errorf("events: decode payload: %w", err)
	}
	// An event takes at least 40 bytes, which bounds the number in a false header.
	evs = make([]RouterEvent, 0, min(int(n), len(data)/40+1))
	for i := range n {
		element := rest
		if rest, err = msgp.Skip(rest); err != nil {
			// The beginning of the next element is unknown.
			return evs, bad + int(n-i), nil //nolint:nilerr // counted in bad
		}
		ev, err := DecodeEvent(element[:len(element)-len(rest)])
		if err != nil {
			bad++
			continue
		}
		evs = append(evs, ev)
	}
	return evs, bad, nil
}

// DecodeEvent reads one event.
func DecodeEvent(data []byte) (r RouterEvent, err error) {
	var side indexer.Event
	_, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "worker_id", Value: &r.WorkerID},
		{Key: "storage_tier", Value: func(data []byte) (rest []byte, err error) {
			r.Event.Tier, rest, err = readTier(data)
			return rest, err
		}},
		{Key: "residency_domain", Value: func(data []byte) ([]byte, error) {
			domain, rest, err := msgp.ReadStringZC(data)
			r.Foreign = string(domain) != "worker"
			return rest, err
		}},
		{Key: "event", Required: true, Value: []msgpack.Field{
			{Key: "event_id", Value: &r.EventID, Required: true},
			{Key: "dp_rank", Value: &r.DPRank},
			{Key: "data", Required: true, Value: func(data []byte) ([]byte, error) { return decodeData(data, &r.Event) }},
			{Key: sideKey, Value: func(data []byte) ([]byte, error) { return decodeSide(data, &side) }},
		}},
	})
	if side.Kind != 0 {
		side.Tier, r.Event = r.Event.Tier, side
	}
	return r, err
}

// decodeData reads the kind of an event and its blocks. An event of an unknown kind keeps the
// zero Kind: its id counts, and it has no effect.
func decodeData(data []byte, ev *indexer.Event) (rest []byte, err error) {
	if msgp.NextType(data) == msgp.StrType {
		kind, rest, err := msgp.ReadStringZC(data)
		if string(kind) == "cleared" {
			ev.Kind = indexer.Cleared
		}
		return rest, err
	}
	return msgpack.WalkFields(data, func(key, data []byte) (rest []byte, err error) {
		switch string(key) {
		case "stored":
			ev.Kind = indexer.Stored
			return decodeStored(data, ev)
		case "removed":
			ev.Kind = indexer.Removed
			return decodeRemoved(data, ev)
		case "cleared":
			ev.Kind = indexer.Cleared
		}
		return msgp.Skip(data)
	})
}

func decodeStored(data []byte, ev *indexer.Event) (rest []byte, err error) {
	return msgpack.ReadFields(data, []msgpack.Field{
		{Key: "parent_hash", Value: &ev.Parent, Found: &ev.HasParent},
		{Key: "blocks", Value: func(data []byte) (rest []byte, err error) {
			ev.Blocks, rest, err = msgpack.AppendList(ev.Blocks[:0], data, 20, decodeBlock)
			return rest, err
		}},
	})
}

// The parts of a block in the form that kvroute and Dynamo write, between its two hashes.
const (
	plainBlockBegin  = "\x83\xaablock_hash"
	plainBlockMiddle = "\xabtokens_hash"
	plainBlockEnd    = "\xadmm_extra_info\xc0"
)

// plainBlock reads a block of the three fields in their usual order.
func plainBlock(data []byte) (b indexer.Block, rest []byte, ok bool) {
	var err error
	if len(data) < len(plainBlockBegin) || string(data[:len(plainBlockBegin)]) != plainBlockBegin {
		return b, data, false
	}
	if b.External, rest, err = msgpack.UintRest(data[len(plainBlockBegin):]); err != nil {
		return b, data, false
	}
	if len(rest) < len(plainBlockMiddle) || string(rest[:len(plainBlockMiddle)]) != plainBlockMiddle {
		return b, data, false
	}
	if b.Local, rest, err = msgpack.UintRest(rest[len(plainBlockMiddle):]); err != nil {
		return b, data, false
	}
	if len(rest) < len(plainBlockEnd) || string(rest[:len(plainBlockEnd)]) != plainBlockEnd {
		return b, data, false
	}
	return b, rest[len(plainBlockEnd):], true
}

// decodeBlock reads a block of a stored event. Most bytes on NATS are blocks, so there is a fast path
// for the form that kvroute and Dynamo write.
func decodeBlock(data []byte) (b indexer.Block, rest []byte, err error) {
	if b, rest, ok := plainBlock(data); ok {
		return b, rest, nil
	}
	rest, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "block_hash", Value: &b.External, Required: true},
		{Key: "tokens_hash", Value: &b.Local, Required: true},
	})
	return b, rest, err
}

func decodeRemoved(data []byte, ev *indexer.Event) (rest []byte, err error) {
	return msgpack.ReadFields(data, []msgpack.Field{{Key: "block_hashes", Value: func(data []byte) (rest []byte, err error) {
		ev.Externals, rest, err = msgpack.AppendList(ev.Externals[:0], data, 1, msgpack.UintRest)
		return rest, err
	}}})
}

func readTier(data []byte) (t indexer.Tier, rest []byte, err error) {
	name, rest, err := msgp.ReadStringZC(data)
	if err != nil {
		return 0, rest, err
	}
	at := slices.Index(tiers[:], string(name))
	if at < 0 {
		return 0, rest, fmt.Errorf("%w: storage tier %q", msgpack.ErrShape, name[:min(len(name), 32)])
	}
	return indexer.Tier(at), rest, nil
}
