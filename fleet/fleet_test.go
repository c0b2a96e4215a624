// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Unix(1755000000, 0)

// changes records the calls of a table.
type changes struct {
	lines   []string
	workers map[uint64]router.WorkerInfo
}

func (l *changes) set(w router.WorkerInfo) {
	l.lines = append(l.lines, fmt.Sprintf("%s %v", w.Name, w.Health))
	if l.workers == nil {
		l.workers = map[uint64]router.WorkerInfo{}
	}
	l.workers[w.ID] = w
}

func (l *changes) remove(id uint64) {
	l.lines = append(l.lines, fmt.Sprint("gone ", l.workers[id].Name))
	delete(l.workers, id)
}

func (l *changes) newLines() string {
	s := strings.Join(l.lines, ", ")
	l.lines = nil
	return s
}

func record(name string) fleet.Record {
	return fleet.Record{Name: name, Address: "10.0.0.7:8000", Models: []string{"m"}, BlockSize: 16}
}

func put(t *testing.T, tab *fleet.Table, at time.Time, r fleet.Record) {
	t.Helper()
	if err := tab.Put(at, r); err != nil {
		t.Fatal(err)
	}
}

func TestHealthFollowsSignsOfLife(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	put(t, tab, start, record("a"))
	id := wire.WorkerID("a")
	for _, c := range []struct {
		after time.Duration
		beat  bool
		want  string
	}{
		{0, false, "a healthy"},
		{7500 * time.Millisecond, false, ""},
		{7501 * time.Millisecond, false, "a degraded"},
		{15 * time.Second, false, ""},
		{15001 * time.Millisecond, false, "a unhealthy"},
		{16 * time.Second, true, "a healthy"}, // a heartbeat restores health at once
		{23 * time.Second, false, ""},
		{24 * time.Second, false, "a degraded"},
		{25 * time.Second, true, "a healthy"},
		{54999 * time.Millisecond, false, "a unhealthy"},
		{55 * time.Second, false, "a expired"}, // 30 s after the last sign
		{69999 * time.Millisecond, false, ""},
		{70 * time.Second, false, "gone a"},
		{71 * time.Second, true, ""}, // not for a registered worker
	} {
		now := start.Add(c.after)
		if c.beat {
			tab.Heartbeat(now, &fleet.Heartbeat{WorkerID: id})
		} else {
			tab.Tick(now, false)
		}
		if got := l.newLines(); got != c.want {
			t.Errorf("after %v reported %q, want %q", c.after, got, c.want)
		}
	}
}

func TestRecordsComeChangeAndGo(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	put(t, tab, start, record("a"))
	changed := record("a")
	changed.Draining = true
	put(t, tab, start, changed)
	if got := l.newLines(); got != "a healthy, a healthy" || !l.workers[wire.WorkerID("a")].Draining {
		t.Errorf("reported %q, draining %v", got, l.workers[wire.WorkerID("a")].Draining)
	}
	// Putting the same record again is a sign of life; a record with another start time
	// is another process.
	put(t, tab, start.Add(10*time.Second), changed)
	tab.Tick(start.Add(17*time.Second), false)
	if got := l.newLines(); got != "" {
		t.Errorf("an unchanged record causes %q", got)
	}
	changed.StartedMS = 7
	put(t, tab, start, changed)
	if got := l.newLines(); got != "a healthy" || l.workers[wire.WorkerID("a")].StartedMS != 7 {
		t.Errorf("reported %q, started %d", got, l.workers[wire.WorkerID("a")].StartedMS)
	}
	tab.Delete(start, wire.WorkerID("a"))
	tab.Delete(start, wire.WorkerID("a"))
	if got := l.newLines(); got != "gone a" {
		t.Errorf("reported %q", got)
	}
	if tab.Heartbeat(start, &fleet.Heartbeat{WorkerID: wire.WorkerID("a")}) {
		t.Error("a heartbeat of an unknown worker is accepted")
	}
	// The record ends a silence that was caused by NATS.
	put(t, tab, start, record("b"))
	tab.Refresh(start.Add(time.Hour))
	tab.Tick(start.Add(time.Hour), false)
	if got := l.newLines(); got != "b healthy" {
		t.Errorf("reported %q", got)
	}
}

