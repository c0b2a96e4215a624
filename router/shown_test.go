// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// claims checks the texts of decisions against the numbers of the decisions. It knows every sentence that
// may occur, and counts them.
type claims struct {
	t    *testing.T
	seen map[string]int
}

// claim is a decision with the candidates that its sentences name.
type claim struct {
	*router.Decision
	eligible []*router.Candidate
	chosen   *router.Candidate
	named    map[string]*router.Candidate
}

func claimOf(d *router.Decision) claim {
	c := claim{Decision: d, named: map[string]*router.Candidate{}}
	for i := range d.Candidates {
		one := &d.Candidates[i]
		name := cmp.Or(one.WorkerName, fmt.Sprint("worker ", one.Worker.ID))
		if one.Worker.DPRank > 0 {
			name += fmt.Sprint("/", one.Worker.DPRank)
		}
		if one.Group != "" {
			name = "group " + one.Group
		}
		c.named[name] = one
		if one.Excluded == "" {
			c.eligible = append(c.eligible, one)
		}
		if one.Worker == d.Worker {
			c.chosen = one
		}
	}
	return c
}

func (c *claim) isChosen(name string) bool { return c.chosen != nil && c.named[name] == c.chosen }

// compute is the number of tokens of the prompt that a worker would compute.
func (c *claim) compute(one *router.Candidate) int {
	if c.PromptTokens == 0 {
		return 0
	}
	return max(1, c.PromptTokens-8*one.OverlapBlocks)
}

func (c *claim) lowest() *router.Candidate {
	return slices.MinFunc(c.eligible, func(a, b *router.Candidate) int { return cmp.Compare(a.Cost, b.Cost) })
}

// shows reports whether a text is a number as sentences show it.
func shows(text string, x float64) bool {
	got, err := strconv.ParseFloat(text, 64)
	return err == nil && math.Abs(got-x) <= max(.0500001, 5e-4*math.Abs(x))
}

// costs4 reports whether a text is a cost with at most four significant digits, or a whole number.
func costs4(text string, x float64) bool {
	got, err := strconv.ParseFloat(text, 64)
	digits := len(strings.Trim(strings.ReplaceAll(strings.TrimLeft(strings.Split(text, "e")[0], "-0."), ".", ""), "0"))
	return err == nil && math.Abs(got-x) <= 5e-4*math.Abs(x) && (got == x || digits <= 4)
}

// compares reports whether the rest of a sentence has the cost of another worker, or the difference if it is too small
// to be seen in the costs. The other worker's cost is higher if sign is 1, lower if it is -1.
func (c *claim) compares(m []string, sign float64) bool {
	other := c.named[m[5]].Cost
	if m[4] != "" {
		return costs4(m[3], sign*(other-c.chosen.Cost)) && costs4(m[2], other)
	}
	return costs4(m[3], other) && sign*must(m[2]) < sign*must(m[3])
}

// perWorker is a part of the load as costs count it.
func perWorker(one *router.Candidate, sum int) float64 {
	return float64(sum) / float64(max(1, one.Members))
}

// compared is a sentence "… chosen … x … y … other".
func compared(value func(c *router.Candidate) float64) func(c *claim, m []string) bool {
	return func(c *claim, m []string) bool {
		other := c.named[m[4]]
		return c.isChosen(m[1]) && other != nil && other.Excluded == "" && m[2] != m[3] && shows(m[2], value(c.chosen)) &&
			shows(m[3], value(other))
	}
}

func fewest(c *claim, m []string, of func(one *router.Candidate) bool) bool {
	if !c.isChosen(m[1]) || !shows(m[2], perWorker(c.chosen, c.chosen.ActiveRequests)) {
		return false
	}
	return !slices.ContainsFunc(c.eligible, func(one *router.Candidate) bool {
		return of(one) && perWorker(one, one.ActiveRequests) < perWorker(c.chosen, c.chosen.ActiveRequests)
	})
}

func anyOf(*router.Candidate) bool { return true }

