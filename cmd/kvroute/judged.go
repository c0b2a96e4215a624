// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/router"
)

// judged logs a changed verdict on token ids, and sets or ends the fault of a worker that alone makes other tokens.
func (s *server) judged(j router.Judgement) {
	log := s.log.With("model", j.Model.Name, "class", j.Class.String())
	place := []any{"worker", j.Worker.ID, "block", j.Block, "position", j.Position, "confirmed", j.Confirmed[0], "unconfirmed", j.Confirmed[1]}
	if s.conf.ExplainDrift && j.Theirs != nil {
		decode := func(ids []uint32) string { return string(j.Prompts.Tokenizer().Decode(nil, ids)) }
		place = append(place, "ours", decode(j.Ours), "theirs", decode(j.Theirs))
	}
	switch j.Kind {
	case confirm.ClassUnconfirmed:
		log.Error("requests of the class are routed by their text: workers make other tokens than kvroute", place...)
	case confirm.Located:
		log.Error("the first token that differs is known", place...)
	case confirm.ClassConfirmed:
		log.Info("requests of the class are routed by their tokens again: workers store the tokens that kvroute makes")
	case confirm.WorkerNamed:
		log.Error("a worker makes other tokens than kvroute and other workers", place...)
		s.faults.set(j.Worker.ID, "stored", []router.Fault{{What: "token_ids", Text: fmt.Sprintf(
			"it alone makes other tokens than kvroute for requests of the class %s of model %s: compare its tokenizer, chat template and engine version with the other workers'",
			j.Class, j.Model.Name)}})
	case confirm.WorkerCleared:
		s.faults.set(j.Worker.ID, "stored", nil)
	}
}
