// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/fleet"
)

// The log names a worker whose DNS name has no address once. The worker stays visible until it has one.
func TestWorkersWithoutAnAddressAreVisible(t *testing.T) {
	var log bytes.Buffer
	var all []fleet.Record
	var unresolved []fleet.Left
	s := newStatic(
		func(records []fleet.Record) error { all = records; return nil },
		func(list []fleet.Left) { unresolved = list },
		slog.New(slog.NewTextHandler(&log, nil)),
	)
	addresses := map[string]netip.Addr{"known": netip.MustParseAddr("10.0.0.1")}
	s.names.Lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
		if a, ok := addresses[host]; ok {
			return []netip.Addr{a}, nil
		}
		return nil, errors.New("no such host")
	}
	records := []fleet.Record{
		{Name: "a", Address: "known:1", Models: []string{"m"}},
		{Name: "b", Address: "gone:1", Models: []string{"m"}},
		{Address: "gone:2", Models: []string{"n"}},
	}
	look := func() {
		t.Helper()
		if err := s.set(t.Context(), records); err != nil {
			t.Fatal(err)
		}
	}
	names := func() (got string) {
		for _, l := range unresolved {
			got += " " + l.Name
		}
		return got
	}
	look()
	first := unresolved[0].Time
	look()
	if names() != " b gone:2" || len(all) != 1 || !unresolved[0].Time.Equal(first) {
		t.Errorf("without an address: %s; with one: %v", names(), all)
	}
	delete(addresses, "known") // it keeps its address
	if look(); names() != " b gone:2" || len(all) != 1 {
		t.Errorf("a lookup fails, and the workers without an address are%s, those with one %v", names(), all)
	}
	addresses["gone"] = netip.MustParseAddr("10.0.0.2")
	if look(); names() != "" || len(all) != 3 {
		t.Errorf("without an address: %s; with one: %v", names(), all)
	}
	begun, ended := strings.Count(log.String(), "cannot be looked up"), strings.Count(log.String(), "can be looked up again")
	if begun != 3 || ended != 2 {
		t.Errorf("the log has %d lookups that begin to fail and %d that are well again, want 3 and 2:\n%s", begun, ended, &log)
	}
}
