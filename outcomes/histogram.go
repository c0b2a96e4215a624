// SPDX-License-Identifier: Apache-2.0

package outcomes

import "math"

// histogram counts times in ms. The limits of its bins grow by 5 %, so a percentile is exact to 2.5 %.
type histogram struct {
	bins [bins]uint64
	n    int
	sum  float64 // exact
}

const (
	binRatio  = 1.05
	firstBin  = 0.5 // ms; shorter times count as this long
	bins      = 292 // up to 12 minutes; longer times are in the last bin
	coarseBin = 4   // bins that the API shows as one
)

// binStart is the lower limit of a bin in ms.
func binStart(i int) float64 { return firstBin * math.Pow(binRatio, float64(i)) }

// add counts a time n times.
func (h *histogram) add(ms float64, n int) {
	i := 0
	if ms > firstBin {
		i = min(int(math.Log(ms/firstBin)/math.Log(binRatio)), bins-1)
	}
	h.bins[i] += uint64(n)
	h.n += n
	h.sum += ms * float64(n)
}

func (h *histogram) mean() float64 { return h.sum / float64(max(1, h.n)) }

// percentile returns the time that a share of all times does not exceed: the middle of its bin; 0 without times.
func (h *histogram) percentile(share float64) float64 {
	rest := int(math.Ceil(share * float64(h.n)))
	for i, n := range h.bins {
		if rest -= int(n); rest <= 0 && n > 0 {
			return binStart(i) * math.Sqrt(binRatio)
		}
	}
	return 0
}
