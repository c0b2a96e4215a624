// SPDX-License-Identifier: Apache-2.0

package envoy_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
)

// check returns the findings as lines; notes begin with "note: ".
func check(t *testing.T, dump any) string {
	t.Helper()
	text, err := json.Marshal(dump)
	if err != nil {
		t.Fatal(err)
	}
	found, err := envoy.Check(text)
	if err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	for _, f := range found {
		if f.Note {
			lines.WriteString("note: ")
		}
		lines.WriteString(f.Text + "\n")
	}
	return lines.String()
}

func plain(t *testing.T, text []byte) (v map[string]any) {
	t.Helper()
	if err := yaml.Unmarshal(text, &v); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return v
}

// Each configuration that this project writes has all that kvroute needs.
func TestOwnConfigurationsLackNothing(t *testing.T) {
	for name, c := range configs {
		want := ""
		if c.NoObserver {
			want = "note: the listener with stat_prefix llm has no observer"
		}
		if got := check(t, plain(t, render(t, c))); got != want && (want == "" || !strings.HasPrefix(got, want) || strings.Count(got, "\n") > 1) {
			t.Errorf("%s:\n%s", name, got)
		}
	}
	files, err := filepath.Glob("../examples/envoy-gateway/translated/*.json")
	if err != nil || len(files) < 2 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got := check(t, asEnvoyPrints(plain(t, text))); got != "" {
			t.Errorf("%s:\n%s", file, got)
		}
	}
}

// asEnvoyPrints writes names of fields as Envoy does: a_b for aB.
func asEnvoyPrints(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = asEnvoyPrints(v[i])
		}
	case map[string]any:
		all := map[string]any{}
		for name, one := range v {
			if !strings.ContainsAny(name, "./:@-") {
				name = strings.Map(func(r rune) rune {
					if unicode.IsUpper(r) {
						return -1
					}
					return r
				}, snake(name))
			}
			all[name] = asEnvoyPrints(one)
		}
		return all
	}
	return v
}

func snake(name string) string {
	var s strings.Builder
	for _, r := range name {
		if unicode.IsUpper(r) {
			s.WriteByte('_')
			r = unicode.ToLower(r)
		}
		s.WriteRune(r)
	}
	return s.String()
}

