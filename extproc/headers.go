// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"cmp"
	"context"
	"hash/maphash"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/metadata"

	"github.com/kvroute/kvroute/internal/openai"
)

// head is what Envoy's first message says: how Envoy sends bodies, and the request's headers.
type head struct {
	mode         bodyMode
	partial      bool // Envoy may truncate the request's body
	echo         bool // kvroute must send the chunks of the response back
	responseBody bool // Envoy sends the response's body, too

	// rankPerAttempt says that Envoy names the rank to each worker that it tries.
	rankPerAttempt bool
	// hostPerAttempt says that Envoy sends each worker that it tries its own Host header.
	hostPerAttempt bool
	// mayInfer says that Envoy opens no observer stream for a request that kvroute marks.
	mayInfer bool

	endpoint   openai.Endpoint
	wrong      *openai.Error // the refusal of headersAnswered
	held       string        // id in the path of what a worker keeps; "" without one
	models     []byte        // the answer to headersAnswered, if it is not a refusal
	tenant     string
	sized      bool   // there is a content-length
	length     int64  // its value
	compressed bool   // the body has a content-encoding
	charset    bool   // the content type names a charset that kvroute does not know
	requestID  string // that engines see
	clientID   string // that the client gave; "" if it gave none, or one with other characters than an id has
	client     string // the client's address, as Envoy reports it; "" = unknown
	promptHash uint64 // hash of the beginning of the prompt; 0 = unknown

	// The W3C trace context of the client.
	traceParents, traceStates []string

	session      string
	sessionPlace int // of session in Config.SessionHeaders, from 1; 0 = none yet
	sessionFinal bool

	steering     map[string]string // the headers that steer; nil without any
	stripHeaders []string          // the names of these: only kvroute may set them
	allowed      []netip.AddrPort  // endpoints that may be chosen; nil: all
	conformance  bool              // a conformance test, which gets headers of its own
}

// classify returns the kind of a message, and reads the request headers.
func (s *stream) classify(req *extprocv3.ProcessingRequest) message {
	switch r := req.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		if earlier := req.GetMetadataContext(); earlier != nil {
			s.allowed = subset(earlier)
		}
		s.ended = r.RequestHeaders.GetEndOfStream()
		m := s.readHeaders(&s.conf, r.RequestHeaders)
		ctx := s.grpc.Context()
		s.arrival.TraceParent, s.arrival.TraceState = s.traceContext(ctx)
		s.rankPerAttempt = metadata.ValueFromIncomingContext(ctx, metaRanks) != nil
		s.hostPerAttempt = metadata.ValueFromIncomingContext(ctx, metaHosts) != nil
		s.mayInfer = metadata.ValueFromIncomingContext(ctx, metaInfers) != nil
		return m
	case *extprocv3.ProcessingRequest_RequestBody:
		if s.ended {
			return requestAgain
		}
		if s.ended = r.RequestBody.GetEndOfStream() || s.mode == buffered; !s.ended {
			return requestChunk
		}
		return requestBody
	case *extprocv3.ProcessingRequest_RequestTrailers:
		s.ended = true
		return requestTrailers
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		return responseHeaders
	case *extprocv3.ProcessingRequest_ResponseBody:
		return responseBody
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		return responseTrailers
	}
	return unknown
}

// readModes reads how Envoy is configured to send bodies. An old Envoy sends no configuration in
// the first message; kvroute then assumes BUFFERED, the mode of its own Envoy configuration.
func (h *head) readModes(c *extprocv3.ProtocolConfiguration) {
	h.echo = c.GetResponseBodyMode() == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
	h.responseBody = h.echo || c.GetResponseBodyMode() == filterv3.ProcessingMode_STREAMED
	switch c.GetRequestBodyMode() {
	case filterv3.ProcessingMode_BUFFERED_PARTIAL:
		h.partial = true
	case filterv3.ProcessingMode_NONE:
		if c != nil {
			h.mode = streamed
		}
	case filterv3.ProcessingMode_STREAMED:
		if h.mode = streamed; c.GetSendBodyWithoutWaitingForHeaderResponse() {
			h.mode = streamedAhead
		}
	case filterv3.ProcessingMode_FULL_DUPLEX_STREAMED:
		h.mode = fullDuplex
	case filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_GRPC:
	}
}