// grammar has every sentence and what makes it true. W stands for a worker, N for a number.
var grammar = map[string]func(c *claim, m []string) bool{
	`The request waited (\S+) for a worker that is not busy`: func(c *claim, m []string) bool {
		return m[1] == router.Rounded(c.QueueTime).String() && c.QueueTime > 0
	},
	`kvroute could not read the request, so it did not look for cached blocks`: func(c *claim, _ []string) bool {
		return c.Reason == router.ReasonUnread && c.PromptTokens == 0
	},
	`kvroute could not turn the prompt into tokens, so it did not look for cached blocks`: func(c *claim, _ []string) bool {
		return c.Reason == router.ReasonTokenizer && c.OverlapBlocks == 0
	},
	`The router that sent the request here named W`: func(c *claim, m []string) bool {
		return c.Reason == router.ReasonPreferred && c.isChosen(m[1])
	},
	`The session of the request is bound to W`: func(c *claim, m []string) bool {
		return c.Reason == router.ReasonSession && c.isChosen(m[1]) && len(c.eligible) == 1
	},
	`The request names W`: func(c *claim, m []string) bool {
		return c.Reason == router.ReasonPinned && c.isChosen(m[1]) && len(c.eligible) == 1
	},
	`The request names (\w+) and no rank`: func(c *claim, m []string) bool {
		same := func(one *router.Candidate) bool { return one.Worker.ID == c.Worker.ID }
		return c.Reason == router.ReasonPinned && m[1] == c.WorkerName && len(c.eligible) > 1 &&
			!slices.ContainsFunc(c.eligible, func(one *router.Candidate) bool { return !same(one) })
	},
	`W is the only worker that can take the request`: func(c *claim, m []string) bool {
		return c.isChosen(m[1]) && len(c.eligible) == 1
	},
	`The group was asked and named its worker (\w+)`: func(c *claim, m []string) bool {
		return c.Member != nil && m[1] == fmt.Sprint(c.Member.ID) && c.chosen.Probed
	},
	`(\w+) computes the prompt and W the output`: func(c *claim, m []string) bool {
		return c.Prefill != nil && c.NoLeg == "" && m[1] == c.Prefill.WorkerName && c.isChosen(m[2])
	},
	`(\w+) was to compute the prompt; now W computes it, because the prefill worker failed`: func(c *claim, m []string) bool {
		return c.NoLeg == router.NoLegFailed && m[1] == c.Prefill.WorkerName && c.isChosen(m[2])
	},
	`One worker computes the prompt and the output, because (.+)`: func(c *claim, m []string) bool {
		return c.Prefill == nil && m[1] == c.NoLeg.Text() && c.NoLeg != ""
	},
	`Mode round-robin gives each worker its turn: turn N is that of W, number N of N`: func(c *claim, m []string) bool {
		at := c.Turn % uint64(len(c.eligible))
		return c.Mode == router.RoundRobin && m[1] == fmt.Sprint(c.Turn) && c.isChosen(m[2]) && m[3] == fmt.Sprint(at+1) &&
			m[4] == fmt.Sprint(len(c.eligible)) && c.eligible[at] == c.chosen
	},
	`Mode random drew W`: func(c *claim, m []string) bool { return c.Mode == router.Random && c.isChosen(m[1]) },
	`Mode least-loaded chose W, which has N requests?: no other worker has fewer`: func(c *claim, m []string) bool {
		return c.Mode == router.LeastLoaded && fewest(c, m, anyOf)
	},
	`Mode power-of-two drew two workers and chose W, which has N requests?: the other one does not have fewer`: func(c *claim, m []string) bool {
		n := len(c.eligible)
		pair := int(c.Draw * float64(n*(n-1)))
		i, j := pair/(n-1), pair%(n-1)
		if j >= i {
			j++
		}
		return c.Mode == router.PowerOfTwo && fewest(c, m,
			func(one *router.Candidate) bool { return one == c.eligible[i] || one == c.eligible[j] })
	},
	`Mode device-aware-weighted chose W, which has N requests?: no other worker that computes on ([CG])PUs has fewer`: func(c *claim, m []string) bool {
		return c.Mode == router.DeviceAware && (m[3] == "C") == c.chosen.CPU &&
			fewest(c, m, func(one *router.Candidate) bool { return one.CPU == c.chosen.CPU })
	},
	`W has (?:(\d+) of (\d+) blocks? of the prompt: )?(\d+) tokens? to compute(?:, as on (\S.*)| against (\d+) on (\S.*))?`: func(c *claim, m []string) bool {
		least := slices.MinFunc(c.eligible, func(a, b *router.Candidate) int { return c.compute(a) - c.compute(b) })
		other := c.named[cmp.Or(m[5], m[7], m[1])]
		return c.isChosen(m[1]) && (m[3] == "" && c.PromptBlocks == 0 || m[3] == fmt.Sprint(c.PromptTokens/8) &&
			m[2] == fmt.Sprint(c.chosen.OverlapBlocks)) &&
			m[4] == fmt.Sprint(c.compute(c.chosen)) && other.Excluded == "" &&
			(m[5] == "" || c.compute(other) == c.compute(c.chosen)) &&
			(m[6] == "" || m[6] == fmt.Sprint(c.compute(other)) && m[6] != m[4]) &&
			// A worker with fewer tokens to compute is never kept back.
			(m[5]+m[6] == "" || c.compute(least) == c.compute(c.chosen) || c.compute(other) == c.compute(least))
	},
	`W has N blocks? more in host memory or on disk against N on W`: compared(func(c *router.Candidate) float64 {
		return float64(c.HostBlocks + c.DiskBlocks)
	}),
	`W has N tokens? of other prompts to compute first against N on W`: compared(func(c *router.Candidate) float64 {
		return perWorker(c, c.PendTokens)
	}),
	`The requests on W delay this one as much as the prefill of N tokens? would, against N on W`: compared(func(c *router.Candidate) float64 {
		return c.DecodeDelay
	}),
	`The requests on W hold N tokens? against N on W`: compared(func(c *router.Candidate) float64 {
		return perWorker(c, c.DecodeTokens+c.WaitingTokens)
	}),
	`W needs N blocks? for its requests and this one against N on W`: compared(func(c *router.Candidate) float64 {
		return perWorker(c, c.ActiveBlocks) + float64(c.AdditionalBlocks)
	}),
	`W needs N blocks? for this request against N on W`: compared(func(c *router.Candidate) float64 {
		return float64(c.AdditionalBlocks)
	}),
	`W has N blocks? of the prompt against N on W`: compared(func(c *router.Candidate) float64 {
		return float64(c.OverlapBlocks)
	}),
	`W has N requests? against N on W`: compared(func(c *router.Candidate) float64 {
		return perWorker(c, c.ActiveRequests)
	}),
	`W uses N % of its cache against N on W`: compared(func(c *router.Candidate) float64 {
		return 100 * c.KVUse
	}),
	`W computes at N % of the usual speed against N on W`: compared(func(c *router.Candidate) float64 {
		return 100 * cmp.Or(c.Speed, 1)
	}),
	`Preferred taints give W N points? against N on W`: compared(func(c *router.Candidate) float64 {
		return c.TaintWeight
	}),
	`N of the blocks on W (is|are) (still being computed there for another request, or )?not confirmed by its events yet`: func(c *claim, m []string) bool {
		one := c.named[m[2]]
		return one.Excluded == "" && m[1] == fmt.Sprint(one.PendingBlocks) && one.PendingBlocks <= one.OverlapBlocks &&
			(m[3] == "is") == (one.PendingBlocks == 1) && (m[4] != "") == (one.PendTokens > 0)
	},
	`The worker with the most blocks of the prompt has N requests?, and the first N tokens? are in use there`: func(c *claim, m []string) bool {
		return slices.ContainsFunc(c.eligible, func(one *router.Candidate) bool {
			return m[1] == fmt.Sprint(one.ActiveRequests) && m[2] == fmt.Sprint(c.ActivePrefix) &&
				c.ActivePrefix <= 8*one.OverlapBlocks
		})
	},
	`So a copy of these on W, which is idle, counts less than its computation`: func(c *claim, m []string) bool {
		return c.isChosen(m[1]) && c.chosen.ActiveRequests == 0 && 8*c.chosen.OverlapBlocks < c.ActivePrefix
	},
	`The engine of W computes at most N requests? at a time and has N`: func(c *claim, m []string) bool {
		one := c.named[m[1]]
		return m[2] == fmt.Sprint(one.MaxRequests) && shows(m[3], perWorker(one, one.ActiveRequests))
	},
	`The temperature of N drew W at random, with a chance of N %`: func(c *claim, m []string) bool {
		return m[1] == fmt.Sprint(c.Settings.Temperature) && c.isChosen(m[2]) &&
			math.Abs(must(m[3])-100*c.chosen.Probability) <= .005*100*c.chosen.Probability && c.chosen.Probability > 0
	},
	`A rule of the program chose W, at a cost of N`: func(c *claim, m []string) bool {
		return c.Policy == "" && c.isChosen(m[1]) && costs4(m[2], c.chosen.Cost)
	},
	`N workers have the lowest cost, N`: func(c *claim, m []string) bool {
		n := 0
		for _, one := range c.eligible {
			if math.Abs(one.Cost-c.lowest().Cost) <= 1e-9*math.Abs(one.Cost) {
				n++
			}
		}
		return m[1] == fmt.Sprint(n) && n > 1 && costs4(m[2], c.Cost) && costs4(m[2], c.lowest().Cost)
	},
	`Among these, fewer requests win, then fewer blocks in use, then a draw`: func(c *claim, _ []string) bool {
		return c.Policy != scorer.Weighted && !slices.ContainsFunc(c.eligible, func(one *router.Candidate) bool {
			requests := perWorker(one, one.ActiveRequests) - perWorker(c.chosen, c.chosen.ActiveRequests)
			blocks := perWorker(one, one.ActiveBlocks) - perWorker(c.chosen, c.chosen.ActiveBlocks)
			return one.Cost == c.chosen.Cost && (requests < 0 || requests == 0 && blocks < 0)
		})
	},
	`The first of them gets the request`: func(c *claim, _ []string) bool {
		first := slices.IndexFunc(c.eligible, func(one *router.Candidate) bool { return one.Cost == c.chosen.Cost })
		return c.Policy == scorer.Weighted && c.eligible[first] == c.chosen
	},
	`W has the lowest cost: N against N( more)? on W`: func(c *claim, m []string) bool {
		return c.isChosen(m[1]) && c.chosen.Cost <= c.lowest().Cost+1e-9*math.Abs(c.lowest().Cost) &&
			costs4(m[2], c.chosen.Cost) && c.compares(m, 1)
	},
	`W has a cost of N; the lowest is N( less)? on W`: func(c *claim, m []string) bool {
		free := c.Policy != "" && c.Settings.Temperature == 0 && c.Reason != router.ReasonPreferred
		return c.isChosen(m[1]) && costs4(m[2], c.chosen.Cost) && c.compares(m, -1) &&
			c.named[m[5]].Cost == c.lowest().Cost && !free
	},
	`N (workers?) (?:is|are) (.+)`: func(c *claim, m []string) bool {
		n := 0
		for i := range c.Candidates {
			if x := c.Candidates[i].Excluded; x != "" && x.Text() == m[3] {
				n++
			}
		}
		return m[1] == fmt.Sprint(n) && n > 0 && (m[2] == "worker") == (n == 1)
	},
}

