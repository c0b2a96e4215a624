// SPDX-License-Identifier: Apache-2.0

package router

import (
	"time"

	"github.com/kvroute/kvroute/slots"
)

// Foreign is load that an engine reports and that neither this router nor its replicas
// sent: requests that reach the worker another way. Costs add it to the load of the
// slots.
//
// # Invariants
//
//   - Foreign load is never negative, and never more than the engine reported.
//   - Own requests are not counted twice: the largest own load of the last [slots.PeakSpan]
//     is subtracted from each report. So the rest of a report contains no own request, even
//     if the router booked more requests since. Those count by their slots. This
//     assumes that engines end requests before the router frees them. Aborted requests may
//     count as foreign for one report.
//   - The router may learn of a request after the report that contains it: another replica
//     routed it, or another worker served it. The request counts as foreign until then.
//   - A report counts for reportLife and is replaced by the next one. Between two reports
//     foreign load is constant, whatever happens to own requests.
//   - An engine that reports only what the router sent changes no cost.
type Foreign struct {
	Requests int `json:"requests"`
	Waiting  int `json:"waiting"` // part of Requests that is in the engine's queue; the true number may be larger
	// Tokens estimates the prefill of the waiting requests by the average prefill of the
	// pool's own requests.
	Tokens int `json:"tokens"`
	// Blocks are in use by these requests. If the engine does not report its cache, they
	// are estimated in the same way.
	Blocks int `json:"blocks"`
	// Held are the tokens that these requests hold, each with all of its tokens: those of Blocks, or,
	// because requests may share blocks, an average prompt for each request if that is more.
	Held int `json:"held_tokens"`
}

// engineReport is the last report of an engine, and its foreign part.
type engineReport struct {
	usedBlocks int
	usage      float64 // share of the cache in use
	usedAt     time.Time

	running, waiting int
	requestsAt       time.Time

	foreignBlocks, foreignRequests, foreignWaiting int
}

// mostReported bounds the numbers of a report, far above those of any engine, so that no
// sum overflows.
const mostReported = 1 << 24

// syncLag is the delay after a report within which a replica's request may become known
// that the report already contains.
const syncLag = 250 * time.Millisecond

// disclose removes one request, with its blocks, from the foreign load of reports that are at most lag
// old: the request has a slot from now on.
func (r *engineReport) disclose(now time.Time, blocks int, lag time.Duration) {
	if now.Sub(r.requestsAt) <= lag {
		r.foreignRequests, r.foreignWaiting = max(0, r.foreignRequests-1), max(0, r.foreignWaiting-1)
	}
	if now.Sub(r.usedAt) <= lag {
		r.foreignBlocks = max(0, r.foreignBlocks-blocks-1)
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// takeCache takes how much of its cache an engine uses: blocks, and a share. own is the largest own load
// of the last [slots.PeakSpan]. A report from the future counts as one of now: a clock that is ahead must
// not keep a worker busy for ever. A report that is too old to be compared with own requests has no
// foreign load.
func (r *engineReport) takeCache(now time.Time, own slots.Load, blocks int, usage float64, at time.Time) {
	if at = earlier(at, now); at.Before(r.usedAt) {
		return
	}
	r.usedBlocks, r.usage, r.usedAt, r.foreignBlocks = min(max(0, blocks), mostReported), usage, at, 0
	if now.Sub(at) <= slots.PeakSpan {
		// A prompt's last block, which is not full, is in use and has no slot's block.
		r.foreignBlocks = max(0, r.usedBlocks-own.Blocks-own.Requests)
	}
}

// takeRequests takes how many requests an engine has, as takeCache does.
func (r *engineReport) takeRequests(now time.Time, own slots.Load, running, waiting int, at time.Time) {
	if at = earlier(at, now); at.Before(r.requestsAt) {
		return
	}
	r.running, r.waiting, r.requestsAt = min(max(0, running), mostReported), min(max(0, waiting), mostReported), at
	r.foreignRequests, r.foreignWaiting = 0, 0
	if now.Sub(at) <= slots.PeakSpan {
		r.foreignRequests = max(0, r.running+r.waiting-own.Requests)
		r.foreignWaiting = min(r.foreignRequests, max(0, r.waiting-own.Waiting))
	}
}
