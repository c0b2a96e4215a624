// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
)

// Each source replaces its own faults of a worker only, and a removed worker has none when it returns.
func TestFaultsOfWorkers(t *testing.T) {
	r, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	info := WorkerInfo{ID: 1, Address: netip.MustParseAddrPort("10.0.0.1:8000"), Models: []string{"m"}, BlockSize: 16}
	r.SetFaults(1, "engine", []Fault{{"early", "the worker is not known yet"}})
	if err := r.SetWorker(info); err != nil {
		t.Fatal(err)
	}
	shows := func(want ...Fault) {
		t.Helper()
		if got := r.Workers()[0].Faults; !reflect.DeepEqual(got, want) {
			t.Errorf("faults %v, want %v", got, want)
		}
	}
	shows()
	r.SetFaults(1, "engine", []Fault{{"model_not_served", "b"}, {"block_size", "a"}})
	r.SetFaults(1, "answers", []Fault{{"errors", "c"}})
	shows(Fault{"block_size", "a"}, Fault{"errors", "c"}, Fault{"model_not_served", "b"})
	r.SetFaults(1, "engine", nil)
	shows(Fault{"errors", "c"})
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
