// SPDX-License-Identifier: Apache-2.0

package envoytest

// AddParts adds the pieces of `kvroute config envoy --parts` to the configuration of an Envoy with one listener, as
// docs/existing-envoy.md says: the routes before the others of the first virtual host, and kvroute's filters behind the
// others. The router of the pieces replaces the last filter. Both are YAML or JSON as maps.
func AddParts(configuration, parts map[string]any) {
	object := func(v any) map[string]any { return v.(map[string]any) }
	list := func(v any) []any { all, _ := v.([]any); return all }
	add := func(to map[string]any, from any) {
		for name, v := range object(from) {
			if name == "routes" {
				v = append(list(v), list(to[name])...)
			}
			to[name] = v
		}
	}
	add(configuration, parts["bootstrap"])
	static := object(configuration["static_resources"])
	chain := object(list(object(list(static["listeners"])[0])["filter_chains"])[0])
	manager := object(object(list(chain["filters"])[0])["typed_config"])
	add(manager, parts["http_connection_manager"])
	filters := list(manager["http_filters"])
	manager["http_filters"] = append(filters[:len(filters)-1:len(filters)-1], list(parts["http_filters"])...)
	add(object(list(object(manager["route_config"])["virtual_hosts"])[0]), parts["virtual_host"])
	static["clusters"] = append(list(static["clusters"]), list(parts["clusters"])...)
}
