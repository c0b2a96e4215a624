// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// Headers with hints for routing. They are removed from requests, as all of [openai.Steering]
// are, and applied where the listener is trusted.
const (
	headerPin            = "x-dynamo-worker-instance-id"
	headerRank           = "x-dynamo-dp-rank"
	headerPrefillPin     = "x-dynamo-prefill-instance-id"
	headerPrefillRank    = "x-dynamo-prefill-dp-rank"
	headerRoutingMode    = "x-dynamo-routing-mode"
	headerPriority       = "x-dynamo-request-priority"
	headerStrictPriority = "x-dynamo-request-strict-priority"
	headerTTFT           = "x-dynamo-slo-ttft-ms"
	headerOverride       = "x-dynamo-router-override"
	headerClass          = "x-dynamo-meta-policy-class"
	// headerGroup is the router group to which an upper router sends a request. A worker
	// named beside it is a worker of that group, and only preferred: the upper router's
	// knowledge of the group is a little old.
	headerGroup = "x-dynamo-router-group"
)

// Aliases of the pins above, used if the header above is missing.
const (
	aliasPin         = "x-worker-instance-id"
	aliasRank        = "x-dp-rank"
	aliasPrefillPin  = "x-prefill-instance-id"
	aliasPrefillRank = "x-prefill-dp-rank"
)

// headerVLLMRank tells a worker's rank to vLLM.
const headerVLLMRank = "x-data-parallel-rank"

// Headers of gateways, with one of two prefixes.
const (
	prefixGateway = "x-gateway-"
	prefixLLMD    = "x-llm-d-"
	nameObjective = "inference-objective"
	nameFairness  = "inference-fairness-id"
)

const headerSessionFinal = "x-dynamo-session-final"

// The dynamic metadata in which an earlier filter of Envoy may list the allowed endpoints.
const (
	subsetNamespace = "envoy.lb.subset_hint"
	subsetKey       = destinationKey + "-subset"
)

// steering are the hints for routing in a request's headers, as text.
type steering struct {
	headers map[string]string // those of [openai.Steering]; nil without any

	session string
	place   int // of session in Config.SessionHeaders, from 1; 0 = none yet
	final   bool

	allowed []netip.AddrPort // endpoints that may be chosen; nil: all
	test    bool             // a conformance test, which gets headers of its own
	id      string           // the client's request id, kept beside the decision
}

// get returns the value of the first header that has one.
func (t *steering) get(names ...string) string {
	for _, name := range names {
		if value := t.headers[name]; value != "" {
			return value
		}
	}
	return ""
}

// noteHeader reads one header of the request.
func (s *stream) noteHeader(name, value string) {
	t := &s.steering
	switch {
	case slices.Contains(openai.Steering, name):
		if t.headers == nil {
			t.headers = make(map[string]string)
		}
		if _, again := t.headers[name]; !again {
			s.stripHeaders = append(s.stripHeaders, name)
		}
		t.headers[name] = value
	case name == "x-request-id":
		t.id = value
	case name == headerTestSelection:
		if s.server.conf.EndpointPicker && s.server.conf.AllowDirect {
			t.allowed, t.test = endpointList(strings.Split(value, ",")), true
		}
	case name == headerSessionFinal:
		t.final = value == "true"
	default:
		at := slices.Index(s.server.conf.SessionHeaders, name) + 1
		if at > 0 && (t.place == 0 || at < t.place) {
			t.session, t.place = value, at
		}
	}
}

// steer fills in the hints of headers and body, as far as the listener is trusted.
func (s *stream) steer(req *router.Request, nvext []byte) *openai.Error {
	t := &s.steering
	req.Session, req.SessionFinal = t.session, t.final
	req.AllowedAddresses = t.allowed
	req.Labels = t.labels()
	req.Labels.Operation = operation(s.endpoint)
	if headers, inBody := s.direct(); headers {
		if bad := t.pin(req, nvext, inBody); bad != nil {
			return bad
		}
	}
	if !s.server.conf.TrustOverrides {
		return nil
	}
	if bad := openai.ReadHints(nvext, req); bad != nil {
		return bad
	}
	if text := t.get(headerPriority); text != "" {
		v, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return badHeader(headerPriority, text, "a number")
		}
		req.Priority = float64(v)
	}
	if text := t.get(headerStrictPriority); text != "" {
		v, err := strconv.ParseUint(text, 10, 31)
		if err != nil {
			return badHeader(headerStrictPriority, text, "a number, 0 or more")
		}
		req.StrictPriority = int(v)
	}
	if text := t.get(headerTTFT); text != "" {
		ms, err := strconv.ParseFloat(text, 64)
		if err != nil || !(ms > 0 && ms < math.MaxInt32) {
			return badHeader(headerTTFT, text, "milliseconds, more than 0")
		}
		req.TTFTTarget = time.Duration(ms * float64(time.Millisecond))
	}
	if text := t.get(headerOverride); text != "" {
		req.Override = new(router.Override)
		if err := openai.Decode(strings.NewReader(text), req.Override); err != nil {
			return badHeader(headerOverride, text, "a JSON object with known fields: "+err.Error())
		}
	}
	return nil
}

// labels are texts that the decision keeps for its readers.
func (t *steering) labels() router.Labels {
	return router.Labels{
		RequestID: clip(t.id),
		Class:     clip(t.get(headerClass, prefixGateway+nameObjective, prefixLLMD+nameObjective)),
		Fairness:  clip(t.get(prefixGateway+nameFairness, prefixLLMD+nameFairness)),
	}
}

// clip bounds a text of the client, and the memory that it keeps.
func clip(s string) string {
	const most = 128
	if len(s) <= most {
		return s
	}
	return strings.Clone(s[:most])
}

