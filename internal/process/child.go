// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
)

// A Child is a program that has the flag --ready-file, to which it writes its addresses
// once it is ready.
type Child struct {
	*Process
	At Addresses

	file string // the ready file
}

// Addresses are the contents of a ready file.
type Addresses struct{ Extproc, HTTP, NATS, Events, Queries string }

// StartChild starts a program and waits for its addresses. The folder dir gets its log and
// the ready file.
func StartChild(ctx context.Context, dir, name, program string, args ...string) (*Child, error) {
	c, err := LaunchChild(dir, name, program, args...)
	if err != nil {
		return nil, err
	}
	return c, c.WaitReady(ctx)
}

// LaunchChild is [StartChild] without waiting.
func LaunchChild(dir, name, program string, args ...string) (*Child, error) {
	c := &Child{file: filepath.Join(dir, name+".ready")}
	if err := os.Remove(c.file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var err error
	c.Process, err = Start(dir, name, exec.Command(program, append(args, "--ready-file", c.file)...))
	return c, err
}

// WaitReady waits for the child's addresses, and stops the child if they do not come.
func (c *Child) WaitReady(ctx context.Context) error {
	err := c.Await(ctx, Patience, "it writes its addresses", func(context.Context) bool {
		data, err := os.ReadFile(c.file)
		return err == nil && json.Unmarshal(data, &c.At) == nil
	})
	if err != nil {
		c.Stop()
	}
	return err
}

// Stop ends the child, by force if it does not end by itself. A nil child needs no end.
func (c *Child) Stop() {
	if c != nil {
		c.Process.Stop()
	}
}
