// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Trace is a workload: requests whose prompts are chains of blocks. Requests come
// when they are due (open loop), or, where there are users, after the answers that
// these wait for (closed loop). A Trace does not change once it is made; any number
// of simulations may read it.
type Trace struct {
	Name      string
	BlockSize int // tokens in a block
	Requests  []Request
	Users     []User // closed loop; none: open loop
	// Gates are sets of requests of a closed loop. A gate opens when all its requests have ended.
	Gates [][]int32
	// Measured is how long a closed loop with requests that are not measured goes on after the first
	// gate has opened. No request begins after that. 0 = until all requests have ended.
	Measured time.Duration

	blocks blocks
}

// Request is one request of a trace.
type Request struct {
	// At is when it is due, from the beginning; open loop only.
	At time.Duration
	// Think is the time from the end of the user's last response to this
	// request; closed loop only. For the first request of a user behind a gate it
	// counts from the gate's opening.
	Think time.Duration
	// Gate is 1 more than the index of a gate that must have opened before; 0 = none.
	Gate int32
	Warm bool // fills caches only: not measured

	Session uint64 // of its conversation; 0 = none
	Input   int    // tokens of the prompt
	Output  int    // tokens of the response, at least 1
	// Priorities in the queue; see [router.Request].
	StrictPriority int
	Priority       float64
	// Blocks are numbers of blocks, dense over the trace. A number stands for
	// its whole prefix. The last one may be a block that the prompt does not fill.
	Blocks []int32
}

// User is one user of a closed loop. Its requests come one after the other.
type User struct {
	Start    time.Duration // of the first request, unless it has a gate
	Requests []int32       // indexes of Trace.Requests, in order
}

// blocks gives numbers to blocks: equal numbers mean equal prefixes.
type blocks struct {
	ids    map[link]int32
	local  []uint64 // by number
	chain  []uint64 // sequence hash, by number
	parent []int32  // by number; -1 = none
}

type link struct {
	parent int32
	id     uint64
}

// number returns the number of the block with an id behind parent, -1 if it is
// the first one.
func (b *blocks) number(parent int32, id uint64) int32 {
	key := link{parent, id}
	if n, ok := b.ids[key]; ok {
		return n
	}
	if b.ids == nil {
		b.ids = make(map[link]int32)
	}
	n := int32(len(b.local))
	b.ids[key] = n
	local := indexer.NextSequenceHash(traceSeed, id)
	sequence := local
	if parent >= 0 {
		sequence = indexer.NextSequenceHash(b.chain[parent], local)
	}
	b.local = append(b.local, local)
	b.chain = append(b.chain, sequence)
	b.parent = append(b.parent, parent)
	return n
}

// traceSeed keeps hashes of trace ids apart from those of tokens.
const traceSeed = 0x7472616365

// Distinct returns the number of distinct blocks.
func (t *Trace) Distinct() int { return len(t.blocks.local) }

// MooncakeBlock is the number of tokens in a block of the Mooncake traces.
const MooncakeBlock = 512

const (
	maxLine     = 64 << 20 // bytes of one line of a trace
	maxRequests = 1 << 24
	maxTokens   = 1 << 28 // of one prompt or response
	maxPriority = 1<<31 - 1
)

// mooncake is a line of a trace in the Mooncake format.
type mooncake struct {
	Timestamp int64    `json:"timestamp"` // ms
	Input     int      `json:"input_length"`
	Output    int      `json:"output_length"`
	HashIDs   []uint64 `json:"hash_ids"`
	Session   uint64   `json:"session_id,omitempty"` // ours; other readers ignore it
	// NVIDIA Dynamo's replay has these two fields, too.
	Priority       float64 `json:"priority,omitempty"`
	StrictPriority int     `json:"strict_priority,omitempty"`
}

