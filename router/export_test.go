// SPDX-License-Identifier: Apache-2.0

package router

// ForgetCandidates makes the next request of each pool look at every worker.
func (r *Router) ForgetCandidates() {
	for _, p := range r.allPools() {
		p.read(func(c *core) { c.changes++ })
	}
}

// GivenIDs returns the number of ids that are bound to a worker.
func (r *Router) GivenIDs() int { return r.given.len() }

// AwaitedIDs returns the number of unknown ids that requests wait for.
func (r *Router) AwaitedIDs() int {
	r.given.mu.Lock()
	defer r.given.mu.Unlock()
	return len(r.given.awaited)
}
