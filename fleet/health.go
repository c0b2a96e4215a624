// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"time"

	"github.com/kvroute/kvroute/router"
)

// judge updates the health of a worker.
func (t *Table) judge(now time.Time, m *member) {
	refuses := m.probe == ProbeRefused || m.refused
	unproved, health := t.unproved(now, m), t.health(now, m)
	cause := m.healthCause(now, health)
	if health != m.info.Health || refuses != m.info.Refuses || unproved != m.info.Unproved || cause != m.info.HealthCause {
		fell := m.info.Health < router.Unhealthy && (health == router.Unhealthy || health == router.Expired) && !m.followed
		m.info.Health, m.info.HealthCause, m.info.Refuses, m.info.Unproved = health, cause, refuses, unproved
		if t.set(m.info); fell {
			t.silent(m)
		}
	}
}

// healthCause returns [router.WorkerInfo.HealthCause]. Workers with the same cause have the same words.
func (m *member) healthCause(now time.Time, health router.Health) string {
	switch {
	case m.record.NotReady != "":
		return m.record.NotReady
	case health == router.Healthy && m.missed < missedCounts:
		return ""
	case m.followed:
		return "another worker has started at its address"
	case m.cause != "" || health == router.Healthy:
		return m.cause
	case m.refused:
		return "connection refused"
	case health == router.Starting:
		return "it has answered no probe yet"
	case health == router.Degraded && now.Before(m.rest):
		return "it became unhealthy several times within a minute"
	case m.probed:
		return "it gives no sign of life"
	}
	return "its heartbeats are missing"
}

// beats notes a record or a heartbeat, which proves that a worker without probes serves.
func (m *member) beats(now time.Time) {
	if !m.probed {
		m.proved = later(m.proved, now)
	}
}

// unproved returns [router.WorkerInfo.Unproved].
func (t *Table) unproved(now time.Time, m *member) bool {
	switch {
	case m.static && !m.probed, m.followed, m.refused, m.probe == ProbeUnavailable, m.record.NotReady != "":
		return false
	}
	return now.Sub(m.proved)-m.slack > t.ages.Degraded
}

// health returns the health of a worker, and notes its returns.
func (t *Table) health(now time.Time, m *member) router.Health {
	switch {
	case m.record.NotReady != "":
		return router.NotReady
	case m.static && !m.probed:
		return router.Healthy
	}
	switch age := now.Sub(m.seen) - m.slack; {
	case age >= t.ages.Expired:
		return router.Expired
	case age > t.ages.Unhealthy || m.followed || m.refused:
		return router.Unhealthy
	case m.probed && !m.good:
		return router.Starting
	case m.probe == ProbeUnavailable:
		return router.Unhealthy // its own word counts more than the age of the last good probe
	case age > t.ages.Degraded:
		return router.Degraded
	}
	if m.info.Health == router.Unhealthy || m.info.Health == router.Expired {
		copy(m.returns[:], m.returns[1:])
		m.returns[flapReturns-1] = now
		if !m.returns[0].IsZero() && now.Sub(m.returns[0]) <= flapWithin {
			m.rest = now.Add(flapRest)
			t.flapped()
		}
	}
	if now.Before(m.rest) {
		return router.Degraded
	}
	return router.Healthy
}
