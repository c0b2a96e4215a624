// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

func zipped(parts ...string) []byte {
	var b bytes.Buffer
	for _, p := range parts {
		w := gzip.NewWriter(&b)
		_, _ = w.Write([]byte(p)) // buffers take everything
		_ = w.Close()
	}
	return b.Bytes()
}

// Bodies that clients compress are read where they can be, and go on as they are.
func TestCompressedBodies(t *testing.T) {
	const limit = 64 << 10
	whole := zipped(hello)
	wrongSum := bytes.Clone(whole)
	wrongSum[len(wrongSum)-5] ^= 1
	large := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", limit-len(`{"model":"m","messages":[{"role":"user","content":""}]}`)) + `"}]}`
	for _, c := range []struct {
		name     string
		encoding []string // values of the header
		body     []byte
		status   int    // of a refusal
		read     bool   // else it is routed by load
		counted  string // encoding and outcome
	}{
		{"gzip", []string{"gzip"}, whole, 0, true, "gzip read"},
		{"its older name", []string{"X-GZip"}, whole, 0, true, "gzip read"},
		{"with identity", []string{"identity, gzip"}, whole, 0, true, "gzip read"},
		{"in two members", []string{"gzip"}, zipped(hello[:20], hello[20:]), 0, true, "gzip read"},
		{"identity", []string{"identity"}, []byte(hello), 0, true, ""},
		{"nothing said", []string{""}, []byte(hello), 0, true, ""},
		{"no JSON in it", []string{"gzip"}, zipped("hello"), 400, false, "gzip read"},
		{"nothing in it", []string{"gzip"}, zipped(""), 400, false, "gzip read"},
		{"as large as may be", []string{"gzip"}, zipped(large), 0, true, "gzip read"},
		{"larger by a byte", []string{"gzip"}, zipped(large + " "), 413, false, "gzip too_large"},
		{"a bomb", []string{"gzip"}, zipped(strings.Repeat("\x00", 64<<20)), 413, false, "gzip too_large"},
		{"not gzip at all", []string{"gzip"}, []byte(hello), 0, false, "gzip broken"},
		{"half a header", []string{"gzip"}, whole[:5], 0, false, "gzip broken"},
		{"half of it", []string{"gzip"}, whole[:len(whole)/2], 0, false, "gzip broken"},
		{"without its end", []string{"gzip"}, whole[:len(whole)-1], 0, false, "gzip broken"},
		{"with a wrong sum", []string{"gzip"}, wrongSum, 0, false, "gzip broken"},
		{"with something behind it", []string{"gzip"}, append(bytes.Clone(whole), "more"...), 0, false, "gzip broken"},
		{"deflate", []string{"deflate"}, []byte("x"), 0, false, "deflate unread"},
		{"br", []string{"br"}, []byte("x"), 0, false, "br unread"},
		{"zstd", []string{"zstd"}, []byte("x"), 0, false, "zstd unread"},
		{"compress", []string{"compress"}, []byte("x"), 0, false, "other unread"},
		{"twice", []string{"gzip, gzip"}, zipped(string(whole)), 0, false, "other unread"},
		{"text that says so", []string{"gzip;q=1"}, whole, 0, false, "other unread"},
	} {
		for _, mode := range []envoytest.Request{
			{}, {Mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, Chunk: 1 << 10}, {Mode: filterv3.ProcessingMode_STREAMED, Ahead: true, Chunk: 1 << 10},
		} {
			t.Run(fmt.Sprint(c.name, mode.Mode), func(t *testing.T) {
				h := newHarness(t, extproc.Config{MaxBodyBytes: limit})
				r := mode
				r.Path, r.Body = "/v1/chat/completions", c.body
				for _, v := range c.encoding {
					r.Header = append(r.Header, "content-encoding", v)
				}
				x := h.Do(r)
				defer x.End()
				switch {
				case c.status != 0:
					if x.Refusal == nil || x.Refusal.Status != c.status {
						t.Errorf("refusal %+v, want status %d", x.Refusal, c.status)
					}
				case x.Refusal != nil || x.Header["x-dynamo-worker"] != chosen.Address.String():
					t.Errorf("refusal %+v, header %v", x.Refusal, x.Header)
				default:
					if req := h.router.asked[0]; req.Unread == c.read || (req.Model == "m") != c.read || (req.Prompt.Messages != nil) != c.read {
						t.Errorf("asked for %q, unread: %v, want it read: %v", req.Model, req.Unread, c.read)
					}
				}
				if mode.Mode != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED && x.Body != nil || x.Refusal == nil && x.Body != nil && !bytes.Equal(x.Body, c.body) {
					t.Errorf("the worker gets another body: %q", x.Body)
				}
				if n := h.count(t, "kvroute.extproc.encodings"); n != int64(min(1, len(c.counted))) {
					t.Errorf("%d compressed bodies counted", n)
				}
				if c.counted != "" {
					if n := h.count(t, "kvroute.extproc.encodings", strings.Fields(c.counted)...); n != 1 {
						t.Errorf("%q counted %d times", c.counted, n)
					}
				}
			})
		}
	}
}

// With several models, what cannot be read is the pool's, with a reason.
func TestUnreadableBodiesOfSeveralModels(t *testing.T) {
	h := newHarness(t, extproc.Config{})
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

// The complete fields of a compressed body that Envoy truncates are read.
func TestCompressedBodiesThatAreCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		var text strings.Builder
		for i := range 20_000 {
			fmt.Fprintf(&text, "%d ", i*i)
		}
		body := zipped(fmt.Sprintf(`{"model":"m","stream":true,"messages":[{"role":"user","content":%q}]}`, text.String()))
		x := h.Do(envoytest.Request{
			Path: "/v1/chat/completions", Body: body[:len(body)/2], Header: []string{"content-encoding", "gzip"},
			Mode: filterv3.ProcessingMode_BUFFERED_PARTIAL, Trailers: true,
		})
		if x.Refusal != nil || x.Header["x-dynamo-worker"] == "" {
			t.Errorf("refusal %+v, header %v", x.Refusal, x.Header)
		}
		if req := h.router.asked[0]; req.Model != "m" || req.Prompt.Inexact != openai.Truncated || req.Unread || req.Unseen {
			t.Errorf("asked for %q, %+v, unread: %v", req.Model, req.Prompt, req.Unread)
		}
		x.End()
	})
}

// Many bodies at a time, whole and broken, share their memory and nothing else.
func TestCompressedBodiesAtATime(t *testing.T) {
	h := newHarness(t, extproc.Config{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 20 {
				model := fmt.Sprintf("m%d-%d", i, j)
				body := zipped(fmt.Sprintf(`{"model":%q,"prompt":%q}`, model, strings.Repeat(model, 1000)))
				if j%3 == 0 {
					body = body[:len(body)-3]
				}
				x := h.Do(envoytest.Request{Path: "/v1/completions", Body: body, Header: []string{"content-encoding", "gzip"}})
				if x.Refusal != nil {
					t.Errorf("%s: refusal %+v", model, x.Refusal)
				}
				x.End()
			}
		})
	}
	wg.Wait()
	seen := map[string]int{}
	for _, req := range h.router.asked {
		seen[req.Model]++
		if want := `"` + strings.Repeat(req.Model, 1000) + `"`; req.Model != "" && string(req.Prompt.Prompt) != want {
			t.Errorf("%s: prompt %.40s", req.Model, req.Prompt.Prompt)
		}
	}
	if seen[""] != 8*7 || len(seen) != 8*13+1 {
		t.Errorf("%d were not read, want 56; %d were, want 104", seen[""], len(seen)-1)
	}
}

// Small bodies that become large ones take a bounded room together, for as long as they
// are looked at: one for which there is none is routed unread.
func TestInflatedBodiesTakeABoundedRoom(t *testing.T) {
	const limit = 64 << 10
	body := zipped(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", limit/2) + `"}]}`)
	bomb := zipped(strings.Repeat("x", 2*limit))
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{MaxBodyBytes: limit, MaxHeldBytes: 2*limit + 2 + 3*int64(len(body))})
		now := make(chan struct{})
		h.router.will(until(now))
		request := envoytest.Request{Path: "/v1/chat/completions", Header: []string{"content-encoding", "gzip"}, Body: body}
		var all []*envoytest.Exchange
		for range 3 {
			x := h.Begin(request)
			x.SendHeaders()
			x.Settle()
			x.SendBody()
			synctest.Wait()
			all = append(all, x)
		}
		if n := h.server.Held(); n < limit || n > 2*limit+2+3*int64(len(body)) {
			t.Errorf("two inflated bodies take %d bytes", n)
		}
		close(now)
		for i, x := range all {
			x.Settle()
			if x.Header["x-dynamo-worker"] == "" || h.router.asked[i].Unread != (i == 2) {
				t.Errorf("request %d: header %v, unread %v", i, x.Header, h.router.asked[i].Unread)
			}
			x.End()
		}
		request.Body = bomb
		if x := h.Do(request); x.Refusal == nil || x.Refusal.Status != 413 {
			t.Errorf("a bomb: %+v", x.Refusal)
		}
		request.Body = zipped(hello)[:20]
		h.Do(request).End()
		if n := h.server.Held(); n != 0 {
			t.Errorf("%d bytes are taken when all is over", n)
		}
		if n := h.count(t, "kvroute.extproc.encodings", "gzip", "crowded"); n != 1 {
			t.Errorf("%d bodies found no room, want 1", n)
		}
	})
}
