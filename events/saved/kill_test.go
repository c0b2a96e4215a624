// SPDX-License-Identifier: Apache-2.0

package saved_test

import (
	"bufio"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/wire"
)

const saveInto = "KVROUTE_TEST_SAVE_INTO"

// A process that is killed while it saves leaves the file before, or the new one, of each kind.
func TestKilledWhileSaving(t *testing.T) {
	if dir := os.Getenv(saveInto); dir != "" {
		saveForever(t, dir)
	}
	dir := t.TempDir()
	var into [2]int
	for i := range 20 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledWhileSaving$")
		cmd.Env = append(os.Environ(), saveInto+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil || cmd.Start() != nil {
			t.Fatal("the process does not start", err)
		}
		if _, err := bufio.NewReader(out).ReadString('\n'); err != nil { // both files are saved
			t.Fatal(err)
		}
		time.Sleep(rand.N(10 * time.Millisecond)) // at any moment of a save
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // the error says that it was killed
		for kind, name := range []string{"events", "sources"} {
			data, err := os.ReadFile(dir + "/" + name)
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := readAll(data, wire.Scope{}); err != nil {
				t.Fatalf("kill %d, %s: %v", i, name, err)
			}
			if _, err := os.Stat(dir + "/" + name + ".tmp"); err == nil {
				into[kind]++
			}
		}
	}
	if into[0]+into[1] == 0 {
		t.Error("no kill came during a save: nothing was tested")
	}
	t.Log("killed while a file was written, by kind:", into)
}

// saveForever saves a snapshot of the bus and one of engines until the process is killed.
func saveForever(t *testing.T, dir string) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	for seed := uint64(0); ; seed++ {
		rng := rand.New(rand.NewPCG(seed, 1))
		index, ranks := randomIndex(rng)
		owners, _ := randomOwners(rng)
		for name, s := range map[string]*events.Snapshot{
			"events": {
				Created: time.Now(), Ranks: make([]events.RankName, ranks), Meta: events.SnapshotMeta{Pools: make([]events.SnapshotPool, 1)},
				Runs: func(yield func(int, indexer.Run) bool) {
					for r := range index.Dump() {
						if !yield(0, r) {
							return
						}
					}
				},
			},
			"sources": {Created: time.Now(), Owners: slices.Values(owners)},
		} {
			if err := records.WriteFile(root, name, func(w io.Writer) error {
				_, err := saved.Write(w, wire.Scope{}, s)
				return err
			}); err != nil {
				t.Fatal(err)
			}
		}
		if seed == 0 {
			_, _ = os.Stdout.WriteString("saved\n")
		}
	}
}
