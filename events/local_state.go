// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"maps"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// The file of what is known of the workers' caches, little endian: magic, scope (u16
// length, bytes), then for each rank a mark 1, home (u16 length, bytes), worker id u64, rank u32, start of its process (unix ms) i64,
// publisher u64, last event id u64, number of events u32 and the events: kind u8,
// tier u8, whether it has a parent u8, parent u64, number of blocks u32 and the blocks;
// stored ones as external and local hash, removed ones as external hash, all u64.
// At the end a mark 0 and the CRC-32C of all before it.
const stateMagic = "KVREVTS1"

// ErrBadState is wrapped by the errors of [Subscriber.Load] about what it read.
var ErrBadState = errors.New("damaged file of workers' caches")

// RankName names a rank of a worker.
type RankName struct {
	WorkerID uint64
	DPRank   uint32
}

// Held is what the sink holds of some ranks at one moment. Runs is read once.
type Held struct {
	Ranks []RankName // by worker number in Runs
	Runs  iter.Seq[indexer.Run]
}

// Save writes what is known of the workers' caches and up to which event, so that
// [Subscriber.Load] of a later process can go on with it. The sink is asked for what
// it holds while no event comes, and read while events go on. Left out are ranks
// that are suspect or about to be read anew, and those whose events a stream keeps.
// The error is w's.
func (s *Subscriber) Save(w io.Writer, hold func() []Held) error {
	s.mu.Lock()
	held := hold()
	known := s.tracker.savable()
	s.mu.Unlock()

	out := bufio.NewWriterSize(w, 1<<16)
	e := stateWriter{w: out}
	e.write([]byte(stateMagic))
	e.write(appendText(nil, s.conf.Scope.Bucket("")))
	for _, h := range held {
		all := AllRankEvents(h.Runs)
		for _, n := range slices.Sorted(maps.Keys(all)) {
			if n >= len(h.Ranks) {
				continue
			}
			if r, ok := known[rankKey{h.Ranks[n].WorkerID, h.Ranks[n].DPRank}]; ok {
				delete(known, rankKey{r.WorkerID, r.DPRank})
				r.Events = all[n]
				e.rank(&r)
			}
		}
	}
	// Those that hold nothing.
	for _, key := range slices.SortedFunc(maps.Keys(known), func(a, b rankKey) int {
		return cmp.Or(cmp.Compare(a.worker, b.worker), cmp.Compare(a.rank, b.rank))
	}) {
		r := known[key]
		e.rank(&r)
	}
	e.write([]byte{0})
	e.write(binary.LittleEndian.AppendUint32(nil, e.sum))
	if e.err == nil {
		e.err = out.Flush()
	}
	return e.err
}

