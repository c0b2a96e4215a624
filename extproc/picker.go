// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"net/netip"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/router"
)

// The endpoint-picker protocol of the Gateway API Inference Extension, proposal 004. A gateway
// that speaks it never chooses an endpoint itself. Config.EndpointPicker adds the protocol's header
// and metadata to kvroute's own headers.
const (
	// destinationKey is the name of a header, and of an entry of the dynamic metadata in the
	// namespace. Both list the endpoints in the order in which the gateway tries them.
	destinationKey       = "x-gateway-destination-endpoint"
	destinationNamespace = "envoy.lb"
	// servedKey is the entry in which the gateway names the endpoint that served.
	servedKey = "x-gateway-destination-endpoint-served"

	// Hooks of the extension's conformance tests. The request's header lists the allowed
	// endpoints. The response's headers name the chosen endpoint and the one that served.
	headerTestSelection = "test-epp-endpoint-selection"
	headerTestPicked    = "x-conformance-test-selected-endpoint"
	headerTestServed    = "x-conformance-test-served-endpoint"
)

// The dynamic metadata in which an earlier filter of Envoy may list the allowed endpoints.
const (
	subsetNamespace = "envoy.lb.subset_hint"
	subsetKey       = destinationKey + "-subset"
)

// subset reads the endpoints that an earlier filter allows: a list, or text with commas, of ip or
// ip:port. It returns nil without such a list. An entry that is no address allows nothing.
func subset(earlier *corev3.Metadata) []netip.AddrPort {
	v := earlier.GetFilterMetadata()[subsetNamespace].GetFields()[subsetKey]
	var items []string
	switch k := v.GetKind().(type) {
	case *structpb.Value_StringValue:
		items = strings.Split(k.StringValue, ",")
	case *structpb.Value_ListValue:
		for _, e := range k.ListValue.GetValues() {
			items = append(items, e.GetStringValue())
		}
	default:
		return nil
	}
	return endpointList(items)
}

// endpoints returns the choices in the protocol's form.
func (c *Config) endpoints(d *router.Decision) string {
	list := d.Address.String()
	if second := c.second(d); second.IsValid() {
		list += "," + second.String()
	}
	return list
}

// endpointMetadata is the protocol's dynamic metadata of an answer that routes.
func (c *Config) endpointMetadata(d *router.Decision) *structpb.Struct {
	return &structpb.Struct{Fields: map[string]*structpb.Value{
		destinationNamespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
			destinationKey: structpb.NewStringValue(c.endpoints(d)),
		}}),
	}}
}

// servedBy returns the endpoint that served, as a gateway reports it; invalid without a report.
func servedBy(req *extprocv3.ProcessingRequest) netip.AddrPort {
	f := req.GetMetadataContext().GetFilterMetadata()[destinationNamespace].GetFields()
	return address(f[servedKey])
}

// testHeaders are the response's headers that a conformance test checks.
func testHeaders(d *router.Decision, req *extprocv3.ProcessingRequest) []string {
	served := "fail: missing destination endpoint served metadata"
	if a := servedBy(req); a.IsValid() {
		served = a.String()
	}
	return []string{headerTestPicked, d.Address.String(), headerTestServed, served}
}

// endpointList reads items of the form ip or ip:port. It drops an item that is no address, which
// therefore allows nothing.
func endpointList(items []string) []netip.AddrPort {
	list := make([]netip.AddrPort, 0, len(items))
	for _, item := range items {
		item = strings.TrimSpace(item)
		if a, err := netip.ParseAddrPort(item); err == nil {
			list = append(list, netip.AddrPortFrom(a.Addr().Unmap(), a.Port()))
		} else if a, err := netip.ParseAddr(item); err == nil {
			list = append(list, netip.AddrPortFrom(a.Unmap(), 0))
		}
	}
	return list
}
