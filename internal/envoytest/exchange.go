// SPDX-License-Identifier: Apache-2.0

package envoytest

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// messageTimeout is how long Envoy waits for an answer in kvroute's configuration.
const messageTimeout = 2 * time.Second

// maxMessageTimeout is the longest timeout that an external processor may request instead.
const maxMessageTimeout = time.Minute

// allowed are the headers that an external processor may set in kvroute's configuration; Envoy
// drops others.
var allowed = regexp.MustCompile("^(x-(data-parallel-|decode|dp-|dynamo-|encode|gateway-|kv-|llm-d-|prefill|smg-|worker-).*|content-(type|length)|retry-after|allow)$")

// Request is an HTTP request that arrives at Envoy.
type Request struct {
	Method string   // default POST
	Path   string   // with the query
	Header []string // name, value, name, value
	Body   []byte   // nil for a request that ends with its headers
	// Metadata of the stream: name, value, name, value.
	Metadata []string

	// Unsized leaves out the content-length that a request with a buffered body has otherwise.
	Unsized bool

	// Trailers ends the request with trailers instead of its body.
	Trailers bool

	// Mode is the filter's mode for the request's body. NONE, the zero value, means BUFFERED.
	Mode filterv3.ProcessingMode_BodySendMode
	// Ahead sends the chunks of STREAMED before the headers are answered.
	Ahead bool
	// Chunk is the size of a chunk in modes with chunks; 0 means one chunk.
	Chunk int
	// NoBodyMode selects the mode NONE, which the zero value of Mode does not.
	NoBodyMode bool
}

// Refusal is a response of the external processor in place of the worker's.
type Refusal struct {
	Status int
	Header map[string]string
	Body   string
}

// Exchange is one HTTP request and its response, as sent by Envoy's main filter. The test fails if
// the external processor breaks the protocol: an answer of the wrong kind, a second or an
// unsolicited answer, a mutation that kvroute's configuration forbids, or an end with an error.
type Exchange struct {
	Header   map[string]string        // the request's current headers
	Body     []byte                   // replaces the request's body, or nil
	Rerouted bool                     // the route was chosen again
	Refusal  *Refusal                 // or nil
	Left     bool                     // Envoy continues without the external processor
	Patience time.Duration            // the last requested message timeout
	Mode     *filterv3.ProcessingMode // the requested mode

	// Upstream is the address that the response comes from, Details the reason that Envoy gives
	// for it; empty if Envoy does not report it.
	Upstream, Details string
	// Attempts is the number of Envoy's attempts; 0 if Envoy does not report it.
	Attempts int

	main    *stream
	link    *Link
	request Request
	whole   bool // in full duplex: the complete body has come back
}

// Do sends the request's half of an exchange.
func (l *Link) Do(r Request) *Exchange {
	l.t.Helper()
	x := l.Begin(r)
	x.SendHeaders()
	if x.main.duplex || r.Ahead {
		x.sendAll()
		return x
	}
	if !x.Settle() || r.Body == nil || r.NoBodyMode {
		return x
	}
	for _, m := range x.rest() {
		if x.Send(m); !x.Settle() {
			return x
		}
	}
	return x
}

// Begin opens the stream of an exchange and sends nothing.
func (l *Link) Begin(r Request) *Exchange {
	l.t.Helper()
	r.Method = cmp.Or(r.Method, "POST")
	if r.Mode == filterv3.ProcessingMode_NONE && !r.NoBodyMode {
		r.Mode = filterv3.ProcessingMode_BUFFERED
	}
	if r.Mode == filterv3.ProcessingMode_BUFFERED && r.Body != nil && !r.Trailers && !r.Unsized && !slices.Contains(r.Header, "content-length") {
		r.Header = append(slices.Clip(r.Header), "content-length", strconv.Itoa(len(r.Body)))
	}
	return &Exchange{
		link: l, request: r, Header: pairs(append([]string{":method", r.Method, ":path", r.Path}, r.Header...)),
		main: l.open(false, r.Mode == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, r.Metadata...),
	}
}

// SendHeaders sends the request's headers and does not wait.
func (x *Exchange) SendHeaders() {
	x.link.t.Helper()
	h := headers(x.Header)
	h.EndOfStream = x.request.Body == nil
	config := &extprocv3.ProtocolConfiguration{RequestBodyMode: x.request.Mode, SendBodyWithoutWaitingForHeaderResponse: x.request.Ahead}
	if x.main.duplex { // Envoy requires the same mode for the response
		config.ResponseBodyMode = x.request.Mode
	}
	x.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: h}, ProtocolConfig: config})
}

// SendBody sends the request's body and does not wait.
func (x *Exchange) SendBody() {
	x.link.t.Helper()
	x.Send(requestBody(x.request.Body, !x.request.Trailers))
}

