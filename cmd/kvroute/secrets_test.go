// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
)

// Files with secrets that everybody can read are named at the start.
func TestReadersOfSecretsAreNamed(t *testing.T) {
	t.Parallel()
	file, dir := writeFile(t, "0123456789abcdef"), t.TempDir()
	c := defaults()
	c.APITokenFile, c.NATSCreds, c.StateDir = file, "/no/such/file", dir
	for _, s := range []struct {
		file, dir os.FileMode
		want      int
	}{{0o600, 0o700, 0}, {0o640, 0o750, 0}, {0o644, 0o700, 1}, {0o600, 0o755, 1}, {0o602, 0o777, 2}} {
		for path, mode := range map[string]os.FileMode{file: s.file, dir: s.dir} {
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
		}
		var out strings.Builder
		c.warnOfReaders(slog.New(slog.NewTextHandler(&out, nil)))
		if n := strings.Count(out.String(), "chmod o-rwx"); n != s.want {
			t.Errorf("modes %v and %v: %d warnings, want %d: %s", s.file, s.dir, n, s.want, out.String())
		}
	}
}

// kvroute explain prints no control characters of names.
func TestExplainPrintsNoControlCharacters(t *testing.T) {
	t.Parallel()
	const evil = "w\x1b[2J\n\tx\u009b"
	leg := &api.Decision{Decision: router.Decision{WorkerName: evil}}
	d := &api.Decision{
		Decision: router.Decision{ID: evil, Model: evil, WorkerName: evil, Time: time.Unix(1000, 0)}, Prefill: leg, ReasonText: evil,
		Candidates: []api.Candidate{{Candidate: router.Candidate{WorkerName: evil}, VerdictText: evil}},
	}
	var out strings.Builder
	if err := printExplained(&out, d); err != nil {
		t.Fatal(err)
	}
	if text := out.String(); strings.ContainsAny(text, "\x1b\u009b") || strings.Count(text, "w?[2J??x?") < 6 {
		t.Errorf("printed %q", text)
	}
}
