// SPDX-License-Identifier: Apache-2.0

// Package top shows what a running kvroute does, as `kvroute top` does: live in a terminal, once as
// text, or as JSON. It reads kvroute's live feed, /v1/live.
package top

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// Source opens the live feed of a kvroute: as a stream of server-sent events that lasts until ctx
// ends, or as one JSON object. The caller closes it.
type Source func(ctx context.Context, stream bool) (io.ReadCloser, error)

const (
	// maxEvent limits the size of an event and of an object, in bytes.
	maxEvent = 64 << 20
	// silence is the longest time between two events. kvroute sends one a second.
	silence = 15 * time.Second
	// pause is the time between two attempts to open a stream.
	pause = time.Second
)

// follower reads streams. It calls its functions from one goroutine.
type follower struct {
	open           Source
	silence, pause time.Duration
	changed        func(section []byte) // a JSON object whose only key is the section's name
	ended          func(error)          // the stream has ended, or could not be opened again
}

// follow reads a stream, and opens it again when it has ended, until ctx ends.
func (f follower) follow(ctx context.Context, stream io.ReadCloser) {
	var err error
	for {
		if err == nil {
			err = f.read(stream)
		}
		if ctx.Err() != nil {
			return
		}
		f.ended(err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(f.pause):
		}
		stream, err = f.open(ctx, true)
	}
}

// read reads a stream to its end and says why it ended.
func (f follower) read(stream io.ReadCloser) error {
	quiet := time.AfterFunc(f.silence, func() { _ = stream.Close() }) // only to end the loop
	defer stream.Close()
	lines := bufio.NewScanner(stream)
	lines.Buffer(nil, maxEvent)
	var name string
	for lines.Scan() {
		quiet.Reset(f.silence)
		key, value, _ := bytes.Cut(lines.Bytes(), []byte(": "))
		switch string(key) {
		case "event":
			name = string(value)
		case "data":
			f.changed(fmt.Appendf(nil, "{%q:%s}", name, value))
		}
	}
	if !quiet.Stop() {
		return fmt.Errorf("kvroute sent nothing for %v", f.silence)
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return errors.New("kvroute ended the stream")
}

// Stream writes each change as a line of JSON to out: an object whose only key is the section's name.
// It ends with ctx, when it cannot write, or if the source cannot be opened at first. Later it opens
// the source again, and writes to log why.
func Stream(ctx context.Context, from Source, out, log io.Writer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := from(ctx, true)
	if err != nil {
		return err
	}
	follower{
		open: from, silence: silence, pause: pause,
		changed: func(section []byte) {
			if _, err := fmt.Fprintf(out, "%s\n", section); err != nil {
				cancel(err)
			}
		},
		ended: func(err error) { fmt.Fprintf(log, "kvroute top: %v; connecting again\n", err) },
	}.follow(ctx, stream)
	return context.Cause(ctx)
}

// Once writes one picture to out: text, or the object of the feed as one line of JSON.
func Once(ctx context.Context, from Source, out io.Writer, asJSON bool) error {
	body, err := from(ctx, false)
	if err != nil {
		return err
	}
	defer body.Close()
	text, err := io.ReadAll(io.LimitReader(body, maxEvent))
	if err != nil {
		return err
	}
	var p picture
	if err := p.apply(text); err != nil {
		return err
	}
	if !asJSON {
		text = []byte(p.text())
	}
	_, err = out.Write(text)
	return err
}
