// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// Topics of a router group.
const (
	summaryTopic = "summary"
	getTopic     = "get" // behind summaryTopic: requests for a full summary
	probeTopic   = "probe"
)

// Kinds of summaries. All contain the load.
const (
	summaryFull  = "full"  // and a part of the filter
	summaryDelta = "delta" // and hashes that the filter did not have
	summaryLoad  = "load"
)

// Limits of a summary or a probe. Larger messages are refused.
const (
	maxGroupName   = 256 // bytes
	maxModelName   = 256
	maxSummaryPart = 512 << 10 // bytes of a filter in a message
	maxSummaryBits = 1 << 29   // of a filter: 64 MiB
	maxSummaryAdds = 8192      // hashes in a delta
	maxStride      = 1 << 10
	maxProbeBlocks = 4096 // of the prompt, in a probe: longer prompts are judged by summaries

	// The time between two summaries, in ms.
	minGroupInterval = 50
	maxGroupInterval = 60_000
)

var errShape = errors.New("unexpected shape")

// encode returns a message: a JSON object and, behind a line feed, bytes. Hashes are 8 bytes
// each, little endian.
func encode(object any, content []byte) ([]byte, error) {
	data, err := json.Marshal(object)
	if len(content) > 0 {
		data = append(append(data, '\n'), content...)
	}
	return data, err
}

// decode reads a message. The content is part of data.
func decode(data []byte, object any) (content []byte, err error) {
	text, content, _ := bytes.Cut(data, []byte{'\n'})
	return content, json.Unmarshal(text, object)
}

// summary is a message of a group about its workers of one model and block size.
type summary struct {
	Version    int        `json:"v"` // 1
	Group      string     `json:"group"`
	Model      string     `json:"model"`
	BlockSize  int        `json:"block_size"`
	Router     uint64     `json:"router_id"` // the replica that publishes it
	Epoch      uint64     `json:"epoch"`     // differs after each full summary
	Seq        uint64     `json:"seq"`       // of the message in the epoch, from 0
	Kind       string     `json:"kind"`
	Stride     int        `json:"stride"` // blocks between checkpoints; 0: the caches' content is not published
	TakenMS    int64      `json:"taken_ms"`
	IntervalMS int64      `json:"interval_ms"`
	Load       groupLoad  `json:"load"`
	Filter     filterPart `json:"filter,omitzero"` // of a full summary

	// content has the bytes behind the object: of a full summary a part of the filter, of a
	// delta sequence hashes.
	content []byte
}

// groupLoad are the counts of a [router.Summary].
type groupLoad struct {
	Healthy        uint32 `json:"workers_healthy"`
	Degraded       uint32 `json:"workers_degraded"`
	Busy           uint32 `json:"busy_workers"`
	TotalBlocks    uint32 `json:"total_kv_blocks"`
	ActiveBlocks   uint32 `json:"active_blocks"`
	PendTokens     uint32 `json:"active_prefill_tokens"`
	ActiveRequests uint32 `json:"active_requests"`
	Queued         uint32 `json:"queued"`
	QueuedTokens   uint32 `json:"queued_prefill_tokens"`
	HeldTokens     uint32 `json:"held_tokens,omitempty"` // since 0.2.0
}

// filterPart describes the part of a filter in a message.
type filterPart struct {
	M     uint64 `json:"m"`
	K     uint64 `json:"k"`
	N     uint64 `json:"n"`
	Part  int    `json:"part"`
	Parts int    `json:"parts"`
}

// newSummary returns the message of a pool's load.
func newSummary(group string, id uint64, interval time.Duration, stride int, s *router.Summary) summary {
	return summary{
		Version: 1, Group: group, Model: s.Model, BlockSize: s.BlockSize, Router: id, Kind: summaryLoad, Stride: stride,
		TakenMS: max(0, s.Taken.UnixMilli()), IntervalMS: interval.Milliseconds(),
		Load: groupLoad{
			Healthy: count(s.Healthy), Degraded: count(s.Degraded), Busy: count(s.Busy),
			TotalBlocks: count(s.TotalBlocks), ActiveBlocks: count(s.ActiveBlocks), PendTokens: count(s.PendTokens),
			ActiveRequests: count(s.ActiveRequests), Queued: count(s.Queued), QueuedTokens: count(s.QueuedTokens),
			HeldTokens: count(s.HeldTokens),
		},
	}
}

