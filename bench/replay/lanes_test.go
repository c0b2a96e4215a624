// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"context"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/router"
)

func someLanes(t *testing.T, c LaneConfig) *Trace {
	t.Helper()
	c.Lanes, c.Duration, c.Seed = cmp.Or(c.Lanes, 12), cmp.Or(c.Duration, 10*time.Minute), cmp.Or(c.Seed, 3)
	trace, err := Lanes(c)
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

func TestLanesRepeat(t *testing.T) {
	first, second, other := someLanes(t, LaneConfig{}), someLanes(t, LaneConfig{}), someLanes(t, LaneConfig{Seed: 4})
	if !reflect.DeepEqual(first, second) {
		t.Error("one seed makes two traces")
	}
	if reflect.DeepEqual(first.Requests, other.Requests) {
		t.Error("two seeds make one trace")
	}
}

// played is the course of a simulation of lanes, by request.
type played struct {
	*sim
	result  *Result
	decided []int64 // when the router chose, -1 = never
}

func playLanes(t *testing.T, trace *Trace, rule string) *played {
	t.Helper()
	p := &played{}
	s, err := newSim(t.Context(), Scenario{Trace: trace, Rule: bench.Must(ParseRule(rule)), KVBlocks: 5000, Seed: 1, decided: func(req int32, _ router.Decision) {
		p.decided[req] = p.now
	}})
	if err != nil {
		t.Fatal(err)
	}
	p.sim, p.decided = s, slices.Repeat([]int64{-1}, len(trace.Requests))
	if p.result, err = s.play(); err != nil {
		t.Fatal(err)
	}
	return p
}

// A request comes after the one before of its agent and its pause, and after all requests of its gate.
func TestLanesKeepTheOrderOfTheirRequests(t *testing.T) {
	trace := someLanes(t, LaneConfig{})
	p := playLanes(t, trace, Default)
	waited := 0
	for _, u := range trace.Users {
		for i, r := range u.Requests {
			if p.decided[r] < 0 {
				continue
			}
			if i > 0 {
				before := u.Requests[i-1]
				if end := p.states[before].end; end == 0 || p.decided[r] < end+trace.Requests[r].Think.Nanoseconds() {
					t.Fatalf("request %d comes at %d, its agent's last response ended at %d", r, p.decided[r], end)
				}
			}
			if g := trace.Requests[r].Gate; g > 0 {
				waited++
				for _, other := range trace.Gates[g-1] {
					if end := p.states[other].end; end == 0 || p.decided[r] < end {
						t.Fatalf("request %d comes at %d, request %d of its gate ended at %d", r, p.decided[r], other, end)
					}
				}
			}
		}
	}
	if waited < 20 {
		t.Errorf("%d requests have waited at gates", waited)
	}
}

// laneOf returns the user of the lane of each session, for lanes with more than one session.
func laneOf(trace *Trace) map[uint64]int {
	lanes := map[uint64]int{}
	for u := range trace.Users {
		r := trace.Users[u].Requests
		if len(r) == 0 || trace.Requests[r[0]].Session == trace.Requests[r[len(r)-1]].Session {
			continue
		}
		for _, n := range r {
			lanes[trace.Requests[n].Session] = u
		}
	}
	return lanes
}

// A lane plays one session at a time: the next one begins when all requests of the one before have
// ended, those of sub-agents too. Several requests of one session are under way at a time.
func TestLanesPlayOneSessionAtATime(t *testing.T) {
	trace := someLanes(t, LaneConfig{Duration: time.Hour, Context: 65_536})
	p := playLanes(t, trace, Default)
	lanes := laneOf(trace)
	begins, ends := map[uint64]int64{}, map[uint64]int64{}
	for i := range trace.Requests {
		if p.decided[i] < 0 {
			continue
		}
		s := trace.Requests[i].Session
		if b, ok := begins[s]; !ok || p.decided[i] < b {
			begins[s] = p.decided[i]
		}
		ends[s] = max(ends[s], p.states[i].end)
	}
	followed := 0
	for s, b := range begins {
		if lane, ok := lanes[s]; ok && lanes[s-1] == lane && begins[s-1] != 0 {
			followed++
			if b < ends[s-1] {
				t.Errorf("session %d begins at %d, the one before in its lane ends at %d", s, b, ends[s-1])
			}
		}
	}
	if followed < 5 {
		t.Errorf("%d sessions followed another one", followed)
	}
	atOnce := map[uint64][]int{}
	for i := range trace.Requests {
		if p.decided[i] >= 0 {
			atOnce[trace.Requests[i].Session] = append(atOnce[trace.Requests[i].Session], i)
		}
	}
	most := 0
	for _, requests := range atOnce {
		for _, a := range requests {
			n := 0
			for _, b := range requests {
				if p.decided[b] <= p.decided[a] && p.states[b].end > p.decided[a] {
					n++
				}
			}
			most = max(most, n)
		}
	}
	if most < 3 {
		t.Errorf("at most %d requests of a session were under way at a time, want 3 or more", most)
	}
}

// The measurement begins inside the sessions, when the requests that fill the caches have ended, and
// no request begins after its time. Each lane has work until then.
func TestLanesBeginInsideSessions(t *testing.T) {
	trace := someLanes(t, LaneConfig{Lanes: 40})
	p := playLanes(t, trace, Default)
	begin, warm := int64(0), 0
	depths := map[int]bool{}
	for i, r := range trace.Requests {
		if r.Warm {
			begin = max(begin, p.states[i].end)
			if warm++; r.Output != 1 {
				t.Fatalf("request %d fills the caches with %d tokens of output", i, r.Output)
			}
			depths[r.Input/20_000] = true
		}
	}
	if warm < 40*8 || len(depths) < 6 {
		t.Errorf("%d requests fill the caches, of %d lengths", warm, len(depths))
	}
	first, count := int64(math.MaxInt64), 0
	for i, r := range trace.Requests {
		if at := p.decided[i]; at >= 0 && !r.Warm {
			first = min(first, at)
			count++
			if at < begin || at > begin+trace.Measured.Nanoseconds() {
				t.Fatalf("request %d comes at %d, the measurement goes from %d on for %v", i, at, begin, trace.Measured)
			}
		}
	}
	if first != begin || p.result.Requests != count {
		t.Errorf("the first measured request comes at %d, want %d; %d of %d are in the result", first, begin, p.result.Requests, count)
	}
	for _, u := range laneOf(trace) {
		last := trace.Users[u].Requests[len(trace.Users[u].Requests)-1]
		if end := p.states[last].end; end > 0 && end < begin+trace.Measured.Nanoseconds() {
			t.Errorf("the lane of user %d has nothing left after %v", u, time.Duration(end-begin))
		}
	}
}

// shared returns the most leading blocks that two prompts share, of the pairs that same accepts. The
// prompts are the first ones of each agent in each session.
func shared(trace *Trace, same func(a, b *Request) bool) (most int) {
	var prompts []*Request
	for u := range trace.Users {
		session := uint64(0)
		for _, r := range trace.Users[u].Requests {
			if trace.Requests[r].Session != session {
				prompts, session = append(prompts, &trace.Requests[r]), trace.Requests[r].Session
			}
		}
	}
	for i, a := range prompts {
		for _, b := range prompts[i+1:] {
			if !same(a, b) {
				continue
			}
			n := 0
			for n < min(len(a.Blocks), len(b.Blocks)) && a.Blocks[n] == b.Blocks[n] {
				n++
			}
			most = max(most, n)
		}
	}
	return most
}

func TestLanesShareWhatTheMarkLeaves(t *testing.T) {
	other := func(a, b *Request) bool { return a.Session != b.Session }
	own := func(a, b *Request) bool { return a.Session == b.Session }
	const longest = 22_010 / MooncakeBlock // blocks of tools and system prompt
	for _, c := range []struct {
		config   LaneConfig
		low, top int // blocks that two sessions share
	}{
		{LaneConfig{}, 0, 0},                   // 12 lanes play different sessions, each with its own tools
		{LaneConfig{Products: 1}, 16, longest}, // one product
		{LaneConfig{Sessions: 2}, 16, longest}, // the mark keeps repeats apart behind the system prompt
		{LaneConfig{Sessions: 2, CacheBust: "system"}, 0, 0},
		{LaneConfig{Products: 1, CacheBust: "system"}, 0, 0},
		{LaneConfig{Sessions: 2, CacheBust: "none"}, 100, math.MaxInt}, // repeats share whole prompts
	} {
		trace := someLanes(t, c.config)
		if n := shared(trace, other); n < c.low || n > c.top {
			t.Errorf("%+v: two sessions share %d blocks, want %d to %d", c.config, n, c.low, c.top)
		}
	}
	// Sub-agents of one session share their tools and system prompt, which are not the parent's.
	trace := someLanes(t, LaneConfig{Context: 65536})
	children := func(a, b *Request) bool {
		return own(a, b) && !a.Warm && !b.Warm && a.Input < 20_000 && b.Input < 20_000
	}
	if n := shared(trace, children); n < 16 || n > 10_080/MooncakeBlock {
		t.Errorf("two sub-agents of a session share %d blocks, want 16 to %d", n, 10_080/MooncakeBlock)
	}
	// An agent's prompt begins with its prompt before.
	for _, u := range trace.Users {
		for i := 1; i < len(u.Requests); i++ {
			a, b := &trace.Requests[u.Requests[i-1]], &trace.Requests[u.Requests[i]]
			if a.Session == b.Session && (a.Input > b.Input || !slices.Equal(a.Blocks, b.Blocks[:len(a.Blocks)])) {
				t.Fatalf("request %d does not continue the prompt of request %d", u.Requests[i], u.Requests[i-1])
			}
			if len(b.Blocks) != b.Input/MooncakeBlock || b.Input+b.Output > 65536 {
				t.Fatalf("request %d has %d blocks, %d tokens and %d of output", u.Requests[i], len(b.Blocks), b.Input, b.Output)
			}
		}
	}
}

// The generated sessions are like those that the published counts describe.
func TestLanesHaveThePublishedShape(t *testing.T) {
	g := someLaneMaker()
	var inputs, outputs, childOutputs, forked, groups float64
	var n, children float64
	for i := range g.Sessions {
		s := g.session(i)
		chain := 0
		for j := range s.steps {
			st := &s.steps[j]
			n++
			inputs += float64(st.input)
			if chain = max(chain, st.chain); st.chain == 0 {
				outputs += float64(st.output)
			} else {
				children++
				childOutputs += float64(st.output)
			}
		}
		groups += float64(chain)
		if chain > 0 {
			forked++
		}
	}
	for _, c := range []struct {
		what            string
		got, want, away float64
	}{
		{"tokens of a prompt, corpus up to 256,000", inputs / n, 100_946, .15},
		{"tokens of a parent's output", outputs / (n - children), 1374, .15},
		{"tokens of a sub-agent's output", childOutputs / children, 677, .15},
		{"share of sessions with sub-agents", forked / 393, .445, .15},
		{"sub-agents", groups, 1697, .25},
		{"share of requests of sub-agents, corpus up to 256,000", children / n, 39_822. / 68_266, .2},
	} {
		if math.Abs(c.got/c.want-1) > c.away {
			t.Errorf("%s: %.3g, published %.3g", c.what, c.got, c.want)
		}
	}
}

func TestLanesNameTheWrongSetting(t *testing.T) {
	for want, c := range map[string]LaneConfig{
		"lanes is 0, want 1 to 4096":                                 {},
		`lanes is "4097", want 0 to 4096`:                            {Lanes: 4097},
		`lane-duration is "1ms", want 1s to 24h`:                     {Lanes: 1, Duration: time.Millisecond},
		`lane-context is "1000", want 65536 to 1048576`:              {Lanes: 1, Context: 1000},
		`lane-sessions is "-1", want 1 to 65536`:                     {Lanes: 1, Sessions: -1},
		`lane-products is "-1", want 0 to 65536`:                     {Lanes: 1, Products: -1},
		`lane-cache-bust is "salt", want first-turn, system or none`: {Lanes: 1, CacheBust: "salt"},
	} {
		if _, err := Lanes(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", c, err, want)
		}
	}
}

// The same simulation of lanes gives the same bytes.
func TestASimulationOfLanesRepeats(t *testing.T) {
	trace := someLanes(t, LaneConfig{})
	var texts []string
	for _, rule := range []string{Default, Default, "round-robin"} {
		r, err := Run(context.Background(), Scenario{Trace: trace, Rule: bench.Must(ParseRule(rule)), Seed: 1})
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(bench.Must(json.Marshal(r))))
	}
	if texts[0] != texts[1] || texts[0] == texts[2] {
		t.Errorf("%s", texts)
	}
}

