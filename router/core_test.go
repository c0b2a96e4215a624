// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net/netip"
	"testing"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// An ordinal that has another worker by now does not bring it the overlap that was
// counted for the one before.
func TestOverlapOfAnEarlierWorkerDoesNotCount(t *testing.T) {
	info := func(id uint64) *WorkerInfo {
		return &WorkerInfo{ID: id, Models: []string{"m"}, Address: netip.MustParseAddrPort("10.0.0.1:1"), BlockSize: 1, DPSize: 1}
	}
	settings := scorer.Defaults()
	settings.Policy = scorer.Dynamo
	c := newCore(&Config{Mode: KV, Scoring: settings, PrefillThroughput: 1}, 1)
	c.setWorker(info(1))
	q := &question{Request: &Request{}, tokens: 4, sequence: []uint64{1, 2, 3, 4}, overlap: []int32{4}, version: c.changes, workspace: new(workspace)}
	var d Decision
	if err := c.decide(time.Now(), q, &d, false); err != nil || d.OverlapBlocks != 4 {
		t.Fatalf("overlap %d, %v; want the 4 blocks that were counted", d.OverlapBlocks, err)
	}
	c.removeWorker(1)
	c.setWorker(info(2))
	d = Decision{}
	if err := c.decide(time.Now(), q, &d, false); err != nil || d.Worker.ID != 2 || d.OverlapBlocks != 0 {
		t.Errorf("worker %d with overlap %d, %v; want worker 2 with none", d.Worker.ID, d.OverlapBlocks, err)
	}
}
