// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
)

// LoadCommand is `kvroute load`: it puts load on an OpenAI endpoint and measures.
type LoadCommand struct {
	load bench.LoadConfig
	file string
	json bool
	wait time.Duration
}

// Flags adds the flags of the command to fs.
func (c *LoadCommand) Flags(fs *flag.FlagSet) {
	fs.StringVar(&c.load.URL, "url", "http://127.0.0.1:8080", "`URL` of the endpoint, without a path")
	fs.StringVar(&c.file, "out", "", "`file` that gets a JSON line for each request")
	fs.BoolVar(&c.json, "json", false, "print the summary as JSON")
	fs.DurationVar(&c.wait, "wait", 0, "how `long` to wait until the endpoint answers")
	c.load = bench.LoadConfig{
		Rate: 8, Conversations: 40, Turns: 4, TurnGap: 2 * time.Second,
		SystemPrompts: 8, SystemBytes: 4000, UserBytes: 400, ReplyBytes: 200, MaxTokens: 32,
	}
	loadFlags(fs, &c.load)
}

// loadFlags makes the settings of a load flags of fs, with the values in c as defaults.
func loadFlags(fs *flag.FlagSet, c *bench.LoadConfig) {
	fs.StringVar(&c.Model, "model", "sim", "name of the model")
	fs.StringVar(&c.Arrivals, "arrivals", "poisson", "poisson or constant")
	fs.Float64Var(&c.Rate, "rate", c.Rate, "mean `requests` a second")
	fs.IntVar(&c.Conversations, "conversations", c.Conversations, "`number` of conversations")
	fs.IntVar(&c.Turns, "turns", c.Turns, "requests of a conversation")
	fs.DurationVar(&c.TurnGap, "turn-gap", c.TurnGap, "mean `time` between them")
	fs.IntVar(&c.SystemPrompts, "system-prompts", c.SystemPrompts, "`number` of system prompts that conversations share")
	fs.IntVar(&c.SystemBytes, "system-bytes", c.SystemBytes, "length of each system prompt in `bytes`")
	fs.IntVar(&c.UserBytes, "user-bytes", c.UserBytes, "length of a user's message in `bytes`")
	fs.IntVar(&c.ReplyBytes, "reply-bytes", c.ReplyBytes, "length of an earlier reply in `bytes`")
	fs.IntVar(&c.MaxTokens, "max-tokens", c.MaxTokens, "`tokens` to generate for a request")
	fs.Uint64Var(&c.Seed, "seed", 1, "the same seed gives the same requests at the same times")
	fs.IntVar(&c.MaxInFlight, "max-in-flight", 4096, "largest `number` of requests at a time; one more is an error")
	fs.DurationVar(&c.Timeout, "timeout", time.Minute, "longest `time` of a request")
}

// Run puts load on the endpoint; it fails if a request failed.
func (c *LoadCommand) Run(ctx context.Context, _ *flag.FlagSet, out, _ io.Writer) (err error) {
	if c.wait > 0 {
		// A router may not know its workers yet.
		probe := bench.LoadConfig{URL: c.load.URL, Model: c.load.Model, Conversations: 1, Turns: 1, MaxTokens: 1, SystemBytes: 1, UserBytes: 1, Timeout: 5 * time.Second}
		if err := process.Until(ctx, c.wait, fmt.Sprintf("%s does not answer for the model %q", probe.URL, probe.Model), func(ctx context.Context) bool {
			s, err := bench.Load(ctx, probe, nil, nil)
			return err == nil && s.Failed() == 0
		}); err != nil {
			return err
		}
	}
	var record io.Writer
	if c.file != "" {
		file, failed := os.Create(c.file)
		if failed != nil {
			return failed
		}
		buffer := bufio.NewWriter(file)
		defer func() { err = errors.Join(err, buffer.Flush(), file.Close()) }()
		record = buffer
	}
	summary, err := bench.Load(ctx, c.load, nil, record)
	if err != nil {
		return err
	}
	if !c.json {
		summary.Print(out)
	} else if err := json.NewEncoder(out).Encode(summary); err != nil {
		return err
	}
	if n := summary.Failed(); n > 0 {
		return fmt.Errorf("%d of %d requests failed", n, summary.Requests)
	}
	return nil
}
