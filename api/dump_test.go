// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

func TestDump(t *testing.T) {
	r := newRouter(t, 2)
	a, b := router.Worker{ID: 1}, router.Worker{ID: 2}
	blocks := []indexer.Block{{External: 101, Local: 14643705804678351452}, {External: 102, Local: 16777012769546811212}, {External: 103, Local: 5}}
	r.ApplyEvent(b, indexer.Event{Kind: indexer.Stored, Blocks: blocks})
	r.ApplyEvent(b, indexer.Event{Kind: indexer.Removed, Externals: []uint64{102}})
	r.ApplyEvent(a, indexer.Event{Kind: indexer.Stored, Blocks: blocks[:2]})
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), Scope: "n/c/e", Stream: func() uint64 { return 42 }})

	status, body := get(t, h, "/v1/index/dump")
	lines := strings.Split(strings.TrimSpace(body), "\n")
	if status != 200 || len(lines) != 5 {
		t.Fatalf("status %d:\n%s", status, body)
	}
	var head map[string]any
	if err := json.Unmarshal([]byte(lines[0]), &head); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]any{"kvroute_dump": 1.0, "scope": "n/c/e", "block_size": 4.0, "hash_seed": 1337.0, "last_stream_seq": 42.0, "owners": 2.0} {
		if head[key] != want {
			t.Errorf("%s is %v, want %v", key, head[key], want)
		}
	}
	for i, want := range []string{
		// The protocol's example, with another worker and id.
		`{"worker_id":1,"storage_tier":"device","event":{"event_id":0,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":101,"tokens_hash":14643705804678351452,"mm_extra_info":null},{"block_hash":102,"tokens_hash":16777012769546811212,"mm_extra_info":null}]}},"dp_rank":0}}`,
		`{"worker_id":2,"storage_tier":"device","event":{"event_id":1,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":101,"tokens_hash":14643705804678351452,"mm_extra_info":null}]}},"dp_rank":0}}`,
		// A block after a hole: its place is known, its parent is not.
		`{"worker_id":2,"storage_tier":"device","event":{"event_id":2,"data":{"stored":{"parent_hash":null,"start_position":2,"blocks":[{"block_hash":103,"tokens_hash":5,"mm_extra_info":null}]}},"dp_rank":0}}`,
		`{"kvroute_end":{"events":3,"blocks":4}}`,
	} {
		if lines[i+1] != want {
			t.Errorf("line %d\ngot  %s\nwant %s", i+2, lines[i+1], want)
		}
	}
	d, ok := r.Dump(nil)
	if !ok {
		t.Fatal("the dumps before were not closed")
	}
	if status, body := get(t, h, "/v1/index/dump"); status != 503 || !strings.Contains(body, "another dump") {
		t.Errorf("two at once: %d %s", status, body)
	}
	d.Close()
	if status, _ := get(t, h, "/v1/index/dump"); status != 200 {
		t.Errorf("afterwards: %d", status)
	}
}
