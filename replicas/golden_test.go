// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/router"
)

// syncMessage is a message about requests as a receiver reads it.
type syncMessage struct {
	Envelope events.Envelope // without its payload
	Position syncPayload
	Bad      int
	Changes  []syncEvent
}

func readSync(data []byte) (m syncMessage, err error) {
	if m.Envelope, err = events.DecodeEnvelope(data); err == nil {
		m.Changes, m.Position, m.Bad, err = readAll(m.Envelope.Payload)
		m.Envelope.Payload = nil
	}
	return m, err
}

// inPayload makes f of the payload in an envelope.
func inPayload(t *testing.T, f func([]byte) []byte) func([]byte) []byte {
	return func(data []byte) []byte {
		e, err := events.DecodeEnvelope(data)
		if err != nil {
			t.Error(err)
		}
		e.Payload = f(e.Payload)
		return events.AppendEnvelope(nil, e)
	}
}

// Later versions read the messages between router replicas that version 0.1.0 writes. This version ignores keys that it does not know.
func TestGoldenSync(t *testing.T) {
	now := time.UnixMilli(1755000000500)
	s, err := NewSync(nil, SyncConfig{
		ID: 99, Presence: Presence{StartedMS: 1754999999000, Version: "0.1.0", Replica: "replica-a", Group: "east"}, Now: func() time.Time { return now },
		Apply: func(uint64, router.Change) bool { return true }, Remove: func(uint64) {}, FirstToken: func(string) bool { return true },
	})
	if err != nil {
		t.Fatal(err)
	}
	var sent [][]byte
	s.link = link{
		publish: func(_, _ string, data []byte) error {
			sent = append(sent, append([]byte(nil), data...))
			return nil
		},
		connected: func() bool { return true }, reconnects: func() uint64 { return 0 }, room: func() int { return 1 << 20 },
	}
	message := func(what string) []byte {
		t.Helper()
		if len(sent) == 0 {
			t.Fatalf("%s is not sent", what)
		}
		first := sent[0]
		sent = sent[1:]
		return first
	}
	out := newSender(s)
	w := router.Worker{ID: 7, DPRank: 3}
	changes := []syncEvent{
		{router: 99, Change: router.Change{Kind: router.SlotTaken, ID: "a", Worker: w, PromptTokens: 117, CachedTokens: 64, OverlapBlocks: 4, Sequence: []uint64{1, 1<<64 - 1}, Guessed: true, ExpectedOutput: 9}},
		{router: 99, Change: router.Change{Kind: router.SlotTaken, ID: "b", Worker: w, PromptTokens: 9, CachedTokens: -1, PrefillUntracked: true}},
		{router: 99, Change: router.Change{Kind: router.SlotMoved, ID: "a", Worker: router.Worker{ID: 8}, CachedTokens: 12}},
		{router: 98, Change: router.Change{Kind: router.FirstToken, ID: "c", Worker: w}},
		{router: 99, Change: router.Change{Kind: router.PrefillFailed, ID: "b", Worker: w}},
		{router: 99, Change: router.Change{Kind: router.SlotFreed, ID: "a", Worker: w, Abandoned: true}},
	}
	out.sendAll(changes)
	envelope := events.Envelope{PublisherID: 99, PublishedAt: 1755000000500, Topic: syncTopic}
	fixtures.Golden(t, "0.1.0/slot-changes.bin", message("a list of changes"), readSync, syncMessage{Envelope: envelope, Changes: changes},
		fixtures.Later, inPayload(t, fixtures.Later))
	// One event without a list, as Dynamo's routers send it.
	fixtures.Golden(t, "0.1.0/slot-change.bin", appendSyncEvent(nil, &changes[0]), func(data []byte) ([]syncEvent, error) {
		all, _, _, err := readAll(data)
		return all, err
	}, changes[:1], fixtures.Later)

	s.othersSeen.Store(now.UnixNano())
	s.Publish(changes[0].Change)
	s.Publish(router.Change{Kind: router.FirstToken, ID: "a"})
	out.flush(false)
	message("the slot")
	out.sendList([]string{"x"})
	entry := changes[0]
	entry.started, entry.CachedTokens = true, -1 // a started request has no tokens to compute
	envelope.Sequence = 2
	list := message("the list")
	if m, err := readSync(bytes.Replace(list, []byte("\xa4part\x00"), []byte("\xa4part\x05"), 1)); err != nil || m.Position != (syncPayload{5, 1}) {
		t.Errorf("part 5 is read as %+v, %v", m.Position, err)
	}
	fixtures.Golden(t, "0.1.0/slot-list.bin", list, readSync, syncMessage{Envelope: envelope, Position: syncPayload{0, 1}, Changes: []syncEvent{entry}},
		fixtures.Later, inPayload(t, fixtures.Later))

	out.present(true)
	next := uint64(2)
	presence := s.conf.Presence
	presence.RouterID, presence.SyncSeq, presence.ActiveRequests, presence.Leaving = 99, &next, 1, true
	fixtures.Golden(t, "0.1.0/presence.json", message("a presence"), readJSON[Presence], presence, fixtures.Later)

	binding := router.SessionBinding{Session: "chat-1", Worker: w, Over: true}
	fixtures.Golden(t, "0.1.0/session.bin", encodeSession(&binding, 99), func(data []byte) (router.SessionBinding, error) {
		b, from, err := readSession(data)
		if from != 99 {
			t.Errorf("the session is of router %d, want 99", from)
		}
		return b, err
	}, binding, fixtures.Later)
	if len(sent) > 0 {
		t.Errorf("%d more messages are sent", len(sent))
	}
}

