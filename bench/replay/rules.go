// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/scorer"
)

// Rule is a way of choosing that a simulation can be run with: the settings of a
// cost policy, or a rule that others have published.
type Rule struct {
	Name     string
	Settings scorer.Settings
	Choose   scorer.Rule // instead of Settings, if not nil
	// Oracle gives all workers one cache of their summed size: what routing
	// alone cannot reach, since no prefix would be in the wrong place.
	Oracle bool

	// Ties says how equals are told apart: "" as the product does, by requests and
	// then by blocks; "requests" by requests alone; "draw" not at all. What is left
	// is drawn.
	Ties string
	// EngineInputs has the rule see what the engines themselves would report at
	// the moment, where it looks at waiting requests or at the cache in use: those
	// that the engine has not begun, and the blocks it refers to. Otherwise it sees
	// the router's account: those without a first token, and its active blocks.
	EngineInputs bool
	// NoReports has the routers not hear what engines report of their load.
	NoReports bool
}

// Default is the rule that kvroute recommends where the engine is known: tokens
// with the attention weight of a dense model of 32B.
const Default = "tokens:attention=6e-5"

// named are the rules with names of their own.
func named() []Rule {
	policy := func(name string, p scorer.Policy, change func(s *scorer.Settings)) Rule {
		s := scorer.Defaults()
		s.Policy = p
		if change != nil {
			change(&s)
		}
		return Rule{Name: name, Settings: s}
	}
	rules := []Rule{
		policy("tokens", scorer.Tokens, func(s *scorer.Settings) { s.Attention = 0 }),
		policy("dynamo", scorer.Dynamo, nil),
		policy("dynamo_newer", scorer.DynamoNewer, nil),
		// NVIDIA Dynamo's settings for long conversations. They were found with blocks of 64
		// tokens, so the weight of a request is scaled to others.
		policy("dynamo-agentic", scorer.DynamoNewer, func(s *scorer.Settings) {
			s.OverlapCredit, s.PrefillScale, s.AssumeKVReuse = 2, 4, false
			s.RequestWeight = 64 * 64. / MooncakeBlock
		}),
		// NVIDIA Dynamo's settings for workers whose cache is unknown.
		policy("dynamo-load-aware", scorer.DynamoNewer, func(s *scorer.Settings) {
			s.OverlapCredit, s.HostWeight, s.DiskWeight, s.AssumeKVReuse = 0, 0, 0, false
		}),
		policy("predicted_ttft", scorer.PredictedTTFT, func(s *scorer.Settings) { s.Alpha = 0 }),
		policy("weighted", scorer.Weighted, nil),
		policy("oracle", scorer.PredictedTTFT, func(s *scorer.Settings) { s.Alpha = .25 }),
	}
	rules[len(rules)-1].Oracle = true
	return append(rules, publishedRules()...)
}

// ruleNames returns the names that [ParseRule] knows.
func ruleNames() (names []string) {
	for _, r := range named() {
		names = append(names, r.Name)
	}
	return names
}

// knob returns the setting that a rule's name may change, nil if its policy does not
// look at it.
func knob(s *scorer.Settings, name string) *float64 {
	known := map[string]struct {
		setting *float64
		by      []scorer.Policy
	}{
		"alpha":       {&s.Alpha, []scorer.Policy{scorer.Tokens, scorer.PredictedTTFT}},
		"attention":   {&s.Attention, []scorer.Policy{scorer.Tokens}},
		"weight":      {&s.OverlapWeight, []scorer.Policy{scorer.Dynamo}},
		"credit":      {&s.OverlapCredit, []scorer.Policy{scorer.DynamoNewer}},
		"scale":       {&s.PrefillScale, []scorer.Policy{scorer.DynamoNewer}},
		"request":     {&s.RequestWeight, []scorer.Policy{scorer.DynamoNewer}},
		"temperature": {&s.Temperature, scorer.Policies()},
	}
	if k := known[name]; slices.Contains(k.by, s.Policy) {
		return k.setting
	}
	return nil
}

// ParseRule returns the rule with a name, its settings changed by what follows a
// colon, as in "tokens:alpha=.1,attention=6e-5" or "dynamo:weight=4".
func ParseRule(text string) (Rule, error) {
	name, rest, changed := strings.Cut(text, ":")
	all := named()
	i := slices.IndexFunc(all, func(r Rule) bool { return r.Name == name })
	if i < 0 {
		return Rule{}, fmt.Errorf("replay: rule %q is not known; there are %s", name, strings.Join(ruleNames(), ", "))
	}
	r := all[i]
	r.Name = text
	if !changed {
		return r, nil
	}
	for part := range strings.SplitSeq(rest, ",") {
		key, value, _ := strings.Cut(part, "=")
		switch part {
		case "ties=requests", "ties=draw":
			r.Ties = value
			continue
		case "reports=none":
			r.NoReports = true
			continue
		case "inputs=engine":
			r.EngineInputs = true
			continue
		}
		if r.Choose != nil {
			return Rule{}, fmt.Errorf("replay: rule %q: %q is no setting; it has ties=requests, ties=draw, inputs=engine and reports=none", name, part)
		}
		at := knob(&r.Settings, key)
		v, err := strconv.ParseFloat(value, 64)
		if at == nil || err != nil {
			return Rule{}, fmt.Errorf("replay: rule %q: %q is none of its settings; alpha belongs to tokens and predicted_ttft, attention to tokens, weight to dynamo, credit, scale and request to dynamo_newer, temperature to all, each with =number, and ties=requests, ties=draw, inputs=engine and reports=none", name, part)
		}
		*at = v
	}
	if err := r.Settings.Validate(); err != nil {
		return Rule{}, fmt.Errorf("replay: rule %q: %w", name, err)
	}
	return r, nil
}

// choose is the rule of a replica's router, nil for that of the router's settings.
func (s *sim) choose(rep *replica) scorer.Rule {
	rule := s.Rule.Choose
	if s.Rule.Ties == "" && !s.Rule.EngineInputs {
		return rule
	}
	if rule == nil {
		rule = s.Rule.Settings.Choose
	}
	var seen []scorer.Input
	return func(req *scorer.Request, in []scorer.Input, costs []float64) int {
		seen = append(seen[:0], in...)
		if s.Rule.EngineInputs {
			s.report(rep, seen)
		}
		if s.Rule.Ties == "" {
			return rule(req, seen, costs)
		}
		for i := range costs {
			costs[i] = math.NaN()
		}
		blocks := s.Rule.Choose == nil // a cost may be made of them
		for i := range seen {
			if !blocks {
				seen[i].ActiveBlocks = 0
			}
		}
		chosen := rule(req, seen, costs)
		if chosen < 0 || math.IsNaN(costs[chosen]) {
			return chosen // the rule has compared without costs
		}
		for i := range seen {
			requests := seen[i].ActiveRequests
			seen[i] = scorer.Input{}
			if s.Rule.Ties == "requests" {
				seen[i].ActiveRequests = requests
			}
		}
		return scorer.Pick(costs, seen, req.U)
	}
}

// report fills in what the engines of a replica's candidates know themselves.
func (s *sim) report(rep *replica, in []scorer.Input) {
	i := 0
	for _, w := range rep.workers {
		if !s.alive[w] || i == len(in) {
			continue
		}
		e := s.engines[w]
		in[i].WaitingRequests = len(e.waiting) - e.head
		in[i].KVUse = min(1, float64(e.cache.live+e.cache.reserved)/float64(e.cache.capacity))
		i++
	}
}
