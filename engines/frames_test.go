// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/engines"
)

func TestFrames(t *testing.T) {
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
		"of the event plane": {{}, number(4660), number(1), {1, 0, 0, 0, 0}},
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
	f.Add([]byte{}, []byte{}, []byte("12345678"), unhex(f, batchZ4), uint8(3))
	f.Fuzz(func(_ *testing.T, a, b, c, d []byte, n uint8) {
		_, _ = engines.SplitFrames([][]byte{a, b, c, d}[4-min(n, 4):])
	})
}
