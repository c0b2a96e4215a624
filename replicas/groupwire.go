// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// Topics of a router group.
const (
	summaryTopic = "summary"
	getTopic     = "get" // behind summaryTopic: requests for a full
	probeTopic   = "probe"
)

// Kinds of summaries.
const (
	summaryFull  = "full"  // the load, and a part of what the group holds
	summaryDelta = "delta" // the load, and what it holds besides
	summaryLoad  = "load"  // the load
)

// Bounds on what is believed of a summary or a probe.
const (
	maxGroupName   = 256 // bytes
	maxModelName   = 256
	maxSummaryPart = 512 << 10 // bytes of a filter in a message
	maxSummaryBits = 1 << 29   // of a filter: 64 MiB
	maxSummaryAdds = 8192      // hashes in a delta
	maxStride      = 1 << 10
	maxProbeBlocks = 4096 // of the prompt, in a probe: a longer one goes by the summaries
)

var errSummaryShape = errors.New("unexpected shape")

// summary is a message of a group about its workers of one model and block size.
type summary struct {
	group, model string
	blockSize    int
	router       uint64 // the replica that speaks for the group
	epoch        uint64 // another one with each full
	seq          uint64 // of the message in the epoch, from 0
	kind         string
	stride       int // between checkpoints; 0: what the group holds it does not tell
	taken        time.Time
	interval     time.Duration
	load         router.Summary // its counts only
	filter       filterPart
	added        []byte // sequence hashes, 8 bytes each, little endian
}

// filterPart is a part of a filter as it travels.
type filterPart struct {
	m, k, n     uint64
	part, parts int
	data        []byte
}

// appendSummary appends the encoding of a summary.
func appendSummary(b []byte, s *summary) []byte {
	n := uint32(12)
	if s.kind != summaryLoad {
		n++
	}
	b = msgp.AppendMapHeader(b, n)
	b = msgp.AppendInt(msgp.AppendString(b, "v"), 1)
	b = msgp.AppendString(msgp.AppendString(b, "group"), s.group)
	b = msgp.AppendString(msgp.AppendString(b, "model"), s.model)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), s.blockSize)
	b = msgp.AppendUint64(msgp.AppendString(b, "router_id"), s.router)
	b = msgp.AppendUint64(msgp.AppendString(b, "epoch"), s.epoch)
	b = msgp.AppendUint64(msgp.AppendString(b, "seq"), s.seq)
	b = msgp.AppendString(msgp.AppendString(b, "kind"), s.kind)
	b = msgp.AppendInt(msgp.AppendString(b, "stride"), s.stride)
	b = msgp.AppendInt64(msgp.AppendString(b, "taken_ms"), s.taken.UnixMilli())
	b = msgp.AppendInt64(msgp.AppendString(b, "interval_ms"), s.interval.Milliseconds())
	b = msgp.AppendString(b, "load")
	counts := summaryCounts(&s.load)
	b = msgp.AppendMapHeader(b, uint32(len(counts)))
	for _, c := range counts {
		b = msgp.AppendInt(msgp.AppendString(b, c.name), *c.value)
	}
	switch s.kind {
	case summaryFull:
		f := &s.filter
		b = msgp.AppendMapHeader(msgp.AppendString(b, "filter"), 6)
		b = msgp.AppendUint64(msgp.AppendString(b, "m"), f.m)
		b = msgp.AppendUint64(msgp.AppendString(b, "k"), f.k)
		b = msgp.AppendUint64(msgp.AppendString(b, "n"), f.n)
		b = msgp.AppendInt(msgp.AppendString(b, "part"), f.part)
		b = msgp.AppendInt(msgp.AppendString(b, "parts"), f.parts)
		b = msgp.AppendBytes(msgp.AppendString(b, "data"), f.data)
	case summaryDelta:
		b = msgp.AppendBytes(msgp.AppendString(b, "added"), s.added)
	}
	return b
}

// count is a number of a summary's load by its name.
type count struct {
	name  string
	value *int
}

// summaryCounts lists the counts of a load.
func summaryCounts(s *router.Summary) []count {
	return []count{
		{"workers_healthy", &s.Healthy},
		{"workers_degraded", &s.Degraded},
		{"busy_workers", &s.Busy},
		{"total_kv_blocks", &s.TotalBlocks},
		{"active_blocks", &s.ActiveBlocks},
		{"active_prefill_tokens", &s.PendTokens},
		{"active_requests", &s.ActiveRequests},
		{"queued", &s.Queued},
		{"queued_prefill_tokens", &s.QueuedTokens},
	}
}

