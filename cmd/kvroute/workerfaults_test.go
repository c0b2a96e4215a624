// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/router"
)

// faulty is a worker that does what the prompt requests: it hangs until hang is closed, and resets
// streams whose beginning the client has seen, which begun signals.
func faulty(hang, begun <-chan struct{}) http.HandlerFunc {
	reset := func(w http.ResponseWriter) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // closing resets the connection
		}
		_ = conn.Close()
	}
	event := func(w http.ResponseWriter) {
		fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n")
		_ = http.NewResponseController(w).Flush()
	}
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		does := func(what string) bool { return strings.Contains(string(body), what) }
		if does("stream") {
			w.Header().Set("Content-Type", "text/event-stream")
		} else {
			w.Header().Set("Content-Type", "application/json")
		}
		switch {
		case does("reset before headers"):
			reset(w)
		case does("reset in the stream"):
			event(w)
			<-begun
			reset(w)
		case does("hang before headers"):
			<-hang
		case does("hang in the stream"):
			event(w)
			<-hang
		case does("hang after the headers"):
			_ = http.NewResponseController(w).Flush()
			<-hang
		case does("fail"):
			http.Error(w, `{"error":"a fault"}`, http.StatusInternalServerError)
		default:
			fmt.Fprint(w, `{"choices":[]}`)
		}
	}
}

// A worker that sends the headers of a stream and no token does not look idle when its client leaves.
func TestHeadersAreNoToken(t *testing.T) {
	d := newStack(t, 0, nil)
	hang := make(chan struct{})
	defer close(hang)
	d.begin(t, append(staticFlags(t, d, "hangs", startHTTP(t, faulty(hang, nil))), "--avoid-failing", "0")...)
	eventually(t, "the load of requests whose client leaves does not stay", func() bool {
		// The client may leave before kvroute's observer has the headers.
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		resp, err := send(t, ctx, "POST", d.Envoy.URL()+chatPath, chatBody("hang after the headers", 4, true), nil)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		_ = resp.Body.Close()
		eventually(t, "requests stay in flight", func() bool { n, _, _ := inFlight(t, d); return n == 0 })
		w := workers(t, d)[0]
		return w.LeftRequests == 1 && w.PendTokens > 0 && w.Health == "healthy" && !w.Failing && w.Failures == 0
	})
	atRestAfterAnAnswer(t, d)
}

// Whatever a worker does, and whenever its client disconnects, the client gets the outcome of
// docs/envoy.md, and no slot is left.
func TestWorkersFaults(t *testing.T) {
	d := newStack(t, 0, nil)
	hang, begun := make(chan struct{}), make(chan struct{}, 1)
	defer close(hang)
	address := startHTTP(t, faulty(hang, begun))
	d.begin(t, append(staticFlags(t, d, "faulty", address), "--avoid-failing", "0")...)
	for _, c := range []struct {
		row    string
		does   string
		stream bool
		leave  bool // the client disconnects
		body   string
	}{
		{row: "the worker resets the connection before the response", does: "reset before headers"},
		{row: "the worker resets it in the response", does: "reset in the stream", stream: true},
		{row: "the client leaves", does: "hang before headers", leave: true},
		{row: "the client leaves", does: "hang before headers", stream: true, leave: true},
		{row: "the client leaves", does: "hang in the stream", stream: true, leave: true},
		{row: "the worker answers with an error", does: "fail", body: "a fault"},
		{row: "kvroute decides", does: "answer", body: "choices"},
	} {
		t.Run(fmt.Sprint(c.does, " ", c.stream), func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if c.leave {
				go func() {
					eventually(t, "no slot is taken", func() bool { n, _, _ := inFlight(t, d); return n == 1 })
					cancel()
				}()
			}
			resp, err := send(t, ctx, "POST", d.Envoy.URL()+chatPath, chatBody(c.does, 4, c.stream), nil)
			if err == nil && c.does == "reset in the stream" {
				begun <- struct{}{}
			}
			got := look(resp, err)
			if c.leave {
				if !errors.Is(got.err, context.Canceled) {
					t.Errorf("the client's end is %v", got.err)
				}
				got.status = 0 // the client ignores the response
			}
			if outcomeOf(t, c.row).check(t, got); !strings.Contains(got.body, c.body) {
				t.Errorf("%.300s, want %q", got.body, c.body)
			}
			if c.leave {
				atRestAfterAnAnswer(t, d)
			}
			if c.does == "reset in the stream" {
				eventually(t, "the worker that broke the response off is not counted", func() bool {
					_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
					return strings.Contains(text, `kvroute_extproc_attempts_total{status="broken_off"} 1`) &&
						slices.ContainsFunc(workers(t, d), func(w router.WorkerState) bool { return w.Failures > 0 && !w.Failing })
				})
			}
			atRest(t, d)
		})
	}
}

// A kvroute that hangs while it decides, and is then killed: the pool serves its undecided requests.
func TestAHangingRouterFailsOpen(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 2, []string{"--speed", "20"})
	sendAndCheck := func(row string) (reason string, took time.Duration) {
		t.Helper()
		begin := time.Now()
		got := d.send(t, "hello", false)
		outcomeOf(t, row).check(t, got)
		return got.header.Get("X-Dynamo-Reason"), time.Since(begin)
	}
	hangs, dies := outcomeOf(t, "kvroute hangs"), outcomeOf(t, "kvroute dies while it decides")
	hold(t, d.Router)
	if reason, took := sendAndCheck(hangs.what); reason != "" || took < time.Second {
		t.Errorf("decided %q after %v by a router that stands still", reason, took)
	}
	var waiting sync.WaitGroup
	waiting.Go(func() { sendAndCheck(dies.what) }) // kvroute is killed during this request
	eventually(t, "the request does not reach kvroute", func() bool {
		n, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.streams_started")
		closed, _ := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.streams_closed")
		failed, _ := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.streams_failed")
		return err == nil && n > closed+failed
	})
	kill(t, d.Router)
	waiting.Wait()
}

