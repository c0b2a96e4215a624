// SPDX-License-Identifier: Apache-2.0

package scorer

// Random returns one of n candidates, all alike, by u in [0, 1). It returns -1 if
// n is 0.
func Random(n int, u float64) int {
	if n <= 0 {
		return -1
	}
	return max(0, min(int(u*float64(n)), n-1))
}

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
	i, j := two(len(in), u)
	if j >= 0 && in[j].ActiveRequests*in[i].workers() < in[i].ActiveRequests*in[j].workers() {
		return j
	}
	return i
}

// two draws two of n candidates, every ordered pair alike, with one u. What is not
// there is -1.
func two(n int, u float64) (first, second int) {
	if n <= 1 {
		return n - 1, -1
	}
	pair := Random(n*(n-1), u)
	first, second = pair/(n-1), pair%(n-1)
	if second >= first {
		second++
	}
	return first, second
}

// DeviceAware returns the least loaded candidate of one class of devices: a GPU is
// taken to do the work of ratio CPUs, and the class with fewer requests for its
// strength wins, the GPUs if equal. Without candidates of both classes, and for a
// request with nothing left to encode, it is [LeastLoaded].
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

// SessionOverloaded says whether the worker that a session is bound to has so much
// more to do than the others that the session should move: more than twice the
// mean of pending and held tokens, and 50,000 on top.
func SessionOverloaded(in []Input, bound int) bool {
	var sum float64
	for i := range in {
		sum += float64(in[i].PendTokens + in[i].DecodeTokens)
	}
	return float64(in[bound].PendTokens+in[bound].DecodeTokens) > 2*sum/float64(len(in))+50_000
}