// withParts adds the pieces of --parts to the configuration of testdata/foreign/envoy.yaml, as docs/existing-envoy.md says.
func withParts(t *testing.T, c envoy.Config) map[string]any {
	t.Helper()
	text, err := os.ReadFile("testdata/foreign/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	all := plain(t, text)
	c.Parts = true
	envoytest.AddParts(all, plain(t, render(t, c)))
	return all
}

// The pieces make a configuration that is not from this project complete, and leave its other routes alone.
func TestPartsCompleteAnotherConfiguration(t *testing.T) {
	text, err := os.ReadFile("testdata/foreign/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if got := check(t, plain(t, text)); got != "no listener has kvroute's filter (ext_proc): add http_filters of kvroute config envoy --parts\n" {
		t.Errorf("before: %s", got)
	}
	for name, c := range configs {
		if c.OTLP != "" || c.NoObserver {
			continue
		}
		all := withParts(t, c)
		if got := check(t, all); got != "" {
			t.Errorf("%s:\n%s", name, got)
		}
		b := asBootstrap(t, all)
		if err := b.ValidateAll(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	all := withParts(t, envoy.Config{ExtProc: []string{"127.0.0.1:9002"}, PoolCluster: "vllm"})
	if got := check(t, all); got != "" {
		t.Error(got)
	}
	if text, err := json.Marshal(all); err != nil || strings.Contains(string(text), `"pool"`) {
		t.Errorf("with --pool-cluster there is a cluster pool, %v", err)
	}
}

// Each piece that is left out, or changed, is named.
func TestMissingPiecesAreNamed(t *testing.T) {
	whole := string(render(t, configs["default"]))
	for name, c := range map[string]struct{ was, is, want string }{
		"no filter":         {"ext_proc.v3.ExternalProcessor", "other.v3.Other", "no listener has kvroute's filter"},
		"no cluster":        {"- name: kvroute\n    type", "- name: other\n    type", `asks the cluster "kvroute", which does not exist`},
		"HTTP/1":            {"          http2_protocol_options:\n            connection_keepalive", "          http_protocol_options:\n            keepalive", "does not use HTTP/2"},
		"fails closed":      {"failure_mode_allow: true # if", "failure_mode_allow: false # if", "set failure_mode_allow: true"},
		"no bodies":         {"request_body_mode: BUFFERED", "request_body_mode: NONE", "does not send request bodies"},
		"no headers":        {"request_header_mode: SEND", "request_header_mode: SKIP", "does not send request headers"},
		"no trailers":       {"response_trailer_mode: SEND", "response_trailer_mode: SKIP", "set response_trailer_mode: SEND"},
		"no response":       {"response_header_mode: SEND\n                    response_body_mode: NONE", "response_header_mode: SKIP", "note: the filter \"kvroute\" does not send response headers"},
		"no chunks":         {"response_body_mode: STREAMED", "response_body_mode: NONE", "does not see the first token"},
		"no observer":       {"observability_mode: true", "observability_mode: false", "has no observer"},
		"dropped header":    {"(x-data-parallel-|x-decode", "(x-decode", ""},
		"no header":         {"|x-dp-|x-dynamo-|", "|x-dp-|", "drops the header x-dynamo-worker"},
		"few requests":      {"max_requests: 80000", "max_requests: 1000", "at most 1000 requests at once reach kvroute"},
		"no address":        {"response_attributes: [upstream.address, upstream", "response_attributes: [upstream", "does not report which worker answered"},
		"clients' headers":  {"early_header_mutation_extensions", "unused", "does not remove the header x-dynamo-worker of clients"},
		"no reader":         {"http_header_name: x-dynamo-worker}", "http_header_name: x-other}", "which does not read it"},
		"no workers":        {"- name: workers\n", "- name: other\n", "sends requests that have the header x-dynamo-worker to workers, which does not read it"},
		"a route before":    {"              routes:\n", "              routes:\n              - {name: mine, match: {prefix: /v1/}, route: {cluster: pool, timeout: 0s}}\n", `put kvroute's routes before the route "mine"`},
		"a route of others": {"              routes:\n", "              routes:\n              - {match: {prefix: /v1/, headers: [{name: x-team, present_match: true}]}, route: {cluster: pool}}\n", ""},
		"a short timeout":   {"                  cluster: pool\n                  timeout: 0s", "                  cluster: pool", "ends responses of pool after 15s"},
		"a short silence":   {"stream_idle_timeout: 3600s", "stream_idle_timeout: 60s", "silent for 1m0s"},
		"filter off":        {"          - name: kvroute\n            typed", "          - name: kvroute\n            disabled: true\n            typed", `turns the filter "kvroute" off`},
	} {
		if strings.Count(whole, c.was) == 0 {
			t.Errorf("%s: the bootstrap has no %q", name, c.was)
		}
		got := check(t, plain(t, []byte(strings.ReplaceAll(whole, c.was, c.is))))
		if !strings.Contains(got, c.want) || (c.want == "") != (got == "") {
			t.Errorf("%s: the findings are\n%s, want %q", name, got, c.want)
		}
	}
}

// What somebody does to the pieces by hand is named: routes in another order, settings of a route that kvroute's routes
// do not have, filters that refuse requests behind kvroute's.
func TestMisplacedPiecesAreNamed(t *testing.T) {
	const cors, policy = "cors", `{"@type":"type.googleapis.com/envoy.extensions.filters.http.cors.v3.CorsPolicy"}`
	type object = map[string]any
	last := func(l []any) object { return l[len(l)-1].(object) }
	for name, c := range map[string]struct {
		edit func(manager, host object)
		want string
	}{
		"the old route first": {func(_, host object) { oldRouteFirst(host) }, "the virtual host llm sends all requests for /v1/chat/completions by the route with the prefix /v1/, and none asks kvroute: put kvroute's routes before it\n"},
		"a policy of the old route": {func(_, host object) {
			last(host["routes"].([]any))["typed_per_filter_config"] = object{cors: plain(t, []byte(policy))}
		}, "note: the virtual host llm sets cors on the route with the prefix /v1/, and not on kvroute's routes of the same path: put typed_per_filter_config on the virtual host, or on each of them\n"},
		"a policy of the host": {func(_, host object) {
			one := object{cors: plain(t, []byte(policy))}
			host["typed_per_filter_config"], last(host["routes"].([]any))["typed_per_filter_config"] = one, one
		}, ""},
		"cors behind kvroute": {func(manager, _ object) {
			filters := manager["http_filters"].([]any)
			manager["http_filters"] = append(append(append([]any{}, filters[1:len(filters)-1]...), filters[0]), last(filters))
		}, "note: the listener with stat_prefix edge has the filter cors behind kvroute's: kvroute also gets requests that it refuses; put kvroute's filters behind it\n"},
	} {
		all := withParts(t, envoy.Config{ExtProc: []string{"127.0.0.1:9002"}, PoolCluster: "vllm"})
		c.edit(managerAndHost(all))
		if got := check(t, all); got != c.want {
			t.Errorf("%s: the findings are\n%s, want\n%s", name, got, c.want)
		}
	}
}

// managerAndHost returns the connection manager and the virtual host of the configuration of [withParts].
func managerAndHost(all map[string]any) (manager, host map[string]any) {
	first := func(of map[string]any, field string) map[string]any { return of[field].([]any)[0].(map[string]any) }
	listener := first(all["static_resources"].(map[string]any), "listeners")
	manager = first(first(listener, "filter_chains"), "filters")["typed_config"].(map[string]any)
	return manager, first(manager["route_config"].(map[string]any), "virtual_hosts")
}

// oldRouteFirst puts the last route of a virtual host, which asks no kvroute, before the others.
func oldRouteFirst(host map[string]any) {
	routes := host["routes"].([]any)
	host["routes"] = append([]any{routes[len(routes)-1]}, routes[:len(routes)-1]...)
}

// Nothing in a dump makes Check fail but what is no JSON.
func TestOddDumps(t *testing.T) {
	for _, text := range []string{`{}`, `[]`, `1`, `{"@type":"x.HttpConnectionManager","http_filters":[1,{"typed_config":{"@type":"x.ext_proc.v3.ExternalProcessor"}}]}`} {
		if _, err := envoy.Check([]byte(text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := envoy.Check([]byte("<html>")); err == nil {
		t.Error("an answer that is no JSON has no error")
	}
}