// readHeaders reads the request's headers and returns their kind.
func (h *head) readHeaders(conf *Config, from *extprocv3.HttpHeaders) message {
	var method, path string
	var tenants int
	var twoTenants bool
	for _, v := range from.GetHeaders().GetHeaders() {
		switch v.GetKey() {
		case ":method":
			method = value(v)
		case ":path":
			path = value(v)
		case "content-length":
			h.length, _ = strconv.ParseInt(value(v), 10, 64) // Envoy has checked it
			h.sized = true
		case "content-encoding":
			h.compressed = h.compressed || value(v) != "" && !strings.EqualFold(value(v), "identity")
		case "content-type":
			h.charset = h.charset || openai.UnknownCharset(value(v))
		case "x-tenant-id":
			for tenant := range strings.SplitSeq(value(v), ",") { // a proxy may join two headers
				tenant = strings.TrimSpace(tenant)
				tenants++
				twoTenants = twoTenants || tenants > 1 && h.tenant != tenant
				h.tenant = tenant
			}
		case "traceparent":
			h.traceParents = append(h.traceParents, value(v))
		case "tracestate":
			h.traceStates = append(h.traceStates, value(v))
		case "x-request-id":
			h.requestID = value(v)
			h.clientID = cmp.Or(h.clientID, checkedID(h.requestID))
		case openai.ClientRequestID:
			h.clientID = cmp.Or(checkedID(value(v)), h.clientID)
		case "x-forwarded-for":
			h.client = clientOf(value(v))
		default:
			h.readHint(conf, v)
		}
	}
	h.endpoint, h.wrong = openai.Classify(method, path)
	if twoTenants {
		h.wrong = badHeader("x-tenant-id", h.tenant, "one tenant: the request names two")
	}
	if h.endpoint == openai.Other {
		h.held = openai.HeldID(path)
	}
	switch {
	case h.wrong != nil || h.endpoint == openai.Other && h.asksForModels(conf, method, path):
		return headersAnswered
	case h.endpoint == openai.Other && from.GetEndOfStream():
		return headersOtherEnd
	case h.endpoint == openai.Other:
		return headersOther
	case h.length > int64(conf.MaxBodyBytes):
		// Refused before the body: neither Envoy nor kvroute needs to hold it.
		h.wrong = tooLarge(conf.MaxBodyBytes)
		return headersAnswered
	case from.GetEndOfStream():
		return headersBodyless
	}
	return headersOurs
}

// largeBody is the size in bytes from which a body may need longer than Envoy's message_timeout to arrive and to be
// read, beside other ones.
const largeBody = 64 << 10

func (h *head) large() bool { return !h.sized || h.length >= largeBody }

// unreadable reports whether the body has an encoding that kvroute does not read.
func (h *head) unreadable() bool { return h.compressed || h.charset }

// asksForModels reports whether the request asks for the list of models or for one model, and sets the answer: an
// engine would list its own models only. Until the fleet is known, without models, and if the gateway asks for an
// endpoint for every request, a worker answers.
func (h *head) asksForModels(conf *Config, method, path string) bool {
	name, asks := openai.ModelsPath(method, path)
	if !asks || conf.Models == nil || conf.EndpointPicker || conf.Started != nil && !conf.Started() {
		return false
	}
	models := conf.Models()
	switch {
	case len(models) == 0:
		return false
	case name == "":
		h.models = openai.ModelList(models)
	default:
		h.models, h.wrong = openai.OneModel(models, name)
	}
	return true
}

