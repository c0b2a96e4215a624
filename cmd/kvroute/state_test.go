// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/wire"
)

// kvroute logs and counts a state file of an older format, and serves without it.
func TestAnOlderStateFileIsRefused(t *testing.T) {
	t.Parallel() // mostly waits
	dir := t.TempDir()
	file := filepath.Join(dir, wire.Scope{}.Bucket(eventFile))
	if err := os.WriteFile(file, []byte("KVRIDXS1 and the data of an older format"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := startStack(t, 1, []string{"--speed", "20"}, "--state-dir", dir)
	if log := d.Router.LastLines(); !strings.Contains(log, "a state file is refused") || !strings.Contains(log, `it begins with \"KVRIDXS1\", want `) {
		t.Errorf("the log does not report the file of an older format:\n%s", log)
	}
	if _, text := get(t, "http://"+d.Router.At.HTTP+"/metrics"); !regexp.MustCompile(`(?m)^kvroute_state_files_total\{[^}]*file="events"[^}]*outcome="refused"[^}]*\} 1$`).MatchString(text) {
		t.Error("the file is not counted as refused")
	}
	if resp, _ := reply(t, d, "POST", chatPath, chatBody("anything", 4, false), nil); resp.StatusCode != 200 || resp.Header.Get("X-Dynamo-Overlap-Blocks") != "0" {
		t.Errorf("with a refused file: status %d, overlap %s", resp.StatusCode, resp.Header.Get("X-Dynamo-Overlap-Blocks"))
	}
}
