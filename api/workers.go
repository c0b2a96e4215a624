// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
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

// registration is the body of a registration.
type registration struct {
	fleet.Record
	DecodeThroughput *float64 `json:"decode_throughput"` // unread: mini-dynamo's workers register it, and no cost depends on it
}

func (c *Config) register(r *http.Request, body *registration) (any, *openai.Error) {
	info, err := c.Fleet.Register(r.Context(), body.Record)
	return registered{info.ID, info.Name}, fleetError(err)
}

// beat is the body of a heartbeat. The worker is the path's.
type beat struct {
	WorkerID *uint64 `json:"worker_id"` // unread
	TS       *int64  `json:"ts_ms"`     // unread: kvroute uses its own clock
	// The worker's load; a missing field counts as 0.
	fleet.Load
	ActivePrefillTokens int `json:"active_prefill_tokens"` // unread: kvroute counts its requests
	// Unread: kvroute has the cache from the worker's events, or predicts it from the worker's requests.
	CachedPrefixes json.RawMessage `json:"cached_prefixes"`
}

func (c *Config) heartbeat(r *http.Request, b *beat) (any, *openai.Error) {
	id := c.Fleet.Find(r.PathValue("id"))
	err := c.Fleet.Beat(r.Context(), fleet.Heartbeat{WorkerID: id, Load: b.Load})
	return registered{WorkerID: id}, fleetError(err)
}

func (c *Config) deregister(r *http.Request) (any, *openai.Error) {
	id := c.Fleet.Find(r.PathValue("id"))
	return registered{WorkerID: id}, fleetError(c.Fleet.Deregister(r.Context(), id))
}

func fleetError(err error) *openai.Error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fleet.ErrNotRegistered):
		return failure(http.StatusNotFound, openai.NotFound, "", err.Error()+": register it with POST /v1/workers")
	case errors.Is(err, fleet.ErrConfigured):
		return failure(http.StatusConflict, openai.InvalidRequest, "", err.Error())
	case errors.Is(err, fleet.ErrBusAway):
		return &openai.Error{Status: http.StatusServiceUnavailable, Message: err.Error(), Type: openai.Unavailable, Retry: 1}
	}
	return invalid("", err.Error())
}
