// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// The example message of docs/protocol.md is what a publisher sends, and its hashes are right.
func TestProtocolPageExample(t *testing.T) {
	text, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n### Example\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var hashes []uint64
	for _, row := range regexp.MustCompile("(?m)^\\| (\\[[0-9, ]+\\]) \\| `?([a-z0-9-]*?)`? \\| `?([a-z0-9-]*?)`? \\| ([0-9]+) \\|$").FindAllStringSubmatch(section, -1) {
		var tokens []uint32
		if err := json.Unmarshal([]byte(row[1]), &tokens); err != nil {
			t.Fatal(err)
		}
		got := indexer.AppendLocalHashes(nil, tokens, len(tokens), indexer.Seed(row[2], row[3]))[0]
		if want := strconv.FormatUint(got, 10); row[4] != want {
			t.Errorf("%v with adapter %q and salt %q: the page has %s, want %s", tokens, row[2], row[3], row[4], want)
		}
		hashes = append(hashes, got)
	}
	if !ok || len(hashes) != 4 {
		t.Fatalf("the page has %d hashes, want 4", len(hashes))
	}
	want := hex.EncodeToString(events.AppendEnvelope(nil, events.Envelope{
		PublisherID: 7, PublishedAt: 1763971200000, Topic: "kv-events",
		Payload: events.AppendEvents(nil, []events.RouterEvent{{
			WorkerID: 9, EventID: 1,
			Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 101, Local: hashes[0]}, {External: 102, Local: hashes[1]}}},
		}}),
	}))
	blocks := regexp.MustCompile("(?s)```\n([0-9a-f\n]+)```").FindStringSubmatch(section)
	if blocks == nil || strings.ReplaceAll(blocks[1], "\n", "") != want {
		var lines []string
		for part := range slices.Chunk([]byte(want), 120) {
			lines = append(lines, string(part))
		}
		t.Errorf("the message of the page differs, want:\n%s", strings.Join(lines, "\n"))
	}
}
