// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// Patience is far above the time that anything but a real engine's start takes on a busy
// machine. It is also above the 60 s after which Envoy checks an unhealthy host without
// traffic again, where the configuration cannot say otherwise.
const Patience = 3 * time.Minute

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

// Get fetches a URL. A status other than 200 is an error.
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
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers with status %d: %.300s", url, resp.StatusCode, body)
	}
	return body, err
}

// GetJSON fetches a URL and decodes the answer.
func GetJSON[T any](ctx context.Context, url string, into *T) error {
	body, err := Get(ctx, url)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("read the answer of %s: %w", url, err)
	}
	return nil
}
