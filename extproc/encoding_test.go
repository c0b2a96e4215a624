// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// On a trusted listener compressed bodies are routed by load, and stay as they are.
func TestCompressedBodies(t *testing.T) {
	for _, c := range []struct {
		encoding string // the header's value
		read     bool
	}{{"gzip", false}, {"identity, gzip", false}, {"br", false}, {"zstd", false}, {"gzip, gzip", false}, {"Identity", true}, {"", true}} {
		for _, mode := range []envoytest.Request{
			{}, {Mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, Chunk: 1 << 10}, {Mode: filterv3.ProcessingMode_STREAMED, Ahead: true, Chunk: 1 << 10},
		} {
			t.Run(fmt.Sprint(c.encoding, mode.Mode), func(t *testing.T) {
				h := newHarness(t, extproc.Config{TrustOverrides: true, AllowDirect: true})
				r := mode
				r.Path, r.Body, r.Header = "/v1/chat/completions", []byte(hello), []string{"content-encoding", c.encoding}
				x := h.Do(r)
				defer x.End()
				if x.Refusal != nil || x.Header["x-dynamo-worker"] != chosen.Address.String() {
					t.Fatalf("refusal %+v, header %v", x.Refusal, x.Header)
				}
				if req := h.router.asked[0]; req.Unread == c.read || (req.Model == "m") != c.read || (req.Prompt.Messages != nil) != c.read {
					t.Errorf("asked for %q, unread: %v, want it read: %v", req.Model, req.Unread, c.read)
				}
				if mode.Mode != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED && x.Body != nil || x.Body != nil && !bytes.Equal(x.Body, r.Body) {
					t.Errorf("the worker gets another body: %q", x.Body)
				}
				if n := h.count(t, "kvroute.extproc.compressed"); (n == 0) != c.read {
					t.Errorf("%d compressed bodies counted", n)
				}
			})
		}
	}
}

// With several models, what cannot be read is the pool's, with a reason.
func TestUnreadableBodiesOfSeveralModels(t *testing.T) {
	h := newHarness(t, extproc.Config{TrustOverrides: true, AllowDirect: true})
	h.router.will(func(context.Context, router.Request) (router.Decision, error) {
		return router.Decision{}, fmt.Errorf("router: %w", router.ErrUnknownModel)
	})
	x := h.Do(envoytest.Request{Path: "/v1/chat/completions", Body: []byte("x"), Header: []string{"content-encoding", "br"}})
	if x.Refusal != nil || x.Header["x-dynamo-worker"] != "" {
		t.Errorf("refusal %+v, header %v", x.Refusal, x.Header)
	}
	x.End()
	if n := h.count(t, "kvroute.extproc.fail_open", "unreadable_encoding"); n != 1 {
		t.Errorf("%d failed open for that, want 1", n)
	}
}
