// SPDX-License-Identifier: Apache-2.0

package zmtp_test

import (
	"net"
	"syscall"
	"testing"

	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/silence"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// A socket of events ends when the engine's machine is lost, also if the caller checks its address.
func TestSocketsEndInSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan *zmtp.Conn, 1)
	go func() {
		defer close(accepted)
		c, err := l.Accept()
		if err != nil {
			return
		}
		if z, err := zmtp.NewConn(c, zmtp.Pub); err == nil {
			accepted <- z
		}
	}()
	checked := false
	c, err := zmtp.Dial(t.Context(), zmtp.Endpoint{Host: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port}, zmtp.Sub, func(d *net.Dialer) {
		d.Control = func(string, string, syscall.RawConn) error { checked = true; return nil }
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if z := <-accepted; z != nil {
		defer z.Close()
	}
	if o, err := process.SocketOptions(zmtp.NetConn(c).(*net.TCPConn)); err != nil || o.UserTimeout != silence.Timeout || !o.KeepAlive || !checked {
		t.Errorf("%+v, %v; the address was checked: %v", o, err, checked)
	}
}
