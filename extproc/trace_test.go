// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/metadata"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
)

const (
	parentOfClient = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	parentOfEnvoy  = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
)

// traced is the outcome of a request with a trace context.
type traced struct {
	arrival router.Arrival
	leg     http.Header // of the prefill request
}

// sendTraced sends a request of a split model. meta is the metadata of the stream, headers are those of the
// request; each has names and values in turn.
func sendTraced(t *testing.T, meta []string, headers ...string) (got traced) {
	t.Helper()
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got.leg = r.Header
		w.Write([]byte(`{"kv_transfer_params":{"a":1}}`))
	}))
	defer worker.Close()
	client := &http.Client{Transport: new(http.Transport)}
	defer client.CloseIdleConnections()
	h := newUnserved(t, extproc.Config{Client: client})
	h.router.will(func(context.Context, router.Request) (router.Decision, error) {
		h.router.mu.Lock()
		defer h.router.mu.Unlock()
		h.router.slots["1/prefill"] = true
		d := chosen
		d.Prefill = &router.Decision{ID: "1/prefill", Engine: "vllm", Address: netip.MustParseAddrPort(worker.Listener.Addr().String())}
		return d, nil
	})
	ctx, end := context.WithCancel(metadata.NewIncomingContext(t.Context(), metadata.Pairs(meta...)))
	defer end()
	pairs := append([]string{":method", "POST", ":path", "/v1/chat/completions"}, headers...)
	if err := h.server.Process(&played{ctx: ctx, messages: []*extprocv3.ProcessingRequest{
		begin(false, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_NONE, false, pairs...), part(hello, true),
	}}); err != nil {
		t.Error(err)
	}
	if strings.Contains(h.log.String(), "panic") {
		t.Errorf("a handler panicked: %s", h.log)
	}
	h.router.mu.Lock()
	defer h.router.mu.Unlock()
	got.arrival = h.router.asked[0].Arrival
	return got
}

func TestTraceContext(t *testing.T) {
	long := strings.Repeat("a=b,", 200)
	for name, c := range map[string]struct {
		meta, headers []string
		parent, state string
		leg           string // traceparent of the prefill request
	}{
		"none":                {},
		"the client's":        {headers: []string{"traceparent", parentOfClient, "tracestate", "a=b"}, parent: parentOfClient, state: "a=b", leg: parentOfClient},
		"Envoy's":             {meta: []string{"traceparent", parentOfEnvoy, "tracestate", "c=d"}, headers: []string{"traceparent", parentOfClient, "tracestate", "a=b"}, parent: parentOfEnvoy, state: "c=d", leg: parentOfEnvoy},
		"Envoy's, no state":   {meta: []string{"traceparent", parentOfEnvoy}, headers: []string{"tracestate", "a=b"}, parent: parentOfEnvoy, leg: parentOfEnvoy},
		"two states":          {headers: []string{"traceparent", parentOfClient, "tracestate", "a=b", "tracestate", "c=d"}, parent: parentOfClient, state: "a=b,c=d", leg: parentOfClient},
		"two parents":         {headers: []string{"traceparent", parentOfClient, "traceparent", parentOfClient}, parent: parentOfClient + "," + parentOfClient},
		"a long state":        {headers: []string{"traceparent", parentOfClient, "tracestate", long}, parent: parentOfClient, leg: parentOfClient},
		"a long parent":       {headers: []string{"traceparent", strings.Repeat("0", 60_000)}, parent: strings.Repeat("0", 128)},
		"a parent of zeros":   {headers: []string{"traceparent", "00-00000000000000000000000000000000-0000000000000000-01"}, parent: "00-00000000000000000000000000000000-0000000000000000-01"},
		"a parent of bytes":   {headers: []string{"traceparent", "\x00\r\nx: y\xff"}, parent: "\x00\r\nx: y\xff"},
		"a broken state":      {headers: []string{"traceparent", parentOfClient, "tracestate", "\x00\r\n"}, parent: parentOfClient, state: "\x00\r\n", leg: parentOfClient},
		"a later version":     {headers: []string{"traceparent", "01" + parentOfClient[2:] + "-more"}, parent: "01" + parentOfClient[2:] + "-more", leg: parentOfClient},
		"version 00 and more": {headers: []string{"traceparent", parentOfClient + "-more"}, parent: parentOfClient + "-more"},
	} {
		t.Run(name, func(t *testing.T) {
			got := sendTraced(t, c.meta, c.headers...)
			if got.arrival.TraceParent != c.parent || got.arrival.TraceState != c.state {
				t.Errorf("context %q, %q, want %q, %q", got.arrival.TraceParent, got.arrival.TraceState, c.parent, c.state)
			}
			if got.leg == nil || got.leg.Get("Traceparent") != c.leg {
				t.Errorf("the prefill request has %v, want the parent %q", got.leg, c.leg)
			}
		})
	}
}

// No trace context of a client keeps the prefill request from its worker, or adds a broken header to it.
func FuzzTraceContext(f *testing.F) {
	f.Add(parentOfClient, "a=b")
	f.Add("01"+parentOfClient[2:]+"-x", strings.Repeat("a=b,", 40))
	f.Add("\xff\x00\n", "\r\n=")
	form := regexp.MustCompile(`^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)
	f.Fuzz(func(t *testing.T, parent, state string) {
		got := sendTraced(t, nil, "traceparent", parent, "tracestate", state)
		if got.leg == nil {
			t.Fatal("the prefill request did not arrive")
		}
		if p := got.leg.Get("Traceparent"); p != "" && !form.MatchString(p) || len(got.leg.Get("Tracestate")) > 512 {
			t.Errorf("the prefill request has %v", got.leg)
		}
	})
}