// A lane begins at 25 to 75 % of its session's time. Each agent that is active then has sent its last
// request before that moment.
func TestLanesBeginWhereAgentXDoes(t *testing.T) {
	g := someLaneMaker()
	for lane := range 200 {
		p := playedSession{laneMaker: g, session: g.session(lane), first: true}
		p.phases(lane)
		end, primers, warmed := 0., map[int]int{}, 0
		for _, s := range p.steps {
			end = max(end, s.start)
		}
		if p.moment < .25*end || p.moment > .75*end {
			t.Errorf("lane %d begins at %v of %v", lane, p.moment, end)
		}
		for i, s := range p.steps {
			before := s.start < p.moment
			if before != (p.phase[i] == past || p.phase[i] == primer) {
				t.Fatalf("lane %d begins at %v, its step %d at %v is of the phase %d", lane, p.moment, i, s.start, p.phase[i])
			}
			if p.phase[i] == primer {
				primers[s.chain]++
			}
			if p.phase[i] == warm {
				warmed++
			}
			if i > 0 && s.chain == p.steps[i-1].chain && !before && p.steps[i-1].start < p.moment && primers[s.chain] != 1 {
				t.Errorf("lane %d: agent %d has sent %d requests before it goes on", lane, s.chain, primers[s.chain])
			}
		}
		if warmed > warmRequests {
			t.Errorf("lane %d: %d more requests fill the caches", lane, warmed)
		}
	}
}