// An Envoy that is killed leaves no slots behind; a new Envoy is served.
func TestEnvoyRestarts(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 2, []string{"--num-gpu-blocks", "16384"})
	resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("tell me a long story", 4000, true), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n, _, _ := inFlight(t, d); n != 1 {
		t.Errorf("%d requests in flight, want 1", n)
	}
	if err := syscall.Kill(d.Envoy.Pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-d.Envoy.Done
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the response is whole")
	}
	outcomeOf(t, "Envoy dies").check(t, look(send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("hello", 2, false), nil)))
	atRest(t, d)
	if err := d.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new Envoy's requests are not decided", func() bool {
		resp, _ := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil)
		return resp.StatusCode == 200 && resp.Header.Get("X-Dynamo-Reason") != ""
	})
	idle(t, d)
}

// Bodies of ten megabytes reach a worker whole; a body above the limit is an error in the API's
// form.
func TestLargeBodies(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 1, []string{"--speed", "1000", "--num-gpu-blocks", "400000"})
	d.EnvoyConfig.MessageTimeout, d.EnvoyConfig.MaxMessageTimeout = 30*time.Second, 40*time.Second // for busy machines
	d.begin(t, "--decision-timeout", "25s")
	large := chatBody(strings.Repeat("word ", 10<<20/5), 2, false)
	resp, body := reply(t, d, "POST", chatPath, large, nil)
	// The simulated engine has its own limit of a prompt's length.
	if resp.StatusCode != 200 && !strings.Contains(body, "too_large") {
		t.Errorf("10 MB: status %d: %.300s", resp.StatusCode, body)
	}
	if resp.Header.Get("X-Dynamo-Reason") == "" {
		t.Error("10 MB: not decided")
	}
	idle(t, d)
	outcomeOf(t, "the body is larger than the limit").check(t, d.send(t, strings.Repeat("word ", 17<<20/5), false))
	idle(t, d)
}

// Many large bodies at a time, more than the budget of held bytes: each request is served, decided by
// kvroute or left to Envoy's choice, and kvroute's memory stays within the budget and what its work
// needs. Long runs without the race detector send 500 bodies of 10 MB.
func TestLargeBodiesWithinTheBudget(t *testing.T) {
	if !fixtures.Long() {
		t.Parallel() // mostly waits
	}
	// A body takes several times its length while it is decided: its text, the blocks' hashes, and
	// as much again until the garbage collector runs.
	const budget = 48 << 20
	times := 10
	if fixtures.Raced {
		times = 30
	}
	requests, size := 60, 2<<20
	if fixtures.Long() && !fixtures.Raced {
		requests, size = 500, 10<<20
	}
	d := newStack(t, 0, nil)
	worker := startHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
	}))
	d.EnvoyConfig.MessageTimeout, d.EnvoyConfig.MaxMessageTimeout = 30*time.Second, 40*time.Second // for busy machines
	d.EnvoyConfig.Pool = []string{worker}
	d.begin(t, append(staticFlags(t, d, "large", worker), "--max-held-bytes", strconv.Itoa(budget), "--decision-timeout", "25s")...)
	idleUse := d.uses(t)
	body := chatBody(strings.Repeat("word ", size/5), 2, false)
	ctx, stop := context.WithCancel(t.Context())
	var most resources
	var watch sync.WaitGroup
	watch.Go(func() {
		for bus.Wait(ctx, 50*time.Millisecond) {
			most.memory = max(most.memory, d.uses(t).memory)
		}
	})
	var mu sync.Mutex
	answers := map[string]int{}
	var clients sync.WaitGroup
	for range requests {
		clients.Go(func() {
			got := look(send(t, t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, body, nil))
			mu.Lock()
			defer mu.Unlock()
			decided := "decided"
			if got.header.Get("X-Dynamo-Reason") == "" {
				decided = "left to Envoy"
			}
			if got.err != nil {
				t.Errorf("a client gets no answer: %v", got.err)
			}
			answers[fmt.Sprint(got.status, " ", decided)]++
		})
	}
	clients.Wait()
	stop()
	watch.Wait()
	t.Logf("%d bodies of %d bytes: %v; memory %d MB at the beginning, %d MB at most", requests, size, answers, idleUse.memory>>20, most.memory>>20)
	// A large body without room is refused, since kvroute could not check it: SECURITY.md.
	if n := answers["200 decided"] + answers["200 left to Envoy"] + answers["503 decided"]; n != requests || answers["200 decided"] == 0 {
		t.Errorf("answers: %v", answers)
	}
	if most.memory > idleUse.memory+times*budget {
		t.Errorf("kvroute used %d MB", most.memory>>20)
	}
	atRest(t, d)
	if got := d.send(t, strings.Repeat("word ", size/5), false); got.status != http.StatusOK || got.header.Get("X-Dynamo-Reason") == "" {
		t.Errorf("afterwards: status %d, decided because of %q", got.status, got.header.Get("X-Dynamo-Reason"))
	}
}
