// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/router"
)

// judged logs a changed verdict on token ids, and sets or ends the fault of its worker.
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
		log.Info("requests of the class are routed by their tokens again: workers make the same tokens as kvroute")
	case confirm.WorkerNamed:
		log.Error("a worker makes other tokens than kvroute and other workers", place...)
		s.nameTokens(j.Worker.ID)
	case confirm.WorkerCleared:
		s.nameTokens(j.Worker.ID)
	}
}

// tokensFault is the source of the fault of workers that alone make other tokens.
const tokensFault = "stored"

// nameTokens sets or ends the fault of a worker that alone makes other tokens, with all classes of requests that it is
// named for.
func (s *server) nameTokens(id uint64) {
	var of []string
	for _, m := range s.router.Models() {
		for _, c := range m.Classes {
			if slices.ContainsFunc(c.Workers, func(w confirm.WorkerState) bool { return w.ID == id && w.Named }) {
				of = append(of, fmt.Sprintf("the class %s of model %s", c.Class, m.Model))
			}
		}
	}
	var faults []router.Fault
	if of != nil {
		faults = []router.Fault{{What: "token_ids", Text: fmt.Sprintf(
			"it alone makes other tokens than kvroute for requests of %s: compare its tokenizer, chat template and engine version with the other workers'",
			listed(of))}}
	}
	s.faults.set(id, tokensFault, faults)
}

// renameTokens is nameTokens for all workers with that fault: their verdicts may have ended without a judgement.
func (s *server) renameTokens() {
	for _, id := range s.faults.with(tokensFault) {
		s.nameTokens(id)
	}
}

// departs handles a worker whose responses report other cached tokens than kvroute predicts.
func (s *server) departs(w router.Worker, departs bool) {
	if !departs {
		s.log.Info("the worker's cache agrees with kvroute's index again", "worker", w.ID, "rank", w.DPRank)
		return
	}
	log := s.log.With("worker", w.ID, "rank", w.DPRank)
	if s.direct.Sources().Reread(w.ID, w.DPRank) {
		log.Warn("the worker's cache differs from kvroute's index by the usage in its responses; its events are requested again")
	} else {
		log.Warn("the worker's cache differs from kvroute's index by the usage in its responses; no source can send its events again")
	}
}

// learned logs the rule by which the cached tokens of a worker's responses depart from its events.
func (s *server) learned(w router.Worker, rule string) {
	s.log.Info("the responses of a worker depart from its events by a rule", "worker", w.ID, "rank", w.DPRank, "rule", rule, "meaning", map[string]string{
		"":      "they report what its events promise",
		"drop":  "it always uses one block less than its events promise, as with EAGLE and a KV connector; predictions follow",
		"limit": "it often uses less than its events promise, and to read them again does not help; predictions count the share that responses report",
	}[rule])
}