// readSummary reads a summary. Its bytes are those of data.
func readSummary(data []byte) (s summary, err error) {
	version, takenMS, intervalMS := 0, uint64(0), uint64(0)
	load, filter := false, false
	_, err = eachField(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "v":
			version, rest, err = readCount(value)
		case "group":
			s.group, rest, err = msgp.ReadStringBytes(value)
		case "model":
			s.model, rest, err = msgp.ReadStringBytes(value)
		case "block_size":
			s.blockSize, rest, err = readCount(value)
		case "router_id":
			s.router, rest, err = msgp.ReadUint64Bytes(value)
		case "epoch":
			s.epoch, rest, err = msgp.ReadUint64Bytes(value)
		case "seq":
			s.seq, rest, err = msgp.ReadUint64Bytes(value)
		case "kind":
			s.kind, rest, err = msgp.ReadStringBytes(value)
		case "stride":
			s.stride, rest, err = readCount(value)
		case "taken_ms":
			takenMS, rest, err = msgp.ReadUint64Bytes(value)
		case "interval_ms":
			intervalMS, rest, err = msgp.ReadUint64Bytes(value)
		case "load":
			load = true
			rest, err = readCounts(value, summaryCounts(&s.load))
		case "filter":
			filter = true
			rest, err = readFilterPart(value, &s.filter)
		case "added":
			s.added, rest, err = msgp.ReadBytesZC(value)
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
	wrong := func(what string, value any) error {
		return fmt.Errorf("%w: %s is %v", errSummaryShape, what, value)
	}
	switch {
	case err != nil:
	case version != 1:
		err = wrong("v", version)
	case s.group == "" || len(s.group) > maxGroupName:
		err = wrong("the length of group", len(s.group))
	case s.model == "" || len(s.model) > maxModelName:
		err = wrong("the length of model", len(s.model))
	case s.blockSize == 0 || s.blockSize > 1<<16:
		err = wrong("block_size", s.blockSize)
	case s.stride > maxStride:
		err = wrong("stride", s.stride)
	case takenMS > 1<<50:
		err = wrong("taken_ms", takenMS)
	case !load:
		err = wrong("load", "missing")
	case s.kind == summaryFull:
		if err = s.filter.check(); err == nil && (!filter || s.stride == 0) {
			err = wrong("filter or stride", "missing")
		}
	case s.kind == summaryDelta:
		if len(s.added)%8 != 0 || len(s.added) > 8*maxSummaryAdds {
			err = wrong("the length of added", len(s.added))
		}
	case s.kind != summaryLoad:
		err = wrong("kind", clip(s.kind))
	}
	if err != nil {
		return s, fmt.Errorf("replicas: read a summary: %w", err)
	}
	s.taken = time.UnixMilli(int64(takenMS))
	s.interval = time.Duration(min(max(intervalMS, minGroupInterval), maxGroupInterval)) * time.Millisecond
	return s, nil
}

// The times between two summaries of a group, in ms.
const (
	minGroupInterval = 50
	maxGroupInterval = 60_000
)

// readCounts reads a map of numbers into those of these names.
func readCounts(data []byte, counts []count) (rest []byte, err error) {
	return eachField(data, func(key, value []byte) (rest []byte, err error) {
		for _, c := range counts {
			if string(key) == c.name {
				*c.value, rest, err = readCount(value)
				return rest, err
			}
		}
		return msgp.Skip(value)
	})
}

func readFilterPart(data []byte, f *filterPart) (rest []byte, err error) {
	return eachField(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "m":
			f.m, rest, err = msgp.ReadUint64Bytes(value)
		case "k":
			f.k, rest, err = msgp.ReadUint64Bytes(value)
		case "n":
			f.n, rest, err = msgp.ReadUint64Bytes(value)
		case "part":
			f.part, rest, err = readCount(value)
		case "parts":
			f.parts, rest, err = readCount(value)
		case "data":
			f.data, rest, err = msgp.ReadBytesZC(value)
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
}

// check refuses a part that no filter has.
func (f *filterPart) check() error {
	wrong := func(what string, value any) error {
		return fmt.Errorf("%w: filter.%s is %v", errSummaryShape, what, value)
	}
	switch {
	case f.m == 0 || f.m%64 != 0 || f.m > maxSummaryBits:
		return wrong("m", f.m)
	case f.parts == 0 || uint64(f.parts) > f.m/64:
		return wrong("parts", f.parts)
	case f.part >= f.parts:
		return wrong("part", f.part)
	case len(f.data) == 0 || len(f.data) > maxSummaryPart || uint64(len(f.data)) > f.m/8:
		return wrong("the length of data", len(f.data))
	}
	return nil
}

// hashes are those that a delta adds.
func (s *summary) hashes() []uint64 { return readHashes(s.added) }

func appendHashes(b []byte, all []uint64) []byte {
	for _, h := range all {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return b
}

func readHashes(b []byte) []uint64 {
	all := make([]uint64, len(b)/8)
	for i := range all {
		all[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return all
}

// filterParts cuts a filter for messages with room for so many bytes of it.
func filterParts(f *indexer.Filter, room int) (parts []filterPart) {
	data := f.AppendTo(nil)
	room = max(8, min(room, maxSummaryPart))
	n := (len(data) + room - 1) / room
	for i := range n {
		parts = append(parts, filterPart{
			m: uint64(f.Bits()), k: uint64(f.Hashes()), n: uint64(f.Count()),
			part: i, parts: n, data: data[i*room : min((i+1)*room, len(data))],
		})
	}
	return parts
}

// appendProbe appends the encoding of a probe.
func appendProbe(b []byte, p *router.Probe) []byte {
	b = msgp.AppendInt(msgp.AppendString(msgp.AppendMapHeader(b, 6), "v"), 1)
	b = msgp.AppendString(msgp.AppendString(b, "request_id"), p.ID)
	b = msgp.AppendString(msgp.AppendString(b, "model"), p.Model)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), p.BlockSize)
	b = msgp.AppendInt(msgp.AppendString(b, "isl"), p.Tokens)
	return msgp.AppendBytes(msgp.AppendString(b, "local"), appendHashes(nil, p.Local))
}

func readProbe(data []byte) (p router.Probe, err error) {
	version := 0
	_, err = eachField(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "v":
			version, rest, err = readCount(value)
		case "request_id":
			p.ID, rest, err = msgp.ReadStringBytes(value)
		case "model":
			p.Model, rest, err = msgp.ReadStringBytes(value)
		case "block_size":
			p.BlockSize, rest, err = readCount(value)
		case "isl":
			p.Tokens, rest, err = readCount(value)
		case "local":
			var local []byte
			if local, rest, err = msgp.ReadBytesZC(value); err == nil && (len(local)%8 != 0 || len(local) > 8*maxProbeBlocks) {
				err = fmt.Errorf("%w: local has %d bytes", errSummaryShape, len(local))
			}
			if err == nil {
				p.Local = readHashes(local)
			}
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
	if err == nil && (version != 1 || p.BlockSize == 0) {
		err = fmt.Errorf("%w: v is %d, block_size %d", errSummaryShape, version, p.BlockSize)
	}
	if err != nil {
		return p, fmt.Errorf("replicas: read a probe: %w", err)
	}
	return p, nil
}

// appendProbeAnswer appends the encoding of the answer to a probe of a prompt of so many
// tokens.
func appendProbeAnswer(b []byte, a *router.ProbeAnswer, p *router.Probe) []byte {
	left := max(0, p.Tokens-a.OverlapBlocks*p.BlockSize)
	b = msgp.AppendInt(msgp.AppendString(msgp.AppendMapHeader(b, 10), "v"), 1)
	b = msgp.AppendString(msgp.AppendString(b, "group"), a.Group)
	b = msgp.AppendUint64(msgp.AppendString(b, "worker_id"), a.Worker.ID)
	b = msgp.AppendUint32(msgp.AppendString(b, "dp_rank"), a.Worker.DPRank)
	b = msgp.AppendInt(msgp.AppendString(b, "overlap_blocks"), a.OverlapBlocks)
	b = msgp.AppendFloat64(msgp.AppendString(b, "cost"), a.Cost)
	b = msgp.AppendInt(msgp.AppendString(b, "potential_prefill_tokens"), a.PendTokens+left)
	b = msgp.AppendInt(msgp.AppendString(b, "active_blocks"), a.ActiveBlocks)
	b = msgp.AppendInt(msgp.AppendString(b, "active_requests"), a.ActiveRequests)
	return msgp.AppendBool(msgp.AppendString(b, "busy"), a.Busy)
}

func readProbeAnswer(data []byte, p *router.Probe) (a router.ProbeAnswer, err error) {
	version, prefill := 0, 0
	_, err = eachField(data, func(key, value []byte) (rest []byte, err error) {
		switch string(key) {
		case "v":
			version, rest, err = readCount(value)
		case "group":
			a.Group, rest, err = msgp.ReadStringBytes(value)
		case "worker_id":
			a.Worker.ID, rest, err = msgp.ReadUint64Bytes(value)
		case "dp_rank":
			a.Worker.DPRank, rest, err = msgp.ReadUint32Bytes(value)
		case "overlap_blocks":
			a.OverlapBlocks, rest, err = readCount(value)
		case "cost":
			a.Cost, rest, err = msgp.ReadFloat64Bytes(value)
		case "potential_prefill_tokens":
			prefill, rest, err = readCount(value)
		case "active_blocks":
			a.ActiveBlocks, rest, err = readCount(value)
		case "active_requests":
			a.ActiveRequests, rest, err = readCount(value)
		case "busy":
			a.Busy, rest, err = msgp.ReadBoolBytes(value)
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
	if err == nil && version != 1 {
		err = fmt.Errorf("%w: v is %d", errSummaryShape, version)
	}
	if err != nil {
		return a, fmt.Errorf("replicas: read the answer to a probe: %w", err)
	}
	a.OverlapBlocks = min(a.OverlapBlocks, len(p.Local))
	a.PendTokens = max(0, prefill-max(0, p.Tokens-a.OverlapBlocks*p.BlockSize))
	return a, nil
}
