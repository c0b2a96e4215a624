// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
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

// startNATS starts a NATS server in this process: see [bus.StartServer].
func startNATS(listen, store string) (*bus.Server, error) { return bus.StartServer(listen, store, "") }
