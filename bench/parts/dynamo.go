// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
)

// dynamoShapes compare the index with that of Dynamo's router, which a program applies the same events to, in the same
// round. Its source is in ../dynamo.
func dynamoShapes(program string) (shapes []shape) {
	for _, c := range []struct {
		name string
		gone func([]indexEvent, int) []indexEvent
		size int
	}{
		{"1 per event, tails first", removals, 1},
		{"1 per event, at random", scattered, 1},
		{"32 per event, tails first", removals, 32},
		{"32 per event, each block at random", scattered, 32},
	} {
		name := "removals, " + c.name + ", ÷ Dynamo's index"
		shapes = append(shapes, one(name, "×", bench.AtLeast(1), func() float64 {
			stored := unique()
			return removeRate(stored, c.gone, c.size) / dynamoRate(program, stored, c.gone(stored, c.size))
		}))
	}
	return shapes
}

// dynamoRate is the rate at which Dynamo's index removes, in millions of blocks a second.
func dynamoRate(program string, stored, gone []indexEvent) (rate float64) {
	cmd := exec.Command(program)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(appendList(appendList(nil, stored), gone)), os.Stderr
	var first float64
	bench.Must(fmt.Sscan(string(bench.Must(cmd.Output())), &first, &rate))
	return rate
}

// appendList appends events in the form that the program reads.
func appendList(to []byte, events []indexEvent) []byte {
	number := func(n uint64) { to = binary.LittleEndian.AppendUint64(to, n) }
	number(uint64(len(events)))
	for _, e := range events {
		kind := uint64(0)
		if e.event.Kind == indexer.Removed {
			kind = 1
		}
		for _, n := range []uint64{uint64(e.worker), kind, e.event.Parent, uint64(len(e.event.Blocks) + len(e.event.Externals))} {
			number(n)
		}
		for _, b := range e.event.Blocks {
			number(b.External)
			number(b.Local)
		}
		for _, external := range e.event.Externals {
			number(external)
			number(0)
		}
	}
	return to
}