// rest returns the messages that follow the request's headers.
func (x *Exchange) rest() (messages []*extprocv3.ProcessingRequest) {
	r := &x.request
	if r.Body != nil {
		parts := [][]byte{r.Body}
		if inChunks := r.Mode == filterv3.ProcessingMode_STREAMED || x.main.duplex; inChunks && r.Chunk > 0 && len(r.Body) > 0 {
			parts = slices.Collect(slices.Chunk(r.Body, r.Chunk))
		}
		for i, part := range parts {
			messages = append(messages, requestBody(part, i == len(parts)-1 && !r.Trailers))
		}
	}
	if r.Trailers {
		messages = append(messages, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}})
	}
	return messages
}

func requestBody(part []byte, last bool) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: part, EndOfStream: last}}}
}

// sendAll sends the rest of the request, and then waits for the answers. In full duplex it joins
// the parts of the body that come back.
func (x *Exchange) sendAll() {
	due := 1
	for _, m := range x.rest() {
		if x.main.duplex && m.GetRequestBody() != nil {
			x.Stray(m)
			continue
		}
		x.Send(m)
		due++
	}
	for range due {
		if !x.Settle() {
			return
		}
		if x.main.duplex && x.request.Body != nil && !x.whole {
			x.gather()
		}
	}
}

// gather waits for the parts of a body that come back.
func (x *Exchange) gather() {
	x.link.t.Helper()
	for !x.whole && !(x.request.Trailers && len(x.Body) >= len(x.request.Body)) {
		if !x.Settle() {
			x.link.t.Errorf("envoytest: %d bytes of the body came back, and then no more", len(x.Body))
			return
		}
	}
	x.whole = true
}

// Send sends any message that requires one answer.
func (x *Exchange) Send(m *extprocv3.ProcessingRequest) {
	x.link.t.Helper()
	x.main.send(m, kind(m.Request))
}

// Stray sends a message that requires no answer.
func (x *Exchange) Stray(m *extprocv3.ProcessingRequest) { x.main.send(m, "") }

// Settle waits for the answer to the last message and applies it. It returns false if the
// request phase is over for the external processor: it refused, or ended the stream, or took
// longer than Envoy waits.
func (x *Exchange) Settle() bool {
	x.link.t.Helper()
	timeout := time.NewTimer(messageTimeout)
	defer timeout.Stop()
	asked := false
	for waiting := true; waiting; {
		select {
		case a := <-x.main.answers:
			return x.apply(a)
		case d := <-x.main.patient:
			// Envoy applies the first timeout for a message, if it is at most the configured
			// limit.
			if d < time.Millisecond || d > maxMessageTimeout {
				x.link.t.Errorf("envoytest: a message timeout of %v is asked for", d)
			}
			if !asked {
				asked, x.Patience = true, d
				timeout.Reset(d)
			}
		case <-x.main.ended:
			waiting = false
		case <-timeout.C:
			x.main.reset()
			waiting = false
		}
	}
	select {
	case a := <-x.main.answers: // the last answer before the end
		return x.apply(a)
	default:
		x.Left = true
		return false
	}
}

// Ignored returns how many requests for a longer message timeout came while no message waited for an answer.
func (x *Exchange) Ignored() int { return int(x.main.ignored.Load()) }

// Respond sends the response's headers and returns those that the client sees.
func (x *Exchange) Respond(status int, header ...string) map[string]string {
	x.link.t.Helper()
	h := pairs(append([]string{":status", strconv.Itoa(status)}, header...))
	if x.Left {
		return h
	}
	m := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers(h)}}
	if x.Upstream != "" || x.Details != "" {
		fields := map[string]*structpb.Value{}
		if x.Attempts > 0 {
			fields["upstream.request_attempt_count"] = structpb.NewNumberValue(float64(x.Attempts))
		}
		for name, v := range map[string]string{"upstream.address": x.Upstream, "response.code_details": x.Details} {
			if v != "" {
				fields[name] = structpb.NewStringValue(v)
			}
		}
		m.Attributes = map[string]*structpb.Struct{"envoy.filters.http.ext_proc": {Fields: fields}}
	}
	x.Send(m)
	request := x.Header
	x.Header = h
	x.Settle()
	x.Header = request
	return h
}

// Answer sends chunks of the response's body in full duplex and returns the parts that come back.
func (x *Exchange) Answer(chunks ...string) (back string) {
	x.link.t.Helper()
	for i, c := range chunks {
		last := i == len(chunks)-1
		x.Stray(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
			ResponseBody: &extprocv3.HttpBody{Body: []byte(c), EndOfStream: last},
		}})
		for ended := false; len(back) < len(strings.Join(chunks[:i+1], "")) || last && !ended; {
			select {
			case a := <-x.main.answers:
				part := streamed(a)
				if part == nil || a.GetResponseBody() == nil {
					x.link.t.Fatalf("envoytest: the answer to a chunk of a response is %v", a)
				}
				back, ended = back+string(part.GetBody()), part.GetEndOfStream()
			case <-time.After(messageTimeout):
				x.link.t.Fatalf("envoytest: %q came back of a response, and then no more", back)
			}
		}
	}
	return back
}

