// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Names resolves DNS names in the addresses of configured records: each address of a name
// is one worker. A Names belongs to one goroutine at a time.
type Names struct {
	// Lookup returns a name's addresses, as [net.Resolver.LookupNetIP] does with "ip".
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	last map[string][]netip.Addr // the addresses of the last successful lookup, by name
}

// FailedLookup is a failed lookup of a record's name.
type FailedLookup struct {
	Record Record
	Err    error
	Kept   int // addresses of the last successful lookup, which count on; with 0 the record stands for no worker
}

// Some reports whether a record has a DNS name in its address.
func (n *Names) Some(records []Record) bool {
	return slices.ContainsFunc(records, func(r Record) bool { _, _, named := split(r.Address); return named })
}

// Resolve returns the records of single workers. The worker of an address has the name
// RECORD@IP:PORT, or IP:PORT if the record has no name, so that its id does not depend on
// the other addresses. Its Host is the name and port, unless the record has another one. If a lookup fails, the
// addresses of the last successful one count. failed has an element for each record whose lookup failed, in the order
// of the records. [Table.SetStatic] checks the records.
func (n *Names) Resolve(ctx context.Context, records []Record) (all []Record, failed []FailedLookup) {
	found, errs := make(map[string][]netip.Addr), make(map[string]error)
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
				addresses, errs[host] = n.last[host], err
			}
			found[host] = addresses
		}
		if err := errs[host]; err != nil {
			failed = append(failed, FailedLookup{*r, err, len(addresses)})
		}
		for _, a := range uniqueAddresses(addresses) {
			one := *r
			if r.Host == "" {
				one.Host, one.Named = r.Address, true // as a client that resolves the name would send it
			}
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

// uniqueAddresses returns the addresses in order, each once.
func uniqueAddresses(addresses []netip.Addr) []netip.Addr {
	list := make([]netip.Addr, 0, len(addresses))
	for _, a := range addresses {
		list = append(list, a.Unmap())
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// split splits host:port, and reports whether the host is a DNS name.
func split(address string) (host string, port uint16, named bool) {
	host, portText, _ := strings.Cut(address, ":")
	n, err := strconv.ParseUint(portText, 10, 16)
	_, notAddress := netip.ParseAddr(host)
	if err != nil || n == 0 || notAddress == nil || host == "" || strings.ContainsAny(host, "[]% ") || len(host) > 253 {
		return "", 0, false
	}
	return host, uint16(n), true
}
