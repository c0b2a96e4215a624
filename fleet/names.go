// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Names turns the records of the configuration into those of single workers: one whose
// address is a name stands for as many workers as the name has addresses. A Names
// belongs to one goroutine at a time.
type Names struct {
	// Lookup finds a name's addresses, as [net.Resolver.LookupNetIP] does with "ip".
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	last map[string][]netip.Addr // what a name stood for when it was found
}

// Some says whether a record's address is a name.
func (n *Names) Some(records []Record) bool {
	return slices.ContainsFunc(records, func(r Record) bool { _, _, named := split(r.Address); return named })
}

// Resolve returns the workers that the records stand for. A worker of a name is called
// RECORD@IP:PORT, or IP:PORT if the record has no name, so that it stays who it is
// whatever other addresses come and go. A name that cannot be found stands for what it
// stood for last, at first nobody; failed says which and why. Everything else about
// records is for [Table.SetStatic] to check.
func (n *Names) Resolve(ctx context.Context, records []Record) (all []Record, failed []error) {
	found := make(map[string][]netip.Addr)
	for i := range records {
		r := &records[i]
		host, port, named := split(r.Address)
		if !named {
			all = append(all, *r)
			continue
		}
		addresses, done := found[host]
		if !done {
			var err error
			if addresses, err = n.Lookup(ctx, host); err != nil {
				failed = append(failed, fmt.Errorf("fleet: worker %q: %w", clip(r.Name), err))
				addresses = n.last[host]
			}
			found[host] = addresses
		}
		for _, a := range sorted(addresses) {
			one := *r
			one.Address = netip.AddrPortFrom(a, port).String()
			one.WorkerID = 0
			if one.Name = one.Address; r.Name != "" {
				one.Name = r.Name + "@" + one.Address
			}
			all = append(all, one)
		}
	}
	n.last = found
	return all, failed
}

// sorted returns addresses in one order, each once.
func sorted(addresses []netip.Addr) []netip.Addr {
	list := make([]netip.Addr, 0, len(addresses))
	for _, a := range addresses {
		list = append(list, a.Unmap())
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// split takes host:port apart, if host is a name.
func split(address string) (host string, port uint16, named bool) {
	at := strings.LastIndexByte(address, ':')
	if at <= 0 {
		return "", 0, false
	}
	host = address[:at]
	n, err := strconv.ParseUint(address[at+1:], 10, 16)
	if err != nil || n == 0 || strings.ContainsAny(host, ":[]% ") || len(host) > 253 {
		return "", 0, false
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return "", 0, false
	}
	return host, uint16(n), true
}
