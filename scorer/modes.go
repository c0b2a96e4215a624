// SPDX-License-Identifier: Apache-2.0

package scorer

// RoundRobin returns the candidate whose turn it is. It returns -1 if n is 0.
func RoundRobin(n int, turn uint64) int {
	if n <= 0 {
		return -1
	}
	return int(turn % uint64(n))
}

// LeastLoaded returns the candidate with the fewest requests, ties as in [Pick].
func LeastLoaded(in []Input, u float64) int {
	return Best(len(in), u, func(i, j int) int { return Quieter(in, i, j) })
}

// PowerOfTwo draws two candidates and returns the one with fewer requests, the
// first drawn if they are equal.
func PowerOfTwo(in []Input, u float64) int {
	n := len(in)
	if n <= 1 {
		return n - 1
	}
	pair := Random(n*(n-1), u) // every ordered pair has the same chance
	i, j := pair/(n-1), pair%(n-1)
	if j >= i {
		j++
	}
	if in[j].ActiveRequests*in[i].workers() < in[i].ActiveRequests*in[j].workers() {
		return j
	}
	return i
}

// DeviceAware returns the least loaded candidate of one class of devices. A GPU counts as
// ratio CPUs. The class with fewer requests for each CPU wins; GPUs if they are equal.
// Without candidates of both classes, and for a request whose embeddings are cached, it is
// [LeastLoaded].
func DeviceAware(r *Request, in []Input, ratio float64) int {
	var workers, requests [2]int
	for i := range in {
		class := class(&in[i])
		workers[class] += in[i].workers()
		requests[class] += in[i].ActiveRequests
	}
	if workers[gpu] == 0 || workers[cpu] == 0 || r.EmbeddingHit {
		return LeastLoaded(in, r.U)
	}
	winner := gpu
	if float64(requests[cpu])/float64(workers[cpu]) < float64(requests[gpu])/(float64(workers[gpu])*ratio) {
		winner = cpu
	}
	return Best(len(in), r.U, func(i, j int) int {
		if a, b := class(&in[i]), class(&in[j]); a != b {
			return sign(a == winner)
		}
		return Quieter(in, i, j)
	})
}

// The classes of devices.
const gpu, cpu = 0, 1

func class(in *Input) int {
	if in.CPU {
		return cpu
	}
	return gpu
}

// SessionOverloaded reports whether a session should leave its worker: the worker has more
// than 50,000 tokens above twice the mean of pending and held tokens.
func SessionOverloaded(in []Input, bound int) bool {
	var sum float64
	for i := range in {
		sum += float64(in[i].PendTokens + in[i].DecodeTokens)
	}
	return float64(in[bound].PendTokens+in[bound].DecodeTokens) > 2*sum/float64(len(in))+50_000
}
