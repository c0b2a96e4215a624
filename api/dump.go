// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/indexer"
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

// dumpStall is how long a client may take for a part of a dump before it is given
// up: the index keeps what changes meanwhile.
const dumpStall = 10 * time.Second

// dumpWait is how long a dump waits for another one, or for a snapshot.
const dumpWait = 2 * time.Second

// dump writes the index as JSON lines, as it is at one moment.
func (c *Config) dump(w http.ResponseWriter, req *http.Request) {
	sorted := false
	switch v := req.FormValue("sort"); v {
	case "", "0":
	case "1":
		sorted = true
	default:
		fail(w, http.StatusBadRequest, openai.InvalidRequest, "sort", "sort is "+strconv.Quote(v)+", want 0 or 1")
		return
	}
	d, ok := c.Router.Dump()
	for patience := time.After(dumpWait); !ok && patience != nil && req.Context().Err() == nil; d, ok = c.Router.Dump() {
		select {
		case <-patience:
			patience = nil
		case <-time.After(10 * time.Millisecond):
		}
	}
	if !ok {
		w.Header().Set("Retry-After", "5")
		fail(w, http.StatusServiceUnavailable, openai.Unavailable, "", "another dump or snapshot is being made; ask again")
		return
	}
	defer d.Close()
	head := dumpHeader{Dump: 1, Scope: c.Scope, HashSeed: 1337, CreatedMS: time.Now().UnixMilli(), Owners: len(d.Holders), Pools: []dumpPool{}}
	if c.Stream != nil {
		head.LastStreamSeq = c.Stream()
	}
	for i, p := range d.Pools {
		head.Pools = append(head.Pools, dumpPool{p.Model, p.BlockSize})
		if i == 0 {
			head.BlockSize = p.BlockSize
		} else if head.BlockSize != p.BlockSize {
			head.BlockSize = 0
		}
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := bufio.NewWriterSize(&patient{w, http.NewResponseController(w)}, 64<<10)
	// An error of the connection is the client's own doing: it misses the last line.
	defer func() { _ = out.Flush() }()
	enc := json.NewEncoder(out)
	if enc.Encode(head) != nil {
		return
	}
	var end dumpEnd
	var line []byte
	for ev := range d.Events(sorted) {
		line = appendDumped(line[:0], &ev, end.End.Events)
		if _, err := out.Write(line); err != nil {
			return
		}
		end.End.Events++
		end.End.Blocks += len(ev.Event.Blocks)
	}
	_ = enc.Encode(end) // see above
}

// patient gives each write its time.
type patient struct {
	w       http.ResponseWriter
	control *http.ResponseController
}

func (p *patient) Write(b []byte) (int, error) {
	// Writers of tests have no deadline.
	_ = p.control.SetWriteDeadline(time.Now().Add(dumpStall))
	return p.w.Write(b)
}

// tierNames are the names of the storage tiers on the bus.
//
//nolint:gochecknoglobals // a table
var tierNames = [...]string{"device", "host_pinned", "disk", "external"}

// appendDumped appends an event in the form in which events travel as JSON.
func appendDumped(b []byte, ev *router.DumpedEvent, id int) []byte {
	b = strconv.AppendUint(append(b, `{"worker_id":`...), ev.Worker.ID, 10)
	b = append(append(b, `,"storage_tier":"`...), tierNames[min(ev.Event.Tier, indexer.External)]...)
	b = strconv.AppendInt(append(b, `","event":{"event_id":`...), int64(id), 10)
	b = append(b, `,"data":{"stored":{"parent_hash":`...)
	if ev.Event.HasParent {
		b = strconv.AppendUint(b, ev.Event.Parent, 10)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"start_position":`...)
	if ev.Hole {
		b = strconv.AppendInt(b, int64(ev.Position), 10)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"blocks":[`...)
	for i, block := range ev.Event.Blocks {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(append(b, `{"block_hash":`...), block.External, 10)
		b = strconv.AppendUint(append(b, `,"tokens_hash":`...), block.Local, 10)
		b = append(b, `,"mm_extra_info":null}`...)
	}
	b = strconv.AppendUint(append(b, `]}},"dp_rank":`...), uint64(ev.Worker.DPRank), 10)
	return append(b, "}}\n"...)
}
