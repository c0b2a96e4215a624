// SPDX-License-Identifier: Apache-2.0

// Package bench has the load generator for OpenAI endpoints, and the report of all figures
// of this project. README.md describes the method.
//
// Several [Load] calls may run at a time.
package bench

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// LoadConfig describes a load of multi-turn conversations. The zero value of each
// field means its default.
type LoadConfig struct {
	URL   string // of the endpoint, without path; required
	Model string // default "sim"

	// Arrivals are "poisson" (default) or "constant", of conversations.
	Arrivals string
	// Rate is the mean number of requests a second, over the time in which
	// conversations begin. Default 8.
	Rate float64
	// Conversations begin over time; each has Turns requests, the next one
	// TurnGap after the one before it on average. Defaults 40, 4, 2 s.
	Conversations int
	Turns         int
	TurnGap       time.Duration

	// SystemPrompts distinct ones of SystemBytes each are shared by the
	// conversations. Defaults 8 and 4,000.
	SystemPrompts int
	SystemBytes   int
	// UserBytes is the length of a user's message, ReplyBytes that of an
	// assistant's in the history. Defaults 400 and 200.
	UserBytes  int
	ReplyBytes int
	// MaxTokens are generated for each request. Default 32.
	MaxTokens int

	Seed uint64
	// MaxInFlight bounds the requests at a time. One that would go above it is
	// an error, "overload": it is not held back. Default 4,096.
	MaxInFlight int
	// Timeout of a request. Default 60 s.
	Timeout time.Duration
}

func (c LoadConfig) withDefaults() (LoadConfig, error) {
	c.Model = cmp.Or(c.Model, "sim")
	c.Arrivals = cmp.Or(c.Arrivals, "poisson")
	c.Rate = cmp.Or(c.Rate, 8)
	c.TurnGap = cmp.Or(c.TurnGap, 2*time.Second)
	c.Timeout = cmp.Or(c.Timeout, time.Minute)
	if c.Arrivals != "poisson" && c.Arrivals != "constant" {
		return c, fmt.Errorf("bench: Arrivals is %q, want poisson or constant", c.Arrivals)
	}
	if !(c.Rate > 0 && c.Rate <= 1e5) {
		return c, fmt.Errorf("bench: Rate is %v, want more than 0 and at most 100,000 requests a second", c.Rate)
	}
	for _, n := range []struct {
		name     string
		value    *int
		or, most int
	}{
		{"Conversations", &c.Conversations, 40, 1e6},
		{"Turns", &c.Turns, 4, 1e3},
		{"SystemPrompts", &c.SystemPrompts, 8, 1e6},
		{"SystemBytes", &c.SystemBytes, 4000, 1 << 22},
		{"UserBytes", &c.UserBytes, 400, 1 << 22},
		{"ReplyBytes", &c.ReplyBytes, 200, 1 << 22},
		{"MaxTokens", &c.MaxTokens, 32, 1e5},
		{"MaxInFlight", &c.MaxInFlight, 4096, 1e5},
	} {
		if *n.value = cmp.Or(*n.value, n.or); *n.value < 1 || *n.value > n.most {
			return c, fmt.Errorf("bench: %s is %d, want 1 to %d", n.name, *n.value, n.most)
		}
	}
	if c.TurnGap < 0 || c.Timeout < 0 {
		return c, fmt.Errorf("bench: TurnGap %v and Timeout %v must not be negative", c.TurnGap, c.Timeout)
	}
	return c, nil
}

// planned is one request of a load, with its due time. Its body is built when the request is
// sent, from texts that many requests share.
type planned struct {
	at           time.Duration // after the load's beginning
	conversation int
	turn         int
	messages     []message // of this turn, a prefix of the conversation
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// plan computes the whole load in advance, in the order in which requests are due. The
// assistant's replies in the history are generated, too: if a request waited for the response
// before it, a slow server would get fewer requests (coordinated omission). The same config
// gives the same plan.
func plan(c LoadConfig) []planned {
	rng := rand.New(rand.NewPCG(c.Seed, 0x6c6f6164))
	systems := make([]string, c.SystemPrompts)
	for i := range systems {
		systems[i] = prose(rng, c.SystemBytes)
	}
	gap := float64(c.Turns) / c.Rate // seconds between conversations
	var out []planned
	start := 0.0
	for i := range c.Conversations {
		if i > 0 {
			if c.Arrivals == "poisson" {
				start += rng.ExpFloat64() * gap
			} else {
				start += gap
			}
		}
		messages := []message{{"system", systems[rng.IntN(len(systems))]}}
		at := seconds(start)
		for turn := range c.Turns {
			if turn > 0 {
				messages = append(messages, message{"assistant", prose(rng, c.ReplyBytes)})
				// Half of the gap is certain, the other half varies.
				at += c.TurnGap/2 + time.Duration(rng.ExpFloat64()*float64(c.TurnGap)/2)
			}
			messages = append(messages, message{"user", prose(rng, c.UserBytes)})
			out = append(out, planned{at: at, conversation: i, turn: turn, messages: slices.Clip(messages)})
		}
	}
	slices.SortStableFunc(out, func(a, b planned) int { return cmp.Compare(a.at, b.at) })
	return out
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// body is the request's JSON.
func (p *planned) body(c *LoadConfig) ([]byte, error) {
	type options struct {
		IncludeUsage bool `json:"include_usage"`
	}
	return json.Marshal(struct {
		Model         string    `json:"model"`
		Messages      []message `json:"messages"`
		MaxTokens     int       `json:"max_tokens"`
		IgnoreEOS     bool      `json:"ignore_eos"` // vLLM: make exactly max_tokens
		Stream        bool      `json:"stream"`
		StreamOptions options   `json:"stream_options"`
	}{c.Model, p.messages, c.MaxTokens, true, true, options{true}})
}

//nolint:gochecknoglobals // a table
var vocabulary = strings.Fields(`the a worker router block cache prefix token request answer engine queue
load first last long short warm cold shared unique keeps finds sends counts waits follows from into over under
between because while until every other same next`)

// prose makes n bytes of words.
func prose(rng *rand.Rand, n int) string {
	var b strings.Builder
	for b.Len() < n {
		b.WriteString(vocabulary[rng.IntN(len(vocabulary))])
		b.WriteByte(' ')
	}
	return b.String()[:n]
}
