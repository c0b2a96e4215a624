// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

func mustParse(t *testing.T, list string) fleet.Networks {
	t.Helper()
	n, err := reach.Parse(list)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A registration may name event addresses only where its worker can be.
func TestWhereEventsMayBe(t *testing.T) {
	networks := mustParse(t, "10.0.0.0/8")
	for _, c := range []struct {
		events          fleet.Events
		registered, set string // expected errors, "" for none
	}{
		{fleet.Events{}, "", ""},
		{fleet.Events{Transport: "jetstream"}, "", ""},
		{fleet.Events{Transport: "zmq"}, "", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://*:5557", Replay: "tcp://0.0.0.0:5657"}, "", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.7:5557", Replay: "tcp://10.0.0.7:{rank}"}, "", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://192.168.0.7:5557"}, "worker networks", "worker networks"},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.7:5557", Replay: "tcp://192.168.0.7:1"}, "events.replay", "events.replay"},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.8:5557"}, "own host", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.7:5557", Replay: "tcp://10.0.0.8:5657"}, "own host", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://worker:5557"}, "own host", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "ipc:///run/kv"}, "own host", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "here"}, "tcp://host:port", "tcp://host:port"},
		{fleet.Events{Transport: "http_poll"}, "", ""},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://10.0.0.7:8000/kv_cache_events"}, "", ""},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://10.0.0.7:8000/quitquitquit"}, "want http://10.0.0.7:8000/kv_cache_events", ""},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://10.0.0.7:9901/kv_cache_events"}, "want http://10.0.0.7:8000/kv_cache_events", ""},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://10.0.0.8:8000/kv_cache_events"}, "want http://10.0.0.7:8000/kv_cache_events", ""},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://192.168.0.7/x"}, "worker networks", "worker networks"},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://intranet/x"}, "want http://10.0.0.7:8000/kv_cache_events", ""},
		{fleet.Events{Transport: "http_poll", Endpoint: "file:///etc/passwd"}, "http://ip:port", "http://ip:port"},
		{fleet.Events{Transport: "zmq", Topic: strings.Repeat("x", 300)}, "events.topic", "events.topic"},
		{fleet.Events{Transport: "pigeon"}, "events.transport", "events.transport"},
	} {
		r := fleet.Record{Name: "w", Address: "10.0.0.7:8000", Models: []string{"m"}, Events: c.events}
		table := fleet.NewTable(networks, func(router.WorkerInfo) {}, func(uint64) {})
		for how, err := range map[string]error{c.registered + "/registered": table.Put(time.Now(), r), c.set + "/set": table.SetStatic(time.Now(), []fleet.Record{r})} {
			want, _, _ := strings.Cut(how, "/re")
			want, _, _ = strings.Cut(want, "/set")
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%+v: %s: %v", c.events, how, err)
			}
		}
	}
}

// A worker that registers itself can name only its own host for kvroute to connect to.
// The same record in the configuration file is the operator's choice and is accepted.
func TestRegisteredWorkersNameOnlyTheirOwnHost(t *testing.T) {
	own := netip.MustParseAddrPort("10.0.0.7:9003")
	for name, c := range map[string]struct {
		networks string
		change   func(*fleet.Record)
		want     string // part of the error, "" if the record is accepted
	}{
		"an engine":                  {"", func(*fleet.Record) {}, ""},
		"loopback":                   {"", func(r *fleet.Record) { r.Address = "127.0.0.1:8000" }, "neither loopback nor link-local"},
		"loopback, by IPv6":          {"", func(r *fleet.Record) { r.Address = "[::1]:8000" }, "neither loopback nor link-local"},
		"loopback, as IPv6":          {"", func(r *fleet.Record) { r.Address = "[::ffff:127.0.0.1]:8000" }, "neither loopback nor link-local"},
		"loopback, by NAT64":         {"", func(r *fleet.Record) { r.Address = "[64:ff9b::7f00:1]:8000" }, "neither loopback nor link-local"},
		"loopback, by local NAT64":   {"", func(r *fleet.Record) { r.Address = "[64:ff9b:1::7f00:1]:8000" }, "neither loopback nor link-local"},
		"loopback, by 6to4":          {"", func(r *fleet.Record) { r.Address = "[2002:7f00:1::]:8000" }, "neither loopback nor link-local"},
		"loopback, IPv4-compatible":  {"", func(r *fleet.Record) { r.Address = "[::127.0.0.1]:8000" }, "neither loopback nor link-local"},
		"metadata, by NAT64":         {"", func(r *fleet.Record) { r.Address = "[64:ff9b::a9fe:a9fe]:80" }, "neither loopback nor link-local"},
		"others by NAT64 and 6to4":   {"", func(r *fleet.Record) { r.Address = "[64:ff9b::a00:1]:8000" }, ""},
		"a cloud's metadata":         {"", func(r *fleet.Record) { r.Address = "169.254.169.254:80" }, "neither loopback nor link-local"},
		"loopback among all":         {"0.0.0.0/0,::/0", func(r *fleet.Record) { r.Address = "127.0.0.1:8000" }, "neither loopback nor link-local"},
		"loopback that is allowed":   {"127.0.0.0/8", func(r *fleet.Record) { r.Address = "127.0.0.1:8000" }, ""},
		"another network":            {"10.0.0.0/24", func(r *fleet.Record) { r.Address = "10.0.1.7:8000" }, "worker networks"},
		"a port that is allowed":     {"10.0.0.0/8:8000-8010", func(*fleet.Record) {}, ""},
		"another port":               {"10.0.0.0/8:8000-8010", func(r *fleet.Record) { r.Address = "10.0.0.7:22" }, "worker networks"},
		"another port of a rank":     {"10.0.0.0/8:8000", func(r *fleet.Record) { r.RankAddresses = map[string]string{"1": "10.0.0.7:22"} }, "rank_addresses"},
		"a rank elsewhere":           {"", func(r *fleet.Record) { r.RankAddresses = map[string]string{"1": "10.0.0.8:8000"} }, "own host"},
		"a rank on its host":         {"", func(r *fleet.Record) { r.RankAddresses = map[string]string{"1": "10.0.0.7:8001"} }, ""},
		"kvroute's own port":         {"", func(r *fleet.Record) { r.Address = own.String() }, "kvroute itself"},
		"kvroute's own port, a rank": {"", func(r *fleet.Record) { r.RankAddresses = map[string]string{"1": own.String()} }, "kvroute itself"},
		"kvroute's own port, events": {"", func(r *fleet.Record) { r.Events = fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.7:9003"} }, "kvroute itself"},
		"kvroute's own port, replay": {"", func(r *fleet.Record) { r.Events = fleet.Events{Transport: "zmq", Replay: "tcp://*:9003"} }, "kvroute itself"},
		"events on its host":         {"", func(r *fleet.Record) { r.Events = fleet.Events{Transport: "zmq", Endpoint: "tcp://*:5557"} }, ""},
		"a source on its host":       {"", func(r *fleet.Record) { r.KVSource = "10.0.0.7:5710" }, ""},
		"a source elsewhere":         {"", func(r *fleet.Record) { r.KVSource = "10.0.0.8:5710" }, "kv_source is \"10.0.0.8:5710\", want the worker's own host"},
		"another port of a source":   {"10.0.0.0/8:8000-8010", func(r *fleet.Record) { r.KVSource, r.DPSize = "10.0.0.7:8010", 2 }, "kv_source"},
		"ports of a source":          {"10.0.0.0/8:8000-8010", func(r *fleet.Record) { r.KVSource, r.DPSize = "10.0.0.7:8009", 2 }, ""},
		"kvroute's own port, source": {"", func(r *fleet.Record) { r.KVSource, r.DPSize = "10.0.0.7:9002", 2 }, "kvroute itself"},
		"a probe of its health":      {"", func(r *fleet.Record) { r.Health = &fleet.Probe{Path: "/health"} }, ""},
		"a probe of anything":        {"", func(r *fleet.Record) { r.Health = &fleet.Probe{Path: "/flush_cache"} }, "want /health"},
		"its metrics":                {"", func(r *fleet.Record) { r.Metrics = &fleet.Probe{Path: "/prometheus/metrics"} }, ""},
		"a Host header":              {"", func(r *fleet.Record) { r.Host = "intranet.example" }, `host is "intranet.example", want none: only workers in the configuration file`},
		"metrics anywhere":           {"", func(r *fleet.Record) { r.Metrics = &fleet.Probe{Path: "/server_info"} }, "want /prometheus/metrics or /metrics"},
	} {
		networks := mustParse(t, c.networks)
		networks.Own = func(a netip.AddrPort) bool { return a == own }
		r := fleet.Record{Name: "w", Address: "10.0.0.7:8000", Models: []string{"m"}}
		c.change(&r)
		table := fleet.NewTable(networks, func(router.WorkerInfo) {}, func(uint64) {})
		if err := table.Put(time.Now(), r); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
		if err := table.SetStatic(time.Now(), []fleet.Record{r}); err != nil && !strings.Contains(err.Error(), "worker networks") {
			t.Errorf("%s, in the file: %v", name, err)
		}
	}
}

// A sidecar's record counts while its engine is alive, and may change.
func TestAnAnnouncersRecordChanges(t *testing.T) {
	s := natstest.Start(t, 0)
	w := watch(t, s)
	var alive atomic.Bool
	record := fleet.Record{Name: "w", Address: "10.0.0.7:8000", Models: []string{"m"}, BlockSize: 16}
	a, err := fleet.NewAnnouncer(natstest.Connect(t, s), fleet.AnnouncerConfig{Record: record, Alive: alive.Load})
	if err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, a.Run)
	firstWorker := func() string {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, i := range w.workers {
			return i.Name + " " + string(i.KVEvents)
		}
		return ""
	}
	select {
	case <-a.Registered():
		t.Fatal("a dead engine is registered")
	case <-time.After(300 * time.Millisecond):
	}
	alive.Store(true)
	<-a.Registered()
	natstest.Eventually(t, func() bool { return firstWorker() == "w " })
	record.KVEvents = "suspect"
	if err := a.Update(record); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, func() bool { return firstWorker() == "w suspect" })
	record.Models = nil
	if err := a.Update(record); err == nil {
		t.Error("a record that registries refuse is accepted")
	}
}
