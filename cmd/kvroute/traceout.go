// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

const (
	traceFileBytes = 256 << 20 // of a file, before it becomes FILE.1
	traceQueue     = 1024      // ended requests that wait to be written
	tracePending   = 1 << 16   // requests in flight
	traceFlush     = time.Second
)

// tracer writes the requests that pass through a router as a trace that `kvroute
// replay` plays: a line for each that a worker served and whose prompt was tokenized
// exactly, once it is over. No text and no token leaves: blocks of 512 tokens are
// named by hashes with a seed of this process.
//
// It stands between Envoy's streams and the router, and never holds these up: what
// the disk cannot keep up with is dropped and counted.
type tracer struct {
	extproc.Router

	prefix  string // of the ids of Envoy's requests; others do not end here
	name    string
	size    int64         // of a file
	tpot    time.Duration // taken for the time between two tokens of a response
	seed    uint64
	start   time.Time
	log     *slog.Logger
	counter metric.Int64Counter
	queue   chan traceLine

	mu sync.Mutex
	// mu guards the field below.
	flight map[string]*traced
}

// traced is a request in flight.
type traced struct {
	line  traceLine
	at    time.Time
	first time.Time
}

// traceLine is a line of the Mooncake format, and two fields that other readers
// ignore.
type traceLine struct {
	Timestamp int64    `json:"timestamp"` // ms since the process began
	Input     int      `json:"input_length"`
	Output    int      `json:"output_length"`
	HashIDs   []uint64 `json:"hash_ids"`
	TTFT      int64    `json:"ttft_ms"`
	Duration  int64    `json:"duration_ms"`
}

func newTracer(name string, tpot time.Duration, seed uint64, log *slog.Logger, meter metric.Meter) (*tracer, error) {
	counter, err := meter.Int64Counter("kvroute.trace.requests", metric.WithUnit("{request}"),
		metric.WithDescription("Requests for the trace file, by outcome."))
	return &tracer{
		name: name, size: traceFileBytes, tpot: tpot, seed: seed, start: time.Now(), log: log, counter: counter,
		queue: make(chan traceLine, traceQueue), flight: map[string]*traced{},
	}, err
}

func (t *tracer) count(outcome string) {
	t.counter.Add(context.Background(), 1, metric.WithAttributes(attribute.String("outcome", outcome)))
}

// observe notes a request that was just booked.
func (t *tracer) observe(o router.Observation) {
	if !strings.HasPrefix(o.ID, t.prefix) {
		return
	}
	ids := indexer.AppendLocalHashes(nil, o.IDs, replay.MooncakeBlock, t.seed)
	if rest := o.IDs[len(ids)*replay.MooncakeBlock:]; len(rest) > 0 {
		ids = indexer.AppendLocalHashes(ids, rest, len(rest), t.seed)
	}
	ids = indexer.AppendSequenceHashes(ids[:0], ids)
	for i := range ids {
		ids[i] &= 1<<53 - 1 // every JSON reader keeps it exactly
	}
	now := time.Now()
	e := &traced{at: now, line: traceLine{Timestamp: now.Sub(t.start).Milliseconds(), Input: len(o.IDs), HashIDs: ids}}
	t.mu.Lock()
	full := len(t.flight) >= tracePending
	if !full {
		t.flight[o.ID] = e
	}
	t.mu.Unlock()
	if full {
		t.count("dropped")
	}
}

// FirstToken implements [extproc.Router].
func (t *tracer) FirstToken(id string, by router.Sign) bool {
	t.mu.Lock()
	if e := t.flight[id]; e != nil && e.first.IsZero() {
		e.first = time.Now()
	}
	t.mu.Unlock()
	return t.Router.FirstToken(id, by)
}

// Free implements [extproc.Router].
func (t *tracer) Free(id string) bool {
	if e := t.landed(id); e != nil {
		e.end(time.Now(), t.tpot)
		select {
		case t.queue <- e.line:
		default:
			t.count("dropped")
		}
	}
	return t.Router.Free(id)
}

// Abandon implements [extproc.Router].
func (t *tracer) Abandon(id string) bool {
	t.landed(id)
	return t.Router.Abandon(id)
}

func (t *tracer) landed(id string) *traced {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.flight[id]
	delete(t.flight, id)
	return e
}

// end fills in what is known at the end. The tokens of the response are not seen,
// so they are worked out from the time that they took.
func (e *traced) end(now time.Time, tpot time.Duration) {
	if e.first.IsZero() {
		e.first = now
	}
	e.line.TTFT, e.line.Duration = e.first.Sub(e.at).Milliseconds(), now.Sub(e.at).Milliseconds()
	e.line.Output = 1 + int(math.Round(float64(now.Sub(e.first))/float64(tpot)))
}

// run writes until ctx ends, then what waits already. A file that cannot be written
// ends the trace, not the process.
func (t *tracer) run(ctx context.Context) error {
	f := traceFile{name: t.name, size: t.size}
	ticker := time.NewTicker(traceFlush)
	defer ticker.Stop()
	err := f.open()
	for err == nil {
		select {
		case l := <-t.queue:
			err = t.write(&f, &l)
		case <-ticker.C:
			err = f.out.Flush()
		case <-ctx.Done():
			for err == nil && len(t.queue) > 0 {
				l := <-t.queue
				err = t.write(&f, &l)
			}
			return errors.Join(err, f.close())
		}
	}
	t.log.Error("the trace ends", "file", t.name, "err", errors.Join(err, f.close()))
	for {
		select {
		case <-t.queue:
			t.count("error")
		case <-ctx.Done():
			return nil
		}
	}
}

func (t *tracer) write(f *traceFile, l *traceLine) error {
	if err := f.write(l); err != nil {
		t.count("error")
		return err
	}
	t.count("written")
	return nil
}

// traceFile is the file being written.
type traceFile struct {
	name    string
	size    int64
	file    *os.File
	out     *bufio.Writer
	written int64
}

func (f *traceFile) open() error {
	file, err := os.OpenFile(f.name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	f.file, f.out, f.written = file, bufio.NewWriterSize(file, 1<<16), 0
	return nil
}

func (f *traceFile) close() error {
	if f.file == nil {
		return nil
	}
	err := errors.Join(f.out.Flush(), f.file.Close())
	f.file = nil
	return err
}

// write appends a line. At its size the file becomes NAME.1, in place of the last
// one, and a new one begins.
func (f *traceFile) write(l *traceLine) error {
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if f.written > 0 && f.written+int64(len(text)) >= f.size {
		if err := f.close(); err != nil {
			return err
		}
		if err := os.Rename(f.name, f.name+".1"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("rotate: %w", err)
		}
		if err := f.open(); err != nil {
			return err
		}
	}
	n, err := f.out.Write(append(text, '\n'))
	f.written += int64(n)
	return err
}
