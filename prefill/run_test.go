// SPDX-License-Identifier: Apache-2.0

package prefill_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// ledger notes the calls of a router.
type ledger struct {
	mu    sync.Mutex
	lines []string
}

func (l *ledger) note(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
}

func (l *ledger) Served(id string, r router.Response) (moved bool, avoided []router.Worker) {
	l.note(fmt.Sprintf("%s: status %d, local %v", id, r.Status, r.Local))
	return false, nil
}

func (l *ledger) FirstToken(id string, by router.Sign) bool {
	l.note(fmt.Sprintf("%s: first token %s", id, by))
	return true
}

func (l *ledger) Free(id string) bool { l.note(id + ": free"); return true }

func (l *ledger) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Sprint(l.lines)
}

// With SGLang the decode request may leave as soon as the prefill request has; the leg ends when the
// prefill does, and its body counts until then.
func TestBothRequestsAtOnce(t *testing.T) {
	finish := make(chan struct{})
	client, at := worker(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-finish
	})
	var told ledger
	client.Router = &told
	ended := make(chan struct{})
	d := &router.Decision{ID: "leg", Engine: "sglang", Address: at}
	decode, outcome := client.Do(t.Context(), d, prefill.Leg{Engine: "sglang", Path: "/v1/completions", Body: []byte(`{"prompt":"a"}`)}, time.Now().Add(time.Minute), func() { close(ended) })
	if decode == nil || outcome != "served" || told.String() != "[]" {
		t.Fatalf("body %s, outcome %s, the router was told %s", decode, outcome, &told)
	}
	close(finish)
	<-ended
	if got := told.String(); got != "[leg: status 200, local false leg: first token told leg: free]" {
		t.Errorf("the router was told %s", got)
	}
}

// The second worker is tried if the first one fails, whatever the protocol. What the engines cannot do
// is not tried.
func TestTheSecondPrefillWorker(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := netip.MustParseAddrPort(free.Addr().String())
	_ = free.Close()
	answer := `{"kv_transfer_params":{"a":1},"choices":[{"disaggregated_params":{"a":1}}]}`
	client, at := worker(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, answer)
	})
	for _, c := range []struct {
		engine        string
		first, second netip.AddrPort
		prompts       int
		outcome       string
	}{
		{"vllm", closed, at, 0, "second"},
		{"sglang", closed, at, 0, "second"},
		{"trtllm", closed, at, 0, "second"},
		{"vllm", at, closed, 0, "served"},
		{"sglang", closed, closed, 0, "unreachable"},
		{"vllm", closed, netip.AddrPort{}, 0, "unreachable"},
		{"vllm", at, at, 2, "batch"},
		{"sglang", at, at, 2, "served"},
		{"other", at, at, 0, "engine"},
	} {
		var told ledger
		client.Router = &told
		ended := make(chan struct{})
		d := &router.Decision{ID: "leg", Address: c.first, Second: router.Second{Address: c.second}}
		decode, outcome := client.Do(t.Context(), d, prefill.Leg{Engine: c.engine, Path: "/v1/completions", Body: []byte(`{"prompt":"a"}`), Prompts: c.prompts}, time.Now().Add(time.Minute), func() { close(ended) })
		worked := c.outcome == "served" || c.outcome == "second"
		if outcome != c.outcome || (decode != nil) != worked {
			t.Errorf("%+v: outcome %s, body %s", c, outcome, decode)
		}
		<-ended // once: a second call would panic
	}
}
