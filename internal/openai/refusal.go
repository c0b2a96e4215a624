// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/kvroute/kvroute/router"
)

// RefusalConfig says how [RefusalConfig.Refusal] words an error.
type RefusalConfig struct {
	Overload      int    // status for a lack of room; 0 = 429
	WorkerParam   string // name of the parameter that pins a worker
	OverrideParam string // name of the parameter with the override of settings
}

// retryNoWorker is the Retry-After of a model without workers: after a hiccup a worker is
// back by then.
const retryNoWorker = 5

// Refusal returns what the client is told of an error of the router. It is the only map
// from such errors to statuses and codes: Envoy's clients and those of the HTTP API get the
// same answers. It is nil for errors that are neither the client's mistake nor a lack of
// workers.
func (c RefusalConfig) Refusal(err error, model string) *Error {
	busy := func(code, message string) *Error {
		status := c.Overload
		if status == 0 {
			status = http.StatusTooManyRequests
		}
		return &Error{Status: status, Message: message, Type: Overloaded, Code: code, Retry: router.RetryAfter(err)}
	}
	wrong := func(param, code string) *Error {
		return &Error{Status: http.StatusBadRequest, Message: err.Error(), Type: InvalidRequest, Param: param, Code: code}
	}
	switch {
	case errors.Is(err, router.ErrUnknownModel):
		return UnknownModel(model)
	case errors.Is(err, router.ErrNoWorkers):
		return &Error{
			Status: http.StatusServiceUnavailable, Message: "no worker of the model is available",
			Type: Unavailable, Code: "no_worker", Retry: retryNoWorker,
		}
	case errors.Is(err, router.ErrAllBusy):
		return busy("all_busy", "all workers of the model are busy")
	case errors.Is(err, router.ErrPinnedBusy):
		return busy("worker_busy", "the worker that the request names is busy")
	case errors.Is(err, router.ErrQueueFull):
		return busy("queue_full", "too many requests wait for a worker of the model")
	case errors.Is(err, router.ErrTooLate):
		return busy("queue_timeout", "no worker of the model became free in time")
	case errors.Is(err, router.ErrPinMissing):
		return wrong(c.WorkerParam, "worker_missing")
	case errors.Is(err, router.ErrPinnedUnknown):
		return wrong(c.WorkerParam, "worker_not_found")
	case errors.Is(err, router.ErrPinnedNotAllowed):
		return wrong(c.WorkerParam, "worker_not_allowed")
	case errors.Is(err, router.ErrBadOverride):
		return wrong(c.OverrideParam, "bad_override")
	case errors.Is(err, router.ErrBadRequest):
		return wrong("", "bad_request")
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

// NoDecision is the answer where the router reached no decision, through no fault of the
// client's, and the request cannot go on without one.
func NoDecision() *Error {
	return &Error{Status: http.StatusServiceUnavailable, Message: "no worker could be chosen in time", Type: Unavailable, Code: "no_decision"}
}
