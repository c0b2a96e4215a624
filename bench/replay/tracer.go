// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

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

// A Tracer writes the requests that pass through a router as a trace that `kvroute
// replay` plays: a line for each that a worker served and whose prompt was tokenized
// exactly, once the request is over. The file holds no text and no token: blocks of 512
// tokens are named by hashes with a seed of this process.
//
// It wraps the router for Envoy's streams and never delays them: if the disk is too slow,
// lines are dropped and counted.
type Tracer struct {
	// Router gets all calls. It is set before the first request.
	extproc.Router

	conf    TracerConfig
	size    int64 // bytes of a file
	start   time.Time
	counter metric.Int64Counter
	queue   chan traceLine

	mu sync.Mutex
	// mu guards the field below.
	flight map[string]*traced
}

// TracerConfig configures a Tracer.
type TracerConfig struct {
	File   string
	TPOT   time.Duration // assumed time between two tokens of a response
	Seed   uint64        // of the blocks' hashes
	Prefix string        // of the ids of Envoy's requests; others are not traced
	Log    *slog.Logger
	Meter  metric.Meter
}

// traced is a request in flight.
type traced struct {
	line  traceLine
	at    time.Time
	first time.Time // of its first token
}

// traceLine is a line of the Mooncake format, and two fields that other readers
// ignore.
type traceLine struct {
	mooncake       // its timestamp counts from the beginning of the process
	TTFT     int64 `json:"ttft_ms"`
	Duration int64 `json:"duration_ms"`
}

// NewTracer returns a tracer. Nothing is written before [Tracer.Run].
func NewTracer(c TracerConfig) (*Tracer, error) {
	counter, err := c.Meter.Int64Counter("kvroute.trace.requests", metric.WithUnit("{request}"),
		metric.WithDescription("Requests for the trace file, by outcome."))
	return &Tracer{
		conf: c, size: traceFileBytes, start: time.Now(), counter: counter,
		queue: make(chan traceLine, traceQueue), flight: map[string]*traced{},
	}, err
}

func (t *Tracer) count(outcome string) {
	t.counter.Add(context.Background(), 1, metric.WithAttributes(attribute.String("outcome", outcome)))
}

// Observe notes a request that was just booked.
func (t *Tracer) Observe(o router.Observation) {
	if o.ByText || !strings.HasPrefix(o.ID, t.conf.Prefix) {
		return
	}
	ids := indexer.AppendLocalHashes(nil, o.IDs, MooncakeBlock, t.conf.Seed)
	if rest := o.IDs[len(ids)*MooncakeBlock:]; len(rest) > 0 {
		ids = indexer.AppendLocalHashes(ids, rest, len(rest), t.conf.Seed)
	}
	ids = indexer.AppendSequenceHashes(ids[:0], ids)
	for i := range ids {
		ids[i] &= 1<<53 - 1 // every JSON reader keeps it exactly
	}
	now := time.Now()
	e := &traced{at: now, line: traceLine{mooncake: mooncake{Timestamp: now.Sub(t.start).Milliseconds(), Input: len(o.IDs), HashIDs: ids}}}
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
func (t *Tracer) FirstToken(id string, by router.Sign) bool {
	t.mu.Lock()
	if e := t.flight[id]; e != nil && e.first.IsZero() {
		e.first = time.Now()
	}
	t.mu.Unlock()
	return t.Router.FirstToken(id, by)
}

// Free implements [extproc.Router].
func (t *Tracer) Free(id string) bool {
	if e := t.landed(id); e != nil {
		e.end(time.Now(), t.conf.TPOT)
		select {
		case t.queue <- e.line:
		default:
			t.count("dropped")
		}
	}
	return t.Router.Free(id)
}

// Abandon implements [extproc.Router].
func (t *Tracer) Abandon(id string) bool {
	t.landed(id)
	return t.Router.Abandon(id)
}

func (t *Tracer) landed(id string) *traced {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.flight[id]
	delete(t.flight, id)
	return e
}

// end fills in the fields that are known at the end. A Tracer does not see the tokens of the
// response, so it estimates their number from the duration.
func (e *traced) end(now time.Time, tpot time.Duration) {
	if e.first.IsZero() {
		e.first = now
	}
	e.line.TTFT, e.line.Duration = e.first.Sub(e.at).Milliseconds(), now.Sub(e.at).Milliseconds()
	e.line.Output = 1 + int(math.Round(float64(now.Sub(e.first))/float64(tpot)))
}

// Run writes lines until ctx ends, and then the queued ones. An error of the file ends the
// trace, not the process.
func (t *Tracer) Run(ctx context.Context) error {
	f := traceFile{name: t.conf.File, size: t.size}
	ticker := time.NewTicker(traceFlush)
	defer ticker.Stop()
	f.open()
	for logged := false; ; {
		if f.err != nil && !logged {
			t.conf.Log.Error("the trace ends", "file", t.conf.File, "err", f.err)
			logged = true
		}
		select {
		case l := <-t.queue:
			outcome := "written"
			if f.write(&l); f.err != nil {
				outcome = "error"
			}
			t.count(outcome) //nolint:contextcheck // a counter needs none
		case <-ticker.C:
			f.flush()
		case <-ctx.Done():
			if len(t.queue) > 0 {
				continue // another turn takes the next one
			}
			f.close()
			if logged {
				return nil
			}
			return f.err
		}
	}
}

// traceFile is the file being written. After an error it does nothing.
type traceFile struct {
	name    string
	size    int64
	out     *bufio.Writer
	file    *os.File
	written int64
	err     error
}

func (f *traceFile) open() {
	if f.file, f.err = os.OpenFile(f.name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600); f.err == nil {
		f.out, f.written = bufio.NewWriterSize(f.file, 1<<16), 0
	}
}

func (f *traceFile) flush() {
	if f.err == nil {
		f.err = f.out.Flush()
	}
}

func (f *traceFile) close() {
	if f.file != nil {
		f.flush()
		f.err = errors.Join(f.err, f.file.Close())
		f.file = nil
	}
}

// write appends a line. At its size the file becomes NAME.1, in place of the last
// one, and a new one begins.
func (f *traceFile) write(l *traceLine) {
	text, err := json.Marshal(l)
	if f.err = cmp.Or(f.err, err); f.err == nil && f.written > 0 && f.written+int64(len(text)) >= f.size {
		if f.close(); f.err == nil {
			if f.err = os.Rename(f.name, f.name+".1"); errors.Is(f.err, fs.ErrNotExist) {
				f.err = nil // somebody has removed the file
			}
		}
		if f.err == nil {
			f.open()
		}
	}
	if f.err == nil {
		n, err := f.out.Write(append(text, '\n'))
		f.written, f.err = f.written+int64(n), err
	}
}
