// SPDX-License-Identifier: Apache-2.0

package saved

import (
	"bytes"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
)

// What a block has, in a record.
const (
	blockHasParent = 1 << iota
	blockPublished
	blockPart
	blockResized
)

// blocksSize is the size of a record from which on further blocks are in another one. A larger block is left
// out: after a restart its prompts count as unknown.
const blocksSize = records.Max / 2

// owner writes the records of an owner.
func (o *writer) owner(r *events.Owner) {
	o.record(recordOwner, func(b []byte) []byte { return append(b, r.Info...) })
	o.events(recordSides, r.Events)
	var at events.Place
	var blocks []byte
	flush := func() {
		if len(blocks) > 0 {
			o.record(recordBlocks, func(b []byte) []byte {
				return append(appendUvarints(b, uint64(at.DPRank), uint64(at.Tier), uint64(at.Group)), blocks...)
			})
			blocks = blocks[:0]
		}
	}
	for place, k := range r.Blocks {
		if at != place || len(blocks) > blocksSize {
			flush()
			at = place
		}
		n := len(blocks)
		if blocks = appendBlock(blocks, k); len(blocks)-n > blocksSize-64 {
			blocks = blocks[:n]
		}
		if o.err != nil {
			return
		}
	}
	flush()
}

func appendBlock(b []byte, k *events.OwnedBlock) []byte {
	flags := uint64(0)
	resized := k.Part || len(k.Tokens)+len(k.Parts)+len(k.Locals) > 0
	for i, set := range [...]bool{k.HasParent, k.Published, k.Part, resized} { // in the order of the constants
		if set {
			flags |= 1 << i
		}
	}
	b = events.AppendHashes(appendUvarints(b, uint64(k.Copies), flags), []uint64{k.ID, k.Local, k.Seed, k.Parent})
	if resized {
		b = appendUvarints(b, uint64(len(k.Tokens)), uint64(len(k.Parts)), uint64(len(k.Locals)))
		for _, token := range k.Tokens {
			b = appendUvarints(b, uint64(token))
		}
		b = events.AppendHashes(events.AppendHashes(b, k.Parts), k.Locals)
	}
	return b
}

// owner reads an owner, whose first record was read already, and the record that follows.
func (in *reader) owner(yield func(*events.Owner) bool) error {
	o := &events.Owner{Info: bytes.Clone(in.payload)}
	err := in.next()
	for ; err == nil && !in.ended && in.kind == recordSides; err = in.next() {
		ev, damaged := events.DecodeEvent(in.payload)
		if damaged != nil || len(o.Events) >= maxEvents {
			return bad("record %d of side groups cannot be read: %v", in.file.Records(), damaged)
		}
		o.Events = append(o.Events, ev)
	}
	var k events.OwnedBlock
	o.Blocks = func(yield func(events.Place, *events.OwnedBlock) bool) {
		for ; err == nil && !in.ended && in.kind == recordBlocks; err = in.next() {
			f := fields{in.payload, false}
			at := events.Place{DPRank: uint32(f.uvarint()), Tier: indexer.Tier(f.uvarint()), Group: int(f.uvarint())}
			for len(f.rest) > 0 && !f.bad {
				if f.block(&k); !f.bad && !yield(at, &k) {
					err = bad("its blocks were not read to the end")
					return
				}
			}
			if f.bad || at.Tier > indexer.External {
				err = bad("record %d of blocks cannot be read", in.file.Records())
				return
			}
		}
	}
	if err == nil && !yield(o) {
		return bad("its owners were not read to the end")
	}
	for range o.Blocks { // reads blocks that the caller did not read
	}
	if err == nil && !in.ended && in.kind != recordOwner {
		return bad("record %d of type %d stands behind an owner", in.file.Records(), in.kind)
	}
	return err
}

// block reads a block. Its slices are new.
func (f *fields) block(k *events.OwnedBlock) {
	*k = events.OwnedBlock{Copies: uint32(f.uvarint())}
	flags := f.uvarint()
	if f.bad = f.bad || k.Copies == 0 || len(f.rest) < 32; f.bad {
		return
	}
	k.HasParent, k.Published, k.Part = flags&blockHasParent > 0, flags&blockPublished > 0, flags&blockPart > 0
	var ids [4]uint64
	f.hashes(ids[:0], 4)
	k.ID, k.Local, k.Seed, k.Parent = ids[0], ids[1], ids[2], ids[3]
	if flags&blockResized > 0 {
		tokens, parts, locals := f.uvarint(), f.uvarint(), f.uvarint()
		for range min(tokens, uint64(len(f.rest))) {
			k.Tokens = append(k.Tokens, uint32(f.uvarint()))
		}
		if n := uint64(len(f.rest) / 8); f.bad || uint64(len(k.Tokens)) < tokens || parts > n || locals > n-parts {
			f.bad = true
			return
		}
		k.Parts, k.Locals = f.hashes(nil, parts), f.hashes(nil, locals)
	}
}
