// SPDX-License-Identifier: Apache-2.0

package dynamo_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
)

func envelope() events.Envelope {
	cleared := events.RouterEvent{WorkerID: 7, EventID: 3, Event: indexer.Event{Kind: indexer.Cleared}}
	return events.Envelope{PublisherID: 4660, Sequence: 1, PublishedAt: 1755000000500, Topic: events.Topic, Payload: events.AppendEvents(nil, []events.RouterEvent{cleared})}
}

func TestFrames(t *testing.T) {
	frames := enginesim.PlaneFrames(envelope())
	topic, body, err := dynamo.SplitFrames(frames[:])
	if err != nil || topic != events.Topic || !bytes.Equal(body, events.AppendEnvelope(nil, envelope())) {
		t.Errorf("topic %q, %x, %v", topic, body, err)
	}
	number := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	for name, bad := range map[string][][]byte{
		"none": nil, "three": frames[1:], "of an engine": {{}, {}, number(1), frames[3]},
		"another publisher": {frames[0], number(4661), frames[2], frames[3]}, "another sequence": {frames[0], frames[1], number(2), frames[3]},
		"cut off": {frames[0], frames[1], frames[2], frames[3][:80]}, "no envelope": {frames[0], frames[1], frames[2], {1, 0, 0, 0, 0}},
	} {
		if topic, body, err := dynamo.SplitFrames(bad); err == nil {
			t.Errorf("%s: accepted as %q, %x", name, topic, body)
		}
	}
}

// The frames that Dynamo's workers published are accepted.
func TestCapturedFrames(t *testing.T) {
	n := 0
	for _, version := range []string{"1.3.1", "1.6.1"} {
		fixtures.EachLine(t, filepath.Join(fixtures.Need(t, "vectors", "dynamo-"+version), "events_zmq.jsonl"), func(line []byte) {
			var row struct {
				Topic  string
				Frames []string
			}
			if err := json.Unmarshal(line, &row); err != nil {
				t.Fatal(err)
			}
			var frames [][]byte
			for _, f := range row.Frames {
				frame, _ := hex.DecodeString(f)
				frames = append(frames, frame)
			}
			topic, body, err := dynamo.SplitFrames(frames)
			if err != nil || topic != row.Topic || !bytes.Equal(body, frames[3][5:]) {
				t.Fatalf("topic %q, %v", topic, err)
			}
			n++
		})
	}
	if n < 300 {
		t.Errorf("only %d messages", n)
	}
}

// Accepted frames equal the frames of their envelope, up to its encoding.
func FuzzFrames(f *testing.F) {
	e := enginesim.PlaneFrames(envelope())
	f.Add(e[0], e[1], e[2], e[3])
	f.Fuzz(func(t *testing.T, a, b, c, d []byte) {
		_, body, err := dynamo.SplitFrames([][]byte{a, b, c, d})
		if err != nil {
			return
		}
		e, err := events.DecodeEnvelope(body)
		if err != nil || e.PublisherID != binary.BigEndian.Uint64(b) || e.Sequence != binary.BigEndian.Uint64(c) {
			t.Fatalf("envelope %+v, %v", e, err)
		}
	})
}
