// SPDX-License-Identifier: Apache-2.0

package events

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// Dialect is a way to say what happens in a worker's cache.
type Dialect uint8

// The dialects.
const (
	// DialectUnknown is none that we know.
	DialectUnknown Dialect = iota
	// DialectJSON is one event as JSON: Dynamo up to 0.8, and durable up to 1.3.
	DialectJSON
	// DialectComponent is an envelope with one event: Dynamo 0.9 to 1.3.
	DialectComponent
	// DialectEndpoint is an envelope with an array of events: Dynamo from 1.4 on,
	// and what we write.
	DialectEndpoint
)

// String returns the dialect's name.
func (d Dialect) String() string {
	return [...]string{"unknown", "json", "component", "endpoint"}[min(d, DialectEndpoint)]
}

// ErrDialect is wrapped by errors about messages of no known dialect.
var ErrDialect = errors.New("unknown dialect")

// Message is what one message says, whoever wrote it.
type Message struct {
	Dialect Dialect
	// Envelope has no payload. It is zero where the dialect has none.
	Envelope Envelope
	Events   []RouterEvent
	// Bad counts events that cannot be read, Unknown those of an unknown kind:
	// they stand among the events without a kind, because their ids count.
	Bad, Unknown int
}

// DecodeMessage reads a message of any dialect, which it finds out by looking at
// it. The error wraps [ErrDialect] if it is none.
func DecodeMessage(data []byte) (Message, error) {
	if len(data) == 0 {
		return Message{}, fmt.Errorf("events: decode message: %w: it is empty", ErrDialect)
	}
	switch first := msgp.NextType(data); {
	case first == msgp.ArrayType:
		return decodeArray(data, Envelope{})
	case first == msgp.MapType:
		return decodeMap(data)
	case data[0] == '{':
		ev, err := decodeJSONEvent(data)
		if err != nil {
			var probe struct{ Event map[string]json.RawMessage }
			if json.Unmarshal(data, &probe) != nil || probe.Event == nil {
				return Message{}, fmt.Errorf("events: decode message: %w: %w", ErrDialect, err)
			}
			return Message{Dialect: DialectJSON, Bad: 1}, nil
		}
		m := Message{Dialect: DialectJSON, Events: []RouterEvent{ev}}
		m.count()
		return m, nil
	}
	return Message{}, fmt.Errorf("events: decode message: %w: it begins with byte %#02x", ErrDialect, data[0])
}

// decodeMap reads an envelope.
func decodeMap(data []byte) (Message, error) {
	e, err := DecodeEnvelope(data)
	if err != nil {
		return Message{}, fmt.Errorf("%w: %w", ErrDialect, err)
	}
	payload := e.Payload
	e.Payload = nil
	switch first := msgp.NextType(payload); {
	case first == msgp.ArrayType:
		return decodeArray(payload, e)
	case first == msgp.MapType && hasField(payload, "event"): // else another topic's
		m := Message{Dialect: DialectComponent, Envelope: e}
		if m.Events, m.Bad, err = DecodeEvents(payload); err != nil {
			return Message{}, err
		}
		m.count()
		return m, nil
	}
	return Message{}, fmt.Errorf("events: decode message: %w: a payload of topic %q", ErrDialect, e.Topic[:min(len(e.Topic), 64)])
}

// decodeArray reads an array of events: it begins with a map or with nothing.
func decodeArray(data []byte, e Envelope) (Message, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil {
		return Message{}, fmt.Errorf("events: decode message: %w: %w", ErrDialect, err)
	}
	first := msgp.InvalidType
	if len(rest) > 0 {
		first = msgp.NextType(rest)
	}
	switch {
	case n == 0, first == msgp.MapType:
		m := Message{Dialect: DialectEndpoint, Envelope: e}
		if m.Events, m.Bad, err = DecodeEvents(data); err != nil {
			return Message{}, err
		}
		m.count()
		return m, nil
	default:
		return Message{}, fmt.Errorf("events: decode message: %w: an array of %s", ErrDialect, first)
	}
}

func (m *Message) count() {
	for i := range m.Events {
		if m.Events[i].Event.Kind == 0 {
			m.Unknown++
		}
	}
}