// Each sub-agent begins after a turn of the parent. The first turn that begins after the sub-agent's
// end waits for it; without such a turn nobody does.
func TestParentsWaitForTheirSubAgents(t *testing.T) {
	g := someLaneMaker()
	waited, background, atOnce := 0, 0, 0
	for number := range 200 {
		s := g.session(number)
		for i := s.turns; i < len(s.steps); i++ {
			if i+1 < len(s.steps) && s.steps[i+1].chain == s.steps[i].chain {
				continue
			}
			first := i
			for first > s.turns && s.steps[first-1].chain == s.steps[i].chain {
				first--
			}
			from := s.steps[first].waits
			if len(from) != 1 || s.steps[from[0]].end > s.steps[first].start {
				t.Fatalf("session %d: sub-agent %d begins after the turns %v", number, s.steps[i].chain, from)
			}
			wants := slices.IndexFunc(s.steps[:s.turns], func(p step) bool { return p.start >= s.steps[i].end })
			waits := slices.IndexFunc(s.steps[:s.turns], func(p step) bool { return slices.Contains(p.waits, i) })
			if wants != waits {
				t.Fatalf("session %d: turn %d waits for sub-agent %d, want turn %d", number, waits, s.steps[i].chain, wants)
			}
			switch {
			case waits < 0:
				background++
			case waits == from[0]+1:
				atOnce++
			default:
				waited++
			}
		}
	}
	if waited < 50 || background < 20 || atOnce < 50 {
		t.Errorf("parents wait at once for %d sub-agents, later for %d, never for %d", atOnce, waited, background)
	}
}

func someLaneMaker() *laneMaker {
	return &laneMaker{LaneConfig: LaneConfig{Lanes: 1, Sessions: 393, Context: 256_000, Seed: 1}, shape: sessionShape(), trace: &Trace{BlockSize: MooncakeBlock}}
}
