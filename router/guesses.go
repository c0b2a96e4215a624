// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
)

// The file of guesses is one of [records]; its header has the unix ms of its making in
// the first 8 bytes of its body. For each worker there is a record that begins it,
// and behind it records with its pieces and its prompts, each in their order:
//
//	guessWorker   model (u16 length, bytes), block size u32, worker id u64, rank u32,
//	              start of its process (unix ms) i64
//	guessPieces   pieces: the number of the one before it u32, number of blocks u32 and
//	              their sequence hashes, u64 each
//	guessMore     further blocks of the last piece, as in there
//	guessPrompts  prompts: the number of the last piece, the ms left to live, both u32
//
// The number of its own at the end is that of the blocks.
const (
	guessMagic   = "KVRGUES3"
	guessVersion = 2
	guessWorker  = 1
	guessPieces  = 2
	guessPrompts = 3
	guessMore    = 4
	// guessBatch is how large a record gets in bytes, but for its last piece;
	// guessRoom is how many blocks of a piece are in one.
	guessBatch = 1 << 16
	guessRoom  = guessBatch / 8
)

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
	h := records.Header{Magic: guessMagic, Version: guessVersion}
	binary.LittleEndian.PutUint64(h.Body[:], uint64(now.UnixMilli()))
	out := guessWriter{Writer: records.NewWriter(w, h)}
	for worker, s := range r.guesses(now) {
		if err := out.worker(worker, &s); err != nil {
			return err
		}
	}
	return out.Close(out.blocks)
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
	*records.Writer
	blocks uint64
}

func (e *guessWriter) worker(w Worker, s *saved) error {
	le := binary.LittleEndian
	err := e.Record(guessWorker, func(b []byte) []byte {
		model := bounded(s.model)
		b = append(le.AppendUint16(b, uint16(len(model))), model...)
		b = le.AppendUint32(b, uint32(s.blockSize))
		b = le.AppendUint32(le.AppendUint64(b, w.ID), w.DPRank)
		return le.AppendUint64(b, uint64(s.startedMS))
	})
	for pieces := s.guesses.Pieces; len(pieces) > 0 && err == nil; {
		var p *indexer.Piece
		err = e.Record(guessPieces, func(b []byte) []byte {
			begin := len(b)
			for p == nil || len(pieces) > 0 && len(p.Sequence) <= guessRoom && len(b)-begin < guessBatch {
				p, pieces = &pieces[0], pieces[1:]
				b = le.AppendUint32(le.AppendUint32(b, p.Parent), uint32(min(len(p.Sequence), guessRoom)))
				b = e.appendBlocks(b, p, 0)
			}
			return b
		})
		for at := guessRoom; at < len(p.Sequence) && err == nil; at += guessRoom {
			err = e.Record(guessMore, func(b []byte) []byte { return e.appendBlocks(b, p, at) })
		}
	}
	for prompts := range slices.Chunk(s.guesses.Prompts, guessBatch/8) {
		if err != nil {
			break
		}
		err = e.Record(guessPrompts, func(b []byte) []byte {
			for _, p := range prompts {
				ms := uint32(min(max(p.Left.Milliseconds(), 1), math.MaxUint32))
				b = le.AppendUint32(le.AppendUint32(b, p.Piece), ms)
			}
			return b
		})
	}
	return err
}

// appendBlocks appends the blocks of a piece from one on, as many as a record has.
func (e *guessWriter) appendBlocks(b []byte, p *indexer.Piece, from int) []byte {
	to := min(from+guessRoom, len(p.Sequence))
	for _, s := range p.Sequence[from:to] {
		b = binary.LittleEndian.AppendUint64(b, s)
	}
	e.blocks += uint64(to - from)
	return b
}

// LoadGuesses reads what [Router.SaveGuesses] wrote. The guesses about a worker
// count from the moment that it is in the fleet, if it is still the same process
// with the same model, as long as they would have lived. It returns how many
// blocks were read. A file that is damaged or of another form is refused with an
// error that says so, and none of it counts.
func (r *Router) LoadGuesses(in io.Reader) (blocks int, err error) {
	file, h, err := records.NewReader(in, guessMagic, guessVersion)
	if err != nil {
		return 0, fmt.Errorf("router: guesses: %w", err)
	}
	at := time.UnixMilli(int64(binary.LittleEndian.Uint64(h.Body[:])))
	all := make(map[Worker]saved)
	var w Worker
	var s *saved // of the worker whose records are read
	keep := func() {
		if s != nil {
			blocks += s.guesses.Blocks()
			all[w] = *s
		}
	}
	for {
		kind, payload, err := file.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		d := guessFields{rest: payload}
		switch {
		case err != nil:
			return 0, fmt.Errorf("router: guesses: %w", err)
		case kind == guessWorker:
			keep()
			s = &saved{at: at, model: string(d.bytes(int(d.u16()))), blockSize: int(d.u32())}
			w = Worker{ID: d.u64(), DPRank: d.u32()}
			s.startedMS = int64(d.u64())
		case kind == guessPieces && s != nil:
			for len(d.rest) > 0 && !d.bad {
				s.guesses.Pieces = append(s.guesses.Pieces, d.piece())
			}
		case kind == guessMore && s != nil && len(s.guesses.Pieces) > 0:
			d.blocks(&s.guesses.Pieces[len(s.guesses.Pieces)-1], len(payload)/8)
		case kind == guessPrompts && s != nil:
			for len(d.rest) > 0 && !d.bad {
				s.guesses.Prompts = append(s.guesses.Prompts, indexer.Prompt{Piece: d.u32(), Left: time.Duration(d.u32()) * time.Millisecond})
			}
		default:
			d.bad = true
		}
		if d.bad || len(d.rest) > 0 {
			return 0, fmt.Errorf("router: guesses: %w: record %d of type %d cannot be read", records.ErrBad, file.Records(), kind)
		}
	}
	if keep(); file.Count() != uint64(blocks) {
		return 0, fmt.Errorf("router: guesses: %w: it has %d blocks, want %d", records.ErrBad, blocks, file.Count())
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

// guessFields reads a record's payload. After bad bytes it reads zeros.
type guessFields struct {
	rest []byte
	bad  bool
}

func (d *guessFields) bytes(n int) []byte {
	if d.bad = d.bad || n > len(d.rest); d.bad {
		d.rest = nil
		return make([]byte, min(n, 8))
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

func (d *guessFields) u16() uint16 { return binary.LittleEndian.Uint16(d.bytes(2)) }
func (d *guessFields) u32() uint32 { return binary.LittleEndian.Uint32(d.bytes(4)) }
func (d *guessFields) u64() uint64 { return binary.LittleEndian.Uint64(d.bytes(8)) }

func (d *guessFields) piece() (p indexer.Piece) {
	p.Parent = d.u32()
	d.blocks(&p, int(d.u32()))
	return p
}

// blocks adds n blocks to a piece.
func (d *guessFields) blocks(p *indexer.Piece, n int) {
	if n > len(d.rest)/8 {
		d.rest, d.bad = nil, true
		return
	}
	for range n {
		p.Sequence = append(p.Sequence, d.u64())
	}
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
