// SPDX-License-Identifier: Apache-2.0

package router

import (
	"sync"
	"time"
)

// Arrival is what the caller knows of a request before its decision. It does not affect the
// decision.
type Arrival struct {
	Began  time.Time // the request's headers came; zero: [Outcome.Began] follows from the decision's times
	BodyAt time.Time // the whole body had come; zero = unknown
	// The request's W3C trace context, as Envoy or the client sent it, unchecked; "" = none.
	TraceParent, TraceState string
}

// Outcome says what became of a booked request. Its decision has no candidates.
type Outcome struct {
	Decision
	Arrival
	Answered time.Time // the response's headers came; zero = they did not, or the caller did not report them
	// LegEnded is the end of the prefill leg; zero without a leg.
	LegEnded  time.Time
	Status    int  // of the response; 0 = unknown
	Abandoned bool // no worker served the request
}

// openOutcome collects the outcome of a request in flight. A nil one collects nothing.
type openOutcome struct {
	mu sync.Mutex
	// mu guards the field below.
	outcome Outcome
}

func (o *openOutcome) change(f func(*Outcome)) {
	if o != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		f(&o.outcome)
	}
}
