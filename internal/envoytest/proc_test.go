// SPDX-License-Identifier: Apache-2.0

package envoytest_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/envoytest"
)

const answering = `
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: main
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: main
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: /}, direct_response: {status: 418}}]}
          http_filters:
          - name: router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`

func TestARealEnvoy(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	p, err := envoytest.Start(t.Context(), envoytest.Options{Config: []byte(answering)})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get(p.URL())
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusTeapot {
		t.Errorf("status %d, want 418", resp.StatusCode)
	}
	if n, err := p.Stat(t.Context(), "http.main.downstream_rq_4xx"); err != nil || n != 1 {
		t.Errorf("Envoy counts %d, %v; want 1", n, err)
	}
	if n, err := p.Stat(t.Context(), "no.such.thing"); err != nil || n != 0 {
		t.Errorf("a counter that does not exist is %d, %v", n, err)
	}
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
	if err := p.Stop(); err != nil {
		t.Errorf("a second stop: %v", err)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestABrokenEnvoySaysWhy(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	_, err := envoytest.Start(t.Context(), envoytest.Options{Config: []byte("static_resources: {listenerz: []}")})
	if err == nil || !strings.Contains(err.Error(), "listenerz") {
		t.Errorf("error %v, want one that names the field", err)
	}
}
