// SPDX-License-Identifier: Apache-2.0

// Package process starts programs for tests, benchmarks and the demo, and waits for them.
//
// A program runs in a process group of its own, so that its children end with it.
// [Process.Stop] and [Process.Kill] return after the program has ended. All methods may be
// called by any number of goroutines.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Process is a program that was started.
type Process struct {
	Name string
	Log  string // path
	Cmd  *exec.Cmd
	Done chan struct{} // closed when the program has ended
}

// Start starts a program. Its output is appended to NAME.log in the folder dir.
func Start(dir, name string, cmd *exec.Cmd) (*Process, error) {
	p := &Process{Name: name, Log: filepath.Join(dir, name+".log"), Cmd: cmd, Done: make(chan struct{})}
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
		close(p.Done)
	}()
	return p, nil
}

// Pid is the program's process number.
func (p *Process) Pid() int { return p.Cmd.Process.Pid }

// Err is nil if the program has ended with status 0.
func (p *Process) Err() error {
	<-p.Done
	if p.Cmd.ProcessState.Success() {
		return nil
	}
	return fmt.Errorf("%s: %v\n%s", p.Name, p.Cmd.ProcessState, p.LastLines())
}

// Stop ends the program and its children, by force after 15 seconds.
func (p *Process) Stop() {
	p.signal(syscall.SIGTERM)
	select {
	case <-p.Done:
	case <-time.After(15 * time.Second):
	}
	p.Kill()
}

// Kill ends the program and its children at once.
func (p *Process) Kill() {
	p.signal(syscall.SIGKILL)
	<-p.Done
}

func (p *Process) signal(s syscall.Signal) { _ = syscall.Kill(-p.Pid(), s) } // it may have ended

// LastLines returns the end of the program's log.
func (p *Process) LastLines() string {
	data, _ := os.ReadFile(p.Log) // without its log there is nothing to show
	lines := bytes.SplitAfter(data, []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-15):], nil))
}

// Await waits until ok returns true. It fails if the program ends or the limit passes.
func (p *Process) Await(ctx context.Context, limit time.Duration, what string, ok func(context.Context) bool) error {
	ended := func() bool {
		select {
		case <-p.Done:
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
		return fmt.Errorf("%s: %w\n%s", p.Name, err, p.LastLines())
	}
	return nil
}

// Patience is far above the time that anything but a real engine's start takes on a busy
// machine. It is also above the 60 s after which Envoy checks an unhealthy host without
// traffic again, where the configuration cannot say otherwise.
const Patience = 3 * time.Minute

// Until waits until ok returns true. After the limit it fails with an error that names what.
func Until(ctx context.Context, limit time.Duration, what string, ok func(context.Context) bool) error {
	limited, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s: not in %v", what, limit))
	defer cancel()
	for !ok(limited) {
		select {
		case <-limited.Done():
			return context.Cause(limited)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}
