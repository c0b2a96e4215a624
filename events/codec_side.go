// SPDX-License-Identifier: Apache-2.0

package events

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// sideKey is the key of an event of a hybrid model, beside data, which removes no blocks. Readers that do not know
// the key take the event for one without effect.
const sideKey = "kvroute_side"

// sideKinds are the names of these events, by their kinds from [indexer.Shaped] on.
//
//nolint:gochecknoglobals // a table
var sideKinds = [...]string{"shape", "stored", "removed"}

func writeSide(w *msgpack.Writer, ev *indexer.Event) {
	entries := 5
	if ev.Shape != nil {
		entries += 3
	}
	w.Entries(sideKey, entries)
	w.Text("kind", sideKinds[min(int(ev.Kind-indexer.Shaped), len(sideKinds)-1)])
	w.Uint("group", uint64(max(ev.Group, 0)))
	w.Optional("parent_hash", ev.HasParent, ev.Parent)
	w.Flag("all_copies", ev.AllCopies)
	if ev.Pairs {
		w.Uints("block_pairs", ev.Externals)
	} else {
		w.Uints("block_hashes", ev.Externals)
	}
	if s := ev.Shape; s != nil {
		w.Uint("block_size", uint64(max(s.Block, 0)))
		w.Uint("full_block_size", uint64(max(s.Full, 0)))
		w.List("groups", len(s.Sides))
		for _, g := range s.Sides {
			w.Map(4)
			w.Uint("group", uint64(max(g.Group, 0)))
			w.Uint("needs", uint64(g.Needs))
			w.Uint("block_size", uint64(max(g.Block, 0)))
			w.Uint("tokens", uint64(max(g.Tokens, 0)))
		}
	}
}

// decodeSide reads an event of a hybrid model. An unknown kind has no effect.
func decodeSide(data []byte, ev *indexer.Event) (rest []byte, err error) {
	var kind string
	var shape indexer.Shape
	shaped := false
	blocks := func(data []byte) (rest []byte, err error) {
		ev.Externals, rest, err = msgpack.AppendList(ev.Externals[:0], data, 1, msgpack.UintRest)
		return rest, err
	}
	rest, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "kind", Value: &kind, Required: true},
		{Key: "group", Value: &ev.Group},
		{Key: "parent_hash", Value: &ev.Parent, Found: &ev.HasParent},
		{Key: "all_copies", Value: &ev.AllCopies},
		{Key: "block_hashes", Value: blocks},
		{Key: "block_pairs", Value: blocks, Found: &ev.Pairs},
		{Key: "block_size", Value: &shape.Block, Found: &shaped},
		{Key: "full_block_size", Value: &shape.Full},
		{Key: "groups", Value: func(data []byte) (rest []byte, err error) {
			shape.Sides, rest, err = msgpack.AppendList(shape.Sides, data, 4, decodeGroup)
			return rest, err
		}},
	})
	if err != nil {
		return rest, err
	}
	if shaped {
		ev.Shape = &shape
	}
	for i, name := range sideKinds {
		if name == kind {
			ev.Kind = indexer.Shaped + indexer.Kind(i)
		}
	}
	return rest, nil
}

func decodeGroup(data []byte) (g indexer.SideGroup, rest []byte, err error) {
	var needs int
	if msgp.NextType(data) != msgp.MapType {
		return g, data, fmt.Errorf("%w: a group is no map", msgpack.ErrShape)
	}
	rest, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "group", Value: &g.Group, Required: true},
		{Key: "needs", Value: &needs},
		{Key: "block_size", Value: &g.Block},
		{Key: "tokens", Value: &g.Tokens},
	})
	if needs <= int(indexer.NeedsChunk) {
		g.Needs = indexer.Needs(needs)
	}
	return g, rest, err
}
