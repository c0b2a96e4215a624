// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// Frames of the event plane, as written by NVIDIA Dynamo's rules: E1 to E3 without
// the residency domain (1.3), E6 with it (1.6).
const (
	frameE1 = "83a9776f726b65725f696407ac73746f726167655f74696572a6646576696365a56576656e7483a86576656e745f696401a46461746181a673746f72656483ab706172656e745f68617368c0ae73746172745f706f736974696f6ec0a6626c6f636b739283aa626c6f636b5f6861736865ab746f6b656e735f68617368cfcb38e4d7fb2dca5cad6d6d5f65787472615f696e666fc083aa626c6f636b5f6861736866ab746f6b656e735f68617368cfe8d3ec39b907b74cad6d6d5f65787472615f696e666fc0a764705f72616e6b00"
	frameE2 = "83a9776f726b65725f696407ac73746f726167655f74696572a6646576696365a56576656e7483a86576656e745f696402a46461746181a772656d6f76656481ac626c6f636b5f6861736865739166a764705f72616e6b00"
	frameE3 = "83a9776f726b65725f696407ac73746f726167655f74696572a6646576696365a56576656e7483a86576656e745f696403a464617461a7636c6561726564a764705f72616e6b00"
	frameE5 = "85ac7075626c69736865725f6964cd1234a873657175656e636501ac7075626c69736865645f6174cf000001989e26cff4a5746f706963a96b762d6576656e7473a77061796c6f6164c4a0" + "92" + frameE2 + frameE3
	frameE6 = "9184a9776f726b65725f696407ac73746f726167655f74696572a6646576696365b07265736964656e63795f646f6d61696ea6776f726b6572a56576656e7483a86576656e745f696402a46461746181a772656d6f76656481ac626c6f636b5f6861736865739166a764705f72616e6b00"
)

