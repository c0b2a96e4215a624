// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/internal/envoytest"
)

// Patience is far above what anything here takes on a busy machine.
const Patience = time.Minute

// AnyNetwork are all networks, and loopback by name: there the workers of children register.
const AnyNetwork = "0.0.0.0/0,::/0,127.0.0.0/8,::1/128"

// A Child is another kvroute process that this one started. It cannot outlive this process.
type Child struct {
	Name string
	Cmd  *exec.Cmd
	At   Addresses
	Log  string        // path
	Done chan struct{} // closed when it has ended

	file string // path of its addresses, once it is ready
}

// Addresses is what a child writes to its ready file.
type Addresses struct{ Extproc, HTTP, NATS, Events, Queries string }

// Start starts a kvroute command that has the flag --ready-file, and waits for its
// addresses. dir gets its log.
func Start(ctx context.Context, dir, name string, args ...string) (*Child, error) {
	c, err := Launch(dir, name, args...)
	if err != nil {
		return nil, err
	}
	return c, c.WaitReady(ctx)
}

// Launch is [Start] without waiting.
func Launch(dir, name string, args ...string) (*Child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &Child{Name: name, Log: filepath.Join(dir, name+".log"), file: filepath.Join(dir, name+".ready"), Done: make(chan struct{})}
	if err := os.Remove(c.file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	log, err := os.OpenFile(c.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	if args[0] == "serve" { // the first of equal flags counts least
		args = slices.Insert(slices.Clone(args), 1, "--worker-networks", AnyNetwork)
	}
	c.Cmd = exec.Command(self, append(args, "--ready-file", c.file)...)
	c.Cmd.Stdout, c.Cmd.Stderr, c.Cmd.SysProcAttr = log, log, envoytest.OwnGroup()
	err = c.Cmd.Start()
	_ = log.Close() // the child has its own
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = c.Cmd.Wait() // how it ended is in its log
		close(c.Done)
	}()
	return c, nil
}

// WaitReady waits for the child's addresses, and stops it if they do not come.
func (c *Child) WaitReady(ctx context.Context) error {
	var data []byte
	err := Poll(ctx, Patience, "it writes no addresses", func(context.Context) (ok bool) {
		select {
		case <-c.Done:
			return true
		default:
		}
		var err error
		data, err = os.ReadFile(c.file)
		return err == nil
	})
	if err == nil && data == nil {
		err = errors.New("it ended")
	}
	if err == nil {
		err = json.Unmarshal(data, &c.At)
	}
	if err != nil {
		c.Stop()
		return fmt.Errorf("start %s: %w\n%s", c.Name, err, c.LastLines())
	}
	return nil
}

// Stop ends the child, by force after a quarter of a minute, and waits for its end. No
// child needs no end.
func (c *Child) Stop() {
	if c == nil {
		return
	}
	_ = c.Cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	select {
	case <-c.Done:
	case <-time.After(15 * time.Second):
		_ = c.Cmd.Process.Kill()
		<-c.Done
	}
}

// LastLines returns the end of the child's log.
func (c *Child) LastLines() string {
	data, err := os.ReadFile(c.Log)
	if err != nil {
		return ""
	}
	lines := bytes.SplitAfter(data, []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-15):], nil))
}

// Poll asks until the answer is yes, for a limited time, after which the error is otherwise.
func Poll(ctx context.Context, limit time.Duration, otherwise string, ask func(context.Context) bool) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for !ask(limited) {
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return errors.New(otherwise)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// Get fetches a URL.
func Get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers with status %d: %s", url, resp.StatusCode, text)
	}
	return text, err
}

// GetJSON fetches JSON of kvroute's own.
func GetJSON[T any](ctx context.Context, url string, into *T) error {
	text, err := Get(ctx, url)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("read the answer of %s: %w", url, err)
	}
	return nil
}
