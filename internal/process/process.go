// SPDX-License-Identifier: Apache-2.0

// Package process starts programs for tests, benchmarks and the demo, and waits for them.
//
// A program runs in a process group of its own, so that what it starts ends with it.
// [Process.Stop] and [Process.Kill] return after the program has ended. All methods may be
// called by any number of goroutines.
package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Patience is far above the time that anything but an engine's start takes on a busy
// machine.
const Patience = 60 * time.Second

// Addresses are the contents of a ready file.
type Addresses struct {
	Extproc string `json:"extproc"`
	HTTP    string `json:"http"`
	NATS    string `json:"nats"`
}

// StartReady starts a program that has the flag --ready-file, and waits for its addresses.
// The folder dir gets its log and the ready file.
func StartReady(ctx context.Context, dir, name, program string, args ...string) (*Process, Addresses, error) {
	var at Addresses
	ready := filepath.Join(dir, name+".ready")
	if err := os.Remove(ready); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, at, err
	}
	p, err := Start(dir, name, exec.Command(program, append(args, "--ready-file", ready)...))
	if err != nil {
		return nil, at, err
	}
	if err := p.Await(ctx, Patience, "its addresses", func(context.Context) bool {
		data, err := os.ReadFile(ready)
		return err == nil && json.Unmarshal(data, &at) == nil
	}); err != nil {
		p.Kill()
		return nil, at, err
	}
	return p, at, nil
}

// Process is a program that was started.
type Process struct {
	Log string // path

	name string
	cmd  *exec.Cmd
	done chan struct{} // closed when the program has ended
}

// Start starts a program. Its output is appended to NAME.log in the folder dir.
func Start(dir, name string, cmd *exec.Cmd) (*Process, error) {
	p := &Process{Log: filepath.Join(dir, name+".log"), name: name, cmd: cmd, done: make(chan struct{})}
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = OwnGroup()
	err = cmd.Start()
	_ = log.Close() // the program has its own descriptor
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	return p, nil
}

// Pid is the program's process number.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the program has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err is nil if the program has ended with status 0.
func (p *Process) Err() error {
	<-p.done
	if p.cmd.ProcessState.Success() {
		return nil
	}
	return fmt.Errorf("%s: %v\n%s", p.name, p.cmd.ProcessState, p.LastLines())
}

// Stop ends the program and what it started, by force after ten seconds.
func (p *Process) Stop() {
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
	}
	p.Kill()
}

// Kill ends the program and what it started at once.
func (p *Process) Kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

func (p *Process) signal(s syscall.Signal) { _ = syscall.Kill(-p.Pid(), s) } // it may have ended

// LastLines returns the end of the program's log.
func (p *Process) LastLines() string {
	data, err := os.ReadFile(p.Log)
	if err != nil {
		return ""
	}
	lines := bytes.SplitAfter(data, []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-12):], nil))
}

// Await waits until ok returns true. It fails if the program ends or the limit passes.
func (p *Process) Await(ctx context.Context, limit time.Duration, what string, ok func(context.Context) bool) error {
	ended := func() bool {
		select {
		case <-p.done:
			return true
		default:
			return false
		}
	}
	err := Until(ctx, limit, what, func(ctx context.Context) bool { return ended() || ok(ctx) })
	if err == nil && ended() {
		err = errors.New("it ended")
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", p.name, err, p.LastLines())
	}
	return nil
}

// Until waits until ok returns true. It fails with what was waited for if the limit passes.
func Until(ctx context.Context, limit time.Duration, what string, ok func(context.Context) bool) error {
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

// FreePorts returns the first of n free TCP ports in a row. An engine binds them minutes
// later, so they are below those that the kernel gives to connections.
func FreePorts(n int) (int, error) {
	for range 100 {
		if first := 15_000 + rand.IntN(15_000); free(first, n) {
			return first, nil
		}
	}
	return 0, fmt.Errorf("no %d free ports in a row", n)
}

func free(first, n int) bool {
	for i := range n {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+i))
		if err != nil {
			return false
		}
		_ = l.Close() // it is for another program
	}
	return true
}