func TestStaticWorkersAndRegisteredOnesAreOneSet(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	list := func(names ...string) (records []fleet.Record) {
		for _, n := range names {
			records = append(records, record(n))
		}
		return records
	}
	if err := tab.SetStatic(start, list("a", "b")); err != nil {
		t.Fatal(err)
	}
	l.newLines()
	put(t, tab, start, record("c"))
	other := record("a")
	other.Address = "10.9.9.9:1"
	put(t, tab, start, other) // the record from the file has precedence
	tab.Tick(start.Add(time.Minute), false)
	tab.Delete(start, wire.WorkerID("a"))
	if got := l.newLines(); got != "c healthy, gone c" || l.workers[wire.WorkerID("a")].Address.String() != "10.0.0.7:8000" {
		t.Errorf("reported %q, a at %v", got, l.workers[wire.WorkerID("a")].Address)
	}
	if err := tab.SetStatic(start, list("b", "d")); err != nil {
		t.Fatal(err)
	}
	if got := l.newLines(); !strings.HasPrefix(got, "gone a, ") || len(l.workers) != 2 {
		t.Errorf("reported %q, left with %d workers", got, len(l.workers))
	}
	bad := append(list("e"), fleet.Record{Name: "f", Models: []string{"m"}, Address: "nowhere"})
	if err := tab.SetStatic(start, bad); err == nil || !strings.Contains(err.Error(), `"f"`) || len(l.workers) != 2 {
		t.Errorf("error %v, %d workers; want one about f, and nothing changed", err, len(l.workers))
	}
}

// A worker that restarts repeatedly is used only if no other worker is left, until it was
// healthy for half a minute.
func TestFlappingIsDamped(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	put(t, tab, start, record("a"))
	beat := &fleet.Heartbeat{WorkerID: wire.WorkerID("a")}
	now := start
	for i, want := range []string{"a healthy", "a healthy", "a degraded"} {
		now = now.Add(16 * time.Second)
		tab.Tick(now, false)
		l.newLines()
		tab.Heartbeat(now, beat)
		if got := l.newLines(); got != want {
			t.Errorf("return %d: reported %q, want %q", i+1, got, want)
		}
	}
	for range 29 {
		now = now.Add(time.Second)
		tab.Heartbeat(now, beat)
		tab.Tick(now, false)
	}
	if got := l.newLines(); got != "" {
		t.Errorf("%q is reported before the worker was healthy for long enough", got)
	}
	now = now.Add(time.Second)
	if tab.Tick(now, false); l.newLines() != "a healthy" {
		t.Error("the worker is not healthy again")
	}
}

// A probed worker of the configuration ages without answers, but is never removed; NATS
// has no influence on it.
func TestProbedWorkersOfTheConfiguration(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	probed, other := record("a"), record("b")
	probed.Health = &fleet.Probe{}
	list := []fleet.Record{probed, other}
	if err := tab.SetStatic(start, list); err != nil {
		t.Fatal(err)
	}
	l.newLines()
	tab.Tick(start.Add(16*time.Second), true)
	if got := l.newLines(); got != "a unhealthy" {
		t.Errorf("without answers: reported %q", got)
	}
	tab.Refresh(start.Add(17 * time.Second))
	tab.Tick(start.Add(time.Hour), true)
	if got := l.newLines(); got != "a expired" || len(l.workers) != 2 {
		t.Errorf("after an hour: reported %q, %d workers", got, len(l.workers))
	}
	if err := tab.SetStatic(start.Add(time.Hour), list); err != nil {
		t.Fatal(err)
	}
	if got := l.newLines(); !strings.Contains(got, "a expired") {
		t.Errorf("read again: reported %q", got)
	}
	tab.Probed(start.Add(time.Hour), wire.WorkerID("a"), fleet.ProbeAnswered)
	if got := l.newLines(); got != "a healthy" {
		t.Errorf("after an answer: reported %q", got)
	}
	list[0].Health = &fleet.Probe{Path: "health"}
	if err := tab.SetStatic(start, list); err == nil || !strings.Contains(err.Error(), `path is "health"`) {
		t.Errorf("a path without /: %v", err)
	}
	list[0].Health = &fleet.Probe{Interval: "1ms"}
	if err := tab.SetStatic(start, list); err == nil || !strings.Contains(err.Error(), `interval is "1ms"`) {
		t.Errorf("an interval too short: %v", err)
	}
}

