// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"math"

	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// groups is what ties this router to router groups: below it, or the one that it is.
// What does not apply is nil.
type groups struct {
	publisher *replicas.GroupPublisher // --group
	heard     *replicas.Groups         // "groups" of the file
}

// most is how many groups of a model are asked at most; 0 is what package fleet says.
func (c *config) most() int {
	if c.GroupProbe == "on" {
		return math.MaxInt
	}
	return 0
}

// openProbes makes who asks groups, for a router that is to ask.
func (s *server) openProbes() (ask func(context.Context, router.Probe) []router.ProbeAnswer, err error) {
	if len(s.conf.Groups) == 0 || s.conf.GroupProbe == "off" {
		return nil, nil
	}
	probes, err := replicas.NewProbes(s.nc, replicas.ProbesConfig{
		Scope: s.scope, Most: s.conf.most(), Budget: s.conf.GroupProbeBudget, Meter: s.metrics.Meter("fleet"),
	})
	if err != nil {
		return nil, err
	}
	return probes.Ask, nil
}

// openGroups makes the rest, once the fleet can be told.
func (s *server) openGroups() (err error) {
	c := &s.conf
	if c.Group != "" {
		s.groups.publisher, err = replicas.NewGroupPublisher(s.nc, replicas.GroupPublisherConfig{
			Scope: s.scope, Group: c.Group, ID: s.id, Router: s.router, Interval: c.GroupInterval,
			Meter: s.metrics.Meter("fleet"),
		})
		return err
	}
	if len(c.Groups) == 0 {
		return nil
	}
	s.groups.heard, err = replicas.NewGroups(s.nc, replicas.GroupsConfig{
		Scope: s.scope, Groups: c.Groups, Set: s.static.setGroups, Summary: s.router.SetSummary,
		Log: s.log, Meter: s.metrics.Meter("fleet"),
	})
	return err
}

// run runs what there is in a group of parts.
func (g *groups) run(ctx context.Context, parts *errgroup.Group) {
	if g.publisher != nil {
		parts.Go(func() error { return g.publisher.Run(ctx) })
	}
	if g.heard != nil {
		parts.Go(func() error { return g.heard.Run(ctx) })
	}
}

var errNewGroups = errors.New("groups are new: kvroute must be started with them")

// reload replaces the groups of the configuration, and returns how to take that back.
func (g *groups) reload(was, list groupList) (undo func(), err error) {
	switch {
	case g.heard != nil:
		return func() { _ = g.heard.Replace(was) }, g.heard.Replace(list) // what was there was good
	case len(list) > 0:
		return nil, errNewGroups
	}
	return func() {}, nil
}
