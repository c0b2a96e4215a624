// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"
)

// Each source replaces its own faults of a worker only, and a removed worker has none when it returns.
func TestFaultsOfWorkers(t *testing.T) {
	now := time.Unix(1000, 0)
	r, err := New(Config{Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	info := WorkerInfo{ID: 1, Address: netip.MustParseAddrPort("10.0.0.1:8000"), Models: []string{"m"}, BlockSize: 16}
	r.SetFaults(1, "engine", []Fault{{What: "early", Text: "the worker is not known yet"}})
	if err := r.SetWorker(info); err != nil {
		t.Fatal(err)
	}
	shows := func(want ...Fault) {
		t.Helper()
		got := r.Workers()[0].Faults
		for i := range got {
			got[i].Since = time.Time{}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("faults %v, want %v", got, want)
		}
	}
	shows()
	r.SetFaults(1, "engine", []Fault{{What: "model_not_served", Text: "b"}, {What: "block_size", Text: "a"}})
	r.SetFaults(1, "answers", []Fault{{What: "errors", Text: "c"}})
	shows(Fault{What: "block_size", Text: "a"}, Fault{What: "errors", Text: "c"}, Fault{What: "model_not_served", Text: "b"})
	now = now.Add(time.Hour)
	r.SetFaults(1, "answers", []Fault{{What: "new", Text: "e"}, {What: "errors", Text: "d"}, {What: "older", Since: now.Add(-time.Minute)}})
	for what, want := range map[string]time.Time{"errors": time.Unix(1000, 0), "new": now, "older": now.Add(-time.Minute)} {
		if all := r.Workers()[0].Faults; !slices.ContainsFunc(all, func(f Fault) bool { return f.What == what && f.Since.Equal(want) }) {
			t.Errorf("%s does not begin at %v: %+v", what, want, all)
		}
	}
	r.SetFaults(1, "answers", []Fault{{What: "errors", Text: "c"}})
	r.SetFaults(1, "engine", nil)
	shows(Fault{What: "errors", Text: "c"})
	many := make([]Fault, 100)
	for i := range many {
		many[i].What = fmt.Sprint(i)
	}
	r.SetFaults(1, "engine", many)
	if got := len(r.Workers()[0].Faults); got != maxFaults+1 {
		t.Errorf("%d faults are kept, want %d", got, maxFaults+1)
	}
	r.RemoveWorker(1)
	if err := r.SetWorker(info); err != nil {
		t.Fatal(err)
	}
	shows()
}
