// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// eventE0 is what frameE0 says in JSON, as Dynamo wrote it with and without tiers.
const (
	frameE0 = `{"worker_id":7,"storage_tier":"device","event":{"event_id":1,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":101,"tokens_hash":14643705804678351452,"mm_extra_info":null},{"block_hash":102,"tokens_hash":16777012769546811212,"mm_extra_info":null}]}},"dp_rank":0}}`
	frameJ2 = `{"worker_id":7,"event":{"event_id":2,"data":{"removed":{"block_hashes":[102]}}}}`
	frameJ3 = `{"worker_id":7,"event":{"event_id":3,"data":"cleared","dp_rank":0}}`
)

func envelope(t testing.TB, payload []byte) []byte {
	t.Helper()
	return events.AppendEnvelope(nil, events.Envelope{PublisherID: 1<<64 - 1, Sequence: 5, PublishedAt: 6, Topic: "kv-events", Payload: payload})
}

func TestDialects(t *testing.T) {
	head := events.Envelope{PublisherID: 1<<64 - 1, Sequence: 5, PublishedAt: 6, Topic: "kv-events"}
	for name, c := range map[string]struct {
		data []byte
		want events.Message
	}{
		"JSON, stored":       {[]byte(frameE0), events.Message{Dialect: events.DialectJSON, Events: []events.RouterEvent{eventE1}}},
		"JSON, removed":      {[]byte(frameJ2), events.Message{Dialect: events.DialectJSON, Events: []events.RouterEvent{eventE2}}},
		"JSON, cleared":      {[]byte(frameJ3), events.Message{Dialect: events.DialectJSON, Events: []events.RouterEvent{eventE3}}},
		"one event":          {envelope(t, unhex(t, frameE2)), events.Message{Dialect: events.DialectComponent, Envelope: head, Events: []events.RouterEvent{eventE2}}},
		"an array":           {envelope(t, unhex(t, "92"+frameE2+frameE3)), events.Message{Dialect: events.DialectEndpoint, Envelope: head, Events: []events.RouterEvent{eventE2, eventE3}}},
		"an array, nothing":  {envelope(t, unhex(t, "90")), events.Message{Dialect: events.DialectEndpoint, Envelope: head, Events: []events.RouterEvent{}}},
		"with a bad one":     {envelope(t, unhex(t, "92"+frameE2+"80")), events.Message{Dialect: events.DialectEndpoint, Envelope: head, Events: []events.RouterEvent{eventE2}, Bad: 1}},
		"an unknown kind":    {[]byte(`{"worker_id":7,"event":{"event_id":3,"data":{"melted":1}}}`), events.Message{Dialect: events.DialectJSON, Events: []events.RouterEvent{{WorkerID: 7, EventID: 3}}, Unknown: 1}},
		"an unknown word":    {[]byte(`{"worker_id":7,"event":{"event_id":3,"data":"melted"}}`), events.Message{Dialect: events.DialectJSON, Events: []events.RouterEvent{{WorkerID: 7, EventID: 3}}, Unknown: 1}},
		"another's blocks":   {[]byte(`{"worker_id":7,"residency_domain":"cache_owner","event":{"event_id":3,"data":"cleared"}}`), events.Message{Dialect: events.DialectJSON, Events: []events.RouterEvent{{WorkerID: 7, EventID: 3, Foreign: true, Event: indexer.Event{Kind: indexer.Cleared}}}}},
		"a negative hash":    {[]byte(`{"worker_id":7,"storage_tier":"disk","event":{"event_id":3,"dp_rank":2,"data":{"removed":{"block_hashes":[-1]}},"new":[]},"new":{}}`), events.Message{Dialect: events.DialectJSON, Events: []events.RouterEvent{{WorkerID: 7, DPRank: 2, EventID: 3, Event: indexer.Event{Kind: indexer.Removed, Tier: indexer.Disk, Externals: []uint64{1<<64 - 1}}}}}},
		"a hash in text":     {[]byte(`{"worker_id":7,"event":{"event_id":3,"data":{"removed":{"block_hashes":["1"]}}}}`), events.Message{Dialect: events.DialectJSON, Bad: 1}},
		"a block in half":    {[]byte(`{"worker_id":7,"event":{"event_id":3,"data":{"stored":{"blocks":[{"block_hash":1}]}}}}`), events.Message{Dialect: events.DialectJSON, Bad: 1}},
		"no id":              {[]byte(`{"worker_id":7,"event":{"data":"cleared"}}`), events.Message{Dialect: events.DialectJSON, Bad: 1}},
		"an unknown tier":    {[]byte(`{"worker_id":7,"storage_tier":"tape","event":{"event_id":3,"data":"cleared"}}`), events.Message{Dialect: events.DialectJSON, Bad: 1}},
		"a domain that null": {[]byte(`{"worker_id":7,"residency_domain":null,"event":{"event_id":3,"data":"cleared"}}`), events.Message{Dialect: events.DialectJSON, Bad: 1}},
	} {
		got, err := events.DecodeMessage(c.data)
		if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	for name, data := range map[string][]byte{
		"engine batch": unhex(t, batchZ4), "engine batch in an envelope": envelope(t, unhex(t, batchZ3)),
		"engine batch as a map": encode(nil, fields{"ts", 1.5, "events", list{cleared}}),
	} {
		if m, err := events.DecodeMessage(data); err != nil || m.Dialect != events.DialectEngine || len(m.Batch.Events) == 0 {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
	for name, data := range map[string][]byte{
		"nothing": nil, "a number": {1}, "text": []byte("hello"), "half a JSON": []byte(frameE0[:90]), "JSON of another kind": []byte(`{"worker_id":7,"isl_blocks":3}`),
		"JSON with a word for an event": []byte(`{"event":"x"}`),
		"another topic's map":           envelope(t, encode(nil, fields{"version", 1, "worker_id", "7"})),
		"a number in an envelope":       envelope(t, []byte{7}), "nothing in an envelope": envelope(t, nil),
		"an array of text": encode(nil, list{"a"}), "a map": encode(nil, fields{"a", 1}),
	} {
		if m, err := events.DecodeMessage(data); !errors.Is(err, events.ErrDialect) {
			t.Errorf("%s: %+v, %v, want an error about the dialect", name, m, err)
		}
	}
}

func TestFrames(t *testing.T) {
	e := events.Envelope{PublisherID: 4660, Sequence: 1, PublishedAt: 1755000000500, Topic: "kv-events", Payload: unhex(t, "92"+frameE2+frameE3)}
	frames := events.PlaneFrames(e)
	if want := append(unhex(t, "01000000eb"), unhex(t, frameE5)...); !bytes.Equal(frames[3], want) {
		t.Errorf("got %x, want %x", frames[3], want)
	}
	f, err := events.SplitFrames(frames[:])
	if err != nil || !f.Plane || f.Topic != "kv-events" || f.Publisher != 4660 || f.Sequence != 1 || !bytes.Equal(f.Body, unhex(t, frameE5)) {
		t.Errorf("%+v, %v", f, err)
	}
	number := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	batch := unhex(t, batchZ4)
	for name, c := range map[string]struct {
		frames [][]byte
		want   events.Frames
	}{
		"live":               {[][]byte{[]byte("kv@a@m"), number(3), batch}, events.Frames{Topic: "kv@a@m", Sequence: 3, Body: batch}},
		"live, no topic":     {[][]byte{{}, number(3), batch}, events.Frames{Sequence: 3, Body: batch}},
		"replayed":           {[][]byte{{}, []byte("8 bytes!"), number(3), batch}, events.Frames{Topic: "8 bytes!", Sequence: 3, Body: batch}},
		"replayed, old form": {[][]byte{{}, number(3), batch}, events.Frames{Sequence: 3, Body: batch}},
		"end":                {[][]byte{{}, {}, number(1<<64 - 1), {}}, events.Frames{Sequence: 1<<64 - 1, Body: []byte{}, End: true}},
		"end, old form":      {[][]byte{{}, number(1<<64 - 1), {}}, events.Frames{Sequence: 1<<64 - 1, Body: []byte{}, End: true}},
	} {
		if got, err := events.SplitFrames(c.frames); err != nil || !cmp.Equal(got, c.want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for name, bad := range map[string][][]byte{
		"none": nil, "one": {batch}, "five": {{}, {}, {}, number(1), batch}, "a short number": {{}, {1}, batch},
		"another publisher": {frames[0], number(4661), frames[2], frames[3]}, "another sequence": {frames[0], frames[1], number(2), frames[3]},
		"cut off": {frames[0], frames[1], frames[2], frames[3][:80]}, "no envelope": {frames[0], frames[1], frames[2], {1, 0, 0, 0, 0}},
	} {
		if f, err := events.SplitFrames(bad); err == nil {
			t.Errorf("%s: accepted as %+v", name, f)
		}
	}
	if got := events.ReplayFrames(258); len(got[0]) != 0 || !bytes.Equal(got[1], []byte{0, 0, 0, 0, 0, 0, 1, 2}) {
		t.Errorf("replay request %x", got)
	}
}

func FuzzMessage(f *testing.F) {
	for _, s := range []string{frameE0, frameJ2, frameJ3, `{"event":{}}`} {
		f.Add([]byte(s))
	}
	f.Add(unhex(f, batchZ3))
	f.Add(envelope(f, unhex(f, frameE1)))
	f.Add(envelope(f, unhex(f, "92"+frameE2+frameE3)))
	f.Add(encode(nil, fields{"ts", 1.5, "events", list{cleared}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := events.DecodeMessage(data)
		if (m.Dialect == events.DialectUnknown) != (err != nil) {
			t.Fatalf("dialect %v, error %v", m.Dialect, err)
		}
		if len(m.Events) == 0 {
			return
		}
		// What is read can be written, and read again.
		for i := range m.Events {
			if m.Events[i].Event.Kind == 0 {
				m.Events[i].Event.Kind = indexer.Cleared
			}
			m.Events[i].Foreign = false
		}
		again, bad, err := events.DecodeEvents(events.AppendEvents(nil, m.Events))
		if err != nil || bad > 0 || len(again) != len(m.Events) {
			t.Fatalf("%d events become %d, %d bad, %v", len(m.Events), len(again), bad, err)
		}
	})
}

func FuzzFrames(f *testing.F) {
	e := events.PlaneFrames(events.Envelope{PublisherID: 4660, Sequence: 1, Topic: "kv-events", Payload: unhex(f, "91"+frameE3)})
	f.Add(e[0], e[1], e[2], e[3], uint8(4))
	f.Add([]byte{}, []byte{}, []byte("12345678"), unhex(f, batchZ4), uint8(3))
	f.Fuzz(func(t *testing.T, a, b, c, d []byte, n uint8) {
		frames := [][]byte{a, b, c, d}[4-min(n, 4):]
		got, err := events.SplitFrames(frames)
		if err == nil && got.Plane {
			// Frames that are accepted are those of their envelope, up to its encoding.
			e, err := events.DecodeEnvelope(got.Body)
			if err != nil || e.PublisherID != got.Publisher || e.Sequence != got.Sequence {
				t.Fatalf("%+v, envelope %+v, %v", got, e, err)
			}
		}
	})
}
