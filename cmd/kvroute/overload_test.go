// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
)

// Without room requests wait, longer than Envoy waits for a decision, and are admitted or refused
// with kvroute's status; through a real Envoy.
func TestRequestsWaitForRoom(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 1, []string{"--speed", "0.15"}, "--router-queue-threshold", "0", "--queue-wait", "4s", "--overload-status", "529", "--router-queue-limit", "2")
	long := strings.Repeat("A prompt that takes the engine a while to read. ", 300)
	answers := make(chan *http.Response, 4)
	sendChat := func(body string) {
		go func() {
			resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, body, nil)
			if err != nil {
				t.Error(err)
				answers <- nil
				return
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			answers <- resp
		}()
	}
	sendChat(chatBody("first "+long, 1, true))
	eventually(t, "the first request is not booked", func() bool { _, pend, _ := inFlight(t, d); return pend > 0 })
	start := time.Now()
	for _, name := range []string{"second ", "third "} {
		sendChat(chatBody(name+long, 1, true))
	}
	waiting := func() bool {
		_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
		return strings.Contains(text, `kvroute_router_queue_size{model="sim"} 2`)
	}
	eventually(t, "two requests do not wait", waiting)
	if resp, body := reply(t, d, "POST", chatPath, chatBody("fourth "+long, 1, true), nil); resp.StatusCode != 529 || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "queue_full") {
		t.Errorf("the queue is full: status %d, %s", resp.StatusCode, body)
	}
	statuses := map[int]int{}
	for range 3 {
		if resp := <-answers; resp != nil {
			statuses[resp.StatusCode]++
			if resp.StatusCode == 200 && resp.Header.Get("X-Dynamo-Reason") == "" {
				t.Error("a request went its own way")
			}
		}
	}
	if took := time.Since(start); took < 2*time.Second || statuses[200] < 2 || statuses[200]+statuses[529] != 3 {
		t.Errorf("after %v: %v", took, statuses)
	}
	eventually(t, "slots are left behind", func() bool {
		requests, pend, blocks := inFlight(t, d)
		return requests+pend+blocks == 0
	})
}

// Under three times the load that the workers can take, accepted requests wait no longer than the
// workers' own queue is allowed to be, and the rest is refused at once. When the load ends, requests are
// served as before.
func TestOverload(t *testing.T) {
	t.Parallel() // mostly waits
	// A worker computes the prompt of 4,000 tokens below in 0.4 s or more, one after the other.
	d := startStack(t, 2, []string{"--speed", "1", "--max-num-batched-tokens", "4096"}, "--active-prefill-tokens-threshold", "8000", "--avoid-failing", "0")
	prompt := strings.Repeat("A prompt that takes the engine a while to read. ", 400)
	type timing struct {
		status int
		took   time.Duration
	}
	measure := func(name string) timing {
		start := time.Now()
		got := look(send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody(name+prompt, 1, true), nil))
		return timing{got.status, time.Since(start)}
	}
	alone := measure("alone ")
	for i := range 4 {
		alone.took = max(alone.took, measure(fmt.Sprint("alone ", i, " ")).took)
	}
	if alone.status != http.StatusOK {
		t.Fatalf("status %d", alone.status)
	}
	// Each client sends its next request when the last one is answered; a refused client tries again
	// after half of a service time. Two workers with room for three prompts each have six at a time.
	lasts := 10 * alone.took
	if fixtures.Long() {
		lasts *= 5
	}
	var mu sync.Mutex
	answers := map[int][]time.Duration{}
	var clients sync.WaitGroup
	for c := range 18 {
		clients.Go(func() {
			for i, begin := 0, time.Now(); time.Since(begin) < lasts; i++ {
				a := measure(fmt.Sprint(c, " ", i, " "))
				mu.Lock()
				answers[a.status] = append(answers[a.status], a.took)
				mu.Unlock()
				if a.status != http.StatusOK {
					<-time.After(alone.took / 2)
				}
			}
		})
	}
	clients.Wait()
	ended := time.Now()
	served, refused := answers[http.StatusOK], answers[http.StatusTooManyRequests]
	if len(answers) != 2 || len(served) < 6 || len(refused) < 6 {
		t.Fatalf("answers by status: %v", answers)
	}
	eventually(t, "the workers do not recover", func() bool {
		requests, pend, blocks := inFlight(t, d)
		return requests+pend+blocks == 0
	})
	rest := time.Since(ended)
	after := measure("after ")
	slices.Sort(served)
	slices.Sort(refused)
	t.Logf("%d served: median %v, slowest %v; alone %v", len(served), served[len(served)/2], served[len(served)-1], alone.took)
	t.Logf("%d refused: median %v, 99 of 100 within %v; recovered after %v", len(refused), refused[len(refused)/2], refused[len(refused)*99/100], rest)
	// The bounds allow for a machine with other work: a refusal must not wait for a worker.
	if most := 10*alone.took + 5*time.Second; served[len(served)-1] > most {
		t.Errorf("a request was served after %v, want at most %v", served[len(served)-1], most)
	}
	if refused[len(refused)/2] > alone.took {
		t.Errorf("refusals take %v", refused[len(refused)/2])
	}
	if after.status != http.StatusOK {
		t.Errorf("status %d after the overload", after.status)
	}
	atRest(t, d)
}
