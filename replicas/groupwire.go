// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"encoding/binary"
	"fmt"
	"time"

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

// summary is a message of a group about its workers of one model and block size.
type summary struct {
	group, model string
	blockSize    int
	router       uint64 // the replica that publishes it
	epoch        uint64 // another one with each full
	seq          uint64 // of the message in the epoch, from 0
	kind         string
	stride       int // between checkpoints; 0 if what the group holds is not published
	taken        time.Time
	interval     time.Duration
	load         router.Summary // its counts only
	filter       filterPart
	added        []byte // sequence hashes, 8 bytes each, little endian
}

// filterPart is a part of a filter.
type filterPart struct {
	m, k, n     uint64
	part, parts int
	data        []byte
}

// summaryTimes are the numbers of a summary that its form has in another unit.
type summaryTimes struct {
	version             int
	takenMS, intervalMS uint64
}

// fields are the form of a summary. What only some kinds have stands last.
func (s *summary) fields(t *summaryTimes) []field {
	return []field{
		{"v", &t.version},
		{"group", &s.group},
		{"model", &s.model},
		{"block_size", &s.blockSize},
		{"router_id", &s.router},
		{"epoch", &s.epoch},
		{"seq", &s.seq},
		{"kind", &s.kind},
		{"stride", &s.stride},
		{"taken_ms", &t.takenMS},
		{"interval_ms", &t.intervalMS},
		{"load", []field{
			{"workers_healthy", &s.load.Healthy},
			{"workers_degraded", &s.load.Degraded},
			{"busy_workers", &s.load.Busy},
			{"total_kv_blocks", &s.load.TotalBlocks},
			{"active_blocks", &s.load.ActiveBlocks},
			{"active_prefill_tokens", &s.load.PendTokens},
			{"active_requests", &s.load.ActiveRequests},
			{"queued", &s.load.Queued},
			{"queued_prefill_tokens", &s.load.QueuedTokens},
		}},
		{"filter", []field{
			{"m", &s.filter.m},
			{"k", &s.filter.k},
			{"n", &s.filter.n},
			{"part", &s.filter.part},
			{"parts", &s.filter.parts},
			{"data", &s.filter.data},
		}},
		{"added", &s.added},
	}
}

// appendSummary appends the encoding of a summary.
func appendSummary(b []byte, s *summary) []byte {
	fields := s.fields(&summaryTimes{1, uint64(max(0, s.taken.UnixMilli())), uint64(s.interval.Milliseconds())})
	common := len(fields) - 2
	switch s.kind {
	case summaryFull:
		fields = fields[:common+1]
	case summaryDelta:
		fields[common] = fields[common+1]
		fields = fields[:common+1]
	default:
		fields = fields[:common]
	}
	return appendFields(b, fields)
}

// The times between two summaries of a group, in ms.
const (
	minGroupInterval = 50
	maxGroupInterval = 60_000
)

// readSummary reads a summary. Its bytes are those of data.
func readSummary(data []byte) (s summary, err error) {
	var t summaryTimes
	if _, err = readFields(data, s.fields(&t)); err == nil {
		err = s.check(&t)
	}
	if err != nil {
		return s, fmt.Errorf("read a summary: %w", err)
	}
	s.taken = time.UnixMilli(int64(t.takenMS))
	s.interval = time.Duration(min(max(t.intervalMS, minGroupInterval), maxGroupInterval)) * time.Millisecond
	return s, nil
}

func wrong(field string, value any) error {
	return fmt.Errorf("%w: %s is %v", errShape, field, value)
}

