// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// Replica is the answer of /v1/replica. It describes a router replica, so that replicas can be
// compared.
type Replica struct {
	RouterID  uint64 `json:"router_id"` // different after each start
	Replica   string `json:"replica,omitempty"`
	Version   string `json:"version"`
	StartedMS int64  `json:"started_ms"`
	NowMS     int64  `json:"now_ms"`         // by its clock
	Docs      string `json:"docs,omitempty"` // address of the documentation of this version
	Scope     string `json:"scope"`
	HashSeed  int    `json:"hash_seed"`

	Ready Readiness `json:"ready"`
	Bus   bool      `json:"bus"` // it is connected to NATS

	// Synced means that it exchanges its requests in flight with other replicas.
	// ActiveRequests are its requests that it has sent to them, Peers the replicas that it
	// hears and their requests.
	Synced         bool                `json:"synced"`
	ActiveRequests int                 `json:"active_requests"`
	Peers          []replicas.PeerView `json:"peers"`

	// Kubernetes is what each source of workers in Kubernetes has found.
	Kubernetes []pods.State `json:"kubernetes,omitempty"`

	// Envoy is what Envoy's admin endpoint says, with --envoy-admin.
	Envoy *envoy.State `json:"envoy,omitempty"`

	// Pending are the names of the settings that have changed in the configuration file and need
	// a restart.
	Pending []string `json:"pending,omitempty"`
	// Refused says why the configuration file, which has changed, cannot be used.
	Refused string `json:"refused,omitempty"`

	// Settings are the settings that all replicas should have in common, by name.
	Settings map[string]any `json:"settings"`
}

func (c *Config) replica() any { return c.describe(c.Router.Workers()) }

// describe returns the description of this replica with these workers.
func (c *Config) describe(workers []router.WorkerState) Replica {
	var r Replica
	if c.Replica != nil {
		r = c.Replica()
	}
	r.Docs = c.Docs
	r.NowMS, r.Scope, r.HashSeed = time.Now().UnixMilli(), c.Scope, hashSeed
	r.Ready, _ = c.readiness(workers)
	if r.Peers == nil {
		r.Peers = []replicas.PeerView{} // a list in JSON, not null
	}
	return r
}

// Readiness is the answer of /readyz.
type Readiness struct {
	Status string          `json:"status"` // "ready", "degraded" or "not ready"
	Checks map[string]bool `json:"checks"`
}

// Readiness returns the answer of /readyz and its status.
func (c *Config) Readiness() (r Readiness, status int) { return c.readiness(c.Router.Workers()) }

func (c *Config) readiness(workers []router.WorkerState) (r Readiness, status int) {
	r, status = Readiness{Status: "ready", Checks: map[string]bool{}}, http.StatusOK
	some, healthy := readWorkers(workers)
	for _, check := range append([]Check{
		{Name: "workers", OK: func() bool { return some }, Required: true},
		{Name: "healthy_workers", OK: func() bool { return healthy }},
	}, c.Ready...) {
		ok := check.OK()
		r.Checks[check.Name] = ok
		switch {
		case ok:
		case check.Required:
			r.Status, status = "not ready", http.StatusServiceUnavailable
		case r.Status == "ready":
			r.Status = "degraded"
		}
	}
	return r, status
}

// readWorkers says whether a worker can take requests, and whether each model with such workers has one that is
// healthy, degraded or starting: otherwise requests go to unhealthy workers.
func readWorkers(workers []router.WorkerState) (some, healthy bool) {
	models := map[string]bool{} // models with workers that can take requests, and whether one of them is usable
	for i := range workers {
		w := &workers[i]
		if !w.Draining && w.Health != router.NotReady.String() && (usable(w) || !w.Refuses) {
			models[w.Model] = models[w.Model] || usable(w)
		}
	}
	healthy = true
	for _, is := range models {
		healthy = healthy && is
	}
	return len(models) > 0, healthy
}

// usable says whether a worker gets requests while all is well.
func usable(w *router.WorkerState) bool {
	return w.Health == router.Healthy.String() || w.Health == router.Degraded.String() || w.Health == router.Starting.String()
}
