// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/router"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// readAll reads a payload and returns its events.
func readAll(data []byte) (all []syncEvent, p syncPayload, bad int, err error) {
	var r syncReader
	p, bad, err = r.read(data, func(e *syncEvent) {
		one := *e
		one.Sequence = slices.Clone(e.Sequence)
		all = append(all, one)
	})
	return all, p, bad, err
}

// The wire form is that of Dynamo's routers.
func TestSyncVectors(t *testing.T) {
	of := func(c router.Change) syncEvent {
		c.ID, c.Worker = "req-1", router.Worker{ID: 7}
		return syncEvent{router: 99, Change: c}
	}
	for _, c := range []struct {
		name, hex string
		event     syncEvent
	}{
		{
			"S1", "85aa726571756573745f6964a57265712d31a6776f726b657282a9776f726b65725f696407a764705f72616e6b00a46461746181aa4164645265717565737486ae746f6b656e5f73657175656e636592cfcb38e4d7fb2dca5ccf44a2b2379d6d3c3db4747261636b5f70726566696c6c5f746f6b656e73c3b665787065637465645f6f75747075745f746f6b656e73c0b170726566696c6c5f6c6f61645f68696e7482d920696e697469616c5f6566666563746976655f70726566696c6c5f746f6b656e730ab965787065637465645f70726566696c6c5f6475726174696f6ec0a369736c0aa76f7665726c617000a9726f757465725f696463a96c6f72615f6e616d65c0",
			of(router.Change{Kind: router.SlotTaken, Sequence: []uint64{0xcb38e4d7fb2dca5c, 0x44a2b2379d6d3c3d}, PromptTokens: 10}),
		},
		{
			"S2", "85aa726571756573745f6964a57265712d31a6776f726b657282a9776f726b65725f696407a764705f72616e6b00a464617461b44d61726b50726566696c6c436f6d706c65746564a9726f757465725f696463a96c6f72615f6e616d65c0",
			of(router.Change{Kind: router.FirstToken}),
		},
		{
			"S3", "85aa726571756573745f6964a57265712d31a6776f726b657282a9776f726b65725f696407a764705f72616e6b00a464617461a446726565a9726f757465725f696463a96c6f72615f6e616d65c0",
			of(router.Change{Kind: router.SlotFreed}),
		},
	} {
		want := unhex(t, c.hex)
		if got := appendSyncEvent(nil, &c.event); !bytes.Equal(got, want) {
			t.Errorf("%s is written as\n%x, want\n%x", c.name, got, want)
		}
		all, _, bad, err := readAll(want)
		if diff := cmp.Diff([]syncEvent{c.event}, all, cmp.AllowUnexported(syncEvent{})); diff != "" || bad > 0 || err != nil {
			t.Errorf("%s is read as (-want +got), %d bad, %v\n%s", c.name, bad, err, diff)
		}
	}
}

