// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
)

// The table has the same blocks as a map after random changes, also with ids whose searches collide.
func TestBlockTableEqualsMap(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var table blockTable
		model := map[uint64]cachedBlock{}
		seeds := []uint64{0, 7, 8, 9}
		if seed%5 == 0 { // no block has these seeds, and later ones find no place at first
			for i := range uint64(otherSeed) {
				table.indexOf(0, 1000+i)
			}
			table.missed = 1
		}
		var absent *blockTable
		if _, ok := absent.get(1); ok {
			t.Fatal("an absent table has a block")
		}
		for step := range 4000 {
			id := rng.Uint64N(1 + uint64(step)%600)
			if seed%2 == 0 {
				id *= 0xF1DE83E19937733D // the inverse of the table's factor: their slots are neighbours
			}
			want, there := model[id]
			if got, ok := table.get(id); ok != there || got != want {
				t.Fatalf("seed %d, step %d: block %d is %+v, want %+v", seed, step, id, got, want)
			}
			if removes := rng.IntN(5) < 2+step/1000%2; removes && there {
				table.delete(table.find(id))
				delete(model, id)
			} else if !removes {
				k := cachedBlock{blockState: blockState{Count: 1 + rng.Uint32N(3), Local: rng.Uint64(), Parent: rng.Uint64()}}
				k.HasParent, k.Published, k.Seed = rng.IntN(2) == 0, rng.IntN(2) == 0, seeds[min(rng.IntN(12), 3)]
				if rng.IntN(20) == 0 {
					k.Seed = rng.Uint64N(100) + 1e6
				}
				if rng.IntN(4) == 0 {
					k.Resized = &resizedBlock{Part: true}
				}
				table.set(id, &k)
				model[id] = k
			}
		}
		inMap := 0 // blocks whose seed is in the map table.others
		for i := range table.slots {
			if table.slots[i].count > 0 && table.slots[i].seed == otherSeed {
				inMap++
			}
		}
		if len(table.others) != inMap {
			t.Fatalf("seed %d: %d seeds are kept for %d blocks", seed, len(table.others), inMap)
		}
		saved := table.clone()
		if got := maps.Collect(table.all()); !maps.Equal(got, model) || table.n != len(model) {
			t.Fatalf("seed %d: the table has %d blocks and counts %d, want %d", seed, len(got), table.n, len(model))
		}
		for id := range model { // the copy does not change with the table
			if id%2 == 0 {
				table.delete(table.find(id))
			} else {
				table.set(id, &cachedBlock{blockState: blockState{Count: 9, Seed: id}, Resized: &resizedBlock{}})
			}
		}
		if got := maps.Collect(saved.all()); !maps.Equal(got, model) {
			t.Fatalf("seed %d: the copy has %d blocks, want %d", seed, len(got), len(model))
		}
	}
}

// The seeds of blocks that are gone take no memory for long.
func TestSeedsOfGoneBlocks(t *testing.T) {
	var table blockTable
	for id := range uint64(200_000) { // each with a salt of its own; 100 are there at a time
		table.set(id, &cachedBlock{blockState: blockState{Count: 1, Seed: id + 5}})
		if id >= 100 {
			table.delete(table.find(id - 100))
		}
	}
	if len(table.others) > 0 || len(table.seeds) > otherSeed {
		t.Errorf("%d seeds and %d others are kept", len(table.seeds), len(table.others))
	}
	for id := uint64(200_000 - 100); id < 200_000; id++ {
		if k, ok := table.get(id); !ok || k.Seed != id+5 {
			t.Fatalf("block %d has the seed %d", id, k.Seed)
		}
	}
	for id := range uint64(otherSeed + 1000) { // more seeds than there is room for
		table.set(id, &cachedBlock{blockState: blockState{Count: 1, Seed: id + 7}})
	}
	for id := range uint64(otherSeed + 1000) {
		if k, _ := table.get(id); k.Seed != id+7 {
			t.Fatalf("block %d has the seed %d", id, k.Seed)
		}
	}
	if len(table.others) == 0 {
		t.Error("no seed found its place taken")
	}
}

// Events are read the same way together as each alone, whatever a removal before them was like.
func TestEventsTogetherAndAlone(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var all, alone EngineBatch
		data := msgp.AppendArrayHeader(nil, 3)
		data = msgp.AppendArrayHeader(msgp.AppendFloat64(data, 1.5), 30)
		var want []EngineEvent
		var drops Drops
		for range 30 {
			event := randomEvent(rng)
			data = append(data, event...)
			one := append(msgp.AppendArrayHeader(msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), 1.5), 1), event...)
			if err := alone.decode(append(one, 7)); err != nil {
				t.Fatal(err)
			}
			for reason, n := range alone.Drops {
				drops[reason] += n
			}
			for _, ev := range alone.Events {
				ev.Hashes = append([]uint64(nil), ev.Hashes...)
				ev.Tokens = append([]uint32(nil), ev.Tokens...)
				want = append(want, ev)
			}
		}
		if err := all.decode(append(data, 7)); err != nil {
			t.Fatal(err)
		}
		for i := range all.Events {
			all.Events[i].Hashes = append([]uint64(nil), all.Events[i].Hashes...)
			all.Events[i].Tokens = append([]uint32(nil), all.Events[i].Tokens...)
		}
		if diff := cmp.Diff(want, all.Events); diff != "" || drops != all.Drops {
			t.Fatalf("seed %d: dropped %v, want %v\n%s", seed, all.Drops, drops, diff)
		}
	}
}

// randomEvent is a removal in one of a few forms, or a stored event with ids of all sizes.
func randomEvent(rng *rand.Rand) (b []byte) {
	if rng.IntN(4) == 0 {
		n := rng.IntN(40)
		b = msgp.AppendString(msgp.AppendMapHeader(b, 4), "type")
		b = msgp.AppendString(msgp.AppendString(b, "BlockStored"), "block_hashes")
		b = msgp.AppendString(msgp.AppendInt64(msgp.AppendArrayHeader(b, 1), int64(rng.Uint64())), "token_ids")
		b = msgp.AppendArrayHeader(b, uint32(n))
		for range n {
			b = msgp.AppendUint64(b, rng.Uint64()>>(31+rng.IntN(33))) // some do not fit
		}
		return msgp.AppendInt(msgp.AppendString(b, "block_size"), 16)
	}
	hash := []uint64{rng.Uint64() | 1<<63, rng.Uint64N(200)}[rng.IntN(5)/4]
	if rng.IntN(2) == 0 {
		b = msgp.AppendString(msgp.AppendArrayHeader(b, 3), []string{"BlockRemoved", "BlockRemoved", "BlockMoved"}[rng.IntN(3)])
		b = msgp.AppendUint64(msgp.AppendArrayHeader(b, 1), hash)
		return msgp.AppendString(b, []string{"GPU", "CPU", "tape"}[rng.IntN(3)])
	}
	b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 3), "type"), "BlockRemoved")
	b = msgp.AppendUint64(msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), 1), hash)
	return msgp.AppendInt(msgp.AppendString(b, "group_idx"), []int{0, 1, 300}[rng.IntN(3)])
}
