// SPDX-License-Identifier: Apache-2.0

package indexer

import "slices"

// AppendChain appends the local hashes of a sequence from its first block up to the block that a worker has under an
// external hash: on the device, or else on another tier. It returns dst as it is if the worker does not have the block.
func (x *Index) AppendChain(dst []uint64, worker int, external uint64) []uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	if worker < 0 || worker > maxWorker {
		return dst
	}
	k := x.parent(int32(worker), external)
	if !k.mine {
		k = x.parent(ownerOf(worker, External), external)
	}
	if !k.mine {
		return dst
	}
	p, from := k.place(), len(dst)
	for n, end := p.n, p.block+1; n != nil; n = n.parent {
		for _, l := range slices.Backward(n.local[:end]) {
			dst = append(dst, l)
		}
		if n.parent != nil {
			end = len(n.parent.local)
		}
	}
	slices.Reverse(dst[from:])
	return dst
}
