// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/scorer"
)

// Sentence says in words why the request goes to its worker, in one sentence or a few short ones. It
// compares the worker with another candidate if the decision has its candidates.
func (d *Decision) Sentence() string {
	e := explanation{d: d, name: labelOf(d.Worker, d.WorkerName, d.Group)}
	e.view()
	e.beginning()
	e.leg()
	if d.Equal > 0 && e.eligible != 1 {
		e.blocks(e.other)
		e.facts()
		e.cost()
	} else {
		e.mode()
		e.blocks(nil)
	}
	e.excluded()
	return strings.Join(e.text, " ")
}

// labelOf names a worker, or the router group that it stands for, in a sentence.
func labelOf(w Worker, name, group string) string {
	switch {
	case group != "":
		return "group " + group
	case name == "":
		return "worker " + w.Label("")
	}
	return w.Label(name)
}

// explanation is a sentence in the making.
type explanation struct {
	d    *Decision
	name string // of the chosen worker
	text []string

	// Of the candidates that could be chosen; nil and 0 if the decision has no candidates.
	chosen, lowest *Candidate // lowest has the lowest cost
	eligible       int
	all            bool // eligible counts all of them
	// other is the candidate that the chosen one is compared with: the one with the fewest tokens to
	// compute if it has fewer than the chosen one, else the one with the lowest cost.
	other *Candidate
}

// say adds a sentence. It begins with a capital letter, unless it begins with a name.
func (e *explanation) say(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if strings.HasPrefix(text, "worker ") || strings.HasPrefix(text, "group ") {
		text = strings.ToUpper(text[:1]) + text[1:]
	}
	e.text = append(e.text, text)
}

// view finds the candidates that the sentence names.
func (e *explanation) view() {
	d := e.d
	var fewest *Candidate
	for i := range d.Candidates {
		c := &d.Candidates[i]
		if c.Excluded != "" {
			continue
		}
		e.eligible++
		if e.lowest == nil || c.Cost < e.lowest.Cost {
			e.lowest = c
		}
		if c.Worker == d.Worker {
			e.chosen = c
			continue
		}
		if e.other == nil || c.Cost < e.other.Cost {
			e.other = c
		}
		if fewest == nil || cmp.Or(cmp.Compare(d.toCompute(c), d.toCompute(fewest)), cmp.Compare(c.Cost, fewest.Cost)) < 0 {
			fewest = c
		}
	}
	e.all = d.Omitted == 0 || e.eligible < keptCandidates
	if e.chosen != nil && fewest != nil && !e.decodes() && d.toCompute(fewest) < d.toCompute(e.chosen) {
		e.other = fewest
	}
}

// toCompute is the number of tokens of the prompt that a candidate would compute.
func (d *Decision) toCompute(c *Candidate) int {
	return max(min(1, d.PromptTokens), d.PromptTokens-c.OverlapBlocks*d.BlockSize)
}

// decodes reports whether the computation of the prompt does not count, as for a decode worker.
func (e *explanation) decodes() bool {
	s := e.d.Settings
	return s != nil && !s.TrackPrefill && s.Policy != scorer.PredictedTTFT && s.Policy != scorer.Weighted
}

// beginning says what came before the comparison of workers.
func (e *explanation) beginning() {
	d := e.d
	if d.QueueTime > 0 {
		e.say("The request waited %v for a worker that is not busy.", d.QueueTime)
	}
	switch d.Reason {
	case ReasonUnread:
		e.say("kvroute could not read the request, so it did not look for cached blocks.")
	case ReasonTokenizer:
		e.say("kvroute could not turn the prompt into tokens, so it did not look for cached blocks.")
	case ReasonPreferred:
		e.say("The router that sent the request here named %s.", e.name)
	case ReasonSession:
		e.say("The session of the request is bound to %s.", e.name)
	case ReasonPinned:
		if e.eligible > 1 || e.eligible == 0 && d.Equal > 0 {
			e.say("The request names %s and no rank.", labelOf(Worker{ID: d.Worker.ID}, d.WorkerName, ""))
		} else {
			e.say("The request names %s.", e.name)
		}
	case ReasonKV, ReasonLoad, ReasonRoundRobin, ReasonMode:
	}
	if d.Reason != ReasonPinned && d.Reason != ReasonSession && e.eligible == 1 && e.all {
		e.say("%s is the only worker that can take the request.", e.name)
	}
	if d.Member != nil {
		e.say("The group was asked and named its worker %s.", d.Member.Label(""))
	}
}

