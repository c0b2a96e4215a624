// SPDX-License-Identifier: Apache-2.0

package parts

import "testing"

func TestDecideLoadLeavesNothing(t *testing.T) {
	l := newDecideLoad(false)
	for _, hashed := range []bool{false, true} {
		if rate := l.rate(hashed, 1); rate <= 0 {
			t.Errorf("rate %v", rate)
		}
	}
	for i, id := range l.ids {
		if l.router.Free(id) {
			t.Fatalf("request %d is still in flight", i)
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	l := newDecideLoad(false)
	for name, hashed := range map[string]bool{"tokens": false, "hashes": true} {
		b.Run(name, func(b *testing.B) {
			rounds := max(1, b.N/decideRequests)
			b.ReportMetric(l.rate(hashed, rounds), "decisions/s")
		})
	}
}
