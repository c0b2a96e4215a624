// SPDX-License-Identifier: Apache-2.0

package extproc

// state is where a main stream stands.
type state uint8

const (
	begun      state = iota // nothing received
	waiting                 // a request of ours, its body to come
	passing                 // a request of others, its body to come
	routed                  // answered with the worker's header
	passed                  // Envoy routes it: not ours, or failed open
	responding              // the response has begun
	refused                 // answered with an error response
	states                  // the number of states
)

func (s state) String() string {
	return [...]string{"begun", "waiting", "passing", "routed", "passed", "responding", "refused"}[s]
}

// message is what came, as far as the state machine tells messages apart.
type message uint8

const (
	headersOurs     message = iota // request headers of an endpoint of ours, a body follows
	headersBodyless                // the same, and no body follows
	headersWrong                   // request headers that no body can mend
	headersOther                   // request headers of anything else, a body follows
	headersOtherEnd                // the same, and no body follows
	requestBody
	requestTrailers
	responseHeaders
	responseBody
	responseTrailers
	unknown  // what this version does not know
	messages // the number of messages
)

func (m message) String() string {
	return [...]string{
		"request headers", "request headers without body", "wrong request headers",
		"request headers of others", "request headers of others without body",
		"request body", "request trailers", "response headers", "response body", "response trailers", "unknown",
	}[m]
}

// action is what a message calls for.
type action uint8

const (
	leave   action = iota // end the stream: Envoy must not wait for an answer that has no right form
	proceed               // answer: go on, nothing changes
	decide                // answer with a decision, or what comes instead
	refuse                // answer with an error response
	tell                  // answer with what the response is to tell of the decision
	ignore                // send nothing; Envoy waits for nothing
)

func (a action) String() string {
	return [...]string{"leave", "proceed", "decide", "refuse", "tell", "ignore"}[a]
}

// next is the whole protocol: what a message calls for in a state, and the state
// that it leads to. After decide the outcome says which one: routed, passed or
// refused.
func next(s state, m message) (action, state) {
	requestGone := s == routed || s == passed || s == responding || s == refused
	switch {
	case s == begun && m == headersOurs:
		return proceed, waiting
	case s == begun && m == headersBodyless:
		return decide, waiting
	case s == begun && m == headersWrong:
		return refuse, refused
	case s == begun && m == headersOther:
		return proceed, passing
	case s == begun && m == headersOtherEnd:
		return proceed, passed

	case s == waiting && (m == requestBody || m == requestTrailers):
		return decide, waiting
	case s == passing && (m == requestBody || m == requestTrailers):
		return proceed, passed
	case (s == routed || s == passed) && m == requestTrailers:
		return proceed, s
	case requestGone && m == requestBody:
		return ignore, s

	// A response may overtake the request: Envoy's own replies do.
	case (s == waiting || s == passing || s == routed || s == passed) && m == responseHeaders:
		return tell, responding
	// Without response headers where Envoy is configured to skip them.
	case s != begun && s != refused && (m == responseBody || m == responseTrailers):
		return proceed, responding
	}
	return leave, s
}