// leg says which worker computes the prompt, in a split model.
func (e *explanation) leg() {
	switch leg := e.d.Prefill; {
	case leg != nil && e.d.NoLeg != "":
		prefill := labelOf(leg.Worker, leg.WorkerName, "")
		e.say("%s was to compute the prompt; now %s computes it, because %s.", prefill, e.name, e.d.NoLeg.Text())
	case leg != nil:
		e.say("%s computes the prompt and %s the output.", labelOf(leg.Worker, leg.WorkerName, ""), e.name)
	case e.d.NoLeg != "":
		e.say("One worker computes the prompt and the output, because %s.", e.d.NoLeg.Text())
	}
}

// mode says how a mode without costs chose the worker.
func (e *explanation) mode() {
	d := e.d
	named := d.Reason == ReasonSession || d.Reason == ReasonPreferred || d.Reason == ReasonPinned && e.eligible == 0
	if named || d.Equal > 0 || e.eligible == 1 {
		return
	}
	has, fewer, class, place := "", " requests", " of its class (GPU or CPU)", ""
	if c := e.chosen; c != nil {
		has, fewer = ", which has "+plural(short(mean(c, c.ActiveRequests)), "request"), ""
		if class = " that computes on GPUs"; c.CPU {
			class = " that computes on CPUs"
		}
		if e.all {
			place = fmt.Sprintf(", number %d of %d", d.Turn%uint64(e.eligible)+1, e.eligible)
		}
	}
	switch d.Mode {
	case RoundRobin:
		e.say("Mode round-robin gives each worker its turn: turn %d is that of %s%s.", d.Turn, e.name, place)
	case Random:
		e.say("Mode random drew %s.", e.name)
	case LeastLoaded:
		e.say("Mode least-loaded chose %s%s: no other worker has fewer%s.", e.name, has, fewer)
	case PowerOfTwo:
		e.say("Mode power-of-two drew two workers and chose %s%s: the other one does not have fewer%s.", e.name, has, fewer)
	case DeviceAware:
		e.say("Mode %s chose %s%s: no other worker%s has fewer%s.", d.Mode, e.name, has, class, fewer)
	case KV, Direct:
	}
}

// blocks says how much of the prompt the worker has, compared with another one unless that is nil.
func (e *explanation) blocks(other *Candidate) {
	d := e.d
	if d.PromptTokens == 0 || e.decodes() {
		return
	}
	text := plural(d.PrefillTokens, "token") + " to compute"
	if d.PromptBlocks > 0 {
		text = fmt.Sprintf("%d of %s of the prompt: %s", d.OverlapBlocks, plural(d.PromptBlocks, "block"), text)
	}
	if other == nil {
		e.say("%s has %s.", e.name, text)
		return
	}
	if n := d.toCompute(other); n == d.PrefillTokens {
		e.say("%s has %s, as on %s.", e.name, text, label(other))
	} else {
		e.say("%s has %s against %d on %s.", e.name, text, n, label(other))
	}
}

func label(c *Candidate) string { return labelOf(c.Worker, c.WorkerName, c.Group) }

// mean is a part of the load; of a router group it is the mean of its workers, as in the costs.
func mean(c *Candidate, sum int) float64 { return float64(sum) / float64(max(1, c.Members)) }

// short prints a number with at most one decimal.
func short(x float64) string { return strconv.FormatFloat(math.Round(10*x)/10, 'f', -1, 64) }

