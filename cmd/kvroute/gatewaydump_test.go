// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"

	adminv3 "github.com/envoyproxy/go-control-plane/envoy/admin/v3"
	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/file/v3"              // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/filters/cel/v3"       // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/grpc/v3"              // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/clusters/composite/v3"               // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"            // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"     // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/health_check/v3"        // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"              // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/connection_limit/v3" // in dumps
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3" // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/least_request/v3"      // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/override_host/v3"      // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/retry/host/previous_hosts/v3"                  // in dumps
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"                             // in dumps
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
)

// configDump is the configuration that a control plane would send to an Envoy, read from
// its configuration dump.
type configDump struct {
	Listeners []*listenerv3.Listener
	Routes    map[string]*routev3.RouteConfiguration
	Clusters  []*clusterv3.Cluster
	Endpoints map[string]*endpointv3.ClusterLoadAssignment
}

// parseDump reads an envoy.admin.v3.ConfigDump in JSON.
func parseDump(text []byte) (*configDump, error) {
	var all adminv3.ConfigDump
	if err := protojson.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	d := &configDump{Routes: map[string]*routev3.RouteConfiguration{}, Endpoints: map[string]*endpointv3.ClusterLoadAssignment{}}
	for _, packed := range all.GetConfigs() {
		part, err := packed.UnmarshalNew()
		if err != nil {
			return nil, err
		}
		switch p := part.(type) {
		case *adminv3.ListenersConfigDump:
			for _, l := range p.GetDynamicListeners() {
				listener := &listenerv3.Listener{}
				if err := l.GetActiveState().GetListener().UnmarshalTo(listener); err != nil {
					return nil, err
				}
				d.Listeners = append(d.Listeners, listener)
			}
		case *adminv3.RoutesConfigDump:
			for _, r := range p.GetDynamicRouteConfigs() {
				route := &routev3.RouteConfiguration{}
				if err := r.GetRouteConfig().UnmarshalTo(route); err != nil {
					return nil, err
				}
				d.Routes[route.GetName()] = route
			}
		case *adminv3.ClustersConfigDump:
			for _, c := range p.GetDynamicActiveClusters() {
				cluster := &clusterv3.Cluster{}
				if err := c.GetCluster().UnmarshalTo(cluster); err != nil {
					return nil, err
				}
				d.Clusters = append(d.Clusters, cluster)
			}
		case *adminv3.EndpointsConfigDump:
			for _, e := range p.GetDynamicEndpointConfigs() {
				load := &endpointv3.ClusterLoadAssignment{}
				if err := e.GetEndpointConfig().UnmarshalTo(load); err != nil {
					return nil, err
				}
				d.Endpoints[load.GetClusterName()] = load
			}
		}
	}
	return d, nil
}

// bootstrap returns a configuration, in JSON, for an Envoy without a control plane that
// has all of the dump: listeners at ports of Envoy's choice on loopback, endpoints at
// the addresses in moved, which maps ip:port to ip:port.
func (d *configDump) bootstrap(moved map[string]string) ([]byte, error) {
	static := &bootstrapv3.Bootstrap_StaticResources{}
	for _, l := range d.Listeners {
		l = proto.CloneOf(l)
		l.Address = envoyAddress(netip.MustParseAddrPort("127.0.0.1:0"))
		for _, chain := range append(l.GetFilterChains(), l.GetDefaultFilterChain()) {
			for _, f := range chain.GetFilters() {
				if err := d.inline(f); err != nil {
					return nil, err
				}
			}
		}
		static.Listeners = append(static.Listeners, l)
	}
	for _, c := range d.Clusters {
		c = proto.CloneOf(c)
		if c.GetType() == clusterv3.Cluster_EDS {
			load := proto.CloneOf(d.Endpoints[c.GetName()])
			if load == nil {
				return nil, fmt.Errorf("the cluster %s has no endpoints in the dump", c.GetName())
			}
			c.ClusterDiscoveryType, c.EdsClusterConfig = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC}, nil
			c.LoadAssignment = load
		}
		for _, group := range c.GetLoadAssignment().GetEndpoints() {
			for _, e := range group.GetLbEndpoints() {
				at := e.GetEndpoint().GetAddress().GetSocketAddress()
				if to, ok := moved[fmt.Sprintf("%s:%d", at.GetAddress(), at.GetPortValue())]; ok {
					e.GetEndpoint().Address = envoyAddress(netip.MustParseAddrPort(to))
				}
			}
		}
		static.Clusters = append(static.Clusters, c)
	}
	// As in Envoy Gateway's own bootstrap.
	runtime, err := structpb.NewStruct(map[string]any{"re2.max_program_size.error_level": 4294967295})
	if err != nil {
		return nil, err
	}
	return protojson.Marshal(&bootstrapv3.Bootstrap{
		LayeredRuntime: &bootstrapv3.LayeredRuntime{Layers: []*bootstrapv3.RuntimeLayer{{
			Name: "static", LayerSpecifier: &bootstrapv3.RuntimeLayer_StaticLayer{StaticLayer: runtime},
		}}},
		Admin:           &bootstrapv3.Admin{Address: envoyAddress(netip.MustParseAddrPort("127.0.0.1:0"))},
		StaticResources: static,
	})
}

// inline puts the routes into a connection manager that would otherwise request them.
func (d *configDump) inline(f *listenerv3.Filter) error {
	m := &hcmv3.HttpConnectionManager{}
	if !f.GetTypedConfig().MessageIs(m) {
		return nil
	}
	if err := f.GetTypedConfig().UnmarshalTo(m); err != nil {
		return err
	}
	if name := m.GetRds().GetRouteConfigName(); name != "" {
		route := d.Routes[name]
		if route == nil {
			return fmt.Errorf("the dump has no routes %s", name)
		}
		m.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: route}
	}
	packed, err := anypb.New(m)
	if err != nil {
		return err
	}
	f.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: packed}
	return nil
}

func envoyAddress(a netip.AddrPort) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address: a.Addr().String(), PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(a.Port())},
	}}}
}
