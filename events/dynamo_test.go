// SPDX-License-Identifier: Apache-2.0

package events_test

import (
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
		"nothing": nil, "a number": {1}, "text": []byte("hello"), "half a JSON": []byte(frameE0[:90]), "JSON of another kind": []byte(`{"worker_id":7,"isl_blocks":3}`),
		"JSON with a word for an event": []byte(`{"event":"x"}`),
		"another topic's map":           envelope(t, []byte("\x82\xa7version\x01\xa9worker_id\xa17")),
		"a number in an envelope":       envelope(t, []byte{7}), "nothing in an envelope": envelope(t, nil),
		"an array of text": []byte("\x91\xa1a"), "a map": []byte("\x81\xa1a\x01"),
	} {
		if m, err := events.DecodeMessage(data); !errors.Is(err, events.ErrDialect) {
			t.Errorf("%s: %+v, %v, want an error about the dialect", name, m, err)
		}
	}
}

func FuzzMessage(f *testing.F) {
	for _, s := range []string{frameE0, frameJ2, frameJ3, `{"event":{}}`} {
		f.Add([]byte(s))
	}
	f.Add(envelope(f, unhex(f, frameE1)))
	f.Add(envelope(f, unhex(f, "92"+frameE2+frameE3)))
	f.Add([]byte("\x82\xa2ts\xcb?\xf8\x00\x00\x00\x00\x00\x00\xa6events\x91\x91\xb0AllBlocksCleared"))
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
