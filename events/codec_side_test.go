// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

func sideEvents() []events.RouterEvent {
	shape := &indexer.Shape{Block: 16, Full: 64, Sides: []indexer.SideGroup{
		{Group: 0, Needs: indexer.NeedsWindow, Block: 16, Tokens: 1024},
		{Group: 7, Needs: indexer.NeedsState, Block: 640},
		{Group: 2, Needs: indexer.NeedsChunk, Block: 16, Tokens: 8192},
		{Group: 3, Block: 4},
	}}
	var evs []events.RouterEvent
	for i, ev := range []indexer.Event{
		{Kind: indexer.Shaped, Shape: shape},
		{Kind: indexer.Shaped, Shape: &indexer.Shape{Block: 16, Full: 640}},
		{Kind: indexer.Shaped},
		{Kind: indexer.SideStored, Group: 7, Shape: shape, Externals: []uint64{1, 1<<64 - 1, 3}},
		{Kind: indexer.SideStored, Group: 7, Parent: 1 << 63, HasParent: true, Externals: []uint64{9}},
		{Kind: indexer.SideStored, Group: 0, Pairs: true, Shape: shape, Externals: []uint64{7, 7, 7, 9}},
		{Kind: indexer.SideRemoved, Group: 255, Externals: []uint64{1 << 40}},
		{Kind: indexer.SideRemoved, Group: 2, AllCopies: true, Externals: []uint64{5}},
	} {
		evs = append(evs, events.RouterEvent{WorkerID: 9, DPRank: 3, EventID: uint64(i + 1), Event: ev})
	}
	return evs
}

// Events of side groups are read as they were written.
func TestSideEvents(t *testing.T) {
	evs := sideEvents()
	read, bad, err := events.DecodeEvents(events.AppendEvents(nil, evs))
	if err != nil || bad > 0 || !reflect.DeepEqual(read, evs) {
		t.Errorf("%d bad, %v, read\n%+v\nof\n%+v", bad, err, read, evs)
	}
}

// A reader that does not know the key of side groups sees an event that removes no blocks.
func TestOtherReadersIgnoreSideEvents(t *testing.T) {
	for _, ev := range sideEvents() {
		var text bytes.Buffer
		if _, err := msgp.UnmarshalAsJSON(&text, events.AppendEvents(nil, []events.RouterEvent{ev})); err != nil {
			t.Fatal(err)
		}
		var seen []struct {
			Worker uint64 `json:"worker_id"`
			Tier   string `json:"storage_tier"`
			Event  struct {
				ID   uint64 `json:"event_id"`
				Rank uint32 `json:"dp_rank"`
				Data json.RawMessage
			}
		}
		if err := json.Unmarshal(text.Bytes(), &seen); err != nil {
			t.Fatal(err)
		}
		if len(seen) != 1 || seen[0].Worker != 9 || seen[0].Tier != "device" || seen[0].Event.ID != ev.EventID || seen[0].Event.Rank != 3 ||
			string(seen[0].Event.Data) != `{"removed":{"block_hashes":[]}}` {
			t.Errorf("%s", text.Bytes())
		}
	}
}

// Of a damaged event of a side group nothing is believed that was not written, and an unknown kind has no effect.
func TestDamagedSideEvents(t *testing.T) {
	for _, ev := range sideEvents() {
		data := events.AppendEvents(nil, []events.RouterEvent{ev})
		for i := range data {
			if evs, bad, err := events.DecodeEvents(data[:i]); err == nil && bad == 0 && len(evs) > 0 {
				t.Errorf("cut after %d bytes: %+v", i, evs)
			}
			damaged := bytes.Clone(data)
			for _, b := range []byte{0x00, 0x7f, 0xc0, 0xcf, 0xdf, 0xff} {
				damaged[i] = b
				evs, _, _ := events.DecodeEvents(damaged)
				for _, ev := range evs { // an index takes it
					x := indexer.New(indexer.Config{})
					x.Apply(0, ev.Event)
					x.Match(make([]int32, 1), []uint64{1})
				}
			}
		}
		unknown := bytes.Replace(data, []byte("\xa4kind"), []byte("\xa4kine"), 1)
		if evs, bad, _ := events.DecodeEvents(unknown); len(evs) != 0 || bad != 1 {
			t.Errorf("without a kind: %+v, %d bad", evs, bad)
		}
		for _, kind := range []string{"\xa5shape", "\xa6stored", "\xa7removed"} {
			later := bytes.Clone([]byte(kind))
			later[len(later)-1] = 'x'
			at := bytes.Index(data, []byte("kvroute_side"))
			changed := append(bytes.Clone(data[:at]), bytes.Replace(data[at:], []byte("\xa4kind"+kind), append([]byte("\xa4kind"), later...), 1)...)
			if bytes.Equal(changed, data) {
				continue
			}
			evs, bad, err := events.DecodeEvents(changed)
			if err != nil || bad > 0 || len(evs) != 1 || evs[0].Event.Kind != indexer.Removed || len(evs[0].Event.Externals) > 0 {
				t.Errorf("of a later kind: %+v, %d bad, %v", evs, bad, err)
			}
		}
	}
}

// A false number of groups or blocks makes no room for them.
func TestFalseLengthsOfSideEvents(t *testing.T) {
	data := events.AppendEvents(nil, sideEvents()[:1])
	huge := bytes.Replace(data, []byte("\xa6groups\x94"), []byte("\xa6groups\xdd\xff\xff\xff\xff"), 1)
	if bytes.Equal(huge, data) {
		t.Fatal("the groups are not found")
	}
	if n := testing.AllocsPerRun(10, func() { _, _, _ = events.DecodeEvents(huge) }); n > 20 {
		t.Errorf("%v allocations", n)
	}
}
