// SPDX-License-Identifier: Apache-2.0

// Command envoy measures what Envoy and kvroute cost together: against Envoy alone, with a processor that
// does nothing, and against Dynamo's frontend, as `make bench-front` runs it. With --split it measures
// prefill legs (`make bench-pd`), with --see what makes kvroute visible (`make bench-see`), with --faults what
// clients see of workers with faults (`make bench-workers`). It prints a table and exits 1 if a target is missed.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
)

type options struct {
	binary, base, out, commit, only, traces, dynamo, shared string
	rounds                                                  int
}

const (
	tokenizerDir = "internal/enginesim/model" // folder with the model's tokenizer
	length       = 2 * time.Second            // of a round of one variant
)

func main() {
	var o options
	flag.StringVar(&o.binary, "kvroute", ".cache/bin/kvroute", "the kvroute to measure")
	flag.StringVar(&o.out, "report", "bench/out", "write the figures to this folder")
	flag.StringVar(&o.commit, "commit", "", "record this commit")
	flag.IntVar(&o.rounds, "rounds", 15, "rounds")
	flag.StringVar(&o.only, "only", "", "measure only the shapes whose names contain this")
	split := flag.Bool("split", false, "measure split requests: make bench-pd")
	flag.StringVar(&o.traces, "traces", "", "of --split: `folder` with the traces")
	see := flag.Bool("see", false, "measure what it costs to make kvroute visible: make bench-see")
	faults := flag.Bool("faults", false, "measure workers with faults: make bench-workers")
	silent := flag.Bool("silence", false, "be the part of --faults in a network of its own")
	flag.StringVar(&o.base, "base", "", "of --see: `path` of an earlier kvroute to compare with")
	flag.StringVar(&o.dynamo, "dynamo", "", "`folder` with Dynamo installed; empty leaves it out")
	flag.StringVar(&o.shared, "shared", "../shared/data", "`folder` with the reference data")
	worker := flag.String("noop", "", "be the processor that does nothing but name this worker")
	ready := flag.String("ready-file", "", "of --noop: `file` that gets the address")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	bench.Exit("bench-front", func() bool {
		if *worker != "" {
			serveNoop(ctx, *worker, *ready)
			return true
		}
		switch {
		case *split:
			return runSplit(ctx, o)
		case *silent:
			runSilence(ctx, o)
			return true
		case *faults:
			return runFaults(ctx, o)
		case *see:
			return runSee(ctx, o)
		}
		return runFront(ctx, o)
	})
}

// serveNoop is the processor of variant B. It has a process of its own, so that its CPU time
// is not mixed with the client's.
func serveNoop(ctx context.Context, worker, ready string) {
	l := bench.Must(net.Listen("tcp", "127.0.0.1:0"))
	s := grpc.NewServer(grpc.MaxRecvMsgSize(32<<20), grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(16<<20))
	envoytest.Noop{Worker: worker}.Register(s)
	bench.NoError(os.WriteFile(ready, fmt.Appendf(nil, `{"extproc":%q}`, l.Addr()), 0o600))
	context.AfterFunc(ctx, s.Stop)
	bench.NoError(s.Serve(l))
}

// variant is one path of a request.
type variant struct {
	name   string
	envoy  *envoytest.Proc
	server *process.Child // the external processor, nil for none
}

// startRouter starts a kvroute with workers of these addresses and roles, and with more flags.
func startRouter(ctx context.Context, o options, dir, name string, workers, roles []string, flags ...string) *process.Child {
	config := fmt.Appendf(nil, "version: 1\nmodels: [{name: sim, tokenizer: %q, block-size: 16}]\nworkers:\n", bench.Must(filepath.Abs(tokenizerDir)))
	for i, at := range workers {
		config = fmt.Appendf(config, "- {name: w%d, address: %q, role: %q, engine: vllm, models: [sim], block_size: 16}\n", i, at, roles[i])
	}
	return startServer(ctx, o, dir, name, string(config), flags...)
}

// startServer starts a kvroute with a configuration file.
func startServer(ctx context.Context, o options, dir, name, config string, flags ...string) *process.Child {
	file := filepath.Join(dir, name+".yaml")
	bench.NoError(os.WriteFile(file, []byte(config), 0o600))
	flags = append([]string{
		"serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--log-level", "error",
	}, flags...)
	return bench.Must(process.StartChild(ctx, dir, name, bench.Must(filepath.Abs(o.binary)), flags...))
}

// startEnvoy starts an Envoy with kvroute's configuration. Without a server the filters are
// left out, and Envoy chooses from the pool.
func startEnvoy(ctx context.Context, worker string, server *process.Child) *envoytest.Proc {
	c := envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", Pool: []string{worker}, ExtProc: []string{"127.0.0.1:1"}}
	if server != nil {
		c.ExtProc[0] = server.At.Extproc
	}
	var text bytes.Buffer
	bench.NoError(envoy.Render(&text, c))
	config := text.String()
	if server == nil {
		from, to := strings.Index(config, "          - name: kvroute\n"), strings.Index(config, "          - name: envoy.filters.http.router\n")
		if from < 0 || to < from {
			bench.NoError(errors.New("the filters are not where they were in the bootstrap"))
		}
		config = config[:from] + config[to:]
	}
	return bench.Must(envoytest.Start(ctx, envoytest.Options{Config: []byte(config)}))
}

// use is the CPU time and the messages of a variant so far.
type use struct {
	server, proxy time.Duration
	messages      int64
}

func (v *variant) used(ctx context.Context) (u use) {
	u.proxy = bench.Must(bench.ProcessTime(v.envoy.Pid()))
	if v.server == nil {
		return u
	}
	u.server = bench.Must(bench.ProcessTime(v.server.Pid()))
	// A filter that this Envoy does not have counts 0.
	u.messages = bench.Must(v.envoy.Sum(ctx, `^http\.llm\.ext_proc\.(kvroute|kvroute_observer)\.stream_msgs_sent$`))
	return u
}
