// SPDX-License-Identifier: Apache-2.0

package silence

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/process"
)

// A connection whose other end has fallen silent ends: a reader that waits, with and without data that nobody
// acknowledged. Without the limits the first reader would wait for hours, the second one for a quarter of an hour.
func TestAConnectionEndsWhenItsOtherEndIsSilent(t *testing.T) {
	for name, at := range map[string]string{"IPv4": "127.0.0.1:0", "IPv6": "[::1]:0"} {
		for _, c := range []struct {
			end    string // whose reader waits
			writes bool   // into the silence
		}{{"dialer", false}, {"dialer", true}, {"listener", false}, {"listener", true}} {
			t.Run(name+" "+c.end, func(t *testing.T) {
				t.Parallel() // mostly waits
				l, err := listen("tcp", at, time.Second)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				d := net.Dialer{}
				limit(&d, time.Second)
				ours, err := d.Dial("tcp", l.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				defer ours.Close()
				theirs, err := l.Accept()
				if err != nil {
					t.Fatal(err)
				}
				defer theirs.Close()
				if c.end == "listener" {
					ours, theirs = theirs, ours
				}
				if err := theirs.(*net.TCPConn).SetKeepAlive(false); err != nil { // it would send probes
					t.Fatal(err)
				}
				if err := process.FallSilent(theirs.(*net.TCPConn)); err != nil {
					t.Fatal(err)
				}
				if c.writes {
					if _, err := ours.Write([]byte("hello")); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := io.ReadAll(ours); !errors.Is(err, syscall.ETIMEDOUT) {
					t.Errorf("the reader ends with %v, want %v", err, syscall.ETIMEDOUT)
				}
			})
		}
	}
}

// The limits of the dialers and listeners that other packages make.
func TestDialersAndListenersHaveTheLimit(t *testing.T) {
	l, err := Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var d net.Dialer
	refusal := errors.New("refused")
	var refuse bool
	d.Control = func(string, string, syscall.RawConn) error {
		if refuse {
			return refusal
		}
		return nil
	}
	Limit(&d)
	ours, err := d.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	theirs, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	for end, c := range map[string]net.Conn{"dialer": ours, "listener": theirs} {
		got, err := process.SocketOptions(c.(*net.TCPConn))
		if want := (process.TCPOptions{UserTimeout: 30 * time.Second, KeepAlive: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Probes: 3}); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", end, got, err, want)
		}
	}
	if refuse = true; !errors.Is(dialError(&d, l.Addr().String()), refusal) {
		t.Error("the dialer's own Control function is not called")
	}
	socket := t.TempDir() + "/s"
	u, err := Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	refuse = false
	if c, err := d.Dial("unix", socket); err != nil {
		t.Error(err)
	} else {
		_ = c.Close()
	}
}

func dialError(d *net.Dialer, address string) error {
	c, err := d.Dial("tcp", address)
	if err == nil {
		_ = c.Close()
	}
	return err
}
