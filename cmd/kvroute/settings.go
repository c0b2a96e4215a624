// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/replicas"
)

// defaults returns the configuration without file and flags.
func defaults() (c config) {
	c.Version = 1
	settings.SetDefaults(&c)
	return c
}

// parseSettings sets a struct with the tags of package settings to its defaults and the flags of a
// command, and checks it.
func parseSettings(name string, args []string, to any) error {
	settings.SetDefaults(to)
	fs := newFlagSet(name)
	settings.AddFlags(fs, to)
	if err := parse(fs, args); err != nil {
		return err
	}
	return settings.Check(to)
}

// check refuses values that no other package checks, or checks only under another name.
func (c *config) check() error {
	errs := []error{
		settings.Check(c), c.checkAddresses(), c.checkModels(), c.Dynamo.check(), c.Kubernetes.check(c.WorkerNetworks), replicas.CheckGroups(c.Groups),
		c.checkWorkers(),
	}
	admin, err := url.Parse(c.EnvoyAdmin)
	isAdmin := err == nil && admin.Host != "" && admin.User == nil && (admin.Scheme == "http" || admin.Scheme == "https")
	refuse := func(wrong bool, format string, values ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf(format, values...))
		}
	}
	r := c.KVEventsRetention
	refuse(r != 0 && (r < 30*time.Minute || r > 8760*time.Hour), "kv-events-retention is %q, want 0, or 30m to 8760h", r)
	refuse(c.HTTPAddress == c.ExtprocAddress && !strings.HasSuffix(c.HTTPAddress, ":0"),
		"http-address is %q, want another one than extproc-address", c.HTTPAddress)
	refuse(c.DegradedAfter < fleet.MinAge || c.DegradedAfter > time.Hour,
		"degraded-after is %q, want %v to 1h", c.DegradedAfter, fleet.MinAge)
	refuse(c.UnhealthyAfter < c.DegradedAfter || c.UnhealthyAfter > time.Hour,
		"unhealthy-after is %q, want %v (degraded-after) to 1h", c.UnhealthyAfter, c.DegradedAfter)
	refuse(c.ExpiredAfter < c.UnhealthyAfter || c.ExpiredAfter > time.Hour,
		"expired-after is %q, want %v (unhealthy-after) to 1h", c.ExpiredAfter, c.UnhealthyAfter)
	refuse(r != 0 && !c.DurableKVEvents,
		"kv-events-retention needs durable-kv-events: without it no stream keeps events")
	refuse(c.EnvoyAdmin != "" && !isAdmin, "envoy-admin is %q, want http://host:port", bus.Redact(c.EnvoyAdmin))
	refuse(c.Group != "" && len(c.Groups) > 0,
		"group and groups are both given: the router of a group has workers, not groups")
	longest := c.longestWait()
	refuse(c.EnvoyAdmin == "" && c.EnvoyMaxMessageTimeout > 0 && longest > c.EnvoyMaxMessageTimeout,
		"%s is too long: with the other waits (queue-wait of the queue, prefill-timeout, 0.5s) it is %v, and Envoy waits for %v (envoy-max-message-timeout). "+
			"Give kvroute config envoy the same values, and set envoy-max-message-timeout to %v",
		c.longSetting(), longest, c.EnvoyMaxMessageTimeout, longest)
	_, access := c.Options()
	errs = append(errs, access)
	if c.NATSURL != "" && !strings.HasPrefix(c.NATSURL, "file:") {
		errs = append(errs, bus.CheckURL(c.NATSURL))
	}
	_, routing := c.routing()
	return errors.Join(append(errs, routing)...)
}

// longestWait returns for how long Envoy may have to wait for a decision that kvroute has announced as late.
func (c *config) longestWait() time.Duration {
	longest := 500 * time.Millisecond
	if c.RouterQueueThreshold != nil {
		longest += c.QueueWait
	}
	if c.PrefillLeg == extproc.PrefillByRouter {
		longest += c.PrefillTimeout
	}
	return longest
}

// longSetting names the setting that makes the wait long.
func (c *config) longSetting() string {
	if c.PrefillLeg == extproc.PrefillByRouter {
		return "prefill-timeout"
	}
	return "queue-wait"
}

// checkAddresses refuses invalid addresses, and addresses that other machines can reach without
// permission.
func (c *config) checkAddresses() error {
	var errs []error
	for _, a := range []struct{ name, value, guard, need string }{
		{"http-address", c.HTTPAddress, c.APITokenFile, "api-token-file"},
		{"extproc-address", c.ExtprocAddress, c.ExtprocTLSClientCA, "extproc-tls-client-ca"},
		{"nats-listen", c.NATSListen, "", "nats-url of a server with TLS, since the password here is not encrypted"},
	} {
		if _, _, err := splitAddress(a.value); err != nil && (a.value != "" || a.name != "nats-listen") {
			errs = append(errs, fmt.Errorf("%s is %q, want ip:port", a.name, a.value))
		} else if !c.TrustedNetwork && a.guard == "" && !loopback(a.value) {
			errs = append(errs, fmt.Errorf("%s is %q, which other machines can reach; "+
				"give %s, or trusted-network if only trusted clients reach it", a.name, a.value, a.need))
		}
	}
	return errors.Join(errs...)
}

func (c *config) checkModels() error {
	var errs []error
	seen := map[string]bool{}
	for i, m := range c.Models {
		wrong := ""
		switch {
		case m.Name == "":
			wrong = "name: want a name"
		case seen[m.Name]:
			wrong = "name: want each name once"
		case m.Tokenizer == "":
			wrong = "tokenizer: want a folder"
		case m.BlockSize < 0:
			wrong = "block-size: want 0 or more tokens"
		}
		if wrong != "" {
			errs = append(errs, fmt.Errorf("models[%d].%s", i, wrong))
		}
		seen[m.Name] = true
	}
	return errors.Join(errs...)
}
