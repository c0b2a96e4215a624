// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// codeBlock returns the first block of code of a language in a page.
func codeBlock(t *testing.T, name, language string) string {
	t.Helper()
	_, text, found := strings.Cut(page(t, name), "```"+language+"\n")
	text, _, ends := strings.Cut(text, "```")
	if !found || !ends {
		t.Fatalf("docs/%s.md has no block of %s", name, language)
	}
	return text
}

// The Go program of docs/library.md prints what the page says.
func TestLibraryPageInGo(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	file := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(file, []byte(codeBlock(t, "library", "go")), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "go", "run", file).CombinedOutput() // in this module
	_, want, _ := strings.Cut(page(t, "library"), "```\n```\n")
	if want, _, _ = strings.Cut(want, "```"); err != nil || string(out) != want {
		t.Errorf("%v: printed %s\nwant %s", err, out, want)
	}
}
