// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// A file is read once for each change, when it has stopped changing. A file that was replaced,
// relinked, added or removed counts as changed.
func TestWatch(t *testing.T) {
	folder := t.TempDir()
	path := func(name string) string { return filepath.Join(folder, name) }
	clock := time.Now().Add(-time.Hour)
	put := func(name, text string) {
		t.Helper()
		clock = clock.Add(time.Second)
		if err := os.WriteFile(path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path(name), clock, clock); err != nil {
			t.Fatal(err)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	put("one", "a")
	put("other", "a")
	must(syscall.Mkfifo(path("pipe"), 0o600))
	must(os.Symlink("one", path("config")))
	w := newWatch(clock, path("config"), "", path("token"), path("pipe"))
	looks := func(what string, want ...bool) {
		t.Helper()
		for i, want := range want {
			if got := w.changed(); got != want {
				t.Errorf("%s: look %d: changed is %v, want %v", what, i+1, got, want)
			}
		}
	}
	looks("nothing happens", false, false)
	put("one", "b")
	looks("it is written", false, true, false, false)
	put("one", "half")
	looks("it is being written", false)
	put("one", "half of it")
	looks("it is written on", false, true, false)
	put("one", "c")
	w.taken()
	looks("it was read for another reason", false, false)
	put("new", "d")
	must(os.Rename(path("new"), path("one")))
	looks("it is replaced", false, true, false)
	must(os.Remove(path("config")))
	must(os.Symlink("other", path("config")))
	looks("the link leads elsewhere", false, true, false)
	must(os.Remove(path("other")))
	looks("it is gone", false, true, false)
	put("other", "e")
	looks("it is back", false, true, false)
	put("token", "secret")
	looks("the second one comes", false, true, false)

	before := clock.Add(-time.Millisecond)
	w = newWatch(before, path("config"), path("token"))
	looks("it changed before the first look", true, false)
}
