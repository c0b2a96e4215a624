// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
)

const (
	queryQ1 = "86a9776f726b65725f696407a764705f72616e6b00ae73746172745f6576656e745f696402ac656e645f6576656e745f6964c0" +
		"b9737570706f7274735f747265655f64756d705f6661696c6564c3a46b696e64a87265636f76657279"
	// answerE2 is the answer with only event 2, in the form before residency_domain.
	answerE2Head = "81a64576656e747382a66576656e747391"
	answerE2Tail = "ad6c6173745f6576656e745f696402"
)

func TestQueries(t *testing.T) {
	q := events.Query{WorkerID: 7, HasStart: true, Start: 2}
	if got := hex.EncodeToString(events.AppendQuery(nil, q)); got != queryQ1 {
		t.Errorf("written %s\nwant    %s", got, queryQ1)
	}
	q.Kind = "recovery"
	for _, q := range []events.Query{
		q,
		{WorkerID: 1<<64 - 1, DPRank: 1<<32 - 1, Kind: "recovery"},
		{WorkerID: 1, HasStart: true, Start: 0, Kind: "recovery"},
		{WorkerID: 1, DPRank: 3, HasStart: true, Start: 1 << 60, End: 1 << 61, Kind: "other"},
	} {
		got, err := events.DecodeQuery(events.AppendQuery(nil, q))
		if err != nil || got != q {
			t.Errorf("read %+v, %v; want %+v", got, err, q)
		}
	}
	for _, bad := range []string{"", "\x80", "\x90", "{", `{"worker_id":7}`, string(events.AppendQuery(nil, q)) + "x", "\x81\xa9worker_id\xa1x"} {
		if _, err := events.DecodeQuery([]byte(bad)); err == nil {
			t.Errorf("%q is taken for a query", bad)
		}
	}
}

func someEvents() []events.RouterEvent {
	return []events.RouterEvent{
		{WorkerID: 7, EventID: 2, Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{102}}},
		{WorkerID: 7, DPRank: 1, EventID: 3, Event: indexer.Event{Kind: indexer.Cleared}},
		{WorkerID: 7, EventID: 4, Event: indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: 1 << 63, Blocks: []indexer.Block{{External: 5, Local: 1<<64 - 1}}}},
	}
}

func TestAnswers(t *testing.T) {
	for _, a := range []events.Answer{
		{Kind: events.AnswerEvents, Events: someEvents(), LastEventID: 9},
		{Kind: events.AnswerDump, Events: someEvents(), LastEventID: 1 << 62},
		{Kind: events.AnswerDump},
		{Kind: events.AnswerDumpFailed, LastEventID: 3, Message: "busy"},
		{Kind: events.AnswerTooNew, Start: 100, End: 200, LastEventID: 14},
		{Kind: events.AnswerTooNew, Start: 15, LastEventID: 14},
		{Kind: events.AnswerInvalidRange, Start: 15, End: 10},
		{Kind: events.AnswerError, Message: "no"},
	} {
		got, err := events.DecodeAnswer(events.AppendAnswer(nil, &a))
		if diff := cmp.Diff(a, got, cmpopts.EquateEmpty()); err != nil || diff != "" {
			t.Errorf("%v: %v (-want +got):\n%s", a.Kind, err, diff)
		}
	}
	// The forms that other programs write.
	e2 := unhex(t, answerE2Head+frameE2+answerE2Tail)
	old := append([]byte("\x81\xa6Events"), append([]byte{0x91}, unhex(t, frameE2)...)...)
	for name, c := range map[string]struct {
		data string
		want string
	}{
		"without a domain": {string(e2), "events 1 last 2"},
		"a kind to come":   {"\x81\xa5Later\xc0", "error 0 last 0"},
	} {
		a, err := events.DecodeAnswer([]byte(c.data))
		if got := describe(&a); err != nil || got != c.want {
			t.Errorf("%s: %s, %v; want %s", name, got, err, c.want)
		}
	}
	for _, bad := range []string{string(old), `{"TreeDump":[]}`, "", "\x80", "\x90", "{", "\x81\xa6Events\x80", "\x81\xa6TooNew\x80", "\x82\xa6Events\x90\xa6Events\x90", "\x81\xa6Events\x90\x01"} {
		if a, err := events.DecodeAnswer([]byte(bad)); err == nil {
			t.Errorf("%q is taken for an answer: %s", bad, describe(&a))
		}
	}
}

func describe(a *events.Answer) string {
	return fmt.Sprint(a.Kind, " ", len(a.Events), " last ", a.LastEventID)
}

