// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"slices"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/outcomes"
)

// selection is the traffic that a screen shows. The zero value is that of all models.
type selection struct {
	model string // empty = all models
	// divided means that only requests to a router group are shown, or those to workers without a group if group is empty.
	divided bool
	group   string
}

func (s selection) String() string {
	switch {
	case s.model == "":
		return "all models"
	case !s.divided:
		return s.model
	case s.group == "":
		return s.model + " without a group"
	}
	return s.model + " on group " + s.group
}

func (s selection) shows(model, group string) bool {
	return s.model == "" || s.model == model && (!s.divided || s.group == group)
}

// selections returns what can be selected: all models, each model, and each group of a model that has one.
func (p *picture) selections() []selection {
	var found []selection // each model with each of its groups
	for i := range p.Workers {
		found = append(found, selection{p.Workers[i].Model, true, p.Workers[i].Group})
	}
	for i := range p.Benefit {
		found = append(found, selection{p.Benefit[i].Model, true, p.Benefit[i].Group})
	}
	slices.SortFunc(found, func(a, b selection) int { return cmp.Or(cmp.Compare(a.model, b.model), cmp.Compare(a.group, b.group)) })
	found = slices.Compact(found)
	all := []selection{{}}
	for i, s := range found {
		if last := all[len(all)-1]; last.model != s.model {
			all = append(all, selection{model: s.model})
		}
		more := i+1 < len(found) && found[i+1].model == s.model
		if s.group != "" || more {
			all = append(all, s)
		}
	}
	return all
}

// next returns the selection after one, and after the last one that of all models.
func (p *picture) next(after selection) selection {
	all := p.selections()
	return all[(slices.Index(all, after)+1)%len(all)]
}

// of returns the part of the picture that a selection shows. What needs attention, and the figures of the last 10 s, stay
// those of all models.
func (p *picture) of(s selection) *picture {
	part := *p
	part.Workers = slices.DeleteFunc(slices.Clone(p.Workers), func(w api.Worker) bool { return !s.shows(w.Model, w.Group) })
	part.Decisions = slices.DeleteFunc(slices.Clone(p.Decisions), func(d api.Decision) bool { return !s.shows(d.Model, d.Group) })
	part.Benefit = slices.DeleteFunc(slices.Clone(p.Benefit), func(b outcomes.Benefit) bool { return !s.shows(b.Model, b.Group) })
	if p.Holdout != nil && s.model != "" {
		h := *p.Holdout
		h.Models = slices.DeleteFunc(slices.Clone(h.Models), func(c outcomes.Comparison) bool { return c.Model != s.model })
		part.Holdout = &h
	}
	return &part
}