func TestWorkersAreBounded(t *testing.T) {
	n := 0
	tab := fleet.NewTable(fleet.Networks{}, func(router.WorkerInfo) { n++ }, func(uint64) {})
	var err error
	for id := uint64(1); err == nil && id < 1<<17; id++ {
		r := record("a")
		r.WorkerID = id
		err = tab.Put(start, r)
	}
	if err == nil || !strings.Contains(err.Error(), "limit of 65536") || n != 1<<16 {
		t.Errorf("%d workers were added, then %v", n, err)
	}
}

// A worker restarts at its address under another name. The old name gets no requests from
// then on, whatever answers at the address, and is removed. A worker that is still alive
// puts its record again.
func TestAWorkerComesBackUnderAnotherName(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	at := func(name string, started int64, change ...func(*fleet.Record)) fleet.Record {
		r := record(name)
		r.StartedMS, r.Health = started, &fleet.Probe{}
		for _, c := range change {
			c(&r)
		}
		return r
	}
	say := func(what, want string) {
		t.Helper()
		if got := l.newLines(); got != want {
			t.Errorf("%s: reported %q, want %q", what, got, want)
		}
	}
	other := func(r *fleet.Record) { r.Address = "10.0.0.8:8000" }
	rank := func(r *fleet.Record) { r.DPStart = 1 }
	put(t, tab, start, at("old", 5))
	put(t, tab, start, at("elsewhere", 1, other))
	put(t, tab, start, at("rank 1", 1, rank))
	put(t, tab, start, record("does not say"))
	say("they come", "old starting, elsewhere starting, rank 1 starting, does not say healthy")
	for _, name := range []string{"old", "elsewhere", "rank 1"} {
		tab.Probed(start, wire.WorkerID(name), fleet.ProbeAnswered)
	}
	say("they answer", "old healthy, elsewhere healthy, rank 1 healthy")
	tab.Delete(start, wire.WorkerID("does not say"))
	put(t, tab, start, at("old", 6)) // the latest registration at the address
	l.newLines()
	put(t, tab, start.Add(time.Second), at("new", 7))
	say("another name", "old unhealthy, new starting")
	tab.Probed(start.Add(2*time.Second), wire.WorkerID("old"), fleet.ProbeAnswered)
	put(t, tab, start.Add(3*time.Second), at("old", 6)) // as read again after NATS was unavailable
	say("whoever answers", "")
	tab.Heartbeat(start.Add(4*time.Second), &fleet.Heartbeat{WorkerID: wire.WorkerID("old")})
	say("it lives", "old starting") // its restarted process has answered no probe
	// The order in which a starting router reads the records does not matter.
	put(t, tab, start.Add(5*time.Second), at("older", 2))
	say("the older one comes later", "older unhealthy")
	for i := range 50 {
		now := start.Add(time.Duration(6+i) * time.Second)
		for _, name := range []string{"older", "old", "elsewhere"} {
			tab.Probed(now, wire.WorkerID(name), fleet.ProbeAnswered)
		}
		tab.Heartbeat(now, &fleet.Heartbeat{WorkerID: wire.WorkerID("new")})
		tab.Tick(now, false)
	}
	if got := l.newLines(); !strings.Contains(got, "gone old,") || !strings.Contains(got, "gone older") || !strings.Contains(got, "gone elsewhere") || strings.Contains(got, "new") {
		t.Errorf("reported %q, want the removal of all workers whose records and heartbeats ended, though one answers at the address", got)
	}
}

