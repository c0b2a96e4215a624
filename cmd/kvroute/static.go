// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
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
	lookUpEvery = 10 * time.Second // no answer of DNS says how long it holds through the resolver
	lookUpTime  = 2 * time.Second
)

// static keeps the fleet's workers that do not register: those of the configuration, as
// their names say, and those that were found by Dynamo's records.
type static struct {
	tell func([]fleet.Record) error
	log  *slog.Logger

	mu sync.Mutex
	// mu guards the fields below, and orders what is told.
	names   fleet.Names
	records []fleet.Record // as configured
	found   []fleet.Record // by Dynamo's records
	told    []fleet.Record // of the configuration, as last resolved
	groups  []fleet.Record // router groups, which have no names
}

func newStatic(tell func([]fleet.Record) error, log *slog.Logger) *static {
	lookup := func(ctx context.Context, host string) ([]netip.Addr, error) {
		return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	}
	return &static{tell: tell, log: log, names: fleet.Names{Lookup: lookup}}
}

// set replaces the workers of the configuration. After an error the old ones stay.
func (s *static) set(ctx context.Context, records []fleet.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.resolve(ctx, records)
	if err := s.tell(s.with(all)); err != nil {
		return err
	}
	s.records, s.told = records, all
	return nil
}

// eachOnce refuses records of which two are one worker. Those whose address is a name stand
// for workers of other ids.
func eachOnce(records []fleet.Record) error {
	var names fleet.Names
	seen := make(map[uint64]int)
	for i := range records {
		id := records[i].ID()
		if id == 0 || names.Some(records[i:i+1]) {
			continue
		}
		if first, twice := seen[id]; twice {
			return fmt.Errorf("workers[%d] (%q) has the id %d of workers[%d] (%q), want a name or worker_id of its own", i, records[i].Name, id, first, records[first].Name)
		}
		seen[id] = i
	}
	return nil
}

// setGroups replaces the candidates that router groups are. After an error the old ones
// stay.
func (s *static) setGroups(groups []fleet.Record) error { return s.replace(&s.groups, groups) }

// discover replaces the workers that were found. After an error the old ones stay.
func (s *static) discover(found []fleet.Record) error { return s.replace(&s.found, found) }

func (s *static) replace(list *[]fleet.Record, records []fleet.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := *list
	*list = records
	if err := s.tell(s.with(s.told)); err != nil {
		*list = before
		return err
	}
	return nil
}

// with adds those that were found, and the groups. Of two with one id that of the
// configuration counts, which comes behind what was found.
func (s *static) with(configured []fleet.Record) []fleet.Record {
	return slices.Concat(s.found, configured, s.groups)
}

func (s *static) resolve(ctx context.Context, records []fleet.Record) []fleet.Record {
	ctx, cancel := context.WithTimeout(ctx, lookUpTime)
	defer cancel()
	all, failed := s.names.Resolve(ctx, records)
	for _, err := range failed {
		s.log.Warn("a worker's name is not found; it stands for what it stood for last", "err", err)
	}
	return all
}

// run looks the names up again and again, until ctx ends.
func (s *static) run(ctx context.Context) error {
	return every(ctx, lookUpEvery, func() { s.again(ctx) })
}

func (s *static) again(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.names.Some(s.records) {
		return
	}
	all := s.resolve(ctx, s.records)
	if reflect.DeepEqual(all, s.told) {
		return
	}
	if err := s.tell(s.with(all)); err != nil {
		s.log.Warn("a worker's new addresses are refused; the old ones stay", "err", err)
		return
	}
	s.told = all
	s.log.Info("names of workers stand for other addresses", "workers", len(all))
}