func must(text string) float64 {
	x, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return x
}

var patterns = func() map[string]*regexp.Regexp {
	all := map[string]*regexp.Regexp{}
	for name := range grammar {
		text := regexp.MustCompile(`\bW\b`).ReplaceAllString(name, `(group \w+|(?:worker )?\w+(?:/\d+)?)`)
		all[name] = regexp.MustCompile(`^` + regexp.MustCompile(`\bN\b`).ReplaceAllString(text, `(-?\d[-+.e\d]*)`) + `$`)
	}
	return all
}()

// check checks all sentences of a decision and of its prefill leg. The decision has candidates.
func (cl *claims) check(d *router.Decision) {
	cl.t.Helper()
	text := d.Sentence()
	c := claimOf(d)
	fail := func(format string, args ...any) {
		cl.t.Helper()
		cl.t.Errorf("%s\n%s\nmode %s, reason %s, policy %s, %d candidates, %+v", fmt.Sprintf(format, args...), text,
			d.Mode, d.Reason, d.Policy, len(d.Candidates), d.Candidates)
	}
	said := map[string][]string{}
	for part := range strings.SplitSeq(strings.TrimSuffix(text, "."), ". ") {
		if strings.HasPrefix(part, "worker ") || strings.HasPrefix(part, "group ") {
			fail("this begins with a small letter: %s", part)
		}
		if strings.HasPrefix(part, "Worker ") || strings.HasPrefix(part, "Group ") {
			part = strings.ToLower(part[:1]) + part[1:]
		}
		n := 0
		for name, pattern := range patterns {
			m := pattern.FindStringSubmatch(part)
			if m == nil {
				continue
			}
			n++
			cl.seen[name]++
			said[name] = m
			if !grammar[name](&c, m) {
				fail("this is not true: %s", part)
			}
		}
		if n != 1 {
			fail("%d forms fit this sentence: %s", n, part)
		}
	}
	cl.seen["reason "+string(d.Reason)]++
	cl.seen["mode "+string(d.Mode)]++
	cl.seen["policy "+string(d.Policy)]++
	cl.complete(&c, said, fail)
	for i := range d.Candidates {
		one := &d.Candidates[i]
		verdict := d.Verdict(one)
		if strings.HasPrefix(verdict, "chosen") != (one == c.chosen) ||
			strings.HasPrefix(verdict, "excluded: "+one.Excluded.Text()) != (one.Excluded != "") ||
			strings.Contains(verdict, "(group") != (one.Group != "") {
			fail("the verdict of %v is %q", one.Worker, verdict)
		}
		cl.seen["verdict "+string(one.Excluded)]++
	}
	if settings := d.SettingsText(); (settings != "") != (d.Policy != "") ||
		!strings.HasPrefix(settings, strings.TrimSpace("cost "+string(d.Policy))) && d.Policy != "" {
		fail("the settings are %q", settings)
	}
	if d.Prefill != nil {
		cl.check(d.Prefill)
	}
}

