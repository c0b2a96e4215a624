// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// Headers that say how a request is to be routed. They are removed from requests,
// and heeded where the listener is trusted.
const (
	headerPin            = "x-dynamo-worker-instance-id"
	headerRank           = "x-dynamo-dp-rank"
	headerPriority       = "x-dynamo-request-priority"
	headerStrictPriority = "x-dynamo-request-strict-priority"
	headerTTFT           = "x-dynamo-slo-ttft-ms"
	headerOverride       = "x-dynamo-router-override"
)

// Other names of two of these. Our configuration of Envoy does not let us remove
// them, so the worker sees them.
const (
	aliasPin  = "x-worker-instance-id"
	aliasRank = "x-dp-rank"
)

const headerSessionFinal = "x-dynamo-session-final"

// Where Envoy's filters before us may list the endpoints that a request may go to.
const (
	subsetNamespace = "envoy.lb.subset_hint"
	subsetKey       = destinationKey + "-subset"
)

// steering is what the headers of a request say of its routing, as text.
type steering struct {
	pin, rank, priority, strict, ttft, override string

	session string
	place   int // of session in Config.SessionHeaders, from 1; 0 = none yet
	final   bool

	allowed []netip.AddrPort // nil: all
	test    bool             // of conformance
}

// hear takes note of a header. ours says that it is to be removed.
func (s *stream) hear(name, value string) (ours bool) {
	t := &s.steering
	switch name {
	case headerPin:
		t.pin, ours = value, true
	case headerRank:
		t.rank, ours = value, true
	case headerPriority:
		t.priority, ours = value, true
	case headerStrictPriority:
		t.strict, ours = value, true
	case headerTTFT:
		t.ttft, ours = value, true
	case headerOverride:
		t.override, ours = value, true
	case destinationKey, servedKey, subsetKey, "x-gateway-inference-objective", "x-gateway-inference-fairness-id", "x-gateway-model-name-rewrite":
		ours = true
	case headerTestSelection:
		if s.server.conf.EndpointPicker && s.server.conf.AllowDirect {
			t.allowed, t.test = endpointList(strings.Split(value, ",")), true
		}
	case aliasPin:
		if t.pin == "" {
			t.pin = value
		}
	case aliasRank:
		if t.rank == "" {
			t.rank = value
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
	return ours
}

// steer fills in what headers and body say of the request's routing, as far as the
// listener is trusted.
func (s *stream) steer(req *router.Request, body *openai.Body) *openai.Error {
	t := &s.steering
	req.Session, req.SessionFinal = t.session, t.final
	req.AllowedAddresses = t.allowed
	if s.server.conf.AllowDirect && t.rank != "" && t.pin == "" {
		return badHeader(headerRank, t.rank, "a worker beside it, in "+headerPin)
	}
	if s.server.conf.AllowDirect && t.pin != "" {
		id, err := strconv.ParseUint(t.pin, 10, 64)
		if err != nil {
			return badHeader(headerPin, t.pin, "a number")
		}
		rank, err := strconv.ParseUint(t.rank, 10, 32)
		if err != nil && t.rank != "" {
			return badHeader(headerRank, t.rank, "a number")
		}
		req.Pinned, req.AnyRank = &router.Worker{ID: id, DPRank: uint32(rank)}, t.rank == ""
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
