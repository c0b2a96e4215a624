// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/engines"
)

// CheckIdentities refuses two records of one process: records with one id, with one address, host and rank, or
// with one event socket and rank. A DNS name as address stands for workers with ids of their own, so
// its id and address are not compared. The error names both records and the field. With places it
// names them by their places in the configuration's workers, otherwise by the workers' names.
func CheckIdentities(records []Record, places bool) error {
	var names Names
	seen := make(map[string]int)
	for i := range records {
		r := &records[i]
		for _, own := range r.identities(names.Some(records[i : i+1])) {
			first, twice := seen[own.key]
			if own.alias != "" && !twice {
				first, twice = seen[own.alias]
			}
			if twice && first != i {
				const want = "want a name or worker_id, an address, and event sockets of its own"
				if !places {
					return fmt.Errorf("workers: %q has the %s of %q, %s", r.Name, own.text, records[first].Name, want)
				}
				return fmt.Errorf("workers[%d]%s (%q) has the %s of workers[%d] (%q), %s",
					i, own.field, r.Name, own.text, first, records[first].Name, want)
			}
			seen[own.key] = i
			if own.other != "" {
				seen[own.other] = i
			}
		}
	}
	return nil
}

// identity is a property that only one process can have.
type identity struct {
	key, field, text string
	// A worker whose Host is a DNS name is the same process as one at that address without a Host. alias is the
	// key of the other kind of worker, other the key under which a worker of the other kind finds this one.
	alias, other string
}

// identities returns the identities of a record. named says that its address has a DNS name.
func (r *Record) identities(named bool) (all []identity) {
	add := func(field, text, key string) { all = append(all, identity{key: field + key, field: field, text: text}) }
	if r.ID() != 0 && !named {
		text := fmt.Sprint("id ", r.ID())
		add("", text, text)
	}
	withHost := "" // an HTTP router may serve several workers at one address, by the Host header
	if r.Host != "" {
		withHost = " with host " + r.Host
	}
	ranks := min(max(1, r.DPSize), maxRanks)
	for i := range ranks {
		rank := r.DPStart + i
		at := r.Address
		if own, has := r.RankAddresses[strconv.FormatUint(uint64(rank), 10)]; has {
			at = own
		}
		if a, err := address(at, Networks{}); err == nil && !named {
			text := fmt.Sprintf("address %v%s and rank %d", a, withHost, rank)
			add(".address", text, text)
			bare := fmt.Sprintf("address %v and rank %d", a, rank)
			switch own := &all[len(all)-1]; {
			case r.Named:
				own.alias, own.other = ".address"+bare, "named "+bare
			case r.Host == "":
				own.alias = "named " + bare
			}
		}
	}
	if r.Events.Direct() {
		e := engines.EngineWorker{
			Transport: r.Events.Transport, Address: r.Address, Endpoint: r.Events.Endpoint, Topic: r.Events.Topic,
			DPStart: r.DPStart, DPSize: ranks,
		}
		where, sockets := e.EventSockets()
		for i := range sockets {
			socket := strings.Replace(sockets[i], "//localhost:", "//127.0.0.1:", 1)
			add(".events.endpoint", fmt.Sprintf("event socket %s and rank %d", where[i], r.DPStart+uint32(i)), socket)
		}
	}
	return all
}