func count(n int) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) }

// routerSummary returns the summary as the router takes it, without Taken and the filter.
func (s *summary) routerSummary() router.Summary {
	l := &s.Load
	return router.Summary{
		Model: s.Model, BlockSize: s.BlockSize, Interval: s.interval(), Stride: s.Stride, Silent: s.Stride == 0,
		Healthy: int(l.Healthy), Degraded: int(l.Degraded), Busy: int(l.Busy),
		TotalBlocks: int(l.TotalBlocks), ActiveBlocks: int(l.ActiveBlocks), PendTokens: int(l.PendTokens),
		ActiveRequests: int(l.ActiveRequests), Queued: int(l.Queued), QueuedTokens: int(l.QueuedTokens),
		HeldTokens: int(l.HeldTokens),
	}
}

func (s *summary) interval() time.Duration {
	return time.Duration(min(max(s.IntervalMS, minGroupInterval), maxGroupInterval)) * time.Millisecond
}

// readSummary reads a summary, and refuses one that no replica publishes.
func readSummary(data []byte) (s summary, err error) {
	if s.content, err = decode(data, &s); err == nil {
		err = s.check()
	}
	if err != nil {
		return s, fmt.Errorf("read a summary: %w", err)
	}
	return s, nil
}

func wrong(field string, value any) error {
	return fmt.Errorf("%w: %s is %v", errShape, field, value)
}

func (s *summary) check() error {
	switch {
	case s.Version != 1:
		return wrong("v", s.Version)
	case s.Group == "" || len(s.Group) > maxGroupName:
		return wrong("the length of group", len(s.Group))
	case s.Model == "" || len(s.Model) > maxModelName:
		return wrong("the length of model", len(s.Model))
	case s.BlockSize < 1 || s.BlockSize > 1<<16:
		return wrong("block_size", s.BlockSize)
	case s.Stride < 0 || s.Stride > maxStride || s.Stride == 0 && s.Kind == summaryFull:
		return wrong("stride", s.Stride)
	case s.TakenMS < 0 || s.TakenMS > 1<<50:
		return wrong("taken_ms", s.TakenMS)
	case s.Kind == summaryFull:
		return s.Filter.check(len(s.content))
	case s.Kind == summaryDelta && (len(s.content)%8 != 0 || len(s.content) > 8*maxSummaryAdds):
		return wrong("the length of the hashes", len(s.content))
	case s.Kind != summaryDelta && s.Kind != summaryLoad:
		return wrong("kind", clip(s.Kind))
	}
	return nil
}

func (f *filterPart) check(size int) error {
	switch {
	case f.M == 0 || f.M%64 != 0 || f.M > maxSummaryBits:
		return wrong("filter.m", f.M)
	case f.Parts < 1 || uint64(f.Parts) > f.M/64:
		return wrong("filter.parts", f.Parts)
	case f.Part < 0 || f.Part >= f.Parts:
		return wrong("filter.part", f.Part)
	case size == 0 || size > maxSummaryPart || uint64(size) > f.M/8:
		return wrong("the length of the part", size)
	}
	return nil
}

// filterParts splits a filter for messages with at most this number of bytes of it.
func filterParts(f *indexer.Filter, room int) iter.Seq2[filterPart, []byte] {
	return func(yield func(filterPart, []byte) bool) {
		data := f.AppendTo(nil)
		room = max(8, min(room, maxSummaryPart))
		p := filterPart{
			M: uint64(f.Bits()), K: uint64(f.Hashes()), N: uint64(f.Count()), Parts: (len(data) + room - 1) / room,
		}
		for content := range slices.Chunk(data, room) {
			if !yield(p, content) {
				return
			}
			p.Part++
		}
	}
}

