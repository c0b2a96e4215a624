// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/kvroute/kvroute/indexer"
)

// jsonQuery is a query of Dynamo 0.8.
type jsonQuery struct {
	WorkerID uint64  `json:"worker_id"`
	Start    *uint64 `json:"start_event_id"`
	End      *uint64 `json:"end_event_id"`
}

// AppendJSONQuery appends the encoding of q to dst, in the form of Dynamo 0.8,
// which knows no ranks.
func AppendJSONQuery(dst []byte, q Query) []byte {
	var text jsonQuery
	text.WorkerID = q.WorkerID
	if q.HasStart {
		text.Start = &q.Start
	}
	if q.End > 0 {
		text.End = &q.End
	}
	data, err := json.Marshal(text)
	if err != nil {
		panic(err) // numbers can be written
	}
	return append(dst, data...)
}

func decodeJSONQuery(data []byte) (q Query, err error) {
	var text jsonQuery
	if err := json.Unmarshal(data, &text); err != nil {
		return q, fmt.Errorf("events: decode query: %w", err)
	}
	q.WorkerID, q.Kind = text.WorkerID, RecoveryKind
	if text.Start != nil {
		q.HasStart, q.Start = true, *text.Start
	}
	if text.End != nil {
		q.End = *text.End
	}
	return q, nil
}

// jsonAnswer is an answer of Dynamo 0.8, whose Events and TreeDump are lists, or of
// a later one as JSON.
type jsonAnswer struct {
	Events, TreeDump json.RawMessage
	TreeDumpFailed   *struct {
		LastEventID uint64 `json:"last_event_id"`
		Message     string `json:"message"`
	}
	TooNew *struct {
		Start  uint64 `json:"requested_start"`
		End    uint64 `json:"requested_end"`
		Newest uint64 `json:"newest_available"`
	}
	InvalidRange *struct {
		Start uint64 `json:"start_id"`
		End   uint64 `json:"end_id"`
	}
	Error *string
}

func decodeJSONAnswer(data []byte) (a Answer, err error) {
	var text jsonAnswer
	if err = json.Unmarshal(data, &text); err != nil {
		return a, fmt.Errorf("events: decode answer: %w", err)
	}
	switch {
	case text.Events != nil:
		a.Kind = AnswerEvents
		err = a.readJSON(text.Events)
	case text.TreeDump != nil:
		a.Kind = AnswerDump
		err = a.readJSON(text.TreeDump)
	case text.TreeDumpFailed != nil:
		a.Kind, a.HasLast = AnswerDumpFailed, true
		a.LastEventID, a.Message = text.TreeDumpFailed.LastEventID, text.TreeDumpFailed.Message
	case text.TooNew != nil:
		a.Kind, a.HasLast = AnswerTooNew, true
		a.Start, a.End, a.LastEventID = text.TooNew.Start, text.TooNew.End, text.TooNew.Newest
	case text.InvalidRange != nil:
		a.Kind, a.Start, a.End = AnswerInvalidRange, text.InvalidRange.Start, text.InvalidRange.End
	case text.Error != nil:
		a.Message = *text.Error
	default:
		a.Message = "an answer of an unknown kind"
	}
	a.Message = a.Message[:min(len(a.Message), 256)]
	if err != nil {
		return Answer{}, fmt.Errorf("events: decode answer: %w", err)
	}
	return a, nil
}

func (a *Answer) readJSON(data []byte) error {
	var list []json.RawMessage
	if len(data) > 0 && data[0] == '[' {
		if err := json.Unmarshal(data, &list); err != nil {
			return err
		}
	} else {
		var body struct {
			Events []json.RawMessage `json:"events"`
			Last   *uint64           `json:"last_event_id"`
		}
		if err := json.Unmarshal(data, &body); err != nil {
			return err
		}
		list = body.Events
		if body.Last != nil {
			a.HasLast, a.LastEventID = true, *body.Last
		}
	}
	for _, text := range list {
		ev, err := decodeJSONEvent(text)
		if err != nil {
			a.Bad++
			continue
		}
		a.Events = append(a.Events, ev)
	}
	return nil
}

// AppendJSONAnswer appends the encoding of a to dst, in the form of Dynamo 0.8: an
// answer with events is a list of them, and does not say which is the last.
func AppendJSONAnswer(dst []byte, a *Answer) []byte {
	var text any
	switch a.Kind {
	case AnswerEvents:
		text = map[string][]jsonOut{"Events": jsonEvents(a.Events)}
	case AnswerDump:
		text = map[string][]jsonOut{"TreeDump": jsonEvents(a.Events)}
	case AnswerTooNew:
		text = map[string]map[string]uint64{"TooNew": {"requested_start": a.Start, "requested_end": a.End, "newest_available": a.LastEventID}}
	case AnswerInvalidRange:
		text = map[string]map[string]uint64{"InvalidRange": {"start_id": a.Start, "end_id": a.End}}
	default:
		text = map[string]string{"Error": a.Kind.String() + " " + a.Message}
	}
	var out bytes.Buffer
	if err := json.NewEncoder(&out).Encode(text); err != nil {
		panic(err) // numbers and text can be written
	}
	return append(dst, bytes.TrimSpace(out.Bytes())...)
}

// jsonOut is an event as Dynamo 0.8 writes it.
type jsonOut struct {
	WorkerID uint64 `json:"worker_id"`
	Event    struct {
		EventID uint64          `json:"event_id"`
		Data    json.RawMessage `json:"data"`
		DPRank  uint32          `json:"dp_rank"`
	} `json:"event"`
}

type jsonBlock struct {
	External uint64 `json:"block_hash"`
	Local    uint64 `json:"tokens_hash"`
}

func jsonEvents(evs []RouterEvent) []jsonOut {
	list := make([]jsonOut, len(evs))
	for i := range evs {
		r, out := &evs[i], &list[i]
		out.WorkerID, out.Event.EventID, out.Event.DPRank = r.WorkerID, r.EventID, r.DPRank
		var data any = "cleared"
		switch r.Event.Kind {
		default:
		case indexer.Stored:
			stored := struct {
				Parent *uint64     `json:"parent_hash"`
				Blocks []jsonBlock `json:"blocks"`
			}{Blocks: make([]jsonBlock, len(r.Event.Blocks))}
			if r.Event.HasParent {
				stored.Parent = &r.Event.Parent
			}
			for j, b := range r.Event.Blocks {
				stored.Blocks[j] = jsonBlock{b.External, b.Local}
			}
			data = map[string]any{"stored": stored}
		case indexer.Removed:
			data = map[string]map[string][]uint64{"removed": {"block_hashes": append([]uint64{}, r.Event.Externals...)}}
		}
		text, err := json.Marshal(data)
		if err != nil {
			panic(err) // numbers and text can be written
		}
		out.Event.Data = text
	}
	return list
}
