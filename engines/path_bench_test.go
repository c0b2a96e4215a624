// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/internal/zmtp"
	"github.com/kvroute/kvroute/router"
)

// feed is the batches of an engine, with the number of their events, and of the blocks that these
// store or remove.
type feed struct {
	batches        [][]byte
	events, blocks int
}

// chatEngine writes the batches of a vLLM 0.32 engine with blocks of 16 tokens. When its cache is
// full, an event for each stored block removes a block of the request that ended first, the last
// blocks first.
type chatEngine struct {
	feed

	rng      *rand.Rand
	room     int      // vacant blocks of the cache
	finished []uint64 // blocks of finished requests, in the order of their removal
	pages    int      // number of events that follow each other in a chain; SGLang sends one for each block
	batch    list
}

func newChatEngine(seed uint64, room int) *chatEngine {
	return &chatEngine{rng: rand.New(rand.NewPCG(seed, 1)), room: room, pages: 1}
}

func (e *chatEngine) store(parent any, n int) (hashes []uint64) {
	all, keys, tokens := make(list, n), make(list, n), make([]uint32, 16*n)
	for i := range all {
		hash := e.rng.Uint64() | 1<<63
		all[i], hashes = hash, append(hashes, hash)
	}
	for i := range tokens { // as many of each encoded size as in Qwen3's ids of English and Python
		from, to := uint32(256), uint32(1<<16)
		switch x := e.rng.IntN(100); {
		case x < 13:
			from, to = 0, 128
		case x < 16:
			from, to = 128, 256
		case x < 18:
			from, to = 1<<16, 151643
		}
		tokens[i] = from + e.rng.Uint32N(to-from)
	}
	e.remove(n - e.room)
	e.room -= n
	if e.pages > 1 {
		e.batch = append(e.batch, blockStored(all, parent, tokens, 16, "lora_id", nil, "medium", "GPU"))
		e.blocks += n
		return hashes
	}
	e.batch = append(e.batch, blockStored(all, parent, tokens, 16, "lora_id", nil, "medium", "GPU", "lora_name", nil, "extra_keys", keys, "group_idx", 0, "kv_cache_spec_kind", "full_attention"))
	e.blocks += n
	return hashes
}

func (e *chatEngine) remove(n int) {
	for range min(n, len(e.finished)) {
		e.batch = append(e.batch, blockRemoved(list{e.finished[0]}, "medium", "GPU", "group_idx", 0))
		e.finished = e.finished[1:]
		e.blocks++
		e.room++
	}
}

// step ends a step of the engine's scheduler.
func (e *chatEngine) step() {
	if len(e.batch) > 0 {
		e.events += len(e.batch)
		e.batches = append(e.batches, encode(nil, list{1.5, e.batch, 0}))
		e.batch = nil
	}
}

// chats plays chats with new prompts of so many blocks and answers of 16 blocks. Eight requests run
// at a time, with 64 prompt blocks in a step. In the end the cache is empty again.
func (e *chatEngine) chats(prompt, requests int) {
	type chat struct {
		blocks []uint64 // stored so far
		todo   int      // prompt blocks
		tokens int      // of the answer
	}
	system := e.store(nil, 16)
	var running []*chat
	for requests > 0 || len(running) > 0 {
		if requests > 0 && len(running) < 8 {
			requests--
			running = append(running, &chat{todo: prompt, tokens: e.rng.IntN(16)})
		}
		budget := 64
		for i := 0; i < len(running); i++ {
			c := running[i]
			parent := system[15]
			if n := len(c.blocks); n > 0 {
				parent = c.blocks[n-1]
			}
			if c.todo > 0 {
				if n := min(c.todo, budget); n > 0 {
					c.blocks = append(c.blocks, e.store(parent, n)...)
					c.todo -= n
					budget -= n
				}
				continue
			}
			if c.tokens++; c.tokens%16 == 0 {
				c.blocks = append(c.blocks, e.store(parent, 1)...)
			}
			if c.tokens >= 256 {
				slices.Reverse(c.blocks)
				e.finished = append(e.finished, c.blocks...)
				running = append(running[:i], running[i+1:]...)
				i--
			}
		}
		e.step()
	}
	slices.Reverse(system)
	e.finished = append(e.finished, system...)
	e.empty()
}

// empty removes all blocks, in batches of 64.
func (e *chatEngine) empty() {
	for len(e.finished) > 0 {
		e.remove(64)
		e.step()
	}
}

// chains stores chains of 512 blocks, four at a time, in events of so many blocks. A batch has an
// event of each of the four, or as many events of one as the prompt of a request has blocks.
func (e *chatEngine) chains(chains, size int) {
	for range chains / 4 {
		var all [4][]uint64
		for len(all[3]) < 512 {
			for i := range all {
				for range e.pages {
					var parent any
					if n := len(all[i]); n > 0 {
						parent = all[i][n-1]
					}
					all[i] = append(all[i], e.store(parent, size)...)
				}
				if e.pages > 1 {
					e.step()
				}
			}
			e.step()
		}
		for i := range all {
			slices.Reverse(all[i])
			e.finished = append(e.finished, all[i]...)
		}
	}
}

// pathFeeds are the feeds of the benchmark: first one that stores 16,384 blocks, which stay, then
// those that are measured, which store 8,192 more blocks and remove them.
func pathFeeds(name string) (feeds []feed) {
	base := newChatEngine(2, 1<<15)
	base.chains(32, 64)
	feeds = append(feeds, base.feed)
	e := newChatEngine(1, 1<<13)
	switch name {
	case "10KB":
		e.chats(160, 160)
	case "100KB":
		e.chats(1600, 24)
	case "parts64", "parts1", "pages":
		size := 1
		switch name {
		case "parts64":
			size = 64
		case "pages":
			e.pages = 64
		}
		e.chains(16, size)
		feeds = append(feeds, e.feed)
		e.feed = feed{}
		e.empty()
	}
	return append(feeds, e.feed)
}

