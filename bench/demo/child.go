// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"os"
	"slices"

	"github.com/kvroute/kvroute/internal/process"
)

// AnyNetwork are all networks, and loopback by name: there the workers of children register.
const AnyNetwork = "0.0.0.0/0,::/0,127.0.0.0/8,::1/128"

// A Child is another kvroute process that this one started. It cannot outlive this process.
type Child = process.Child

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
	if args[0] == "serve" { // the first of equal flags counts least
		args = slices.Insert(slices.Clone(args), 1, "--worker-networks", AnyNetwork)
	}
	return process.LaunchChild(dir, name, self, args...)
}
