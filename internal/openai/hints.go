// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"math"
	"time"
)

// Hints are what a request says of itself in nvext. Fields that are absent are
// zero.
type Hints struct {
	Priority        float64            // agent_hints.priority
	StrictPriority  int                // agent_hints.strict_priority
	ExpectedOutput  int                // agent_hints.osl, in tokens
	RequiredTaints  []string           // routing_constraints.required_taints
	PreferredTaints map[string]float64 // routing_constraints.preferred_taints
	TTFTTarget      time.Duration      // router.ttft_target, in ms
}

// maxHint bounds the numbers of hints, far above any that means something.
const maxHint = 1 << 31

// maxTaints bounds the taints that a request may name.
const maxTaints = 64

// ParseHints reads the hints of a body's nvext. Every error has status 400 and
// names the field.
func ParseHints(nvext []byte) (h Hints, err *Error) {
	if len(nvext) == 0 {
		return h, nil
	}
	var raw struct {
		AgentHints struct {
			Priority       *float64 `json:"priority"`
			StrictPriority *float64 `json:"strict_priority"`
			OSL            *float64 `json:"osl"`
		} `json:"agent_hints"`
		Constraints struct {
			Required  []string           `json:"required_taints"`
			Preferred map[string]float64 `json:"preferred_taints"`
		} `json:"routing_constraints"`
		Router struct {
			TTFTTarget *float64 `json:"ttft_target"`
		} `json:"router"`
	}
	if json.Unmarshal(nvext, &raw) != nil {
		return h, bad("nvext", "nvext must be an object, its hints numbers, its taints a list of strings and an object of numbers")
	}
	var strict, output, target float64
	for _, n := range []struct {
		name     string
		value    *float64
		to       *float64
		negative bool
	}{
		{"nvext.agent_hints.priority", raw.AgentHints.Priority, &h.Priority, true},
		{"nvext.agent_hints.strict_priority", raw.AgentHints.StrictPriority, &strict, false},
		{"nvext.agent_hints.osl", raw.AgentHints.OSL, &output, false},
		{"nvext.router.ttft_target", raw.Router.TTFTTarget, &target, false},
	} {
		if n.value == nil {
			continue
		}
		if v := *n.value; math.Abs(v) > maxHint || v < 0 && !n.negative {
			return Hints{}, bad(n.name, n.name+" is out of range")
		}
		*n.to = *n.value
	}
	h.StrictPriority, h.ExpectedOutput = int(strict), int(output)
	h.TTFTTarget = time.Duration(target * float64(time.Millisecond))
	h.RequiredTaints, h.PreferredTaints = raw.Constraints.Required, raw.Constraints.Preferred
	if len(h.RequiredTaints) > maxTaints || len(h.PreferredTaints) > maxTaints {
		return Hints{}, bad("nvext.routing_constraints", "nvext.routing_constraints names too many taints")
	}
	return h, nil
}
