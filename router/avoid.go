// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"net/http"
	"strings"
	"time"
)

// avoidance says when a worker that fails gets no requests: in a back-off, and after it until a try succeeds.
//
// States, and what leads from one to the next:
//
//   - Normal. A failure begins a back-off of the first period.
//   - Back-off, until the time until. Its end makes the worker a candidate for a try.
//   - Try. Each booking starts a trial period of the length of the first one, during which the worker gets no
//     other request. A good response ends it: the state is normal. A failure begins a back-off that is
//     twice as long as the one before, up to 16 times the first.
//
// A prefill leg that hangs costs a request the whole time of a leg. So its back-offs get longer, up to 256 times the
// first, and its trial period lasts as long as a leg may take.
//
// A failure more than a minute after the end of the latest back-off begins with the first period again, except for a
// leg that hangs if no good response came since. A back-off lasts at least as long as the pause that the worker asked
// for, up to a minute. While no worker is better, an avoided worker is a candidate anyway.
//
// Invariants:
//
//   - No client alone begins a back-off by the worker's answers: they count by their share; see [ranks.errsMore].
//     Two things begin one at once: a failure without a response, and a pause that the worker asked for.
//   - After freeFailures failures, a worker that is not in the state normal gets at most one of triesEvery+1
//     bookings of its pool, however few these are. At high rates the time of a back-off makes it fewer.
//   - A good probe of the worker's health ends a back-off only if it is news: the last failure was without a
//     response, or a probe failed since. Only the first freeProbeTries such tries come in addition to those above.
//   - A pause that the worker asked for does not end sooner, unless a probe failed meanwhile.
type avoidance struct {
	until    time.Time // the end of the latest back-off
	trial    time.Time // the end of the latest trial period
	trying   bool      // a back-off began, and no good response came since
	began    time.Time // when trying was set
	why      string    // what the worker's address answered after the last failure without a response; empty if unknown
	strikes  int       // back-offs so far, each begun at most a minute after the one before
	answered time.Time // last response that shows that the worker accepts connections
	refused  time.Time // last failure without a response, if no response came since
	proved   time.Time // last good probe of the worker's health
	since    time.Time // first failure without a response, if no response came since
	answers  *answers  // latest responses, by status; nil before the first one
	// told is the number of responses with status 429 or 503 in the proxy's log, minus the number of those that clients
	// received. If the proxy has a log, each response that a client received is in it, too.
	told int

	failures int    // each failure adds 1, each good response subtracts 1; from 0 to mostFailures
	failing  bool   // the last response was a failure, or none came
	booked   uint64 // [ranks.bookings] when the last back-off or try began
	// Since the last good response: tries that good probes began. Since the last failure: whether a probe failed.
	probeTries  int
	probeFailed bool
	// blamed is the number of the flight whose failure began the last back-off, if the proxy's log may still say that
	// the worker responded; 0 otherwise. wasTrying is the value of trying before.
	blamed    uint64
	wasTrying bool
}

const (
	freeFailures   = 10 // after which tries are limited by the number of requests, too
	mostFailures   = 2 * freeFailures
	triesEvery     = 20 // bookings of other workers between two tries
	freeProbeTries = 2
)

// counts adds a failure or a good response to the number of failures.
func (a *avoidance) counts(failed bool) {
	if a.failing = failed; failed {
		a.failures = min(a.failures+1, mostFailures)
	} else {
		a.failures = max(0, a.failures-1)
	}
}

// probed notes the result of a probe of the worker's health. It reports whether a back-off ends.
func (a *avoidance) probed(now time.Time, good bool, booked uint64) (ends bool) {
	if !good {
		a.probeFailed = true
		return false
	}
	a.proved = now
	_, waits := a.ends(booked)
	switch {
	case !a.trying, !now.Before(a.until) && !waits, now.Before(a.trial), !a.probeFailed && a.refused.IsZero():
		return false
	case a.probeTries >= freeProbeTries && booked-a.booked < triesEvery:
		return false
	}
	a.probeTries++
	a.until, a.booked, a.probeFailed = now, booked-triesEvery, false
	return true
}

// absolve takes back the back-off that a flight began without a response: the worker did respond.
func (a *avoidance) absolve(now time.Time, flight uint64) (absolved bool) {
	if flight == 0 || a.blamed != flight {
		return false
	}
	a.until, a.trying, a.blamed = now, a.wasTrying, 0
	a.strikes, a.failures = a.strikes-1, a.failures-1
	return true
}

