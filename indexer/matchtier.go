// SPDX-License-Identifier: Apache-2.0

package indexer

// MatchHost counts, for each worker, how many leading blocks of the prompt it holds in host memory, whether or not it
// also holds them on the device. dst is as in [Index.Match]. It counts whole blocks of the worker's engine. The count
// of a worker of a hybrid model is 0: the blocks of its side groups in host memory are not known.
func (x *Index) MatchHost(dst []int32, local []uint64) {
	clear(dst)
	if len(local) == 0 || len(dst) == 0 || x.lower.Load() == 0 {
		return
	}
	m := Matches{Device: make([]int32, len(dst))}
	m.Lower[HostPinned-1] = dst
	x.gate.RLock()
	defer x.gate.RUnlock()
	if n := x.root.kids.get(local[0]); n != nil {
		m.goOn(n, local)
	}
	for w, s := range x.sides[:min(len(x.sides), len(dst))] {
		switch {
		case s == nil:
		case len(s.shape.Sides) > 0:
			dst[w] = 0
		default:
			dst[w] = s.boundary(dst[w], 0)
		}
	}
}
