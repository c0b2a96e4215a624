// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// dumpHeader is the first line of a dump.
type dumpHeader struct {
	Dump          int        `json:"kvroute_dump"` // version of the form: 1
	Scope         string     `json:"scope"`
	BlockSize     int        `json:"block_size"` // of all pools, or 0
	HashSeed      int        `json:"hash_seed"`
	CreatedMS     int64      `json:"created_ms"`
	LastStreamSeq uint64     `json:"last_stream_seq"`
	Owners        int        `json:"owners"`
	Pools         []dumpPool `json:"pools"`
}

type dumpPool struct {
	Model     string `json:"model"`
	BlockSize int    `json:"block_size"`
}

// dumpEnd is the last line of a dump.
type dumpEnd struct {
	End struct {
		Events int `json:"events"`
		Blocks int `json:"blocks"`
	} `json:"kvroute_end"`
}

// hashSeed is the seed of all block hashes.
const hashSeed = 1337

// stall is how long a client may take to read a part of a dump or of /v1/live before the answer
// ends: during a dump the index keeps the changes.
const stall = 10 * time.Second

// dumpWait is how long a dump waits for another one, or for a snapshot.
const dumpWait = 2 * time.Second

// dump writes the index as JSON lines, event by event, as it is at one moment; see
// [router.Router.Dump]. If the client reads too slowly for the changes meanwhile, the dump ends
// early, without its last line.
func (c *Config) dump(w http.ResponseWriter, req *http.Request) {
	ctx, cancel := context.WithTimeoutCause(req.Context(), dumpWait, errors.New("another dump, or a snapshot, takes longer"))
	defer cancel()
	d, err := c.Router.AwaitDump(ctx)
	if err != nil {
		dumping().Write(w)
		return
	}
	defer d.Close()
	head := dumpHeader{Dump: 1, Scope: c.Scope, HashSeed: hashSeed, CreatedMS: time.Now().UnixMilli(), Owners: len(d.Holders), Pools: []dumpPool{}}
	if c.Stream != nil {
		head.LastStreamSeq = c.Stream()
	}
	for i, p := range d.Pools {
		head.Pools = append(head.Pools, dumpPool(p))
		if i == 0 {
			head.BlockSize = p.BlockSize
		} else if head.BlockSize != p.BlockSize {
			head.BlockSize = 0
		}
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := bufio.NewWriterSize(&patient{w, http.NewResponseController(w), stall}, 64<<10)
	// After an error of the connection the client misses the last line.
	defer func() { _ = out.Flush() }()
	enc := json.NewEncoder(out)
	if enc.Encode(head) != nil {
		return
	}
	var end dumpEnd
	var line []byte
	for ev := range d.Events() {
		line = append(ev.AppendJSON(line[:0], end.End.Events), '\n')
		if _, err := out.Write(line); err != nil {
			return
		}
		end.End.Events++
		end.End.Blocks += len(ev.Event.Blocks)
	}
	if d.Err() == nil { // a dump that ended early has no last line
		_ = enc.Encode(end) // see above
	}
}

// patient gives each write its own deadline.
type patient struct {
	w       http.ResponseWriter
	control *http.ResponseController
	stall   time.Duration // of a write
}

func (p *patient) Write(b []byte) (int, error) {
	// Writers of tests have no deadline.
	_ = p.control.SetWriteDeadline(time.Now().Add(p.stall))
	return p.w.Write(b)
}

// dumping returns the error for a request while another dump takes longer than dumpWait.
func dumping() *openai.Error {
	return &openai.Error{Status: http.StatusServiceUnavailable, Message: "another dump or snapshot is being made; ask again", Type: openai.Unavailable, Retry: 5}
}

// dumpTime is how long a client may take to read dump_events.
const dumpTime = 5 * time.Minute

func (c *Config) dumpEvents(w http.ResponseWriter, req *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	// Another dump waits for this one: a client that does not read must not stop it. Writers of
	// tests have no deadline.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(dumpTime))
	ctx, cancel := context.WithTimeout(req.Context(), dumpTime)
	defer cancel()
	if err := c.Router.DumpEvents(ctx, w); errors.Is(err, router.ErrDumping) {
		dumping().Write(w)
	} // after any other error the array has no end; an error of the connection is ignored
}
