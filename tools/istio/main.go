// SPDX-License-Identifier: Apache-2.0

// Command istio prints the EnvoyFilter that adds kvroute to a gateway of Istio. It reads the output of
// `kvroute config envoy --parts` from standard input. The argument is the virtual host, such as llm.example.com:80.
// docs/existing-envoy.md explains the patches.
package main

import (
	"fmt"
	"io"
	"os"
	"slices"

	"sigs.k8s.io/yaml"
)

// object is an object of YAML or JSON.
type object = map[string]any

// parts are the pieces of the output.
type parts struct {
	Bootstrap   object   `json:"bootstrap"`
	Manager     object   `json:"http_connection_manager"`
	Filters     []object `json:"http_filters"`
	VirtualHost object   `json:"virtual_host"`
	Clusters    []object `json:"clusters"`
}

const (
	manager = "envoy.filters.network.http_connection_manager"
	router  = "envoy.filters.http.router"
)

// on turns a filter on for a route: so does each configuration of the filter's own for the route. Istio does not accept the
// empty field "config" of Envoy's FilterConfig.
//
//nolint:gochecknoglobals // a constant
var on = object{
	"@type":     "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
	"overrides": object{},
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: istio VIRTUAL_HOST < parts.yaml")
		os.Exit(2)
	}
	text, err := io.ReadAll(os.Stdin)
	if err == nil {
		text, err = filter(text, os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "istio:", err)
		os.Exit(1)
	}
	_, _ = os.Stdout.Write(text)
}

// filter returns the EnvoyFilter.
func filter(text []byte, host string) ([]byte, error) {
	var p parts
	if err := yaml.UnmarshalStrict(text, &p); err != nil {
		return nil, err
	}
	// Istio's bootstrap has an admin layer of its own. A second one is an error.
	if runtime, ok := p.Bootstrap["layered_runtime"].(object); ok {
		layers, _ := runtime["layers"].([]any)
		runtime["layers"] = slices.DeleteFunc(layers, func(l any) bool { return l.(object)["admin_layer"] != nil })
	}
	var patches []object
	patch := func(applyTo, operation string, match, value object) {
		change := object{"operation": operation, "value": value}
		patches = append(patches, object{"applyTo": applyTo, "match": match, "patch": change})
	}
	listener := func(subFilter string) object {
		filter := object{"name": manager}
		if subFilter != "" {
			filter["subFilter"] = object{"name": subFilter}
		}
		return object{"context": "GATEWAY", "listener": object{"filterChain": object{"filter": filter}}}
	}
	vhost := object{"context": "GATEWAY", "routeConfiguration": object{"vhost": object{"name": host}}}

	patch("BOOTSTRAP", "MERGE", object{"context": "GATEWAY"}, p.Bootstrap)
	for _, c := range p.Clusters {
		patch("CLUSTER", "ADD", object{"context": "GATEWAY"}, c)
	}
	p.Manager["@type"] = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
	patch("NETWORK_FILTER", "MERGE", listener(""), object{"name": manager, "typed_config": p.Manager})
	for _, f := range p.Filters {
		if f["name"] == router {
			patch("HTTP_FILTER", "MERGE", listener(router), f)
		} else {
			patch("HTTP_FILTER", "INSERT_BEFORE", listener(router), f)
		}
	}
	routes, _ := p.VirtualHost["routes"].([]any)
	delete(p.VirtualHost, "routes")
	patch("VIRTUAL_HOST", "MERGE", vhost, p.VirtualHost)
	for _, r := range slices.Backward(routes) { // each goes before all others
		if perFilter, ok := r.(object)["typed_per_filter_config"].(object); ok {
			for name := range perFilter {
				perFilter[name] = on
			}
		}
		patch("HTTP_ROUTE", "INSERT_FIRST", vhost, r.(object))
	}
	return yaml.Marshal(object{
		"apiVersion": "networking.istio.io/v1alpha3", "kind": "EnvoyFilter",
		"metadata": object{"name": "kvroute", "namespace": "istio-system"},
		"spec": object{
			"priority":         10, // after other filters
			"workloadSelector": object{"labels": object{"istio": "ingressgateway"}},
			"configPatches":    patches,
		},
	})
}
