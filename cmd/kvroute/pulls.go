// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
)

// Pulls is the settings of sources from which workers copy blocks.
type Pulls struct {
	// off, body or header: where a request names another worker that holds more of its prompt in host memory. The chosen
	// worker copies the blocks from it. The header is for llm-d's sidecars
	//
	// This setting and the next five are for workers with kv_source in their records.
	KVPull string `yaml:"kv-pull" default:"off" want:"off, body or header"`

	// <time> that a copy takes apart from its tokens
	KVPullDelay time.Duration `yaml:"kv-pull-delay" default:"27ms" want:"0s to 1h"`

	// <time> that the copy of a token takes; a request names a source only if the copy is faster than the computation
	KVPullTokenTime time.Duration `yaml:"kv-pull-token-time" default:"10.6us" want:"0s to 1s"`

	// <time> that the computation of a token of a prompt takes
	KVPullComputeTime time.Duration `yaml:"kv-pull-compute-time" default:"34.5us" want:"more than 0s, at most 1s"`

	// least <tokens> to copy
	KVPullMinTokens int `yaml:"kv-pull-min-tokens" default:"2048" want:"more than 0"`

	// largest <number> of requests before their first token that name one source, for each kvroute replica
	KVPullLimit int `yaml:"kv-pull-limit" default:"4" want:"more than 0"`
}

// pulls returns the router's settings of sources.
func (p *Pulls) pulls() router.PullConfig {
	return router.PullConfig{
		On: p.KVPull != extproc.PullOff, Delay: p.KVPullDelay, PerToken: p.KVPullTokenTime,
		ComputePerToken: p.KVPullComputeTime, MinTokens: p.KVPullMinTokens, Limit: p.KVPullLimit,
	}
}
