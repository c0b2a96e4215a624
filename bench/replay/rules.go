// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/scorer"
)

// Rule is a way of choosing that a simulation can be run with: the settings of a
// cost policy, or a published rule of package scorer.
type Rule struct {
	Name     string
	Settings scorer.Settings
	Choose   scorer.Rule // instead of Settings, if not nil
	// Oracle gives all workers one cache of their summed size: what routing
	// alone cannot reach, since no prefix would be in the wrong place.
	Oracle bool
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
	agentic := scorer.Agentic(MooncakeBlock)
	rules := []Rule{
		policy("tokens", scorer.Tokens, func(s *scorer.Settings) { s.Attention = 0 }),
		policy("dynamo", scorer.Dynamo, nil),
		policy("dynamo_newer", scorer.DynamoNewer, nil),
		{Name: "dynamo-agentic", Settings: agentic},
		policy("predicted_ttft", scorer.PredictedTTFT, func(s *scorer.Settings) { s.Alpha = 0 }),
		policy("weighted", scorer.Weighted, nil),
		policy("oracle", scorer.PredictedTTFT, func(s *scorer.Settings) { s.Alpha = .25 }),
	}
	rules[len(rules)-1].Oracle = true
	for _, r := range scorer.PublishedRules() {
		rules = append(rules, Rule{Name: r.Name, Settings: scorer.Defaults(), Choose: r.Rule})
	}
	return rules
}

// RuleNames returns the names that [ParseRule] knows.
func RuleNames() (names []string) {
	for _, r := range named() {
		names = append(names, r.Name)
	}
	return names
}

// knobs are the settings that a rule's name may change.
func knobs(s *scorer.Settings) map[string]*float64 {
	return map[string]*float64{
		"alpha":       &s.Alpha,
		"attention":   &s.Attention,
		"weight":      &s.OverlapWeight,
		"credit":      &s.OverlapCredit,
		"scale":       &s.PrefillScale,
		"request":     &s.RequestWeight,
		"temperature": &s.Temperature,
	}
}

// ParseRule returns the rule with a name, its settings changed by what follows a
// colon, as in "tokens:alpha=.1,attention=6e-5" or "dynamo:weight=4".
func ParseRule(text string) (Rule, error) {
	name, rest, changed := strings.Cut(text, ":")
	all := named()
	i := slices.IndexFunc(all, func(r Rule) bool { return r.Name == name })
	if i < 0 {
		return Rule{}, fmt.Errorf("replay: rule %q is not known; there are %s", name, strings.Join(RuleNames(), ", "))
	}
	r := all[i]
	r.Name = text
	if !changed {
		return r, nil
	}
	if r.Choose != nil {
		return Rule{}, fmt.Errorf("replay: rule %q has no settings", name)
	}
	for part := range strings.SplitSeq(rest, ",") {
		key, value, _ := strings.Cut(part, "=")
		at := knobs(&r.Settings)[key]
		v, err := strconv.ParseFloat(value, 64)
		if at == nil || err != nil {
			return Rule{}, fmt.Errorf("replay: rule %q: %q is no setting; they are alpha, attention, weight, credit, scale, request, temperature, each with =number", name, part)
		}
		*at = v
	}
	if err := r.Settings.Validate(); err != nil {
		return Rule{}, fmt.Errorf("replay: rule %q: %w", name, err)
	}
	return r, nil
}
