// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

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
	Seed  uint64
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
	t := &Trace{Name: "generated", BlockSize: MooncakeBlock}
	rng := rand.New(rand.NewPCG(c.Seed, 0x67656e))
	around := func(mean int) int { return mean/2 + rng.IntN(mean+1) }
	// Conversations with turns to come; a request takes any of them.
	type conversation struct {
		session uint64
		input   int
		turns   int
		blocks  []int32
	}
	var open []*conversation
	at, unique, sessions := 0., uint64(1)<<40, uint64(0)
	for len(t.Requests) < c.Requests {
		at += rng.ExpFloat64() / c.Rate
		var o *conversation
		if c.Turns == 1 || len(open) < c.Prefixes {
			sessions++
			o = &conversation{session: sessions, input: c.PrefixTokens}
			prefix := rng.IntN(c.Prefixes)
			parent := none
			for b := range c.PrefixTokens / t.BlockSize {
				parent = t.blocks.number(parent, uint64(prefix)<<20|uint64(b))
				o.blocks = append(o.blocks, parent)
			}
			open = append(open, o)
		} else {
			o = open[rng.IntN(len(open))]
		}
		o.input = max(1, o.input+around(c.QuestionTokens))
		for len(o.blocks) < o.input/t.BlockSize {
			unique++
			parent := none
			if n := len(o.blocks); n > 0 {
				parent = o.blocks[n-1]
			}
			o.blocks = append(o.blocks, t.blocks.number(parent, unique))
		}
		if o.turns++; o.turns == c.Turns {
			i := slices.Index(open, o)
			open[i] = open[len(open)-1]
			open = open[:len(open)-1]
		}
		t.Requests = append(t.Requests, Request{
			At: seconds(at), Session: o.session, Input: o.input, Output: max(1, around(c.OutputTokens)),
			Blocks: slices.Clone(o.blocks),
		})
	}
	return t, nil
}