// complete checks that the sentences say what decided.
func (cl *claims) complete(c *claim, said map[string][]string, fail func(string, ...any)) {
	need := func(name string, is bool) {
		cl.t.Helper()
		if is && said[name] == nil {
			fail("it does not say: %s", name)
		}
	}
	need(`The session of the request is bound to W`, c.Reason == router.ReasonSession)
	need(`The router that sent the request here named W`, c.Reason == router.ReasonPreferred)
	need(`kvroute could not turn the prompt into tokens, so it did not look for cached blocks`,
		c.Reason == router.ReasonTokenizer)
	need(`kvroute could not read the request, so it did not look for cached blocks`, c.Reason == router.ReasonUnread)
	need(`(\w+) computes the prompt and W the output`, c.Prefill != nil && c.NoLeg == "")
	free := c.Reason != router.ReasonSession && c.Reason != router.ReasonPreferred && c.Reason != router.ReasonPinned
	need(`W is the only worker that can take the request`, free && len(c.eligible) == 1)
	cost, rest := said[`W has the lowest cost: N against N( more)? on W`], said[`W has a cost of N; the lowest is N( less)? on W`]
	if c.Policy != "" && len(c.eligible) > 1 && cost == nil && rest == nil &&
		said[`N workers have the lowest cost, N`] == nil {
		fail("it says nothing of the costs")
	}
	for mode, name := range map[router.Mode]string{
		router.Random: `Mode random drew W`, router.RoundRobin: `Mode round-robin gives each worker its turn: turn N is that of W, number N of N`,
	} {
		need(name, c.Mode == mode && free && len(c.eligible) > 1 && c.Omitted == 0)
	}
	if cost == nil || c.Policy == "" {
		return
	}
	// What the cost counts and in which the two workers differ is named.
	other := c.named[cost[5]]
	waits := c.Policy == scorer.PredictedTTFT || c.Policy == scorer.Tokens && c.Settings.TrackPrefill
	differ := func(a, b float64) bool { return math.Abs(a-b) > .11 }
	pend := func(one *router.Candidate) float64 { return perWorker(one, one.PendTokens) }
	need(`W has N tokens? of other prompts to compute first against N on W`, waits && differ(pend(c.chosen), pend(other)))
	need(`The requests on W delay this one as much as the prefill of N tokens? would, against N on W`, waits &&
		differ(c.chosen.DecodeDelay, other.DecodeDelay))
	need(`W computes at N % of the usual speed against N on W`, waits &&
		differ(100*cmp.Or(c.chosen.Speed, 1), 100*cmp.Or(other.Speed, 1)))
}

// stage is a router with its fleet.
type stage struct {
	*watch
	r      *router.Router
	rng    *rand.Rand
	n      int      // requests so far
	active []string // requests in flight
}

// act plays random requests and events, and checks each decision.
func (s *stage) act(t *testing.T, cl *claims, steps int, vary func(req *router.Request)) {
	t.Helper()
	const letters = "abcdefgh"
	for range steps {
		text := []byte(letters[:s.rng.IntN(len(letters))])
		for i := range text {
			if s.rng.IntN(3) == 0 {
				text[i] = byte('i' + s.rng.IntN(8))
			}
		}
		tokens := append(prompt(string(text)), 1, 2, 3)
		switch s.rng.IntN(8) {
		case 0:
			s.advance(time.Duration(s.rng.IntN(4000)) * time.Millisecond)
		case 1:
			w := router.Worker{ID: 1 + s.rng.Uint64N(4)}
			if s.rng.IntN(3) > 0 {
				store(s.r, w, string(text))
			} else { // in host memory
				local := indexer.AppendLocalHashes(nil, prompt(string(text)), 8, indexer.Seed("", ""))
				ev := indexer.Event{Kind: indexer.Stored, Tier: indexer.HostPinned}
				for i, h := range indexer.AppendSequenceHashes(nil, local) {
					ev.Blocks = append(ev.Blocks, indexer.Block{External: h + 1, Local: local[i]})
				}
				s.r.ApplyEvent(w, ev)
			}
		case 2, 3:
			if len(s.active) > 0 {
				s.r.MarkPrefillCompleted(s.active[s.rng.IntN(len(s.active))])
			}
		case 4:
			if len(s.active) > 0 {
				at := s.rng.IntN(len(s.active))
				s.r.Free(s.active[at])
				s.active = slices.Delete(s.active, at, at+1)
			}
		default:
			s.n++
			req := router.Request{
				ID: fmt.Sprint("r", s.n), Owned: true, Model: "m", Tokens: tokens, Explain: true,
				ExpectedOutput: 100 * s.rng.IntN(20),
			}
			if vary != nil {
				vary(&req)
			}
			d, err := s.r.BestWorker(t.Context(), req)
			if err != nil {
				if !errors.Is(err, router.ErrNoWorkers) && !errors.Is(err, router.ErrAllBusy) &&
					!errors.Is(err, router.ErrPinnedBusy) {
					t.Fatal(err)
				}
				continue
			}
			s.active = append(s.active, req.ID)
			cl.check(&d)
			if kept, ok := s.r.Decision(req.ID); !ok || kept.Sentence() != d.Sentence() {
				t.Errorf("the kept decision says %q, the decision %q", kept.Sentence(), d.Sentence())
			}
		}
	}
}

// freeAll ends all requests.
func (s *stage) freeAll() {
	for _, id := range s.active {
		s.r.Free(id)
	}
	s.active = nil
}

