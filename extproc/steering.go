// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// Headers with hints for routing. They are removed from requests, as all headers that steer are, and
// applied where the listener is trusted. All are in [openai.Hints].
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

// steer fills in the hints of headers and body, as far as the listener is trusted.
func (h *head) steer(conf *Config, req *router.Request, nvext []byte) *openai.Error {
	if headers, inBody := h.direct(conf); headers {
		if bad := h.pin(req, nvext, inBody); bad != nil {
			return bad
		}
	}
	if !conf.TrustOverrides {
		return nil
	}
	if bad := openai.ReadHints(nvext, req); bad != nil {
		return bad
	}
	if text := h.hint(headerPriority); text != "" {
		v, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return badHeader(headerPriority, text, "a number")
		}
		req.Priority = float64(v)
	}
	if text := h.hint(headerStrictPriority); text != "" {
		v, err := strconv.ParseUint(text, 10, 31)
		if err != nil {
			return badHeader(headerStrictPriority, text, "a number, 0 or more")
		}
		req.StrictPriority = int(v)
	}
	if text := h.hint(headerTTFT); text != "" {
		ms, err := strconv.ParseFloat(text, 64)
		if err != nil || !(ms > 0 && ms < math.MaxInt32) {
			return badHeader(headerTTFT, text, "milliseconds, more than 0")
		}
		req.TTFTTarget = time.Duration(ms * float64(time.Millisecond))
	}
	if text := h.hint(headerOverride); text != "" {
		req.Override = new(router.Override)
		if err := openai.Decode(strings.NewReader(text), req.Override); err != nil {
			return badHeader(headerOverride, text, "a JSON object with known fields: "+err.Error())
		}
	}
	return nil
}

// queries reports whether the body only queries the worker, and may.
func (h *head) queries(conf *Config, nvext []byte) bool {
	_, may := h.direct(conf)
	return may && openai.Queries(nvext)
}

// direct reports whether the request's headers may name its worker, and whether its body may do
// so or query the worker. An upper router uses headers; hints in the body were meant for the upper
// router. With another group's name, as in a second choice, the worker is one of that group.
func (h *head) direct(conf *Config) (headers, body bool) {
	group := h.hint(headerGroup)
	return conf.AllowDirect && (group == "" || group == conf.Group), conf.AllowDirect && group == ""
}

// pin fills in the worker that headers name, or else the body with inBody. For an upper router
// it is a preference.
func (h *head) pin(req *router.Request, nvext []byte, inBody bool) (bad *openai.Error) {
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
		text := h.hint(c.header, c.alias)
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
	switch mode := router.Split(h.hint(headerRoutingMode)); mode {
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
		return badHeader(headerRank, fmt.Sprint(*rank), "a worker beside it, in "+headerPin)
	case prefill == nil && prefillRank != nil:
		return badHeader(headerPrefillRank, fmt.Sprint(*prefillRank), "a worker beside it, in "+headerPrefillPin)
	case prefill != nil && id != nil && *prefill == *id:
		req.Split = router.SplitNever // one worker does both
	case prefill != nil:
		req.PrefillPinned, req.PrefillAnyRank = pinned(*prefill, prefillRank)
	}
	if id == nil {
		return nil
	}
	req.Pinned, req.AnyRank = pinned(*id, rank)
	if h.hint(headerGroup) != "" {
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
