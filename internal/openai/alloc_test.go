// SPDX-License-Identifier: Apache-2.0

//go:build !race

package openai_test

import (
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
)

// Parse runs for every request, so it must not allocate.
func TestParseDoesNotAllocate(t *testing.T) {
	body := chat(10_000)
	n := testing.AllocsPerRun(100, func() {
		if _, err := openai.Parse(openai.ChatCompletions, body); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("Parse makes %v allocations, want 0", n)
	}
}