// plural returns a number with its noun.
func plural[N int | string](n N, noun string) string {
	text := fmt.Sprint(n)
	if text != "1" && noun != "%" {
		noun += "s"
	}
	return text + " " + noun
}

// facts names what the cost counts and in which the worker and the other one differ.
func (e *explanation) facts() {
	d, c, o := e.d, e.chosen, e.other
	if c == nil || o == nil || d.Policy == "" {
		return
	}
	s, tracked := d.Settings, !e.decodes()
	waits := d.Policy == scorer.PredictedTTFT || d.Policy == scorer.Tokens && tracked
	memory := d.Policy == scorer.Tokens && !tracked
	dynamo := d.Policy == scorer.Dynamo || d.Policy == scorer.DynamoNewer
	weighted := d.Policy == scorer.Weighted
	differ := func(counts bool, format, noun string, of func(c *Candidate) float64) {
		x, y := short(of(c)), short(of(o))
		if counts && x != y {
			e.say(format, e.name, plural(x, noun), y, label(o))
		}
	}

	lower := func(c *Candidate) float64 { return float64(c.HostBlocks + c.DiskBlocks) }
	differ(waits || tracked && d.Policy == scorer.DynamoNewer,
		"%s has %s more in host memory or on disk against %s on %s.", "block", lower)
	pending := func(c *Candidate) float64 { return mean(c, c.PendTokens) }
	differ(waits || dynamo && tracked, "%s has %s of other prompts to compute first against %s on %s.", "token", pending)
	if waits {
		e.copies()
	}
	delay := func(c *Candidate) float64 { return c.DecodeDelay }
	differ(waits || weighted,
		"Decoding requests on %s delay this one by the time for %s against %s on %s.", "token", delay)
	held := func(c *Candidate) float64 { return mean(c, c.DecodeTokens+c.WaitingTokens) }
	differ(memory && s.DecodeWeight > 0, "The requests on %s hold %s against %s on %s.", "token", held)
	needed := func(c *Candidate) float64 { return mean(c, c.ActiveBlocks) + float64(c.AdditionalBlocks) }
	differ(dynamo || memory && s.DecodeWeight == 0,
		"%s needs %s for its requests and this one against %s on %s.", "block", needed)
	added := func(c *Candidate) float64 { return float64(c.AdditionalBlocks) }
	differ(memory && s.DecodeWeight > 0, "%s needs %s for this request against %s on %s.", "block", added)
	overlap := func(c *Candidate) float64 { return float64(c.OverlapBlocks) }
	differ(!tracked && s.OverlapCredit > 0 && d.Policy != scorer.Dynamo,
		"%s has %s of the prompt against %s on %s.", "block", overlap)
	requests := func(c *Candidate) float64 { return mean(c, c.ActiveRequests) }
	differ(waits && s.Alpha > 0 || d.Policy == scorer.DynamoNewer && s.RequestWeight > 0 || weighted,
		"%s has %s against %s on %s.", "request", requests)
	use := func(c *Candidate) float64 { return 100 * c.KVUse }
	differ(weighted, "%s uses %s of its cache against %s on %s.", "%", use)
	speed := func(c *Candidate) float64 { return 100 * cmp.Or(c.Speed, 1) }
	differ(waits, "%s computes at %s of the usual speed against %s on %s.", "%", speed)
	for _, one := range []*Candidate{c, o} {
		if waits && one.MaxRequests > 0 && requests(one)+1 > .9*float64(one.MaxRequests) {
			e.say("The engine of %s computes at most %s at a time and has %s.",
				label(one), plural(one.MaxRequests, "request"), short(requests(one)))
		}
	}
	taints := func(c *Candidate) float64 { return c.TaintWeight }
	differ(!weighted && d.Reason != ReasonPinned, "Preferred taints give %s %s against %s on %s.", "point", taints)
}