// check refuses a summary that no replica publishes.
func (s *summary) check(t *summaryTimes) error {
	switch {
	case t.version != 1:
		return wrong("v", t.version)
	case s.group == "" || len(s.group) > maxGroupName:
		return wrong("the length of group", len(s.group))
	case s.model == "" || len(s.model) > maxModelName:
		return wrong("the length of model", len(s.model))
	case s.blockSize == 0 || s.blockSize > 1<<16:
		return wrong("block_size", s.blockSize)
	case s.stride > maxStride:
		return wrong("stride", s.stride)
	case t.takenMS > 1<<50:
		return wrong("taken_ms", t.takenMS)
	case s.kind == summaryFull && s.stride == 0:
		return wrong("stride", "missing")
	case s.kind == summaryFull:
		return s.filter.check()
	case s.kind == summaryDelta && (len(s.added)%8 != 0 || len(s.added) > 8*maxSummaryAdds):
		return wrong("the length of added", len(s.added))
	case s.kind != summaryDelta && s.kind != summaryLoad:
		return wrong("kind", clip(s.kind))
	}
	return nil
}

// check refuses a part that no filter has.
func (f *filterPart) check() error {
	switch {
	case f.m == 0 || f.m%64 != 0 || f.m > maxSummaryBits:
		return wrong("filter.m", f.m)
	case f.parts == 0 || uint64(f.parts) > f.m/64:
		return wrong("filter.parts", f.parts)
	case f.part >= f.parts:
		return wrong("filter.part", f.part)
	case len(f.data) == 0 || len(f.data) > maxSummaryPart || uint64(len(f.data)) > f.m/8:
		return wrong("the length of filter.data", len(f.data))
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

// probeFields are the form of a probe.
func probeFields(p *router.Probe, version *int, local *[]byte) []field {
	return []field{
		{"v", version},
		{"request_id", &p.ID},
		{"model", &p.Model},
		{"block_size", &p.BlockSize},
		{"isl", &p.Tokens},
		{"local", local},
	}
}

// appendProbe appends the encoding of a probe.
func appendProbe(b []byte, p *router.Probe) []byte {
	version, local := 1, appendHashes(nil, p.Local)
	return appendFields(b, probeFields(p, &version, &local))
}

func readProbe(data []byte) (p router.Probe, err error) {
	var version int
	var local []byte
	_, err = readFields(data, probeFields(&p, &version, &local))
	switch {
	case err != nil:
	case version != 1:
		err = wrong("v", version)
	case p.BlockSize == 0:
		err = wrong("block_size", 0)
	case len(local)%8 != 0 || len(local) > 8*maxProbeBlocks:
		err = wrong("the length of local", len(local))
	}
	if err != nil {
		return p, fmt.Errorf("read a probe: %w", err)
	}
	p.Local = readHashes(local)
	return p, nil
}

// answerFields are the form of the answer to a probe.
func answerFields(a *router.ProbeAnswer, version, prefill *int) []field {
	return []field{
		{"v", version},
		{"group", &a.Group},
		{"worker_id", &a.Worker.ID},
		{"dp_rank", &a.Worker.DPRank},
		{"overlap_blocks", &a.OverlapBlocks},
		{"cost", &a.Cost},
		{"potential_prefill_tokens", prefill},
		{"active_blocks", &a.ActiveBlocks},
		{"active_requests", &a.ActiveRequests},
		{"busy", &a.Busy},
	}
}

// appendProbeAnswer appends the encoding of the answer to a probe.
func appendProbeAnswer(b []byte, a *router.ProbeAnswer, p *router.Probe) []byte {
	version, prefill := 1, a.PendTokens+max(0, p.Tokens-a.OverlapBlocks*p.BlockSize)
	return appendFields(b, answerFields(a, &version, &prefill))
}

func readProbeAnswer(data []byte, p *router.Probe) (a router.ProbeAnswer, err error) {
	var version, prefill int
	if _, err = readFields(data, answerFields(&a, &version, &prefill)); err == nil && version != 1 {
		err = wrong("v", version)
	}
	if err != nil {
		return a, fmt.Errorf("read the answer to a probe: %w", err)
	}
	a.OverlapBlocks = min(a.OverlapBlocks, len(p.Local))
	a.PendTokens = max(0, prefill-max(0, p.Tokens-a.OverlapBlocks*p.BlockSize))
	return a, nil
}