// Load takes what an earlier process saved, and returns of how many ranks. Each is
// used when its worker is told of, if that is still the same process, within a
// minute. The error wraps [ErrBadState], unless it is in's; then nothing is taken.
func (s *Subscriber) Load(in io.Reader) (ranks int, err error) {
	saved, err := readState(in, s.conf.Scope.Bucket(""))
	if err != nil {
		return 0, fmt.Errorf("events: load: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.load(s.conf.Now(), saved)
	return len(saved), nil
}

// maxText bounds a text in the file; longer ones are cut.
const maxText = 1 << 10

func appendText(dst []byte, text string) []byte {
	text = text[:min(len(text), maxText)]
	return append(binary.LittleEndian.AppendUint16(dst, uint16(len(text))), text...)
}

// savable returns the ranks that can be saved, without what they hold.
func (t *tracker) savable() map[rankKey]Saved {
	known := make(map[rankKey]Saved, len(t.ranks))
	for key, r := range t.ranks {
		src := t.workers[key.worker]
		c := r.cursor()
		if r.state == StateSuspect || r.many || !c.set || r.repair != nil && r.repair.dump || src.Feed == FeedDurable {
			continue
		}
		known[key] = Saved{WorkerID: key.worker, DPRank: key.rank, StartedMS: src.StartedMS, Home: src.Home, Publisher: r.newest, Cursor: c.id}
	}
	// Who has not come back yet may come still.
	for key, s := range t.saved {
		known[key] = *s
	}
	return known
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli) //nolint:gochecknoglobals // a table

type stateWriter struct {
	w   io.Writer
	sum uint32
	buf []byte
	err error
}

func (e *stateWriter) write(data []byte) {
	e.sum = crc32.Update(e.sum, castagnoli, data)
	if e.err == nil {
		_, e.err = e.w.Write(data)
	}
}

func (e *stateWriter) rank(s *Saved) {
	le := binary.LittleEndian
	b := append(e.buf[:0], 1)
	b = appendText(b, s.Home)
	b = le.AppendUint32(le.AppendUint64(b, s.WorkerID), s.DPRank)
	b = le.AppendUint64(b, uint64(s.StartedMS))
	b = le.AppendUint64(le.AppendUint64(b, s.Publisher), s.Cursor)
	b = le.AppendUint32(b, uint32(len(s.Events)))
	e.write(b)
	for i := range s.Events {
		ev := &s.Events[i]
		b = append(b[:0], byte(ev.Kind), byte(ev.Tier), 0)
		if ev.HasParent {
			b[2] = 1
		}
		b = le.AppendUint64(b, ev.Parent)
		b = le.AppendUint32(b, uint32(len(ev.Blocks)+len(ev.Externals)))
		for _, k := range ev.Blocks {
			b = le.AppendUint64(le.AppendUint64(b, k.External), k.Local)
		}
		for _, k := range ev.Externals {
			b = le.AppendUint64(b, k)
		}
		e.write(b)
	}
	e.buf = b
}

// stateReader reads what a stateWriter wrote. After an error it reads zeros.
type stateReader struct {
	r   *bufio.Reader
	sum uint32
	buf [4096]byte
	err error
}

// bytes reads n bytes, at most as many as the buffer has.
func (d *stateReader) bytes(n int) []byte {
	b := d.buf[:n]
	if d.err == nil {
		_, d.err = io.ReadFull(d.r, b)
	}
	if d.err != nil {
		clear(b)
	}
	d.sum = crc32.Update(d.sum, castagnoli, b)
	return b
}

func (d *stateReader) u32() uint32 { return binary.LittleEndian.Uint32(d.bytes(4)) }
func (d *stateReader) u64() uint64 { return binary.LittleEndian.Uint64(d.bytes(8)) }

func (d *stateReader) text() string {
	n := binary.LittleEndian.Uint16(d.bytes(2))
	if n > maxText {
		d.wrong("the length of a text", uint64(n))
		return ""
	}
	return string(d.bytes(int(n)))
}

func (d *stateReader) wrong(what string, v uint64) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s is %d", ErrBadState, what, v)
	}
}

func readState(in io.Reader, scope string) ([]Saved, error) {
	d := stateReader{r: bufio.NewReaderSize(in, 1<<16)}
	if magic := string(d.bytes(len(stateMagic))); d.err == nil && magic != stateMagic {
		return nil, fmt.Errorf("%w: it begins with %q", ErrBadState, magic)
	}
	if got := d.text(); d.err == nil && got != scope {
		return nil, fmt.Errorf("%w: it is of the scope %.64q", ErrBadState, got)
	}
	var saved []Saved
	for d.err == nil {
		switch mark := d.bytes(1)[0]; {
		case d.err != nil:
		case mark == 1 && len(saved) < maxRanks:
			saved = append(saved, d.rank())
			continue
		case mark != 0:
			d.wrong("a mark", uint64(mark))
		}
		break
	}
	sum := d.sum
	if stored := d.u32(); d.err == nil && stored != sum {
		d.wrong("the checksum", uint64(stored))
	}
	if _, err := d.r.ReadByte(); d.err == nil && err == nil {
		d.wrong("what follows the checksum, at least", 1)
	}
	switch {
	case errors.Is(d.err, io.EOF), errors.Is(d.err, io.ErrUnexpectedEOF):
		return nil, fmt.Errorf("%w: it ends too early", ErrBadState)
	case d.err != nil:
		return nil, d.err
	}
	return saved, nil
}

func (d *stateReader) rank() (s Saved) {
	s.Home = d.text()
	s.WorkerID, s.DPRank, s.StartedMS = d.u64(), d.u32(), int64(d.u64())
	s.Publisher, s.Cursor = d.u64(), d.u64()
	for range d.u32() {
		if d.err != nil {
			break // nothing is reserved on the word of a number
		}
		s.Events = append(s.Events, d.event())
	}
	return s
}

func (d *stateReader) event() (ev indexer.Event) {
	head := d.bytes(3)
	ev.Kind, ev.Tier, ev.HasParent = indexer.Kind(head[0]), indexer.Tier(head[1]), head[2] == 1
	ev.Parent = d.u64()
	n := d.u32()
	if n > maxEventBlocks*4 || int(ev.Tier) >= len(tiers) || ev.Kind != indexer.Stored && ev.Kind != indexer.Removed {
		d.wrong("an event's length or kind", uint64(n))
	}
	for range n {
		switch {
		case d.err != nil:
			return ev
		case ev.Kind == indexer.Stored:
			ev.Blocks = append(ev.Blocks, indexer.Block{External: d.u64(), Local: d.u64()})
		default:
			ev.Externals = append(ev.Externals, d.u64())
		}
	}
	return ev
}
