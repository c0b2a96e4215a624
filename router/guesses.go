// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
)

// The file of guesses is one of [records]. The payloads of its records, one after the
// other, are a stream of [encoding/gob] with a savedGuesses for each worker. The number
// at the file's end is that of the blocks.
const (
	guessMagic   = "KVRGUES4"
	guessVersion = 1
	guessPart    = 1       // type of all records
	guessRecord  = 1 << 16 // payload of a record in bytes, at most
)

// savedGuesses are the guesses about a worker from an earlier process, or for a later one.
type savedGuesses struct {
	Worker    Worker
	Model     string
	BlockSize int
	StartedMS int64
	At        time.Time // time at which Guesses was valid
	Guesses   indexer.Guesses
}

// SaveGuesses writes the predictions for workers without events, for [Router.LoadGuesses] of a
// later process. Decisions continue meanwhile. The error is w's.
func (r *Router) SaveGuesses(w io.Writer) error {
	file := records.NewWriter(w, records.Header{Magic: guessMagic, Version: guessVersion})
	out := gob.NewEncoder(recordWriter{file})
	blocks := 0
	for s := range r.guesses(r.conf.Now()) {
		if err := out.Encode(&s); err != nil {
			return err
		}
		blocks += s.Guesses.Blocks()
	}
	return file.Close(uint64(blocks))
}

// LoadGuesses reads what [Router.SaveGuesses] wrote, and returns the number of blocks. The
// predictions about a worker count from the moment when it is in the fleet until their
// original end, if it is still the same process with the same model. A file that is
// damaged or of another form is refused as a whole.
func (r *Router) LoadGuesses(in io.Reader) (blocks int, err error) {
	file, _, err := records.NewReader(in, guessMagic, guessVersion)
	if err != nil {
		return 0, fmt.Errorf("router: guesses: %w", err)
	}
	all := make(map[Worker]savedGuesses)
	from := recordReader{file: file}
	for dec := gob.NewDecoder(&from); ; {
		var s savedGuesses
		err := dec.Decode(&s)
		if errors.Is(err, io.EOF) {
			break
		}
		if from.err != nil {
			return 0, fmt.Errorf("router: guesses: %w", from.err)
		}
		if err != nil {
			return 0, fmt.Errorf("router: guesses: %w: record %d: %w", records.ErrBad, file.Records(), err)
		}
		blocks += s.Guesses.Blocks()
		all[s.Worker] = s
	}
	if file.Count() != uint64(blocks) {
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

// recordWriter writes a stream as records.
type recordWriter struct{ file *records.Writer }

func (w recordWriter) Write(b []byte) (int, error) {
	for part := range slices.Chunk(b, guessRecord) {
		if err := w.file.Record(guessPart, func(to []byte) []byte { return append(to, part...) }); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

// recordReader reads a stream from records.
type recordReader struct {
	file *records.Reader
	rest []byte
	err  error // of the file, except its end
}

func (r *recordReader) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		kind, payload, err := r.file.Next()
		switch {
		case errors.Is(err, io.EOF):
			return 0, io.EOF
		case err != nil:
			r.err = err
			return 0, err
		case kind != guessPart:
			r.err = fmt.Errorf("%w: record %d has the type %d", records.ErrBad, r.file.Records(), kind)
			return 0, r.err
		}
		r.rest = payload
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// guesses yields the predictions about each worker: of the fleet, and of an earlier process.
func (r *Router) guesses(now time.Time) iter.Seq[savedGuesses] {
	type source struct {
		savedGuesses
		ord  int
		from *indexer.Approx // nil if the guesses are there already
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
			s := savedGuesses{Worker: e.worker, Model: bounded(p.model), BlockSize: p.blockSize, StartedMS: e.info.StartedMS, At: now}
			sources = append(sources, source{s, ord, p.known.history})
		}
		p.mu.Unlock()
	}
	for _, s := range r.saved {
		s.Guesses, s.At = s.left(now), now
		sources = append(sources, source{savedGuesses: s})
	}
	r.fleet.RUnlock()
	slices.SortFunc(sources, func(a, b source) int { return a.Worker.Compare(b.Worker) })

	return func(yield func(savedGuesses) bool) {
		for _, s := range sources {
			if s.from != nil {
				// If the ordinal has another worker by now, its predictions are saved for
				// the wrong worker. They live for a short time only.
				s.Guesses = s.from.Guesses(now, s.ord)
			}
			alive := slices.ContainsFunc(s.Guesses.Prompts, func(p indexer.Prompt) bool { return p.Left > 0 })
			if alive && !yield(s.savedGuesses) {
				return
			}
		}
	}
}

// left returns the predictions with the rest of their lives.
func (s *savedGuesses) left(now time.Time) indexer.Guesses {
	g := s.Guesses
	g.Prompts = slices.Clone(g.Prompts)
	gone := max(0, now.Sub(s.At))
	for i := range g.Prompts {
		g.Prompts[i].Left -= gone
	}
	return g
}

// recallLocked gives a worker the predictions of an earlier process.
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
	if s.Model != bounded(p.model) || s.BlockSize != p.blockSize || s.StartedMS != e.info.StartedMS {
		return
	}
	now := r.conf.Now()
	p.known.history.Restore(now, ord, e.since, s.left(now))
}
