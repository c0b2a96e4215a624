// SPDX-License-Identifier: Apache-2.0

package reach_test

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"testing"

	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/silence"
)

// A call to a worker whose machine is lost ends: its connection has the limit, with and without networks.
func TestTheClientsConnectionsEndInSilence(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	for _, list := range []string{"", "127.0.0.0/8"} {
		n, err := reach.Parse(list)
		if err != nil {
			t.Fatal(err)
		}
		var conn net.Conn
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) { conn = got.Conn }})
		if _, err := reach.Get(ctx, n.Client(), "", server.URL, 1); err != nil {
			t.Fatal(err)
		}
		if o, err := process.SocketOptions(conn.(*net.TCPConn)); err != nil || o.UserTimeout != silence.Timeout || !o.KeepAlive {
			t.Errorf("networks %q: %+v, %v", list, o, err)
		}
	}
}