const (
	strikesForgotten = time.Minute
	mostStrikes      = 5 // 2⁴ times the first period
	mostLegStrikes   = 9 // the same for prefill legs that hang: 2⁸ times
	// refusalCounts is the time for which a worker that failed without a response is not even a candidate if
	// no worker is healthy.
	refusalCounts = time.Minute
)

// fail notes a failure; legHung says that it is a prefill leg that got no response in time. It reports whether a
// back-off begins.
func (a *avoidance) fail(now time.Time, first time.Duration, booked uint64, legHung bool) bool {
	if first <= 0 || now.Before(a.until) {
		return false // another request that failed for the same reason
	}
	if now.Sub(a.until) > strikesForgotten && !(legHung && a.trying) {
		a.strikes = 0
	}
	most := mostStrikes
	if legHung {
		most = mostLegStrikes
	}
	a.strikes = min(a.strikes+1, most)
	a.wasTrying, a.blamed = a.trying, 0
	a.begin(now)
	a.until, a.trial, a.trying = now.Add(first<<(a.strikes-1)), time.Time{}, true
	a.booked, a.probeFailed = booked, false
	return true
}

// begin notes when a time begins in which the worker is avoided or tried.
func (a *avoidance) begin(now time.Time) {
	if !a.trying {
		a.began = now
	}
}

// longestPause limits the time for which a worker is avoided because it asked for a pause.
const longestPause = time.Minute

// pause begins or prolongs a back-off by a pause that the worker asked for. It reports whether a back-off
// begins.
func (a *avoidance) pause(now time.Time, d time.Duration, booked uint64) (begins bool) {
	until := now.Add(min(d, longestPause))
	if d <= 0 || !until.After(a.until) {
		return false
	}
	begins = !now.Before(a.until)
	a.begin(now)
	a.until, a.trial, a.trying = until, time.Time{}, true
	a.booked, a.probeFailed, a.blamed = booked, false, 0
	return begins
}

// served notes a good response. It reports whether a trial ends.
func (a *avoidance) served(now time.Time) bool {
	if !a.trying || now.Before(a.until) {
		return false // the request was sent before the failure
	}
	a.trying, a.trial = false, time.Time{}
	a.probeTries, a.probeFailed, a.blamed = 0, false, 0
	return true
}

// refuses says whether the last contact with the worker, within a minute, was a failure without a response.
func (a *avoidance) refuses(now time.Time) bool {
	return !a.refused.IsZero() && now.Sub(a.refused) < refusalCounts
}

// unanswered says whether the worker gave no response to a request, and neither a response nor a good probe came since.
func (a *avoidance) unanswered() bool { return a.trying && a.refused.After(a.proved) }

// cause says in words why the worker is avoided.
func (a *avoidance) cause() string {
	switch {
	case !a.refused.IsZero() || a.answers == nil:
		return strings.TrimSuffix("it gave no response: "+a.why, ": ")
	case a.answers.status == 0:
		return "it gave no response in time"
	}
	return fmt.Sprintf("it answered %d", a.answers.status)
}

// gaveResponse notes that a response came.
func (a *avoidance) gaveResponse() { a.refused, a.since, a.why = time.Time{}, time.Time{}, "" }

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
		"the worker gave no response%s, neither to the first request that failed nor to those that tried it again: kvroute sends it only single requests, to try it; start it, or remove it",
		strings.TrimSuffix(" ("+a.why+")", " ()")), a.since}, true
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
	late // the proxy did not wait longer for a response
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
	status  int            // of the latest failure; 0 = late
	latest  [errorClasses]latestError
	errors  uint64 // number of failures
}

// latestError is the latest failure of a class: its status, and its number among all failures.
type latestError struct {
	status int
	number uint64
}

// answerOrigin says where a request came from that got an error.
type answerOrigin struct {
	class errorClass
	origin
}

const (
	answersKept = 0.97
	answersLife = 30 * time.Minute // without a response, after which earlier ones no longer count
	originsKept = 8

	// A worker answers errors far more often than the others if it answered at least leastErrors of one class,
	// to requests of at least leastOrigins clients or prefixes, and if the share of its responses exceeds
	// twice the share of the other workers' responses by more than errorShare; or, since most workers may fail, twice
	// the lowest share of another worker with leastAnswers responses by more than worstShare.
	leastErrors  = 4.5 // 5 in a row, of which the earlier ones count less
	errorShare   = 0.2
	leastOrigins = 3
	leastAnswers = 7 // 8 in a row, of which the earlier ones count less
	worstShare   = 0.5
	// aloneShare stands for the share of the other workers if there is no other: more than 0.5 is a fault.
	aloneShare = 0.15
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
	a.errors++
	a.status, a.latest[from.class] = status, latestError{status, a.errors}
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
	clients, prefixes := make(map[uint32]bool, originsKept), make(map[uint32]bool, originsKept)
	for _, o := range a.origins {
		if o.class == class {
			clients[o.client], prefixes[o.prefix] = true, true
		}
	}
	return max(len(clients), len(prefixes)) >= leastOrigins
}

