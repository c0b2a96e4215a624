// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
)

// LaneConfig describes a closed loop of made-up coding agents with the semantics of AgentX, the
// agentic benchmark of SemiAnalysis (agentx-harness 1.0.12 on PyPI, its scenario agentx):
//
//   - A lane plays one session after the other. It begins with the next session when the agent and
//     all its sub-agents have ended. AgentX gives a free lane the next session of all; here lane i of
//     n plays the sessions i, i+n, i+2n and so on.
//   - Each lane begins inside its first session, at 25 to 75 % of the session's time. First the last
//     request before this moment of each agent that is active, and then the next 10 requests of the
//     lane without pauses, fill the caches: with one token of output, and not measured. The
//     measurement begins for all lanes at once, when all of these requests have ended.
//   - The pause before a request counts from the end of the agent's last response.
//   - Sub-agents begin with a prompt of their own after a response of the parent, several at a time.
//     The parent waits for those that had ended before its next request when it was recorded.
//   - A mark at the beginning of the first user message keeps the sessions apart in the caches. The
//     tools and the system prompt come before the mark. A session and its sub-agents have one mark.
//   - No request begins after the duration.
//
// Two parts of AgentX are left out. AgentX shortens a time without any request to 10 s. It also
// replays requests after a conversation was summarised; here a session ends at the longest prompt.
//
// A setting that is 0 has its default.
type LaneConfig struct {
	Lanes    int           `yaml:"lanes" want:"0 to 4096" help:"made up: <number> of lanes that play sessions of coding agents in a closed loop as AgentX does; 0 = an open loop"`
	Duration time.Duration `yaml:"lane-duration" default:"1h" want:"1s to 24h" help:"lanes: <time> of the measurement, after the requests that fill the caches"`
	Context  int           `yaml:"lane-context" default:"256000" want:"65536 to 1048576" help:"lanes: most <tokens> of a prompt with its output; a longer session ends before"`
	Sessions int           `yaml:"lane-sessions" default:"393" want:"1 to 65536" help:"lanes: <number> of different sessions, which the lanes play in turn and repeat"`
	Products int           `yaml:"lane-products" want:"0 to 65536" help:"lanes: <number> of products; the sessions of a product have the same tools and system prompt. 0 = each session has its own"`
	// With "none", repeats of a session share all their blocks.
	CacheBust string `yaml:"lane-cache-bust" default:"first-turn" want:"first-turn, system or none" help:"lanes: where a mark makes each session unique: first-turn is behind tools and system prompt, system before them, none without a mark"`
	Seed      uint64
}

const (
	startLow, startHigh = .25, .75 // shares of a session's time between which a lane begins
	warmRequests        = 10       // of a lane, after the first one of each agent
	warmLead            = 10.      // s; within which the first ones begin
	fewestTurns         = 20       // of a session, unless the context ends it
	mostTurns           = 5000
	mostOutput          = 20_000 // tokens of a response; the longest recorded one has 18,200
	mostAtOnce          = 10     // sub-agents of one response
	longestPause        = 300.   // s
)

// agent has the distributions of an agent's requests, in tokens and seconds.
type agent struct {
	turns, output                lognormal
	prefix, first, result, pause quantiles
}

// shape has the distributions of a session. "Corpus" is cc-traces-weka-062126, which the scenario
// plays: its counts are in agentx-harness, its quantiles in public texts about it. "Recorded" are the
// 522 of 710 conversations of cc_weka_sessions with 20 or more turns, and the 63 sub-agents.
type shape struct {
	parent, child agent
	forks         float64   // share of sessions with sub-agents
	children      lognormal // sub-agents of such a session
	blocking      float64   // share of forks for which the parent waits at once
	// A response takes so long on the session's own clock, s and s per token: recorded.
	response, perToken float64
}

