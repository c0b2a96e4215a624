// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// The platform says that a worker is not ready: no probe and no age changes that. When it is ready again, the next
// probe counts, and not what was known before.
func TestReadinessOfAPod(t *testing.T) {
	for name, probed := range map[string]bool{"with probes": true, "without probes": false} {
		var l changes
		tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
		r := record("a")
		r.Pod = &router.Pod{Namespace: "n", Name: "a", UID: "1"}
		if probed {
			r.Health = &fleet.Probe{}
		}
		put := func(after time.Duration, cause, want string) {
			t.Helper()
			r.NotReady = cause
			if err := tab.SetStatic(start.Add(after), []fleet.Record{r}); err != nil {
				t.Fatal(err)
			}
			if got := l.newLines(); got != want {
				t.Errorf("%s: after %v reported %q, want %q", name, after, got, want)
			}
		}
		starting := "a healthy"
		if probed {
			starting = "a starting"
		}
		put(0, "", starting)
		tab.Probed(start.Add(time.Second), r.ID(), fleet.ProbeAnswered)
		if got := l.newLines(); probed && got != "a healthy" {
			t.Errorf("%s: after a probe reported %q, want a healthy", name, got)
		}
		put(2*time.Second, "", "") // nothing has changed
		put(3*time.Second, "its container is not ready", "a not_ready")
		if got := l.workers[r.ID()].HealthCause; got != "its container is not ready" {
			t.Errorf("%s: the cause is %q", name, got)
		}
		tab.Probed(start.Add(4*time.Second), r.ID(), fleet.ProbeAnswered)
		tab.Tick(start.Add(time.Minute), false)
		tab.Answered(start.Add(time.Minute), r.ID())
		if got := l.newLines(); got != "" || l.workers[r.ID()].Health != router.NotReady || l.workers[r.ID()].Unproved {
			t.Errorf("%s: while it is not ready reported %q", name, got)
		}
		put(2*time.Minute, "", starting)
		tab.Probed(start.Add(2*time.Minute), r.ID(), fleet.ProbeAnswered)
		if l.newLines(); l.workers[r.ID()].Health != router.Healthy || l.workers[r.ID()].HealthCause != "" {
			t.Errorf("%s: ready again: %+v", name, l.workers[r.ID()])
		}
	}
}
