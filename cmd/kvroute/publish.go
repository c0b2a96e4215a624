// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/sidecar"
)

// publish runs beside an engine until ctx ends: it publishes the events of the engine's
// cache, registers the worker, and keeps it registered while the engine is healthy. It fails
// when another engine is at the address: a restart of publish then registers that engine.
func publish(ctx context.Context, args []string, std stdio) error {
	var c sidecar.Config
	if err := parseSettings("publish", args, &c); err != nil {
		return err
	}
	log := telemetry.NewLogger(std.err, telemetry.Level(c.LogLevel), c.LogFormat, nil)
	metrics, err := telemetry.NewMetrics()
	if err != nil {
		return err
	}
	defer func() { _ = metrics.Shutdown(context.WithoutCancel(ctx)) }() // nothing is exported at the end
	s, err := sidecar.New(&c, log, metrics.Meter("publish"))
	if err != nil {
		return err
	}
	return s.Run(ctx, metrics.Handler())
}
