// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// GenerateConfig describes an open loop of made-up requests: shared prefixes, each with
// questions of their own. A setting that is 0 has its default.
type GenerateConfig struct {
	Requests int     `yaml:"requests" default:"4000" want:"1 to 16777216" help:"<number> of requests made up, or taken from conversations"`
	Rate     float64 `yaml:"rate" default:"10" want:"more than 0, at most 1e6" help:"made up: <requests> a second, as a Poisson process"`
	Prefixes int     `yaml:"prefixes" default:"150" want:"1 to 16777216" help:"made up: <number> of shared prefixes"`
	// Questions and outputs vary by up to half of their mean.
	PrefixTokens   int `yaml:"prefix-tokens" default:"6000" want:"0 to 1048576" help:"made up: <tokens> of a prefix"`
	QuestionTokens int `yaml:"question-tokens" default:"1200" want:"0 to 1048576" help:"made up: mean <tokens> of a question"`
	OutputTokens   int `yaml:"output-tokens" default:"1000" want:"1 to 1048576" help:"made up: mean <tokens> of an output"`
	// Each request of a conversation repeats the one before and adds a question.
	Turns int `yaml:"turns" default:"1" want:"1 to 1000" help:"made up: <requests> of a conversation"`
	// A burst is a number of requests with an equal prompt, such as the samples of a best-of-n request.
	// Each comes at a random time of BurstApart. Rate counts requests, so bursts are Burst times as rare.
	Burst      int           `yaml:"burst" default:"1" want:"1 to 100000" help:"made up: <requests> with an equal prompt that come together"`
	BurstApart time.Duration `yaml:"burst-apart" want:"0s to 1h" help:"made up: <time> within which the requests of a burst come"`
	// Instead of the prompt, the requests of a burst share only the prefix. Not with Turns.
	BurstQuestions bool `yaml:"burst-questions" help:"made up: the requests of a burst have the same prefix, and questions of their own"`
	Seed           uint64
	BlockSize      int // tokens in a block; 0 = MooncakeBlock
}

// Generate makes requests. The same config makes the same ones.
func Generate(c GenerateConfig) (*Trace, error) {
	if err := bench.Complete(&c); err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	return c.generate()
}

// generate is [Generate] without defaults: 0 tokens are no tokens.
func (c *GenerateConfig) generate() (*Trace, error) {
	if c.PrefixTokens+c.QuestionTokens == 0 {
		return nil, errors.New("prefix-tokens and question-tokens are 0, want one of them above 0")
	}
	if c.BurstQuestions && (c.Burst == 1 || c.Turns > 1) {
		return nil, fmt.Errorf("burst-questions needs a burst above 1 and turns of 1; they are %d and %d", c.Burst, c.Turns)
	}
	g := &generator{GenerateConfig: c, rng: rand.New(rand.NewPCG(c.Seed, 0x67656e)), trace: &Trace{Name: "generated", BlockSize: cmp.Or(c.BlockSize, MooncakeBlock)}}
	at := 0.
	for len(g.trace.Requests) < c.Requests {
		at += g.rng.ExpFloat64() / c.Rate * float64(c.Burst)
		o := g.ask()
		for i := range min(c.Burst, c.Requests-len(g.trace.Requests)) {
			due := at
			if c.BurstApart > 0 {
				due += g.rng.Float64() * c.BurstApart.Seconds()
			}
			if i > 0 && c.BurstQuestions {
				o = g.begin(o.prefix)
				g.question(o)
			}
			g.trace.Requests = append(g.trace.Requests, Request{
				At: seconds(due), Session: o.session, Input: o.input, Output: max(1, g.around(c.OutputTokens)),
				Blocks: slices.Clone(o.blocks),
			})
		}
	}
	slices.SortStableFunc(g.trace.Requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	return g.trace, nil
}

// generator makes up the prompts.
type generator struct {
	*GenerateConfig
	rng              *rand.Rand
	trace            *Trace
	open             []*madeUp // conversations with turns to come; a request takes any of them
	unique, sessions uint64
}

// madeUp is a conversation.
type madeUp struct {
	session uint64
	prefix  int
	input   int
	turns   int
	blocks  []int32
}

func (g *generator) around(mean int) int { return mean/2 + g.rng.IntN(mean+1) }

// begin begins a conversation.
func (g *generator) begin(prefix int) *madeUp {
	g.sessions++
	o := &madeUp{session: g.sessions, prefix: prefix, input: g.PrefixTokens}
	parent := none
	for b := range g.PrefixTokens / g.trace.BlockSize {
		parent = g.trace.blocks.number(parent, uint64(prefix)<<20|uint64(b))
		o.blocks = append(o.blocks, parent)
	}
	return o
}

// ask returns a new conversation, or one with turns to come, with the next question.
func (g *generator) ask() (o *madeUp) {
	if g.Turns == 1 || len(g.open) < g.Prefixes {
		o = g.begin(g.rng.IntN(g.Prefixes))
		g.open = append(g.open, o)
	} else {
		o = g.open[g.rng.IntN(len(g.open))]
	}
	g.question(o)
	if o.turns++; o.turns == g.Turns {
		i := slices.Index(g.open, o)
		g.open[i] = g.open[len(g.open)-1]
		g.open = g.open[:len(g.open)-1]
	}
	return o
}

// question adds a question to a conversation.
func (g *generator) question(o *madeUp) {
	o.input = max(1, o.input+g.around(g.QuestionTokens))
	for len(o.blocks) < o.input/g.trace.BlockSize {
		g.unique++
		parent := none
		if n := len(o.blocks); n > 0 {
			parent = o.blocks[n-1]
		}
		o.blocks = append(o.blocks, g.trace.blocks.number(parent, 1<<40+g.unique))
	}
}