var (
	eventE1 = events.RouterEvent{WorkerID: 7, EventID: 1, Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{
		{External: 101, Local: 14643705804678351452}, {External: 102, Local: 16777012769546811212},
	}}}
	eventE2 = events.RouterEvent{WorkerID: 7, EventID: 2, Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{102}}}
	eventE3 = events.RouterEvent{WorkerID: 7, EventID: 3, Event: indexer.Event{Kind: indexer.Cleared}}
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDecodeVectors(t *testing.T) {
	for name, c := range map[string]struct {
		frame string
		want  []events.RouterEvent
	}{
		"E1, one event":       {"91" + frameE1, []events.RouterEvent{eventE1}},
		"E4, an array":        {"92" + frameE2 + frameE3, []events.RouterEvent{eventE2, eventE3}},
		"E6, with its domain": {frameE6, []events.RouterEvent{eventE2}},
		"an empty array":      {"90", []events.RouterEvent{}},
	} {
		got, bad, err := events.DecodeEvents(unhex(t, c.frame))
		if err != nil || bad != 0 {
			t.Errorf("%s: %d bad, error %v", name, bad, err)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	e, err := events.DecodeEnvelope(unhex(t, frameE5))
	if err != nil || e.PublisherID != 4660 || e.Sequence != 1 || e.PublishedAt != 1755000000500 || e.Topic != "kv-events" || len(e.Payload) != 160 {
		t.Errorf("envelope %+v, %v", e, err)
	}
}

func TestEncodeVectors(t *testing.T) {
	if got, want := hex.EncodeToString(events.AppendEvents(nil, []events.RouterEvent{eventE2})), frameE6; got != want {
		t.Errorf("E6: got\n%s\nwant\n%s", got, want)
	}
	got := events.AppendEnvelope(nil, events.Envelope{
		PublisherID: 4660, Sequence: 1, PublishedAt: 1755000000500, Topic: "kv-events", Payload: unhex(t, "92"+frameE2+frameE3),
	})
	if want := unhex(t, frameE5); !bytes.Equal(got, want) {
		t.Errorf("E5: got\n%x\nwant\n%x", got, want)
	}
	// Written events are read back unchanged.
	all := []events.RouterEvent{eventE1, eventE2, eventE3, {WorkerID: 1<<64 - 1, DPRank: 3, EventID: 9, Event: indexer.Event{
		Kind: indexer.Stored, Tier: indexer.Disk, HasParent: true, Parent: 1 << 63, Blocks: []indexer.Block{{External: 1<<64 - 1, Local: 0}},
	}}}
	again, bad, err := events.DecodeEvents(events.AppendEvents(nil, all))
	if diff := cmp.Diff(all, again); diff != "" || bad != 0 || err != nil {
		t.Errorf("%d bad, error %v, (-want +got):\n%s", bad, err, diff)
	}
}

// A malformed event does not discard the other events of its message.
func TestOddEvents(t *testing.T) {
	foreign := strings.Replace(frameE6[2:], "a6776f726b6572", "ab63616368655f6f776e6572", 1)
	for _, c := range []struct {
		name, element string
		bad           int
		want          events.RouterEvent
	}{
		{"a number", "2a", 1, events.RouterEvent{}},
		{"an empty map", "80", 1, events.RouterEvent{}},
		{"an unknown tier", strings.Replace(frameE2, "a6646576696365", "a6646576696366", 1), 1, events.RouterEvent{}},
		{"a domain that is no text", strings.Replace(frameE6[2:], "a6776f726b6572", "c0", 1), 1, events.RouterEvent{}},
		{"a domain of others", foreign, 0, events.RouterEvent{WorkerID: 7, EventID: 2, Foreign: true, Event: eventE2.Event}},
		{"an unknown kind", strings.Replace(frameE3, "a7636c6561726564", "a76d656c7465645f", 1), 0, events.RouterEvent{WorkerID: 7, EventID: 3}},
		{"an unknown kind with content", strings.Replace(frameE2, "a772656d6f766564", "a76d656c7465645f", 1), 0, events.RouterEvent{WorkerID: 7, EventID: 2}},
		{"a negative hash keeps its bits", strings.Replace(frameE2, "9166", "91ff", 1), 0, events.RouterEvent{WorkerID: 7, EventID: 2, Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{1<<64 - 1}}}},
		{"a wider integer", strings.Replace(frameE2, "9166", "91d20000007f", 1), 0, events.RouterEvent{WorkerID: 7, EventID: 2, Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{127}}}},
		{"a hash that is text", strings.Replace(frameE2, "9166", "91a161", 1), 1, events.RouterEvent{}},
		{"a key nobody knows", "84" + "a3666f6f" + "9201c0" + frameE2[2:], 0, eventE2},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, bad, err := events.DecodeEvents(unhex(t, "93"+frameE1+c.element+frameE3))
			want := []events.RouterEvent{eventE1, c.want, eventE3}
			if c.bad > 0 {
				want = []events.RouterEvent{eventE1, eventE3}
			}
			if diff := cmp.Diff(want, got); diff != "" || bad != c.bad || err != nil {
				t.Errorf("%d bad, want %d; error %v; (-want +got):\n%s", bad, c.bad, err, diff)
			}
		})
	}
	// A truncated message yields its complete events; the others count as bad.
	got, bad, err := events.DecodeEvents(unhex(t, "93"+frameE1+frameE2[:40]))
	if len(got) != 1 || bad != 2 || err != nil {
		t.Errorf("cut off: %d events, %d bad, %v; want 1 and 2", len(got), bad, err)
	}
	for _, s := range []string{"", "c0", "2a", "a161", "dd"} {
		if _, _, err := events.DecodeEvents(unhex(t, s)); err == nil {
			t.Errorf("%q is accepted as a payload", s)
		}
	}
	for name, s := range map[string]string{
		"nothing": "", "an array": "90", "no payload": "81ac7075626c69736865725f6964cd1234", "trailing bytes": frameE5 + "00", "cut off": frameE5[:60],
	} {
		if _, err := events.DecodeEnvelope(unhex(t, s)); err == nil {
			t.Errorf("%s is accepted as an envelope", name)
		}
	}
}

