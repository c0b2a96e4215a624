// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// Limits of the list of workers that are gone.
const (
	maxLeft  = 1000
	leftTime = time.Hour
)

// Departure says whether the end of a worker is a fault.
type Departure string

// The departures.
const (
	// Lost means that the worker fell silent: a fault.
	Lost Departure = "left"
	// Removed means that the worker was drained, deregistered, replaced, or taken out of the configuration.
	Removed Departure = "removed"
	// Unresolved means that the worker's DNS name has had no address since kvroute knows the worker: a fault.
	Unresolved Departure = "unresolved"
)

// Left is a worker that this replica has removed, or that it has no address for. No request is sent to it.
type Left struct {
	ID      uint64         `json:"worker_id"`
	Rank    uint32         `json:"dp_rank"` // its first one
	Name    string         `json:"name,omitempty"`
	Address netip.AddrPort `json:"address"` // invalid for [Unresolved]
	Models  []string       `json:"models"`
	State   Departure      `json:"state"`
	// Cause is why it left, such as "connection refused". It is empty until the last probe has ended.
	Cause     string    `json:"cause,omitempty"`
	LastState string    `json:"last_state"` // at its last sign of life: "healthy", "degraded" or "draining"; empty for [Unresolved]
	Time      time.Time `json:"left_at"`    // for [Unresolved] the first failed lookup
	// FailedRequests are the requests that were in flight when the worker was removed, and those that it
	// refused or failed since its last sign of life. Other workers may have served them. It is 0 for [Removed].
	FailedRequests int `json:"requests_failed"`
}

// IsFault says whether a person must mend something: the worker was not removed on purpose.
func (l *Left) IsFault() bool { return l.State != Removed }

// Text returns the departure as a sentence without subject, as "left 2 min ago: connection refused" or "has no
// address, 2 min after the first lookup: no such host".
func (l *Left) Text(now time.Time) string {
	ago := "less than a minute ago"
	if minutes := int(now.Sub(l.Time).Minutes()); minutes > 0 {
		ago = fmt.Sprintf("%d min ago", minutes)
	}
	text := string(l.State) + " " + ago
	if l.State == Unresolved {
		text = "has no address, " + strings.Replace(ago, " ago", " after the first lookup", 1)
	}
	if l.Cause != "" {
		text += ": " + l.Cause
	}
	switch {
	case l.FailedRequests == 1:
		text += "; 1 request failed there"
	case l.FailedRequests > 1:
		text += fmt.Sprintf("; %d requests failed there", l.FailedRequests)
	}
	return text
}

// label is the name of a worker for people: the program forgets a name with its worker, so log lines have it
// as text.
func label(id uint64, name string) string { return router.Worker{ID: id}.Label(clip(name)) }

// Traffic is the work of a worker.
type Traffic struct {
	InFlight int
	Failures uint64 // requests that it refused or failed so far
}

// lastSign is the state of a worker at its last sign of life.
type lastSign struct {
	at    time.Time
	state string
	// failures are the worker's failures at the last sign of life but one, and at the last one. The
	// worker may have been dead already when failures between these two times happened.
	failures [2]uint64
}

// note updates a worker's last sign of life.
func (t *Table) note(m *member) {
	if s := &m.sign; !s.at.Equal(m.seen) || s.state == "" {
		s.at, s.state = m.seen, m.info.Health.String()
		if m.info.Draining {
			s.state = "draining"
		}
		s.failures[0], s.failures[1] = s.failures[1], t.traffic(m.info.ID).Failures
	}
}

// departs adds a worker, which the caller then removes, to the list of workers that are gone.
func (t *Table) departs(now time.Time, m *member, state Departure, cause string) {
	l := &Left{
		ID: m.info.ID, Rank: m.info.DPStart, Name: m.info.Name, Address: m.info.Address, Models: m.info.Models,
		State: state, Cause: cause, LastState: m.sign.state, Time: now,
	}
	if l.LastState == "" { // it was never judged
		l.LastState = m.info.Health.String()
	}
	if state == Lost {
		traffic := t.traffic(l.ID)
		l.FailedRequests = traffic.InFlight + int(traffic.Failures-min(traffic.Failures, m.sign.failures[0]))
	}
	t.left = append(t.left[max(0, len(t.left)-maxLeft+1):], l)
	if state == Lost {
		t.lost(l, m.record.Health)
	}
}

// fallsSilent removes a registered worker that gave no sign of life for too long.
func (t *Table) fallsSilent(now time.Time, m *member) {
	switch {
	case m.followed:
		t.departs(now, m, Removed, "another worker has started at its address")
	case m.info.Draining:
		t.departs(now, m, Removed, "it was drained")
	default:
		t.departs(now, m, Lost, "")
	}
}

