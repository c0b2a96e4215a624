// SPDX-License-Identifier: Apache-2.0

// Command envoy measures what kvroute adds to a request through a real Envoy, against one
// without an external processor (A) and with one that does nothing (B), as
// `make bench-envoy` runs it. It prints a table and exits 1 if a target is missed.
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
	binary, out, commit, only string
	rounds                    int
}

const (
	tokenizer   = "internal/enginesim/model" // folder with the model's tokenizer
	otherRounds = 5                          // of shapes without a target
	length      = 2 * time.Second            // of a round of one variant
)

func main() {
	var o options
	flag.StringVar(&o.binary, "kvroute", ".cache/bin/kvroute", "the kvroute to measure")
	flag.StringVar(&o.out, "report", "bench/out", "write the figures to this folder")
	flag.StringVar(&o.commit, "commit", "", "record this commit")
	flag.IntVar(&o.rounds, "rounds", 15, "rounds of the shapes that have targets")
	flag.StringVar(&o.only, "only", "", "measure only the shapes whose names contain this")
	worker := flag.String("noop", "", "be the processor that does nothing but name this worker")
	ready := flag.String("ready-file", "", "of --noop: `file` that gets the address")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if *worker != "" {
		if err := serveNoop(ctx, *worker, *ready); err != nil {
			fmt.Fprintln(os.Stderr, "bench-envoy:", err)
			os.Exit(2)
		}
		return
	}
	met, err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-envoy:", err)
		os.Exit(2)
	}
	if !met {
		os.Exit(1)
	}
}

// serveNoop is the other side of B, in a process of its own so that its CPU can be
// told from the client's.
func serveNoop(ctx context.Context, worker, ready string) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.MaxRecvMsgSize(32<<20), grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(16<<20))
	envoytest.Noop{Worker: worker}.Register(s)
	if err := os.WriteFile(ready, fmt.Appendf(nil, `{"extproc":%q}`, l.Addr()), 0o600); err != nil {
		return err
	}
	go func() {
		<-ctx.Done()
		s.Stop()
	}()
	return s.Serve(l)
}

// variant is a way for a request to go.
type variant struct {
	name   string
	envoy  *envoytest.Proc
	server *process.Child // the external processor, nil for none
}

func run(ctx context.Context, o options) (met bool, err error) {
	dir, err := os.MkdirTemp("", "bench-envoy")
	if err != nil {
		return false, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	w, err := startWorker()
	if err != nil {
		return false, err
	}
	defer w.stop()

	config := filepath.Join(dir, "kvroute.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `version: 1
models: [{name: sim, tokenizer: %q, block-size: 16}]
workers: [{name: w, address: %q, models: [sim], block_size: 16}]
`, absolute(tokenizer), w.at), 0o600); err != nil {
		return false, err
	}
	ours, err := process.StartChild(ctx, dir, "kvroute", absolute(o.binary), "serve", "--config", config, "--extproc-address", "127.0.0.1:0",
		"--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--log-level", "error")
	if err != nil {
		return false, err
	}
	defer ours.Stop()
	self, err := os.Executable()
	if err != nil {
		return false, err
	}
	noop, err := process.StartChild(ctx, dir, "noop", self, "--noop", w.at)
	if err != nil {
		return false, err
	}
	defer noop.Stop()

	var variants []*variant
	defer func() {
		for _, v := range variants {
			err = errors.Join(err, v.envoy.Stop())
		}
	}()
	for _, v := range []struct {
		name       string
		server     *process.Child
		noObserver bool
	}{
		{"without", nil, false},
		{"no-op", noop, false},
		{"kvroute", ours, false},
		{"no-op without observer", noop, true},
		{"kvroute without observer", ours, true},
	} {
		e, err := startEnvoy(ctx, w.at, v.server, v.noObserver)
		if err != nil {
			return false, err
		}
		variants = append(variants, &variant{v.name, e, v.server})
	}
	figures, err := measure(ctx, o, variants)
	if err != nil {
		return false, err
	}
	return bench.Report(os.Stdout, o.out, bench.NewRun("bench-envoy", o.commit, "make bench-envoy", figures))
}

// startEnvoy starts an Envoy of our configuration; without a server its filters are
// left out, and the pool serves.
func startEnvoy(ctx context.Context, worker string, server *process.Child, noObserver bool) (*envoytest.Proc, error) {
	c := envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", Pool: []string{worker}, NoObserver: noObserver, ExtProc: []string{"127.0.0.1:1"}}
	if server != nil {
		c.ExtProc[0] = server.At.Extproc
	}
	var text bytes.Buffer
	if err := envoy.Render(&text, c); err != nil {
		return nil, err
	}
	config := text.String()
	if server == nil {
		from, to := strings.Index(config, "          - name: kvroute\n"), strings.Index(config, "          - name: envoy.filters.http.router\n")
		if from < 0 || to < from {
			return nil, errors.New("the filters are not where they were in the bootstrap")
		}
		config = config[:from] + config[to:]
	}
	return envoytest.Start(ctx, envoytest.Options{Config: []byte(config)})
}

// pause waits for a time, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

func absolute(path string) string {
	if p, err := filepath.Abs(path); err == nil {
		return p
	}
	return path
}