// Answers to probes with a long interval keep a worker of the configuration healthy. A
// missing answer makes it unhealthy as soon as silence would make others so.
func TestProbesMayBeFarApart(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	r := record("a")
	r.Health = &fleet.Probe{Interval: "1m"}
	if err := tab.SetStatic(start, []fleet.Record{r}); err != nil {
		t.Fatal(err)
	}
	l.newLines()
	for i := range 3 * 64 {
		now := start.Add(time.Duration(i) * time.Second)
		if i%63 == 0 { // an answer may be late by a sixteenth
			tab.Probed(now, wire.WorkerID("a"), fleet.ProbeAnswered)
		}
		tab.Tick(now, false)
	}
	if got := l.newLines(); got != "a healthy" { // it was starting before
		t.Errorf("%q is reported for a worker that answers", got)
	}
	last := start.Add(189 * time.Second)
	for i, want := range []string{"", "a degraded", "a unhealthy", "a expired"} {
		tab.Tick(last.Add([]time.Duration{68 * time.Second, 69 * time.Second, 78 * time.Second, 92 * time.Second}[i]), false)
		if got := l.newLines(); got != want {
			t.Errorf("step %d: reported %q, want %q", i, got, want)
		}
	}
}

// A configured worker that is probed is starting until it answers, and unhealthy while its probe says 503. A request
// that it answers is a sign of life, but does not end that.
func TestProbesSayWhatAWorkerIs(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	r := record("a")
	r.Health = new(fleet.Probe)
	set := func(records ...fleet.Record) {
		t.Helper()
		if err := tab.SetStatic(start, records); err != nil {
			t.Fatal(err)
		}
	}
	set(r)
	id := wire.WorkerID("a")
	probed := func(result fleet.Probed) func(time.Time) { return func(now time.Time) { tab.Probed(now, id, result) } }
	answered := func(now time.Time) { tab.Answered(now, id) }
	again := func(time.Time) { set(r) }
	for i, step := range []struct {
		after time.Duration
		do    func(now time.Time)
		want  string
	}{
		{0, func(time.Time) {}, "a starting"},
		{time.Second, probed(fleet.ProbeUnavailable), "a starting"}, // reported again: its own word counts
		{3 * time.Second, probed(fleet.ProbeRefused), "a starting"}, // reported again: it refuses
		{3 * time.Second, again, "a starting"},
		{4 * time.Second, probed(fleet.ProbeAnswered), "a healthy"},
		{5 * time.Second, again, "a healthy"},
		{6 * time.Second, probed(fleet.ProbeUnavailable), "a unhealthy"},
		{6500 * time.Millisecond, probed(fleet.ProbeAnswered), ""}, // at most one change a second
		{7 * time.Second, answered, ""},
		{8 * time.Second, probed(fleet.ProbeAnswered), "a healthy"},
		{20 * time.Second, probed(fleet.ProbeFailed), "a degraded"},
		{21 * time.Second, answered, "a healthy"},
		{37 * time.Second, probed(fleet.ProbeFailed), "a unhealthy"},
		{38 * time.Second, answered, "a healthy"},
	} {
		step.do(start.Add(step.after))
		if got := l.newLines(); got != step.want {
			t.Errorf("step %d: reported %q, want %q", i, got, step.want)
		}
	}
	// A registered worker stays for a minute after a request that it answered, although its record expired.
	put(t, tab, start, record("b"))
	tab.Answered(start.Add(40*time.Second), wire.WorkerID("b"))
	tab.Tick(start.Add(99*time.Second), false)
	if l.newLines(); len(l.workers) != 2 {
		t.Error("a worker that answered 59 s ago is removed")
	}
	if tab.Tick(start.Add(100*time.Second), false); len(l.workers) != 1 {
		t.Error("a worker that answered a minute ago stays")
	}
}

