// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/internal/envoytest"
)

// child is another kvroute process that this one started. It cannot outlive it.
type child struct {
	name string
	cmd  *exec.Cmd
	log  string // path
	file string // its addresses, once it is ready
	at   addresses
	done chan struct{} // closed when it has ended
}

// startChild starts a kvroute command that has the flag --ready-file, and waits for
// its addresses. dir gets its log.
func startChild(ctx context.Context, dir, name string, args ...string) (*child, error) {
	c, err := launchChild(dir, name, args...)
	if err != nil {
		return nil, err
	}
	if err := c.waitReady(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// anywhere are all networks, and loopback by name: there the workers of children register.
const anywhere = "0.0.0.0/0,::/0,127.0.0.0/8,::1/128"

// launchChild is startChild without waiting.
func launchChild(dir, name string, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{name: name, log: filepath.Join(dir, name+".log"), file: filepath.Join(dir, name+".ready"), done: make(chan struct{})}
	if err := os.Remove(c.file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	log, err := os.OpenFile(c.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	if args[0] == "serve" { // the first of equal flags counts least
		args = slices.Insert(slices.Clone(args), 1, "--worker-networks", anywhere)
	}
	c.cmd = exec.Command(self, append(args, "--ready-file", c.file)...)
	c.cmd.Stdout, c.cmd.Stderr = log, log
	c.cmd.SysProcAttr = envoytest.OwnGroup()
	err = c.cmd.Start()
	_ = log.Close() // the child has its own
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = c.cmd.Wait() // how it ended is in its log
		close(c.done)
	}()
	return c, nil
}

// waitReady waits for the child's addresses, and stops it if they do not come.
func (c *child) waitReady(ctx context.Context) error {
	if err := c.addresses(ctx); err != nil {
		c.stop()
		return fmt.Errorf("start %s: %w\n%s", c.name, err, c.lastLines())
	}
	return nil
}

func (c *child) addresses(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		if data, err := os.ReadFile(c.file); err == nil {
			return json.Unmarshal(data, &c.at)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-c.done:
			return errors.New("it ended")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// stop ends the child, by force after a quarter of a minute, and waits for its end.
func (c *child) stop() {
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	select {
	case <-c.done:
	case <-time.After(15 * time.Second):
		_ = c.cmd.Process.Kill()
		<-c.done
	}
}

// lastLines returns the end of the child's log.
func (c *child) lastLines() string {
	data, err := os.ReadFile(c.log)
	if err != nil {
		return ""
	}
	lines := bytes.SplitAfter(data, []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-15):], nil))
}
