// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"math"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// openProbes returns the function by which the router asks groups about a request; nil if
// it does not ask.
func (s *server) openProbes() (ask func(context.Context, router.Probe) []router.ProbeAnswer, err error) {
	if len(s.conf.Groups) == 0 || s.conf.GroupProbe == "off" {
		return nil, nil
	}
	most := 0 // of the groups of a model: the default
	if s.conf.GroupProbe == "on" {
		most = math.MaxInt
	}
	probes, err := replicas.NewProbes(s.nc, replicas.ProbesConfig{
		Scope: s.conf.Scope, Most: most, Budget: s.conf.GroupProbeBudget, Meter: s.metrics.Meter("fleet"),
	})
	if err != nil {
		return nil, err
	}
	return probes.Ask, nil
}

// openGroups makes the publisher of this router's group, or the reader of the groups below.
func (s *server) openGroups() (err error) {
	c := &s.conf
	switch {
	case c.Group != "":
		s.group, err = replicas.NewGroupPublisher(s.nc, replicas.GroupPublisherConfig{
			Scope: s.conf.Scope, Group: c.Group, ID: s.id, Router: s.router, Interval: c.GroupInterval,
			Meter: s.metrics.Meter("fleet"),
		})
	case len(c.Groups) > 0:
		s.groups, err = replicas.NewGroups(s.nc, replicas.GroupsConfig{
			Scope: s.conf.Scope, Groups: c.Groups, Summary: s.router.SetSummary, Log: s.log, Meter: s.metrics.Meter("fleet"),
			Set: func(groups []fleet.Record) error { return s.static.replace(&s.static.groups, groups) },
		})
	}
	return err
}

// reloadGroups replaces the groups of the configuration, and returns how to take that back. A kvroute
// without groups gets them only at a start.
func (s *server) reloadGroups(groups groupList) (undo func(), err error) {
	if s.groups == nil {
		return func() {}, nil
	}
	return func() { _ = s.groups.Replace(s.conf.Groups) }, s.groups.Replace(groups) // the old ones were valid
}
