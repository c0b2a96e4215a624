// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"slices"
	"time"
)

// ServedModel is a name that requests may use: of a model, another name of it, or an adapter.
type ServedModel struct {
	Name    string
	Model   string // the base model, which has this name, too
	Adapter bool
	// Since is when this router learned of a worker of the model.
	Since time.Time
	// MaxModelLen is the number of tokens of the longest request that every engine of the model takes, as far as
	// engines say so; 0 = unknown.
	MaxModelLen int
}

// ServedModels returns the names of all models that have workers: those of models and then, as engines list them,
// those of adapters, each in the order of the names. Any number of goroutines may call it.
func (r *Router) ServedModels() []ServedModel {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	all := []ServedModel{}
	for name, t := range *r.names.Load() {
		m := ServedModel{Name: name, Model: t.pools[0].model, Adapter: t.lora != "", Since: t.pools[0].since}
		serves := false
		for _, p := range t.pools {
			serves = serves || len(p.names) > 0
			if p.since.Before(m.Since) {
				m.Since = p.since
			}
			p.each(func(_ int, e *entry) {
				if n := e.info.MaxModelLen; n > 0 && (m.MaxModelLen == 0 || n < m.MaxModelLen) {
					m.MaxModelLen = n
				}
			})
		}
		if serves && name != "" {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b ServedModel) int {
		if a.Adapter != b.Adapter {
			return map[bool]int{false: -1, true: 1}[a.Adapter]
		}
		return cmp.Compare(a.Name, b.Name)
	})
	return all
}
