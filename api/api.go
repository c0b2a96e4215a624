// SPDX-License-Identifier: Apache-2.0

// Package api serves kvroute's HTTP API: health, metrics, workers and models, explained
// decisions, and the routing calls for clients that do not use Envoy.
//
//	GET /healthz                  200 while the process runs
//	GET /readyz                   200 if requests can be routed, else 503; JSON that says what is missing
//	GET /metrics                  Prometheus text
//	GET /v1/replica               JSON: which router replica this is, how it is set up, and which others it hears
//	GET /v1/workers               JSON: every worker with its cache and load, and the workers that left within an hour
//	GET /v1/models                JSON: every model with its names and how its prompts become token ids
//	GET /v1/decisions?id=ID       JSON: one kept decision with every candidate's inputs
//	GET /v1/decisions?limit=N     JSON: the newest ones, 20 if not said, at most 1,000
//	GET /v1/live                  JSON: an object with replica, workers, left, models, the newest 50 decisions without
//	                              candidates, and other sections where kvroute has them. With
//	                              Accept: text/event-stream a stream of server-sent events, one for each section
//	                              at the start, and again, at most once a second, when the section has changed.
//	                              Later events of history have only new samples. A client that reads nothing for
//	                              10 s is disconnected. At most 256 streams, else 503
//	GET /v1/history               JSON: what became of the requests of the last 10 minutes, hour or day
//	GET /openapi.yaml             docs/openapi.yaml
//	GET /v1/index/dump            JSON lines: every cached block known, at one moment. One at a time, else
//	                              503
//	GET /busy_threshold           JSON: the thresholds of each model that has some
//	POST /busy_threshold          changes or returns the thresholds of a model
//
//	POST /v1/best_worker          JSON: where a request goes; with request_id, booked
//	POST /v1/potential_loads      JSON: the load of each worker if it got the request
//	POST /v1/mark_prefill_complete, /v1/add_output_tokens, /v1/free
//	POST /v1/workers              registers a worker that does not use NATS; the body is its record, see docs/workers.md
//	POST /v1/workers/ID/heartbeat heartbeat, every 2.5 s; 404 if the worker must register again
//	DELETE /v1/workers/ID         removes its record. ID is a worker_id or a name
//
//	POST /v1/dump_events          JSON: events that rebuild the index
//	POST /v1/generate             a stream of events from the chosen worker
//
//	GET /, GET /dashboard/NAME    the web page of package dashboard, which reads /v1/live
//
// docs/openapi.yaml describes all fields, docs/api.md the use. The package has no state of its own but
// for the open streams of /v1/live. Errors are in
// OpenAI's form. Any number of requests may run at once.
//
// A client of the API can change where requests go, so serve it inside a network only. With
// [Config.Tokens] clients need a token, except for /healthz, /readyz, /metrics, /openapi.yaml and the files
// of the web page. Bodies must
// be of type application/json. Requests that web pages send through a browser are refused.
package api

import (
	"cmp"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/docs"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/internal/reach"
)

const (
	defaultDecisions = 20
	// maxDecisions bounds an answer; each decision lists every candidate.
	maxDecisions = 1000
)

// New returns the handler of the API.
func New(c Config) http.Handler {
	c.Client = cmp.Or(c.Client, reach.Networks{}.Client())
	c.BodyTime, c.stall = cmp.Or(c.BodyTime, time.Minute), cmp.Or(c.stall, stall)
	mux := http.NewServeMux()
	show := func(state func() any) http.HandlerFunc {
		return get(func(*http.Request) (any, *openai.Error) { return state(), nil })
	}
	mux.HandleFunc("GET /healthz", show(func() any { return map[string]string{"status": "ok"} }))
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		r, status := c.Readiness()
		write(w, status, r)
	})
	mux.Handle("GET /metrics", c.Metrics)
	mux.HandleFunc("GET /openapi.yaml", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = w.Write(docs.OpenAPI) // the client may have left
	})
	mux.HandleFunc("GET /v1/replica", show(c.replica))
	mux.HandleFunc("GET /v1/workers", show(func() any { return map[string]any{"workers": c.workers(), "left": c.left()} }))
	mux.HandleFunc("GET /v1/models", show(func() any { return map[string]any{"models": c.Router.Models()} }))
	mux.HandleFunc("GET /v1/decisions", get(c.decisions))
	mux.HandleFunc("GET /v1/live", newLive(&c).serve)
	if c.Outcomes != nil {
		mux.HandleFunc("GET /v1/history", get(c.history))
	}
	mux.HandleFunc("GET /v1/index/dump", c.dump)
	mux.HandleFunc("GET /busy_threshold", show(c.thresholds))
	mux.HandleFunc("POST /busy_threshold", post(http.StatusOK, c.setThresholds))
	mux.HandleFunc("POST /v1/best_worker", post(http.StatusOK, c.bestWorker))
	mux.HandleFunc("POST /v1/potential_loads", post(http.StatusOK, c.potentialLoads))
	mux.HandleFunc("POST /v1/mark_prefill_complete", post(http.StatusOK, change(func(b *booking) bool { return c.Router.MarkPrefillCompleted(b.RequestID) })))
	mux.HandleFunc("POST /v1/add_output_tokens", post(http.StatusOK, change(func(b *booking) bool { return c.Router.AddOutputTokens(b.RequestID, b.Tokens) })))
	mux.HandleFunc("POST /v1/free", post(http.StatusOK, change(func(b *booking) bool { return c.Router.Free(b.RequestID) })))
	mux.HandleFunc("POST /v1/dump_events", c.dumpEvents)
	mux.HandleFunc("POST /v1/generate", c.generate)
	if c.Fleet != nil {
		mux.HandleFunc("POST /v1/workers", post(http.StatusCreated, c.register))
		mux.HandleFunc("POST /v1/workers/{id}/heartbeat", post(http.StatusOK, c.heartbeat))
		mux.HandleFunc("DELETE /v1/workers/{id}", get(c.deregister))
	}
	h := noBrowsers(mux, c.Tokens != nil)
	if c.Tokens != nil {
		h = c.Tokens.guard(h)
	}
	return timely(c.BodyTime, c.bounded(withPage(h)))
}

func (c *Config) decisions(req *http.Request) (any, *openai.Error) {
	if id := req.FormValue("id"); id != "" {
		d, ok := c.Router.Decision(id)
		if !ok {
			return nil, failure(http.StatusNotFound, openai.NotFound, "id", "no decision is kept under this id: it is unknown or too old")
		}
		return shown(&d), nil
	}
	limit := defaultDecisions
	if text := req.FormValue("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxDecisions {
			return nil, invalid("limit", fmt.Sprintf("limit is %q, want 1 to %d", text, maxDecisions))
		}
		limit = n
	}
	list := []Decision{} // an empty list in JSON, not null
	for _, d := range c.Router.Decisions(limit) {
		list = append(list, shown(&d))
	}
	return map[string][]Decision{"decisions": list}, nil
}