func readHashes(b []byte) []uint64 {
	all := make([]uint64, len(b)/8)
	_, _ = binary.Decode(b, binary.LittleEndian, all) // all has the right length
	return all
}

// probe is the message of a [router.Probe].
type probe struct {
	Version   int    `json:"v"` // 1
	ID        string `json:"request_id"`
	Model     string `json:"model"`
	BlockSize int    `json:"block_size"`
	Tokens    int    `json:"isl"`
	// The local hashes follow.
}

func encodeProbe(p *router.Probe) ([]byte, error) {
	return encode(probe{1, p.ID, p.Model, p.BlockSize, p.Tokens}, events.AppendHashes(nil, p.Local))
}

func readProbe(data []byte) (router.Probe, error) {
	var p probe
	local, err := decode(data, &p)
	switch {
	case err != nil:
	case p.Version != 1:
		err = wrong("v", p.Version)
	case p.BlockSize < 1 || p.Tokens < 0:
		err = wrong("block_size or isl", min(p.BlockSize, p.Tokens))
	case len(local)%8 != 0 || len(local) > 8*maxProbeBlocks:
		err = wrong("the length of the hashes", len(local))
	}
	if err != nil {
		return router.Probe{}, fmt.Errorf("read a probe: %w", err)
	}
	return router.Probe{ID: p.ID, Model: p.Model, BlockSize: p.BlockSize, Tokens: p.Tokens, Local: readHashes(local)}, nil
}

// probeAnswer is the message of a [router.ProbeAnswer].
type probeAnswer struct {
	Version        int     `json:"v"` // 1
	Group          string  `json:"group"`
	Worker         uint64  `json:"worker_id"`
	DPRank         uint32  `json:"dp_rank"`
	OverlapBlocks  uint32  `json:"overlap_blocks"`
	Cost           float64 `json:"cost"`
	PrefillTokens  uint32  `json:"potential_prefill_tokens"` // pending, and the rest of the prompt
	ActiveBlocks   uint32  `json:"active_blocks"`
	ActiveRequests uint32  `json:"active_requests"`
	HeldTokens     uint32  `json:"held_tokens,omitempty"` // since 0.2.0
	Busy           bool    `json:"busy"`
}

func encodeProbeAnswer(a *router.ProbeAnswer, p *router.Probe) ([]byte, error) {
	return encode(probeAnswer{
		Version: 1, Group: a.Group, Worker: a.Worker.ID, DPRank: a.Worker.DPRank,
		OverlapBlocks: count(a.OverlapBlocks), Cost: a.Cost, PrefillTokens: count(a.PendTokens + restOf(p, a.OverlapBlocks)),
		ActiveBlocks: count(a.ActiveBlocks), ActiveRequests: count(a.ActiveRequests), HeldTokens: count(a.HeldTokens),
		Busy: a.Busy,
	}, nil)
}

func readProbeAnswer(data []byte, p *router.Probe) (router.ProbeAnswer, error) {
	var a probeAnswer
	_, err := decode(data, &a)
	if err == nil && a.Version != 1 {
		err = wrong("v", a.Version)
	}
	if err != nil {
		return router.ProbeAnswer{}, fmt.Errorf("read the answer to a probe: %w", err)
	}
	overlap := min(int(a.OverlapBlocks), len(p.Local))
	return router.ProbeAnswer{
		Group: a.Group, Worker: router.Worker{ID: a.Worker, DPRank: a.DPRank},
		OverlapBlocks: overlap, Cost: a.Cost, PendTokens: max(0, int(a.PrefillTokens)-restOf(p, overlap)),
		ActiveBlocks: int(a.ActiveBlocks), ActiveRequests: int(a.ActiveRequests), HeldTokens: int(a.HeldTokens), Busy: a.Busy,
	}, nil
}

// restOf returns the tokens of a prompt behind its cached blocks.
func restOf(p *router.Probe, cached int) int { return max(0, p.Tokens-cached*p.BlockSize) }
