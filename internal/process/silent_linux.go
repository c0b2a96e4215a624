// SPDX-License-Identifier: Apache-2.0

package process

import (
	"fmt"
	"syscall"
	"time"
)

// FallSilent makes a TCP socket of this process silent, as if its machine had lost its network: from now on the
// kernel drops all packets that arrive for the socket, before it acknowledges them. A listener drops requests
// for connections. What the socket sends is not dropped. No privilege is needed.
func FallSilent(c syscall.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("fall silent: %w", err)
	}
	none := []syscall.SockFilter{{Code: syscall.BPF_RET | syscall.BPF_K, K: 0}} // accept 0 bytes of each packet
	var failed error
	//nolint:staticcheck // the alternative is another module, which also needs unsafe to attach a filter
	if err := raw.Control(func(fd uintptr) { failed = syscall.AttachLsf(int(fd), none) }); err != nil {
		return fmt.Errorf("fall silent: %w", err)
	}
	if failed != nil {
		return fmt.Errorf("fall silent: %w", failed)
	}
	return nil
}

// TCPOptions are the options of a TCP socket that limit how long its other end may be silent.
type TCPOptions struct {
	UserTimeout    time.Duration // 0 = none
	KeepAlive      bool
	Idle, Interval time.Duration
	Probes         int
}

// SocketOptions reads the options of a socket.
func SocketOptions(c syscall.Conn) (o TCPOptions, err error) {
	const userTimeout = 18 // TCP_USER_TIMEOUT, which package syscall does not have
	raw, err := c.SyscallConn()
	if err != nil {
		return o, fmt.Errorf("read the options of a socket: %w", err)
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		get := func(level, name int) int {
			n, err := syscall.GetsockoptInt(int(fd), level, name)
			if err != nil {
				failed = fmt.Errorf("read the options of a socket: %w", err)
			}
			return n
		}
		o = TCPOptions{
			UserTimeout: time.Duration(get(syscall.IPPROTO_TCP, userTimeout)) * time.Millisecond,
			KeepAlive:   get(syscall.SOL_SOCKET, syscall.SO_KEEPALIVE) != 0,
			Idle:        time.Duration(get(syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE)) * time.Second,
			Interval:    time.Duration(get(syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL)) * time.Second,
			Probes:      get(syscall.IPPROTO_TCP, syscall.TCP_KEEPCNT),
		}
	})
	if err != nil {
		return o, fmt.Errorf("read the options of a socket: %w", err)
	}
	return o, failed
}
