// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Two tiers lose NATS while they run: both groups stay candidates, by the requests sent to them and
// their last summary. Their summaries arrive again when NATS is back, also at an upper tier that was
// killed and restarted meanwhile. It then finds the groups' cached prompts again.
func TestTwoTiersLoseNATSAndTheUpperOne(t *testing.T) {
	t.Parallel() // mostly waits
	store := t.TempDir()
	at := heldAddress(t)
	bus, err := startNATS(at, store)
	if err != nil {
		t.Fatal(err)
	}
	at = strings.TrimPrefix(bus.URL(), "nats://") // with the password, which stays when the bus restarts
	t.Cleanup(func() { bus.Stop() })
	d := newStack(t, 0, nil)
	var file strings.Builder
	fmt.Fprintf(&file, "version: 1\ncomponent: tier\nmodels:\n- {name: sim, tokenizer: %q}\ngroups:\n", modelFolder(t))
	groups := map[string]*demonstration{}
	for _, name := range []string{"east", "west"} {
		// On a busy machine a summary may come seconds late.
		g := startGroup(t, bus, name, "", "--group-interval", "2s")
		groups[name] = g
		d.EnvoyConfig.Pool = append(d.EnvoyConfig.Pool, strings.TrimPrefix(g.Envoy.URL(), "http://"))
		fmt.Fprintf(&file, "- {name: %s, address: %q}\n", name, d.EnvoyConfig.Pool[len(d.EnvoyConfig.Pool)-1])
	}
	flags := []string{"--config", writeFile(t, file.String()), "--nats-url", bus.URL(), "--group-probe-budget", "1s"}
	d.begin(t, flags...)
	heard := func(when string, want bool) {
		t.Helper()
		eventually(t, when, func() bool {
			all := workers(t, d)
			return len(all) == 2 && !slices.ContainsFunc(all, func(w router.WorkerState) bool {
				return w.Summary.Stale == want || want && (!w.Summary.Filtered || w.Summary.Members != 2)
			})
		})
	}
	blocks := map[string]int{} // of the prompts sent so far, by group
	serve := func(when string) (served map[int]string) {
		t.Helper()
		served = map[int]string{}
		for i := range 8 {
			resp, body := reply(t, d, "POST", chatPath, chatBody(fmt.Sprint(i, strings.Repeat(" a prefix to be found again", 50)), 2, true), nil)
			name, _, _ := strings.Cut(resp.Header.Get("X-Sim-Worker"), "-")
			if resp.StatusCode != 200 || groups[name] == nil {
				t.Fatalf("%s: request %d: status %d from %q: %.200s", when, i, resp.StatusCode, name, body)
			}
			got := newest(t, d)
			if got.Group != name {
				t.Errorf("%s: request %d: the upper tier chose %q, %s served", when, i, got.Group, name)
			}
			served[i] = name
			blocks[name] += got.PromptBlocks
		}
		return served
	}
	heard("the groups are not heard", true)
	home := serve("with NATS")
	summarized(t, d, groups, blocks)

	bus.Server.Shutdown()
	bus.Server.WaitForShutdown()
	heard("groups that nobody can hear are not stale", false)
	for i, name := range serve("without NATS") {
		if name != home[i] {
			t.Errorf("without NATS: conversation %d is in %s, and goes to %s", i, home[i], name)
		}
	}
	if bus, err = startNATS(at, store); err != nil {
		t.Fatal(err)
	}
	heard("the groups are not heard after NATS was away", true)

	kill(t, d.Router)
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	heard("an upper tier that was started again does not hear the groups", true)
	for i, name := range serve("after a restart") {
		if name != home[i] {
			t.Errorf("after a restart: conversation %d is in %s, and goes to %s", i, home[i], name)
		}
	}
}

// summarized waits until the upper router has a summary of each group that was made after the
// group's index had the prompts' blocks: from then on the summaries alone route a conversation to
// its group.
func summarized(t *testing.T, d *demonstration, groups map[string]*demonstration, blocks map[string]int) {
	t.Helper()
	for name, g := range groups {
		eventually(t, "the index of "+name+" does not have the blocks of its prompts", func() bool {
			cached := 0
			for _, w := range workers(t, g) {
				cached += w.CachedBlocks
			}
			return cached >= blocks[name]
		})
	}
	indexed := time.Now()
	eventually(t, "there is no summary that is newer than the groups' blocks", func() bool {
		return !slices.ContainsFunc(workers(t, d), func(w router.WorkerState) bool { return time.Since(indexed) <= w.Summary.Age })
	})
}
