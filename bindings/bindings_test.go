// SPDX-License-Identifier: Apache-2.0

package bindings_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/bindings"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/process"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// heard is the cache of worker 7 according to its published events: external to local hashes.
type heard struct {
	mu     sync.Mutex
	blocks map[uint64]uint64
}

func (h *heard) apply(_ uint64, _ uint32, ev indexer.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch ev.Kind {
	case indexer.Stored:
		for _, b := range ev.Blocks {
			h.blocks[b.External] = b.Local
		}
	case indexer.Removed:
		for _, e := range ev.Externals {
			delete(h.blocks, e)
		}
	default:
		clear(h.blocks)
	}
}

func (h *heard) of(external uint64) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.blocks[external]
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	if err := process.Until(t.Context(), process.Patience, what, func(context.Context) bool { return ok() }); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T) (*bindings.Publisher, *heard) {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("NATS does not start")
	}
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	h := &heard{blocks: map[uint64]uint64{}}
	sub, err := events.NewSubscriber(nc, events.SubscriberConfig{Sink: h.apply})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done, before := make(chan error, 1), s.NumSubscriptions()
	go func() { done <- sub.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	eventually(t, "nobody subscribes to events", func() bool { return s.NumSubscriptions() > before })
	p, err := bindings.Open(bindings.Config{NATSURL: s.ClientURL(), Record: fleet.Record{WorkerID: 7}, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p, h
}

func tokens(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i + 1)
	}
	return out
}

func TestPublishing(t *testing.T) {
	p, h := open(t)
	plain := indexer.AppendLocalHashes(nil, tokens(12), 4, indexer.Seed("", ""))
	salted := indexer.AppendLocalHashes(nil, tokens(12), 4, indexer.Seed("a", "s"))
	type call struct {
		stored    bindings.Stored
		published int
		err       string
	}
	for name, c := range map[string]call{
		"plain":          {bindings.Stored{TokenIDs: tokens(12), NumBlockTokens: []int{4, 4, 4}, BlockHashes: []uint64{1, 2, 3}}, 3, ""},
		"a partial tail": {bindings.Stored{TokenIDs: tokens(10), NumBlockTokens: []int{4, 4, 2}, BlockHashes: []uint64{11, 12, 13}}, 2, ""},
		"nothing whole":  {bindings.Stored{TokenIDs: tokens(2), NumBlockTokens: []int{2}, BlockHashes: []uint64{21}}, 0, ""},
		"too few tokens": {bindings.Stored{TokenIDs: tokens(7), NumBlockTokens: []int{4, 4}, BlockHashes: []uint64{31, 32}}, 0, "7 token_ids for 2 blocks"},
		"odd lists":      {bindings.Stored{TokenIDs: tokens(8), NumBlockTokens: []int{4}, BlockHashes: []uint64{31, 32}}, 0, "num_block_tokens has 1"},
		"an orphan":      {bindings.Stored{TokenIDs: tokens(4), NumBlockTokens: []int{4}, BlockHashes: []uint64{41}, ParentHash: 40, HasParent: true}, 0, ""},
		"salted":         {bindings.Stored{TokenIDs: tokens(8), NumBlockTokens: []int{4, 4}, BlockHashes: []uint64{51, 52}, LoRAName: "a", CacheSalt: "s"}, 2, ""},
	} {
		published, err := p.PublishStored(c.stored)
		if published != c.published || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %d blocks, %v; want %d, %s", name, published, err, c.published, c.err)
		}
	}
	// A child inherits its parent's seed.
	if published, err := p.PublishStored(bindings.Stored{TokenIDs: tokens(12)[8:], NumBlockTokens: []int{4}, BlockHashes: []uint64{53}, ParentHash: 52, HasParent: true}); published != 1 || err != nil {
		t.Errorf("a child: %d, %v", published, err)
	}
	eventually(t, "the stored blocks are not heard", func() bool {
		return h.of(3) == plain[2] && h.of(12) == plain[1] && h.of(53) == salted[2] && h.of(51) == salted[0]
	})
	// Copies are counted.
	if _, err := p.PublishStored(bindings.Stored{TokenIDs: tokens(4), NumBlockTokens: []int{4}, BlockHashes: []uint64{1}}); err != nil {
		t.Fatal(err)
	}
	if err := p.PublishRemoved(0, []uint64{1, 3}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the removal of block 3 is not heard", func() bool { return h.of(3) == 0 })
	if h.of(1) == 0 {
		t.Error("a block with a copy left is removed")
	}
	if err := p.PublishRemoved(0, []uint64{1}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the removal of block 1 is not heard", func() bool { return h.of(1) == 0 })
	if err := p.PublishCleared(0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the clear is not heard", func() bool { return h.of(2) == 0 })
	if _, err := p.PublishStored(bindings.Stored{TokenIDs: tokens(4), NumBlockTokens: []int{4}, BlockHashes: []uint64{99}}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Error(err)
	}
	eventually(t, "the last event is not heard", func() bool { return h.of(99) == plain[0] })
	if err := p.PublishCleared(0); err == nil || !strings.Contains(err.Error(), "is closed") {
		t.Errorf("after its end: %v", err)
	}
}

func TestBadConfigurations(t *testing.T) {
	for text, want := range map[string]string{
		`{`:                               "read configuration",
		`{"kv_block_sise":16}`:            "kv_block_sise",
		`{"kv_block_size":16}`:            "worker_id is 0",
		`{"name":"a"}`:                    "kv_block_size is 0",
		`{"name":"a","kv_block_size":-1}`: "kv_block_size is -1",
		`{"name":"a","kv_block_size":16,"nats_url":"nats://127.0.0.1:1","address":"here","models":["m"]}`: `address is "here"`,
		`{"name":"a","kv_block_size":16,"nats_url":"nats://127.0.0.1:1","address":"127.0.0.1:1"}`:         "models",
		`{"name":"a","kv_block_size":16,"nats_url":"nats://127.0.0.1:1","log_level":"loud"}`:              `log_level is "loud"`,
		`{"name":"a","kv_block_size":16,"nats_url":"bogus://127.0.0.1:1"}`:                                `"bogus"`,
		`{"name":"a","kv_block_size":16,"nats_creds":"/not/there"}`:                                       "/not/there",
		`{"name":"a","kv_block_size":16,"nats_cert":"/not/there"}`:                                        "belong together",
		`{"name":"a","kv_block_size":16,"nats_replicas":6}`:                                               "nats_replicas is 6",
	} {
		c, err := bindings.ParseConfig([]byte(text))
		if err == nil {
			var p *bindings.Publisher
			if p, err = bindings.Open(c); err == nil {
				_ = p.Close()
			}
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