// Captured queries and answers of Dynamo 1.6.1 are decoded correctly, and kvroute's queries have
// the same bytes.
func TestQueriesAndAnswersOfDynamo(t *testing.T) {
	path := fixtures.Need(t, "vectors", "dynamo-1.6.1", "recovery_query.jsonl")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range bytes.Lines(text) {
		var row struct {
			ID       string `json:"id"`
			Request  string `json:"request_hex"`
			Response []struct {
				Body string `json:"body_hex"`
			} `json:"response_frames"`
		}
		if err := json.Unmarshal(line, &row); err != nil {
			t.Fatal(err)
		}
		request := unhex(t, row.Request)
		at := bytes.Index(request, []byte("\x86\xa9worker_id"))
		q, err := events.DecodeQuery(request[at:])
		if err != nil {
			t.Errorf("%s: %v", row.ID, err)
		}
		if again := events.AppendQuery(nil, q); !bytes.Equal(again, request[at:]) {
			t.Errorf("%s: written %x\nwant %x", row.ID, again, request[at:])
		}
		kind, _, _ := strings.Cut(row.ID, "@")
		for _, f := range row.Response {
			body := unhex(t, f.Body)
			if !bytes.Contains(body, []byte("\xa4data")) {
				continue
			}
			_, rest, err := msgp.ReadMapKeyZC(body[1:])
			if err != nil {
				t.Fatal(err)
			}
			tail, err := msgp.Skip(rest)
			if err != nil {
				t.Fatal(err)
			}
			a, err := events.DecodeAnswer(rest[:len(rest)-len(tail)])
			want := map[string]events.AnswerKind{
				"full": events.AnswerDump, "from2": events.AnswerEvents, "range2_3": events.AnswerEvents,
				"inverted": events.AnswerInvalidRange, "toonew": events.AnswerTooNew,
			}[kind]
			if err != nil || a.Kind != want || a.Bad > 0 || want <= events.AnswerDump && len(a.Events) < 8 {
				t.Errorf("%s: %s, %d bad, %v; want %v", row.ID, describe(&a), a.Bad, err, want)
			}
			n++
		}
	}
	if n < 8 {
		t.Errorf("%d answers were read, want all that were captured", n)
	}
}

// No input makes the codecs panic, and decoded values are the same after encoding and decoding
// again.
func FuzzQuery(f *testing.F) {
	f.Add(events.AppendQuery(nil, events.Query{WorkerID: 7, HasStart: true, Start: 2}))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		q, err := events.DecodeQuery(data)
		if err != nil || q.Kind == "" {
			return
		}
		again, err := events.DecodeQuery(events.AppendQuery(nil, q))
		if err != nil || again != q {
			t.Errorf("%+v became %+v, %v", q, again, err)
		}
	})
}

func FuzzAnswer(f *testing.F) {
	for _, a := range []events.Answer{
		{Kind: events.AnswerEvents, Events: someEvents(), LastEventID: 9},
		{Kind: events.AnswerDump, Events: someEvents()},
		{Kind: events.AnswerTooNew, Start: 100, End: 200, LastEventID: 14},
		{Kind: events.AnswerError, Message: "no"},
	} {
		f.Add(events.AppendAnswer(nil, &a))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := events.DecodeAnswer(data)
		if err != nil {
			return
		}
		for i := range a.Events {
			if ev := &a.Events[i]; ev.Foreign || ev.Event.Kind == 0 {
				return // written by others only
			}
		}
		again, err := events.DecodeAnswer(events.AppendAnswer(nil, &a))
		if err != nil || again.Kind != a.Kind || len(again.Events) != len(a.Events) || again.Bad > 0 {
			t.Errorf("%s became %s, %v", describe(&a), describe(&again), err)
		}
	})
}

// An answer with changed bytes is refused or read, and never yields more events than it has bytes
// for.
func TestDamagedAnswers(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	whole := events.AppendAnswer(nil, &events.Answer{Kind: events.AnswerDump, Events: someEvents(), LastEventID: 9})
	for range 20_000 {
		data := bytes.Clone(whole)
		for range 1 + rng.IntN(3) {
			data[rng.IntN(len(data))] = byte(rng.Uint32())
		}
		a, err := events.DecodeAnswer(data[:1+rng.IntN(len(data))])
		if err == nil && len(a.Events) > len(data) {
			t.Fatalf("%d events out of %d bytes", len(a.Events), len(data))
		}
	}
}
