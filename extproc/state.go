// SPDX-License-Identifier: Apache-2.0

package extproc

// bodyMode is how Envoy sends the request's body: the processing mode of its filter.
type bodyMode uint8

const (
	buffered      bodyMode = iota // BUFFERED, BUFFERED_PARTIAL: in one message, after the answer to the headers
	streamed                      // STREAMED, NONE: in chunks or not at all, after the answer to the headers
	streamedAhead                 // STREAMED without waiting for that answer: in chunks
	fullDuplex                    // FULL_DUPLEX_STREAMED: in chunks, which kvroute must send back
	bodyModes                     // the number of modes
)

// state is the state of a main stream.
type state uint8

const (
	begun      state = iota // nothing received
	waiting                 // a request that kvroute routes; its body will come in one message
	gathering               // the same; its headers are unanswered, its body comes in chunks
	passing                 // a request that kvroute does not route; its body will come
	routed                  // answered with the worker's header
	passed                  // Envoy routes the request: for another endpoint, or failed open
	responding              // the response has begun
	refused                 // answered with an error response, or another one of kvroute itself
	states                  // the number of states
)

func (s state) String() string {
	return [...]string{"begun", "waiting", "gathering", "passing", "routed", "passed", "responding", "refused"}[s]
}

// message is a kind of message of Envoy.
type message uint8

const (
	headersOurs     message = iota // request headers for an endpoint that kvroute routes; a body follows
	headersBodyless                // the same; no body follows
	headersAnswered                // request headers that kvroute answers itself, whatever the body: mostly a refusal
	headersOther                   // request headers for another endpoint; a body follows
	headersOtherEnd                // the same; no body follows
	requestChunk                   // a part of the request's body that is not the last
	requestBody                    // the request's body, or its last part
	requestAgain                   // a part after the last one: Envoy repeats the end of some large bodies
	requestTrailers
	responseHeaders
	responseBody
	responseTrailers
	unknown  // a message that this version does not know
	messages // the number of messages
)

func (m message) String() string {
	return [...]string{
		"request headers", "request headers without body", "request headers to answer",
		"request headers of others", "request headers of others without body",
		"request body chunk", "request body", "request body after its end", "request trailers",
		"response headers", "response body", "response trailers", "unknown",
	}[m]
}

// isRequestHeaders reports whether m are the headers of a request.
func (m message) isRequestHeaders() bool { return m <= headersOtherEnd }

// isOther reports whether m are the headers of a request for another endpoint.
func (m message) isOther() bool { return m == headersOther || m == headersOtherEnd }

// action is how the stream reacts to a message.
type action uint8

const (
	leave   action = iota // end the stream: no answer is valid, and Envoy must not wait for one
	proceed               // answer: continue unchanged
	hold                  // answer later: the request is incomplete
	decide                // answer all unanswered messages: with a decision, a refusal, or unchanged
	relay                 // answer: continue with this part of a body, which is sent back if Envoy needs that
	refuse                // answer with an error response, or with the list of models
	respond               // answer the response's headers; the answer may add the decision's headers
	ignore                // send nothing: Envoy does not wait
)

// next is the whole protocol: the action for a message in a state, and the next state. After
// decide, the outcome sets the state: routed, passing, passed or refused.
func next(mode bodyMode, s state, m message) (action, state) {
	body := m == requestChunk || m == requestBody
	switch {
	case s == begun && m == headersOurs:
		switch mode {
		case buffered:
			return proceed, waiting
		case streamed:
			return decide, s // without the body
		default:
			return hold, gathering
		}
	case s == begun && m == headersBodyless:
		return decide, s
	case s == begun && m == headersAnswered:
		return refuse, refused
	case s == begun && m == headersOther:
		return proceed, passing
	case s == begun && m == headersOtherEnd:
		return proceed, passed
	case s == begun:
		return leave, s

	case m == requestAgain:
		return ignore, s
	case s == refused && (body || m == requestTrailers):
		return ignore, s // Envoy sent them before it received the refusal
	case s == refused:
		return leave, s

	case s == waiting && (m == requestBody || m == requestTrailers):
		return decide, s
	case s == gathering && m == requestChunk:
		return hold, s
	case s == gathering && (m == requestBody || m == requestTrailers):
		return decide, s
	case s == passing && m == requestBody:
		return relay, passed
	case s == passing && m == requestTrailers:
		return proceed, passed
	case body && s != waiting: // a response may have begun
		return relay, s
	case m == requestTrailers:
		return proceed, s

	// A response may overtake the request: Envoy's own replies do.
	case m == responseHeaders && s != responding:
		return respond, responding
	// Without response headers where Envoy is configured to skip them.
	case m == responseBody || m == responseTrailers:
		return relay, responding
	}
	return leave, s
}
