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
		if seed%5 == 0 { // some of these find no place
			for i := range uint64(otherSeed - 3) {
				table.indexOf(0, 1000+i)
			}
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
		saved := table.clone()
		for name, x := range map[string]*blockTable{"table": &table, "copy": &saved} {
			if got := maps.Collect(x.all()); !maps.Equal(got, model) || table.n != len(model) {
				t.Fatalf("seed %d: the %s has %d blocks and counts %d, want %d", seed, name, len(got), table.n, len(model))
			}
		}
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
