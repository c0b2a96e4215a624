// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/fleet"
)

func TestNamesStandForTheirAddresses(t *testing.T) {
	addresses := map[string]string{"engines.local": "10.0.0.2 10.0.0.1 ::ffff:10.0.0.2", "six": "fd00::1"}
	asked := 0
	n := fleet.Names{Lookup: func(_ context.Context, host string) (list []netip.Addr, err error) {
		asked++
		text, ok := addresses[host]
		if !ok {
			return nil, errors.New("no such host: " + host)
		}
		for a := range strings.FieldsSeq(text) {
			list = append(list, netip.MustParseAddr(a))
		}
		return list, nil
	}}
	at := func(name, address string) fleet.Record {
		r := record(name)
		r.Address = address
		return r
	}
	records := []fleet.Record{at("plain", "10.9.9.9:1"), at("a", "engines.local:8000"), at("", "engines.local:8001"), at("c", "six:80"), at("v6", "[fd00::2]:80"), at("bad", "engines.local")}
	records[3].Host = "own.example"
	resolve := func() (text string, failed int) {
		t.Helper()
		all, errs := n.Resolve(t.Context(), records)
		var lines []string
		for _, r := range all {
			lines = append(lines, r.Name+"="+r.Address)
			if strings.HasPrefix(r.Name, "a@") && r.Host != "engines.local:8000" || strings.HasPrefix(r.Name, "c@") && r.Host != "own.example" || r.Name == "plain" && r.Host != "" {
				t.Errorf("%s has the Host %q", r.Name, r.Host)
			}
		}
		return strings.Join(lines, " "), len(errs)
	}
	const want = "plain=10.9.9.9:1 a@10.0.0.1:8000=10.0.0.1:8000 a@10.0.0.2:8000=10.0.0.2:8000 10.0.0.1:8001=10.0.0.1:8001 10.0.0.2:8001=10.0.0.2:8001 c@[fd00::1]:80=[fd00::1]:80 v6=[fd00::2]:80 bad=engines.local"
	if got, failed := resolve(); got != want || failed != 0 || asked != 2 {
		t.Errorf("%d failed, %d questions:\n%s, want\n%s", failed, asked, got, want)
	}
	delete(addresses, "six")
	addresses["engines.local"] = "10.0.0.1 10.0.0.3"
	if got, failed := resolve(); failed != 1 || !strings.Contains(got, "c@[fd00::1]:80") || !strings.Contains(got, "a@10.0.0.3:8000") || strings.Contains(got, "10.0.0.2") {
		t.Errorf("%d failed: %s", failed, got)
	}
	if resolve(); !n.Some(records) || n.Some(records[:1]) {
		t.Error("the wrong records have names")
	}
	if got, failed := resolve(); failed != 1 || !strings.Contains(got, "c@[fd00::1]:80") {
		t.Errorf("what a name stood for is forgotten: %s", got)
	}
}
