// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Without room requests wait, longer than Envoy waits for a decision, and are admitted or refused
// with kvroute's status; through a real Envoy.
func TestRequestsWaitForRoom(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 1, []string{"--speed", "0.15"}, "--router-queue-threshold", "0", "--queue-wait", "4s", "--overload-status", "529", "--router-queue-limit", "2")
	long := strings.Repeat("A prompt that takes the engine a while to read. ", 300)
	answers := make(chan *http.Response, 4)
	ask := func(body string) {
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
	ask(chatBody("first "+long, 1, true))
	eventually(t, "the first request is not booked", func() bool { _, pend, _ := inFlight(t, d); return pend > 0 })
	start := time.Now()
	for _, name := range []string{"second ", "third "} {
		ask(chatBody(name+long, 1, true))
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
