// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// departing is a registry without NATS, with a clock and probes that a test answers.
type departing struct {
	*fleet.Registry

	now     time.Time
	traffic fleet.Traffic
	probes  []func(error) // not answered yet
	silent  []string      // the causes of workers that became unhealthy
	log     bytes.Buffer
}

func newDeparting(t *testing.T) *departing {
	t.Helper()
	d := &departing{now: start}
	var err error
	d.Registry, err = fleet.NewRegistry(nil, fleet.RegistryConfig{
		Set: func(router.WorkerInfo) {}, Remove: func(uint64) {}, Now: func() time.Time { return d.now },
		Traffic: func(uint64) fleet.Traffic { return d.traffic },
		Probe: func(_ router.WorkerInfo, _ *fleet.Probe, done func(error)) bool {
			d.probes = append(d.probes, done)
			return true
		},
		Silent: func(i router.WorkerInfo, cause string) { d.silent = append(d.silent, i.Name+": "+cause) },
		Log:    slog.New(slog.NewTextHandler(&d.log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// tick moves the clock by the seconds, and judges the workers in each of them.
func (d *departing) tick(seconds int) {
	for range seconds {
		d.now = d.now.Add(time.Second)
		d.Judge()
	}
}

func (d *departing) answer(err error) {
	probes := d.probes
	d.probes = nil
	for _, done := range probes {
		done(err)
	}
}

func (d *departing) texts() string {
	var all []string
	for _, l := range d.Left() {
		all = append(all, fmt.Sprintf("%s %s", l.Name, l.Text(d.now)))
	}
	return strings.Join(all, ", ")
}

// A worker that falls silent stays listed for an hour with the cause, its last state and the requests that failed there.
func TestAWorkerThatFallsSilentIsListed(t *testing.T) {
	d := newDeparting(t)
	d.PutNow(t, record("a"))
	d.tick(1)
	d.traffic = fleet.Traffic{InFlight: 2, Failures: 7}
	d.BeatNow("a")
	d.tick(1) // 7 failures so far
	d.BeatNow("a")
	d.tick(1)
	d.traffic = fleet.Traffic{InFlight: 2, Failures: 10}
	d.tick(16)
	if len(d.probes) != 1 {
		t.Fatalf("an unhealthy worker was probed %d times", len(d.probes))
	}
	d.answer(syscall.ECONNREFUSED)
	if fmt.Sprint(d.silent) != "[a: connection refused]" || !strings.Contains(d.log.String(), `level=WARN msg="a worker is silent: it gets requests only if no worker is better"`) {
		t.Errorf("silent: %v; log: %s", d.silent, d.log.String())
	}
	if got := d.texts(); got != "" {
		t.Errorf("before its removal %q is listed", got)
	}
	d.tick(30)
	if got := d.texts(); got != "a left less than a minute ago; 5 requests failed there" {
		t.Errorf("listed %q", got)
	}
	d.answer(syscall.ECONNREFUSED)
	d.tick(120)
	if got := d.texts(); got != "a left 2 min ago: connection refused; 5 requests failed there" {
		t.Errorf("listed %q", got)
	}
	l := d.Left()[0]
	if l.State != fleet.Lost || l.LastState != "healthy" || l.Address != netip.MustParseAddrPort("10.0.0.7:8000") || l.Models[0] != "m" || l.ID != wire.WorkerID("a") {
		t.Errorf("listed %+v", l)
	}
	if !strings.Contains(d.log.String(), `level=WARN msg="a worker has left without a word: it is removed" worker=a address=10.0.0.7:8000 last_state=healthy requests_failed=5 cause="connection refused"`) {
		t.Errorf("log: %s", d.log.String())
	}
	d.now = d.now.Add(time.Hour)
	if got := d.texts(); got != "" {
		t.Errorf("after an hour %q is listed", got)
	}
}

// A worker that returns leaves the list. A worker that was drained, deregistered, replaced or taken out of
// the configuration is no fault.
func TestDeparturesThatAreNoFault(t *testing.T) {
	d := newDeparting(t)
	d.PutNow(t, record("returns"))
	d.tick(50)
	d.PutNow(t, record("returns"))
	if got := d.texts(); got != "" {
		t.Errorf("a worker that returned is listed: %q", got)
	}
	d.Deleted("returns")
	drained := record("drained")
	drained.Address, drained.Draining = "10.0.0.8:8000", true
	d.PutNow(t, drained)
	d.tick(50)
	if err := d.SetStatic([]fleet.Record{{Name: "file", Address: "10.0.0.9:80", Models: []string{"m"}}}); err != nil {
		t.Fatal(err)
	}
	if err := d.SetStatic(nil); err != nil {
		t.Fatal(err)
	}
	lost := record("lost")
	lost.Address = "10.0.0.10:8000"
	d.PutNow(t, lost)
	d.tick(50)
	lost.Name = "other"
	d.PutNow(t, lost)
	if got, want := d.texts(), "lost removed less than a minute ago: worker other has started at its address, "+
		"file removed less than a minute ago: it is no longer configured, drained removed less than a minute ago: it was drained, "+
		"returns removed 1 min ago: its record was deleted"; got != want {
		t.Errorf("listed %q\nwant %q", got, want)
	}
}

// The list has at most 1,000 workers: the oldest are dropped.
func TestTheListOfWorkersThatLeftIsBounded(t *testing.T) {
	d := newDeparting(t)
	for i := range 1200 {
		r := record(fmt.Sprint("w", i))
		r.Address = fmt.Sprintf("10.0.%d.%d:80", i/250, i%250+1)
		d.PutNow(t, r)
		d.Deleted(r.Name)
	}
	if all := d.Left(); len(all) != 1000 || all[0].Name != "w1199" || all[999].Name != "w200" {
		t.Errorf("%d workers are listed", len(all))
	}
}

// A worker of the configuration whose probes fail stays, and is named with the cause. A refused connection
// after its event socket closed makes it unhealthy at once.
func TestASilentWorkerOfTheConfigurationIsNamed(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		cause string
	}{
		"refused":  {syscall.ECONNREFUSED, "connection refused"},
		"timeout":  {context.DeadlineExceeded, "timeout: no answer to a probe of its health"},
		"answers":  {nil, "it answers probes, but gives no other sign of life"},
		"anything": {errors.New("no route"), "no route"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDeparting(t)
			r := record("a")
			r.Health = &fleet.Probe{}
			if err := d.SetStatic([]fleet.Record{r}); err != nil {
				t.Fatal(err)
			}
			d.Doubt(wire.WorkerID("a"))
			d.answer(c.err)
			d.answer(c.err)
			if refused := len(d.silent) > 0; refused != (name == "refused") {
				t.Errorf("after its socket closed: %v", d.silent)
			}
			d.tick(17)
			d.answer(c.err)
			if fmt.Sprint(d.silent) != "[a: "+c.cause+"]" {
				t.Errorf("silent: %v", d.silent)
			}
			d.tick(100)
			if got := d.texts(); got != "" || len(d.probes) > 0 {
				t.Errorf("listed %q, %d more probes", got, len(d.probes))
			}
		})
	}
}

// A probe that is sent once finds a closed port and a server that answers.
func TestASingleProbe(t *testing.T) {
	p := startProber(t)
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	_ = l.Close()
	var mu sync.Mutex
	got := map[string]error{}
	for _, address := range []string{closed, s.Listener.Addr().String()} {
		p.Now(router.WorkerInfo{Address: netip.MustParseAddrPort(address)}, nil, func(err error) {
			mu.Lock()
			defer mu.Unlock()
			got[address] = err
		})
	}
	natstest.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(got) == 2
	})
	if !errors.Is(got[closed], syscall.ECONNREFUSED) || !strings.Contains(fmt.Sprint(got[s.Listener.Addr().String()]), "404") {
		t.Errorf("the probes found %v", got)
	}
}

// A worker whose name has no address is listed before those that left, until it has one.
func TestUnresolvedWorkersAreListed(t *testing.T) {
	d := newDeparting(t)
	unresolved := fleet.Left{ID: 1, Name: "pool", State: fleet.Unresolved, Cause: "no such host", Time: start}
	d.SetUnresolved([]fleet.Left{unresolved})
	if got := d.texts(); got != "pool has no address, less than a minute after the first lookup: no such host" {
		t.Error(got)
	}
	d.now = start.Add(3 * time.Hour)
	if got := d.texts(); got != "pool has no address, 180 min after the first lookup: no such host" {
		t.Error(got)
	}
	if d.SetUnresolved(nil); d.texts() != "" {
		t.Errorf("its name has an address, and it is listed: %s", d.texts())
	}
	for state, want := range map[fleet.Departure]bool{fleet.Lost: true, fleet.Removed: false, fleet.Unresolved: true} {
		if l := (fleet.Left{State: state}); l.IsFault() != want {
			t.Errorf("%s is a fault: %t, want %t", state, !want, want)
		}
	}
}

// A worker that is not healthy says why, as far as its probe found out.
func TestHealthHasACause(t *testing.T) {
	d := newDeparting(t)
	var seen router.WorkerInfo
	var err error
	d.Registry, err = fleet.NewRegistry(nil, fleet.RegistryConfig{
		Set: func(w router.WorkerInfo) { seen = w }, Remove: func(uint64) {}, Now: func() time.Time { return d.now },
	})
	if err != nil {
		t.Fatal(err)
	}
	r := record("a")
	r.Health = &fleet.Probe{}
	if err := d.SetStatic([]fleet.Record{r}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		result fleet.Probed
		err    error
		want   string
	}{
		{fleet.ProbeFailed, context.DeadlineExceeded, "starting: timeout: no answer to a probe of its health"},
		{fleet.ProbeFailed, reach.StatusError{Status: 500}, "starting: it answers the probe of its health with status 500"},
		{fleet.ProbeAnswered, nil, "healthy: "},
		{fleet.ProbeUnavailable, reach.StatusError{Status: 503}, "unhealthy: it answers the probe of its health with status 503"},
		{fleet.ProbeFailed, errors.New("read tcp 127.0.0.1:51234"), "degraded: the probe of its health fails; the log has the error"},
		{fleet.ProbeAnswered, nil, "healthy: "},
	} {
		d.now = d.now.Add(5 * time.Second)
		if d.Probed(seen.ID, c.result, c.err); seen.Health.String()+": "+seen.HealthCause != c.want {
			t.Errorf("%v: %v: %s, want %s", c.err, seen.Health, seen.HealthCause, c.want)
		}
		seen.ID = wire.WorkerID("a")
	}
}

// A healthy worker that misses two probes in a row has the cause at once, without waiting for its age. An answer ends it.
func TestTheSecondMissedProbeHasACause(t *testing.T) {
	now, seen := start, router.WorkerInfo{}
	r, err := fleet.NewRegistry(nil, fleet.RegistryConfig{
		Set: func(info router.WorkerInfo) { seen = info }, Remove: func(uint64) {}, Now: func() time.Time { return now },
	})
	if err != nil {
		t.Fatal(err)
	}
	records := []fleet.Record{{Name: "w", Address: "10.0.0.7:80", Models: []string{"m"}, Health: &fleet.Probe{}}}
	if err := r.SetStatic(records); err != nil {
		t.Fatal(err)
	}
	refused, slow := fmt.Errorf("dial: %w", syscall.ECONNREFUSED), context.DeadlineExceeded
	for i, c := range []struct {
		result fleet.Probed
		err    error
		want   string
	}{
		{fleet.ProbeAnswered, nil, "healthy: "},
		{fleet.ProbeRefused, refused, "healthy: "},
		{fleet.ProbeRefused, refused, "healthy: connection refused"},
		{fleet.ProbeAnswered, nil, "healthy: "},
		{fleet.ProbeFailed, slow, "healthy: "},
		{fleet.ProbeAnswered, nil, "healthy: "},
		{fleet.ProbeFailed, slow, "healthy: "},
		{fleet.ProbeRefused, refused, "healthy: connection refused"},
		{fleet.ProbeRefused, refused, "degraded: connection refused"},
	} {
		now = now.Add(2600 * time.Millisecond)
		r.Probed(seen.ID, c.result, c.err)
		if got := seen.Health.String() + ": " + seen.HealthCause; got != c.want {
			t.Errorf("probe %d: %s, want %s", i, got, c.want)
		}
		before := seen
		if err := r.SetStatic(records); err != nil || seen.HealthCause != before.HealthCause { // the file was read again
			t.Errorf("probe %d: %v; the worker is %+v", i, err, seen)
		}
	}
}

// The address of a worker that gave no response says why.
func TestWhyAWorkerGaveNoResponse(t *testing.T) {
	d := newDeparting(t)
	if err := d.SetStatic([]fleet.Record{{Name: "w", Address: "10.0.0.7:80", Models: []string{"m"}}}); err != nil {
		t.Fatal(err)
	}
	var causes []string
	ask := func(id uint64, err error) {
		d.Why(id, func(cause string) { causes = append(causes, cause) })
		d.answer(err)
	}
	id := d.Find("w")
	ask(id, fmt.Errorf("dial: %w", syscall.ECONNREFUSED))
	ask(id, context.DeadlineExceeded)
	ask(id, nil)
	ask(id+1, errors.New("there is no such worker"))
	if got := strings.Join(causes, ", "); got != "connection refused, timeout: no answer to a probe of its health" {
		t.Errorf("causes: %s", got)
	}
}