// checkedID returns the beginning of a request's id if it has only characters that ids usually have, else "".
// A dash means that the client gave none.
func checkedID(id string) string {
	if id = clip(id); id == "-" {
		return ""
	}
	for i := range len(id) {
		if c := id[i]; (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && c != '-' && c != '_' && c != '.' {
			return ""
		}
	}
	return id
}

// clientOf returns the last address in X-Forwarded-For, which Envoy has written.
func clientOf(forwarded string) string {
	return strings.TrimSpace(forwarded[strings.LastIndexByte(forwarded, ',')+1:])
}

// prefixBytes is the length of the beginning of a prompt that tells prompts apart.
const prefixBytes = 256

// prefixOf returns the hash of the beginning of a request's prompt.
func (s *Server) prefixOf(fields *openai.Body, body []byte) uint64 {
	for _, text := range [][]byte{fields.Messages, fields.Request.Prompt, body} {
		if len(text) > 0 {
			return maphash.Bytes(s.seed, text[:min(len(text), prefixBytes)])
		}
	}
	return 0
}

// clientHash returns the hash of the client's address; 0 = unknown.
func (s *stream) clientHash() uint64 {
	if s.client == "" {
		return 0
	}
	return maphash.String(s.seed, s.client)
}

const headerSessionFinal = "x-dynamo-session-final"

// readHint reads one header if it is a hint for routing.
func (h *head) readHint(conf *Config, from *corev3.HeaderValue) {
	switch name := from.GetKey(); {
	case openai.SteeringHeader(name, conf.SessionHeaders):
		if h.steering == nil {
			h.steering = make(map[string]string)
		}
		if _, again := h.steering[name]; !again {
			h.stripHeaders = append(h.stripHeaders, name)
		}
		h.steering[name] = value(from)
	case name == headerTestSelection:
		if conf.EndpointPicker && conf.AllowDirect {
			h.allowed, h.conformance = endpointList(strings.Split(value(from), ",")), true
		}
	case name == headerSessionFinal:
		h.sessionFinal = value(from) == "true"
	default:
		at := slices.Index(conf.SessionHeaders, name) + 1
		if at > 0 && (h.sessionPlace == 0 || at < h.sessionPlace) {
			h.session, h.sessionPlace = value(from), at
		}
	}
}

// hint returns the value of the first of these steering headers that has one.
func (h *head) hint(names ...string) string {
	for _, name := range names {
		if value := h.steering[name]; value != "" {
			return value
		}
	}
	return ""
}

// maxTraceState bounds a tracestate, in bytes: the least that the standard demands. A longer one is ignored.
const maxTraceState = 512

// traceContext returns the request's W3C trace context. If Envoy traces the request, its tracer sends
// the context of Envoy's own span with the stream. Otherwise the request may have its client's.
func (h *head) traceContext(ctx context.Context) (parent, state string) {
	parents, states := h.traceParents, h.traceStates
	if traced := metadata.ValueFromIncomingContext(ctx, "traceparent"); traced != nil {
		parents, states = traced, metadata.ValueFromIncomingContext(ctx, "tracestate")
	}
	// Repeated headers are joined, as in HTTP: two parents make an invalid one, which names no span.
	if parent, state = strings.Join(parents, ","), strings.Join(states, ","); len(state) > maxTraceState {
		state = ""
	}
	return clip(parent), state
}

// clip bounds a text of the client, and the memory that it keeps.
func clip(s string) string {
	const most = 128
	if len(s) <= most {
		return s
	}
	return strings.Clone(s[:most])
}

// value returns a header's value, which Envoy sends in one field or the other
// depending on its version.
func value(v *corev3.HeaderValue) string {
	if raw := v.GetRawValue(); len(raw) > 0 {
		return string(raw)
	}
	return v.GetValue()
}

// changeable reports whether kvroute can change the body, whose last message is m.
func (h *head) changeable(m message, truncated bool) bool {
	return m == requestBody && h.mode != streamedAhead && !truncated && !h.unreadable()
}
