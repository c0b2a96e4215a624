// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
)

// When the JetStream store is deleted, a running replica passes its state on to new replicas, even
// if they start first and no further event is published.
func TestTheStoreIsDeleted(t *testing.T) {
	for name, reset := range map[string]bool{"": false, "after a reset": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, e, a := settled(t, 4, 300, durable.Config{})
			if reset {
				a.stop()
				a = startReplica(t, n.connect(), "a", durable.Config{ResetStates: true})
				for w := range e.pubs {
					e.restart(w)
				}
				e.work(300)
				e.mustKnow(a)
			}
			n.stop()
			if err := os.RemoveAll(n.opts.StoreDir); err != nil {
				t.Fatal(err)
			}
			n.start()
			b := startReplica(t, n.connect(), "b", durable.Config{})
			e.mustKnow(a, b)
			e.work(100)
			e.mustKnow(a, b)
			a.stop()
			e.mustKnow(startReplica(t, n.connect(), "c", durable.Config{}), b)
		})
	}
}

// A snapshot whose chunks are deleted after they were counted is no end of a replica: a read fails soon, also if the
// replica stops. A snapshot that is there is read whole, however slowly.
func TestALostChunkEndsARead(t *testing.T) {
	t.Parallel()
	n := startJetStream(t)
	objects, err := n.jetStream().CreateObjectStore(t.Context(), jetstream.ObjectStoreConfig{Bucket: "test"})
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("snapshot"), 100_000)
	info, err := objects.PutBytes(t.Context(), "one", data)
	if err != nil {
		t.Fatal(err)
	}
	r, done, err := durable.OpenObject(t.Context(), objects, "one", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d of %d bytes are read, %v", len(got), len(data), err)
	}
	done()
	stream, err := n.jetStream().Stream(t.Context(), "OBJ_test")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSubject("$O.test.C."+info.NUID)); err != nil {
		t.Fatal(err)
	}
	for stall, want := range map[time.Duration]error{time.Millisecond: events.ErrSnapshot, time.Hour: context.Canceled} {
		ctx, stop := context.WithCancel(t.Context())
		r, done, err := durable.OpenObject(ctx, objects, "one", stall)
		if err != nil {
			t.Fatal(err)
		}
		if stall == time.Hour {
			time.AfterFunc(100*time.Millisecond, stop)
		}
		if n, err := r.Read(make([]byte, 9)); n != 0 || !errors.Is(err, want) {
			t.Errorf("%d bytes are read, %v, want %v", n, err, want)
		}
		done()
		stop()
	}
}

// While JetStream's store is full and stores nothing, the ranks whose events it carries are
// suspect, and a replica logs it. When there is room again, the state becomes complete.
func TestTheStoreIsFull(t *testing.T) {
	t.Parallel()
	for name, askable := range map[string]bool{"events wait": false, "workers are asked": true} {
		t.Run(name, func(t *testing.T) {
			n := startJetStream(t, func(n *natsd) { n.opts.JetStreamMaxStore = 8 << 20 })
			var e *enginePool
			var a *replica
			if askable {
				e = startAskable(t, n.connect(), 3)
				a = e.startMember(n.connect(), "a", durable.Config{})
			} else {
				e = startEngines(t, n.connect(), 3)
				a = startReplica(t, n.connect(), "a", durable.Config{})
				e.register(a)
			}
			e.work(200)
			e.mustKnow(a)
			ballast, err := n.jetStream().CreateStream(t.Context(), jetstream.StreamConfig{Name: "ballast", Subjects: []string{"ballast"}, Discard: jetstream.DiscardNew})
			if err != nil {
				t.Fatal(err)
			}
			for size := 1 << 18; size > 8; {
				if _, err := n.jetStream().Publish(t.Context(), "ballast", make([]byte, size)); err != nil {
					size /= 2
				}
			}
			natstest.Eventually(t, func() bool { return !a.Stores() })
			a.isIn(indexer.StateSuspect, 3)
			e.work(200)
			if askable {
				e.mustKnow(a) // without the stream
			}
			if err := ballast.Purge(t.Context()); err != nil {
				t.Fatal(err)
			}
			natstest.Eventually(t, a.Stores)
			e.mustKnow(a)
			a.isIn(indexer.StateOK, 3)
			if !a.log.Has("JetStream does not store events") {
				t.Error("the log does not report the full store")
			}
		})
	}
}
