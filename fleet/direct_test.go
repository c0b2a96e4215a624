// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/router"
)

// directTest has DirectWorkers with a router, and a simulated vLLM with 400 blocks of 16 tokens.
type directTest struct {
	*fleet.DirectWorkers
	t       *testing.T
	router  *router.Router
	address string // of the engine's HTTP server
	sockets *enginesim.Sockets
	stop    func() // stops the sockets
}

func newDirectTest(t *testing.T) *directTest {
	t.Helper()
	sockets, err := enginesim.NewSockets(enginesim.SocketsConfig{
		Endpoint: "tcp://127.0.0.1:0", Replay: "tcp://127.0.0.1:0", Rank: 2,
	})
	if err != nil {
		t.Fatal(err)
	}
	events, replay := sockets.Endpoints()
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/kv_event_sources":
			fmt.Fprintf(w, `{"2":{"endpoint":%q,"replay_endpoint":%q}}`, events, replay)
		case "/metrics":
			fmt.Fprintln(w, `vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1.0`)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(engine.Close)
	d := &directTest{t: t, address: engine.Listener.Addr().String(), sockets: sockets, stop: natstest.Run(t, sockets.Run)}
	if d.router, err = router.New(router.Config{}); err != nil {
		t.Fatal(err)
	}
	d.DirectWorkers, err = fleet.NewDirectWorkers(fleet.DirectConfig{Router: d.router})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// record returns a record that says little more than where the engine is.
func (d *directTest) record(transport string) fleet.Record {
	return fleet.Record{
		Name: "gpu-1", Models: []string{"m"}, Address: d.address, Events: fleet.Events{Transport: transport},
	}
}

// apply passes a record on, as the registry does.
func (d *directTest) apply(r fleet.Record) {
	d.t.Helper()
	info, err := r.Info(fleet.Networks{})
	if err != nil {
		d.t.Fatal(err)
	}
	if err := d.SetWorker(info); err != nil {
		d.t.Fatal(err)
	}
	d.Follow(r, info)
}

// shown describes the workers of the router.
func (d *directTest) shown() string {
	var all []string
	for _, w := range d.router.Workers() {
		all = append(all, fmt.Sprintf("%s rank %d: %d blocks of %d, engine %q, events %s",
			w.Name, w.DPRank, w.TotalKVBlocks, w.BlockSize, w.Engine, w.KVEvents))
	}
	return strings.Join(all, "; ")
}

// wait waits until the router's workers are described so.
func (d *directTest) wait(want string) {
	d.t.Helper()
	defer func() {
		if got := d.shown(); got != want {
			d.t.Errorf("the router has %s, want %s", got, want)
		}
	}()
	natstest.Eventually(d.t, func() bool { return d.shown() == want })
}

// is fails the test if the router's workers are not described so now.
func (d *directTest) is(want string) {
	d.t.Helper()
	if got := d.shown(); got != want {
		d.t.Errorf("the router has %s, want %s", got, want)
	}
}

const (
	unread   = `gpu-1 rank 0: 0 blocks of 0, engine "", events none`
	complete = `gpu-1 rank 2: 400 blocks of 16, engine "vllm", events ok`
)

// The router gets a worker without the data of its engine first, and then with them. A repeated
// record does not undo that.
func TestAnEngineCompletesItsRecord(t *testing.T) {
	t.Parallel()
	d := newDirectTest(t)
	d.apply(d.record("zmq"))
	d.is(unread)
	natstest.Run(t, d.Sources().Run)
	d.wait(complete)
	d.apply(d.record("zmq"))
	d.is(complete)
}

// A field that the record has is not taken from the engine, except the ranks: the engine knows them.
func TestARecordComesBeforeItsEngine(t *testing.T) {
	t.Parallel()
	d := newDirectTest(t)
	r := d.record("zmq")
	r.TotalKVBlocks, r.Engine, r.DPStart = 7, "another", 5
	d.apply(r)
	natstest.Run(t, d.Sources().Run)
	d.wait(`gpu-1 rank 2: 7 blocks of 16, engine "another", events ok`)
}

// The capacity that an engine reports is in its own blocks, the router's is in those of the record.
func TestTheCapacityIsInTheRecordsBlocks(t *testing.T) {
	t.Parallel()
	for size, blocks := range map[int]int{8: 800, 16: 400, 32: 200} {
		d := newDirectTest(t)
		r := d.record("zmq")
		r.BlockSize = size
		d.apply(r)
		natstest.Run(t, d.Sources().Run)
		d.wait(fmt.Sprintf(`gpu-1 rank 2: %d blocks of %d, engine "vllm", events ok`, blocks, size))
	}
}

// The router learns that the sockets of an engine are out of reach.
func TestTheStateOfAnEnginesEventsIsShown(t *testing.T) {
	t.Parallel()
	d := newDirectTest(t)
	d.apply(d.record("zmq"))
	natstest.Run(t, d.Sources().Run)
	d.wait(complete)
	d.stop()
	d.wait(strings.Replace(complete, "events ok", "events none", 1))
}

// The engine of a removed worker does not bring the worker back.
func TestARemovedWorkerStaysRemoved(t *testing.T) {
	t.Parallel()
	d := newDirectTest(t)
	d.apply(d.record("zmq"))
	natstest.Run(t, d.Sources().Run)
	d.wait(complete)
	r := d.record("zmq")
	d.RemoveWorker(r.ID())
	natstest.Eventually(t, func() bool { return d.sockets.Subscribers() == 0 }) // their state changed
	d.is("")
	if d.Sources().Has(r.ID()) {
		t.Error("the engine of a removed worker is still read")
	}
	d.RemoveWorker(r.ID()) // does nothing
}

// The record of a worker changes: its events come over the bus from now on. The data of its engine
// are dropped.
func TestEventsMoveToTheBus(t *testing.T) {
	t.Parallel()
	d := newDirectTest(t)
	d.apply(d.record("zmq"))
	natstest.Run(t, d.Sources().Run)
	d.wait(complete)
	r := d.record("nats")
	r.BlockSize = 32
	d.apply(r)
	const plain = `gpu-1 rank 0: 0 blocks of 32, engine "", events ok`
	d.is(plain)
	info, err := r.Info(fleet.Networks{})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.SetWorker(info); err != nil {
		t.Fatal(err)
	}
	d.is(plain)
	if d.Sources().Has(r.ID()) {
		t.Error("the engine is still read")
	}
	natstest.Eventually(t, func() bool { return d.sockets.Subscribers() == 0 })
	d.apply(d.record("zmq"))
	d.wait(complete)
}

// A worker whose events come over the bus reaches the router as its record describes it.
func TestOtherWorkersPassUnchanged(t *testing.T) {
	t.Parallel()
	d := newDirectTest(t)
	r := d.record("nats")
	r.BlockSize, r.KVEvents = 32, "partial"
	d.apply(r)
	d.is(`gpu-1 rank 0: 0 blocks of 32, engine "", events partial`)
	if d.Sources().Has(r.ID()) {
		t.Error("the engine is read")
	}
}

// SetWorker returns the router's error.
func TestTheRouterRefusesAWorker(t *testing.T) {
	t.Parallel()
	d := newDirectTest(t)
	if err := d.SetWorker(router.WorkerInfo{ID: 1}); err == nil {
		t.Error("a worker without models is accepted")
	}
	d.is("")
}