func sessionShape() shape {
	return shape{
		parent: agent{
			turns:  lognormal{65, 1.268},                                                    // corpus: median 65, p90 330, mean 144.5
			output: lognormal{616, 1.267},                                                   // corpus: median 616, mean 1374
			prefix: quantiles{4210, 11_750, 12_950, 14_960, 15_440, 15_900, 21_130, 22_010}, // recorded
			first:  quantiles{111, 1169, 3470, 5545, 69_720, 170_800, 466_000, 613_100},     // recorded
			result: quantiles{0, 0, 47, 273, 928, 2702, 14_140, 235_000},                    // recorded: growth of the prompt without the output
			// Corpus: median 4.9, p90 131.5, 4.5 % above 300, at which the harness ends a pause. Below the
			// median the shape is recorded; p75 lies between median and p90.
			pause: quantiles{0, 2.2, 2.7, 4.9, 38, 131.5, 300, 300},
		},
		child: agent{
			turns:  lognormal{16, .935},                                           // corpus: median 16, mean 24.8
			output: lognormal{303, 1.267},                                         // corpus: mean 677; the spread is that of the parent
			prefix: quantiles{8366, 8416, 8437, 8627, 8723, 9998, 10_080, 10_080}, // recorded
			first:  quantiles{167, 471, 1148, 1769, 3271, 3326, 9536, 9536},       // recorded
			result: quantiles{25, 246, 630, 2174, 5309, 12_780, 64_830, 119_800},  // recorded
			pause:  quantiles{1, 2, 3, 4, 6, 28, 75, 133},                         // recorded
		},
		forks: .445, children: lognormal{4, 1.33}, // corpus: median 4, mean 9.7
		blocking: 13. / 59, response: 2.96, perToken: .0152, // recorded
	}
}

// lognormal is a distribution of positive numbers with a long tail.
type lognormal struct{ median, sigma float64 }

func (l lognormal) draw(rng *rand.Rand) float64 {
	return l.median * math.Exp(l.sigma*rng.NormFloat64())
}

// quantiles is a distribution given by its 0th, 10th, 25th, 50th, 75th, 90th, 99th and 100th
// percentiles.
type quantiles [8]float64

// draw interpolates between the logarithms, of 1 more than the values since these may be 0.
func (q *quantiles) draw(rng *rand.Rand) float64 {
	at := [8]float64{0, .1, .25, .5, .75, .9, .99, 1}
	u, i := rng.Float64(), 1
	for u > at[i] {
		i++
	}
	part := (u - at[i-1]) / (at[i] - at[i-1])
	return math.Exp((1-part)*math.Log1p(q[i-1])+part*math.Log1p(q[i])) - 1
}

// Lanes makes the closed loop. The same config makes the same one.
func Lanes(c LaneConfig) (*Trace, error) {
	if err := bench.Complete(&c); err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	if c.Lanes == 0 {
		return nil, errors.New("replay: lanes is 0, want 1 to 4096")
	}
	g := &laneMaker{LaneConfig: c, shape: sessionShape(), trace: &Trace{
		Name: fmt.Sprintf("%d lanes", c.Lanes), BlockSize: MooncakeBlock, Gates: make([][]int32, 1), Measured: c.Duration,
	}}
	for lane := range c.Lanes {
		if err := g.lane(lane); err != nil {
			return nil, err
		}
	}
	// The first measured request of all lanes comes at once, and the others as long after it as
	// their pauses say.
	soonest := time.Duration(math.MaxInt64)
	for _, r := range g.starters {
		soonest = min(soonest, g.trace.Requests[r].Think)
	}
	for _, r := range g.starters {
		g.trace.Requests[r].Think -= soonest
	}
	return g.trace, nil
}

// laneMaker makes the trace of lanes.
type laneMaker struct {
	LaneConfig
	shape
	trace    *Trace
	plays    uint64  // sessions begun
	starters []int32 // measured requests that wait for nothing but the beginning of the measurement
}

// lane appends the sessions of a lane: enough of them even if each response took no time.
func (g *laneMaker) lane(lane int) error {
	t := g.trace
	parents := len(t.Users)
	t.Users = append(t.Users, User{})
	var before []int32 // last requests of the sub-agents of the session before
	for n, lasts := 0, 0.; lasts < g.Duration.Seconds(); n++ {
		s := g.session((lane + n*g.Lanes) % g.Sessions)
		p := playedSession{laneMaker: g, session: s, number: g.plays, user: parents, first: n == 0}
		g.plays++
		p.phases(lane)
		before = p.add(before)
		for i := range s.turns {
			if p.phase[i] == measured && (i == 0 || p.phase[i-1] == measured) {
				lasts += s.steps[i].pause + .001
			}
		}
		if len(t.Requests) > maxRequests {
			return fmt.Errorf("replay: %d lanes have more than %d requests in %v: lower lanes or lane-duration", g.Lanes, maxRequests, g.Duration)
		}
	}
	return nil
}

// session is the plan of a session: the turns of the parent, then those of each sub-agent in turn.
// Times are in seconds on the session's own clock.
type session struct {
	number, product int
	steps           []step
	turns           int    // of the parent
	prefix          [2]int // tokens of tools and system prompt: parent, sub-agents
}

// step is one request of a session.
type step struct {
	chain             int // 0 = the parent, others = a sub-agent
	input, output     int
	pause, start, end float64
	waits             []int // steps of other chains that end before it
}

