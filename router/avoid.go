// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"net/http"
	"time"
)

// avoidance says when a worker that fails gets no requests: in a back-off, and after it until a trial succeeds.
//
// States, and what leads from one to the next:
//
//   - Normal. A failure begins a back-off of the first period.
//   - Back-off, until the time until. Its end makes the worker a candidate for a trial.
//   - Trial. Each booking starts a trial period of the length of the first one, during which the worker gets no
//     other request. A good response ends the trial: the state is normal. A failure begins a back-off that is
//     twice as long as the one before, up to 16 times the first.
//
// A failure more than a minute after the end of the latest back-off begins with the first period again. A back-off
// lasts at least as long as the pause that the worker asked for, up to a minute. While no
// worker is better, an avoided worker is a candidate anyway.
type avoidance struct {
	until    time.Time // the end of the latest back-off
	trial    time.Time // the end of the latest trial period
	trying   bool      // a back-off began, and no good response came since
	strikes  int       // back-offs so far, each begun at most a minute after the one before
	answered time.Time // last response that shows that the worker accepts connections
	refused  time.Time // last failure without a response, if no response came since
	since    time.Time // first failure without a response, if no response came since
	answers  *answers  // latest responses, by status; nil before the first one
	// told is the number of responses with status 429 or 503 in the proxy's log, minus the number of those that clients
	// received. If the proxy has a log, each response that a client received is in it, too.
	told int
}

const (
	strikesForgotten = time.Minute
	mostStrikes      = 5 // 2⁴ times the first period
	// refusalCounts is the time for which a worker that failed without a response is not even a candidate if
	// no worker is healthy.
	refusalCounts = time.Minute
)

// fail notes a failure. It reports whether a back-off begins.
func (a *avoidance) fail(now time.Time, first time.Duration) bool {
	if first <= 0 || now.Before(a.until) {
		return false // another request that failed for the same reason
	}
	if now.Sub(a.until) > strikesForgotten {
		a.strikes = 0
	}
	a.strikes = min(a.strikes+1, mostStrikes)
	a.until, a.trial, a.trying = now.Add(first<<(a.strikes-1)), time.Time{}, true
	return true
}

// longestPause limits the time for which a worker is avoided because it asked for a pause.
const longestPause = time.Minute

// pause begins or prolongs a back-off by a pause that the worker asked for. It reports whether a back-off
// begins.
func (a *avoidance) pause(now time.Time, d time.Duration) (begins bool) {
	until := now.Add(min(d, longestPause))
	if d <= 0 || !until.After(a.until) {
		return false
	}
	begins = !now.Before(a.until)
	a.until, a.trial, a.trying = until, time.Time{}, true
	return begins
}

// served notes a good response. It reports whether a trial ends.
func (a *avoidance) served(now time.Time) bool {
	if !a.trying || now.Before(a.until) {
		return false // the request was sent before the failure
	}
	a.trying, a.trial = false, time.Time{}
	return true
}

// refuses says whether the last contact with the worker, within a minute, was a failure without a response.
func (a *avoidance) refuses(now time.Time) bool {
	return !a.refused.IsZero() && now.Sub(a.refused) < refusalCounts
}

// cause says in words why the worker is avoided.
func (a *avoidance) cause() string {
	if a.refused.IsZero() && a.answers != nil && a.answers.status > 0 {
		return fmt.Sprintf("it answered %d", a.answers.status)
	}
	return "it gave no response"
}

// gaveResponse notes that a response came.
func (a *avoidance) gaveResponse() { a.refused, a.since = time.Time{}, time.Time{} }

// gaveNone notes a failure without a response.
func (a *avoidance) gaveNone(now time.Time) {
	if a.refused = now; a.since.IsZero() {
		a.since = now
	}
}

// mostTold limits told, in case that the proxy has no log.
const mostTold = 16

// tells notes a response with status 429 or 503: by is 1 for an entry of the proxy's log, -1 for the response that a
// client received. It reports whether the response was not noted before.
func (a *avoidance) tells(by int) bool {
	fresh := a.told*by >= 0
	a.told = max(-mostTold, min(a.told+by, mostTold))
	return fresh
}

// unansweredFor is the time between the first and the last failure without a response after which they are a fault.
// It is the length of the first back-off: the worker failed again when it was tried.
const unansweredFor = 2 * time.Second

// responseFault returns the fault of a worker that gives no response.
func (a *avoidance) responseFault() (fault Fault, found bool) {
	if a.refused.Sub(a.since) < unansweredFor {
		return Fault{}, false
	}
	return Fault{"no_response", fmt.Sprintf(
		"the worker has given no response since %s, neither to the first request that failed nor to those that tried it again: kvroute avoids it; start it, or remove it",
		a.since.UTC().Format(time.RFC3339))}, true
}