// readMooncake reads a trace in the Mooncake format: a JSON object a line, with
// timestamp in ms, input_length and output_length in tokens, and hash_ids, one for
// each block of 512 tokens and one for the rest. Requests that the format puts on
// one tick are spread evenly up to the next one; without this every rule would see
// bursts that were never there. An error names the line.
func readMooncake(name string, r io.Reader) (*Trace, error) {
	t := &Trace{Name: name, BlockSize: MooncakeBlock}
	err := readLines(name, r, func(m *mooncake) error {
		if err := m.check(); err != nil {
			return err
		}
		if len(t.Requests) >= maxRequests {
			return fmt.Errorf("more than %d requests", maxRequests)
		}
		req := Request{At: time.Duration(m.Timestamp) * time.Millisecond, Session: m.Session, Input: m.Input, Output: max(1, m.Output), StrictPriority: m.StrictPriority, Priority: m.Priority}
		parent := none
		for _, id := range m.HashIDs {
			parent = t.blocks.number(parent, id)
			req.Blocks = append(req.Blocks, parent)
		}
		t.Requests = append(t.Requests, req)
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(t.Requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	t.spread()
	return t, nil
}

// readLines reads JSON objects, one a line, empty lines apart. An error names the line. A file
// without objects is an error.
func readLines[T any](name string, r io.Reader, each func(*T) error) error {
	lines, line, objects := bufio.NewScanner(r), 0, 0
	lines.Buffer(make([]byte, 1<<16), maxLine)
	for lines.Scan() {
		line++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		objects++
		var object T
		err := json.Unmarshal(lines.Bytes(), &object)
		if err == nil {
			err = each(&object)
		}
		if err != nil {
			return fmt.Errorf("replay: %s: line %d: %w", name, line, err)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("replay: %s: line %d: %w", name, line+1, err)
	}
	if objects == 0 {
		return fmt.Errorf("replay: %s: no requests", name)
	}
	return nil
}

func (m *mooncake) check() error {
	switch want := (m.Input + MooncakeBlock - 1) / MooncakeBlock; {
	case m.Timestamp < 0 || m.Timestamp > 1<<40:
		return fmt.Errorf("timestamp is %d, want 0 or more ms", m.Timestamp)
	case m.Input < 1 || m.Input > maxTokens:
		return fmt.Errorf("input_length is %d, want 1 to %d", m.Input, maxTokens)
	case m.Output < 0 || m.Output > maxTokens:
		return fmt.Errorf("output_length is %d, want 0 to %d", m.Output, maxTokens)
	case !(math.Abs(m.Priority) <= maxPriority):
		return fmt.Errorf("priority is %v, want -%d to %d", m.Priority, maxPriority, maxPriority)
	case m.StrictPriority < 0 || m.StrictPriority > maxPriority:
		return fmt.Errorf("strict_priority is %d, want 0 to %d", m.StrictPriority, maxPriority)
	case len(m.HashIDs) != want:
		return fmt.Errorf("%d hash_ids for an input_length of %d, want %d", len(m.HashIDs), m.Input, want)
	}
	return nil
}

// lastTick is how long the last tick of a trace lasts.
const lastTick = 3 * time.Second

// spread moves the requests of a tick apart. A tick that one request has alone
// stays as it is.
func (t *Trace) spread() {
	for from := 0; from < len(t.Requests); {
		at := t.Requests[from].At
		to := from + 1
		for to < len(t.Requests) && t.Requests[to].At == at {
			to++
		}
		next := at + lastTick
		if to < len(t.Requests) {
			next = t.Requests[to].At
		}
		for j := from; j < to; j++ {
			t.Requests[j].At = at + (next-at)*time.Duration(j-from)/time.Duration(to-from)
		}
		from = to
	}
}

// WriteMooncake writes an open-loop trace in the Mooncake format. Blocks are
// numbered as they are in the trace, and a rest of a prompt that has no block gets a
// number of its own. Times are cut to ms, and requests of one ms come back spread
// over the time to the next.
func (t *Trace) WriteMooncake(w io.Writer) error {
	if len(t.Users) > 0 {
		return fmt.Errorf("replay: %s: a closed loop has no timestamps to write", t.Name)
	}
	if t.BlockSize != MooncakeBlock {
		return fmt.Errorf("replay: %s: blocks of %d tokens, the format has %d", t.Name, t.BlockSize, MooncakeBlock)
	}
	out := bufio.NewWriter(w)
	enc := json.NewEncoder(out)
	rest := uint64(t.Distinct())
	for i := range t.Requests {
		r := &t.Requests[i]
		m := mooncake{Timestamp: r.At.Milliseconds(), Input: r.Input, Output: r.Output, Session: r.Session, Priority: r.Priority, StrictPriority: r.StrictPriority, HashIDs: make([]uint64, len(r.Blocks))}
		for j, b := range r.Blocks {
			m.HashIDs[j] = uint64(b)
		}
		for len(m.HashIDs)*t.BlockSize < r.Input {
			m.HashIDs = append(m.HashIDs, rest)
			rest++
		}
		if err := enc.Encode(&m); err != nil {
			return err
		}
	}
	return out.Flush()
}

// LoadMooncake reads a file in the Mooncake format.
func LoadMooncake(name string) (*Trace, error) {
	base, _, _ := strings.Cut(filepath.Base(name), ".")
	return readFile(name, func(r io.Reader) (*Trace, error) { return readMooncake(base, r) })
}

// readFile reads a file, unpacked if its name ends with .gz.
func readFile[T any](name string, read func(io.Reader) (*T, error)) (*T, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	defer func() { _ = file.Close() }()
	if !strings.HasSuffix(name, ".gz") {
		return read(file)
	}
	unpacked, err := gzip.NewReader(file)
	if err != nil {
		return nil, fmt.Errorf("replay: %s: %w", name, err)
	}
	return read(unpacked)
}