// stageOf makes a router with a fleet of workers that differ in many ways.
func stageOf(t *testing.T, conf router.Config, seed uint64) *stage {
	t.Helper()
	s := &stage{watch: newWatch(), rng: rand.New(rand.NewPCG(seed, 34))}
	conf.Now = s.now
	s.r = newRouter(t, conf, 0)
	for id := range uint64(4) {
		w := worker(id + 1)
		w.TotalKVBlocks, w.CPU, w.Taints = 200, id == 3, []string{fmt.Sprint("t", id)}
		if id == 1 {
			w.PrefillThroughput, w.MaxNumSeqs = 10_000, 8
		} else {
			w.PrefillThroughput = 50_000
		}
		if id == 2 {
			w.DPSize = 2
		}
		if id == 3 {
			w.Name = ""
		}
		set(t, s.r, w)
	}
	return s
}

// Every sentence of every decision agrees with the numbers of the decision: in all modes and policies, with
// pins, sessions, temperatures, split models, router groups, excluded workers and large pools.
func TestSentencesAgreeWithDecisions(t *testing.T) {
	cl := &claims{t, map[string]int{}}
	random := func(s *stage) func(req *router.Request) {
		return func(req *router.Request) {
			switch s.rng.IntN(12) {
			case 0:
				req.Pinned = &router.Worker{ID: 1 + s.rng.Uint64N(4)}
			case 1:
				req.Pinned, req.AnyRank = &router.Worker{ID: 3}, true
			case 2:
				req.Preferred = &router.Worker{ID: 1 + s.rng.Uint64N(4)}
			case 3:
				req.Session = fmt.Sprint("s", s.rng.IntN(3))
			case 4:
				req.Allowed = []router.Worker{{ID: 1}, {ID: 2}}
			case 5:
				req.RequiredTaints = []string{fmt.Sprint("t", s.rng.IntN(4))}
			case 6:
				req.PreferredTaints = map[string]float64{"t1": 2, "t2": -1}
			case 7:
				req.Unread, req.Tokens = true, nil
			case 8:
				req.Tokens, req.Prompt = nil, router.Prompt{Messages: []byte(`[{"role":1}]`)}
			}
		}
	}
	card := cardOf(t, "m")
	sessions := router.SessionConfig{TTL: time.Minute}
	for i, mode := range router.Modes() {
		if mode == router.Direct {
			continue
		}
		s := stageOf(t, router.Config{
			Mode: mode, Sessions: sessions, Cards: []router.Card{card},
			AvoidFailing: time.Minute,
		}, uint64(i))
		s.act(t, cl, 400, random(s))
	}
	for _, policy := range scorer.Policies() {
		for i, temperature := range []float64{0, .4, 0} {
			scoring := scorer.Defaults()
			scoring.Policy, scoring.Temperature, scoring.TrackPrefill = policy, temperature, i < 2
			scoring.RequestWeight = float64(i)
			s := stageOf(t, router.Config{
				Scoring: scoring, Sessions: sessions, Cards: []router.Card{card},
				PredictTTL: 10 * time.Second,
			}, uint64(10*i))
			s.act(t, cl, 600, random(s))
		}
	}
	noDecode := scorer.Defaults()
	noDecode.DecodeWeight, noDecode.TrackPrefill = 0, false
	s := stageOf(t, router.Config{Scoring: noDecode}, 5)
	s.act(t, cl, 300, nil)
	last := func(_ *scorer.Request, in []scorer.Input, costs []float64) int {
		costs[0] = 1
		return len(in) - 1
	}
	s = stageOf(t, router.Config{Rule: last}, 6)
	s.act(t, cl, 100, nil)
	s = stageOf(t, router.Config{Mode: router.Direct}, 7)
	s.act(t, cl, 100, func(req *router.Request) { req.Pinned, req.AnyRank = &router.Worker{ID: 3}, true })
	excludedWorkers(t, cl)
	splitModels(t, cl)
	routerGroups(t, cl)
	largePools(t, cl)
	waiting(t, cl)

	for name := range grammar {
		if cl.seen[name] == 0 {
			t.Errorf("no decision says: %s", name)
		}
	}
	for _, reason := range []router.Reason{
		router.ReasonKV, router.ReasonLoad, router.ReasonRoundRobin, router.ReasonMode, router.ReasonPinned,
		router.ReasonPreferred, router.ReasonSession, router.ReasonUnread, router.ReasonTokenizer,
	} {
		if cl.seen["reason "+string(reason)] == 0 {
			t.Errorf("no decision has reason %s", reason)
		}
	}
	for _, mode := range router.Modes() {
		if cl.seen["mode "+string(mode)] == 0 {
			t.Errorf("no decision has mode %s", mode)
		}
	}
	for _, policy := range scorer.Policies() {
		if cl.seen["policy "+string(policy)] == 0 {
			t.Errorf("no decision has policy %s", policy)
		}
	}
	for _, x := range []router.Exclusion{
		"health", "failing", "stale", "draining", "role", "adapter", "pin", "not_allowed", "taint", "busy", "session",
	} {
		if cl.seen["verdict "+string(x)] == 0 || x.Text() == string(x) {
			t.Errorf("no candidate is excluded for %s (%s)", x, x.Text())
		}
	}
}

// excludedWorkers plays decisions where workers may not take requests.
func excludedWorkers(t *testing.T, cl *claims) {
	t.Helper()
	s := stageOf(t, router.Config{Thresholds: scorer.Thresholds{PrefillTokens: new(60)}, AvoidFailing: time.Minute}, 20)
	sick, leaving := worker(11), worker(12)
	sick.Health, leaving.Draining, sick.LoRA = router.Degraded, true, []string{"a"}
	leaving.LoRA = []string{"a"}
	set(t, s.r, sick)
	set(t, s.r, leaving)
	w := worker(13)
	w.LoRA = []string{"a"}
	set(t, s.r, w)
	s.act(t, cl, 200, nil)
	s.freeAll()
	d := decided(t, s.r, "fails", "abc")
	s.r.Served("fails", router.Response{Address: d.Address, Asked: 1, Status: 503, Local: true})
	s.act(t, cl, 50, func(req *router.Request) {
		if s.rng.IntN(2) == 0 {
			req.Model = "a"
		}
	})
}

