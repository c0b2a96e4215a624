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
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
)

type options struct {
	binary, tokenizer, out, commit string
	rounds, others                 int
	length                         time.Duration
	noop, worker, only             string
}

func main() {
	var o options
	flag.StringVar(&o.binary, "kvroute", ".cache/bin/kvroute", "the kvroute to measure")
	flag.StringVar(&o.tokenizer, "tokenizer", "internal/enginesim/model", "folder with the model's tokenizer")
	flag.StringVar(&o.out, "report", "bench/out", "write the figures to this folder")
	flag.StringVar(&o.commit, "commit", "", "record this commit")
	flag.IntVar(&o.rounds, "rounds", 15, "rounds of the shapes that have targets")
	flag.IntVar(&o.others, "others", 5, "rounds of the other shapes")
	flag.DurationVar(&o.length, "length", 2*time.Second, "of a round of one variant")
	flag.StringVar(&o.only, "only", "", "measure only the shapes whose names contain this")
	flag.StringVar(&o.noop, "noop", "", "be the processor that does nothing, and write the address to this file")
	flag.StringVar(&o.worker, "worker", "", "the worker that it names")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if o.noop != "" {
		if err := serveNoop(ctx, o); err != nil {
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
func serveNoop(ctx context.Context, o options) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.MaxRecvMsgSize(32<<20), grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(16<<20))
	envoytest.Noop{Worker: o.worker}.Register(s)
	if err := os.WriteFile(o.noop, fmt.Appendf(nil, `{"extproc":%q}`, l.Addr()), 0o600); err != nil {
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
	server *process // the external processor, nil for none
}

// process is a program that was started for the measurement.
type process struct {
	cmd *exec.Cmd
	at  string // of its external processor
}

func (p *process) stop() {
	_ = p.cmd.Process.Kill() // it holds nothing worth keeping
	_ = p.cmd.Wait()
}

// spawn starts a program that writes its addresses to a ready file.
func spawn(ctx context.Context, ready, program string, args ...string) (*process, error) {
	p := &process{cmd: exec.CommandContext(ctx, program, args...)}
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = envoytest.OwnGroup()
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	for range 1000 {
		if data, err := os.ReadFile(ready); err == nil {
			if _, rest, ok := strings.Cut(string(data), `"extproc":"`); ok {
				p.at, _, _ = strings.Cut(rest, `"`)
				return p, nil
			}
		}
		pause(ctx, 10*time.Millisecond)
	}
	p.stop()
	return nil, fmt.Errorf("%s was not ready in 10 s", program)
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
`, absolute(o.tokenizer), w.at), 0o600); err != nil {
		return false, err
	}
	ready := filepath.Join(dir, "kvroute.ready")
	ours, err := spawn(ctx, ready, absolute(o.binary), "serve", "--config", config, "--extproc-address", "127.0.0.1:0",
		"--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--log-level", "error", "--ready-file", ready)
	if err != nil {
		return false, err
	}
	defer ours.stop()
	self, err := os.Executable()
	if err != nil {
		return false, err
	}
	ready = filepath.Join(dir, "noop.ready")
	noop, err := spawn(ctx, ready, self, "--noop", ready, "--worker", w.at)
	if err != nil {
		return false, err
	}
	defer noop.stop()

	var variants []*variant
	defer func() {
		for _, v := range variants {
			err = errors.Join(err, v.envoy.Stop())
		}
	}()
	for _, v := range []struct {
		name       string
		server     *process
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
func startEnvoy(ctx context.Context, worker string, server *process, noObserver bool) (*envoytest.Proc, error) {
	c := envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", Pool: []string{worker}, NoObserver: noObserver, ExtProc: []string{"127.0.0.1:1"}}
	if server != nil {
		c.ExtProc[0] = server.at
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
	path, err := envoytest.Find()
	if err != nil {
		return nil, err
	}
	return envoytest.Start(ctx, envoytest.Options{Path: path, Config: []byte(config)})
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
