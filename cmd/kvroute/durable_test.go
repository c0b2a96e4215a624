// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// The tests of this file start routers and workers as processes, and NATS in this
// one; no Envoy.

// streamFleet starts NATS and workers that publish into a stream.
func streamFleet(t *testing.T) (bus *bus.Server, engines []*demo.Child) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	bus, err := startNATS("127.0.0.1:0", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(bus.Stop)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	for i := range fleetSize {
		name := fmt.Sprint("worker-", i+1)
		e, err := demo.Start(t.Context(), t.TempDir(), name, "engine", "--name", name, "--listen", "127.0.0.1:0", "--nats-url", bus.URL(), "--speed", "50", "--num-gpu-blocks", "400")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		engines = append(engines, e)
	}
	return bus, engines
}

// fleetSize is the number of workers in these tests.
const fleetSize = 3

func startReplicaProcess(t *testing.T, bus *bus.Server, name string, flags ...string) *demo.Child {
	t.Helper()
	c, err := demo.Start(t.Context(), t.TempDir(), name, append([]string{
		"serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-url", bus.URL(), "--replica", name,
	}, flags...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Stop()
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, c.LastLines())
		}
	})
	eventually(t, "a replica does not get ready", func() bool {
		var ready struct{ Status string }
		var listed struct{ Workers []router.WorkerState }
		return process.GetJSON(t.Context(), "http://"+c.At.HTTP+"/readyz", &ready) == nil && ready.Status == "ready" &&
			process.GetJSON(t.Context(), "http://"+c.At.HTTP+"/v1/workers", &listed) == nil && len(listed.Workers) == fleetSize
	})
	return c
}

// indexOf returns a replica's index in the form in which two replicas are compared.
func indexOf(t *testing.T, c *demo.Child) []string {
	t.Helper()
	var resp *http.Response
	var body string
	eventually(t, "a snapshot never ends", func() bool { // kvroute answers 503 while it makes one
		resp, body = get(t, "http://"+c.At.HTTP+"/v1/index/dump")
		return resp.StatusCode != http.StatusServiceUnavailable
	})
	if resp.StatusCode != 200 {
		t.Fatalf("status %d, dump %.300s", resp.StatusCode, body)
	}
	return blocksOf(t, body)
}

// blocksOf returns a line for each block of a dump, sorted: its worker, rank and tier, and the local
// hashes of the sequence up to it, as far as the worker holds them.
func blocksOf(t *testing.T, dump string) (out []string) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(dump), "\n")
	if len(lines) < 2 || !strings.HasPrefix(lines[0], `{"kvroute_dump":1,`) || !strings.HasPrefix(lines[len(lines)-1], `{"kvroute_end":`) {
		t.Fatalf("dump %.300s", dump)
	}
	sequences := map[string]uint64{} // by holder and engine's hash
	for _, line := range lines[1 : len(lines)-1] {
		var e struct {
			Worker uint64 `json:"worker_id"`
			Tier   string `json:"storage_tier"`
			Event  struct {
				Rank uint32 `json:"dp_rank"`
				Data struct {
					Stored struct {
						Parent *uint64 `json:"parent_hash"`
						Start  *int    `json:"start_position"`
						Blocks []struct {
							External uint64 `json:"block_hash"`
							Local    uint64 `json:"tokens_hash"`
						}
					}
				}
			}
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		holder := fmt.Sprint(e.Worker, " ", e.Event.Rank, " ", e.Tier)
		stored := e.Event.Data.Stored
		at := uint64(0)
		if stored.Parent != nil {
			at = sequences[fmt.Sprint(holder, *stored.Parent)]
		} else if stored.Start != nil {
			at = uint64(*stored.Start)
		}
		for _, b := range stored.Blocks {
			at = indexer.NextSequenceHash(at, b.Local)
			sequences[fmt.Sprint(holder, b.External)] = at
			out = append(out, fmt.Sprintf("%s %x", holder, at))
		}
	}
	slices.Sort(out)
	return out
}

// talk makes the engines cache some blocks.
func talk(t *testing.T, engines []*demo.Child, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		e := engines[i%len(engines)]
		body := chatBody(fmt.Sprint(i, strings.Repeat(fmt.Sprintf(" conversation %d goes on and on", i/3), 60)), 4, false)
		resp, err := send(t, t.Context(), "POST", "http://"+e.At.HTTP+chatPath, body, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatalf("status %d", resp.StatusCode)
		}
	}
}

// engineBlocks returns the number of blocks that the engines report to hold.
func engineBlocks(t *testing.T, engines []*demo.Child) (n int) {
	t.Helper()
	for _, e := range engines {
		n += cachedBlocks(t, e)
	}
	return n
}

