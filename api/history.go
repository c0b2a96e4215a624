// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"
	"slices"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/outcomes"
)

// history is the answer of /v1/history.
type history struct {
	Span   string `json:"span"`
	StepMS int64  `json:"step_ms"`
	outcomes.Series
	Known   []outcomes.Series `json:"series"` // that have a history
	Samples []outcomes.Sample `json:"samples"`
}

func (c *Config) history(req *http.Request) (any, *openai.Error) {
	spans := outcomes.Spans()
	name := req.FormValue("span")
	at := slices.IndexFunc(spans, func(s outcomes.Span) bool { return s.Name == name })
	if name == "" {
		at = 0
	}
	if at < 0 {
		return nil, invalid("span", "span must be 10m, 1h or 24h")
	}
	of := outcomes.Series{Model: req.FormValue("model"), Group: req.FormValue("group")}
	samples, known := c.Outcomes.Samples(of, spans[at])
	if !known {
		return nil, failure(http.StatusNotFound, openai.NotFound, "model", "no history is kept of this model and group")
	}
	return history{
		Span: spans[at].Name, StepMS: spans[at].Step.Milliseconds(), Series: of,
		Known:   append([]outcomes.Series{}, c.Outcomes.Series()...), // lists in JSON, not null
		Samples: append([]outcomes.Sample{}, samples...),
	}, nil
}
