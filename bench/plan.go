// SPDX-License-Identifier: Apache-2.0

// Package bench has the load generator for OpenAI endpoints, and the report of all figures
// of this project. README.md describes the method.
//
// Several [Load] calls may run at a time.
package bench

import (
	"cmp"
	"encoding/json"
	"flag"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/settings"
)

// LoadConfig describes a load of multi-turn conversations. A setting that is 0 has its default.
type LoadConfig struct {
	URL   string // of the endpoint, without path; required
	Model string `yaml:"model" default:"sim" help:"<name> of the model"`

	// Conversations arrive, each with a number of turns. Rate counts requests, over the time in
	// which conversations begin.
	Arrivals      string        `yaml:"arrivals" default:"poisson" want:"poisson or constant" help:"poisson or constant: how conversations begin"`
	Rate          float64       `yaml:"rate" default:"8" want:"more than 0, at most 1e5" help:"mean <requests> a second"`
	Conversations int           `yaml:"conversations" default:"40" want:"1 to 1e6" help:"<number> of conversations"`
	Turns         int           `yaml:"turns" default:"4" want:"1 to 1e3" help:"<requests> of a conversation"`
	TurnGap       time.Duration `yaml:"turn-gap" default:"2s" want:"0s or more" help:"mean <time> between two turns"`

	SystemPrompts int `yaml:"system-prompts" default:"8" want:"1 to 1e6" help:"<number> of system prompts that conversations share"`
	SystemBytes   int `yaml:"system-bytes" default:"4000" want:"1 to 4194304" help:"length of each system prompt in <bytes>"`
	UserBytes     int `yaml:"user-bytes" default:"400" want:"1 to 4194304" help:"length of a user's message in <bytes>"`
	ReplyBytes    int `yaml:"reply-bytes" default:"200" want:"1 to 4194304" help:"length of an earlier reply in <bytes>"`
	MaxTokens     int `yaml:"max-tokens" default:"32" want:"1 to 1e5" help:"<tokens> to generate for a request"`

	Seed uint64 `yaml:"seed" help:"<number>; the same seed gives the same requests at the same times"`
	// A request above MaxInFlight has the error "overload"; the load generator never delays it.
	MaxInFlight int           `yaml:"max-in-flight" default:"4096" want:"1 to 1e5" help:"largest <number> of requests at a time; one more is an error"`
	Timeout     time.Duration `yaml:"timeout" default:"1m" want:"0s or more" help:"longest <time> of a request"`
}

// Complete gives each setting that is 0 its default and checks all settings of a struct, which
// has the tags of package settings.
func Complete(of any) error {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	settings.AddFlags(fs, of)
	for name, s := range settings.All(of) {
		if text, ok := s.Tag.Lookup("default"); ok && s.Value.IsZero() {
			if err := fs.Set(name, text); err != nil {
				return err
			}
		}
	}
	return settings.Check(of)
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
