// SPDX-License-Identifier: Apache-2.0

package parts

import "testing"

func TestDecideLoadLeavesNothing(t *testing.T) {
	l, err := newDecideLoad(false)
	if err != nil {
		t.Fatal(err)
	}
	for _, hashed := range []bool{false, true} {
		if rate, err := l.rate(hashed, 1); err != nil || rate <= 0 {
			t.Errorf("rate %v, %v", rate, err)
		}
	}
	for i, id := range l.ids {
		if l.router.Free(id) {
			t.Fatalf("request %d is still in flight", i)
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	l, err := newDecideLoad(false)
	if err != nil {
		b.Fatal(err)
	}
	for name, hashed := range map[string]bool{"tokens": false, "hashes": true} {
		b.Run(name, func(b *testing.B) {
			rounds := max(1, b.N/decideRequests)
			rate, err := l.rate(hashed, rounds)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(rate, "decisions/s")
		})
	}
}
