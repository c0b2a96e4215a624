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

// pathLimit limits the files of extproc and router whose code a plain chat runs. Before a decision was made of
// values they were 14 and 25.
const pathLimit = 19

// TestPath plays one plain chat (plainchat.go), and lists the files of extproc and router whose code ran
// between Envoy's first message and the answer with the worker's header. ARCHITECTURE.md must print the
// same files, in any order.
func TestPath(t *testing.T) {
	ran := plainChatFiles(t)
	for folder, names := range byFolder(ran) {
		t.Logf("%s, %d files: %s", folder, len(names), strings.Join(names, " "))
	}
	if len(ran) > pathLimit {
		t.Errorf("a plain chat runs code of %d files, at most %d may", len(ran), pathLimit)
	}
	text, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range brokenPath(ran, string(text)) {
		t.Error(b)
	}
}

func TestPathCanFail(t *testing.T) {
	const text = "```\nextproc: a.go b.go\nrouter: c.go\n```\n"
	for want, ran := range map[string][]string{
		"":                                      {"extproc/a.go", "extproc/b.go", "router/c.go"},
		"ARCHITECTURE.md must list router/d.go": {"extproc/a.go", "extproc/b.go", "router/c.go", "router/d.go"},
		"ARCHITECTURE.md must not list extproc/b.go": {"extproc/a.go", "router/c.go"},
	} {
		if got := strings.Join(brokenPath(ran, text), "\n"); !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("%v gives %q, want %q", ran, got, want)
		}
	}
}

// brokenPath returns a sentence for each difference between the files that ran and those in the text,
// in lines such as "extproc: stream.go answer.go".
func brokenPath(ran []string, text string) (broken []string) {
	var listed []string
	for line := range strings.Lines(text) {
		folder, names, _ := strings.Cut(line, ": ")
		if folder != "extproc" && folder != "router" {
			continue
		}
		for name := range strings.FieldsSeq(names) {
			listed = append(listed, folder+"/"+name)
			if !slices.Contains(ran, folder+"/"+name) {
				broken = append(broken, "ARCHITECTURE.md must not list "+folder+"/"+name+": a plain chat runs no code of it")
			}
		}
	}
	for _, name := range ran {
		if !slices.Contains(listed, name) {
			broken = append(broken, "ARCHITECTURE.md must list "+name+": a plain chat runs its code")
		}
	}
	return broken
}

// byFolder returns the files' names by their folder.
func byFolder(files []string) map[string][]string {
	folders := map[string][]string{}
	for _, f := range files {
		folders[filepath.Dir(f)] = append(folders[filepath.Dir(f)], filepath.Base(f))
	}
	return folders
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
