// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/process"
)

// caller books and ends requests at one replica over its API.
type caller struct {
	replica *demo.Child
	made    atomic.Int64 // number of decisions
	failed  atomic.Int64
}

func (c *caller) post(path, body string) bool {
	resp, err := http.Post("http://"+c.replica.At.HTTP+path, "application/json", strings.NewReader(body))
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err == nil && resp.StatusCode == http.StatusOK
}

func (c *caller) book(id string, letter int) {
	tokens := strings.TrimSuffix(strings.Repeat(fmt.Sprint(letter, ","), 100), ",")
	if c.post("/v1/best_worker", fmt.Sprintf(`{"model":"sim","request_id":%q,"token_ids":[%s]}`, id, tokens)) {
		c.made.Add(1)
	} else {
		c.failed.Add(1)
	}
}

func (c *caller) mark(id string) {
	c.post("/v1/mark_prefill_complete", fmt.Sprintf(`{"request_id":%q}`, id))
}
func (c *caller) free(id string) { c.post("/v1/free", fmt.Sprintf(`{"request_id":%q}`, id)) }

// load books requests that overlap, until stop is closed.
func (c *caller) load(stop <-chan struct{}) {
	var before string
	for i := 0; ; i++ {
		select {
		case <-stop:
			if before != "" {
				c.free(before)
			}
			return
		case <-time.After(20 * time.Millisecond):
		}
		id := fmt.Sprint("load", i)
		c.book(id, i%5)
		if i%2 == 0 {
			c.mark(id)
		}
		if before != "" {
			c.free(before)
		}
		before = id
	}
}

// Four replicas under load lose NATS for ten seconds. All four continue to decide, and afterwards
// they have the same index and the same requests, whatever began and ended meanwhile. Then one is
// killed with a hundred requests in flight: the others stop counting these requests.
func TestFourReplicasLoseNATSAndOneOfThem(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	store := t.TempDir()
	at := heldAddress(t)
	bus, err := startNATS(at, store)
	if err != nil {
		t.Fatal(err)
	}
	at = strings.TrimPrefix(bus.URL(), "nats://") // with the password, which stays when the bus restarts
	t.Cleanup(func() { bus.Stop() })
	var engines, replicas []*demo.Child
	for i := range fleetSize {
		e, err := demo.Start(t.Context(), t.TempDir(), fmt.Sprint("worker-", i+1), "engine", "--name", fmt.Sprint("worker-", i+1), "--listen", "127.0.0.1:0",
			"--nats-url", bus.URL(), "--speed", "50", "--num-gpu-blocks", "400")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		engines = append(engines, e)
	}
	callers := make([]*caller, 4)
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for i := range callers {
		c := startReplicaProcess(t, bus, string(rune('a'+i)))
		replicas = append(replicas, c)
		callers[i] = &caller{replica: c}
		busy.Go(func() { callers[i].load(stop) })
	}
	end := sync.OnceFunc(func() { close(stop); busy.Wait() })
	t.Cleanup(end)
	agree := func(when string, requests int, some ...*demo.Child) {
		t.Helper()
		var out string
		want := fmt.Sprintf("equal: %d replicas, %d workers, ", len(some), fleetSize)
		if err := process.Until(t.Context(), time.Minute, when, func(context.Context) bool {
			var status int
			status, out = examine(t, apis(some...)...)
			return status == 0 && sameBlocks(t, some) && strings.Contains(out, want) && strings.Contains(out, fmt.Sprintf(", %d requests in flight", requests))
		}); err != nil {
			t.Fatalf("%v; the doctor says\n%s", err, out)
		}
	}
	for i, c := range callers {
		for n := range 10 {
			c.book(fmt.Sprintf("kept%d", n), i)
			c.book(fmt.Sprintf("ended%d", n), i)
		}
	}
	talk(t, engines, 0, 12)

	var before [4]int64
	bus.Server.Shutdown()
	bus.Server.WaitForShutdown()
	for i, c := range callers {
		before[i] = c.made.Load()
	}
	lost := time.After(10 * time.Second)
	for i, c := range callers {
		for n := range 10 {
			c.free(fmt.Sprintf("ended%d", n))
			if n%2 == 0 {
				c.mark(fmt.Sprintf("kept%d", n))
			}
		}
		c.book("meanwhile", i)
	}
	talk(t, engines, 12, 30)
	<-lost
	for i, c := range callers {
		if made, failed := c.made.Load()-before[i], c.failed.Load(); made < 20 || failed > 0 {
			t.Errorf("replica %s makes %d decisions in ten seconds without NATS, %d fail", c.replica.Name, made, failed)
		}
	}
	if bus, err = startNATS(at, store); err != nil {
		t.Fatal(err)
	}
	end()
	agree("the replicas do not agree after NATS was away", 4*11, replicas...)

	for i := range 100 {
		callers[3].book(fmt.Sprint("lost", i), i)
	}
	agree("the replicas do not agree before one dies", 4*11+100, replicas...)
	kill(t, replicas[3])
	agree("the replicas do not agree after one has died", 3*11, replicas[:3]...)
	for _, c := range callers {
		if n := c.failed.Load(); n > 0 {
			t.Errorf("%d requests at replica %s are not decided", n, c.replica.Name)
		}
	}
}

// sameBlocks reports whether the indexes of replicas have the same blocks.
func sameBlocks(t *testing.T, replicas []*demo.Child) bool {
	t.Helper()
	dumps := map[string]bool{}
	for _, c := range replicas {
		_, dump := whole(t, http.MethodGet, "http://"+c.At.HTTP+"/v1/index/dump", "", nil)
		dumps[strings.Join(blocksOf(t, dump), "\n")] = true
	}
	return len(dumps) == 1
}
