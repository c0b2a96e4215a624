// SPDX-License-Identifier: Apache-2.0

// Package silence ends TCP connections whose other machine is silent, as after a loss of power or of its network.
//
// The kernel probes a connection without traffic. It closes the connection when the other machine has
// acknowledged no probe and no data for [Timeout]. Keep-alive probes alone do not end a connection that has
// unacknowledged data, so Linux gets TCP_USER_TIMEOUT, too. Other systems have only the probes.
//
// Functions may be called by any number of goroutines.
package silence

import (
	"context"
	"net"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Timeout is how long the other end of a connection may be silent.
const Timeout = 30 * time.Second

// userTimeout is Linux's TCP_USER_TIMEOUT, in milliseconds. Package syscall does not have it.
const userTimeout = 18

// probes are the probes of a connection without traffic: with three unanswered ones, the last of them at 25 s, the
// connection ends.
func probes(timeout time.Duration) net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: timeout / 3, Interval: timeout / 6, Count: 3}
}

// Limit ends the connections of a dialer after [Timeout]. It keeps the dialer's Control function, but not its
// ControlContext.
func Limit(d *net.Dialer) { limit(d, Timeout) }

func limit(d *net.Dialer, timeout time.Duration) {
	check := d.Control
	d.KeepAliveConfig = probes(timeout)
	d.Control = func(network, address string, c syscall.RawConn) error {
		if check != nil {
			if err := check(network, address, c); err != nil {
				return err
			}
		}
		return set(network, c, timeout)
	}
}

// Listen is [net.Listen] for a listener whose connections end after [Timeout].
func Listen(network, address string) (net.Listener, error) { return listen(network, address, Timeout) }

func listen(network, address string, timeout time.Duration) (net.Listener, error) {
	conf := net.ListenConfig{
		KeepAliveConfig: probes(timeout),
		// Linux gives the option of a listener to its connections.
		Control: func(network, _ string, c syscall.RawConn) error { return set(network, c, timeout) },
	}
	return conf.Listen(context.Background(), network, address)
}

// set sets TCP_USER_TIMEOUT of a TCP socket.
func set(network string, c syscall.RawConn, timeout time.Duration) error {
	if runtime.GOOS != "linux" || !strings.HasPrefix(network, "tcp") {
		return nil
	}
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, userTimeout, int(timeout.Milliseconds()))
	})
	if err != nil {
		return err
	}
	return failed
}
