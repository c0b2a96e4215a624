// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

func envelope(t testing.TB, payload []byte) []byte {
	t.Helper()
	return events.AppendEnvelope(nil, events.Envelope{PublisherID: 1<<64 - 1, Sequence: 5, PublishedAt: 6, Topic: "kv-events", Payload: payload})
}

// A message is an envelope with an array of events. Messages of Dynamo before 1.4 are refused.
func TestMessages(t *testing.T) {
	head := events.Envelope{PublisherID: 1<<64 - 1, Sequence: 5, PublishedAt: 6, Topic: "kv-events"}
	for name, c := range map[string]struct {
		data []byte
		want events.Message
	}{
		"an array":          {envelope(t, unhex(t, "92"+frameE2+frameE3)), events.Message{Envelope: head, Events: []events.RouterEvent{eventE2, eventE3}}},
		"an array, nothing": {envelope(t, unhex(t, "90")), events.Message{Envelope: head, Events: []events.RouterEvent{}}},
		"with a bad one":    {envelope(t, unhex(t, "92"+frameE2+"80")), events.Message{Envelope: head, Events: []events.RouterEvent{eventE2}, Bad: 1}},
	} {
		got, err := events.DecodeMessage(c.data)
		if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	for name, data := range map[string][]byte{
		"one event, as Dynamo 1.3 sends it": envelope(t, unhex(t, frameE2)), "JSON, as Dynamo 0.8 sends it": []byte(`{"worker_id":7,"event":{"event_id":3,"data":"cleared"}}`),
		"an array without an envelope": unhex(t, "92"+frameE2+frameE3), "nothing": nil, "a number": {1}, "text": []byte("hello"), "half a JSON": []byte(`{"worker_id":7,"event":{`), "JSON of another kind": []byte(`{"worker_id":7,"isl_blocks":3}`),
		"JSON with a word for an event": []byte(`{"event":"x"}`),
		"another topic's map":           envelope(t, []byte("\x82\xa7version\x01\xa9worker_id\xa17")),
		"a number in an envelope":       envelope(t, []byte{7}), "nothing in an envelope": envelope(t, nil),
		"an array of text": []byte("\x91\xa1a"), "a map": []byte("\x81\xa1a\x01"),
	} {
		if m, err := events.DecodeMessage(data); !errors.Is(err, events.ErrMessage) {
			t.Errorf("%s: %+v, %v, want an error about the message", name, m, err)
		}
	}
}

func FuzzMessage(f *testing.F) {
	f.Add([]byte(`{"event":{}}`))
	f.Add(envelope(f, unhex(f, frameE1)))
	f.Add(envelope(f, unhex(f, "92"+frameE2+frameE3)))
	f.Add([]byte("\x82\xa2ts\xcb?\xf8\x00\x00\x00\x00\x00\x00\xa6events\x91\x91\xb0AllBlocksCleared"))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := events.DecodeMessage(data)
		if err != nil && len(m.Events) > 0 {
			t.Fatalf("%d events, error %v", len(m.Events), err)
		}
		if len(m.Events) == 0 {
			return
		}
		// A message that was read can be written, and read again.
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
