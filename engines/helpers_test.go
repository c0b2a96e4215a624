// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/natstest"
)

// Some of these helpers are also in the tests of package events.

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// shared returns the folder of captured frames, or "" if it is absent.
func shared(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("KVROUTE_SHARED")
	if dir == "" {
		dir = "../../shared"
	}
	if _, err := os.Stat(dir); err != nil {
		if os.Getenv("KVROUTE_SHARED_REQUIRED") != "" {
			t.Fatalf("captured frames are required: %v", err)
		}
		return ""
	}
	return filepath.Join(dir, "data", "vectors")
}

// seeds returns the number of random worlds that a test plays: all in the long form, otherwise a
// fifth.
func seeds(all int) uint64 {
	if fixtures.Long() {
		return uint64(all)
	}
	return uint64(max(3, all/5))
}

func firstDifference(got, want []string) string {
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i] != want[i] {
			return fmt.Sprintf("line %d: got %v, want %v", i, got[min(i, len(got)):min(i+3, len(got))], want[min(i, len(want)):min(i+3, len(want))])
		}
	}
	return "no difference"
}

// bus starts a NATS server and connects to it.
func bus(t *testing.T) *nats.Conn {
	t.Helper()
	return natstest.Connect(t, natstest.Start(t, 0))
}

// running runs a function until the test ends or stop is called.
func running(t *testing.T, run func(context.Context) error) (stop func()) {
	t.Helper()
	return natstest.Run(t, run)
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	natstest.Eventually(t, ok)
}
