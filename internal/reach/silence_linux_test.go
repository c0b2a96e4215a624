// SPDX-License-Identifier: Apache-2.0

package reach_test

import (
	"net"
	"net/http"
	"testing"

	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/silence"
)

// A call to a worker whose machine is lost ends: its connection has the limit, with and without networks.
func TestTheClientsConnectionsEndInSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, list := range []string{"", "127.0.0.0/8"} {
		n, err := reach.Parse(list)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := n.Client().Transport.(*http.Transport).DialContext(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if o, err := process.SocketOptions(conn.(*net.TCPConn)); err != nil || o.UserTimeout != silence.Timeout || !o.KeepAlive {
			t.Errorf("networks %q: %+v, %v", list, o, err)
		}
	}
}
