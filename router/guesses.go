// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// The file of guesses, little endian: magic, unix ms of its making, then for each
// worker a mark 1, model (u16 length, bytes), block size u32, worker id u64, rank
// u32, start of its process (unix ms) i64, number of pieces u32, for each the number
// of the one before it u32, number of blocks u32 and their local and sequence
// hashes, u64 each, in turn; number of prompts u32, for each the number of its last
// piece and the ms left to live, both u32. At the end a mark 0 and the CRC-32C of all
// before it.
const guessMagic = "KVRGUES2"

// ErrBadGuesses is wrapped by the errors of [Router.LoadGuesses] about what it read.
var ErrBadGuesses = errors.New("damaged file of guesses")

// saved are the guesses about a worker from an earlier process.
type saved struct {
	model     string
	blockSize int
	startedMS int64
	at        time.Time
	guesses   indexer.Guesses
}

// SaveGuesses writes what the router believes without having been told, so that
// [Router.LoadGuesses] of a later process can go on with it. Decisions go on
// meanwhile. The error is w's.
func (r *Router) SaveGuesses(w io.Writer) error {
	now := r.conf.Now()
	out := bufio.NewWriterSize(w, 1<<16)
	e := guessWriter{w: out, sum: crc32.New(crc32.MakeTable(crc32.Castagnoli))}
	e.write([]byte(guessMagic))
	e.write(binary.LittleEndian.AppendUint64(nil, uint64(now.UnixMilli())))
	for worker, s := range r.guesses(now) {
		e.worker(worker, &s)
	}
	e.write([]byte{0})
	e.write(binary.LittleEndian.AppendUint32(nil, e.sum.Sum32()))
	if e.err == nil {
		e.err = out.Flush()
	}
	return e.err
}

// guesses yields what is believed of each worker: those in the fleet, and those
// that have not come back yet.
func (r *Router) guesses(now time.Time) func(yield func(Worker, saved) bool) {
	type source struct {
		worker Worker
		ord    int
		saved  saved
		from   *indexer.Approx
	}
	var sources []source
	r.fleet.RLock()
	for _, p := range r.pools {
		if p.known == nil {
			continue
		}
		p.mu.Lock()
		for _, ord := range p.core.order {
			e := &p.core.entries[ord]
			sources = append(sources, source{e.worker, ord, saved{model: p.model, blockSize: p.blockSize, startedMS: e.info.StartedMS}, p.known.history})
		}
		p.mu.Unlock()
	}
	for worker, s := range r.saved {
		if s.dead(now) {
			continue
		}
		s.guesses = s.left(now)
		sources = append(sources, source{worker: worker, saved: s})
	}
	r.fleet.RUnlock()
	slices.SortFunc(sources, func(a, b source) int { return a.worker.Compare(b.worker) })

	return func(yield func(Worker, saved) bool) {
		for _, s := range sources {
			if s.from != nil {
				// A number that has another owner by now tells of the wrong worker,
				// for as long as the guesses live.
				s.saved.guesses = s.from.Guesses(now, s.ord)
			}
			if len(s.saved.guesses.Prompts) > 0 && !yield(s.worker, s.saved) {
				return
			}
		}
	}
}

// left returns the guesses with what is left of their lives.
func (s *saved) left(now time.Time) indexer.Guesses {
	g := s.guesses
	g.Prompts = slices.Clone(g.Prompts)
	gone := max(0, now.Sub(s.at))
	for i := range g.Prompts {
		g.Prompts[i].Left -= gone
	}
	return g
}

// dead says that nothing of it counts any more.
func (s *saved) dead(now time.Time) bool {
	return !slices.ContainsFunc(s.guesses.Prompts, func(p indexer.Prompt) bool { return p.Left > now.Sub(s.at) })
}

type guessWriter struct {
	w   io.Writer
	sum hash.Hash32
	buf []byte
	err error
}

func (e *guessWriter) write(b []byte) {
	if e.err != nil {
		return
	}
	_, _ = e.sum.Write(b) // a hash takes everything
	_, e.err = e.w.Write(b)
}

func (e *guessWriter) worker(w Worker, s *saved) {
	le := binary.LittleEndian
	b := append(e.buf[:0], 1)
	model := bounded(s.model)
	b = append(le.AppendUint16(b, uint16(len(model))), model...)
	b = le.AppendUint32(b, uint32(s.blockSize))
	b = le.AppendUint32(le.AppendUint64(b, w.ID), w.DPRank)
	b = le.AppendUint64(b, uint64(s.startedMS))
	b = le.AppendUint32(b, uint32(len(s.guesses.Pieces)))
	for _, p := range s.guesses.Pieces {
		b = le.AppendUint32(le.AppendUint32(b, p.Parent), uint32(len(p.Local)))
		for i := range p.Local {
			if b = le.AppendUint64(le.AppendUint64(b, p.Local[i]), p.Sequence[i]); len(b) > 1<<16 {
				e.write(b)
				b = b[:0]
			}
		}
	}
	b = le.AppendUint32(b, uint32(len(s.guesses.Prompts)))
	for _, p := range s.guesses.Prompts {
		ms := uint32(min(max(p.Left.Milliseconds(), 1), math.MaxUint32))
		b = le.AppendUint32(le.AppendUint32(b, p.Piece), ms)
	}
	e.write(b)
	e.buf = b
}