// errorClass is a kind of response that says that a worker does not serve. Any other status is a good response:
// 400, 413 and 422 are mistakes of clients.
type errorClass uint8

const (
	unauthorized errorClass = iota
	forbidden
	notFound
	tooMany
	serverError
	errorClasses
)

func classOf(status int) (class errorClass, failed bool) {
	switch {
	case status == http.StatusUnauthorized:
		return unauthorized, true
	case status == http.StatusForbidden:
		return forbidden, true
	case status == http.StatusNotFound:
		return notFound, true
	case status == http.StatusTooManyRequests:
		return tooMany, true
	case status >= http.StatusInternalServerError:
		return serverError, true
	}
	return 0, false
}

// answers counts the latest responses of a worker. Each response multiplies the earlier counts by answersKept, so
// that the sum is about the last 33 responses.
type answers struct {
	all     float64
	failed  [errorClasses]float64
	last    time.Time
	origins []answerOrigin // of the latest failures, at most originsKept
	next    int            // place of the next origin
	status  int            // of the latest failure
}

// answerOrigin says where a request came from that got an error: hashes of the client's address and of the
// beginning of the prompt.
type answerOrigin struct {
	class          errorClass
	client, prefix uint64
}

const (
	answersKept = 0.97
	answersLife = 5 * time.Minute // without a response, after which earlier ones no longer count
	originsKept = 8

	// A worker answers errors far more often than the others if it answered at least leastErrors of one class,
	// to requests of at least leastOrigins clients or prefixes, and if the share of its responses exceeds
	// twice the share of the other workers' responses by more than errorShare.
	leastErrors  = 4.5 // 5 in a row, of which the earlier ones count less
	errorShare   = 0.2
	leastOrigins = 3
)

// note adds a response and returns the answers. a may be nil. The class of from counts only if failed.
func (a *answers) note(now time.Time, from answerOrigin, status int, failed bool) *answers {
	if a == nil || now.Sub(a.last) > answersLife {
		a = new(answers)
	}
	a.last = now
	a.all = a.all*answersKept + 1
	for i := range a.failed {
		a.failed[i] *= answersKept
	}
	if !failed {
		return a
	}
	a.failed[from.class]++
	a.status = status
	if len(a.origins) < originsKept {
		a.origins = append(a.origins, from)
		return a
	}
	a.origins[a.next] = from
	a.next = (a.next + 1) % originsKept
	return a
}

// widespread says whether errors of a class went to enough clients, or to requests with enough different
// beginnings, so that no single client can cause them.
func (a *answers) widespread(class errorClass) bool {
	clients, prefixes := make(map[uint64]bool, originsKept), make(map[uint64]bool, originsKept)
	for _, o := range a.origins {
		if o.class == class {
			clients[o.client], prefixes[o.prefix] = true, true
		}
	}
	return max(len(clients), len(prefixes)) >= leastOrigins
}

// errsMore says whether the worker answers errors of a class far more often than the other workers of its pool.
// others is the share of such errors among their responses, 0 to 1.
func (c *core) errsMore(now time.Time, ord int, class errorClass) (more bool, others float64) {
	a := c.entries[ord].avoid.answers
	if a == nil || a.failed[class] < leastErrors || now.Sub(a.last) > answersLife || !a.widespread(class) {
		return false, 0
	}
	var failed, all float64
	for _, other := range c.order {
		// Ranks of one process fail together.
		e := &c.entries[other]
		if o := e.avoid.answers; o != nil && e.worker.ID != c.entries[ord].worker.ID && now.Sub(o.last) <= answersLife {
			failed += o.failed[class]
			all += o.all
		}
	}
	if all > 0 {
		others = failed / all
	}
	return a.failed[class]/a.all > 2*others+errorShare, others
}

// answerFault returns the fault of a worker that answers errors far more often than the others.
func (c *core) answerFault(now time.Time, ord int) (fault Fault, found bool) {
	a := c.entries[ord].avoid.answers
	for class := range errorClasses {
		more, others := c.errsMore(now, ord, class)
		if !more {
			continue
		}
		return Fault{"answers_errors", fmt.Sprintf(
			"the worker answered %s to about %.0f of its last %.0f requests, and the other workers of the model to %.0f %% of theirs: kvroute avoids it; look at its log",
			class.text(a.status), a.failed[class], a.all, 100*others)}, true
	}
	return Fault{}, false
}

// text names the statuses of a class. status is the latest one of the worker.
func (c errorClass) text(status int) string {
	switch c {
	case unauthorized:
		return "401"
	case forbidden:
		return "403"
	case notFound:
		return "404"
	case tooMany:
		return "429"
	case serverError, errorClasses:
	}
	return fmt.Sprint(max(status, http.StatusInternalServerError))
}