// splitModels plays decisions with prefill legs, and without them for every reason.
func splitModels(t *testing.T, cl *claims) {
	t.Helper()
	for i, skip := range []router.SkipRule{router.SkipNever, router.SkipEither} {
		for _, policy := range scorer.Policies() {
			scoring := scorer.Defaults()
			scoring.Policy = policy
			s := &stage{watch: newWatch(), rng: rand.New(rand.NewPCG(uint64(i), 9))}
			s.r = splitOf(t, router.Config{
				Now: s.now, Scoring: scoring, Thresholds: scorer.Thresholds{PrefillTokens: new(100)},
				Split: router.SplitConfig{Skip: skip, SkipTokens: 20, SkipFraction: .5, DecodeCredit: float64(i)},
			}, router.Prefill, router.Prefill, router.Decode, router.Both, router.Decode, router.Aggregated)
			s.act(t, cl, 200, func(req *router.Request) {
				switch s.rng.IntN(8) {
				case 0:
					req.Split = router.SplitNever
				case 1:
					req.Unread, req.Tokens = true, nil
				}
			})
			s.freeAll()
			d := decided(t, s.r, "leg", "xyz", func(req *router.Request) { req.Explain = true })
			if d.Prefill != nil && s.r.PrefillFailed("leg") == nil {
				d, _ = s.r.Decision("leg")
				cl.check(&d)
			}
		}
	}
}

// routerGroups plays decisions among router groups, of which one was asked.
func routerGroups(t *testing.T, cl *claims) {
	t.Helper()
	s := &stage{watch: newWatch(), rng: rand.New(rand.NewPCG(3, 3))}
	asked := false
	probe := func(context.Context, router.Probe) []router.ProbeAnswer {
		if asked {
			return []router.ProbeAnswer{{
				Group: "g1", Worker: router.Worker{ID: 71}, OverlapBlocks: 1, PendTokens: 10,
				ActiveRequests: 1,
			}}
		}
		return nil
	}
	s.r = newRouter(t, router.Config{Now: s.now, PredictTTL: -1, Probe: probe}, 0)
	for id := range uint64(3) {
		set(t, s.r, groupOf(id+1))
	}
	for i := range 40 {
		asked = i%2 == 0
		for id := uint64(1); id <= 2; id++ {
			setSummary(t, s.r, id, router.Summary{
				Taken: s.now(), Interval: time.Hour, Healthy: 3, PendTokens: s.rng.IntN(100), ActiveRequests: s.rng.IntN(9),
				HeldTokens: s.rng.IntN(999),
			})
		}
		s.act(t, cl, 5, nil)
	}
}

// largePools plays decisions with more workers than are kept.
func largePools(t *testing.T, cl *claims) {
	t.Helper()
	for _, mode := range []router.Mode{router.KV, router.RoundRobin, router.LeastLoaded} {
		s := &stage{watch: newWatch(), rng: rand.New(rand.NewPCG(4, 4))}
		s.r = newRouter(t, router.Config{Now: s.now, Mode: mode}, 150)
		for i := range 60 {
			text := "abcd"[:s.rng.IntN(4)] + "q"
			store(s.r, router.Worker{ID: 1 + s.rng.Uint64N(150)}, text)
			id := fmt.Sprint(i)
			if _, err := s.r.BestWorker(t.Context(), router.Request{ID: id, Owned: true, Model: "m", Tokens: prompt(text)}); err != nil {
				t.Fatal(err)
			}
			if i%3 == 0 {
				s.r.MarkPrefillCompleted(id)
			}
			d, _ := s.r.Decision(id)
			if d.Omitted == 0 {
				t.Fatal("no worker is omitted")
			}
			if mode == router.KV {
				cl.check(&d)
			} else if !strings.Contains(d.Sentence(), "Mode "+string(mode)) || strings.Contains(d.Sentence(), " of 128") {
				t.Errorf("with workers omitted: %s", d.Sentence())
			}
		}
	}
}

// waiting plays a request that waited in the queue.
func waiting(t *testing.T, cl *claims) {
	t.Helper()
	r := queued(t, router.QueueConfig{}, 1)
	decided(t, r, "first", "abcdef")
	done, waits := make(chan router.Decision, 1), make(chan struct{})
	go func() {
		d, err := r.BestWorker(t.Context(), router.Request{
			ID: "second", Owned: true, Model: "m", Tokens: prompt("q"), Explain: true, Waiting: func(bool) { close(waits) },
		})
		if err != nil {
			t.Error(err)
		}
		done <- d
	}()
	<-waits
	r.Free("first")
	d := <-done
	cl.check(&d)
}

