// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// Headers that say how a request is to be routed. They are removed from requests, as all
// of [openai.Steering] are, and obeyed where the listener is trusted.
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
	// headerGroup is the router group that a router above sends a request to. A worker
	// that is named beside it is one of that group, and only preferred: the answer to a
	// probe is a little old.
	headerGroup = "x-dynamo-router-group"
)

// Other names of the pins, which count where those above are missing.
const (
	aliasPin         = "x-worker-instance-id"
	aliasRank        = "x-dp-rank"
	aliasPrefillPin  = "x-prefill-instance-id"
	aliasPrefillRank = "x-prefill-dp-rank"
)

// headerVLLMRank tells a worker's rank to vLLM.
const headerVLLMRank = "x-data-parallel-rank"

// What a gateway says of a request, under two names each: with this prefix or that of
// llm-d.
const (
	prefixGateway = "x-gateway-"
	prefixLLMD    = "x-llm-d-"
	nameObjective = "inference-objective"
	nameFairness  = "inference-fairness-id"
)

const headerSessionFinal = "x-dynamo-session-final"

// Where Envoy's filters before us may list the endpoints that a request may go to.
const (
	subsetNamespace = "envoy.lb.subset_hint"
	subsetKey       = destinationKey + "-subset"
)

// steering is what the headers of a request say of its routing, as text.
type steering struct {
	pin, rank, prefillPin, prefillRank, mode string
	priority, strict, ttft, override         string

	group   string
	session string
	place   int // of session in Config.SessionHeaders, from 1; 0 = none yet
	final   bool

	allowed []netip.AddrPort // nil: all
	test    bool             // of conformance

	// What is kept beside the decision.
	id, class, objective, fairness string
}

// hear takes note of a header. ours says that it is to be removed.
func (s *stream) hear(name, value string) (ours bool) {
	if !slices.Contains(openai.Steering, name) {
		s.overhear(name, value)
		return false
	}
	t := &s.steering
	alias := func(to *string) {
		if *to == "" {
			*to = value
		}
	}
	switch name {
	case headerPin:
		t.pin = value
	case headerRank:
		t.rank = value
	case headerPrefillPin:
		t.prefillPin = value
	case headerPrefillRank:
		t.prefillRank = value
	case aliasPin:
		alias(&t.pin)
	case aliasRank:
		alias(&t.rank)
	case aliasPrefillPin:
		alias(&t.prefillPin)
	case aliasPrefillRank:
		alias(&t.prefillRank)
	case headerRoutingMode:
		t.mode = value
	case headerPriority:
		t.priority = value
	case headerStrictPriority:
		t.strict = value
	case headerTTFT:
		t.ttft = value
	case headerOverride:
		t.override = value
	case headerGroup:
		t.group = value
	case headerClass:
		t.class = value
	case prefixGateway + nameObjective:
		t.objective = value
	case prefixLLMD + nameObjective:
		alias(&t.objective)
	case prefixGateway + nameFairness:
		t.fairness = value
	case prefixLLMD + nameFairness:
		alias(&t.fairness)
	}
	return true
}

// overhear takes note of a header that goes on to the worker.
func (s *stream) overhear(name, value string) {
	t := &s.steering
	switch name {
	case "x-request-id":
		t.id = value
	case headerTestSelection:
		if s.server.conf.EndpointPicker && s.server.conf.AllowDirect {
			t.allowed, t.test = endpointList(strings.Split(value, ",")), true
		}
	case headerSessionFinal:
		t.final = value == "true"
	default:
		for i, h := range s.server.conf.SessionHeaders {
			if name == h && (t.place == 0 || i+1 < t.place) {
				t.session, t.place = value, i+1
			}
		}
	}
}

// steer fills in what headers and body say of the request's routing, as far as the
// listener is trusted.
func (s *stream) steer(req *router.Request, body *openai.Body) *openai.Error {
	t := &s.steering
	req.Session, req.SessionFinal = t.session, t.final
	req.AllowedAddresses = t.allowed
	req.Labels = t.labels()
	if headers, inBody := s.direct(); headers {
		if bad := t.pinned(req, body, inBody); bad != nil {
			return bad
		}
	}
	if !s.server.conf.TrustOverrides {
		return nil
	}
	h, bad := openai.ParseHints(body.NVExt)
	if bad != nil {
		return bad
	}
	req.Priority, req.StrictPriority, req.ExpectedOutput = h.Priority, h.StrictPriority, h.ExpectedOutput
	req.RequiredTaints, req.PreferredTaints, req.TTFTTarget = h.RequiredTaints, h.PreferredTaints, h.TTFTTarget
	req.Labels.ITLTarget = h.ITLTarget
	if t.priority != "" {
		v, err := strconv.ParseInt(t.priority, 10, 32)
		if err != nil {
			return badHeader(headerPriority, t.priority, "a number")
		}
		req.Priority = float64(v)
	}
	if t.strict != "" {
		v, err := strconv.ParseUint(t.strict, 10, 31)
		if err != nil {
			return badHeader(headerStrictPriority, t.strict, "a number, 0 or more")
		}
		req.StrictPriority = int(v)
	}
	if t.ttft != "" {
		ms, err := strconv.ParseFloat(t.ttft, 64)
		if err != nil || !(ms > 0 && ms < math.MaxInt32) {
			return badHeader(headerTTFT, t.ttft, "milliseconds, more than 0")
		}
		req.TTFTTarget = time.Duration(ms * float64(time.Millisecond))
	}
	if t.override != "" {
		var err error
		if req.Override, err = parseOverride(t.override); err != nil {
			return badHeader(headerOverride, t.override, "a JSON object with known fields: "+err.Error())
		}
	}
	return nil
}

