// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestPath plays one plain chat (plainchat.go), and lists the files of extproc and router
// whose code ran between Envoy's first message and the answer with the worker's header.
func TestPath(t *testing.T) {
	files := plainChatFiles(t)
	for _, f := range files {
		t.Log(f)
	}
	for _, folder := range []string{"extproc", "router"} {
		n := 0
		for _, f := range files {
			if strings.HasPrefix(f, folder+"/") {
				n++
			}
		}
		t.Logf("%d files of %s", n, folder)
	}
}

// plainChatFiles returns the files of extproc and router whose code ran in plainchat.go, sorted.
func plainChatFiles(t *testing.T) (ran []string) {
	t.Helper()
	dir := t.TempDir()
	program, profile := filepath.Join(t.TempDir(), "plainchat"), filepath.Join(t.TempDir(), "profile")
	run(t, "go", "build", "-cover", "-covermode=atomic", "-coverpkg="+module+"/extproc,"+module+"/router,command-line-arguments", "-o="+program, "plainchat.go")
	run(t, program, dir)
	run(t, "go", "tool", "covdata", "textfmt", "-i="+dir, "-o="+profile)
	text, err := os.ReadFile(profile)
	if err != nil {
		t.Fatal(err)
	}
	// A line is file:from,to statements count.
	for line := range strings.Lines(string(text)) {
		file, rest, ok := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		name, ours := strings.CutPrefix(file, module+"/") // the program itself is not of the module
		if ok && ours && len(fields) == 3 && fields[2] != "0" {
			ran = append(ran, name)
		}
	}
	slices.Sort(ran)
	ran = slices.Compact(ran)
	if len(ran) == 0 {
		t.Fatalf("the profile has no executed block:\n%s", text)
	}
	return ran
}

func run(t *testing.T, command ...string) {
	t.Helper()
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
}