// session makes the session with a number.
func (g *laneMaker) session(number int) *session {
	s := &session{number: number, product: number}
	if g.Products > 0 {
		s.product = number % g.Products
	}
	ofProduct := rand.New(rand.NewPCG(g.Seed, 0x70726f64<<32+uint64(s.product)))
	s.prefix = [2]int{int(g.parent.prefix.draw(ofProduct)), int(g.child.prefix.draw(ofProduct))}
	rng := rand.New(rand.NewPCG(g.Seed, 0x73657373<<32+uint64(number)))
	g.agent(s, rng, 0, &g.parent, fewestTurns)
	s.turns = len(s.steps)
	forks := make([]int, s.turns) // sub-agents that begin after a turn
	if rng.Float64() < g.forks {
		for left := int(min(100, max(1, g.children.draw(rng)))); left > 0; {
			// The most sub-agents at a time have a median of 3 in the corpus.
			n := min(left, 1+rng.IntN(5))
			at := rng.IntN(s.turns)
			forks[at] = min(mostAtOnce, forks[at]+n)
			left -= n
		}
	}
	g.schedule(s, rng, forks)
	return s
}

// agent appends the requests of an agent.
func (g *laneMaker) agent(s *session, rng *rand.Rand, chain int, a *agent, fewest int) {
	prefix := s.prefix[min(chain, 1)]
	input := min(prefix+1+int(a.first.draw(rng)), g.Context/2)
	for range max(fewest, int(min(mostTurns, a.turns.draw(rng)))) {
		output := int(min(mostOutput, 1+a.output.draw(rng)))
		if input+output > g.Context {
			return
		}
		s.steps = append(s.steps, step{chain: chain, input: input, output: output, pause: min(longestPause, a.pause.draw(rng))})
		input += output + int(a.result.draw(rng))
	}
}

// schedule gives the parent's turns their times, and makes the sub-agents that begin after them.
func (g *laneMaker) schedule(s *session, rng *rand.Rand, forks []int) {
	lasts := func(i int) float64 { return g.response + g.perToken*float64(s.steps[i].output) }
	var running []int // last steps of sub-agents that the parent has not waited for
	clock, chain, wait := 0., 0, 0.
	for i := range s.turns {
		p := &s.steps[i]
		if i == 0 {
			p.pause = 0
		}
		p.start = max(clock+p.pause, wait)
		p.pause = p.start - clock
		running = slices.DeleteFunc(running, func(last int) bool {
			ended := s.steps[last].end <= p.start
			if ended {
				p.waits = append(p.waits, last)
			}
			return ended
		})
		p.end = p.start + lasts(i)
		clock = p.end
		blocks := forks[i] > 0 && rng.Float64() < g.blocking
		for range forks[i] {
			chain++
			first := len(s.steps)
			g.agent(s, rng, chain, &g.child, 1)
			at := clock
			for j := first; j < len(s.steps); j++ {
				c := &s.steps[j]
				c.start = at + c.pause
				c.end = c.start + lasts(j)
				at = c.end
			}
			s.steps[first].waits = []int{i}
			running = append(running, len(s.steps)-1)
			if blocks {
				wait = max(wait, at)
			}
		}
	}
}

// phase says what a lane does with a step of its session.
type phase uint8

const (
	measured phase = iota
	past           // before the lane begins: no request
	primer         // the agent's last step before the lane begins
	warm           // one of the next steps
)

// playedSession is one time that a lane plays a session.
type playedSession struct {
	*laneMaker
	*session
	number uint64
	user   int     // that sends the measured requests of the lane's parents
	first  bool    // first session of the lane
	moment float64 // at which the lane begins in its first session
	phase  []phase // of the steps
}

// phases decides where a lane begins in its first session.
func (p *playedSession) phases(lane int) {
	p.phase = make([]phase, len(p.steps))
	if !p.first {
		return
	}
	rng := rand.New(rand.NewPCG(p.Seed, 0x6c616e65<<32+uint64(lane)))
	end := 0.
	for i := range p.steps {
		end = max(end, p.steps[i].start)
	}
	p.moment = end * (startLow + (startHigh-startLow)*rng.Float64())
	var next []int
	for i := range p.steps {
		if p.steps[i].start >= p.moment {
			next = append(next, i)
			continue
		}
		p.phase[i] = past
		if i+1 < len(p.steps) && p.steps[i+1].chain == p.steps[i].chain && p.steps[i+1].start >= p.moment {
			p.phase[i] = primer
		}
	}
	slices.SortStableFunc(next, func(a, b int) int { return cmp.Compare(p.steps[a].start, p.steps[b].start) })
	for _, i := range next[:min(warmRequests, len(next)-1)] {
		p.phase[i] = warm
	}
}