// direct reports whether the request's headers may name its worker, and whether its body may do
// so or query the worker. An upper router uses headers; hints in the body were meant for the upper
// router. With another group's name, as in a second choice, the worker is one of that group.
func (s *stream) direct() (headers, body bool) {
	c, group := &s.server.conf, s.steering.get(headerGroup)
	return c.AllowDirect && (group == "" || group == c.Group), c.AllowDirect && group == ""
}

// pin fills in the worker that headers name, or else the body with inBody. For an upper router
// it is a preference.
func (t *steering) pin(req *router.Request, nvext []byte, inBody bool) (bad *openai.Error) {
	var pins openai.Pins
	if inBody {
		if pins, bad = openai.ParsePins(nvext); bad != nil {
			return bad
		}
	}
	var id, rank, prefill, prefillRank *uint64
	for _, c := range []struct {
		header, alias string
		bits          int
		inBody        *uint64
		to            **uint64
	}{
		{headerPin, aliasPin, 64, pins.Worker, &id},
		{headerRank, aliasRank, 32, pins.Rank, &rank},
		{headerPrefillPin, aliasPrefillPin, 64, pins.Prefill, &prefill},
		{headerPrefillRank, aliasPrefillRank, 32, pins.PrefillRank, &prefillRank},
	} {
		text := t.get(c.header, c.alias)
		if text == "" {
			*c.to = c.inBody
			continue
		}
		n, err := strconv.ParseUint(text, 10, c.bits)
		if err != nil {
			return badHeader(c.header, text, "a number")
		}
		*c.to = &n
	}
	switch mode := router.Split(t.get(headerRoutingMode)); mode {
	case router.SplitAuto:
	case router.SplitNever, router.SplitAlways:
		if req.Split == router.SplitAuto { // else kvroute cannot change the body
			req.Split = mode
		}
	default:
		return badHeader(headerRoutingMode, string(mode), "aggregated or disaggregated")
	}
	switch {
	case id == nil && rank != nil:
		return badHeader(headerRank, strconv.FormatUint(*rank, 10), "a worker beside it, in "+headerPin)
	case prefill == nil && prefillRank != nil:
		return badHeader(headerPrefillRank, strconv.FormatUint(*prefillRank, 10), "a worker beside it, in "+headerPrefillPin)
	case prefill != nil && id != nil && *prefill == *id:
		req.Split = router.SplitNever // one worker does both
	case prefill != nil:
		req.PrefillPinned, req.PrefillAnyRank = pinned(*prefill, prefillRank)
	}
	if id == nil {
		return nil
	}
	req.Pinned, req.AnyRank = pinned(*id, rank)
	if t.get(headerGroup) != "" {
		req.Preferred, req.Pinned, req.AnyRank = req.Pinned, nil, false
	}
	return nil
}

// pinned returns a worker, and whether any of its ranks will do.
func pinned(id uint64, rank *uint64) (w *router.Worker, anyRank bool) {
	if rank == nil {
		return &router.Worker{ID: id}, true
	}
	return &router.Worker{ID: id, DPRank: uint32(*rank)}, false
}

func badHeader(name, value, want string) *openai.Error {
	return &openai.Error{
		Status:  http.StatusBadRequest,
		Message: fmt.Sprintf("header %s is %q, want %s", name, value[:min(len(value), 128)], want),
		Type:    openai.InvalidRequest, Param: name, Code: "bad_header",
	}
}

// subset reads the endpoints that an earlier filter allows: a list, or text with commas, of ip or
// ip:port. It returns nil without such a list. An entry that is no address allows nothing.
func subset(req *extprocv3.ProcessingRequest) []netip.AddrPort {
	v := req.GetMetadataContext().GetFilterMetadata()[subsetNamespace].GetFields()[subsetKey]
	var items []string
	switch k := v.GetKind().(type) {
	case *structpb.Value_StringValue:
		items = strings.Split(k.StringValue, ",")
	case *structpb.Value_ListValue:
		for _, e := range k.ListValue.GetValues() {
			items = append(items, e.GetStringValue())
		}
	default:
		return nil
	}
	return endpointList(items)
}

// traceContext returns the request's W3C trace context. If Envoy traces the request, its tracer sends
// the context of Envoy's own span with the stream. Otherwise the request may have its client's.
func (s *stream) traceContext(h *extprocv3.HttpHeaders) (parent, state string) {
	ctx := s.grpc.Context()
	parents, states := metadata.ValueFromIncomingContext(ctx, "traceparent"), metadata.ValueFromIncomingContext(ctx, "tracestate")
	if parents == nil {
		states = nil
		for _, v := range h.GetHeaders().GetHeaders() {
			switch v.GetKey() {
			case "traceparent":
				parents = append(parents, value(v))
			case "tracestate":
				states = append(states, value(v))
			}
		}
	}
	// Repeated headers are joined, as in HTTP: two parents make an invalid one, which names no span.
	if parent, state = strings.Join(parents, ","), strings.Join(states, ","); len(state) > maxTraceState {
		state = ""
	}
	return clip(parent), state
}

// maxTraceState bounds a tracestate, in bytes: the least that the standard demands. A longer one is ignored.
const maxTraceState = 512

// operation returns the name of the request's operation in OpenTelemetry's conventions for GenAI; ""
// if the model computes nothing.
func operation(e openai.Endpoint) string {
	switch e {
	case openai.ChatCompletions, openai.Responses, openai.Messages:
		return "chat"
	case openai.Completions, openai.Generate, openai.Ids:
		return "text_completion"
	case openai.Load:
		return "embeddings"
	case openai.Text, openai.Other:
	}
	return ""
}
