// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/bus"
)

// newLoopback serves h on a port of its own and returns its URL.
func newLoopback(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

// startNATS starts a NATS server. listen may be the address of an earlier one with its login,
// "kvroute:password@ip:port": the new server then has the same password.
func startNATS(listen, store string) (*bus.Server, error) {
	login, at, ok := strings.Cut(listen, "@")
	if !ok {
		return bus.StartServer(listen, store, "")
	}
	_, password, _ := strings.Cut(login, ":")
	return bus.StartServer(at, store, password)
}
