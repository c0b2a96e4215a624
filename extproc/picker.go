// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"net/netip"
	"strconv"
	"strings"

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

// endpoints returns the choices in the protocol's form.
func (s *stream) endpoints() string {
	list := s.decision.Address.String()
	if second := s.second(); second.IsValid() {
		list += "," + second.String()
	}
	return list
}

// withMetadata adds the protocol's metadata to an answer that routes.
func (s *stream) withMetadata(a *extprocv3.ProcessingResponse) *extprocv3.ProcessingResponse {
	if !s.server.conf.EndpointPicker {
		return a
	}
	a.DynamicMetadata = &structpb.Struct{Fields: map[string]*structpb.Value{
		destinationNamespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
			destinationKey: structpb.NewStringValue(s.endpoints()),
		}}),
	}}
	return a
}

// servedBy returns the endpoint that served, as a gateway reports it; invalid without a report.
func servedBy(req *extprocv3.ProcessingRequest) netip.AddrPort {
	f := req.GetMetadataContext().GetFilterMetadata()[destinationNamespace].GetFields()
	return address(f[servedKey])
}

// testHeaders are the response's headers that a conformance test checks.
func (s *stream) testHeaders(req *extprocv3.ProcessingRequest) []string {
	served := "fail: missing destination endpoint served metadata"
	if a := servedBy(req); a.IsValid() {
		served = a.String()
	}
	return []string{headerTestPicked, s.decision.Address.String(), headerTestServed, served}
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

// second returns the second choice if it may serve.
func (s *stream) second() (a netip.AddrPort) {
	if a = s.decision.Second.Address; !a.IsValid() || !s.server.conf.mayServe(a) {
		return netip.AddrPort{}
	}
	return a
}

// named returns the headers that name the rank or the instance to the worker, or the group and its
// worker to the router of a group, as name, value, name, value.
func (s *stream) named() []string {
	d := &s.decision
	if d.Group != "" {
		headers := []string{headerGroup, d.Group}
		if m := d.Member; m != nil {
			headers = append(headers, headerPin, strconv.FormatUint(m.ID, 10), headerRank, strconv.FormatUint(uint64(m.DPRank), 10))
		}
		return headers
	}
	rank := strconv.FormatUint(uint64(d.Worker.DPRank), 10)
	switch {
	case d.NameRank: // otherwise the server chooses a rank by itself
		return []string{headerVLLMRank, rank}
	case d.Engine == router.EngineDynamo: // a frontend that forwards to the named instance
		mode := router.SplitNever
		if d.Prefill != nil {
			mode = router.SplitAlways
		}
		return []string{headerPin, strconv.FormatUint(d.Worker.ID, 10), headerRank, rank, headerRoutingMode, string(mode)}
	}
	return nil
}
