// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
)

// Later versions replay a trace that version 0.1.0 writes. This version ignores keys that it does not know.
func TestGoldenTrace(t *testing.T) {
	name := filepath.Join(t.TempDir(), "trace.jsonl")
	f := traceFile{name: name, size: traceFileBytes}
	f.open()
	for _, l := range []traceLine{
		{mooncake{Timestamp: 1000, Input: 1024, Output: 20, HashIDs: []uint64{1<<53 - 1, 12}}, 150, 530},
		{mooncake{Timestamp: 2500, Input: 1100, Output: 1, HashIDs: []uint64{1<<53 - 1, 13, 14}, Session: 5}, 90, 90},
	} {
		f.write(&l)
	}
	f.close()
	written, err := os.ReadFile(name)
	if err != nil || f.err != nil {
		t.Fatal(err, f.err)
	}
	fixtures.Golden(t, "0.1.0/trace.jsonl", written, func(data []byte) ([]Request, error) {
		trace, err := readMooncake("trace", bytes.NewReader(data))
		if err != nil {
			return nil, err
		}
		return trace.Requests, nil
	}, []Request{
		{At: time.Second, Input: 1024, Output: 20, Blocks: []int32{0, 1}},
		{At: 2500 * time.Millisecond, Session: 5, Input: 1100, Output: 1, Blocks: []int32{0, 2, 3}},
	}, fixtures.Later)
}
