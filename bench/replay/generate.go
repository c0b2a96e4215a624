// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
)

// GenerateConfig describes an open loop of made-up requests: shared prefixes, each
// with questions of their own. The zero value of each field means its default.
type GenerateConfig struct {
	Requests int     // default 4,000
	Rate     float64 // requests a second, as a Poisson process; default 10
	Prefixes int     // distinct ones, equally likely; default 150
	// Lengths in tokens: of a prefix, 6,000, of a question, 1,200, and of the
	// output, 1,000. Questions and outputs vary by up to half of it. One of the
	// first two may be [NoTokens].
	PrefixTokens   int
	QuestionTokens int
	OutputTokens   int
	// Turns is the number of requests of a conversation, each of which repeats
	// the one before and adds a question. Default 1.
	Turns int
	Seed  uint64
}

// NoTokens is a length of 0, which stands for the default.
const NoTokens = -1

func (c GenerateConfig) withDefaults() (GenerateConfig, error) {
	for _, n := range []struct {
		name  string
		value *int
		or    int
		most  int
	}{
		{"requests", &c.Requests, 4000, maxRequests},
		{"prefixes", &c.Prefixes, 150, maxRequests},
		{"prefix tokens", &c.PrefixTokens, 6000, 1 << 20},
		{"question tokens", &c.QuestionTokens, 1200, 1 << 20},
		{"output tokens", &c.OutputTokens, 1000, 1 << 20},
		{"turns", &c.Turns, 1, 1000},
	} {
		if *n.value == 0 {
			*n.value = n.or
		}
		if none := *n.value == NoTokens && (n.value == &c.PrefixTokens || n.value == &c.QuestionTokens); none {
			*n.value = 0
			continue
		}
		if *n.value < 1 || *n.value > n.most {
			return c, fmt.Errorf("replay: %s is %d, want 1 to %d", n.name, *n.value, n.most)
		}
	}
	if c.PrefixTokens+c.QuestionTokens == 0 {
		return c, errors.New("replay: prompts without prefix and question")
	}
	if c.Rate == 0 {
		c.Rate = 10
	}
	if !(c.Rate > 0 && c.Rate <= 1e6) {
		return c, fmt.Errorf("replay: rate is %v, want more than 0 and at most 1,000,000 requests a second", c.Rate)
	}
	return c, nil
}

// Generate makes requests. The same config makes the same ones.
func Generate(c GenerateConfig) (*Trace, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
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
