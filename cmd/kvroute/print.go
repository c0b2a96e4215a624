// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/bus"
)

// printConfig checks a configuration and prints it with its defaults, in the form of the
// configuration file, without the passwords in URLs.
func printConfig(_ context.Context, args []string, std stdio) error {
	c, _, err := readConfig("config", args, nil)
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
	_, err = std.out.Write(text)
	return err
}

// printEnvoy prints an Envoy bootstrap.
func printEnvoy(_ context.Context, args []string, std stdio) error {
	var c envoy.Config
	if err := parseSettings("config envoy", args, &c); err != nil {
		return err
	}
	if len(c.ExtProc) == 0 {
		c.ExtProc = []string{defaults().ExtprocAddress}
	}
	err := envoy.Render(std.out, c)
	if err == nil && len(c.Pool) == 0 && c.PoolFile == "" && c.PoolCluster == "" {
		_, err = fmt.Fprintln(std.err, "kvroute config envoy: no pool: Envoy answers 503 to requests that kvroute does not route, "+
			"and to all while kvroute is down; add --pool for each worker, or --pool-file")
	}
	return err
}