// A header that claims millions of blocks must not make us reserve room for them.
func TestFalseLengthsCostNothing(t *testing.T) {
	frame := unhex(t, "ddffffffff"+frameE2)
	huge := unhex(t, "91"+strings.Replace(frameE2, "9166", "ddfffffff066", 1))
	if n := testing.AllocsPerRun(10, func() {
		_, _, _ = events.DecodeEvents(frame)
		_, _, _ = events.DecodeEvents(huge)
	}); n > 60 {
		t.Errorf("%v allocations for two short frames", n)
	}
	if _, bad, _ := events.DecodeEvents(frame); bad != 1<<32-2 {
		t.Errorf("%d bad events, want all that were claimed but one", bad)
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{"91" + frameE1, "92" + frameE2 + frameE3, frameE5, frameE6, "ddffffffff", "81a161c1"} {
		b, err := hex.DecodeString(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(events.AppendEvents(nil, sideEvents()))
	f.Fuzz(func(t *testing.T, data []byte) {
		if e, err := events.DecodeEnvelope(data); err == nil {
			data = e.Payload
		}
		evs, _, err := events.DecodeEvents(data)
		if err != nil || len(evs) == 0 {
			return
		}
		for i := range evs {
			evs[i].Foreign = false
			if evs[i].Event.Kind == 0 {
				evs[i].Event.Kind = indexer.Cleared
			}
		}
		again, bad, err := events.DecodeEvents(events.AppendEvents(nil, evs))
		if err != nil || bad > 0 || len(again) != len(evs) {
			t.Fatalf("%d events become %d, %d bad, %v", len(evs), len(again), bad, err)
		}
	})
}

// shared returns the folder of captured frames, or "" if it is absent.
func shared(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("KVROUTE_SHARED")
	if dir == "" {
		dir = "../../shared"
	}
	if _, err := os.Stat(dir); err != nil {
		if os.Getenv("KVROUTE_SHARED_REQUIRED") != "" {
			t.Fatalf("captured frames are required: %v", err)
		}
		return ""
	}
	return filepath.Join(dir, "data", "vectors")
}

// Frames that real Dynamo 1.6.1 workers sent are read, and written again to the
// same bytes.
func TestCapturedFrames(t *testing.T) {
	dir := shared(t)
	if dir == "" {
		t.Log("no captured frames at hand; the vectors above are what is tested")
		return
	}
	payloads, ids := 0, map[[3]uint64]uint64{}
	file, err := os.Open(filepath.Join(dir, "dynamo-1.6.1", "events_nats.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var row struct{ Subject, Data string }
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(row.Subject, ".kv-events") {
			continue
		}
		data := unhex(t, row.Data)
		e, err := events.DecodeEnvelope(data)
		if err != nil {
			t.Fatal(err)
		}
		evs, bad, err := events.DecodeEvents(e.Payload)
		if err != nil || bad > 0 {
			t.Fatalf("%d bad, %v", bad, err)
		}
		payloads++
		for _, ev := range evs {
			key := [3]uint64{ev.WorkerID, uint64(ev.DPRank), e.PublisherID}
			if ev.EventID != ids[key]+1 {
				t.Errorf("worker %d: event %d follows %d", ev.WorkerID, ev.EventID, ids[key])
			}
			ids[key] = ev.EventID
		}
		if again := events.AppendEnvelope(nil, events.Envelope{PublisherID: e.PublisherID, Sequence: e.Sequence, PublishedAt: e.PublishedAt, Topic: e.Topic, Payload: events.AppendEvents(nil, evs)}); !bytes.Equal(again, data) {
			t.Fatalf("written again:\n%x\nwas\n%x", again, data)
		}
	}
	if payloads != 33 {
		t.Errorf("%d captured payloads, want 33", payloads)
	}
	t.Logf("%d captured payloads", payloads)
}

// A block decodes to the same value whatever the order and integer width of its fields.
func TestBlocksInAnyForm(t *testing.T) {
	external, local, extra := "\xaablock_hash", "\xabtokens_hash", "\xadmm_extra_info\xc0"
	for name, block := range map[string]string{
		"plain":          "\x83" + external + "\x65" + local + "\xcc\xc8" + extra,
		"without extras": "\x82" + external + "\x65" + local + "\xcc\xc8",
		"another order":  "\x83" + local + "\xcc\xc8" + extra + external + "\x65",
		"wide":           "\x83" + external + "\xcf\x00\x00\x00\x00\x00\x00\x00\x65" + local + "\xd1\x00\xc8" + extra,
		"one more":       "\x84" + external + "\x65" + local + "\xcc\xc8" + extra + "\xa1x\x91\x01",
		"extras":         "\x83" + external + "\x65" + local + "\xcc\xc8" + "\xadmm_extra_info\x81\xa1x\x01",
	} {
		data := "\x91\x82\xa9worker_id\x07\xa5event\x82\xa8event_id\x01\xa4data\x81\xa6stored\x82\xabparent_hash\xc0\xa6blocks\x92" + block + block
		evs, bad, err := events.DecodeEvents([]byte(data))
		if err != nil || bad != 0 || len(evs) != 1 || len(evs[0].Event.Blocks) != 2 || evs[0].WorkerID != 7 || evs[0].EventID != 1 {
			t.Errorf("%s: %+v, %d bad, %v", name, evs, bad, err)
			continue
		}
		for _, b := range evs[0].Event.Blocks {
			if b.External != 101 || b.Local != 200 {
				t.Errorf("%s: %+v", name, b)
			}
		}
		for i := range len(data) { // and no end of it is believed
			if evs, bad, err := events.DecodeEvents([]byte(data[:i])); err == nil && bad == 0 && len(evs) > 0 {
				t.Errorf("%s: cut after %d bytes: %+v", name, i, evs)
			}
		}
	}
}
