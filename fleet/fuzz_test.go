// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"encoding/json"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/internal/zmtp"
	"github.com/kvroute/kvroute/router"
)

// entry is a record of the registry's bucket.
type entry struct {
	jetstream.KeyValueEntry
	key   string
	value []byte
}

func (e entry) Key() string                     { return e.key }
func (e entry) Value() []byte                   { return e.value }
func (e entry) Created() time.Time              { return time.Time{} }
func (e entry) Operation() jetstream.KeyValueOp { return jetstream.KeyValuePut }

// private reports whether an address can be reached only from this machine or its link.
func private(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() }

// For any registration and heartbeats, accepted records name only the worker's own host
// and fixed paths.
func FuzzRegistration(f *testing.F) {
	for _, text := range []string{
		`{"v":1,"name":"w","address":"10.0.0.7:8000","models":["m"],"lora":["l"],"block_size":16,"dp_start":1,"dp_size":2,"health":{"interval":"1s"},"metrics":{"path":"/metrics"}}`,
		`{"name":"w","address":"[fd00::7]:8000","models":["m"],"rank_addresses":{"0":"[fd00::7]:8001"},"events":{"transport":"zmq","endpoint":"tcp://*:{rank}","replay":"tcp://[fd00::7]:5657","local_indexer":true},"block_size":16}`,
		`{"name":"w","address":"10.0.0.7:8000","models":["m"],"events":{"transport":"http_poll","endpoint":"http://10.0.0.7:8000/kv_cache_events"}}`,
		`{"name":"w","address":"127.0.0.1:9901","models":["m"],"health":{"path":"/quitquitquit"}}`,
		`{"name":"w","address":"10.0.0.7:8000","models":["m"],"events":{"transport":"none"}}`,
	} {
		f.Add([]byte(text), []byte(`{"worker_id":1,"batch_size":3,"waiting":-1,"kv_cache_util":1e300,"kv_used_blocks":7}`))
	}
	f.Fuzz(func(t *testing.T, record, beat []byte) {
		taken := make(map[uint64]router.WorkerInfo)
		r, err := fleet.NewRegistry(nil, fleet.RegistryConfig{
			Set:    func(i router.WorkerInfo) { taken[i.ID] = i },
			Remove: func(id uint64) { delete(taken, id) },
			Load:   func(router.WorkerInfo, fleet.Load) {},
		})
		if err != nil {
			t.Fatal(err)
		}
		want, err := fleet.ParseRecord(record)
		r.TakeEntry(entry{key: wire.WorkerKey(want.ID()), value: record})
		var h struct {
			ID uint64 `json:"worker_id"`
		}
		_ = json.Unmarshal(beat, &h) // invalid heartbeats are passed on as well
		for _, id := range []uint64{h.ID, want.ID()} {
			r.TakeHeartbeat(&nats.Msg{Subject: "heartbeat." + wire.WorkerKey(id), Data: beat})
		}
		info, ok := taken[want.ID()]
		if len(taken) > 1 || len(taken) == 1 && (!ok || err != nil) {
			t.Fatalf("%d workers are accepted: %+v, %v", len(taken), taken, err)
		}
		if !ok {
			return
		}
		own := info.Address.Addr()
		if private(own) || !info.Address.IsValid() || info.Address.Port() == 0 || info.Check() != nil {
			t.Errorf("the worker is at %v: %v", info.Address, info.Check())
		}
		for rank, a := range info.RankAddresses {
			if a.Addr() != own {
				t.Errorf("rank %d is at %v, the worker at %v", rank, a, own)
			}
		}
		if p := want.Health; p != nil && p.Path != "" && p.Path != "/health" {
			t.Errorf("the health path is %q", p.Path)
		}
		if p := want.Metrics; p != nil && p.Path != "" && !slices.Contains(fleet.LoadPaths[:], p.Path) {
			t.Errorf("the metrics path is %q", p.Path)
		}
		e := want.Events
		if u, err := url.Parse(e.Endpoint); e.Transport == "http_poll" && e.Endpoint != "" && (err != nil || u.Host != info.Address.String() || u.Path != "/kv_cache_events") {
			t.Errorf("the event endpoint is %q", e.Endpoint)
		}
		for _, text := range []string{e.Endpoint, e.Replay} {
			if at, err := zmtp.ParseEndpoint(text, 1, 1); e.Transport == "zmq" && err == nil && (at.Path != "" || !at.Anywhere() && netip.MustParseAddr(at.Host).Unmap() != own) {
				t.Errorf("the event endpoint is %q", text)
			}
		}
	})
}

// For any contents of Dynamo's store, workers are where the operator's rules say, and
// only addresses that a worker may register are dialled.
func FuzzDynamoRecords(f *testing.F) {
	for key, text := range dynamoRecords() {
		f.Add(key, []byte(text))
		f.Add(key, []byte(strings.ReplaceAll(text, "10.0.0.7", "127.0.0.1")))
	}
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		var table fleet.DynamoTable
		for k, text := range dynamoRecords() {
			if err := table.Put(k, []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		_ = table.Put(key, value) // after an error the previous record stays
		rules := fleet.DynamoRules{Frontend: frontend}
		v := table.View(&rules, fleet.Networks{})
		if diff := cmp.Diff(v.Plane, table.View(&rules, fleet.Networks{}).Plane); diff != "" {
			t.Errorf("the same records make another plane:\n%s", diff)
		}
		ids := make(map[uint64]bool)
		for _, w := range v.Workers {
			if ids[w.WorkerID] = true; w.Address != frontend {
				t.Errorf("a worker is at %s", w.Address)
			}
		}
		for _, c := range v.Plane.Channels {
			at, err := zmtp.ParseEndpoint(c.Endpoint, 0, 0)
			if c.Subject == "" && (err != nil || at.Path != "" || private(netip.MustParseAddr(at.Host).Unmap())) {
				t.Errorf("a publisher is dialled at %q", c.Endpoint)
			}
			if !ids[c.Worker] {
				t.Errorf("a channel names worker %d, which is not in the view", c.Worker)
			}
		}
		for rank, i := range v.Plane.Indexers {
			hostport, _, _ := strings.Cut(i.Transport, "/")
			if at, err := netip.ParseAddrPort(hostport); err != nil || private(at.Addr().Unmap()) || !ids[rank.WorkerID] {
				t.Errorf("the indexer of %v is asked at %q", rank, i.Transport)
			}
		}
	})
}