func hasField(data []byte, name string) (found bool) {
	_, err := msgpack.EachField(data, func(key, _ []byte) error {
		found = found || string(key) == name
		return nil
	})
	return err == nil && found
}

// jsonEvent is a RouterEvent in JSON.
type jsonEvent struct {
	WorkerID *jsonHash       `json:"worker_id"`
	Tier     string          `json:"storage_tier"`
	Domain   json.RawMessage `json:"residency_domain"`
	Event    *struct {
		ID   *uint64         `json:"event_id"`
		Data json.RawMessage `json:"data"`
		Rank uint32          `json:"dp_rank"`
	} `json:"event"`
}

type jsonData struct {
	Stored *struct {
		Parent *jsonHash `json:"parent_hash"`
		Blocks []struct {
			External *jsonHash `json:"block_hash"`
			Local    *jsonHash `json:"tokens_hash"`
		} `json:"blocks"`
	} `json:"stored"`
	Removed *struct {
		Hashes []jsonHash `json:"block_hashes"`
	} `json:"removed"`
	Cleared json.RawMessage `json:"cleared"`
}

// jsonHash is a number of 64 bits; a negative one keeps its bits.
type jsonHash uint64

// UnmarshalJSON reads it.
func (h *jsonHash) UnmarshalJSON(data []byte) error {
	n, err := jsonUint(data)
	*h = jsonHash(n)
	return err
}

func decodeJSONEvent(data []byte) (r RouterEvent, err error) {
	var j jsonEvent
	if err := json.Unmarshal(data, &j); err != nil {
		return r, err
	}
	if j.WorkerID == nil || j.Event == nil || j.Event.ID == nil || len(j.Event.Data) == 0 {
		return r, fmt.Errorf("%w: worker_id, event, event_id or data is missing", msgpack.ErrShape)
	}
	r.WorkerID, r.DPRank, r.EventID = uint64(*j.WorkerID), j.Event.Rank, *j.Event.ID
	if j.Tier != "" {
		if r.Event.Tier, err = tierNamed(j.Tier); err != nil {
			return r, err
		}
	}
	if len(j.Domain) > 0 {
		var domain *string
		if err := json.Unmarshal(j.Domain, &domain); err != nil || domain == nil {
			return r, fmt.Errorf("%w: residency_domain is no text", msgpack.ErrShape)
		}
		r.Foreign = *domain != "worker"
	}
	return r, decodeJSONData(j.Event.Data, &r.Event)
}

func decodeJSONData(data []byte, ev *indexer.Event) error {
	if data[0] == '"' {
		var kind string
		if err := json.Unmarshal(data, &kind); err != nil {
			return err
		}
		if kind == "cleared" {
			ev.Kind = indexer.Cleared
		}
		return nil
	}
	var j jsonData
	if err := json.Unmarshal(data, &j); err != nil {
		return err
	}
	switch {
	case j.Stored != nil:
		ev.Kind = indexer.Stored
		if j.Stored.Parent != nil {
			ev.Parent, ev.HasParent = uint64(*j.Stored.Parent), true
		}
		ev.Blocks = make([]indexer.Block, len(j.Stored.Blocks))
		for i, b := range j.Stored.Blocks {
			if b.External == nil || b.Local == nil {
				return fmt.Errorf("%w: a block without hashes", msgpack.ErrShape)
			}
			ev.Blocks[i] = indexer.Block{External: uint64(*b.External), Local: uint64(*b.Local)}
		}
	case j.Removed != nil:
		ev.Kind = indexer.Removed
		ev.Externals = make([]uint64, len(j.Removed.Hashes))
		for i, h := range j.Removed.Hashes {
			ev.Externals[i] = uint64(h)
		}
	case len(j.Cleared) > 0:
		ev.Kind = indexer.Cleared
	}
	return nil
}

// jsonUint reads an integer; a negative one keeps its bits.
func jsonUint(data []byte) (uint64, error) {
	if len(data) > 0 && data[0] == '-' {
		n, err := strconv.ParseInt(string(data), 10, 64)
		return uint64(n), err
	}
	return strconv.ParseUint(string(data), 10, 64)
}
