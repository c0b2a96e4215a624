// SPDX-License-Identifier: Apache-2.0

package envoytest

import (
	"net"
	"testing"
	"time"
)

// A reserved port refuses connections, can be listened at any number of times, and is given to nobody else.
func TestHold(t *testing.T) {
	at, release, err := Hold()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for range 3 {
		if conn, err := net.DialTimeout("tcp", at, time.Minute); err == nil {
			_ = conn.Close()
			t.Fatal("somebody listens at a reserved port")
		}
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.DialTimeout("tcp", at, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
		_ = l.Close()
	}
}
