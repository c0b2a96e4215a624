// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/fleet"
)

const (
	lookUpEvery = 10 * time.Second // the resolver does not say how long an answer is valid
	lookUpTime  = 2 * time.Second
)

// static passes the workers that do not register to the registry: those of the
// configuration, whose addresses may be names; those of Dynamo's records; pods of Kubernetes; router groups.
type static struct {
	setAll     func([]fleet.Record) error
	unresolved func([]fleet.Left)
	log        *slog.Logger

	mu sync.Mutex
	// mu guards the fields below, and orders the calls of setAll.
	names      fleet.Names
	configured []fleet.Record // with names
	resolved   []fleet.Record // configured, with addresses
	found      []fleet.Record // by Dynamo's records
	pods       []fleet.Record // found in Kubernetes
	groups     []fleet.Record
	failing    map[string]time.Time // the first failed lookup, by name; without a successful one since
}

// newStatic returns a static without workers. Its methods call setAll and unresolved, with the workers and with
// those whose names have no address.
func newStatic(setAll func([]fleet.Record) error, unresolved func([]fleet.Left), log *slog.Logger) *static {
	lookup := func(ctx context.Context, host string) ([]netip.Addr, error) {
		return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	}
	return &static{setAll: setAll, unresolved: unresolved, log: log, names: fleet.Names{Lookup: lookup}}
}

// set replaces the workers of the configuration. After an error the old ones stay.
func (s *static) set(ctx context.Context, records []fleet.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.resolveLocked(ctx, records)
	if err := fleet.CheckIdentities(all, false); err != nil {
		return err
	}
	if err := s.replaceLocked(&s.resolved, all); err != nil {
		return err
	}
	s.configured = records
	return nil
}

// replace replaces the router groups, the workers of Dynamo's records, or pods. After an error the old ones
// stay.
func (s *static) replace(list *[]fleet.Record, records []fleet.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.replaceLocked(list, records)
}

// replaceLocked replaces one of the lists. If two workers have one id, a worker of the configuration
// overrides another one.
func (s *static) replaceLocked(list *[]fleet.Record, records []fleet.Record) error {
	before := *list
	*list = records
	err := s.setAll(slices.Concat(s.found, s.pods, s.resolved, s.groups))
	if err != nil {
		*list = before
	}
	return err
}

// foundIDs returns the ids of the workers of Dynamo's records.
func (s *static) foundIDs() map[uint64]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := map[uint64]bool{}
	for i := range s.found {
		ids[s.found[i].ID()] = true
	}
	return ids
}

func (s *static) resolveLocked(ctx context.Context, records []fleet.Record) []fleet.Record {
	ctx, cancel := context.WithTimeout(ctx, lookUpTime)
	defer cancel()
	all, failed := s.names.Resolve(ctx, records)
	s.tellFailedLocked(failed)
	fleet.AddProbes(all)
	return all
}

// tellFailedLocked logs names whose lookups begin to fail and those that can be looked up again, and passes on the
// workers without an address.
func (s *static) tellFailedLocked(failed []fleet.FailedLookup) {
	before, now := s.failing, time.Now()
	s.failing = make(map[string]time.Time, len(failed))
	var unresolved []fleet.Left
	for i := range failed {
		r := &failed[i].Record
		since, known := before[r.Address]
		if !known {
			since = now
			s.log.Warn("the DNS name of a worker cannot be looked up; the addresses of the last lookup count",
				"worker", r.Name, "address", r.Address, "addresses", failed[i].Kept, "err", failed[i].Err)
		}
		s.failing[r.Address] = since
		if failed[i].Kept == 0 {
			unresolved = append(unresolved, fleet.Left{
				ID: r.ID(), Rank: r.DPStart, Name: cmp.Or(r.Name, r.Address), Models: r.Models,
				State: fleet.Unresolved, Cause: failed[i].Err.Error(), Time: since,
			})
		}
	}
	for name := range before {
		if s.failing[name].IsZero() {
			s.log.Info("the DNS name of a worker can be looked up again, or is no longer configured", "address", name)
		}
	}
	s.unresolved(unresolved)
}

// run looks the names up repeatedly until ctx ends.
func (s *static) run(ctx context.Context) error {
	return every(ctx, lookUpEvery, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.names.Some(s.configured) {
			return
		}
		all := s.resolveLocked(ctx, s.configured)
		if reflect.DeepEqual(all, s.resolved) {
			return
		}
		err := fleet.CheckIdentities(all, false)
		if err == nil {
			err = s.replaceLocked(&s.resolved, all)
		}
		if err != nil {
			s.log.Warn("a worker's new addresses are refused; the old ones stay", "err", err)
			return
		}
		s.log.Info("names of workers have other addresses", "workers", len(all))
	})
}
