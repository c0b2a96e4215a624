// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
)

const (
	// objectPrefix begins the names of snapshots. The position in the stream follows.
	objectPrefix = "index-"
	// objectChunk is the size of a chunk of a snapshot in bytes. NATS accepts messages up to 1 MiB.
	objectChunk = 256 << 10
	// objectStall is how long a chunk of a snapshot may take to arrive.
	objectStall = 10 * time.Second
	// objectWait is how long one call of the client's Read waits.
	objectWait = 200 * time.Millisecond
	// objectTime bounds the time to read a snapshot.
	objectTime = time.Hour
)

// upload writes a snapshot to the object store and returns its head.
func (d *Reader) upload(ctx context.Context, o *opened, s *events.Snapshot) (head, error) {
	name := fmt.Sprintf("%s%020d", objectPrefix, s.LastSeq)
	r, w := io.Pipe()
	var size int64
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		var err error
		size, err = saved.Write(w, d.scope, s)
		_ = w.CloseWithError(err) // always nil
	}()
	info, err := o.objects.Put(ctx,
		jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: objectChunk}}, r)
	_ = r.CloseWithError(context.Canceled) // ends the writer if Put did not read to the end
	<-finished
	if err != nil {
		return head{}, fmt.Errorf("upload snapshot %s: %w", name, err)
	}
	if info.Size != uint64(size) {
		return head{}, fmt.Errorf("upload snapshot %s: %d of %d bytes arrived", name, info.Size, size)
	}
	return head{
		Object: name, LastSeq: s.LastSeq, CreatedMS: s.Created.UnixMilli(), Bytes: size,
		Epoch: s.Meta.Epoch, Stream: s.Meta.Stream, Inherited: s.Meta.Inherited,
	}, nil
}

// object reads a snapshot from the object store.
type object struct {
	jetstream.ObjectResult

	ctx    context.Context //nolint:containedctx // of the object's reading, which has no parameter for it
	cancel context.CancelFunc
	stall  time.Duration // how long a chunk may take to arrive
}

// download opens a snapshot for reading.
func (d *Reader) download(ctx context.Context, o *opened, name string) (*object, error) {
	limited, cancel := d.limited(ctx)
	defer cancel()
	info, err := o.objects.GetInfo(limited, name)
	if err != nil {
		return nil, fmt.Errorf("events: get snapshot %s: %w", name, err)
	}
	// The client would wait for chunks that the store does not have.
	subject := d.chunks(info.NUID)
	_, state, err := d.objectStream(limited, subject)
	if err != nil {
		return nil, err
	}
	if there := state.State.Subjects[subject]; there != uint64(info.Chunks) || there == 0 {
		return nil, fmt.Errorf("events: %w: %d of its %d chunks are in the object store", events.ErrSnapshot, there, info.Chunks)
	}
	return openObject(ctx, o.objects, name, d.timing.call, objectStall)
}

// openObject opens an object, which takes at most the time call.
func openObject(ctx context.Context, objects jetstream.ObjectStore, name string, call, stall time.Duration) (*object, error) {
	ctx, stop := context.WithTimeout(ctx, objectTime)
	late := time.AfterFunc(call, stop)
	defer late.Stop()
	result, err := objects.Get(patient{ctx}, name) //nolint:contextcheck // patient is made of ctx
	if err != nil {
		stop()
		return nil, fmt.Errorf("events: get snapshot %s: %w", name, err)
	}
	return &object{result, ctx, stop, stall}, nil
}

// patient is the context of an object. The client's Read waits until its deadline, holds a lock meanwhile that Close
// needs, and does not see that the context ends. With a deadline that is always near, Read soon returns if nothing has
// come, and can be called again.
type patient struct{ context.Context } //nolint:containedctx // it is a context itself

// Deadline returns the time until which a Read waits that begins now.
func (patient) Deadline() (time.Time, bool) { return time.Now().Add(objectWait), true }

// Read reads the next bytes. It fails if none arrive within the time stall, as when another replica deletes the snapshot
// after the chunks were counted, and soon after the context has ended.
func (r *object) Read(p []byte) (int, error) {
	for start := time.Now(); ; {
		n, err := r.ObjectResult.Read(p)
		switch {
		case n > 0 || err != nil && !errors.Is(err, os.ErrDeadlineExceeded) || len(p) == 0:
			return n, err
		case r.ctx.Err() != nil:
			return 0, r.ctx.Err()
		case time.Since(start) > r.stall:
			return 0, fmt.Errorf("events: %w: no chunk came for %v", events.ErrSnapshot, r.stall)
		}
	}
}

func (r *object) close() {
	_ = r.Close() // the pipe to the client, which always closes
	r.cancel()
}

// snapshots returns the names of the snapshots in the order in which to try them.
func (d *Reader) snapshots(ctx context.Context, o *opened) (names []string, err error) {
	ctx, cancel := d.limited(ctx)
	defer cancel()
	h, _, err := o.head(ctx)
	if err != nil {
		return nil, err
	}
	infos, err := listObjects(ctx, o.objects)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(infos, func(a, b *jetstream.ObjectInfo) int { return strings.Compare(b.Name, a.Name) })
	if h.Object != "" {
		names = append(names, h.Object)
	}
	for _, i := range infos {
		if i.Name != h.Object && strings.HasPrefix(i.Name, objectPrefix) {
			names = append(names, i.Name)
		}
	}
	return names, nil
}

func listObjects(ctx context.Context, objects jetstream.ObjectStore) ([]*jetstream.ObjectInfo, error) {
	infos, err := objects.List(ctx)
	if err != nil && !errors.Is(err, jetstream.ErrNoObjectsFound) {
		return nil, fmt.Errorf("events: list the snapshots: %w", err)
	}
	return infos, nil
}

// tidy deletes all snapshots except the named ones, and the chunks of uploads that did not
// finish. Its caller holds the lock of snapshots, so no upload is running.
func (d *Reader) tidy(ctx context.Context, o *opened, keep ...string) error {
	infos, err := listObjects(ctx, o.objects)
	if err != nil {
		return err
	}
	used := make(map[string]bool, len(infos))
	for _, i := range infos {
		switch {
		case slices.Contains(keep, i.Name) || !strings.HasPrefix(i.Name, objectPrefix):
			used[i.NUID] = true
		default:
			if err := o.objects.Delete(ctx, i.Name); err != nil {
				return fmt.Errorf("delete snapshot %s: %w", i.Name, err)
			}
		}
	}
	chunks := d.chunks("")
	stream, info, err := d.objectStream(ctx, chunks+"*")
	if err != nil {
		return err
	}
	for subject := range info.State.Subjects {
		if !used[strings.TrimPrefix(subject, chunks)] {
			if err := stream.Purge(ctx, jetstream.WithPurgeSubject(subject)); err != nil {
				return fmt.Errorf("remove half a snapshot: %w", err)
			}
		}
	}
	return nil
}

// chunks is the subject of an object's chunks.
func (d *Reader) chunks(nuid string) string { return "$O." + d.scope.Bucket("snap") + ".C." + nuid }

// objectStream returns the stream below the object store, with the number of messages of
// the given subjects.
func (d *Reader) objectStream(ctx context.Context, subject string) (jetstream.Stream, *jetstream.StreamInfo, error) {
	stream, err := d.js.Stream(ctx, "OBJ_"+d.scope.Bucket("snap"))
	if err != nil {
		return nil, nil, fmt.Errorf("events: look at the object store: %w", err)
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(subject))
	if err != nil {
		return nil, nil, fmt.Errorf("events: look at the object store: %w", err)
	}
	return stream, info, nil
}
