// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// stack is a kvroute behind a real Envoy.
type stack struct {
	router *process.Child
	envoy  *envoytest.Proc
}

// workerNetworks has the workers of all checks.
const workerNetworks = "127.0.0.0/8"

// startStack starts kvroute with a configuration, whose workers are the given
// addresses, and Envoy in front of it. Both end with the check.
func (e *env) startStack(ctx context.Context, name, config string, workers []string, flags ...string) *stack {
	file := filepath.Join(e.dir, name+".yaml")
	bench.NoError(os.WriteFile(file, []byte(config), 0o600))
	s := &stack{router: e.startKvroute(ctx, name, append([]string{
		"serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--worker-networks", workerNetworks,
		"--decision-headers", "--drain-delay", "0", "--drain-timeout", "1s",
	}, flags...)...)}
	e.stacks = append(e.stacks, s)
	e.atEnd(s.stop)
	var text bytes.Buffer
	bench.NoError(envoy.Render(&text, envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", ExtProc: []string{s.router.At.Extproc}, Pool: workers}))
	s.envoy = bench.Must(envoytest.Start(ctx, envoytest.Options{Config: text.Bytes()}))
	return s
}

// stop may be called more than once.
func (s *stack) stop() {
	if s.envoy != nil {
		_ = s.envoy.Stop() // it ends with this process in any case
	}
	s.router.Stop()
}

// waitWorkers waits until kvroute receives the cache events of n ranks of workers.
func (s *stack) waitWorkers(ctx context.Context, n int) {
	await(ctx, s.router.Process, process.Patience, fmt.Sprintf("%d workers whose cache is known", n), func(ctx context.Context) string {
		known := 0
		for _, w := range s.states(ctx) {
			if w.KVEvents == "ok" {
				known++
			}
		}
		return missingUnless(known == n, "%d are known", known)
	})
}

// states are the workers as kvroute sees them.
func (s *stack) states(ctx context.Context) []router.WorkerState {
	var answer struct{ Workers []router.WorkerState }
	bench.NoError(process.GetJSON(ctx, "http://"+s.router.At.HTTP+"/v1/workers", &answer))
	return answer.Workers
}

// waitRouted waits until Envoy has found kvroute. It sends a prompt that is too short for
// a block, so that no cache changes.
func (s *stack) waitRouted(ctx context.Context) {
	await(ctx, s.router.Process, process.Patience, "Envoy finds kvroute", func(ctx context.Context) string {
		r := ask(ctx, s.envoy.URL()+chatPath, chat("Hi", nil), nil)
		return missingUnless(r.status == http.StatusOK && r.header.Get("X-Dynamo-Reason") != "", "status %d", r.status)
	})
}

// compare compares kvroute's decision for a request with the engine's usage. block is the
// number of tokens in a block.
func (s *stack) compare(ctx context.Context, res *result, what string, r *response, u *usage, block int) (d router.Decision) {
	bench.NoError(process.GetJSON(ctx, "http://"+s.router.At.HTTP+"/v1/decisions?id="+r.id, &d))
	res.cases++
	// An engine always computes the last token, and so its whole block.
	hits := min(d.OverlapBlocks, max(0, u.Prompt-1)/block) * block
	switch {
	case d.TokenMode != "exact":
		res.differ("%s: tokenized as %q: %s", what, d.TokenMode, d.TokenReason)
	case d.PromptTokens != u.Prompt:
		res.differ("%s: %d prompt tokens here, %d there", what, d.PromptTokens, u.Prompt)
	case hits != u.Details.Cached:
		res.differ("%s: of %d tokens %d blocks are predicted, so %d tokens; %d were cached at %v", what, u.Prompt, d.OverlapBlocks, hits, u.Details.Cached, d.Worker)
	}
	return d
}

// blockAt is a block that a rank has.
type blockAt struct {
	worker          uint64
	rank            uint32
	external, local uint64
}

// routerEvent is a line of an index's dump, Dynamo's or kvroute's.
type routerEvent struct {
	Worker uint64          `json:"worker_id"`
	End    json.RawMessage `json:"kvroute_end"`
	Event  struct {
		Rank uint32 `json:"dp_rank"`
		Data struct {
			Stored struct {
				Blocks []struct {
					External uint64 `json:"block_hash"`
					Local    uint64 `json:"tokens_hash"`
				} `json:"blocks"`
			} `json:"stored"`
		} `json:"data"`
	} `json:"event"`
}

func appendBlocks(all []blockAt, evs ...routerEvent) []blockAt {
	for i := range evs {
		ev := &evs[i]
		for _, b := range ev.Event.Data.Stored.Blocks {
			all = append(all, blockAt{ev.Worker, ev.Event.Rank, b.External, b.Local})
		}
	}
	return all
}

// blocks reads kvroute's index.
func (s *stack) blocks(ctx context.Context) (all []blockAt) {
	whole := false
	for line := range bytes.Lines(bench.Must(process.Get(ctx, "http://"+s.router.At.HTTP+"/v1/index/dump"))) {
		var ev routerEvent
		bench.NoError(json.Unmarshal(line, &ev))
		whole = len(ev.End) > 0
		all = appendBlocks(all, ev)
	}
	if !whole {
		bench.NoError(errors.New("the dump is incomplete"))
	}
	return all
}

// differing describes how two sets of blocks differ. It returns "" for equal ones.
func differing(ours, theirs []blockAt) string {
	in := make(map[blockAt]int)
	for _, b := range ours {
		in[b]++
	}
	missing := 0
	for _, b := range theirs {
		if in[b]--; in[b] < 0 {
			missing++
		}
	}
	return missingUnless(len(ours) == len(theirs) && missing == 0, "%d blocks here, %d there, %d of which are not here", len(ours), len(theirs), missing)
}

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

// response is the answer to a request.
type response struct {
	id     string // of the request, if it had one
	status int
	header http.Header
	body   []byte
}

// ask sends a request and reads the whole response.
func ask(ctx context.Context, url, body string, header map[string]string) *response {
	req := bench.Must(http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body)))
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp := bench.Must(http.DefaultClient.Do(req))
	defer func() { _ = resp.Body.Close() }() // it was read
	return &response{header["X-Request-Id"], resp.StatusCode, resp.Header, bench.Must(io.ReadAll(io.LimitReader(resp.Body, 64<<20)))}
}

// named is the header that gives a request an id of its own, by which its decision is found.
func named() map[string]string {
	return map[string]string{"X-Request-Id": fmt.Sprintf("interop-%d-%d", os.Getpid(), requestIDs.Add(1))}
}

// requestIDs counts requests.
//
//nolint:gochecknoglobals // names are unique in the process
var requestIDs atomic.Uint64
