// SPDX-License-Identifier: Apache-2.0

package extproc

// A goroutine begins with a small stack, which is doubled and copied, frame by frame,
// each time that a call does not fit: four times on the way down to a tokenizer, at a
// third of what the decision itself takes. One call that needs as much at once, before
// there are frames to copy, takes one small copy instead. The runtime takes half of a
// stack away at each collection that finds little of it in use.

// deepen has the runtime make a stack of 32 KiB, which a decision needs.
//
//go:noinline
func deepen(i int) byte {
	var room [16 << 10]byte
	return room[i]
}

// deepenSome has it make one of 8 KiB, which a message needs.
//
//go:noinline
func deepenSome(i int) byte {
	var room [4 << 10]byte
	return room[i]
}