// Observe opens the observing stream, as Envoy does at the response's headers.
func (x *Exchange) Observe() *Observer {
	x.link.t.Helper()
	return x.link.Observe(cmp.Or(x.Header["x-dynamo-request-id"], "-"))
}

// RespondTrailers sends the response's trailers, as of an HTTP/2 worker.
func (x *Exchange) RespondTrailers() {
	x.link.t.Helper()
	x.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}})
	x.Settle()
}

// End ends the exchange as Envoy does with graceful close: it half-closes the stream and waits for
// the other side to end it.
func (x *Exchange) End() {
	x.link.t.Helper()
	x.main.closeSend()
	select {
	case <-x.main.ended:
	case <-time.After(messageTimeout):
		x.link.t.Errorf("envoytest: the stream was not ended after its half-close")
		x.main.reset()
	}
}

// Reset ends the exchange as Envoy does by default: it half-closes the stream and does not wait.
func (x *Exchange) Reset() {
	x.main.closeSend()
	x.main.reset()
}

// Ended reports whether the stream has ended.
func (x *Exchange) Ended() bool { return x.main.over() }

// apply applies an answer.
func (x *Exchange) apply(a *extprocv3.ProcessingResponse) bool {
	x.link.t.Helper()
	x.Mode = cmp.Or(a.GetModeOverride(), x.Mode)
	if a.GetDynamicMetadata() != nil || a.GetOverrideMessageTimeout() != nil {
		x.link.t.Errorf("envoytest: the answer has more than our configuration allows: %v", a)
	}
	if r := a.GetImmediateResponse(); r != nil {
		x.Refusal = &Refusal{Status: int(r.GetStatus().GetCode()), Header: map[string]string{}, Body: string(r.GetBody())}
		x.mutate(x.Refusal.Header, r.GetHeaders())
		x.End()
		return false
	}
	x.mutate(x.Header, a.GetRequestTrailers().GetHeaderMutation())
	if c := cmp.Or(a.GetRequestHeaders().GetResponse(), a.GetRequestBody().GetResponse(), a.GetResponseHeaders().GetResponse()); c != nil {
		x.common(c)
	}
	return true
}

func (x *Exchange) common(c *extprocv3.CommonResponse) {
	x.link.t.Helper()
	if c.GetStatus() != extprocv3.CommonResponse_CONTINUE || c.GetTrailers() != nil {
		x.link.t.Errorf("envoytest: the answer changes more than headers and body: %v", c)
	}
	if part := c.GetBodyMutation().GetStreamedResponse(); part != nil {
		if !x.main.duplex || x.whole || len(part.GetBody()) > 64<<10 {
			x.link.t.Errorf("envoytest: a part of %d bytes of a body that is not to come back", len(part.GetBody()))
		}
		x.Body = append(x.Body, part.GetBody()...)
		x.whole = x.whole || part.GetEndOfStream()
		return
	}
	if b := c.GetBodyMutation(); b != nil && !(x.request.Ahead && b.GetClearBody()) { // the last part becomes the whole body
		if x.Body != nil || len(b.GetBody()) == 0 {
			x.link.t.Errorf("envoytest: the body is changed a second time, or taken away")
		}
		x.Body = b.GetBody()
	}
	x.Rerouted = x.Rerouted || c.GetClearRouteCache()
	x.mutate(x.Header, c.GetHeaderMutation())
	if length, ok := x.Header["content-length"]; ok && x.Body != nil && length != strconv.Itoa(len(x.Body)) {
		x.link.t.Errorf("envoytest: content-length is %s and the body has %d bytes: Envoy answers 500", length, len(x.Body))
	}
}

func (x *Exchange) mutate(h map[string]string, m *extprocv3.HeaderMutation) {
	x.link.t.Helper()
	for _, name := range m.GetRemoveHeaders() {
		if !allowed.MatchString(name) {
			x.link.t.Errorf("envoytest: the removal of header %q is not allowed by mutation_rules", name)
		}
		delete(h, name)
	}
	for _, v := range m.GetSetHeaders() {
		name := v.GetHeader().GetKey()
		switch {
		case !allowed.MatchString(name):
			x.link.t.Errorf("envoytest: header %q is not allowed by mutation_rules", name)
		case v.GetHeader().GetValue() != "":
			x.link.t.Errorf("envoytest: header %q has a value, want raw_value", name)
		case v.GetAppendAction() != corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD:
			x.link.t.Errorf("envoytest: header %q is appended, want it overwritten", name)
		}
		h[name] = string(v.GetHeader().GetRawValue())
	}
}
