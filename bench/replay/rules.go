// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"encoding/json"
	"fmt"
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
	// Oracle gives all workers one cache of their summed size: a bound that routing alone
	// cannot reach, since every prefix is at the right place.
	Oracle bool

	// NoReports: the routers get no reports of engines about their load.
	NoReports bool
	// NoJunction: costs alone decide, also between workers of a hybrid model that cannot use all that they hold of a
	// prompt.
	NoJunction bool
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
		// The preset --agentic of NVIDIA Dynamo, from its page "Router Presets", which calls it
		// experimental (pull request 13447). Dynamo 1.6.1 has the three settings, but not yet the flag.
		// The preset leaves the other settings at their defaults: it assumes that caches are reused,
		// without decay, temperature or queue. A request weighs 64 blocks of 16 tokens.
		// Left out: Dynamo draws among equal costs, the simulator first takes the fewest requests.
		policy("dynamo-agentic", scorer.DynamoNewer, func(s *scorer.Settings) {
			s.OverlapCredit, s.PrefillScale = 2, 4
			s.RequestWeight = 64 * 16. / MooncakeBlock
		}),
		// The preset --load-aware of NVIDIA Dynamo 1.6.1, deprecated there, for workers whose caches
		// are unknown. Without credit the router keeps no index: it books whole prompts as prefill.
		// Left out: the choice among equal costs, as above.
		policy("dynamo-load-aware", scorer.DynamoNewer, func(s *scorer.Settings) {
			s.OverlapCredit, s.AssumeKVReuse = 0, false
		}),
		policy("predicted_ttft", scorer.PredictedTTFT, func(s *scorer.Settings) { s.Alpha = 0 }),
		policy("weighted", scorer.Weighted, nil),
		policy("oracle", scorer.PredictedTTFT, func(s *scorer.Settings) { s.Alpha, s.DecodeWeight = .25, 0 }),
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

// choose is the rule of a router that does not simply choose by settings; nil if it does.
func (r *Rule) choose(settings scorer.Settings) scorer.Rule {
	if !r.NoJunction {
		return r.Choose
	}
	return func(q *scorer.Request, in []scorer.Input, costs []float64) int {
		for i := range in {
			in[i].UnusableBlocks = 0
		}
		return settings.Choose(q, in, costs)
	}
}

// ParseRule returns the rule with a name. What follows a colon changes its settings as
// a request may ([scorer.Override]), as in "tokens:alpha=.1,attention=6e-5". "reports=none"
// has the rule ignore the reports of engines, "junction=none" what hybrid models hold and cannot use.
func ParseRule(text string) (Rule, error) {
	name, rest, changed := strings.Cut(text, ":")
	all := named()
	i := slices.IndexFunc(all, func(r Rule) bool { return r.Name == name })
	if i < 0 {
		return Rule{}, fmt.Errorf("replay: rule %q is unknown; the rules are %s", name, strings.Join(ruleNames(), ", "))
	}
	r := all[i]
	r.Name = text
	if !changed {
		return r, nil
	}
	override := scorer.Override{Cost: &all[i].Settings.Policy}
	for part := range strings.SplitSeq(rest, ",") {
		if part == "reports=none" {
			r.NoReports = true
			continue
		}
		if part == "junction=none" && r.Choose == nil {
			r.NoJunction = true
			continue
		}
		key, value, _ := strings.Cut(part, "=")
		v, err := strconv.ParseFloat(value, 64)
		if err == nil && r.Choose == nil {
			d := json.NewDecoder(strings.NewReader(fmt.Sprintf("{%q: %g}", key, v)))
			d.DisallowUnknownFields()
			err = d.Decode(&override)
		}
		if err != nil || r.Choose != nil {
			return Rule{}, fmt.Errorf("replay: rule %q: %q is not one of its settings; costs have those of x-dynamo-router-override as name=number, all rules have reports=none, and rules of costs junction=none", name, part)
		}
	}
	settings, err := r.Settings.With(&override)
	if err != nil {
		return Rule{}, fmt.Errorf("replay: rule %q: %w", name, err)
	}
	r.Settings = settings
	return r, nil
}
