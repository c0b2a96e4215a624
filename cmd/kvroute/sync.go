// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// openSync makes the exchange of requests with the other replicas.
func (s *server) openSync() (err error) {
	if !s.conf.RouterReplicaSync {
		return nil
	}
	var bind func(router.SessionBinding) bool
	if s.conf.SessionAffinityTTL > 0 {
		bind = s.router.PeerSession
	}
	s.sync, err = replicas.NewSync(s.nc, replicas.SyncConfig{
		Scope: s.conf.Scope, ID: s.id, Presence: replicas.Presence{
			RouterID: s.id, StartedMS: s.begun.UnixMilli(), Version: telemetry.Version(),
			Replica: replicaName(&s.conf), Group: s.conf.Group,
		},
		Apply: s.router.PeerChanged, Remove: s.router.RemovePeer, FirstToken: s.router.MarkPrefillCompleted, Bind: bind,
		BindGiven: s.router.PeerGave, Given: s.router.GivenBindings,
		Log: s.log, Meter: s.metrics.Meter("fleet"),
	})
	return err
}

// publishChange returns the function that receives each change of the router's slots; nil without the
// exchange.
func (s *server) publishChange() func(router.Change) {
	if !s.conf.RouterReplicaSync {
		return nil
	}
	return func(c router.Change) { s.sync.Publish(c) }
}

// publishSession returns the function that receives each binding of a session; nil without the
// exchange, or without sessions.
func (s *server) publishSession() func(router.SessionBinding) {
	if !s.conf.RouterReplicaSync || s.conf.SessionAffinityTTL == 0 {
		return nil
	}
	return func(b router.SessionBinding) { s.sync.PublishSession(b) }
}

// publishGiven returns the function that receives each id that a worker gave out; nil without the exchange.
func (s *server) publishGiven() func(router.GivenBinding) {
	if !s.conf.RouterReplicaSync {
		return nil
	}
	return func(b router.GivenBinding) { s.sync.PublishGiven(b) }
}

// replica is what /v1/replica answers, for `kvroute doctor`.
func (s *server) replica() api.Replica {
	r := api.Replica{
		RouterID: s.id, Replica: replicaName(&s.conf), Version: telemetry.Version(), StartedMS: s.begun.UnixMilli(),
		Bus: s.nc.IsConnected(), Synced: s.sync != nil, Settings: s.shared.Load().(map[string]any),
	}
	r.Pending, _ = s.pending.Load().([]string)
	r.Refused, _ = s.refused.Load().(string)
	if s.pods != nil {
		r.Kubernetes = s.pods.States()
	}
	if s.watch != nil {
		r.Envoy = new(s.watch.State())
	}
	if s.sync != nil {
		r.ActiveRequests, r.Peers = s.sync.Views()
	}
	return r
}

// shared returns the settings that all replicas should have in common, by their names. It omits
// settings without help: secrets, and workers and models, which the doctor compares as the router
// reports them.
func (c *config) shared() (values map[string]any) {
	text, _ := yaml.Marshal(c) // plain values
	_ = yaml.Unmarshal(text, &values)
	for name, s := range settings.All(c) {
		if s.Tag.Get("own") != "" || s.Help == "" {
			delete(values, name)
		}
	}
	return values
}

// workerChanged reports to the exchange that a worker was added, or removed with its slots.
func (s *server) workerChanged(id uint64, there bool) {
	if s.sync != nil {
		s.sync.WorkerChanged(id, there)
	}
}
