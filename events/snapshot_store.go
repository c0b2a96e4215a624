// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// objectChunk is the size of a part of a snapshot; NATS takes 1 MiB at most.
const objectChunk = 256 << 10

// objectStall is how long a part of a snapshot may take to come.
const objectStall = 10 * time.Second

// object reads a snapshot from the object store, part by part. The client's own
// reader waits for parts that are not there.
type object struct {
	messages jetstream.MessagesContext
	left     uint32 // parts to come
	rest     []byte
}

// put writes an object in the form of NATS's object stores, part by part, each when
// the one before is acknowledged; it counts from its last message on, which replaces
// an object of the same name. The client's own way leaves a goroutine behind when it
// fails early. It returns the size that the object then has.
func (d *Durable) put(ctx context.Context, o *opened, name string, r io.Reader) (int64, error) {
	info := jetstream.ObjectInfo{Bucket: d.scope.Bucket("snap"), NUID: fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64())}
	info.Name, info.Opts = name, &jetstream.ObjectMetaOptions{ChunkSize: objectChunk}
	digest, subject := sha256.New(), d.chunks(info.NUID)
	for chunk, last := make([]byte, objectChunk), false; !last; {
		n, err := io.ReadFull(r, chunk)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			if last = true; n == 0 {
				continue
			}
		case err != nil:
			return 0, err
		}
		_, _ = digest.Write(chunk[:n]) // never fails
		if err := d.store(ctx, &nats.Msg{Subject: subject, Data: chunk[:n]}); err != nil {
			return 0, err
		}
		info.Size, info.Chunks = info.Size+uint64(n), info.Chunks+1
	}
	info.Digest = "SHA-256=" + base64.URLEncoding.EncodeToString(digest.Sum(nil))
	meta, err := json.Marshal(info)
	if err != nil {
		return 0, err
	}
	if err := d.store(ctx, &nats.Msg{
		Subject: "$O." + info.Bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name)),
		Header:  nats.Header{jetstream.MsgRollup: []string{jetstream.MsgRollupSubject}}, Data: meta,
	}); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, objectStall)
	defer cancel()
	there, err := o.objects.GetInfo(ctx, name)
	if err != nil {
		return 0, err
	}
	if there.Digest != info.Digest {
		return 0, fmt.Errorf("its digest is %s, want %s", there.Digest, info.Digest)
	}
	return int64(there.Size), nil
}

func (d *Durable) store(ctx context.Context, m *nats.Msg) error {
	ctx, cancel := context.WithTimeout(ctx, objectStall)
	defer cancel()
	_, err := d.js.PublishMsg(ctx, m)
	return err
}

// chunks is the subject of an object's parts.
func (d *Durable) chunks(nuid string) string {
	return "$O." + d.scope.Bucket("snap") + ".C." + nuid
}

// objectStream returns the stream below the object store, and what it has of some
// subjects.
func (d *Durable) objectStream(ctx context.Context, subject string) (jetstream.Stream, *jetstream.StreamInfo, error) {
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

// object opens a snapshot for reading.
func (d *Durable) object(ctx context.Context, o *opened, name string) (*object, error) {
	limited, cancel := context.WithTimeout(ctx, d.timing.call)
	defer cancel()
	info, err := o.objects.GetInfo(limited, name)
	if err != nil {
		return nil, fmt.Errorf("events: get snapshot %s: %w", name, err)
	}
	subject := d.chunks(info.NUID)
	stream, state, err := d.objectStream(limited, subject)
	if err != nil {
		return nil, err
	}
	if there := state.State.Subjects[subject]; there != uint64(info.Chunks) || there == 0 {
		return nil, badSnapshot("%d of its %d parts are in the object store", there, info.Chunks)
	}
	consumer, err := stream.OrderedConsumer(limited, jetstream.OrderedConsumerConfig{FilterSubjects: []string{subject}})
	if err != nil {
		return nil, fmt.Errorf("events: get snapshot %s: %w", name, err)
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(64))
	if err != nil {
		return nil, fmt.Errorf("events: get snapshot %s: %w", name, err)
	}
	return &object{messages: messages, left: info.Chunks}, nil
}

func (r *object) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.left == 0 {
			return 0, io.EOF
		}
		m, err := r.messages.Next(jetstream.NextMaxWait(objectStall))
		if err != nil {
			return 0, err
		}
		r.rest = m.Data()
		r.left--
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *object) close() { r.messages.Stop() }
