// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/internal/msgpack"
	"github.com/kvroute/kvroute/internal/wire"
)

// Query requests from the local indexer of a worker the events of a rank from Start on, at
// least up to End. Without Start it requests the whole content of the rank.
type Query struct {
	WorkerID uint64
	DPRank   uint32
	HasStart bool
	Start    uint64
	End      uint64 // 0 = the newest
	// Kind is [RecoveryKind]; empty counts as the same. Queries of other kinds get no answer.
	Kind string
}

// RecoveryKind is the [Query.Kind] that requests events.
const RecoveryKind = "recovery"

// AnswerKind is the kind of an answer.
type AnswerKind uint8

// The answers.
const (
	AnswerError        AnswerKind = iota // any other answer; Message describes it
	AnswerEvents                         // Events from the first requested one to LastEventID
	AnswerDump                           // Events make the content of the rank after LastEventID
	AnswerDumpFailed                     // the worker could not make a dump
	AnswerTooNew                         // Start is above LastEventID, the newest
	AnswerInvalidRange                   // End is below Start
)

// answerNames are the kinds' names in messages.
//
//nolint:gochecknoglobals // a table
var answerNames = [...]string{"Error", "Events", "TreeDump", "TreeDumpFailed", "TooNew", "InvalidRange"}

// String returns the kind's name.
func (k AnswerKind) String() string {
	return [...]string{"error", "events", "dump", "dump_failed", "too_new", "invalid_range"}[min(k, AnswerInvalidRange)]
}

// Answer is an answer to a query, or a part of one.
type Answer struct {
	Kind   AnswerKind
	Events []RouterEvent
	// LastEventID is the id of the newest event in the answer; 0 without events.
	LastEventID uint64
	// Bad counts events that cannot be read.
	Bad        int
	Start, End uint64 // those of the query, in AnswerTooNew and AnswerInvalidRange
	Message    string
}

// AppendQuery appends the encoding of q to dst, in the form of NVIDIA Dynamo 1.6.
func AppendQuery(dst []byte, q Query) []byte {
	w := msgpack.Writer{B: dst}
	w.Map(6)
	w.Uint("worker_id", q.WorkerID)
	w.Uint("dp_rank", uint64(q.DPRank))
	w.Optional("start_event_id", q.HasStart, q.Start)
	w.Optional("end_event_id", q.End > 0, q.End)
	w.Flag("supports_tree_dump_failed", true)
	w.Text("kind", cmp.Or(q.Kind, RecoveryKind))
	return w.B
}

// DecodeQuery reads a query.
func DecodeQuery(data []byte) (q Query, err error) {
	q.Kind = RecoveryKind
	rest, err := msgpack.ReadFields(data, []msgpack.Field{
		{Key: "worker_id", Value: &q.WorkerID, Required: true},
		{Key: "dp_rank", Value: &q.DPRank},
		{Key: "start_event_id", Value: &q.Start, Found: &q.HasStart},
		{Key: "end_event_id", Value: &q.End},
		{Key: "kind", Value: &q.Kind},
	})
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%w: %d bytes follow it", msgpack.ErrShape, len(rest))
	}
	if err != nil {
		return q, fmt.Errorf("events: decode query: %w", err)
	}
	return q, nil
}

// AppendAnswer appends the encoding of a to dst, in the form of Dynamo 1.6.
func AppendAnswer(dst []byte, a *Answer) []byte {
	w := msgpack.Writer{B: dst}
	w.Map(1)
	switch a.Kind {
	case AnswerEvents:
		w.Entries("Events", 2)
		w.Key("events")
		w.B = AppendEvents(w.B, a.Events)
		w.Uint("last_event_id", a.LastEventID)
	case AnswerDump:
		w.Entries("TreeDump", 3)
		w.Key("events")
		w.B = AppendEvents(w.B, a.Events)
		w.Uint("last_event_id", a.LastEventID)
		w.Text("reset_scope", "all")
	case AnswerDumpFailed:
		w.Entries("TreeDumpFailed", 2)
		w.Uint("last_event_id", a.LastEventID)
		w.Text("message", a.Message)
	case AnswerTooNew:
		w.Entries("TooNew", 3)
		w.Uint("requested_start", a.Start)
		w.Optional("requested_end", a.End > 0, a.End)
		w.Uint("newest_available", a.LastEventID)
	case AnswerInvalidRange:
		w.Entries("InvalidRange", 2)
		w.Uint("start_id", a.Start)
		w.Uint("end_id", a.End)
	default:
		w.Text("Error", a.Message)
	}
	return w.B
}

// DecodeAnswer reads an answer. An answer of an unknown kind is an [AnswerError].
func DecodeAnswer(data []byte) (Answer, error) {
	a, known := Answer{}, 0
	rest, err := msgpack.WalkFields(data, func(key, data []byte) ([]byte, error) {
		known++
		value, rest, err := msgpack.Cut(data)
		if err == nil {
			err = a.read(string(key), value)
		}
		return rest, err
	})
	if err == nil && (known != 1 || len(rest) > 0) {
		err = fmt.Errorf("%w: %d answers, %d bytes behind them", msgpack.ErrShape, known, len(rest))
	}
	if err != nil {
		return Answer{}, fmt.Errorf("events: decode answer: %w", err)
	}
	return a, nil
}

// read reads the content of an answer of the named kind.
func (a *Answer) read(name string, data []byte) (err error) {
	kind := slices.Index(answerNames[:], name)
	switch kind {
	case -1:
		a.Message = "an answer of the unknown kind " + name[:min(len(name), 32)]
		return nil
	case int(AnswerError):
		a.Message, _, err = msgp.ReadStringBytes(data)
		a.Message = a.Message[:min(len(a.Message), 256)]
		return err
	}
	a.Kind = AnswerKind(kind)
	return a.readFields(data)
}

func (a *Answer) readFields(data []byte) error {
	var hasEvents, hasLast bool
	_, err := msgpack.ReadFields(data, []msgpack.Field{
		{Key: "events", Found: &hasEvents, Value: func(data []byte) (rest []byte, err error) {
			var list []byte
			if list, rest, err = msgpack.Cut(data); err == nil {
				a.Events, a.Bad, err = DecodeEvents(list)
			}
			return rest, err
		}},
		{Key: "last_event_id", Value: &a.LastEventID, Found: &hasLast},
		{Key: "newest_available", Value: &a.LastEventID, Found: &hasLast},
		{Key: "message", Value: &a.Message},
		{Key: "requested_start", Value: &a.Start},
		{Key: "start_id", Value: &a.Start},
		{Key: "requested_end", Value: &a.End},
		{Key: "end_id", Value: &a.End},
	})
	a.Message = a.Message[:min(len(a.Message), 256)]
	switch {
	case err != nil:
		return err
	case (a.Kind == AnswerEvents || a.Kind == AnswerDump) && !(hasEvents && hasLast):
		return fmt.Errorf("%w: no events or no last_event_id", msgpack.ErrShape)
	case a.Kind == AnswerTooNew && !hasLast:
		return fmt.Errorf("%w: no newest_available", msgpack.ErrShape)
	}
	return nil
}

// QuerySubject is the subject of queries to the local indexer of a worker's rank.
func QuerySubject(scope wire.Scope, worker uint64, rank string) string {
	return scope.Own("query", wire.WorkerKey(worker), rank)
}

// Headers of an answer.
const (
	HeaderPublisher = "Kvr-Publisher" // publisher of the event ids, 16 hex digits
	HeaderPart      = "Kvr-Part"      // number of the part, from 0
	HeaderParts     = "Kvr-Parts"     // how many there are; absent: one
)