// A third replica, started after the first two were killed, has the full state, although the stream
// no longer contains all of it.
func TestAThirdReplicaProcess(t *testing.T) {
	t.Parallel() // mostly waits
	bus, engines := streamFleet(t)
	flags := []string{"--router-snapshot-threshold", "5"}
	early := startReplicaProcess(t, bus, "early", flags...)
	talk(t, engines, 0, 20)
	early.Stop() // leaves a snapshot; after a second snapshot the stream is shortened
	a := startReplicaProcess(t, bus, "a", flags...)
	b := startReplicaProcess(t, bus, "b", flags...)
	talk(t, engines, 20, 40)
	nc, err := nats.Connect(bus.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	firstLast := func() (first, last uint64) {
		s, err := js.Stream(t.Context(), wire.Scope{}.Stream())
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.FirstSeq, s.CachedInfo().State.LastSeq
	}
	eventually(t, "the stream is not shortened", func() bool { first, _ := firstLast(); return first > 1 })
	talk(t, engines, 40, 60)
	var want []string
	eventually(t, "the replicas do not agree", func() bool {
		want = indexOf(t, a)
		_, last := firstLast()
		var lag bool
		for _, c := range []*demo.Child{a, b} {
			lag = lag || position(t, c) != last
		}
		return !lag && len(want) > 100 && len(want) == engineBlocks(t, engines) && slices.Equal(want, indexOf(t, b))
	})
	for _, c := range []*demo.Child{a, b} {
		if err := c.Cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-c.Done
	}
	c := startReplicaProcess(t, bus, "c", flags...)
	var got []string
	eventually(t, "the third replica does not catch up", func() bool {
		got = indexOf(t, c)
		return slices.Equal(got, want)
	})

	// A reset reaches replica c. The dumps of c and of the replica that resets are equal: empty, and
	// then the blocks that are stored from now on.
	d := startReplicaProcess(t, bus, "d", append(flags, "--router-reset-states")...)
	eventually(t, "a reset does not reach the other replica", func() bool { return len(indexOf(t, c)) == 0 && len(indexOf(t, d)) == 0 })
	for _, e := range engines {
		if resp, text := whole(t, http.MethodPost, "http://"+e.At.HTTP+"/reset_prefix_cache", "", nil); resp.StatusCode != http.StatusOK {
			t.Fatal(text)
		}
	}
	talk(t, engines, 60, 80)
	eventually(t, "the replicas do not agree after a reset", func() bool {
		x := indexOf(t, c)
		return len(x) > 100 && len(x) == engineBlocks(t, engines) && slices.Equal(x, indexOf(t, d))
	})

	// The command prints the same.
	status, out, stderr := runs(t, "dump", "--url", "http://"+c.At.HTTP)
	if status != 0 || !slices.Equal(blocksOf(t, out), indexOf(t, c)) {
		t.Errorf("kvroute dump: status %d, %s", status, stderr)
	}
}

// position is the last message of the stream that a replica has applied.
func position(t *testing.T, c *demo.Child) uint64 {
	t.Helper()
	_, body := get(t, "http://"+c.At.HTTP+"/v1/index/dump")
	line, _, _ := strings.Cut(body, "\n")
	var head struct {
		Seq uint64 `json:"last_stream_seq"`
	}
	if err := json.NewDecoder(bytes.NewBufferString(line)).Decode(&head); err != nil {
		t.Fatal(err)
	}
	return head.Seq
}

// A router alone, with its own NATS under --state-dir, has the same index after a restart.
func TestARestartWithItsOwnNATS(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := t.TempDir()
	port := heldAddress(t)
	start := func() *demo.Child {
		c, err := demo.Start(t.Context(), t.TempDir(), "serve", "serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0",
			"--nats-listen", port, "--state-dir", dir, "--replica", "only")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Stop)
		return c
	}
	c := start()
	e, err := demo.Start(t.Context(), t.TempDir(), "worker-1", "engine", "--name", "worker-1", "--listen", "127.0.0.1:0", "--nats-url", c.At.NATS, "--speed", "50")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	talk(t, []*demo.Child{e}, 0, 10)
	var want []string
	eventually(t, "the events do not come", func() bool {
		want = indexOf(t, c)
		return len(want) > 100 && len(want) == engineBlocks(t, []*demo.Child{e})
	})
	c.Stop()
	talk(t, []*demo.Child{e}, 0, 3) // no new blocks, while the bus is absent
	c = start()
	eventually(t, "what was known is gone", func() bool { return slices.Equal(indexOf(t, c), want) })
}

// The stream's default limits; package events tests the hour.
func TestDurableDefaults(t *testing.T) {
	if c := defaults(); c.RouterSnapshotThreshold != 1_000_000 || c.KVEventsRetention != 0 || !c.DurableKVEvents {
		t.Errorf("threshold %d, retention %v, durable %v; want 1,000,000, 0 and true", c.RouterSnapshotThreshold, c.KVEventsRetention, c.DurableKVEvents)
	}
}
