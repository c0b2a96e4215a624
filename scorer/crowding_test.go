// SPDX-License-Identifier: Apache-2.0

package scorer_test

import (
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

// A worker whose engine has no free place in its batch gets no request because of a
// cached prefix. This applies only if the batch size is known.
func TestFullBatchOutweighsThePrefix(t *testing.T) {
	s := scorer.Defaults()
	r := scorer.Request{PromptTokens: 8000, BlockSize: 16}
	costs := make([]float64, 2)
	for _, c := range []struct{ active, most, want int }{
		{100, 256, 0}, // room: the prefix wins
		{229, 256, 0}, // up to nine tenths of the batch
		{256, 256, 1}, // the batch is full
		{256, 0, 0},   // the batch size is unknown
	} {
		in := []scorer.Input{
			{OverlapBlocks: 450, ActiveRequests: c.active, MaxRequests: c.most},
			{ActiveRequests: 50, MaxRequests: c.most},
		}
		if got := s.Choose(&r, in, costs); got != c.want {
			t.Errorf("%d of %d requests on the worker with the prefix: candidate %d of costs %v, want %d", c.active, c.most, got, costs, c.want)
		}
	}
}
