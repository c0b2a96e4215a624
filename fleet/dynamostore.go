// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// Times and bounds of Dynamo's stores.
const (
	// filesEvery is how often a folder is looked at: what a person notices of it is that
	// a worker comes half a second later.
	filesEvery = 500 * time.Millisecond
	// bucketsEvery is how often the buckets are read, which is done whole.
	bucketsEvery = 2 * time.Second
	// deadAfter is how long a file counts that its process does not touch. It does so
	// every 3.3 s.
	deadAfter = 10 * time.Second
	// unreadAfter is how long a file may be half-written before that is told.
	unreadAfter = 2 * time.Second
	// maxDynamoRecord bounds a record; model cards have 2 KB.
	maxDynamoRecord = 1 << 20
)

// DynamoConfig says where Dynamo's records are and who is told of them. Changed and one of
// Dir and NATS are required; the zero value of each other field means its default.
type DynamoConfig struct {
	// Dir is the root of a file store: the DYN_FILE_KV of Dynamo's processes.
	Dir string
	// NATS is a connection, its caller's, whose key-value buckets have the records of
	// Rules.Namespace.
	NATS  *nats.Conn
	Rules DynamoRules
	// Networks are those that addresses may be in. Default all.
	Networks Networks
	// Changed is told what the records make, whenever some have changed. It must not
	// call back.
	Changed func(DynamoView)
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log takes a line for each record and worker that is left out. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Dynamo follows the store of Dynamo's processes. It reads; it never writes.
//
// # What is promised
//
// After each reading the records that count are exactly those that are there, are readable,
// and, in a folder, are of living processes: their file's time has changed within 10 s by
// our clock, whatever the clocks of others say; a file seen for the first time counts
// if its time is not older than that. A file that cannot be read (it is being written) is
// read again, and counts as what it was. What cannot be listed stays as it was. Of more than
// 65,536 records those count that were there first; the others are counted and told of.
//
// A Dynamo belongs to one goroutine at a time.
type Dynamo struct {
	conf  DynamoConfig
	news  metric.Int64Counter
	table DynamoTable
	seed  maphash.Seed
	files map[string]*dynamoFile
	told  map[string]struct{} // what was said of what is left out
	most  int                 // files at most
	over  int                 // how many there were above that at the last reading
	away  bool                // the store cannot be listed; said once
}

// dynamoFile is a record's file.
type dynamoFile struct {
	size    int64
	time    time.Time // of the file
	seen    time.Time // when its time changed, by our clock
	sum     uint64    // of the content that the table has
	has     bool      // the table has a content
	unread  time.Time // since when it cannot be read; zero if it can
	counted bool      // that it cannot be read was told
}

// NewDynamo returns one that has read nothing yet.
func NewDynamo(conf DynamoConfig) (*Dynamo, error) {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = cmp.Or(conf.Log, slog.New(slog.DiscardHandler))
	conf.Meter = cmp.Or[metric.Meter](conf.Meter, noop.Meter{})
	if (conf.Dir == "") == (conf.NATS == nil) {
		return nil, errors.New("fleet: Dynamo's records are in a folder or in NATS, want one of them")
	}
	if conf.NATS != nil && conf.Rules.Namespace == "" {
		return nil, errors.New("fleet: Dynamo's buckets are named after the namespace, want it")
	}
	if err := conf.Rules.Check(); err != nil {
		return nil, fmt.Errorf("fleet: Dynamo's %w", err)
	}
	news, err := conf.Meter.Int64Counter("kvroute.fleet.dynamo",
		metric.WithUnit("{event}"), metric.WithDescription("What the records of Dynamo's discovery tell, by kind."))
	if err != nil {
		return nil, fmt.Errorf("fleet: make instruments: %w", err)
	}
	return &Dynamo{conf: conf, news: news, seed: maphash.MakeSeed(), files: make(map[string]*dynamoFile), most: maxDynamoRecords}, nil
}

// Kinds of what the records tell.
const (
	dynamoChanged = "changed"  // workers, or where their events are
	dynamoRefused = "refused"  // a record that cannot be read
	dynamoLeftOut = "left_out" // a worker or publisher that nothing can be made of
	dynamoAway    = "away"     // the store cannot be listed
	dynamoOver    = "over"     // a record above the limit
)

func (d *Dynamo) count(ctx context.Context, kind string) { d.countMany(ctx, kind, 1) }

func (d *Dynamo) countMany(ctx context.Context, kind string, n int) {
	d.news.Add(ctx, int64(n), metric.WithAttributes(attribute.String("kind", kind)))
}

// Run reads the store again and again until ctx ends.
func (d *Dynamo) Run(ctx context.Context) error {
	every := filesEvery
	if d.conf.NATS != nil {
		every = bucketsEvery
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		d.Read(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Read reads the store once, and tells what has changed.
func (d *Dynamo) Read(ctx context.Context) {
	var changed bool
	var err error
	before := d.over
	d.over = 0
	if d.conf.NATS != nil {
		changed, err = d.readBuckets(ctx)
	} else {
		changed, err = d.readFiles(ctx)
	}
	switch {
	case err != nil && ctx.Err() == nil && !d.away:
		d.away = true
		d.count(ctx, dynamoAway)
		d.conf.Log.Warn("the store of Dynamo's discovery cannot be read; what is known stays", "err", err)
	case err == nil && d.away:
		d.away = false
		d.conf.Log.Info("the store of Dynamo's discovery can be read again")
	}
	if err != nil {
		d.over = before // not all were looked at
	}
	if d.over > before {
		d.countMany(ctx, dynamoOver, d.over-before)
		if before == 0 {
			d.conf.Log.Warn("the store of Dynamo's discovery has more records than are read; the others are left out", "limit", d.most, "left_out", d.over)
		}
	}
	if !changed {
		return
	}
	v := d.table.View(&d.conf.Rules, d.conf.Networks)
	d.count(ctx, dynamoChanged)
	told := make(map[string]struct{}, len(v.LeftOut))
	for _, err := range v.LeftOut {
		if _, before := d.told[err.Error()]; !before {
			d.count(ctx, dynamoLeftOut)
			d.conf.Log.Warn("a record of Dynamo's discovery is left out", "err", err)
		}
		told[err.Error()] = struct{}{}
	}
	d.told = told
	d.conf.Log.Info("Dynamo's discovery has changed", "workers", len(v.Workers), "publishers", len(v.Plane.Channels), "indexers", len(v.Plane.Indexers), "left_out", len(v.LeftOut))
	d.conf.Changed(v)
}

// readFiles reads the folder.
func (d *Dynamo) readFiles(ctx context.Context) (changed bool, err error) {
	now := d.conf.Now()
	root, err := os.OpenRoot(d.conf.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		// Dynamo's first process makes it.
		return d.sweep(now, nil), nil
	}
	if err != nil {
		return false, err
	}
	defer root.Close()
	there := make(map[string]struct{})
	for _, bucket := range []string{bucketInstances, bucketModels, bucketChannels, bucketSources} {
		entries, err := fs.ReadDir(root.FS(), bucket)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return changed, err
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), ".") || !e.Type().IsRegular() {
				continue // not yet renamed
			}
			info, err := e.Info()
			if err != nil {
				continue // gone meanwhile
			}
			key := bucket + "/" + e.Name()
			there[key] = struct{}{}
			if d.readFile(ctx, now, root, key, info) {
				changed = true
			}
		}
	}
	return d.sweep(now, there) || changed, nil
}

// sweep forgets the files that are not there, and the records of those that nobody
// touches.
func (d *Dynamo) sweep(now time.Time, there map[string]struct{}) (changed bool) {
	for key, f := range d.files {
		_, is := there[key]
		if is && now.Sub(f.seen) < deadAfter {
			continue
		}
		if f.has {
			d.table.Delete(key)
			f.has, f.sum, changed = false, 0, true
		}
		if !is {
			delete(d.files, key)
		}
	}
	return changed
}

// readFile reads a file if it has changed, or has not been read yet.
func (d *Dynamo) readFile(ctx context.Context, now time.Time, root *os.Root, key string, info fs.FileInfo) (changed bool) {
	f := d.files[key]
	switch {
	case f == nil && len(d.files) >= d.most:
		d.over++
		return false
	case f == nil:
		f = &dynamoFile{size: info.Size(), time: info.ModTime(), seen: info.ModTime()}
		if f.seen.After(now) {
			f.seen = now
		}
		d.files[key] = f
	case info.Size() == f.size && info.ModTime().Equal(f.time):
		if f.has && f.unread.IsZero() {
			return false
		}
	default:
		f.size, f.time, f.seen = info.Size(), info.ModTime(), now
	}
	if now.Sub(f.seen) >= deadAfter {
		return false
	}
	data, err := readBounded(root, key)
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	sum := maphash.Bytes(d.seed, data)
	if err == nil && f.has && f.sum == sum {
		f.unread, f.counted = time.Time{}, false
		return false
	}
	if err == nil {
		err = d.table.Put(key, data)
	}
	if err != nil {
		if f.unread.IsZero() {
			f.unread = now
		}
		if now.Sub(f.unread) >= unreadAfter && !f.counted {
			f.counted = true
			d.refuse(ctx, err)
		}
		return false
	}
	f.has, f.sum, f.unread, f.counted = true, sum, time.Time{}, false
	return true
}

func (d *Dynamo) refuse(ctx context.Context, err error) {
	d.count(ctx, dynamoRefused)
	d.conf.Log.Warn("a record of Dynamo's discovery cannot be read", "err", err)
}

func readBounded(root *os.Root, name string) ([]byte, error) {
	file, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it was read
	data, err := io.ReadAll(io.LimitReader(file, maxDynamoRecord+1))
	if err == nil && len(data) > maxDynamoRecord {
		err = fmt.Errorf("fleet: %s has more than %d bytes", clip(name), maxDynamoRecord)
	}
	return data, err
}

// readBuckets reads the buckets of NATS. Nothing tells a watcher of a record that has
// expired, so all that is there is read each time.
func (d *Dynamo) readBuckets(ctx context.Context) (changed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	js, err := jetstream.New(d.conf.NATS)
	if err != nil {
		return false, err
	}
	there := make(map[string][]byte)
	for _, bucket := range []string{bucketInstances, bucketModels, bucketChannels, bucketSources} {
		kv, err := js.KeyValue(ctx, d.conf.Rules.Namespace+"_"+strings.ReplaceAll(bucket, "/", "_"))
		if errors.Is(err, jetstream.ErrBucketNotFound) {
			continue
		}
		if err == nil {
			err = d.readBucket(ctx, kv, bucket, there)
		}
		if err != nil {
			return false, err
		}
	}
	for key, f := range d.files {
		if _, is := there[key]; !is {
			delete(d.files, key)
			d.table.Delete(key)
			changed = changed || f.has
		}
	}
	for _, key := range slices.Sorted(maps.Keys(there)) {
		data := there[key]
		sum, f := maphash.Bytes(d.seed, data), d.files[key]
		if f == nil && len(d.files) >= d.most {
			d.over++
			continue
		}
		if f != nil && f.sum == sum {
			continue
		}
		var err error
		if len(data) > maxDynamoRecord {
			err = fmt.Errorf("fleet: %s has more than %d bytes", clip(key), maxDynamoRecord)
		} else {
			err = d.table.Put(key, data)
		}
		if err != nil {
			d.refuse(ctx, err)
		}
		d.files[key] = &dynamoFile{sum: sum, has: err == nil || f != nil && f.has}
		changed = changed || err == nil
	}
	return changed, nil
}

// readBucket reads what a bucket has: all that is known already, and of what is new no
// more than could be kept.
func (d *Dynamo) readBucket(ctx context.Context, kv jetstream.KeyValue, bucket string, there map[string][]byte) error {
	watcher, err := kv.WatchAll(ctx, jetstream.IgnoreDeletes())
	if err != nil {
		return err
	}
	defer func() { _ = watcher.Stop() }() // fails if NATS is away, when there is nothing to stop
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-watcher.Updates():
			if !ok {
				return errAway
			}
			if e == nil {
				return nil // that was all
			}
			key := bucket + "/" + e.Key()
			if len(there) >= d.most && d.files[key] == nil {
				d.over++
				continue
			}
			there[key] = e.Value()[:min(len(e.Value()), maxDynamoRecord+1)]
		}
	}
}
