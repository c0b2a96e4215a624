// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
)

const (
	steers  = `{"model":"m","messages":[1],"kv_transfer_params":{"remote_host":"192.0.2.1"},"nvext":{"dp_rank":3,"cache_salt":"s"}}`
	cleaned = `{"model":"m","messages":[1],"nvext":{"cache_salt":"s"}}`
)

// In each mode no worker gets a body that steers: the fields are removed, or the request is refused. A trusted
// listener passes the body as it is.
func TestNoModePassesSteeringFields(t *testing.T) {
	for name, c := range map[string]struct {
		request envoytest.Request
		status  int // 0: the fields are removed
	}{
		"buffered":             {envoytest.Request{}, 0},
		"buffered, trailers":   {envoytest.Request{Trailers: true}, 0},
		"partial":              {envoytest.Request{Mode: filterv3.ProcessingMode_BUFFERED_PARTIAL}, 0},
		"full duplex":          {envoytest.Request{Mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, Chunk: 10}, 0},
		"ahead":                {envoytest.Request{Mode: filterv3.ProcessingMode_STREAMED, Ahead: true, Chunk: 10}, 0},
		"streamed":             {envoytest.Request{Mode: filterv3.ProcessingMode_STREAMED, Chunk: 10}, 400},
		"streamed, trailers":   {envoytest.Request{Mode: filterv3.ProcessingMode_STREAMED, Chunk: 10, Trailers: true}, 400},
		"compressed":           {envoytest.Request{Header: []string{"content-encoding", "gzip"}}, 415},
		"compressed, streamed": {envoytest.Request{Mode: filterv3.ProcessingMode_STREAMED, Header: []string{"content-encoding", "br"}}, 415},
	} {
		for _, trusted := range []bool{false, true} {
			t.Run(fmt.Sprint(name, trusted), func(t *testing.T) {
				h := newHarness(t, extproc.Config{TrustOverrides: trusted, AllowDirect: trusted, MaxBodyBytes: 10_000})
				r := c.request
				r.Path, r.Body = "/v1/chat/completions", []byte(strings.ReplaceAll(steers, `,"nvext":{"dp_rank":3,"cache_salt":"s"}`, ""))
				if !trusted {
					r.Body = []byte(steers)
					r.Header = append(r.Header, "content-length", fmt.Sprint(len(steers)))
				}
				x := h.Do(r)
				defer x.End()
				switch {
				case trusted && (x.Refusal != nil || x.Body != nil && string(x.Body) != string(r.Body)):
					t.Errorf("a trusted client: refusal %+v, the body %s", x.Refusal, x.Body)
				case trusted:
				case c.status != 0 && (x.Refusal == nil || x.Refusal.Status != c.status):
					t.Errorf("refusal %+v, want status %d", x.Refusal, c.status)
				case c.status == 0 && (x.Refusal != nil || string(x.Body) != cleaned || x.Header["content-length"] != fmt.Sprint(len(cleaned))):
					t.Errorf("refusal %+v, the worker gets %s, length %s", x.Refusal, x.Body, x.Header["content-length"])
				}
				want := int64(1)
				if trusted {
					want = 0
				}
				if n := h.count(t, "kvroute.extproc.steering"); n != want {
					t.Errorf("%d requests counted, want %d", n, want)
				}
			})
		}
	}
}

// A body that fails open keeps no steering fields, and neither does one whose client is slower than the decision.
func TestFailingOpenPassesNoSteeringFields(t *testing.T) {
	h := newHarness(t, extproc.Config{})
	h.router.will(nil)
	x := h.Do(chat(strings.Replace(steers, `"model":"m","messages":[1],`, `"prompt":[1],`, 1)))
	if x.Refusal == nil && strings.Contains(string(x.Body), "kv_transfer_params") {
		t.Errorf("the pool gets %s", x.Body)
	}
	x.End()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{DecisionTimeout: time.Second})
		x := h.Begin(streamed(true))
		x.SendHeaders()
		x.Send(part(steers[:20], false))
		for range 2 {
			if !x.Settle() {
				t.Fatal("the beginning was not answered")
			}
		}
		x.Send(part(steers[20:], true))
		x.Settle()
		var e struct {
			Error struct{ Code, Param string }
		}
		if x.Refusal == nil || json.Unmarshal([]byte(x.Refusal.Body), &e) != nil || e.Error.Code != "steering_field" || e.Error.Param != "kv_transfer_params" {
			t.Errorf("the refusal is %+v", x.Refusal)
		}
		x.End()
	})
}

// A request without room for its body is refused where kvroute could not check the body later.
func TestNoRoomPassesNoSteeringFields(t *testing.T) {
	for name, r := range map[string]envoytest.Request{
		"buffered": {}, "full duplex": {Mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, Chunk: 40}, "streamed": {Mode: filterv3.ProcessingMode_STREAMED, Chunk: 40},
	} {
		h := newHarness(t, extproc.Config{MaxHeldBytes: int64(len(steers) / 2)})
		r.Path, r.Body = "/v1/chat/completions", []byte(steers)
		if x := h.Do(r); x.Refusal == nil {
			t.Errorf("%s: the worker gets the body", name)
		}
	}
}

// Two tenants in one request are an error, the same one twice is not.
func TestTwoTenants(t *testing.T) {
	for second, status := range map[string]int{"a": 0, "b": 400, "": 400} {
		h := newUnserved(t, extproc.Config{})
		h.router.will(nil)
		answers := process(t, h.server, begin(false, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_NONE, false,
			":method", "POST", ":path", "/v1/chat/completions", "x-tenant-id", "a", "x-tenant-id", second))
		if got := int(answers[0].GetImmediateResponse().GetStatus().GetCode()); got != status {
			t.Errorf("tenants a and %q: status %d, want %d", second, got, status)
		}
	}
}
