// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/events"
)

// Messages about used blocks equal those of Dynamo's workers, byte for byte.
func TestUsedBlocks(t *testing.T) {
	want := unhex(t, "85a9776f726b65725f696407a764705f72616e6b00b46163746976655f6465636f64655f626c6f636b73c0b56163746976655f70726566696c6c5f746f6b656e73c0ae6b765f757365645f626c6f636b73cd0200")
	if got := events.AppendUsedBlocks(nil, 7, 0, 512); !bytes.Equal(got, want) {
		t.Errorf("got  %x\nwant %x", got, want)
	}
	dir := shared(t)
	if dir == "" {
		return
	}
	checked := 0
	for _, row := range rows[struct {
		Subject, Data string
		Payload       json.RawMessage
	}](t, dir, "dynamo-1.6.1/events_nats.jsonl") {
		if !strings.HasSuffix(row.Subject, ".endpoint.generate."+events.LoadTopic) {
			continue
		}
		var said struct {
			Worker uint64 `json:"worker_id"`
			Rank   uint32 `json:"dp_rank"`
			Used   uint64 `json:"kv_used_blocks"`
		}
		if err := json.Unmarshal(row.Payload, &said); err != nil {
			t.Fatal(err)
		}
		e, err := events.DecodeEnvelope(unhex(t, row.Data))
		if err != nil || !bytes.Equal(e.Payload, events.AppendUsedBlocks(nil, said.Worker, said.Rank, said.Used)) {
			t.Fatalf("%s: %x, %v", row.Payload, e.Payload, err)
		}
		if u, present, err := events.ReadUsedBlocks(e.Payload); err != nil || !present || u != (events.UsedBlocks{WorkerID: said.Worker, DPRank: said.Rank, Blocks: int(said.Used)}) {
			t.Fatalf("%s: %+v, %v, %v", row.Payload, u, present, err)
		}
		checked++
	}
	if checked == 0 {
		t.Error("no message was captured")
	}
}

func TestOddUsedBlocks(t *testing.T) {
	for name, c := range map[string]struct {
		payload string
		said    bool
		bad     bool
	}{
		"of a router":  {"85a9776f726b65725f6964cfbe48767ac7b96708a764705f72616e6b00b46163746976655f6465636f64655f626c6f636b7304b56163746976655f70726566696c6c5f746f6b656e7340ae6b765f757365645f626c6f636b73c0", false, false},
		"no number":    {"81ae6b765f757365645f626c6f636b73a178", false, true},
		"negative":     {"81ae6b765f757365645f626c6f636b73ff", false, true},
		"no map":       {"01", false, true},
		"cut":          {"82a9776f726b65725f696407", false, true},
		"without rank": {"82a9776f726b65725f696407ae6b765f757365645f626c6f636b7305", true, false},
	} {
		if _, said, err := events.ReadUsedBlocks(unhex(t, c.payload)); said != c.said || err != nil != c.bad {
			t.Errorf("%s: said %v, %v", name, said, err)
		}
	}
}
