// SPDX-License-Identifier: Apache-2.0

// Package reach limits the addresses at which kvroute calls workers, and makes the HTTP
// client for all those calls.
package reach

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Networks are the addresses that workers may have. The zero value allows all.
type Networks struct {
	list []network
	// Own reports whether kvroute itself listens at an address. No worker may register
	// there. Default: it listens nowhere.
	Own func(netip.AddrPort) bool
}

// network is a prefix with the ports allowed there.
type network struct {
	netip.Prefix
	first, last uint16
}

// String returns the network as [Parse] reads it.
func (n network) String() string {
	switch n.first {
	case 0:
		return n.Prefix.String()
	case n.last:
		return fmt.Sprintf("%v:%d", n.Prefix, n.first)
	}
	return fmt.Sprintf("%v:%d-%d", n.Prefix, n.first, n.last)
}

// Parse reads a list, comma-separated: CIDR, CIDR:port or CIDR:port-port.
func Parse(list string) (n Networks, err error) {
	for item := range strings.SplitSeq(list, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		one, ok := parse(item)
		if !ok {
			return Networks{}, fmt.Errorf("%q is not a network, want CIDR, CIDR:port or CIDR:port-port, as in 10.0.0.0/8:8000-8099", item)
		}
		n.list = append(n.list, one)
	}
	return n, nil
}

func parse(item string) (n network, ok bool) {
	slash := strings.LastIndexByte(item, '/')
	bits, ports, limited := strings.Cut(item[slash+1:], ":")
	prefix, err := netip.ParsePrefix(item[:slash+1] + bits)
	if err != nil {
		return n, false
	}
	n.Prefix, n.last = prefix.Masked(), 65535
	if !limited {
		return n, true
	}
	from, to, ranged := strings.Cut(ports, "-")
	if !ranged {
		to = from
	}
	first, err1 := strconv.ParseUint(from, 10, 16)
	last, err2 := strconv.ParseUint(to, 10, 16)
	n.first, n.last = uint16(first), uint16(last)
	return n, err1 == nil && err2 == nil && first > 0 && first <= last
}

// Empty reports whether no network is named, so that all addresses are allowed.
func (n Networks) Empty() bool { return len(n.list) == 0 }

// First returns an address in the first network, for checks that need any address. It is never
// 0.0.0.0 or ::, which no worker may have. It is invalid without networks.
func (n Networks) First() netip.Addr {
	if n.Empty() {
		return netip.Addr{}
	}
	if a := n.list[0].Addr(); !a.IsUnspecified() {
		return a
	}
	return n.list[0].Addr().Next()
}

func (n Networks) contain(a netip.AddrPort, also func(network) bool) bool {
	return slices.ContainsFunc(n.list, func(w network) bool {
		return w.Contains(a.Addr().Unmap()) && (a.Port() == 0 || w.first <= a.Port() && a.Port() <= w.last) && also(w)
	})
}

// Check refuses an address outside the networks; port 0 stands for any. The error says
// what is wanted.
func (n Networks) Check(a netip.AddrPort) error {
	if n.Empty() || n.contain(a, func(network) bool { return true }) {
		return nil
	}
	return fmt.Errorf("an address in the worker networks %v", n.list)
}

// CheckRegistered also refuses loopback and link-local addresses, unless the operator allows them:
// other programs listen there without authentication, because only local processes reach them. A
// network such as 127.0.0.0/8 allows them; 0.0.0.0/0 does not.
func (n Networks) CheckRegistered(a netip.AddrPort) error {
	if err := n.Check(a); err != nil {
		return err
	}
	if n.Own != nil && n.Own(a) {
		return fmt.Errorf("an address at which kvroute itself does not listen")
	}
	if local(a.Addr()) && !n.contain(a, func(w network) bool { return local(w.Addr()) }) {
		return fmt.Errorf("an address that is neither loopback nor link-local, unless --worker-networks names such a network, as 127.0.0.0/8")
	}
	return nil
}

func local(a netip.Addr) bool {
	return a.Unmap().IsLoopback() || a.Unmap().IsLinkLocalUnicast()
}

// Control is the Control function of a [net.Dialer]. It refuses addresses outside the networks,
// after names were resolved.
func (n Networks) Control(kind, address string, _ syscall.RawConn) error {
	if !strings.HasPrefix(kind, "tcp") {
		return nil // a Unix socket, which only the operator's file names
	}
	a, err := netip.ParseAddrPort(address)
	if err == nil {
		err = n.Check(a)
	}
	if err != nil {
		return fmt.Errorf("address is %s, want %w", address, err)
	}
	return nil
}

// Client returns an HTTP client for calls to workers. It connects to addresses in the
// networks only, does not follow redirects, and ignores proxies of the environment.
func (n Networks) Client() *http.Client {
	// A worker whose machine is down does not answer.
	dialer := &net.Dialer{Timeout: 5 * time.Second, Control: n.Control}
	return &http.Client{
		Transport:     &http.Transport{DialContext: dialer.DialContext, MaxIdleConnsPerHost: 64, IdleConnTimeout: time.Minute},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
