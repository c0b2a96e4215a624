// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/enginesim"
)

func TestFrames(t *testing.T) {
	e := events.Envelope{PublisherID: 4660, Sequence: 1, PublishedAt: 1755000000500, Topic: "kv-events", Payload: unhex(t, "92"+frameE2+frameE3)}
	frames := enginesim.PlaneFrames(e)
	if want := append(unhex(t, "01000000eb"), unhex(t, frameE5)...); !bytes.Equal(frames[3], want) {
		t.Errorf("got %x, want %x", frames[3], want)
	}
	f, err := engines.SplitFrames(frames[:])
	if err != nil || !f.Plane || f.Topic != "kv-events" || f.Publisher != 4660 || f.Sequence != 1 || !bytes.Equal(f.Body, unhex(t, frameE5)) {
		t.Errorf("%+v, %v", f, err)
	}
	number := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	batch := unhex(t, batchZ4)
	for name, c := range map[string]struct {
		frames [][]byte
		want   engines.Frames
	}{
		"live":               {[][]byte{[]byte("kv@a@m"), number(3), batch}, engines.Frames{Topic: "kv@a@m", Sequence: 3, Body: batch}},
		"live, no topic":     {[][]byte{{}, number(3), batch}, engines.Frames{Sequence: 3, Body: batch}},
		"replayed":           {[][]byte{{}, []byte("8 bytes!"), number(3), batch}, engines.Frames{Topic: "8 bytes!", Sequence: 3, Body: batch}},
		"replayed, old form": {[][]byte{{}, number(3), batch}, engines.Frames{Sequence: 3, Body: batch}},
		"end":                {[][]byte{{}, {}, number(1<<64 - 1), {}}, engines.Frames{Sequence: 1<<64 - 1, Body: []byte{}, End: true}},
		"end, old form":      {[][]byte{{}, number(1<<64 - 1), {}}, engines.Frames{Sequence: 1<<64 - 1, Body: []byte{}, End: true}},
	} {
		if got, err := engines.SplitFrames(c.frames); err != nil || !cmp.Equal(got, c.want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for name, bad := range map[string][][]byte{
		"none": nil, "one": {batch}, "five": {{}, {}, {}, number(1), batch}, "a short number": {{}, {1}, batch},
		"another publisher": {frames[0], number(4661), frames[2], frames[3]}, "another sequence": {frames[0], frames[1], number(2), frames[3]},
		"cut off": {frames[0], frames[1], frames[2], frames[3][:80]}, "no envelope": {frames[0], frames[1], frames[2], {1, 0, 0, 0, 0}},
	} {
		if f, err := engines.SplitFrames(bad); err == nil {
			t.Errorf("%s: accepted as %+v", name, f)
		}
	}
	if got := engines.ReplayFrames(258); len(got[0]) != 0 || !bytes.Equal(got[1], []byte{0, 0, 0, 0, 0, 0, 1, 2}) {
		t.Errorf("replay request %x", got)
	}
}

func FuzzFrames(f *testing.F) {
	e := enginesim.PlaneFrames(events.Envelope{PublisherID: 4660, Sequence: 1, Topic: "kv-events", Payload: unhex(f, "91"+frameE3)})
	f.Add(e[0], e[1], e[2], e[3], uint8(4))
	f.Add([]byte{}, []byte{}, []byte("12345678"), unhex(f, batchZ4), uint8(3))
	f.Fuzz(func(t *testing.T, a, b, c, d []byte, n uint8) {
		frames := [][]byte{a, b, c, d}[4-min(n, 4):]
		got, err := engines.SplitFrames(frames)
		if err == nil && got.Plane {
			// Accepted frames equal the frames of their envelope, up to its encoding.
			e, err := events.DecodeEnvelope(got.Body)
			if err != nil || e.PublisherID != got.Publisher || e.Sequence != got.Sequence {
				t.Fatalf("%+v, envelope %+v, %v", got, e, err)
			}
		}
	})
}
