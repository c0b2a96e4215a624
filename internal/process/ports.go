// SPDX-License-Identifier: Apache-2.0

package process

import (
	"fmt"
	"math/rand/v2"
	"net"
	"syscall"
)

// HoldPort reserves a port of 127.0.0.1 until release is called. Connections to it are refused,
// except while a process that sets SO_REUSEADDR listens there, as Go's and Envoy's listeners
// do. Such listeners can bind the port one after the other, and no other process gets it: the
// port belongs to a socket that never listens.
func HoldPort() (port int, release func(), err error) {
	syscall.ForkLock.RLock() // no child must inherit the socket
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return 0, nil, fmt.Errorf("reserve a port: %w", err)
	}
	release = func() { _ = syscall.Close(fd) } // nothing was written to it
	if err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	var at syscall.Sockaddr
	if err == nil {
		at, err = syscall.Getsockname(fd)
	}
	if err != nil {
		release()
		return 0, nil, fmt.Errorf("reserve a port: %w", err)
	}
	return at.(*syscall.SockaddrInet4).Port, release, nil
}

// FreePorts returns the first of n free TCP ports in a row. An engine binds them minutes
// later, so they are below those that the kernel gives to connections.
func FreePorts(n int) (int, error) {
	for range 100 {
		if first := 15_000 + rand.IntN(15_000); free(first, n) {
			return first, nil
		}
	}
	return 0, fmt.Errorf("no %d free ports in a row", n)
}

func free(first, n int) bool {
	for i := range n {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+i))
		if err != nil {
			return false
		}
		_ = l.Close() // it is for another program
	}
	return true
}
