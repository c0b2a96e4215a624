// SPDX-License-Identifier: Apache-2.0

package envoytest

import (
	"fmt"
	"syscall"
)

// Hold reserves a port of loopback until release is called. Connections to it are refused, except while a process that
// sets SO_REUSEADDR listens there, as Go's and Envoy's listeners do. So such a process can be started again at its
// address, and no other process can have got the port meanwhile.
func Hold() (address string, release func(), err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("envoytest: reserve a port: %w", err)
		}
	}()
	syscall.ForkLock.RLock() // no child must inherit the socket
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return "", nil, err
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
		return "", nil, err
	}
	return fmt.Sprint("127.0.0.1:", at.(*syscall.SockaddrInet4).Port), release, nil
}
