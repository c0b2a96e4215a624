// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"encoding/json"
	"testing"

	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// Later versions read the keys of version 0.1.0 in the bucket of the stream's state.
func TestGoldenKeys(t *testing.T) {
	for file, v := range map[string]any{"epoch.json": durable.GoldenEpoch, "head.json": durable.GoldenHead} {
		data, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		read := func(data []byte) (any, error) { return durable.ReadKey(file, data) }
		fixtures.Golden(t, "0.1.0/"+file, data, read, v, fixtures.Later)
	}
}