func parseOverride(text string) (*router.Override, error) {
	dec := json.NewDecoder(strings.NewReader(text))
	dec.DisallowUnknownFields()
	o := new(router.Override)
	if err := dec.Decode(o); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows its end")
	}
	return o, nil
}

// labels are what is kept of a request for people.
func (t *steering) labels() router.Labels {
	return router.Labels{RequestID: clip(t.id), Class: clip(cmp.Or(t.class, t.objective)), Fairness: clip(t.fairness)}
}

// clip bounds what is kept of a client's text, in memory, too.
func clip(s string) string {
	const most = 128
	if len(s) <= most {
		return s
	}
	return strings.Clone(s[:most])
}

// direct says whether a request may name its worker in headers, and whether it may in its
// body, or ask there which one it would get. A router above speaks in headers: the body is
// as a client of that one sent it, and was for that one to heed. Beside another group's
// name, as a second choice has it, stands a worker of that group.
func (s *stream) direct() (headers, body bool) {
	c, group := &s.server.conf, s.steering.group
	return c.AllowDirect && (group == "" || group == c.Group), c.AllowDirect && group == ""
}

// pinned fills in the worker that headers name, or else the body does, if it may. From a
// router above it is a preference.
func (t *steering) pinned(req *router.Request, body *openai.Body, heed bool) (bad *openai.Error) {
	var pins openai.Pins
	if heed {
		if pins, bad = openai.ParsePins(body.NVExt); bad != nil {
			return bad
		}
	}
	number := func(header, text string, bits int, from *uint64) (*uint64, *openai.Error) {
		if text == "" {
			return from, nil
		}
		n, err := strconv.ParseUint(text, 10, bits)
		if err != nil {
			return nil, badHeader(header, text, "a number")
		}
		return &n, nil
	}
	var id, rank, prefill, prefillRank *uint64
	for _, c := range []struct {
		header, text string
		bits         int
		from         *uint64
		to           **uint64
	}{
		{headerPin, t.pin, 64, pins.Worker, &id},
		{headerRank, t.rank, 32, pins.Rank, &rank},
		{headerPrefillPin, t.prefillPin, 64, pins.Prefill, &prefill},
		{headerPrefillRank, t.prefillRank, 32, pins.PrefillRank, &prefillRank},
	} {
		if *c.to, bad = number(c.header, c.text, c.bits, c.from); bad != nil {
			return bad
		}
	}
	if t.mode != "" && t.mode != "aggregated" {
		return badHeader(headerRoutingMode, t.mode, "aggregated: prefill and decode are not split")
	}
	// One worker does both, so it may be named twice.
	if prefill != nil && (id == nil || *prefill != *id) || prefillRank != nil && (rank == nil || *prefillRank != *rank) {
		return &openai.Error{
			Status: http.StatusBadRequest, Type: openai.InvalidRequest, Param: headerPrefillPin, Code: "no_prefill_worker",
			Message: "the request names a worker for prefill other than the one for decode: prefill and decode are not split",
		}
	}
	switch {
	case id == nil && rank != nil:
		return badHeader(headerRank, strconv.FormatUint(*rank, 10), "a worker beside it, in "+headerPin)
	case id == nil:
		return nil
	}
	req.Pinned, req.AnyRank = &router.Worker{ID: *id}, rank == nil
	if rank != nil {
		req.Pinned.DPRank = uint32(*rank)
	}
	if t.group != "" {
		req.Preferred, req.Pinned, req.AnyRank = req.Pinned, nil, false
	}
	return nil
}

func badHeader(name, value, want string) *openai.Error {
	return &openai.Error{
		Status:  http.StatusBadRequest,
		Message: fmt.Sprintf("header %s is %q, want %s", name, value[:min(len(value), 128)], want),
		Type:    openai.InvalidRequest, Param: name, Code: "bad_header",
	}
}

// subset reads which endpoints a filter before us allows: a list, or text with
// commas, of ip or ip:port. It returns nil if none says so. What is no address
// allows nothing.
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