func readJSON[T any](data []byte) (v T, err error) {
	err = json.Unmarshal(data, &v)
	return v, err
}

// must returns a message, or ends the test.
func must(t *testing.T) func([]byte, error) []byte {
	return func(data []byte, err error) []byte {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
}

// Later versions read the messages between router groups that version 0.1.0 writes. This version ignores keys that it does not know.
func TestGoldenGroups(t *testing.T) {
	load := summary{
		Version: 1, Group: "east", Model: "llama", BlockSize: 16, Router: 99, Epoch: 1 << 60, Seq: 4, Kind: summaryLoad, Stride: 8, TakenMS: 1755000000500, IntervalMS: 1000,
		Load: groupLoad{Healthy: 1, Degraded: 2, Busy: 3, TotalBlocks: 4, ActiveBlocks: 5, PendTokens: 6, ActiveRequests: 7, Queued: 8, QueuedTokens: 9},
	}
	delta, full := load, load
	delta.Kind, delta.content = summaryDelta, events.AppendHashes(nil, []uint64{1, 1<<64 - 1})
	filter := indexer.NewFilter(4)
	hashes := []uint64{0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F}
	for _, h := range hashes {
		filter.Add(h)
	}
	full.Kind = summaryFull
	for part, content := range filterParts(filter, 1<<10) {
		full.Filter, full.content = part, content
	}
	for file, s := range map[string]summary{"load": load, "delta": delta, "full": full} {
		object := s
		object.content = nil
		fixtures.Golden(t, "0.1.0/summary-"+file+".bin", must(t)(encode(object, s.content)), func(data []byte) (summary, error) {
			got, err := readSummary(data)
			if f := got.Filter; err == nil && got.Kind == summaryFull { // its checkpoints are found
				has, err := indexer.ParseFilter(f.M, f.K, f.N, got.content)
				if err != nil || !has.Has(hashes[0]) || !has.Has(hashes[1]) || has.Has(1) {
					t.Errorf("a filter without its hashes, or with others: %v", err)
				}
			}
			if len(got.content) == 0 {
				got.content = nil
			}
			return got, err
		}, s, fixtures.Later)
	}

	p := router.Probe{ID: "42", Model: "llama", BlockSize: 16, Tokens: 50, Local: []uint64{1, 2, 1<<64 - 1}}
	fixtures.Golden(t, "0.1.0/probe.bin", must(t)(encodeProbe(&p)), readProbe, p, fixtures.Later)
	a := router.ProbeAnswer{Group: "east", Worker: router.Worker{ID: 7, DPRank: 3}, OverlapBlocks: 2, PendTokens: 30, ActiveBlocks: 5, ActiveRequests: 6, Cost: 1.5, Busy: true}
	fixtures.Golden(t, "0.1.0/probe-answer.json", must(t)(encodeProbeAnswer(&a, &p)), func(data []byte) (router.ProbeAnswer, error) {
		return readProbeAnswer(data, &p)
	}, a, fixtures.Later)
}