// returns removes a worker from the list of those that are gone. A lost worker at the address of the new
// one was restarted under another name.
func (t *Table) returns(info *router.WorkerInfo) {
	t.left = slices.DeleteFunc(t.left, func(l *Left) bool { return l.ID == info.ID })
	for _, l := range t.left {
		if l.State == Lost && l.Address == info.Address && l.Rank == info.DPStart {
			l.State, l.Cause, l.FailedRequests = Removed, fmt.Sprintf("worker %s has started at its address", label(info.ID, info.Name)), 0
		}
	}
}

// Refused makes a worker unhealthy until its next sign of life, since its address refuses connections. A
// worker of the configuration without probes gives no sign of life, so its health does not change.
func (t *Table) Refused(now time.Time, id uint64) {
	if m := t.workers[id]; m != nil && (m.probed || !m.static) {
		m.refused = true
		t.judge(now, m)
	}
}

// SetUnresolved replaces the workers whose names have no address. Left returns them first.
func (r *Registry) SetUnresolved(workers []Left) {
	r.locked(func(t *Table) { t.unresolved = slices.Clone(workers) })
}

// Left returns the workers that were removed within the last hour, at most 1,000, the newest first. A
// worker that returns is removed from the list.
func (r *Registry) Left() []Left {
	all := []Left{} // an empty list in JSON, not null
	r.locked(func(t *Table) {
		all = append(all, t.unresolved...)
		now := r.conf.Now()
		t.left = slices.DeleteFunc(t.left, func(l *Left) bool { return now.Sub(l.Time) > leftTime })
		for _, l := range slices.Backward(t.left) {
			all = append(all, *l)
		}
	})
	return all
}

// Doubt probes a worker after its event socket has closed. If the address of the worker refuses the connection,
// the worker is unhealthy until its next sign of life.
func (r *Registry) Doubt(id uint64) {
	r.locked(func(t *Table) {
		m := t.workers[id]
		if m == nil {
			return
		}
		r.conf.Probe(m.info, m.record.Health, func(err error) {
			if !errors.Is(err, syscall.ECONNREFUSED) {
				return
			}
			r.locked(func(t *Table) {
				if now := t.workers[id]; now != nil && now.info.Address == m.info.Address {
					t.Refused(r.conf.Now(), id)
				}
			})
		})
	})
}

// Why probes a worker that gave no response to a request, and calls done with what its address answered, in words such
// as "connection refused". It does not call done if the worker answers, is unknown, or cannot be probed now.
func (r *Registry) Why(id uint64, done func(cause string)) {
	r.locked(func(t *Table) {
		if m := t.workers[id]; m != nil {
			r.conf.Probe(m.info, m.record.Health, func(err error) {
				if err != nil {
					_, cause := causeOf(err)
					done(cause)
				}
			})
		}
	})
}

// reportLosses makes the table probe, count and log workers that fall silent.
func (r *Registry) reportLosses(m *meter.Maker) {
	lost := m.Counter("kvroute.fleet.lost", "{worker}", "Workers that fell silent, by what their address answered.", "answer")
	r.table.silent = func(m *member) {
		info := m.info
		r.examine(info, m.record.Health, func(answer, cause string) {
			current := r.table.workers[info.ID]
			if current == nil || current.info.Health < router.Unhealthy {
				return
			}
			lost.Count(answer)
			r.conf.Log.Warn("a worker is silent: it gets requests only if no worker is better", "worker", label(info.ID, info.Name), "address", info.Place(), "health", current.info.Health.String(), "cause", cause)
			r.conf.Silent(current.info, cause)
		})
	}
	r.table.lost = func(l *Left, probe *Probe) {
		info := router.WorkerInfo{ID: l.ID, Name: l.Name, Address: l.Address}
		r.examine(info, probe, func(_, cause string) {
			if l.State == Lost { // it has not been replaced since
				l.Cause = cause
			}
			r.conf.Log.Warn("a worker has left without a word: it is removed", "worker", label(l.ID, l.Name), "address", l.Address.String(), "last_state", l.LastState, "requests_failed", l.FailedRequests, "cause", cause)
		})
	}
}

// examine probes a worker, and calls done with what its address answered, under the registry's lock.
func (r *Registry) examine(info router.WorkerInfo, probe *Probe, done func(answer, cause string)) {
	queued := r.conf.Probe(info, probe, func(err error) {
		answer, cause := causeOf(err)
		r.locked(func(*Table) { done(answer, cause) })
	})
	if !queued {
		done("unknown", "no sign of life; it was not probed")
	}
}

// causeOf returns what a last probe found, in a word for the metric and in words for people.
func causeOf(err error) (answer, cause string) {
	status, answered := errors.AsType[reach.StatusError](err)
	timeout, ofNet := errors.AsType[net.Error](err)
	switch {
	case err == nil:
		return "answered", "it answers probes, but gives no other sign of life"
	case answered:
		return "answered", fmt.Sprintf("it answers the probe of its health with status %d", status.Status)
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused", "connection refused"
	case errors.Is(err, context.DeadlineExceeded), ofNet && timeout.Timeout():
		return "timeout", "timeout: no answer to a probe of its health"
	}
	return "failed", clip(err.Error())
}
