// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Pins are the workers that a request names in nvext; nil for none.
type Pins struct {
	Worker, Rank         *uint64 // decode_worker_id or backend_instance_id; dp_rank, else decode_dp_rank
	Prefill, PrefillRank *uint64 // prefill_worker_id, prefill_dp_rank
}

// ParsePins reads the pins of a body's nvext. Every error has status 400.
func ParsePins(nvext []byte) (Pins, *Error) {
	if len(nvext) == 0 {
		return Pins{}, nil
	}
	var raw struct {
		Backend     *uint64 `json:"backend_instance_id"`
		Decode      *uint64 `json:"decode_worker_id"`
		Prefill     *uint64 `json:"prefill_worker_id"`
		Rank        *uint32 `json:"dp_rank"`
		DecodeRank  *uint32 `json:"decode_dp_rank"` // as answers say it
		PrefillRank *uint32 `json:"prefill_dp_rank"`
	}
	if json.Unmarshal(nvext, &raw) != nil {
		return Pins{}, bad("nvext", "nvext must be an object, and the workers and ranks that it names numbers")
	}
	if raw.Decode == nil {
		raw.Decode = raw.Backend
	}
	if raw.Backend != nil && *raw.Backend != *raw.Decode {
		return Pins{}, bad("nvext.backend_instance_id",
			"nvext.backend_instance_id and nvext.decode_worker_id name different workers")
	}
	if raw.Rank == nil {
		raw.Rank = raw.DecodeRank
	}
	wide := func(n *uint32) *uint64 {
		if n == nil {
			return nil
		}
		return new(uint64(*n))
	}
	return Pins{Worker: raw.Decode, Rank: wide(raw.Rank), Prefill: raw.Prefill, PrefillRank: wide(raw.PrefillRank)}, nil
}

// Queries reports whether nvext has the annotation query_instance_id, alone or with a value behind
// a colon: the client wants to know the worker, and no response.
func Queries(nvext []byte) (queries bool) {
	value(nvext).member("annotations").each(func(a value) {
		name, _, _ := strings.Cut(a.textOr(""), ":")
		queries = queries || name == "query_instance_id"
	})
	return queries
}

// maxHint bounds the numbers of hints, far above any useful one.
const maxHint = 1 << 31

// maxTaints bounds the taints that a request may name.
const maxTaints = 64

// ReadHints reads the routing hints of a body's nvext into a request. Every error has status
// 400 and names the field.
func ReadHints(nvext []byte, to *router.Request) *Error {
	if len(nvext) == 0 {
		return nil
	}
	var raw struct {
		AgentHints struct {
			Priority       *float64 `json:"priority"`
			StrictPriority float64  `json:"strict_priority"`
			OSL            float64  `json:"osl"`                 // expected output tokens
			Latency        float64  `json:"latency_sensitivity"` // older name of the priority
		} `json:"agent_hints"`
		Constraints struct {
			Required  []string           `json:"required_taints"`
			Preferred map[string]float64 `json:"preferred_taints"`
		} `json:"routing_constraints"`
		Router struct {
			TTFTTarget float64 `json:"ttft_target"` // milliseconds, like the next one
			ITLTarget  float64 `json:"itl_target"`
		} `json:"router"`
	}
	if json.Unmarshal(nvext, &raw) != nil {
		return bad("nvext",
			"nvext must be an object, its hints numbers, its taints a list of strings and an object of numbers")
	}
	hints := &raw.AgentHints
	if hints.Priority == nil {
		hints.Priority = &hints.Latency
	}
	for _, n := range []struct {
		name  string
		value float64
		least float64
	}{
		{"nvext.agent_hints.latency_sensitivity", hints.Latency, -maxHint},
		{"nvext.agent_hints.priority", *hints.Priority, -maxHint},
		{"nvext.agent_hints.strict_priority", hints.StrictPriority, 0},
		{"nvext.agent_hints.osl", hints.OSL, 0},
		{"nvext.router.ttft_target", raw.Router.TTFTTarget, 0},
		{"nvext.router.itl_target", raw.Router.ITLTarget, 0},
	} {
		if n.value < n.least || n.value > maxHint {
			return bad(n.name, n.name+" is out of range")
		}
	}
	if len(raw.Constraints.Required) > maxTaints || len(raw.Constraints.Preferred) > maxTaints {
		return bad("nvext.routing_constraints", "nvext.routing_constraints names too many taints")
	}
	to.Priority, to.StrictPriority, to.ExpectedOutput = *hints.Priority, int(hints.StrictPriority), int(hints.OSL)
	to.RequiredTaints, to.PreferredTaints = raw.Constraints.Required, raw.Constraints.Preferred
	to.TTFTTarget = time.Duration(raw.Router.TTFTTarget * float64(time.Millisecond))
	to.Labels.ITLTarget = time.Duration(raw.Router.ITLTarget * float64(time.Millisecond))
	return nil
}

// Decode reads one JSON value into a struct that has all of its fields.
func Decode(in io.Reader, into any) error {
	dec := json.NewDecoder(in)
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	_, err := dec.Token()
	if _, wrong := errors.AsType[*json.SyntaxError](err); err == nil || wrong {
		return errors.New("something follows its end")
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
