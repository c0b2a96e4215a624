// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"net/netip"
	"slices"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
)

// A filter before us may say which endpoints a request may go to.
func TestSubsetOfEndpoints(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.0.0.1:8000"), netip.MustParseAddrPort("10.0.0.2:0")
	for name, c := range map[string]struct {
		value any
		want  []netip.AddrPort // nil: all
	}{
		"none":         {nil, nil},
		"text":         {"10.0.0.1:8000, 10.0.0.2", []netip.AddrPort{a, b}},
		"list":         {[]any{"10.0.0.1:8000", "::ffff:10.0.0.2"}, []netip.AddrPort{a, b}},
		"no addresses": {"here,there", []netip.AddrPort{}},
		"number":       {5., nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, extproc.Config{})
			x := h.Begin(envoytest.Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"x"}`)})
			m := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
				Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":method", Value: "POST"}, {Key: ":path", Value: "/v1/completions"}}},
			}}}
			if c.value != nil {
				fields, err := structpb.NewStruct(map[string]any{"x-gateway-destination-endpoint-subset": c.value})
				if err != nil {
					t.Fatal(err)
				}
				m.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.lb.subset_hint": fields}}
			}
			x.Send(m)
			x.Settle()
			x.SendBody()
			x.Settle()
			x.End()
			h.router.mu.Lock()
			defer h.router.mu.Unlock()
			if got := h.router.asked[0].AllowedAddresses; !slices.Equal(got, c.want) || (got == nil) != (c.want == nil) {
				t.Errorf("allowed %v, want %v", got, c.want)
			}
		})
	}
}
