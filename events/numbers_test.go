// SPDX-License-Identifier: Apache-2.0

package events

import (
	"fmt"
	"math/bits"
	"os"
	"strings"
	"testing"
	"time"
)

// docs/protocol.md has the numbers of the code.
func TestNumbersInTheDocs(t *testing.T) {
	page, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	number := func(n int) string {
		if n < 1000 {
			return fmt.Sprint(n)
		}
		return fmt.Sprintf("%d,%03d", n/1000, n%1000)
	}
	blocks := func(n int) string { return fmt.Sprintf("2^%d blocks", bits.Len(uint(n))-1) }
	span := func(d time.Duration) string {
		if d < time.Second {
			return fmt.Sprintf("%d ms", d.Milliseconds())
		}
		return fmt.Sprintf("%d s", int(d.Seconds()))
	}
	for _, text := range []string{
		fmt.Sprintf("tries %d times, at first after %s, doubling to %s", maxTries, span(firstBackoff), span(lastBackoff)),
		fmt.Sprintf("no answer within %s", span(queryTimeout)),
		fmt.Sprintf("a local indexer after %d to %s", (gapSpread / 5).Milliseconds(), span(gapSpread/5+gapSpread)),
		fmt.Sprintf("more than %s events or %s of a rank wait (an engine's: %s batches or %d MiB), or %s of all ranks",
			number(maxHeldEvents), blocks(maxHeldBlocks), number(maxHeldEvents), maxHeldBlocks*blockBytes>>20, blocks(maxAllHeld)),
		fmt.Sprintf("after %d min without a loss", int(partialFor.Minutes())),
		fmt.Sprintf("ignores the other publishers for %s", span(rejectFor)),
		fmt.Sprintf("waits up to %s for the record", span(maxWait)),
		fmt.Sprintf("%s for each worker, %d such workers, %s", number(maxWaitingEvents), maxWaitingWorkers, span(maxWait)),
		fmt.Sprintf("at most %d open queries, %d of them for dumps", maxQueries, maxDumps),
		fmt.Sprintf("%s after a gap, %s at discovery", span(gapSpread), span(discoverySpread)),
		fmt.Sprintf("all workers within %s", span(auditSpread)),
		map[int]string{2: "from a replay socket at most twice"}[maxAgain],
		map[time.Duration]string{time.Minute: "about once a minute"}[suspectEvery],
	} {
		if text == "" || !strings.Contains(string(page), text) {
			t.Errorf("the page lacks %q", text)
		}
	}
}
