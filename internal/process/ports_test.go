// SPDX-License-Identifier: Apache-2.0

package process_test

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/process"
)

// A reserved port refuses connections, and listeners can bind it any number of times.
func TestHoldPort(t *testing.T) {
	port, release, err := process.HoldPort()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	at := fmt.Sprint("127.0.0.1:", port)
	for range 3 {
		if conn, err := net.DialTimeout("tcp", at, time.Minute); err == nil {
			_ = conn.Close()
			t.Fatal("a connection to a reserved port")
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