// copies names blocks of the prompt that are being computed, and the worth of another copy of them.
func (e *explanation) copies() {
	d, c := e.d, e.chosen
	for _, one := range []*Candidate{c, e.other} {
		n := one.PendingBlocks
		if n == 0 {
			continue
		}
		are, why := "are", "not confirmed by its events yet"
		if n == 1 {
			are = "is"
		}
		if one.PendTokens > 0 {
			why = "still being computed there for another request, or " + why
		}
		e.say("%d of the blocks on %s %s %s.", n, label(one), are, why)
	}
	idle := c.ActiveRequests == 0 && c.Members <= 1 && d.ActivePrefix > c.OverlapBlocks*d.BlockSize
	if idle && d.Policy == scorer.Tokens && d.Settings.DecodeWeight > 0 {
		e.say("The worker with the most blocks of the prompt has %s, and the first %s are in use there.",
			plural(d.Sharers, "request"), plural(d.ActivePrefix, "token"))
		e.say("So a copy of these on %s, which is idle, counts less than its computation.", e.name)
	}
}

// cost says how the costs led to the choice.
func (e *explanation) cost() {
	d := e.d
	drawn := d.Policy != "" && d.Settings.Temperature > 0 && d.Reason != ReasonPreferred
	lowest := d.Policy != "" && !drawn && d.Reason != ReasonPreferred // the rule of the choice
	own := strconv.FormatFloat(d.Cost+0, 'g', 6, 64)                  // not -0
	against := func(c *Candidate) string {
		text := strconv.FormatFloat(c.Cost+0, 'g', 6, 64)
		if text == own && c.Cost != d.Cost {
			own, text = exact(d.Cost), exact(c.Cost)
		}
		return text + " on " + label(c)
	}
	if drawn {
		chance := ""
		if e.chosen != nil {
			chance = ", with a chance of " + strconv.FormatFloat(100*e.chosen.Probability, 'g', 3, 64) + " %"
		}
		e.say("The temperature of %s drew %s at random%s.", exact(d.Settings.Temperature), e.name, chance)
	}
	switch {
	case d.Policy == "":
		e.say("A rule of the program chose %s, at a cost of %s.", e.name, own)
	case d.Equal > 1 && (lowest || e.chosen != nil && equalCosts(e.lowest, e.chosen)):
		e.say("%d workers have the lowest cost, %s.", d.Equal, own)
		switch {
		case !lowest:
		case d.Policy == scorer.Weighted:
			e.say("The first of them gets the request.")
		default:
			e.say("Among these, fewer requests win, then fewer blocks in use, then a draw.")
		}
	case e.chosen == nil && lowest:
		e.say("%s has the lowest cost, %s.", e.name, own)
	case e.chosen == nil:
		e.say("%s has a cost of %s.", e.name, own)
	case lowest || e.lowest == e.chosen:
		other := against(e.other)
		e.say("%s has the lowest cost: %s against %s.", e.name, own, other)
	default:
		other := against(e.lowest)
		e.say("%s has a cost of %s; the lowest is %s.", e.name, own, other)
	}
}

// equalCosts reports whether two costs are equal as far as the choice sees them; see [scorer.Equals].
func equalCosts(a, b *Candidate) bool { return scorer.Equals([]float64{a.Cost, b.Cost}, 0) == 2 }

// excluded counts the workers that could not be chosen, unless the reason is the rule of the choice.
func (e *explanation) excluded() {
	var order []Exclusion
	n := map[Exclusion]int{}
	for i := range e.d.Candidates {
		switch x := e.d.Candidates[i].Excluded; x {
		case "", ExcludedRole, ExcludedPin, ExcludedSession:
		default:
			if n[x]++; n[x] == 1 {
				order = append(order, x)
			}
		}
	}
	for _, x := range order {
		if n[x] == 1 {
			e.say("1 worker is %s.", x.Text())
		} else {
			e.say("%d workers are %s.", n[x], x.Text())
		}
	}
}