// Ages can be configured; combinations that no worker can meet are refused.
func TestAges(t *testing.T) {
	for _, c := range []struct {
		ages fleet.Ages
		ok   bool
	}{
		{fleet.Ages{}, true},
		{fleet.Ages{Degraded: 3 * time.Second, Unhealthy: 3 * time.Second, Expired: 3 * time.Second}, true},
		{fleet.Ages{Degraded: 20 * time.Second}, false}, // above the next age's default
		{fleet.Ages{Degraded: 2 * time.Second}, false},
		{fleet.Ages{Expired: 10 * time.Second}, false},
		{fleet.Ages{Expired: 2 * time.Hour}, false},
		{fleet.Ages{Degraded: -1}, false},
	} {
		_, err := fleet.NewRegistry(nil, fleet.RegistryConfig{Ages: c.ages})
		if (err == nil) != c.ok || err != nil && !strings.Contains(err.Error(), "ages are") {
			t.Errorf("%v: error %v, want none: %v", c.ages, err, c.ok)
		}
	}
}

// Random inputs are compared with a model that stores when each worker last gave a sign
// of life.
func TestTableEqualsSlowModel(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var l changes
		tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
		seen, kept := map[string]time.Time{}, map[string]time.Time{}
		was := map[string]string{}          // health as last reported
		returns := map[string][]time.Time{} // times of returning to health
		rests := map[string]time.Time{}
		answered, flipped := map[string]time.Time{}, map[string]time.Time{}
		result := map[string]fleet.Probed{} // of the last probe that counts
		now := start
		for step := range 500 {
			now = now.Add(time.Duration(rng.IntN(6000)) * time.Millisecond)
			name := string(rune('a' + rng.IntN(4)))
			switch rng.IntN(10) {
			case 0, 1:
				put(t, tab, now, record(name))
				seen[name], kept[name] = now, now
			case 2:
				tab.Delete(start, wire.WorkerID(name))
				delete(seen, name)
				delete(returns, name)
				delete(rests, name)
				delete(was, name)
				delete(answered, name)
				delete(flipped, name)
				delete(result, name)
			case 3, 4:
				_, known := seen[name]
				if tab.Heartbeat(now, &fleet.Heartbeat{WorkerID: wire.WorkerID(name)}) != known {
					t.Fatalf("seed %d, step %d: a heartbeat of %s counts: %v, want %v", seed, step, name, !known, known)
				}
				if known {
					seen[name], kept[name] = now, now
				}
			case 5, 6:
				p := fleet.Probed(rng.IntN(4))
				tab.Probed(now, wire.WorkerID(name), p)
				if _, known := seen[name]; known && (p == result[name] || now.Sub(flipped[name]) >= time.Second) {
					if p != result[name] {
						flipped[name] = now
					}
					if result[name] = p; p == fleet.ProbeAnswered {
						seen[name] = now
					}
				}
			case 7:
				tab.Answered(now, wire.WorkerID(name))
				if _, known := seen[name]; known {
					seen[name], answered[name] = now, now
				}
			}
			tab.Tick(now, false)
			want, got := map[string]string{}, map[string]string{}
			for n, at := range seen {
				switch age := now.Sub(at); {
				case now.Sub(kept[n]) >= 45*time.Second && now.Sub(answered[n]) >= time.Minute: // even if it answers probes
					delete(seen, n)
				case age >= 30*time.Second:
					want[n] = "expired"
				case age > 15*time.Second, result[n] == fleet.ProbeUnavailable:
					want[n] = "unhealthy"
				case age > 7500*time.Millisecond:
					want[n] = "degraded"
				default:
					want[n] = "healthy"
					if was[n] == "unhealthy" || was[n] == "expired" {
						returns[n] = append(returns[n], now)
						if k := len(returns[n]); k >= 3 && now.Sub(returns[n][k-3]) <= time.Minute {
							rests[n] = now.Add(30 * time.Second)
						}
					}
					if now.Before(rests[n]) {
						want[n] = "degraded"
					}
				}
			}
			for n := range was {
				if _, known := want[n]; !known { // a later worker of this name starts without history
					delete(returns, n)
					delete(rests, n)
					delete(answered, n)
					delete(flipped, n)
					delete(result, n)
				}
			}
			was = want
			for _, w := range l.workers {
				got[w.Name] = w.Health.String()
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("seed %d, step %d (-want +got):\n%s", seed, step, diff)
			}
		}
	}
}