// kvroute's own events can be read, alone and in batches. An unknown event does not
// discard the rest of its batch.
func TestSyncEventsComeThrough(t *testing.T) {
	w := router.Worker{ID: 1<<64 - 1, DPRank: 3}
	sent := []syncEvent{
		{router: 1, Change: router.Change{Kind: router.SlotTaken, ID: "a", Worker: w, PromptTokens: 117, CachedTokens: 64, OverlapBlocks: 4, Sequence: []uint64{1, 2}, Guessed: true, ExpectedOutput: 9}},
		{router: 1, started: true, Change: router.Change{Kind: router.SlotTaken, ID: "b", Worker: w, PromptTokens: 9, CachedTokens: -1, Sequence: []uint64{3}}},
		{router: 1, Change: router.Change{Kind: router.SlotTaken, ID: "c", Worker: w, PromptTokens: 9, CachedTokens: -1, PrefillUntracked: true}},
		{router: 1, Change: router.Change{Kind: router.SlotMoved, ID: "a", Worker: w, CachedTokens: 12}},
		{router: 2, Change: router.Change{Kind: router.FirstToken, ID: "a", Worker: w}},
		{router: 1, Change: router.Change{Kind: router.PrefillFailed, ID: "c", Worker: w}},
		{router: 1, Change: router.Change{Kind: router.SlotFreed, ID: "a", Worker: w, Abandoned: true}},
		{router: 1, Change: router.Change{Kind: router.SlotFreed, ID: "a", Worker: w, Abandoned: true, Left: true}},
	}
	batch := msgp.AppendMapHeader(nil, 4)
	batch = msgp.AppendInt(msgp.AppendString(batch, "part"), 1)
	batch = msgp.AppendInt(msgp.AppendString(batch, "parts"), 2)
	batch = msgp.AppendString(msgp.AppendString(batch, "later"), "what nobody knows")
	batch = msgp.AppendArrayHeader(msgp.AppendString(batch, "events"), uint32(len(sent)+2))
	batch = msgp.AppendString(batch, "no event")
	for i := range sent {
		single := appendSyncEvent(nil, &sent[i])
		all, _, bad, err := readAll(single)
		if diff := cmp.Diff(sent[i:i+1], all, cmp.AllowUnexported(syncEvent{})); diff != "" || bad > 0 || err != nil {
			t.Errorf("event %d (-sent +read), %d bad, %v\n%s", i, bad, err, diff)
		}
		batch = append(batch, single...)
	}
	kind := bytes.Replace(appendSyncEvent(nil, &sent[6]), []byte("Free"), []byte("Grow"), 1)
	batch = append(batch, kind...)
	all, p, bad, err := readAll(batch)
	if err != nil || bad != 1 || p != (syncPayload{1, 2}) || len(all) != len(sent)+1 || all[len(sent)].Kind != 0 {
		t.Fatalf("%d events, %+v, %d bad, %v", len(all), p, bad, err)
	}
	if diff := cmp.Diff(sent, all[:len(sent)], cmp.AllowUnexported(syncEvent{})); diff != "" {
		t.Errorf("a batch (-sent +read)\n%s", diff)
	}
}

func FuzzSyncRead(f *testing.F) {
	e := syncEvent{router: 1, Change: router.Change{Kind: router.SlotTaken, ID: "a", PromptTokens: 3, Sequence: []uint64{1}}}
	f.Add(appendSyncEvent(nil, &e))
	f.Add([]byte("\x81\xa6events\xdd\xff\xff\xff\xff"))
	f.Add(encodeSession(&router.SessionBinding{Session: "s", Worker: router.Worker{ID: 7}}, 9))
	f.Fuzz(func(t *testing.T, data []byte) {
		if s, from, err := readSession(data); err == nil && (s.Session == "" || len(s.Session) > maxSyncID || from == 0) {
			t.Errorf("read the session %+v of %d", s, from)
		}
		all, _, _, err := readAll(data)
		for i := range all {
			if e := &all[i]; e.ID == "" || len(e.ID) > maxSyncID || e.router == 0 || len(e.Sequence) > len(data) ||
				e.PromptTokens < 0 || e.PromptTokens > math.MaxInt32 || e.CachedTokens > e.PromptTokens {
				t.Errorf("read %+v, %v", e, err)
			}
		}
	})
}