// Without candidates a sentence compares nothing, and what it says is the same.
func TestSentencesWithoutCandidates(t *testing.T) {
	for _, mode := range router.Modes() {
		s := stageOf(t, router.Config{Mode: mode}, 1)
		store(s.r, router.Worker{ID: 1}, "ab")
		req := router.Request{Model: "m", Tokens: prompt("abc")}
		if mode == router.Direct {
			req.Pinned = &router.Worker{ID: 1}
		}
		d, err := s.r.BestWorker(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		text, want := d.Sentence(), "Mode "+string(mode)
		switch mode {
		case router.KV:
			want = fmt.Sprintf("%d of 3 blocks of the prompt: %d tokens to compute. w1 has the lowest cost, ",
				d.OverlapBlocks, d.PrefillTokens)
		case router.Direct:
			want = "The request names w1."
		case router.Random, router.RoundRobin, router.LeastLoaded, router.PowerOfTwo, router.DeviceAware:
		}
		if !strings.Contains(text, want) || !strings.Contains(text, d.WorkerName) || strings.Contains(text, "against") {
			t.Errorf("%s: %s; want %s", mode, text, want)
		}
	}
}

// The settings that are named are those that change the costs of the policy, no more and no fewer.
func TestUsedSettingsChangeCosts(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, policy := range scorer.Policies() {
		for _, tracked := range []bool{true, false} {
			changes := map[string]bool{"router_temperature": true}
			base := scorer.Defaults()
			base.Policy, base.TrackPrefill = policy, tracked
			base.CreditDecay, base.RequestWeight, base.Attention = .3, .2, 1e-4
			for range 100 {
				r, in := inputs(rng, tracked)
				want := make([]float64, len(in))
				base.Costs(r, in, want)
				got := make([]float64, len(in))
				for name, field := range numbers(&base) {
					for _, value := range []float64{0, 2.5} {
						old := field.Float()
						if field.SetFloat(value); base.Validate() == nil {
							base.Costs(r, in, got)
							changes[name] = changes[name] || !slices.Equal(got, want)
						}
						field.SetFloat(old)
					}
				}
			}
			d := router.Decision{Policy: policy, Settings: &base}
			named := map[string]bool{}
			for _, part := range strings.Split(d.SettingsText(), ", ")[1:] {
				words := strings.Fields(part)
				if part == "prefill is not tracked" {
					continue
				}
				name := strings.Join(words[:len(words)-1], " ")
				named[name] = true
				if field, ok := maps.Collect(pairs(numbers(&base)))[name]; !ok || !costs4(words[len(words)-1], field) {
					t.Errorf("%s: %q, want %v", policy, part, field)
				}
			}
			maps.DeleteFunc(changes, func(_ string, is bool) bool { return !is })
			if !maps.Equal(changes, named) {
				t.Errorf("%s, tracked %v: the text names\n%v, the costs depend on\n%v", policy, tracked,
					slices.Sorted(maps.Keys(named)), slices.Sorted(maps.Keys(changes)))
			}
		}
	}
}

// numbers returns the numeric fields of settings by their names in texts.
func numbers(s *scorer.Settings) map[string]reflect.Value {
	all := map[string]reflect.Value{}
	v := reflect.ValueOf(s).Elem()
	for field, value := range v.Fields() {
		switch value.Kind() {
		case reflect.Float64:
			all[field.Tag.Get("json")] = value
		case reflect.Struct:
			for inner, number := range value.Fields() {
				all["engine "+inner.Tag.Get("json")] = number
			}
		default:
		}
	}
	return all
}

func pairs(fields map[string]reflect.Value) func(func(string, float64) bool) {
	return func(yield func(string, float64) bool) {
		for name, field := range fields {
			if !yield(name, field.Float()) {
				return
			}
		}
	}
}

// inputs returns random inputs of costs.
func inputs(rng *rand.Rand, tracked bool) (*scorer.Request, []scorer.Input) {
	r := &scorer.Request{
		PromptTokens: 100 + rng.IntN(20_000), BlockSize: 16, OutputTokens: 500,
		PrefillUntracked: !tracked, ActivePrefix: 64, Sharers: 2,
	}
	in := make([]scorer.Input, 3)
	for i := range in {
		in[i] = scorer.Input{
			OverlapBlocks: rng.IntN(6), HostBlocks: rng.IntN(3), DiskBlocks: rng.IntN(3), PendTokens: rng.IntN(5000),
			ActiveRequests: rng.IntN(9), WaitingRequests: rng.IntN(3),
			WaitingTokens: rng.IntN(5000), DecodeTokens: rng.IntN(9000), ActiveBlocks: rng.IntN(300),
			AdditionalBlocks: rng.IntN(9), KVUse: rng.Float64(), DecodeOnly: rng.IntN(2) == 0,
			Speed: .5 + rng.Float64(),
		}
	}
	return r, in
}

// The states of events that doctor reports are those that the page marks: both have this answer.
func TestEventsState(t *testing.T) {
	r := newRouter(t, router.Config{}, 0)
	none := newRouter(t, router.Config{NoEvents: true}, 0)
	for _, c := range []struct {
		state router.WorkerState
		level router.EventsLevel
		says  string
	}{
		{router.WorkerState{KVEvents: "ok"}, router.EventsOK, "completely"},
		{router.WorkerState{KVEvents: "partial"}, router.EventsFault, "first events are missing"},
		{router.WorkerState{KVEvents: "suspect"}, router.EventsFault, "lost"},
		{router.WorkerState{KVEvents: "block_size_mismatch"}, router.EventsFault, "block size"},
		{router.WorkerState{KVEvents: "none", Transport: "none"}, router.EventsOff, "predicts"},
		{router.WorkerState{KVEvents: "summary", Group: "g"}, router.EventsOK, "summaries"},
		{router.WorkerState{KVEvents: "none", Group: "g"}, router.EventsOff, "no summary"},
		{router.WorkerState{KVEvents: "none", Transport: "zmq"}, router.EventsFault, "no event has come"},
		{router.WorkerState{KVEvents: "none", Transport: "zmq", CachedBlocks: 3}, router.EventsFault, "not connected"},
		{router.WorkerState{KVEvents: "none", NeverHeard: true}, router.EventsFault, "no event has come"},
		{router.WorkerState{KVEvents: "none", Transport: "nats", BlockSize: 16}, router.EventsFault, "no event has come"},
		{
			router.WorkerState{KVEvents: "none", Transport: "nats", BlockSize: 16, CachedBlocks: 3},
			router.EventsOff,
			"predicts",
		},
	} {
		if c.state.Health = "healthy"; c.state.KVEvents == "none" {
			sick := c.state
			sick.Health = "unhealthy" // that is the fault
			if level, _ := r.EventsState(&sick); level != router.EventsOff {
				t.Errorf("%+v: %s", sick, level)
			}
		}
		if level, text := r.EventsState(&c.state); level != c.level || !strings.Contains(text, c.says) {
			t.Errorf("%+v: %s, %s; want %s, %s", c.state, level, text, c.level, c.says)
		}
		if level, _ := none.EventsState(&c.state); level == router.EventsFault && c.state.KVEvents == "none" {
			t.Errorf("%+v is a fault of a fleet without events", c.state)
		}
	}
}

// The texts of a first token say how it was noticed.
func TestFirstTokenText(t *testing.T) {
	for by, want := range map[router.Sign]string{
		"": "", router.SignTold: "caller", router.SignObserver: "seen in the response", router.SignHeaders: "headers",
		router.SignOrder: "a later request", router.SignRate: "rate", router.SignEnd: "at the latest",
	} {
		d := router.Decision{FirstTokenBy: by, FirstToken: time.Unix(1, 0)}
		if got := d.FirstTokenText(); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("%s: %q, want %q", by, got, want)
		}
	}
	d := router.Decision{FirstTokenBy: router.SignEnd}
	if got := d.FirstTokenText(); !strings.HasPrefix(got, "not seen") {
		t.Errorf("a first token that was not seen: %q", got)
	}
}

