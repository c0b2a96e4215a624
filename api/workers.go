// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"net/http"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/openai"
)

// registered is the answer to a registration.
type registered struct {
	WorkerID uint64 `json:"worker_id"`
	Name     string `json:"name,omitempty"`
}

func (c *Config) register(w http.ResponseWriter, r *http.Request) {
	var record fleet.Record
	if !read(w, r, &record) {
		return
	}
	info, err := c.Fleet.Register(r.Context(), record)
	if err != nil {
		failFleet(w, err)
		return
	}
	write(w, http.StatusCreated, registered{info.ID, info.Name})
}

// beat is the body of a heartbeat. The worker is the path's.
type beat struct {
	WorkerID *uint64 `json:"worker_id"` // unread
	TS       *int64  `json:"ts_ms"`     // unread: the times are ours
	// Of a worker's work; what is missing counts as 0.
	fleet.Load
	ActivePrefillTokens int            `json:"active_prefill_tokens"` // unread: we know what we sent
	CachedPrefixes      map[string]int `json:"cached_prefixes"`
}

func (c *Config) heartbeat(w http.ResponseWriter, r *http.Request) {
	var b beat
	if !read(w, r, &b) {
		return
	}
	if _, err := fleet.ParsePrefixes(b.CachedPrefixes); err != nil {
		fail(w, http.StatusBadRequest, openai.InvalidRequest, "cached_prefixes", err.Error())
		return
	}
	h := fleet.Heartbeat{WorkerID: c.Fleet.Find(r.PathValue("id")), Load: b.Load, CachedPrefixes: b.CachedPrefixes}
	if err := c.Fleet.Beat(r.Context(), h); err != nil {
		failFleet(w, err)
		return
	}
	write(w, http.StatusOK, registered{WorkerID: h.WorkerID})
}

func (c *Config) deregister(w http.ResponseWriter, r *http.Request) {
	id := c.Fleet.Find(r.PathValue("id"))
	if err := c.Fleet.Deregister(r.Context(), id); err != nil {
		failFleet(w, err)
		return
	}
	write(w, http.StatusOK, registered{WorkerID: id})
}

func failFleet(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, fleet.ErrNotRegistered):
		fail(w, http.StatusNotFound, openai.NotFound, "", err.Error()+": register it with POST /v1/workers")
	case errors.Is(err, fleet.ErrConfigured):
		fail(w, http.StatusConflict, openai.InvalidRequest, "", err.Error())
	case errors.Is(err, fleet.ErrBusAway):
		w.Header().Set("Retry-After", "1")
		fail(w, http.StatusServiceUnavailable, openai.Unavailable, "", err.Error())
	default:
		fail(w, http.StatusBadRequest, openai.InvalidRequest, "", err.Error())
	}
}
