// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/netip"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/scorer"
)

// printConfig checks a configuration and prints it with its defaults, in the form of the
// configuration file, without the passwords in URLs.
func printConfig(ctx context.Context, args []string, std stdio) error {
	c, _, err := readConfig("config", args, std.err, nil)
	if err != nil {
		return err
	}
	networks, err := reach.Parse(c.WorkerNetworks)
	if err != nil {
		return err
	}
	// Names are not looked up: this machine's DNS may differ from the router's.
	names := fleet.Names{Lookup: func(context.Context, string) ([]netip.Addr, error) {
		if a := networks.First(); a.IsValid() {
			return []netip.Addr{a}, nil
		}
		return []netip.Addr{netip.IPv6Loopback()}, nil
	}}
	workers, _ := names.Resolve(ctx, c.Workers)
	for i := range workers {
		if _, err := workers[i].Info(networks); err != nil {
			return err
		}
	}
	rc, err := c.checkedRouting()
	if err != nil {
		return err
	}
	c.NATSURL = bus.Redact(c.NATSURL)
	for i := range c.Workers { // an engine behind a proxy may have a password in its URL
		c.Workers[i].Events.Endpoint = bus.Redact(c.Workers[i].Events.Endpoint)
	}
	text, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	if _, err = std.out.Write(text); err != nil {
		return err
	}
	return c.printCost(std.out, rc.Scoring)
}

// printCost adds the cost that follows from the settings, as comments.
func (c *config) printCost(out io.Writer, s scorer.Settings) (err error) {
	say := func(format string, args ...any) {
		if err == nil {
			_, err = fmt.Fprintf(out, "# "+format+"\n", args...)
		}
	}
	say("a worker costs: %s", s.Policy)
	if s.Policy != scorer.Tokens {
		return err
	}
	say("attention: %.2g", s.Attention)
	for _, m := range c.Models {
		if weight := m.attention(); weight != nil && c.Attention == "auto" {
			say("attention of %s: %.2g, by its config.json", m.Name, *weight)
		}
	}
	return err
}

// printEnvoy prints an Envoy bootstrap.
func printEnvoy(_ context.Context, args []string, std stdio) error {
	var c envoy.Config
	fs := newFlagSet("config envoy", std.err)
	envoyFlags(fs, &c)
	if err := parse(fs, args); err != nil {
		return err
	}
	if len(c.ExtProc) == 0 {
		c.ExtProc = []string{defaults().ExtprocAddress}
	}
	return envoy.Render(std.out, c)
}

func envoyFlags(fs *flag.FlagSet, c *envoy.Config) {
	list := func(to *[]string, name, help string) {
		fs.Func(name, help, func(s string) error {
			*to = append(*to, s)
			return nil
		})
	}
	fs.StringVar((*string)(&c.BodyMode), "body-mode", string(envoy.Buffered), "buffered, buffered-partial, streamed, streamed-ahead or full-duplex: how Envoy sends request bodies to kvroute")
	fs.StringVar(&c.ListenAddress, "listen", "127.0.0.1:8080", "`ip:port` that takes the clients' requests")
	fs.StringVar(&c.AdminAddress, "admin", "127.0.0.1:9901", "`ip:port` of Envoy's administration")
	list(&c.ExtProc, "extproc", "`host:port` of a kvroute replica, or unix:/path; may be given several times (default 127.0.0.1:9002)")
	list(&c.Pool, "pool", "`host:port` of a worker, for requests that kvroute does not route; may be given several times")
	list(&c.AllowPaths, "allow-path", "`path` that clients may reach on workers beside the inference paths, or /path/* for all below it; may be given several times")
	fs.Int64Var(&c.MaxHeapBytes, "max-heap-bytes", 0, "`bytes` of memory that Envoy may use; near the limit new requests get 503 (default 2 GiB)")
	fs.IntVar(&c.MaxConnections, "max-connections", 0, "`number` of client connections that Envoy accepts (default 40000)")
	fs.StringVar(&c.CA, "extproc-ca", "", "`file` with the authority of kvroute's certificate; turns TLS to kvroute on")
	fs.StringVar(&c.Cert, "extproc-cert", "", "`file` with Envoy's own certificate for kvroute")
	fs.StringVar(&c.Key, "extproc-key", "", "`file` with the key of extproc-cert")
	fs.StringVar(&c.ServerName, "extproc-name", "", "`name` in kvroute's certificate")
	fs.StringVar(&c.PoolFile, "pool-file", "", "`file` with the workers instead of pool, which kvroute's --endpoint-file updates")
	fs.BoolVar(&c.WorkerHTTP2, "worker-http2", false, "use HTTP/2 without TLS to the workers")
	fs.StringVar((*string)(&c.Failover), "failover", string(envoy.Composite), "composite, list or none: how Envoy reaches the second worker if the first one refuses")
	fs.IntVar(&c.MaxBodyBytes, "max-body-bytes", defaults().MaxBodyBytes, "largest request body in `bytes`")
	fs.DurationVar(&c.MessageTimeout, "message-timeout", 0, "`time` for which Envoy waits for kvroute (default 2s)")
	fs.DurationVar(&c.RequestTimeout, "request-timeout", 0, "`time` that a client may take to send a request (default 5m)")
	fs.DurationVar(&c.IdleTimeout, "idle-timeout", 0, "longest `time` without a byte of a response, as before its first token (default 1h)")
	fs.BoolVar(&c.EngineLoad, "engine-load", false, "have engines report their load in each response")
	fs.BoolVar(&c.NoObserver, "no-observer", false, "leave out the filter that reports the first token")
}
