// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
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
	if err := parseSettings("config envoy", args, std.err, &c); err != nil {
		return err
	}
	if len(c.ExtProc) == 0 {
		c.ExtProc = []string{defaults().ExtprocAddress}
	}
	return envoy.Render(std.out, c)
}