// add appends the requests of a session, of which the first waits for the sub-agents of the session
// before. It returns the last requests of the session's own sub-agents.
func (p *playedSession) add(before []int32) (ends []int32) {
	t := p.trace
	index := make([]int32, len(p.steps)) // requests of the steps
	opens := make([]bool, len(p.steps))  // first request of a user
	user := -1
	var blocks []int32
	for i := range p.steps {
		s := &p.steps[i]
		if i == 0 || s.chain != p.steps[i-1].chain {
			user, blocks = -1, nil
		}
		if p.phase[i] == past {
			continue
		}
		warming := p.phase[i] != measured
		switch {
		case s.chain == 0 && !warming:
			user = p.user
		case user < 0 || !warming && t.Requests[index[i-1]].Warm:
			user = len(t.Users)
			t.Users = append(t.Users, User{})
		}
		blocks = p.extend(blocks, s)
		index[i], opens[i] = int32(len(t.Requests)), len(t.Users[user].Requests) == 0
		t.Users[user].Requests = append(t.Users[user].Requests, index[i])
		r := Request{Think: seconds(s.pause), Session: p.number + 1, Input: s.input, Output: s.output, Blocks: slices.Clip(blocks)}
		if warming {
			r.Warm, r.Output, r.Think = true, 1, 0
			t.Gates[0] = append(t.Gates[0], index[i])
			if lead := p.moment - s.start; opens[i] {
				t.Users[user].Start = seconds(warmLead - max(0, min(lead, warmLead)))
			}
		}
		t.Requests = append(t.Requests, r)
		if s.chain > 0 && !warming && (i+1 == len(p.steps) || p.steps[i+1].chain != s.chain) {
			ends = append(ends, index[i])
		}
	}
	p.gates(index, opens, before)
	return ends
}

// gates puts the requests of a session behind those of other users that they wait for.
func (p *playedSession) gates(index []int32, opens []bool, before []int32) {
	t := p.trace
	var starters []int
	for i := range p.steps {
		ph := p.phase[i]
		if ph == past || ph == primer {
			continue
		}
		var behind []int32
		for _, w := range p.steps[i].waits {
			if p.phase[w] == ph {
				behind = append(behind, index[w])
			}
		}
		if i == 0 && !p.first {
			behind = before
		}
		switch {
		case len(behind) > 0:
			t.Gates = append(t.Gates, behind)
			t.Requests[index[i]].Gate = int32(len(t.Gates))
			if p.steps[i].chain == 0 && opens[i] {
				t.Requests[index[i]].Think = 0 // its pause counted from a response that was not measured
			}
		case ph == measured && opens[i]:
			t.Requests[index[i]].Gate = 1
			starters = append(starters, i)
		}
	}
	if len(starters) == 0 {
		return
	}
	// The lane's next request comes after its pause. The others keep their distance from it.
	soonest := slices.MinFunc(starters, func(a, b int) int { return cmp.Compare(p.steps[a].start, p.steps[b].start) })
	for _, i := range starters {
		t.Requests[index[i]].Think = seconds(p.steps[i].start - p.steps[soonest].start + p.steps[soonest].pause)
		p.starters = append(p.starters, index[i])
	}
}

// extend appends the blocks that a step fills beyond the agent's step before.
func (p *playedSession) extend(blocks []int32, s *step) []int32 {
	kind := min(s.chain, 1)
	shared := p.prefix[kind] / p.trace.BlockSize
	owner := uint64(p.session.number)
	if p.CacheBust != "none" {
		owner = 1<<32 + p.number
	}
	for n := len(blocks); n < s.input/p.trace.BlockSize; n++ {
		var id uint64
		switch {
		case n >= shared:
			id = blockID(1, owner, uint64(s.chain), uint64(n))
		case n == 0 && p.CacheBust == "system":
			id = blockID(2, owner, uint64(kind))
		default:
			id = blockID(3, uint64(p.product), uint64(kind), uint64(n))
		}
		parent := none
		if n > 0 {
			parent = blocks[n-1]
		}
		blocks = append(blocks, p.trace.blocks.number(parent, id))
	}
	return blocks
}

// blockID is the id of a block's content.
func blockID(parts ...uint64) (id uint64) {
	for _, v := range parts {
		id = indexer.NextSequenceHash(id, v)
	}
	return id
}