// errsMore says whether the worker answers errors of a class far more often than the other workers of its pool.
func (r *ranks) errsMore(now time.Time, ord int, class errorClass) bool {
	o := r.others(now, ord, class)
	return !o.alone && r.errs(now, ord, class, o.limit())
}

// errs says whether the share of errors of a class among the worker's responses is above a limit.
func (r *ranks) errs(now time.Time, ord int, class errorClass, limit float64) bool {
	a := r.entries[ord].avoid.answers
	return a != nil && a.failed[class] >= leastErrors && now.Sub(a.last) <= answersLife && a.widespread(class) &&
		a.failed[class]/a.all > limit
}

// otherAnswers are the latest responses of the other workers of a pool.
type otherAnswers struct {
	failed, all float64 // errors of a class, and all responses
	lowest      float64 // lowest share of such errors of one with leastAnswers responses; 1 without one
	alone       bool    // no other worker can take requests, so that there is nothing to compare with
}

func (o *otherAnswers) share() float64 { return o.failed / max(1, o.all) }

// limit is the share of errors above which a worker is far worse than the others.
func (o *otherAnswers) limit() float64 { return min(2*o.share()+errorShare, 2*o.lowest+worstShare) }

func (r *ranks) others(now time.Time, ord int, class errorClass) otherAnswers {
	o := otherAnswers{alone: true, lowest: 1}
	for _, other := range r.order {
		e := &r.entries[other]
		if e.worker.ID == r.entries[ord].worker.ID {
			continue // ranks of one process fail together
		}
		takes := !e.info.Draining && (e.info.Health <= Degraded || e.info.Unproved)
		o.alone = o.alone && !takes
		if a := e.avoid.answers; a != nil && now.Sub(a.last) <= answersLife {
			o.failed += a.failed[class]
			o.all += a.all
			if takes && a.all >= leastAnswers {
				o.lowest = min(o.lowest, a.failed[class]/a.all)
			}
		}
	}
	return o
}

// answerFault returns the fault of a worker that answers errors far more often than the others, or of the only worker
// of a model, if it answers errors to most requests. Of several classes of errors it names the one with the latest
// error.
func (r *ranks) answerFault(now time.Time, ord int) (fault Fault, found bool) {
	a := r.entries[ord].avoid.answers
	var newest uint64
	for class := range errorClasses {
		if a == nil || a.failed[class] < leastErrors {
			continue // before the others are counted, which takes long in a large pool
		}
		o := r.others(now, ord, class)
		limit := o.limit()
		if o.alone {
			limit = 2*aloneShare + errorShare
		}
		if !r.errs(now, ord, class, limit) || a.latest[class].number < newest {
			continue
		}
		newest = a.latest[class].number
		compared := fmt.Sprintf("and the other workers of the model to %.0f %% of theirs: kvroute avoids it", 100*o.share())
		switch {
		case o.alone:
			compared = "and no other worker of the model can take requests: kvroute does not avoid it"
		case limit < 2*o.share()+errorShare:
			compared = fmt.Sprintf("and another worker of the model to %.0f %% of its requests: kvroute avoids it", 100*o.lowest)
		case o.all == 0:
			compared = "and no other worker of the model answered a request in the last 30 minutes: kvroute avoids it"
		}
		if newest < a.errors {
			compared += "; its latest error, " + a.statusText() + ", is another one"
		}
		fault, found = Fault{What: "answers_errors", Text: fmt.Sprintf("the worker %s about %.0f of its last %.0f requests, %s; look at its log",
			class.text(a.latest[class].status), a.failed[class], a.all, compared)}, true
	}
	return fault, found
}

// statusText names the latest failure.
func (a *answers) statusText() string {
	if a.status == 0 {
		return "no response in time"
	}
	return fmt.Sprint("status ", a.status)
}

// text continues "the worker", and names the statuses of a class. status is the latest one of the class.
func (c errorClass) text(status int) string {
	switch c {
	case unauthorized:
		status = http.StatusUnauthorized
	case forbidden:
		status = http.StatusForbidden
	case notFound:
		status = http.StatusNotFound
	case tooMany:
		status = http.StatusTooManyRequests
	case late:
		return "gave no response in time to"
	case serverError, errorClasses:
		status = max(status, http.StatusInternalServerError)
	}
	return fmt.Sprintf("answered %d to", status)
}