// Frames of real Dynamo routers and workers can all be read. In any order of their
// publishers all requests end, and no load is left on any worker.
func TestSyncReadsDynamo(t *testing.T) {
	for _, version := range []string{"1.6.1"} {
		file, err := os.Open(fixtures.Need(t, "vectors", "dynamo-"+version, "events_nats.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		byPublisher := map[uint64][][]byte{}
		var captured [][]byte
		workers := map[uint64]bool{}
		for lines := bufio.NewScanner(file); lines.Scan(); {
			var row struct {
				Subject, Data string
			}
			if !bytes.Contains(lines.Bytes(), []byte(syncTopic)) {
				continue
			}
			if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
				t.Fatal(err)
			}
			data := unhex(t, row.Data)
			first, publisher := frame(t, data)
			workers[first.Worker.ID] = true
			captured = append(captured, data)
			byPublisher[publisher] = append(byPublisher[publisher], data)
		}
		if len(captured) < 40 {
			t.Fatalf("%s: only %d messages", version, len(captured))
		}
		for seed := range uint64(50) {
			w := newSyncWorld(t, seed, 1, workerIDs(workers)...)
			order := captured
			if seed > 0 {
				order = interleave(w.rand, byPublisher)
			}
			taken := 0
			for _, data := range order {
				w.replicas[0].in.message(w.replicas[0].sync.topic, data)
				for _, s := range w.replicas[0].router.Workers() {
					taken = max(taken, s.ActiveBlocks)
				}
			}
			if seed == 0 && taken == 0 {
				t.Fatalf("%s: no request is seen", version)
			}
			for _, s := range w.replicas[0].router.Workers() {
				if s.ActiveRequests != 0 || s.PendTokens != 0 || s.ActiveBlocks != 0 {
					t.Fatalf("%s, seed %d: worker %d is left with %+v", version, seed, s.Worker.ID, s)
				}
			}
		}
	}
}

// frame returns the first change in a message, and its sender.
func frame(t *testing.T, data []byte) (first syncEvent, publisher uint64) {
	t.Helper()
	env, err := events.DecodeEnvelope(data)
	if err != nil {
		t.Fatal(err)
	}
	all, _, bad, err := readAll(env.Payload)
	if err != nil || bad > 0 || len(all) == 0 {
		t.Fatalf("%d events, %d bad, %v", len(all), bad, err)
	}
	return all[0], env.PublisherID
}

// The wire form of a binding is that of Dynamo's routers.
func TestSessionVector(t *testing.T) {
	const a1 = "84aa73657373696f6e5f6964a3732d31a9776f726b65725f696407a764705f72616e6b00a9726f757465725f696463"
	b := router.SessionBinding{Session: "s-1", Worker: router.Worker{ID: 7}}
	if got := encodeSession(&b, 99); !bytes.Equal(got, unhex(t, a1)) {
		t.Errorf("A1 is written as %x", got)
	}
	for _, want := range []router.SessionBinding{b, {Session: "x", Worker: router.Worker{ID: 1<<64 - 1, DPRank: 3}, Over: true}} {
		if got, from, err := readSession(encodeSession(&want, 99)); got != want || from != 99 || err != nil {
			t.Errorf("%+v is read as %+v from %d, %v", want, got, from, err)
		}
	}
	// The message has a nil rank and an unknown key.
	odd := msgp.AppendNil(msgp.AppendString(unhex(t, "85"+a1[2:]), "other"))
	odd = bytes.Replace(odd, append([]byte("dp_rank"), 0), append([]byte("dp_rank"), 0xc0), 1)
	if got, _, err := readSession(odd); got != b || err != nil {
		t.Errorf("an odd one is read as %+v, %v", got, err)
	}
	for _, bad := range [][]byte{nil, unhex(t, "80"), unhex(t, a1)[:20], encodeSession(&router.SessionBinding{Worker: b.Worker}, 99), encodeSession(&b, 0)} {
		if got, _, err := readSession(bad); err == nil {
			t.Errorf("%x is read as %+v", bad, got)
		}
	}
}

// The binding of an id looks to Dynamo's routers like a session that no request has.
func TestGivenWire(t *testing.T) {
	for _, want := range []router.GivenBinding{{Key: 1, Worker: router.Worker{ID: 7}}, {Key: 1<<64 - 1, Worker: router.Worker{ID: 1<<64 - 1, DPRank: 3}}} {
		data := encodeGiven(want, 99)
		if got, from, isGiven := readGiven(data); got != want || from != 99 || !isGiven {
			t.Errorf("%+v is read as %+v from %d", want, got, from)
		}
		if b, from, err := readSession(data); err != nil || from != 99 || b.Worker != want.Worker || !strings.HasPrefix(b.Session, "given:") {
			t.Errorf("as a session: %+v from %d, %v", b, from, err)
		}
	}
	b := router.GivenBinding{Key: 1, Worker: router.Worker{ID: 7}}
	for _, bad := range [][]byte{
		nil, unhex(t, "80"), encodeGiven(b, 99)[:20], encodeGiven(b, 0), encodeGiven(router.GivenBinding{Key: 1}, 99),
		encodeGiven(router.GivenBinding{Worker: b.Worker}, 99), encodeSession(&router.SessionBinding{Session: "given:1", Worker: b.Worker}, 99),
	} {
		if got, _, isGiven := readGiven(bad); isGiven {
			t.Errorf("%x is read as %+v", bad, got)
		}
	}
}

// A list of ids is read as it was written; a worker or key of zero, and half a binding, are left out.
func TestIDsWire(t *testing.T) {
	want := []router.GivenBinding{{Key: 1, Worker: router.Worker{ID: 7}}, {Key: 1<<64 - 1, Worker: router.Worker{ID: 1<<64 - 1, DPRank: 1<<32 - 1}}}
	for _, list := range [][]router.GivenBinding{nil, want, append([]router.GivenBinding{{Key: 1}, {Worker: router.Worker{ID: 1}}}, want...)} {
		got, p, isList := readIDs(encodeIDs(list, syncPayload{2, 3}))
		if !isList || p != (syncPayload{2, 3}) || !slices.Equal(got, want[:min(len(list), 2)]) {
			t.Errorf("%v is read as %v, part %v", list, got, p)
		}
	}
	data := encodeIDs(want, syncPayload{0, 1})
	for _, bad := range [][]byte{nil, unhex(t, "80"), data[:len(data)-1], encodeIDs(want, syncPayload{1, 1}), encodeGiven(want[0], 9)} {
		if _, _, isList := readIDs(bad); isList {
			t.Errorf("%x is read", bad)
		}
	}
}

// A replica without requests answers a request for its list with one empty part: the peer waits for it.
func TestAnEmptyListHasOnePart(t *testing.T) {
	s := newSender(&Sync{link: link{room: func() int { return 1 << 20 }}})
	parts := s.listParts(nil)
	if len(parts) != 1 {
		t.Fatalf("an empty list has %d parts", len(parts))
	}
	data := append(msgp.AppendMapHeader(nil, 1), parts[0]...)
	if _, bad, err := new(syncReader).read(data, func(e *syncEvent) { t.Errorf("it has %+v", e) }); bad > 0 || err != nil {
		t.Errorf("%d bad events, %v", bad, err)
	}
}

// Whatever comes on the subjects of other replicas: the receiver stays within its limits, and nothing of a peer is left
// when the peer was silent for long.
func FuzzPeerMessages(f *testing.F) {
	f.Add(uint8(0), []byte(`{"router_id": 9, "sync_seq": 1, "active_requests": 2}`), []byte(`{"router_id": 9, "leaving": true}`))
	e := syncEvent{router: 9, Change: router.Change{Kind: router.SlotTaken, ID: "a", Worker: router.Worker{ID: 7}, PromptTokens: 3, Sequence: []uint64{1}}}
	f.Add(uint8(1), events.AppendEnvelope(nil, events.Envelope{PublisherID: 9, Sequence: 1, Topic: syncTopic, Payload: appendSyncEvent(nil, &e)}), []byte{})
	f.Add(uint8(2), events.AppendEnvelope(nil, events.Envelope{PublisherID: 9, Sequence: 1, Topic: syncTopic, Payload: []byte("\x83\xa6events\x90\xa4part\x00\xa5parts\x01")}), []byte{0xdf})
	f.Fuzz(func(t *testing.T, where uint8, first, second []byte) {
		w := newSyncWorld(t, 1, 1, 7)
		r := w.replicas[0]
		subject := []string{r.sync.presence, r.sync.topic, r.sync.lists, r.sync.sessionTopic}[where%4]
		r.in.message(r.sync.presence, []byte(`{"router_id": 9, "sync_seq": 1, "active_requests": 1}`))
		for _, data := range [][]byte{first, second, first} {
			r.in.message(subject, data)
		}
		for range 360 { // six minutes in steps: a long pause of this process ends no peer
			w.now = w.now.Add(time.Second)
			r.in.tick()
		}
		if len(r.in.peers)+len(r.in.dynamo) > 0 {
			t.Errorf("after six minutes %d peers and %d other routers are left", len(r.in.peers), len(r.in.dynamo))
		}
		r.router.Tick()
		if n := r.router.Workers()[0].ActiveRequests; n > 0 {
			t.Errorf("after six minutes %d requests are left", n)
		}
	})
}
