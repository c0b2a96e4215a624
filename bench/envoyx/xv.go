package main

import (
	"regexp"
	"strings"
)

func rep(p ...string) func(string) string { return strings.NewReplacer(p...).Replace }
func re(p, r string) func(string) string {
	x := regexp.MustCompile(p)
	return func(s string) string { return x.ReplaceAllString(s, r) }
}
func all(fs ...func(string) string) func(string) string {
	return func(s string) string {
		for _, f := range fs {
			n := f(s)
			if n == s {
				panic("no edit")
			}
			s = n
		}
		return s
	}
}
func cutFilters(config string) string {
	from, to := strings.Index(config, "          - name: kvroute\n"), strings.Index(config, "          - name: envoy.filters.http.router\n")
	return config[:from] + config[to:]
}

var graceful = re(`(?m)^( +)envoy.reloadable_features.ext_proc_graceful_grpc_close: false`, "${1}envoy.reloadable_features.ext_proc_graceful_grpc_close: false\n${1}envoy.reloadable_features.http2_use_oghttp2: false")
var attrs = re(`(?m)^ +response_attributes: .*\n`, "")
var fwd = rep("              forward_rules: &secrets # kvroute does not need credentials\n                disallowed_headers:\n                  patterns: [{exact: authorization}, {exact: proxy-authorization}, {exact: cookie}, {exact: set-cookie}, {exact: x-api-key}, {exact: api-key}]\n", "")
var allowOnly = rep("                disallowed_headers:\n                  patterns: [{exact: authorization}, {exact: proxy-authorization}, {exact: cookie}, {exact: set-cookie}, {exact: x-api-key}, {exact: api-key}]\n", "                allowed_headers:\n                  patterns: [{exact: \":path\"}, {exact: \":method\"}, {exact: \":status\"}, {exact: content-type}, {exact: content-encoding}, {prefix: x-dynamo}]\n")
var mut = re(`(?m)^ +mutation_rules: .*\n`, "")
var composite = re(`cluster: workers, timeout`, "cluster: workers, timeout")
var origdst = rep("                  cluster: workers\n", "                  cluster: worker-first\n")
var pool = rep("                  cluster: workers\n", "                  cluster: pool\n")
var noretry = re(`(?s)                  retry_policy:\n                    retry_on: connect-failure,refused-stream,reset-before-request,retriable-status-codes.*?max_interval: 0.005s}\n`, "")
var keep = re(`(?m)^ +connection_keepalive: .*\n`, "")
var grpcretry = re(`(?s)                retry_policy: # with the default.*?max_interval: 0.020s}\n`, "")


var window = rep("http2_protocol_options:\n            connection_keepalive", "http2_protocol_options:\n            initial_stream_window_size: 1048576\n            initial_connection_window_size: 16777216\n            connection_keepalive")
var bigbuf = re(`per_connection_buffer_limit_bytes: 65536`, "per_connection_buffer_limit_bytes: 1048576")
var full = rep("request_body_mode: BUFFERED","request_body_mode: FULL_DUPLEX_STREAMED\n                request_trailer_mode: SEND")

func xvariants() []xv {
	return []xv{
		{name: "without", edit: cutFilters},
		{name: "noop", noObs: true},
		{name: "nghttp2", noObs: true, edit: graceful},
		{name: "window", noObs: true, edit: window},
		{name: "bigbuf", noObs: true, edit: bigbuf},
		{name: "noretry", noObs: true, edit: noretry},
	}
}
