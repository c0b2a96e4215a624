// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// process is a program that was started for the checks. It ends with them.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string // path
	done chan struct{}
}

// start starts a program in a group of its own, so that what it starts ends with it.
// Its log goes to the run's folder.
func (e *env) start(name string, environment []string, program string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(e.dir, name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	p.cmd = exec.Command(program, args...)
	p.cmd.Env = append(os.Environ(), environment...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = p.cmd.Start()
	_ = log.Close() // the program has its own
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	return p, nil
}

// signal sends a signal to the program and what it started.
func (p *process) signal(s syscall.Signal) { _ = syscall.Kill(-p.cmd.Process.Pid, s) } // it may have ended

// stop ends the program, by force after ten seconds, and waits for its end.
func (p *process) stop() {
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
	}
	p.kill()
}

// kill ends the program and what it started at once.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// lastLines returns the end of the program's log.
func (p *process) lastLines() string {
	data, err := os.ReadFile(p.log)
	if err != nil {
		return ""
	}
	lines := bytes.SplitAfter(data, []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-12):], nil))
}

// await waits until ok, or the program ends, or the time is over.
func (p *process) await(ctx context.Context, limit time.Duration, what string, ok func(context.Context) bool) error {
	err := until(ctx, limit, what, func(ctx context.Context) bool { return p.ended() || ok(ctx) })
	if err == nil && p.ended() {
		err = errors.New("it ended")
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", p.name, err, p.lastLines())
	}
	return nil
}

// until asks until the answer is yes, for a limited time.
func until(ctx context.Context, limit time.Duration, what string, ok func(context.Context) bool) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for !ok(limited) {
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("%s: not in %v", what, limit)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// patience is far above what anything but an engine's start takes on a busy machine.
const patience = 60 * time.Second

// ours starts a kvroute command that has the flag --ready-file, and waits for its
// addresses.
func (e *env) ours(ctx context.Context, name string, args ...string) (*process, addresses, error) {
	var at addresses
	ready := filepath.Join(e.dir, name+".ready")
	if err := os.Remove(ready); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, at, err
	}
	p, err := e.start(name, nil, e.kvroute, append(args, "--ready-file", ready)...)
	if err != nil {
		return nil, at, err
	}
	if err := p.await(ctx, patience, "its addresses", func(context.Context) bool {
		data, err := os.ReadFile(ready)
		return err == nil && json.Unmarshal(data, &at) == nil
	}); err != nil {
		p.kill()
		return nil, at, err
	}
	return p, at, nil
}

// addresses are what a ready file says.
type addresses struct {
	Extproc string `json:"extproc"`
	HTTP    string `json:"http"`
	NATS    string `json:"nats"`
}

// stack is a kvroute behind a real Envoy.
type stack struct {
	router  *process
	at      addresses
	envoy   *envoytest.Proc
	workers []string // addresses of Envoy's pool
}

// startStack starts kvroute with a configuration, whose workers are the given
// addresses, and Envoy in front of it.
func (e *env) startStack(ctx context.Context, name, config string, workers []string, flags ...string) (*stack, error) {
	file := filepath.Join(e.dir, name+".yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	s := &stack{workers: workers}
	var err error
	if s.router, s.at, err = e.ours(ctx, name, append([]string{
		"serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--worker-networks", "127.0.0.0/8",
		"--decision-headers", "--drain-delay", "0", "--drain-timeout", "1s",
	}, flags...)...); err != nil {
		return nil, err
	}
	var text bytes.Buffer
	if err := envoy.Render(&text, envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", ExtProc: []string{s.at.Extproc}, Pool: workers}); err != nil {
		s.stop()
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(e.dir, name+"-envoy.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		s.stop()
		return nil, err
	}
	if s.envoy, err = envoytest.Start(ctx, envoytest.Options{Config: text.Bytes(), Log: log}); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func (s *stack) stop() {
	if s.envoy != nil {
		_ = s.envoy.Stop() // it ends with us in any case
	}
	s.router.stop()
}

// waitWorkers waits until kvroute hears of the caches of as many ranks of workers.
func (s *stack) waitWorkers(ctx context.Context, n int) error {
	return s.router.await(ctx, patience, fmt.Sprintf("%d workers whose cache is known", n), func(ctx context.Context) bool {
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
	return answer.Workers, getJSON(ctx, "http://"+s.at.HTTP+"/v1/workers", &answer)
}

// decision returns what kvroute decided for a request that came by this id.
func (s *stack) decision(ctx context.Context, id string) (router.Decision, error) {
	var d router.Decision
	err := getJSON(ctx, "http://"+s.at.HTTP+"/v1/decisions?id="+id, &d)
	return d, err
}

// waitRouted waits until Envoy has found kvroute. The body is a request that may be
// sent for it.
func (s *stack) waitRouted(ctx context.Context, body string) error {
	return until(ctx, patience, "Envoy finds kvroute", func(ctx context.Context) bool {
		r, err := ask(ctx, s.envoy.URL()+chatPath, body, nil)
		return err == nil && r.status == http.StatusOK && r.header.Get("X-Dynamo-Reason") != ""
	})
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

func getJSON(ctx context.Context, url string, to any) error {
	body, err := get(ctx, url)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, to)
}

func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // it was read
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: status %d: %.300s", url, resp.StatusCode, body)
	}
	return body, err
}

// requestIDs counts requests, to name each: decisions are found by the name.
//
//nolint:gochecknoglobals // names are unique in the process
var requestIDs atomic.Uint64

func newRequestID() string { return fmt.Sprintf("interop-%d-%d", os.Getpid(), requestIDs.Add(1)) }

// freePort returns a port that nobody has, n of which in a row are free. An engine binds
// them minutes later, so they are below those that connections are given.
func freePort(n int) (int, error) {
	for range 100 {
		if base := 15_000 + rand.IntN(15_000); free(base, n) {
			return base, nil
		}
	}
	return 0, fmt.Errorf("no %d free ports in a row", n)
}

func free(base, n int) bool {
	for i := range n {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", base+i))
		if err != nil {
			return false
		}
		_ = l.Close() // it is for another program
	}
	return true
}
