// SPDX-License-Identifier: Apache-2.0

package envoy

import (
	"encoding/json"
	"net/netip"
)

// Endpoints returns the file of [Config.PoolFile] for a pool: a discovery response in JSON with one
// cluster of the name "pool". Different endpoints need a different version. An empty pool serves no
// requests. The endpoints of others get no requests as part of the pool. With [List], Envoy sends them the requests
// whose header names them.
func Endpoints(version string, pool, others []netip.AddrPort) []byte {
	type socket struct {
		Address string `json:"address"`
		Port    uint16 `json:"port_value"`
	}
	type object = map[string]any
	endpoints := make([]object, 0, len(pool)+len(others))
	endpoint := func(a netip.AddrPort) object {
		return object{"address": object{"socket_address": socket{a.Addr().String(), a.Port()}}}
	}
	for _, a := range pool {
		endpoints = append(endpoints, object{"endpoint": endpoint(a)})
	}
	for _, a := range others {
		endpoints = append(endpoints, object{"endpoint": endpoint(a), "health_status": "UNHEALTHY"})
	}
	text, err := json.MarshalIndent(object{
		"version_info": version,
		"resources": []object{{
			"@type":        "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
			"cluster_name": "pool",
			"endpoints":    []object{{"lb_endpoints": endpoints}},
		}},
	}, "", " ")
	if err != nil {
		panic(err) // these types always have a JSON form
	}
	return append(text, '\n')
}
