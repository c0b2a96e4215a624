// SPDX-License-Identifier: Apache-2.0

package parts

import "testing"

func TestDecideLoadLeavesNothing(t *testing.T) {
	l := newDecideLoad()
	if rate := l.rate(1); rate <= 0 {
		t.Errorf("rate %v", rate)
	}
	for i, id := range l.ids {
		if l.router.Free(id) {
			t.Fatalf("request %d is still in flight", i)
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	l := newDecideLoad()
	b.ReportMetric(l.rate(max(1, b.N/decideRequests)), "decisions/s")
}
