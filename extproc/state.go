// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// flow is how Envoy hands over the request's body: the filter's processing mode.
type flow uint8

const (
	whole  flow = iota // BUFFERED, BUFFERED_PARTIAL: in one message, after the answer to the headers
	behind             // STREAMED, NONE: in chunks or not at all, after the answer to the headers
	ahead              // STREAMED without waiting for that answer: in chunks
	duplex             // FULL_DUPLEX_STREAMED: in chunks, which Envoy wants back
	flows              // the number of flows
)

// state is where a main stream stands.
type state uint8

const (
	begun      state = iota // nothing received
	waiting                 // a request of ours, its body to come in one message
	gathering               // a request of ours, its headers unanswered, its body coming in chunks
	passing                 // a request that we do not route, its body to come
	routed                  // answered with the worker's header
	passed                  // Envoy routes it: not ours, or failed open
	responding              // the response has begun
	refused                 // answered with an error response
	states                  // the number of states
)

func (s state) String() string {
	return [...]string{"begun", "waiting", "gathering", "passing", "routed", "passed", "responding", "refused"}[s]
}

// message is what came, as far as the state machine tells messages apart.
type message uint8

const (
	headersOurs     message = iota // request headers of an endpoint of ours, a body follows
	headersBodyless                // the same, and no body follows
	headersWrong                   // request headers that no body can mend
	headersOther                   // request headers of anything else, a body follows
	headersOtherEnd                // the same, and no body follows
	requestChunk                   // a part of the request's body that is not the last
	requestBody                    // the request's body, or its last part
	requestAgain                   // more of it after its end: Envoy repeats the end of some large bodies
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
		"request body chunk", "request body", "request body after its end", "request trailers", "response headers", "response body", "response trailers", "unknown",
	}[m]
}

// isRequestHeaders reports whether m are the headers of a request.
func (m message) isRequestHeaders() bool { return m <= headersOtherEnd }

// isOther reports whether m are the headers of a request for another endpoint.
func (m message) isOther() bool { return m == headersOther || m == headersOtherEnd }

// action is what a message calls for.
type action uint8

const (
	leave   action = iota // end the stream: Envoy must not wait for an answer that has no right form
	proceed               // answer: continue, nothing changes
	hold                  // answer later: the request is not complete
	decide                // answer everything unanswered with a decision, a refusal or nothing
	relay                 // answer: this part of a body is unchanged; give it back if Envoy wants that
	refuse                // answer with an error response
	tell                  // answer the response's headers, with the decision's if they are wanted
	ignore                // send nothing; Envoy waits for nothing
)

// next is the whole protocol: what a message calls for in a state, and the state
// that it leads to. After decide the outcome says which one: routed, passing,
// passed or refused.
func next(f flow, s state, m message) (action, state) {
	body := m == requestChunk || m == requestBody
	switch {
	case s == begun && m == headersOurs:
		switch f {
		case whole:
			return proceed, waiting
		case behind:
			return decide, s // without having seen the body
		default:
			return hold, gathering
		}
	case s == begun && m == headersBodyless:
		return decide, s
	case s == begun && m == headersWrong:
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
		return ignore, s // on their way when we refused
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
		return tell, responding
	// Without response headers where Envoy is configured to skip them.
	case m == responseBody || m == responseTrailers:
		return relay, responding
	}
	return leave, s
}

// stream is one main stream. Its handler's goroutine owns it.
type stream struct {
	// Set once.
	server *Server
	grpc   extprocv3.ExternalProcessor_ProcessServer

	state state

	// From the first message.
	flow         flow
	partial      bool // Envoy may truncate the body
	truncated    bool // Envoy sent only the beginning of the body
	echo         bool // Envoy wants the chunks of the response back
	endpoint     openai.Endpoint
	wrong        *openai.Error // why the headers are refused
	salt         string        // the tenant, of the header x-tenant-id
	stripHeaders []string      // client headers that only kvroute may set, or that steer it
	sized        bool          // the headers have the body's length
	encoding     string        // of the body; "" for none
	inflated     []byte        // the body inflated, while a decision needs it
	steering     steering

	ended bool             // the request's last part has come
	held  [][]byte         // the unanswered chunks
	size  int              // bytes of the unanswered chunks
	late  <-chan time.Time // when Envoy will have waited too long for the answer to the headers
	taken int              // bytes of the server's budget that this stream has

	id       string // of the request; "" before the decision
	booked   bool   // the slot must be freed
	served   bool   // the response has a status 2xx
	decision router.Decision

	chunks   bool       // Envoy hands over the response's body, too
	watching bool       // the first token is expected in the response's body
	events   firstEvent // the state of that search between two chunks
}
