// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/internal/silence"
)

// addresses is the content of a ready file.
type addresses struct {
	Extproc string `json:"extproc,omitempty"`
	HTTP    string `json:"http"`
	NATS    string `json:"nats,omitempty"`
}

// listen opens a listener at ip:port or unix:/path. It replaces the socket file of a
// process that was killed, but not one at which a process still listens.
func listen(at string) (net.Listener, error) {
	network, address, err := splitAddress(at)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		conn, err := net.DialTimeout(network, address, time.Second)
		switch {
		case err == nil:
			_ = conn.Close() // it only showed that a process listens
			return nil, fmt.Errorf("another process listens at %s", address)
		case errors.Is(err, syscall.ECONNREFUSED):
			if err := os.Remove(address); err != nil {
				return nil, err
			}
		}
	}
	return silence.Listen(network, address)
}

// checkPorts refuses addresses that are in use, before the slow parts of a start. The listeners themselves
// open later, so that connections are refused until kvroute can answer.
func (s *server) checkPorts() error {
	var errs []error
	for name, at := range map[string]string{"extproc-address": s.conf.ExtprocAddress, "http-address": s.conf.HTTPAddress} {
		l, err := listen(at)
		if err == nil {
			_ = l.Close()
			continue
		}
		errs = append(errs, fmt.Errorf("%s is %q: %w; stop the other program, or set another address", name, at, err))
	}
	return errors.Join(errs...)
}

// listensAt reports whether this process listens at an address.
func (s *server) listensAt(a netip.AddrPort) bool {
	ours := []net.Addr{s.grpcAt.Addr(), s.httpAt.Addr()}
	if s.bus != nil {
		ours = append(ours, s.bus.Addr())
	}
	return slices.ContainsFunc(ours, func(l net.Addr) bool {
		at, ok := l.(*net.TCPAddr)
		if !ok || at.Port != int(a.Port()) {
			return false
		}
		return at.IP.Equal(a.Addr().AsSlice()) || at.IP.IsUnspecified() && ofThisMachine(a.Addr())
	})
}

func ofThisMachine(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	addresses, _ := net.InterfaceAddrs() // after an error: no interface
	return slices.ContainsFunc(addresses, func(n net.Addr) bool {
		own, ok := n.(*net.IPNet)
		return ok && own.IP.Equal(a.AsSlice())
	})
}

// loopback reports whether an address is reachable from this machine only.
func loopback(address string) bool {
	network, at, err := splitAddress(address)
	if err != nil || network == "unix" {
		return true // a wrong address is refused elsewhere
	}
	host, _, _ := net.SplitHostPort(at)
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// splitAddress returns the network and the address of a listener.
func splitAddress(s string) (network, address string, err error) {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		return "unix", path, nil
	}
	_, port, err := net.SplitHostPort(s)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return "tcp", s, err
}