// Figures for people have at most four significant digits, and whole numbers all of theirs.
func TestFigures(t *testing.T) {
	for x, want := range map[float64]string{
		0: "0", math.Copysign(0, -1): "0", 12345: "12345", -7: "-7", 1e6: "1000000", .10791666666666666: "0.1079", 2520.7938: "2521", 123456.7: "123500", 6e-05: "6e-05", -.0014507772020725387: "-0.001451",
	} {
		if got := router.Figure(x); got != want {
			t.Errorf("%v is %q, want %q", x, got, want)
		}
	}
	for d, want := range map[time.Duration]string{0: "0s", 9999: "9.999µs", 123456: "123.5µs", 84123456: "84.12ms", 61234567890: "1m1.23s", -1234567: "-1.235ms"} {
		if got := router.Rounded(d).String(); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}

// testdata/sentences.txt has the sentences of a dozen decisions, for a reader. REWRITE=1 writes it.
func TestGoldenSentences(t *testing.T) {
	var got strings.Builder
	got.WriteString("# The sentences of a dozen decisions. REWRITE=1 go test ./router -run TestGoldenSentences writes them.\n")
	for _, g := range goldenDecisions(t) {
		got.WriteString("\n" + g.title + "\n" + g.d.Sentence() + "\n")
		if g.d.Prefill != nil {
			got.WriteString("prefill leg: " + g.d.Prefill.Sentence() + "\n")
		}
	}
	const file = "testdata/sentences.txt"
	if os.Getenv("REWRITE") != "" {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("%s has\n%s\ngot\n%s", file, want, got.String())
	}
}

type golden struct {
	title string
	d     router.Decision
}

// goldenDecisions makes the decisions of the golden file.
func goldenDecisions(t *testing.T) (all []golden) {
	t.Helper()
	gpus := func(conf router.Config, n int) *router.Router {
		r := newRouter(t, conf, 0)
		for i := range n {
			w := worker(uint64(i + 1))
			w.Name = fmt.Sprint("gpu-", i+1)
			set(t, r, w)
		}
		return r
	}
	explained := func(req *router.Request) { req.Explain = true }
	show := func(title string, r *router.Router, letters string, more ...func(*router.Request)) {
		t.Helper()
		all = append(all, golden{title, decided(t, r, fmt.Sprint("g", len(all)), letters, append(more, explained)...)})
	}
	pinnedTo := func(id uint64) func(*router.Request) {
		return func(req *router.Request) { req.Pinned = &router.Worker{ID: id} }
	}

	r := gpus(router.Config{}, 2)
	store(r, router.Worker{ID: 2}, "abc")
	show("A worker has most of the prompt:", r, "abcd")

	r = gpus(router.Config{}, 3)
	show("Nobody has anything:", r, "abcd")

	r = gpus(router.Config{}, 2)
	store(r, router.Worker{ID: 2}, "abc")
	for i := range 3 {
		decided(t, r, fmt.Sprint("busy", i), "pqrstuvw", pinnedTo(2))
	}
	show("The worker with the blocks is busy:", r, "abcd")

	r = gpus(router.Config{}, 2)
	for i := range 4 {
		decided(t, r, fmt.Sprint("decodes", i), strings.Repeat("pqrstuvw", 20), pinnedTo(1),
			func(req *router.Request) { req.ExpectedOutput = 1000 })
		r.MarkPrefillCompleted(fmt.Sprint("decodes", i))
	}
	show("Requests decode on the other worker:", r, "abcd", func(req *router.Request) { req.ExpectedOutput = 1000 })

	r = gpus(router.Config{PredictTTL: 10 * time.Second}, 2)
	decided(t, r, "copy", "abcdefgh", pinnedTo(1))
	show("Another request is computing the prompt:", r, "abcdefgh")

	s := scorer.Defaults()
	s.Temperature = .5
	r = gpus(router.Config{Scoring: s}, 2)
	store(r, router.Worker{ID: 2}, "abc")
	show("A temperature draws:", r, "abcd")

	show("The request names its worker:", gpus(router.Config{}, 2), "abcd", pinnedTo(2))

	w := newWatch()
	r = gpus(router.Config{Sessions: router.SessionConfig{TTL: time.Minute}, Now: w.now}, 2)
	session := func(req *router.Request) { req.Session = "s" }
	first := decided(t, r, "first", "abcd", session)
	store(r, first.Worker, "abcd")
	r.MarkPrefillCompleted(first.ID)
	show("A session continues:", r, "abcde", session)

	show("Mode round-robin:", gpus(router.Config{Mode: router.RoundRobin}, 3), "abcd")
	show("Mode least-loaded:", gpus(router.Config{Mode: router.LeastLoaded}, 3), "abcd")

	r = gpus(router.Config{Thresholds: scorer.Thresholds{PrefillTokens: new(20)}}, 3)
	decided(t, r, "busy", "pqrs", pinnedTo(1))
	leaving := worker(3)
	leaving.Name, leaving.Draining = "gpu-3", true
	set(t, r, leaving)
	show("Only one worker is left:", r, "abcd")

	show("A split model:", splitOf(t, router.Config{}, router.Prefill, router.Prefill, router.Decode, router.Decode),
		"abcd")

	unread := func(req *router.Request) { req.Unread, req.Tokens = true, nil }
	show("The request could not be read:", gpus(router.Config{}, 2), "", unread)

	r = newRouter(t, router.Config{Now: w.now}, 0)
	for id := range uint64(2) {
		set(t, r, groupOf(id+1))
		setSummary(t, r, id+1, router.Summary{Taken: w.now(), Healthy: 4, PendTokens: 4000 * int(id), ActiveRequests: 2})
	}
	show("Router groups:", r, "abcd")
	return all
}
