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
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// stack is a kvroute behind a real Envoy.
type stack struct {
	router  *process.Child
	envoy   *envoytest.Proc
	workers []string // addresses of Envoy's pool
}

// workerNetworks are where the workers of all checks are.
const workerNetworks = "127.0.0.0/8"

// startStack starts kvroute with a configuration, whose workers are the given
// addresses, and Envoy in front of it.
func (e *env) startStack(ctx context.Context, name, config string, workers []string, flags ...string) (*stack, error) {
	file := filepath.Join(e.dir, name+".yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	s := &stack{workers: workers}
	var err error
	if s.router, err = process.StartChild(ctx, e.dir, name, e.kvroute, append([]string{
		"serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--worker-networks", workerNetworks,
		"--decision-headers", "--drain-delay", "0", "--drain-timeout", "1s",
	}, flags...)...); err != nil {
		return nil, err
	}
	var text bytes.Buffer
	err = envoy.Render(&text, envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", ExtProc: []string{s.router.At.Extproc}, Pool: workers})
	if err == nil {
		s.envoy, err = envoytest.Start(ctx, envoytest.Options{Config: text.Bytes()})
	}
	if err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func (s *stack) stop() {
	if s.envoy != nil {
		_ = s.envoy.Stop() // it ends with us in any case
	}
	s.router.Stop()
}

// waitWorkers waits until kvroute hears of the caches of as many ranks of workers.
func (s *stack) waitWorkers(ctx context.Context, n int) error {
	return s.router.Await(ctx, process.Patience, fmt.Sprintf("%d workers whose cache is known", n), func(ctx context.Context) bool {
		all, err := s.states(ctx)
		known := 0
		for _, w := range all {
			if w.KVEvents == "ok" {
				known++
			}
		}
		return err == nil && known == n
	})
}

// states are the workers as kvroute sees them.
func (s *stack) states(ctx context.Context) ([]router.WorkerState, error) {
	var answer struct{ Workers []router.WorkerState }
	return answer.Workers, process.GetJSON(ctx, "http://"+s.router.At.HTTP+"/v1/workers", &answer)
}

// decision returns what kvroute decided for a request that came by this id.
func (s *stack) decision(ctx context.Context, id string) (router.Decision, error) {
	var d router.Decision
	err := process.GetJSON(ctx, "http://"+s.router.At.HTTP+"/v1/decisions?id="+id, &d)
	return d, err
}

// waitRouted waits until Envoy has found kvroute. The body is a request that may be
// sent for it.
func (s *stack) waitRouted(ctx context.Context, body string) error {
	return process.Until(ctx, process.Patience, "Envoy finds kvroute", func(ctx context.Context) bool {
		r, err := ask(ctx, s.envoy.URL()+chatPath, body, nil)
		return err == nil && r.status == http.StatusOK && r.header.Get("X-Dynamo-Reason") != ""
	})
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
func (s *stack) blocks(ctx context.Context) (all []blockAt, err error) {
	data, err := process.Get(ctx, "http://"+s.router.At.HTTP+"/v1/index/dump")
	if err != nil {
		return nil, err
	}
	whole := false
	for line := range bytes.Lines(data) {
		var ev routerEvent
		if err := json.Unmarshal(line, &ev); err != nil {
			return nil, fmt.Errorf("%w in %.300s", err, line)
		}
		whole = len(ev.End) > 0
		all = appendBlocks(all, ev)
	}
	if !whole {
		return nil, errors.New("the dump ends in the middle")
	}
	return all, nil
}

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

// response is what a request got.
type response struct {
	id     string // of the request, if it had one
	status int
	header http.Header
	body   []byte
	ttft   time.Duration // until the first bytes of the body
	took   time.Duration
}

// ask sends a request and reads the whole response.
func ask(ctx context.Context, url, body string, header map[string]string) (r response, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return r, err
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	start := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return r, err
	}
	defer func() { _ = resp.Body.Close() }() // it was read
	r.id, r.status, r.header = header["X-Request-Id"], resp.StatusCode, resp.Header
	first := make([]byte, 1)
	if _, err := io.ReadFull(resp.Body, first); err != nil && !errors.Is(err, io.EOF) {
		return r, err
	}
	r.ttft = time.Since(start)
	rest, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	r.body, r.took = append(first, rest...), time.Since(start)
	return r, err
}

// requestIDs counts requests, to name each: decisions are found by the name.
//
//nolint:gochecknoglobals // names are unique in the process
var requestIDs atomic.Uint64

func newRequestID() string { return fmt.Sprintf("interop-%d-%d", os.Getpid(), requestIDs.Add(1)) }