// LoadGuesses reads what [Router.SaveGuesses] wrote. The guesses about a worker
// count from the moment that it is in the fleet, if it is still the same process
// with the same model, as long as they would have lived. It returns how many
// blocks were read. A damaged file is an error that wraps [ErrBadGuesses], and
// none of it counts.
func (r *Router) LoadGuesses(in io.Reader) (blocks int, err error) {
	read := guessReader{r: bufio.NewReaderSize(in, 1<<16), sum: crc32.New(crc32.MakeTable(crc32.Castagnoli))}
	all := make(map[Worker]saved)
	magic := read.bytes(len(guessMagic))
	if read.err == nil && string(magic) != guessMagic {
		return 0, fmt.Errorf("router: %w: it begins with %q", ErrBadGuesses, magic)
	}
	at := time.UnixMilli(int64(read.u64()))
	for read.mark() {
		s := saved{at: at}
		s.model = string(read.bytes(int(read.u16())))
		s.blockSize = int(read.u32())
		w := Worker{ID: read.u64(), DPRank: read.u32()}
		s.startedMS = int64(read.u64())
		for n := read.u32(); n > 0 && read.err == nil; n-- {
			p := indexer.Piece{Parent: read.u32()}
			for n := read.u32(); n > 0 && read.err == nil; n-- {
				p.Local = append(p.Local, read.u64())
				p.Sequence = append(p.Sequence, read.u64())
			}
			s.guesses.Pieces = append(s.guesses.Pieces, p)
		}
		for n := read.u32(); n > 0 && read.err == nil; n-- {
			s.guesses.Prompts = append(s.guesses.Prompts, indexer.Prompt{Piece: read.u32(), Left: time.Duration(read.u32()) * time.Millisecond})
		}
		blocks += s.guesses.Blocks()
		all[w] = s
	}
	sum := read.sum.Sum32()
	if got := read.u32(); read.err == nil && got != sum {
		return 0, fmt.Errorf("router: %w: checksum %08x, want %08x", ErrBadGuesses, got, sum)
	}
	if read.err != nil {
		return 0, fmt.Errorf("router: %w: at byte %d: %w", ErrBadGuesses, read.at, read.err)
	}
	r.fleet.Lock()
	defer r.fleet.Unlock()
	r.saved = all
	for w := range all {
		if p := r.owners[w.ID]; p != nil {
			r.recallRankLocked(p, w)
		}
	}
	return blocks, nil
}

type guessReader struct {
	r   *bufio.Reader
	sum hash.Hash32
	at  int64
	buf [1 << 16]byte
	err error
}

// bytes returns the next n bytes, at most 65,535, until the next call.
func (d *guessReader) bytes(n int) []byte {
	if d.err != nil {
		return d.buf[:n]
	}
	if _, d.err = io.ReadFull(d.r, d.buf[:n]); errors.Is(d.err, io.EOF) {
		d.err = io.ErrUnexpectedEOF
	}
	if d.err != nil {
		clear(d.buf[:n])
		return d.buf[:n]
	}
	d.at += int64(n)
	_, _ = d.sum.Write(d.buf[:n]) // a hash takes everything
	return d.buf[:n]
}

func (d *guessReader) u16() uint16 { return binary.LittleEndian.Uint16(d.bytes(2)) }
func (d *guessReader) u32() uint32 { return binary.LittleEndian.Uint32(d.bytes(4)) }
func (d *guessReader) u64() uint64 { return binary.LittleEndian.Uint64(d.bytes(8)) }

// mark reads whether another worker follows.
func (d *guessReader) mark() bool {
	m := d.bytes(1)[0]
	if m > 1 && d.err == nil {
		d.err = fmt.Errorf("mark %d, want 0 or 1", m)
	}
	return m == 1 && d.err == nil
}

// recallLocked gives a worker what an earlier process believed of it.
func (r *Router) recallLocked(p *pool, info *WorkerInfo) {
	if len(r.saved) == 0 {
		return
	}
	for i := range max(1, info.DPSize) {
		r.recallRankLocked(p, Worker{ID: info.ID, DPRank: info.DPStart + i})
	}
}

func (r *Router) recallRankLocked(p *pool, w Worker) {
	s, some := r.saved[w]
	if !some {
		return
	}
	if p.known == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	ord, known := p.core.find(w)
	if !known {
		return
	}
	delete(r.saved, w)
	e := &p.core.entries[ord]
	if s.model != bounded(p.model) || s.blockSize != p.blockSize || s.startedMS != e.info.StartedMS {
		return
	}
	now := r.conf.Now()
	p.known.history.Restore(now, ord, e.since, s.left(now))
}
