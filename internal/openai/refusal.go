// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"

	"github.com/kvroute/kvroute/router"
)

// RefusalConfig configures the wording of [RefusalConfig.Refusal].
type RefusalConfig struct {
	Overload      int    // status for a lack of room; 0 = 429
	WorkerParam   string // name of the parameter that pins a worker
	OverrideParam string // name of the parameter with the override of settings
}

// The values of Retry-After, in seconds.
const (
	retryNoWorker = 5 // for a model without workers: after a short failure a worker is back by then
	retryBusy     = 1
)

// Refusal returns the answer to an error of the router: it is the only map from such errors to
// statuses and codes, so Envoy's clients and those of the HTTP API get the same answers. It is nil
// for errors that are neither the client's mistake nor a lack of workers.
func (c RefusalConfig) Refusal(err error, model string) *Error {
	switch { // first, for an unknown pinned worker may be a lack of workers
	case errors.Is(err, router.ErrUnknownModel):
		return UnknownModel(model)
	case errors.Is(err, router.ErrNoWorkers):
		return &Error{
			Status: http.StatusServiceUnavailable, Message: "no worker of the model is available",
			Type: Unavailable, Code: "no_worker", Retry: retryNoWorker,
		}
	}
	for _, r := range []struct {
		err     error
		code    string
		message string // for a lack of room; "" for a mistake in the parameter
		param   string
	}{
		{router.ErrAllBusy, "all_busy", "all workers of the model are busy", ""},
		{router.ErrPinnedBusy, "worker_busy", "the worker that the request names is busy", ""},
		{router.ErrQueueFull, "queue_full", "too many requests wait for a worker of the model", ""},
		{router.ErrTooLate, "queue_timeout", "no worker of the model became free in time", ""},
		{router.ErrPinMissing, "worker_missing", "", c.WorkerParam},
		{router.ErrPinnedUnknown, "worker_not_found", "", c.WorkerParam},
		{router.ErrPinnedNotAllowed, "worker_not_allowed", "", c.WorkerParam},
		{router.ErrBadOverride, "bad_override", "", c.OverrideParam},
		{router.ErrBadRequest, "bad_request", "", ""},
	} {
		switch {
		case !errors.Is(err, r.err):
		case r.message == "":
			return &Error{
				Status: http.StatusBadRequest, Message: err.Error(), Type: InvalidRequest, Param: r.param, Code: r.code,
			}
		default:
			status := cmp.Or(c.Overload, http.StatusTooManyRequests)
			return &Error{Status: status, Message: r.message, Type: Overloaded, Code: r.code, Retry: retryBusy}
		}
	}
	return nil
}

// UnknownModel is the refusal of a request for a model that no worker serves.
func UnknownModel(model string) *Error {
	return &Error{
		Status:  http.StatusNotFound,
		Message: fmt.Sprintf("the model %q does not exist", model[:min(len(model), 128)]),
		Type:    NotFound, Param: "model", Code: "model_not_found",
	}
}

// NoModel is the refusal of a request that names no model, although there are several.
func NoModel() *Error {
	return bad("model", "you must provide a model parameter: there are several models")
}

// NoDecision is the answer if the router reached no decision, not because of the client, and the
// request cannot continue without one.
func NoDecision() *Error {
	return &Error{
		Status: http.StatusServiceUnavailable, Message: "no worker could be chosen in time", Type: Unavailable,
		Code: "no_decision",
	}
}
