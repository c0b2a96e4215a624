// SPDX-License-Identifier: Apache-2.0

package router

import (
	"errors"
	"time"
)

// CrowdedError wraps the errors of [Router.BestWorker] that mean a lack of room. It says
// when to try again.
type CrowdedError struct {
	Err        error
	RetryAfter time.Duration // 1 s to 60 s, estimated
}

// Error implements error.
func (e *CrowdedError) Error() string { return e.Err.Error() }

// Unwrap makes errors.Is see the reason.
func (e *CrowdedError) Unwrap() error { return e.Err }

// RetryAfter returns when to try again after an error of [Router.BestWorker], in whole
// seconds, as in HTTP: 1 if unknown.
func RetryAfter(err error) (seconds int) {
	if c, ok := errors.AsType[*CrowdedError](err); ok {
		return int((c.RetryAfter + time.Second - 1) / time.Second)
	}
	return 1
}

const (
	minRetry = time.Second
	maxRetry = time.Minute
	// usualStay is how long requests are assumed to hold their slots before any has ended.
	usualStay = 10 * time.Second
	// sampleStays is the number of ended requests for each one that is measured.
	sampleStays = 16
)

// crowded wraps an error that means a lack of room.
func (c *core) crowded(now time.Time, q *question, err error) error {
	return &CrowdedError{err, min(max(c.roomIn(now, q), minRetry), maxRetry)}
}

// roomIn estimates when the first worker that may take a request is below all thresholds if
// no more requests arrive. It is 0 if no worker may take the request.
func (c *core) roomIn(now time.Time, q *question) time.Duration {
	from, to := 0, len(c.order)
	if q.Pinned != nil {
		from, to = c.pin(q)
	}
	least := maxRetry
	some := false
	for _, ord := range c.order[from:to] {
		e := &c.entries[ord]
		if h, _ := c.standing(now, e); c.exclude(e, q) == "" && (h == Healthy || h == Degraded) {
			least, some = min(least, c.roomOn(now, ord)), true
		}
	}
	if !some {
		return 0
	}
	return least
}

// roomOn is roomIn for one worker: prefill ends by the model of the engine, and blocks
// become free evenly in the time for which a request holds its slot.
func (c *core) roomOn(now time.Time, ord int) time.Duration {
	e, load := &c.entries[ord], c.slots.Load(ord)
	info, f := e.info, c.foreign(now, e, 0)
	var wait time.Duration
	prefillBelow := func(limit float64) {
		if over := float64(load.PendTokens+f.Tokens) - limit; over > 0 {
			ms := c.settings.Engine.PrefillTime(over)
			wait = max(wait, time.Duration(min(ms, float64(maxRetry.Milliseconds()))*float64(time.Millisecond)))
		}
	}
	if t := c.thresholds.PrefillTokens; t != nil {
		prefillBelow(float64(*t))
	}
	if batch := float64(info.MaxBatchedTokens); batch > 0 {
		if t := c.thresholds.PrefillFraction; t != nil {
			prefillBelow(*t * batch)
		}
		if c.queue != nil {
			prefillBelow(*c.conf.Queue.Threshold * batch)
		}
	}
	if t := c.thresholds.ActiveBlocks; t != nil && info.TotalKVBlocks > 0 {
		used := float64(max(load.Blocks+f.Blocks, e.reported(now)))
		if over := used - *t*float64(info.TotalKVBlocks); over > 0 {
			stay := c.stay
			if stay == 0 {
				stay = usualStay
			}
			wait = max(wait, time.Duration(float64(min(stay, maxRetry))*over/used))
		}
	}
	return wait
}

// end gives the slot of a request back, and measures how long requests stay. silent says
// that no first token of the request is known.
func (c *core) end(now time.Time, id string) (silent bool) {
	if c.ended%sampleStays == 0 {
		if stay, taken := c.slots.Age(now, id); taken && c.stay == 0 {
			c.stay = stay
		} else if taken {
			c.stay += (stay - c.stay) / 8
		}
	}
	c.ended++
	_, silent = c.slots.End(now, id)
	return silent
}