func TestRecords(t *testing.T) {
	r, err := fleet.ParseRecord([]byte(`{"v":1,"worker_id":18446744073709551615,"name":"x","address":"[fd00::1]:80","models":["m","alias"],"lora":["l"],
		"role":"decode","block_size":32,"events":{"transport":"zmq","endpoint":"tcp://10.0.0.1:5557","topic":"kv","replay":"tcp://10.0.0.1:9","local_indexer":true},"dp_start":2,"dp_size":2,"rank_addresses":{"3":"10.0.0.3:81"},"kv_source":"[fd00::1]:5710","total_kv_blocks":9,"started_ms":5,"draining":true,"from_the_future":[]}`))
	if err != nil {
		t.Fatal(err)
	}
	got, err := r.Info(fleet.Networks{})
	want := router.WorkerInfo{
		ID: 1<<64 - 1, Name: "x", Address: netip.MustParseAddrPort("[fd00::1]:80"), Models: []string{"m", "alias"}, LoRA: []string{"l"},
		Role: router.Decode, BlockSize: 32, DPStart: 2, DPSize: 2, TotalKVBlocks: 9, StartedMS: 5, Draining: true,
		Events:        router.EventSource{Transport: "zmq", Endpoint: "tcp://10.0.0.1:5557", Replay: "tcp://10.0.0.1:9", LocalIndexer: true},
		RankAddresses: map[uint32]netip.AddrPort{3: netip.MustParseAddrPort("10.0.0.3:81")}, KVSource: netip.MustParseAddrPort("[fd00::1]:5710"),
	}
	if err != nil || !cmp.Equal(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })) {
		t.Errorf("info %+v, %v\nwant %+v", got, err, want)
	}
	text, err := json.Marshal(r)
	again, parseErr := fleet.ParseRecord(text)
	if err != nil || parseErr != nil || !cmp.Equal(r, again) {
		t.Errorf("after writing and reading: %+v, %v, %v", again, err, parseErr)
	}
	if mapped := (&fleet.Record{Name: "a", Models: []string{"m"}, Address: "[::ffff:10.0.0.1]:80"}); func() string { i, _ := mapped.Info(fleet.Networks{}); return i.Address.String() }() != "10.0.0.1:80" {
		t.Error("an IPv4 address in IPv6 form must become plain")
	}
}

