// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// Without events the router predicts caches from its requests. After a crash it has the predictions
// of its last save, and after a drain all of them.
func TestGuessesSurviveACrash(t *testing.T) {
	t.Parallel() // mostly waits
	dir := filepath.Join(t.TempDir(), "state", "of", "kvroute")
	flags := []string{"--no-kv-events", "--state-dir", dir, "--state-interval", "50ms"}
	d := startStack(t, 4, []string{"--speed", "20"}, flags...)
	system := strings.Repeat("You know all about caches. ", 40)
	worker := map[int]string{}
	for i := range 6 {
		content := fmt.Sprintf("%d %s", i, system)
		resp, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
		worker[i] = resp.Header.Get("X-Sim-Worker")
	}
	again := func(when string) {
		t.Helper()
		for i := range 6 {
			content := fmt.Sprintf("%d %s", i, system)
			resp, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
			if got := resp.Header.Get("X-Sim-Worker"); got != worker[i] || resp.Header.Get("X-Dynamo-Overlap-Blocks") == "0" {
				t.Errorf("%s conversation %d went to %s with %s blocks, want %s", when, i, got, resp.Header.Get("X-Dynamo-Overlap-Blocks"), worker[i])
			}
		}
	}
	again("the second time")

	// The second save from now contains everything that is known now.
	written := func() time.Time {
		info, err := os.Stat(filepath.Join(dir, guessFile))
		if err != nil {
			return time.Time{}
		}
		return info.ModTime()
	}
	for range 2 {
		before := written()
		eventually(t, "the state is not saved", func() bool { return written().After(before) })
	}
	kill(t, d.Router)
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	again("after a crash")

	// A drain saves the predictions since the last save.
	kill(t, d.Router)
	seldom := slices.Concat(flags, []string{"--state-interval", "1h"})
	if err := d.StartRouter(t.Context(), seldom...); err != nil {
		t.Fatal(err)
	}
	late := chatBody("late "+strings.Repeat("You know all about drains. ", 40), 4, false)
	resp, _ := reply(t, d, "POST", chatPath, late, nil)
	before := resp.Header.Get("X-Sim-Worker")
	d.Router.Stop()
	if err := d.StartRouter(t.Context(), seldom...); err != nil {
		t.Fatal(err)
	}
	again("after a drain")
	if resp, _ := reply(t, d, "POST", chatPath, late, nil); resp.Header.Get("X-Sim-Worker") != before || resp.Header.Get("X-Dynamo-Overlap-Blocks") == "0" {
		t.Errorf("after a drain the last conversation went to %s with %s blocks, want %s", resp.Header.Get("X-Sim-Worker"), resp.Header.Get("X-Dynamo-Overlap-Blocks"), before)
	}

	// A file of an older format is logged and counted, and kvroute serves without it.
	kill(t, d.Router)
	if err := os.WriteFile(filepath.Join(dir, guessFile), []byte("KVRGUES2 and what it said then"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	if log := d.Router.LastLines(); !strings.Contains(log, "a state file is refused") || !strings.Contains(log, `it begins with \"KVRGUES2\", want \"KVRGUES4\"`) {
		t.Errorf("the log does not report the file of an older format:\n%s", log)
	}
	if _, text := get(t, "http://"+d.Router.At.HTTP+"/metrics"); !regexp.MustCompile(`(?m)^kvroute_state_files_total\{[^}]*file="guesses"[^}]*outcome="refused"[^}]*\} 1$`).MatchString(text) {
		t.Error("the file is not counted as refused")
	}
	if resp, _ := reply(t, d, "POST", chatPath, chatBody("0 "+system, 4, false), nil); resp.StatusCode != 200 || resp.Header.Get("X-Dynamo-Overlap-Blocks") != "0" {
		t.Errorf("after the damage: status %d, overlap %s", resp.StatusCode, resp.Header.Get("X-Dynamo-Overlap-Blocks"))
	}
}
