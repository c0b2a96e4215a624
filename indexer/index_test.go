// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvroute/kvroute/indexer"
)

// TestScripts runs the scripts in testdata. Blocks are written external:local, or as one
// number for both.
func TestScripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatalf("%d scripts, %v", len(paths), err)
	}
	run := func(t *testing.T, path string) {
		x := indexer.New(indexer.Config{})
		workers := 3
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var worker int
			d.MaybeScanArgs(t, "worker", &worker)
			switch d.Cmd {
			case "new":
				var bound int
				d.ScanArgs(t, "max", &bound)
				x = indexer.New(indexer.Config{MaxBlocks: bound})
				return ""
			case "stored":
				ev := indexer.Event{Kind: indexer.Stored, HasParent: d.HasArg("parent"), Blocks: blocks(t, d.Input)}
				d.MaybeScanArgs(t, "parent", &ev.Parent)
				if d.HasArg("tier") {
					ev.Tier = indexer.HostPinned
				}
				return outcome(x.Apply(worker, ev))
			case "removed":
				return outcome(x.Apply(worker, indexer.Event{Kind: indexer.Removed, Externals: numbers(t, d.Input)}))
			case "cleared":
				return outcome(x.Apply(worker, indexer.Event{Kind: indexer.Cleared}))
			case "unknown-kind":
				return outcome(x.Apply(worker, indexer.Event{Blocks: blocks(t, d.Input)}))
			case "remove-worker":
				x.RemoveWorker(worker)
				return fmt.Sprintf("%d left\n", x.Blocks())
			case "match":
				dst := make([]int32, workers)
				x.Match(dst, numbers(t, d.Input))
				return fmt.Sprintln(dst)
			case "blocks":
				return fmt.Sprintf("%d in all, %d of worker %d\n", x.Blocks(), x.WorkerBlocks(worker), worker)
			}
			t.Fatalf("unknown command %q", d.Cmd)
			return ""
		})
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) { run(t, path) })
	}
}

func blocks(t *testing.T, s string) (out []indexer.Block) {
	for f := range strings.FieldsSeq(s) {
		external, local, _ := strings.Cut(f, ":")
		if local == "" {
			local = external
		}
		out = append(out, indexer.Block{External: number(t, external), Local: number(t, local)})
	}
	return out
}

func numbers(t *testing.T, s string) (out []uint64) {
	for f := range strings.FieldsSeq(s) {
		out = append(out, number(t, f))
	}
	return out
}

func number(t *testing.T, s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// outcome prints the non-zero fields of o.
func outcome(o indexer.Outcome) string {
	var parts []string
	for f := range strings.FieldsSeq(strings.Trim(fmt.Sprintf("%+v", o), "{}")) {
		if !strings.HasSuffix(f, ":0") {
			parts = append(parts, f)
		}
	}
	if len(parts) == 0 {
		return "nothing\n"
	}
	return strings.Join(parts, " ") + "\n"
}

func TestEventsOfNoWorkerAreCounted(t *testing.T) {
	x := indexer.New(indexer.Config{})
	got := x.Apply(-1, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	if want := (indexer.Outcome{Invalid: 1}); got != want {
		t.Errorf("outcome %+v, want %+v", got, want)
	}
	x.RemoveWorker(99) // an unknown worker: nothing happens
}
