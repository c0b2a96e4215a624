// SPDX-License-Identifier: Apache-2.0

package arch_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// `make fuzz` runs each target, and fails if any of them fails, not only the last one.
func TestFuzzFailsWithAnyTarget(t *testing.T) {
	dir := t.TempDir()
	const command = "#!/bin/sh\ncase \"$*\" in *$BROKEN*) exit 1;; esac\n"
	if err := os.WriteFile(filepath.Join(dir, "go"), []byte(command), 0o700); err != nil {
		t.Fatal(err)
	}
	fuzz := func(broken string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", "-C", filepath.Join("..", ".."), "fuzz")
		// Not those of the make that may run this test.
		env := slices.DeleteFunc(os.Environ(), func(v string) bool {
			name, _, _ := strings.Cut(v, "=")
			return slices.Contains([]string{"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}, name)
		})
		cmd.Env = append(env, "PATH="+dir+":"+os.Getenv("PATH"), "BROKEN="+broken)
		text, err := cmd.CombinedOutput()
		return string(text), err
	}
	text, err := fuzz("none")
	if err != nil {
		t.Fatalf("no target fails: %v\n%s", err, text)
	}
	_, first, _ := strings.Cut(text, " ")
	first, rest, _ := strings.Cut(first, "\n")
	if text, err := fuzz(first + "\\$"); err == nil || !strings.Contains(text, "failed: "+first) || strings.Count(text, "\n") <= strings.Count(rest, "\n") {
		t.Errorf("%s fails: error %v, output:\n%s", first, err, text)
	}
}