func TestRefusedRecords(t *testing.T) {
	networks := mustParse(t, "10.0.0.0/8")
	for name, c := range map[string]struct {
		change func(*fleet.Record)
		want   string
	}{
		"a version from the future": {func(r *fleet.Record) { r.V = 2 }, "v is 2"},
		"nobody":                    {func(r *fleet.Record) { r.Name = "" }, "worker_id"},
		"a name without end":        {func(r *fleet.Record) { r.Name = strings.Repeat("x", 300) }, "name is 300 bytes"},
		"no model":                  {func(r *fleet.Record) { r.Models = nil }, "models"},
		"an empty model":            {func(r *fleet.Record) { r.Models = []string{""} }, "models"},
		"too many adapters":         {func(r *fleet.Record) { r.LoRA = slices.Repeat([]string{"l"}, 300) }, "lora"},
		"a role of its own":         {func(r *fleet.Record) { r.Role = "boss" }, "role"},
		"a negative block":          {func(r *fleet.Record) { r.BlockSize = -1 }, "block_size"},
		"a block without end":       {func(r *fleet.Record) { r.BlockSize = 2e9 }, "block_size is 2000000000"},
		"a negative cache":          {func(r *fleet.Record) { r.TotalKVBlocks = -5 }, "total_kv_blocks"},
		"negative requests":         {func(r *fleet.Record) { r.MaxNumSeqs = -1 }, "max_num_seqs"},
		"negative tokens":           {func(r *fleet.Record) { r.MaxBatchedTokens = -1 }, "max_num_batched_tokens"},
		"ranks beyond the last one": {func(r *fleet.Record) { r.DPStart, r.DPSize = 1<<32-1, 3 }, "ranks is 4294967295+3"},
		"too many ranks":            {func(r *fleet.Record) { r.DPSize = 1 << 20 }, "dp_size"},
		"a name for an address":     {func(r *fleet.Record) { r.Address = "worker:80" }, "address"},
		"no port":                   {func(r *fleet.Record) { r.Address = "10.0.0.1:0" }, "address"},
		"everywhere":                {func(r *fleet.Record) { r.Address = "0.0.0.0:80" }, "address"},
		"everybody":                 {func(r *fleet.Record) { r.Address = "224.0.0.1:80" }, "address"},
		"outside":                   {func(r *fleet.Record) { r.Address = "192.168.0.1:80" }, "networks"},
		"a rank outside":            {func(r *fleet.Record) { r.RankAddresses = map[string]string{"1": "192.168.0.1:80"} }, "rank_addresses"},
		"a source outside":          {func(r *fleet.Record) { r.KVSource = "192.168.0.1:5710" }, "kv_source is \"192.168.0.1:5710\", want an address in the worker networks"},
		"a source by name":          {func(r *fleet.Record) { r.KVSource = "localhost:5710" }, "kv_source is \"localhost:5710\", want ip:port"},
		"a source everywhere":       {func(r *fleet.Record) { r.KVSource = "0.0.0.0:5710" }, "kv_source"},
		"a source without a port":   {func(r *fleet.Record) { r.KVSource = "10.0.0.1" }, "kv_source"},
		"ports of ranks above all":  {func(r *fleet.Record) { r.KVSource, r.DPSize = "10.0.0.1:65535", 2 }, "room for the ports of all ranks"},
		"ports after a first rank":  {func(r *fleet.Record) { r.KVSource, r.DPStart = "10.0.0.1:65535", 1<<32-1 }, "room for the ports of all ranks"},
		"a rank that is no number":  {func(r *fleet.Record) { r.RankAddresses = map[string]string{"x": "10.0.0.1:80"} }, "rank_addresses"},
	} {
		r := record("a")
		c.change(&r)
		if _, err := r.Info(networks); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
	if _, err := fleet.ParseRecord([]byte(`{"address":5}`)); err == nil || !strings.Contains(err.Error(), "address") {
		t.Errorf("error %v, want one that names the field", err)
	}
}

// Each worker that is not healthy has a cause in words, also if it sends heartbeats instead of answering probes.
func TestEachHealthHasACause(t *testing.T) {
	var l changes
	tab := fleet.NewTable(fleet.Networks{}, l.set, l.remove)
	is := func(name, want string) {
		t.Helper()
		w := l.workers[wire.WorkerID(name)]
		if got := w.Health.String() + ": " + w.HealthCause; got != want {
			t.Errorf("worker %s is %s, want %s", name, got, want)
		}
	}
	probed := record("probed")
	probed.Address, probed.Health, probed.StartedMS = "10.0.0.8:8000", &fleet.Probe{}, 1
	put(t, tab, start, record("beats"))
	put(t, tab, start, probed)
	is("beats", "healthy: ")
	is("probed", "starting: it has answered no probe yet")
	tab.Probed(start, wire.WorkerID("probed"), fleet.ProbeAnswered)
	is("probed", "healthy: ")
	for i, health := range []string{"degraded", "unhealthy", "expired"} {
		tab.Tick(start.Add([]time.Duration{8 * time.Second, 16 * time.Second, 31 * time.Second}[i]), false)
		is("beats", health+": its heartbeats are missing")
		is("probed", health+": it gives no sign of life")
	}
	now := start.Add(32 * time.Second)
	for range 3 { // the last return within a minute is one too many
		tab.Heartbeat(now, &fleet.Heartbeat{WorkerID: wire.WorkerID("beats")})
		tab.Refused(now, wire.WorkerID("beats"))
		is("beats", "unhealthy: connection refused")
	}
	tab.Heartbeat(now, &fleet.Heartbeat{WorkerID: wire.WorkerID("beats")})
	is("beats", "degraded: it became unhealthy several times within a minute")
	follower := probed
	follower.Name, follower.StartedMS = "follower", 2
	put(t, tab, now, follower)
	is("probed", "expired: another worker has started at its address")
}
