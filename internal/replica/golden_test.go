// SPDX-License-Identifier: Apache-2.0

package replica_test

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// restored is a router after a file was read.
type restored struct {
	Blocks   []string
	Expected []uint64
	Worker   router.WorkerInfo
}

// A router of a later version restores the index and the workers from a snapshot of version 0.1.0, as in --state-dir and in the object
// store.
func TestGoldenIndex(t *testing.T) {
	full := router.WorkerInfo{
		ID: 7, Name: "gpu-1", Address: netip.MustParseAddrPort("10.0.0.7:8000"), RankAddresses: map[uint32]netip.AddrPort{3: netip.MustParseAddrPort("10.0.0.7:8003")},
		Models: []string{"llama"}, LoRA: []string{"legal"}, Role: router.Both, BlockSize: 16, DPStart: 2, DPSize: 2, TotalKVBlocks: 5000, MaxNumSeqs: 256,
		MaxBatchedTokens: 8192, GPUType: "H100", PrefillThroughput: 12500.5, Taints: []string{"batch"}, Reorders: true, Engine: "vllm",
		ModelCard: "llama-3", KVEvents: "partial", Draining: true, StartedMS: 1754999999000, Events: router.EventSource{Transport: "nats", LocalIndexer: true, PublisherID: 4660},
	}
	r, err := router.New(router.Config{})
	if err == nil {
		err = r.SetWorker(full)
	}
	if err != nil {
		t.Fatal(err)
	}
	r.ApplyEvent(router.Worker{ID: 7, DPRank: 2}, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 101, Local: 11}, {External: 102, Local: 12}}})
	r.ApplyEvent(router.Worker{ID: 7, DPRank: 2}, indexer.Event{Kind: indexer.Stored, Tier: indexer.Disk, HasParent: true, Parent: 102, Blocks: []indexer.Block{{External: 103, Local: 13}}})
	snap := events.Snapshot{Created: time.UnixMilli(1755000000500)}
	done, ok := state(r, nil).Dump(&snap, always)
	if !ok {
		t.Fatal("no dump")
	}
	var file bytes.Buffer
	if _, err := saved.Write(&file, wire.Scope{}, &snap); err != nil {
		t.Fatal(err)
	}
	done()
	want := restored{Blocks: []string{"{7 2} device 0 {101 11} false", "{7 2} device 1 {102 12} false", "{7 2} disk 2 {103 13} false"}, Expected: []uint64{7}, Worker: full}
	fixtures.Golden(t, "0.1.0/index.bin", file.Bytes(), func(data []byte) (out restored, err error) {
		r, err := router.New(router.Config{})
		if err != nil {
			return out, err
		}
		s, whole, err := saved.Read(bytes.NewReader(data), wire.Scope{})
		if err == nil {
			err = state(r, func(ids []uint64) { out.Expected = ids }).Restore(s, always, whole)
		}
		out.Blocks = lines(t, r)
		if d, ok := r.Dump(nil); ok && len(d.Workers) == 1 {
			out.Worker = d.Workers[0]
			out.Worker.Health = router.Healthy // it is that of a worker that must register again
			d.Close()
		}
		return out, err
	}, want)
}
