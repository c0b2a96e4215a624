// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/bus"
)

// Run follows the store until ctx ends.
func (d *Dynamo) Run(ctx context.Context) error {
	switch {
	case d.conf.Etcd.on():
		return d.followEtcd(ctx)
	case d.conf.Kubernetes != nil:
		return d.followKubernetes(ctx)
	}
	d.Read()
	for bus.Wait(ctx, filesEvery) {
		d.Read()
	}
	return nil
}

// Read reads a file store once, and passes on the new view if it has changed. It does nothing for another store.
func (d *Dynamo) Read() {
	if d.conf.Dir == "" {
		return
	}
	before := d.over
	d.over = 0
	d.reading++
	changed, err := d.readFiles()
	now := d.conf.Now()
	for key, r := range d.records {
		gone := r.reading != d.reading && err == nil
		if r.known && (gone || r.dead(now)) {
			d.table.Delete(key)
			r.known, changed = false, true
		}
		if gone {
			delete(d.records, key)
		}
	}
	d.report(before, err)
	if changed {
		d.view()
	}
}

// readFiles reads the folder.
func (d *Dynamo) readFiles() (changed bool, err error) {
	root, err := os.OpenRoot(d.conf.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // the first process of Dynamo creates it
	}
	if err != nil {
		return false, err
	}
	defer root.Close()
	for _, bucket := range []string{bucketInstances, bucketModels, bucketChannels, bucketSources} {
		entries, err := fs.ReadDir(root.FS(), bucket)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return changed, err
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), ".") || !e.Type().IsRegular() {
				continue // a file that its process has not renamed yet
			}
			info, err := e.Info()
			if err != nil {
				continue // deleted meanwhile
			}
			key := bucket + "/" + e.Name()
			if d.update(root, key, info) {
				changed = true
			}
		}
	}
	return changed, nil
}

func readBounded(root *os.Root, name string) ([]byte, error) {
	file, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it was only read
	return io.ReadAll(io.LimitReader(file, maxDynamoRecord+1))
}

// update reads a file if it has changed or was unreadable. It reports whether the table has
// changed.
func (d *Dynamo) update(root *os.Root, key string, info fs.FileInfo) (changed bool) {
	now, size, written := d.conf.Now(), info.Size(), info.ModTime()
	r, unchanged := d.records[key], false
	switch {
	case r == nil && len(d.records) >= d.limit:
		d.over++
		return false
	case r == nil:
		r = &storedRecord{size: size, time: written, changed: written}
		if written.After(now) {
			r.changed = now
		}
		d.records[key] = r
	case r.size != size || !r.time.Equal(written):
		r.size, r.time, r.changed = size, written, now
	default:
		unchanged = r.known && r.unread.IsZero()
	}
	r.reading = d.reading
	if unchanged || r.dead(now) {
		return false
	}
	data, err := readBounded(root, key)
	sum := maphash.Bytes(d.seed, data)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false
	case err == nil && r.known && r.sum == sum:
		r.unread, r.reported = time.Time{}, false
		return false
	case err == nil && len(data) > maxDynamoRecord:
		err = fmt.Errorf("fleet: %s has more than %d bytes", clip(key), maxDynamoRecord)
	case err == nil:
		err = d.table.Put(key, data)
	}
	if err == nil {
		r.known, r.sum, r.unread, r.reported = true, sum, time.Time{}, false
		return true
	}
	if r.unread.IsZero() {
		r.unread = now
	}
	if !r.reported && now.Sub(r.unread) >= unreadAfter {
		r.reported = true
		d.news.Count("refused")
		d.conf.Log.Warn("a record of Dynamo's discovery cannot be read", "err", err)
	}
	return false
}

// dead reports whether a record's process no longer touches its file.
func (r *storedRecord) dead(now time.Time) bool { return now.Sub(r.changed) >= deadAfter }
