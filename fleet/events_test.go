// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// A registration may say where events are only as far as its worker could be there.
func TestWhereEventsMayBe(t *testing.T) {
	networks := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	for _, c := range []struct {
		events          fleet.Events
		registered, set string // what is wrong, "" if nothing
	}{
		{fleet.Events{}, "", ""},
		{fleet.Events{Transport: "jetstream"}, "", ""},
		{fleet.Events{Transport: "zmq"}, "", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://*:5557", Replay: "tcp://0.0.0.0:5657"}, "", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.7:5557", Replay: "tcp://10.0.0.7:{rank}"}, "", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://192.168.0.7:5557"}, "worker networks", "worker networks"},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://10.0.0.7:5557", Replay: "tcp://192.168.0.7:1"}, "events.replay", "events.replay"},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://worker:5557"}, "an ip", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "ipc:///run/kv"}, "want tcp://ip:port", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "tcp://127.0.0.1:5557", Bind: true}, "events.bind", ""},
		{fleet.Events{Transport: "zmq", Endpoint: "here"}, "tcp://host:port", "tcp://host:port"},
		{fleet.Events{Transport: "http_poll"}, "", ""},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://10.0.0.7:80/x"}, "", ""},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://192.168.0.7/x"}, "worker networks", "worker networks"},
		{fleet.Events{Transport: "http_poll", Endpoint: "http://intranet/x"}, "an ip", ""},
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

// A sidecar's word counts while its engine lives, and may change.
func TestAnAnnouncersRecordChanges(t *testing.T) {
	s := startNATS(t, -1)
	w := watch(t, s)
	var alive atomic.Bool
	record := fleet.Record{Name: "w", Address: "10.0.0.7:8000", Models: []string{"m"}, BlockSize: 16}
	a, err := fleet.NewAnnouncer(connect(t, s), fleet.AnnouncerConfig{Record: record, Alive: alive.Load})
	if err != nil {
		t.Fatal(err)
	}
	running(t, a.Run)
	known := func() string {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, i := range w.workers {
			return i.Name + " " + i.KVEvents
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
	eventually(t, func() bool { return known() == "w " })
	record.KVEvents = "suspect"
	if err := a.Update(record); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return known() == "w suspect" })
	record.Models = nil
	if err := a.Update(record); err == nil {
		t.Error("a record that registries refuse is taken")
	}
}
