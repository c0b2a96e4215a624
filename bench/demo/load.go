// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/settings"
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
	settings.SetDefaults(&c.load)
	c.load.Seed = 1
	settings.AddFlags(fs, &c.load)
}

// Run puts load on the endpoint; it fails if a request failed.
func (c *LoadCommand) Run(ctx context.Context, _ *flag.FlagSet, out, _ io.Writer) error {
	return bench.Try(func() {
		if c.wait > 0 {
			// A router may not know its workers yet.
			probe := bench.LoadConfig{URL: c.load.URL, Model: c.load.Model, Conversations: 1, Turns: 1, MaxTokens: 1, SystemBytes: 1, UserBytes: 1, Timeout: 5 * time.Second}
			bench.NoError(process.Until(ctx, c.wait, fmt.Sprintf("%s does not answer for the model %q", probe.URL, probe.Model), func(ctx context.Context) bool {
				s, err := bench.Load(ctx, probe, nil, nil)
				return err == nil && s.Failed() == 0
			}))
		}
		var record io.Writer
		if c.file != "" {
			file := bench.Must(os.Create(c.file))
			defer func() { bench.NoError(file.Close()) }()
			record = file
		}
		summary := bench.Must(bench.Load(ctx, c.load, nil, record))
		if c.json {
			bench.NoError(json.NewEncoder(out).Encode(summary))
		} else {
			summary.Print(out)
		}
		if n := summary.Failed(); n > 0 {
			bench.NoError(fmt.Errorf("%d of %d requests failed", n, summary.Requests))
		}
	})
}
