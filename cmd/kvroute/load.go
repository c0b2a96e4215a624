// SPDX-License-Identifier: Apache-2.0

package main

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
)

// loadFlags makes the settings of a load flags of fs.
func loadFlags(fs *flag.FlagSet, c *bench.LoadConfig) {
	fs.StringVar(&c.Model, "model", "sim", "name of the model")
	fs.StringVar(&c.Arrivals, "arrivals", "poisson", "poisson or constant")
	fs.Float64Var(&c.Rate, "rate", 8, "mean `requests` a second")
	fs.IntVar(&c.Conversations, "conversations", 40, "`number` of conversations")
	fs.IntVar(&c.Turns, "turns", 4, "requests of a conversation")
	fs.DurationVar(&c.TurnGap, "turn-gap", 2*time.Second, "mean `time` between them")
	fs.IntVar(&c.SystemPrompts, "system-prompts", 8, "`number` of system prompts that conversations share")
	fs.IntVar(&c.SystemBytes, "system-bytes", 4000, "length of each in `bytes`")
	fs.IntVar(&c.UserBytes, "user-bytes", 400, "length of a user's message in `bytes`")
	fs.IntVar(&c.ReplyBytes, "reply-bytes", 200, "length of an earlier reply in `bytes`")
	fs.IntVar(&c.MaxTokens, "max-tokens", 32, "`tokens` to generate for a request")
	fs.Uint64Var(&c.Seed, "seed", 1, "the same seed gives the same requests at the same times")
	fs.IntVar(&c.MaxInFlight, "max-in-flight", 4096, "largest `number` of requests at a time; one more is an error")
	fs.DurationVar(&c.Timeout, "timeout", time.Minute, "longest `time` of a request")
}

// load puts load on an endpoint; it fails if a request failed.
func load(ctx context.Context, args []string, std stdio) (err error) {
	var c bench.LoadConfig
	fs := newFlagSet("load", std.err)
	fs.StringVar(&c.URL, "url", "http://127.0.0.1:8080", "`URL` of the endpoint, without a path")
	out := fs.String("out", "", "`file` that gets a JSON line for each request")
	asJSON := fs.Bool("json", false, "print the summary as JSON")
	wait := fs.Duration("wait", 0, "how `long` to wait until the endpoint answers")
	loadFlags(fs, &c)
	if err := parse(fs, args); err != nil {
		return err
	}
	if *wait > 0 {
		if err := waitModel(ctx, *wait, c.URL, c.Model); err != nil {
			return err
		}
	}
	var record io.Writer
	if *out != "" {
		file, err := os.Create(*out)
		if err != nil {
			return err
		}
		buffer := bufio.NewWriter(file)
		defer func() { err = errors.Join(err, buffer.Flush(), file.Close()) }()
		record = buffer
	}
	summary, err := bench.Load(ctx, c, nil, record)
	if err != nil {
		return err
	}
	if *asJSON {
		if err := json.NewEncoder(std.out).Encode(summary); err != nil {
			return err
		}
	} else {
		summary.Print(std.out)
	}
	if n := summary.Failed(); n > 0 {
		return fmt.Errorf("%d of %d requests failed", n, summary.Requests)
	}
	return nil
}

// waitModel waits until an endpoint answers for a model: routers may need to hear
// of their workers first.
func waitModel(ctx context.Context, limit time.Duration, url, model string) error {
	ask := func(ctx context.Context) bool {
		probe := bench.LoadConfig{URL: url, Model: model, Conversations: 1, Turns: 1, MaxTokens: 1, SystemBytes: 1, UserBytes: 1, Timeout: 5 * time.Second}
		s, err := bench.Load(ctx, probe, nil, nil)
		return err == nil && s.Failed() == 0
	}
	return poll(ctx, limit, fmt.Sprintf("%s does not answer for the model %q", url, model), ask)
}
