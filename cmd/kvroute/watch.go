// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
	"time"
)

// watchEvery is how often files are looked at. One that has changed is read when it is the
// same at two looks, so that one that is being written is not: up to twice as long.
const watchEvery = 2 * time.Second

// watch looks whether files have changed: their times, sizes, or what is behind a link. What
// is not a regular file, such as a pipe, is not watched.
type watch struct {
	files      []string
	read, seen []stamp // when they were read, and at the last look
}

// stamp is what tells a file from what it was; the zero stamp is that of no file.
type stamp struct {
	changed time.Time
	size    int64
}

// newWatch watches files that were read after a time; one that has changed since counts as
// changed. Files without a name are none.
func newWatch(after time.Time, files ...string) *watch {
	w := &watch{files: slices.DeleteFunc(files, func(f string) bool { return f == "" })}
	w.taken()
	for i := range w.read {
		if w.read[i].changed.After(after) {
			w.read[i] = stamp{size: -1} // that of no look
		}
	}
	return w
}

func (w *watch) look() []stamp {
	all := make([]stamp, len(w.files))
	for i, name := range w.files {
		if info, err := os.Stat(name); err == nil && info.Mode().IsRegular() {
			all[i] = stamp{info.ModTime(), info.Size()}
		}
	}
	return all
}

// taken says that the files are read now.
func (w *watch) taken() {
	w.read = w.look()
	w.seen = slices.Clone(w.read)
}

// changed looks at the files. If it returns true they are to be read now.
func (w *watch) changed() bool {
	now := w.look()
	settled := slices.Equal(now, w.seen)
	w.seen = now
	if !settled || slices.Equal(now, w.read) {
		return false
	}
	w.read = slices.Clone(now)
	return true
}