const senderEnv = "KVROUTE_PATH_SENDER"

// TestPathSender is the engine's process of BenchmarkPath. For each line of its input, the number
// of a feed, it sends the feed. With pause it waits between batches, so that the reader sleeps.
func TestPathSender(t *testing.T) {
	name, paused := strings.CutSuffix(os.Getenv(senderEnv), "/paced")
	if name == "" {
		t.Skip("only for BenchmarkPath")
	}
	name, _ = strings.CutSuffix(name, "/burst")
	feeds := pathFeeds(name)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	fmt.Printf("%s\n", l.Addr())
	nc, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c, err := zmtp.NewConn(nc, zmtp.Pub)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(); err != nil { // the subscription
		t.Fatal(err)
	}
	in := bufio.NewScanner(os.Stdin)
	for sequence := uint64(0); in.Scan(); {
		var i int
		if _, err := fmt.Sscan(in.Text(), &i); err != nil {
			t.Fatal(err)
		}
		for _, b := range feeds[i].batches {
			if err := c.Write([]byte("kv-events"), binary.BigEndian.AppendUint64(nil, sequence), b); err != nil {
				t.Fatal(err)
			}
			if sequence++; paused {
				time.Sleep(300 * time.Microsecond)
			}
		}
	}
}

// startSender starts the engine's process.
func startSender(b *testing.B, name string) (address string, send func(feed int)) {
	cmd := exec.Command(os.Args[0], "-test.run=^TestPathSender$")
	cmd.Env = append(os.Environ(), senderEnv+"="+name, "GOMAXPROCS=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(line), func(feed int) { fmt.Fprintln(in, feed) }
}

// processTime returns the processor time of this process.
func processTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPath measures the processor time of the path of events from an engine's socket to the
// router's index, with metrics. The engine is another process, whose time does not count. It sends
// its batches as fast as they are read ("burst"), or with a pause after each batch ("paced"), so
// that the reader is woken for each. The metrics: processor time and allocations of an event, and
// time of a block that is stored or removed. Those of removals have the prefix "removal-".
func BenchmarkPath(b *testing.B) {
	for _, name := range []string{"10KB", "100KB", "parts64", "parts1", "pages"} {
		for _, pace := range []string{"burst", "paced"} {
			b.Run(name+"/"+pace, func(b *testing.B) { benchmarkPath(b, name, pace) })
		}
	}
}

func benchmarkPath(b *testing.B, name, pace string) {
	feeds := pathFeeds(name)
	address, send := startSender(b, name+"/"+pace)
	metrics, err := telemetry.NewMetrics()
	if err != nil {
		b.Fatal(err)
	}
	r, err := router.New(router.Config{BlockSize: 16, Meter: metrics.Meter("router")})
	if err != nil {
		b.Fatal(err)
	}
	if err := r.SetWorker(router.WorkerInfo{ID: 1, Address: netip.MustParseAddrPort("127.0.0.1:8000"), Models: []string{"m"}, BlockSize: 16, TotalKVBlocks: 1 << 16}); err != nil {
		b.Fatal(err)
	}
	var blocks, want atomic.Int64
	arrived := make(chan struct{}, 1)
	sources, err := engines.NewSources(engines.SourcesConfig{
		Sink: func(id uint64, rank uint32, ev indexer.Event) {
			r.ApplyEvent(router.Worker{ID: id, DPRank: rank}, ev)
			if blocks.Add(int64(len(ev.Blocks)+len(ev.Externals))) == want.Load() {
				arrived <- struct{}{}
			}
		},
		Meter: metrics.Meter("source"),
	})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- sources.Run(ctx) }()
	defer func() {
		cancel()
		<-done
	}()
	sources.Set(engines.EngineWorker{ID: 1, Transport: engines.TransportZMQ, Endpoint: "tcp://" + address, BlockSize: 16})
	for sources.State(1) != indexer.StateOK {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(100 * time.Millisecond) // for the subscription
	var sizes []int
	for _, f := range feeds {
		sizes = append(sizes, f.blocks)
	}
	play := func(i int) {
		want.Add(int64(sizes[i]))
		send(i)
		select {
		case <-arrived:
		case <-time.After(time.Minute):
			b.Fatalf("%d blocks arrived, want %d", blocks.Load(), want.Load())
		}
	}
	for i := range feeds {
		play(i)
	}
	feeds = feeds[1:]
	var cpu [2]time.Duration
	var allocations [2]uint64
	var rounds int
	var before, after runtime.MemStats
	for b.Loop() {
		rounds++
		for i := range feeds {
			runtime.ReadMemStats(&before)
			start := processTime(b)
			play(i + 1)
			cpu[i] += processTime(b) - start
			runtime.ReadMemStats(&after)
			allocations[i] += after.Mallocs - before.Mallocs
		}
	}
	if n := r.Workers()[0].CachedBlocks; n != 32*512 {
		b.Fatalf("%d blocks are left", n)
	}
	b.ReportMetric(0, "ns/op")
	for i, f := range feeds {
		part := [2]string{"", "removal-"}[i]
		b.ReportMetric(float64(cpu[i])/float64(rounds*f.events), part+"ns/event")
		b.ReportMetric(float64(cpu[i])/float64(rounds*f.blocks), part+"ns/block")
		b.ReportMetric(float64(allocations[i])/float64(rounds*f.events), part+"allocs/event")
	}
}
