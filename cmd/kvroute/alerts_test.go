// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
)

// notMade are the alerts whose fault no test makes, with the reason.
var notMade = map[string]string{
	"EventBacklogGrows": "the fault needs more events than kvroute applies, for 10 minutes",
}

// sample is the value of each series at one moment.
type sample map[string]float64

// step is a part of a story: the last sample of it, and for how many minutes it is played. The growth of
// each counter since the step before is played in each of these minutes, or only in the first one.
type step struct {
	sample
	minutes int
	once    bool
}

// story is what Prometheus would see of a fault.
type story struct {
	alert  string
	before sample
	during []step
	after  sample
	lasts  int // minutes of the fault; 0 = storyDuring
}

func (s *story) minutes() int { return cmp.Or(s.lasts, storyDuring) }

// Times of a story, in minutes: long enough for each rule to fire and to end.
const (
	storyBefore = 35
	storyDuring = 60
	storyAfter  = 70
)

// stories collects stories of tests that run at once.
type stories struct {
	mu  sync.Mutex
	all []story
}

func (s *stories) add(one ...story) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, one...)
}

// scrape reads the metrics at an address as Prometheus does: the series up is 0 if nothing answers.
func scrape(t *testing.T, address string) sample {
	t.Helper()
	now := sample{`up{job="kvroute",instance="a"}`: 0}
	text, err := process.Get(t.Context(), "http://"+address+"/metrics")
	if err != nil {
		return now
	}
	now[`up{job="kvroute",instance="a"}`] = 1
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		line := lines.Text()
		at := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || at < 0 {
			continue
		}
		value, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			t.Errorf("the line %q of /metrics: %v", line, err)
		}
		name, labels, has := strings.Cut(line[:at], "{")
		if !has {
			labels = "}"
		}
		now[name+`{instance="a",`+labels] = value
	}
	return now
}

// awaitMetric waits until a series whose text matches has a value that is right, and returns all series.
func awaitMetric(t *testing.T, address, series string, right func(float64) bool) (now sample) {
	t.Helper()
	match := regexp.MustCompile(series)
	eventually(t, "no series "+series+" has the value", func() bool {
		now = scrape(t, address)
		for key, value := range now {
			if match.MatchString(key) && right(value) {
				return true
			}
		}
		return false
	})
	return now
}

func above(limit float64) func(float64) bool { return func(v float64) bool { return v > limit } }

// steps returns the whole story in steps.
func (s *story) steps() []step {
	during := slices.Clone(s.during)
	if last := &during[len(during)-1]; last.minutes == 0 {
		last.minutes = s.minutes()
		for _, earlier := range during[:len(during)-1] {
			last.minutes -= earlier.minutes
		}
	}
	return slices.Concat([]step{{s.before, storyBefore, false}}, during, []step{{s.after, storyAfter, true}})
}

// values returns the values of a series in promtool's notation, a value a minute.
func values(of string, steps []step) string {
	name, _, _ := strings.Cut(of, "{")
	counter := false
	for _, suffix := range []string{"_total", "_bucket", "_count", "_sum"} {
		counter = counter || strings.HasSuffix(name, suffix)
	}
	var all []string
	played, last, there := 0., 0., false // of a counter: played goes on where the step before ended
	for i, s := range steps {
		value, is := s.sample[of]
		switch {
		case !is && there:
			all = append(all, "stale", fmt.Sprintf("_x%d", s.minutes-1))
		case !is:
			all = append(all, fmt.Sprintf("_x%d", s.minutes))
		case !counter || i == 0:
			all = append(all, fmt.Sprintf("%vx%d", value, s.minutes-1))
			played = value
		default:
			grown := value - last
			if grown < 0 { // the process has started again
				grown, played = 0, value
			}
			if !there && s.once {
				grown, played = 0, value // the series begins with its value
			}
			if played += grown; s.once {
				grown = 0
			}
			all = append(all, fmt.Sprintf("%v+%vx%d", played, grown, s.minutes-1))
			played += grown * float64(s.minutes-1)
		}
		if there = is; is {
			last = value
		}
	}
	return strings.Join(all, " ")
}

// promtoolTest returns the story as a test of promtool: before the fault no alert fires, at its end the
// story's alert does, and it ends after the fault.
func (s *story) promtoolTest() string {
	steps := s.steps()
	keys := map[string]bool{}
	for _, one := range steps {
		for key := range one.sample {
			keys[key] = keys[key] || strings.HasPrefix(key, "kvroute_") || strings.HasPrefix(key, "gen_ai_") || strings.HasPrefix(key, "up{")
		}
	}
	var text strings.Builder
	fmt.Fprintf(&text, "- name: %s\n  interval: 1m\n  input_series:\n", s.alert)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if keys[key] {
			fmt.Fprintf(&text, "  - {series: '%s', values: '%s'}\n", strings.ReplaceAll(key, "'", "''"), values(key, steps))
		}
	}
	fmt.Fprintf(&text, `  promql_expr_test:
  - {expr: 'ALERTS{alertstate="firing"}', eval_time: %dm, exp_samples: []}
  - {expr: 'count(ALERTS{alertname="%s",alertstate="firing"}) > bool 0', eval_time: %dm, exp_samples: [{labels: '{}', value: 1}]}
  - {expr: 'ALERTS{alertname="%[2]s",alertstate="firing"}', eval_time: %[4]dm, exp_samples: []}
`, storyBefore-1, s.alert, storyBefore+s.minutes()-1, storyBefore+s.minutes()+storyAfter-1)
	return text.String()
}

// Each fault of the alert rules is made on a running kvroute. Its metrics before, during and after the fault
// are played to the rules with stretched time: each rule fires and ends.
func TestAlertsFireForRealFaults(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	promtool := findPromtool(t)
	var all stories
	t.Run("faults", func(t *testing.T) {
		for name, fault := range map[string]func(*testing.T, *stories){
			"workers": workersDie, "requests": requestsFail, "index": indexDeparts, "bypass": envoyBypasses, "files": filesFail,
			"events": eventsAreLost, "replica": replicaEnds, "tokenizer": tokenizerDrifts, "snapshot": snapshotIsDamaged,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel() // mostly waits
				fault(t, &all)
			})
		}
	})
	if t.Failed() {
		return
	}
	rules, err := filepath.Abs(observability + "/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	made := map[string]bool{}
	var text strings.Builder
	fmt.Fprintf(&text, "rule_files: [%q]\nevaluation_interval: 1m\ntests:\n", rules)
	for i := range all.all {
		made[all.all[i].alert] = true
		text.WriteString(all.all[i].promtoolTest())
	}
	for _, r := range alertRules(t) {
		if reason := notMade[r.Alert]; made[r.Alert] == (reason != "") {
			t.Errorf("%s: made %v, reason not to make it %q", r.Alert, made[r.Alert], reason)
		}
	}
	file := filepath.Join(t.TempDir(), "faults.yaml")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), promtool, "test", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("promtool: %v\n%s", err, out)
	}
}

// startBus starts a NATS server for a test.
func startBus(t *testing.T) *bus.Server {
	t.Helper()
	b, err := startNATS("127.0.0.1:0", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Stop)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return b
}

// child starts a kvroute command, which the test stops.
func child(t *testing.T, name string, args ...string) *demo.Child {
	t.Helper()
	c, err := demo.Start(t.Context(), t.TempDir(), name, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Stop()
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, c.LastLines())
		}
	})
	return c
}

// serveAt starts kvroute serve, and waits until it knows so many healthy workers.
func serveAt(t *testing.T, healthy int, flags ...string) *demo.Child {
	t.Helper()
	c := child(t, "kvroute", append([]string{"serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"}, flags...)...)
	if healthy > 0 { // a kvroute without workers has no series of them
		awaitHealthy(t, c, healthy)
	}
	return c
}

func awaitHealthy(t *testing.T, c *demo.Child, n int) sample {
	t.Helper()
	return awaitMetric(t, c.At.HTTP, `^kvroute_router_workers\{.*health="healthy"`, func(v float64) bool { return v == float64(n) })
}

func held(t *testing.T) string {
	t.Helper()
	return fmt.Sprint("127.0.0.1:", fixtures.HoldPort(t))
}

// workersDie kills one of two workers, which returns, and then both; then kvroute ends and starts again.
func workersDie(t *testing.T, all *stories) {
	b := startBus(t)
	ports := []string{held(t), held(t)}
	start := func(i int) *demo.Child {
		return child(t, fmt.Sprint("gpu-", i), "engine", "--name", fmt.Sprint("gpu-", i), "--listen", ports[i], "--nats-url", b.URL())
	}
	engines := []*demo.Child{start(0), start(1)}
	at, flags := held(t), []string{"--nats-url", b.URL(), "--degraded-after", "3s", "--unhealthy-after", "3s", "--expired-after", "4s"}
	k := serveAt(t, 2, append(flags, "--http-address", at)...)
	healthy := awaitHealthy(t, k, 2)
	state := func(health string) sample {
		return awaitMetric(t, at, `^kvroute_worker_state\{.*health="`+health+`".*worker="gpu-1"`, above(0))
	}

	kill(t, engines[0])
	kill(t, engines[1])
	unready := awaitMetric(t, at, `^kvroute_router_workers\{.*health="expired"`, func(v float64) bool { return v == 2 })
	engines[0] = start(0)
	one := awaitHealthy(t, k, 1)
	all.add(story{"KvrouteUnready", healthy, []step{{sample: unready}}, one, 0})

	left := state("left")
	engines[1] = start(1)
	again := awaitHealthy(t, k, 2)
	all.add(story{"WorkerUnhealthy", healthy, []step{{unready, 1, true}, {one, 1, true}, {left, 0, true}}, again, 0})

	k.Stop()
	down := scrape(t, at)
	k = serveAt(t, 2, append(flags, "--http-address", at)...)
	all.add(story{"KvrouteDown", again, []step{{sample: down}}, awaitHealthy(t, k, 2), 0})
}

// requestsFail has a worker answer with errors, has kvroute refuse requests, and sends requests that kvroute
// leaves to Envoy.
func requestsFail(t *testing.T, all *stories) {
	d := newStack(t, 0, nil)
	var fails atomic.Bool
	address := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return
		}
		if fails.Load() {
			http.Error(w, `{"error":"a fault"}`, http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n")
	})
	flags := staticFlags(t, d, "faulty", address)
	text, err := os.ReadFile(flags[1])
	if err == nil {
		err = os.WriteFile(flags[1], append(text, "- {name: other, address: \"127.0.0.1:1\", models: [other], health: none}\n"...), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	d.EnvoyConfig.Pool = append(d.EnvoyConfig.Pool, address)
	d.begin(t, append(flags, "--avoid-failing", "0", "--allow-direct", "--trust-overrides")...) // trusted, so that bodies it cannot read pass
	at := d.Router.At.HTTP
	chats := func(n int, header http.Header) {
		t.Helper()
		for range n {
			reply(t, d, http.MethodPost, chatPath, chatBody("hello", 2, true), header)
		}
	}
	chats(8, nil)
	before := awaitMetric(t, at, `^gen_ai_server_request_duration_seconds_count`, above(7))

	fails.Store(true)
	chats(8, nil)
	failed := awaitMetric(t, at, `^kvroute_worker_failures_total\{.*worker="faulty"`, above(7))
	fails.Store(false)
	after := scrape(t, at)
	all.add(story{"WorkerFailing", before, []step{{sample: failed}}, after, 0})

	chats(10, http.Header{"Content-Encoding": {"gzip"}})
	open := awaitMetric(t, at, `^kvroute_extproc_fail_open_total`, above(7))
	all.add(story{"KvrouteFailsOpen", after, []step{{sample: open}}, open, 0})

	call := func(path, body string) int {
		resp, _ := whole(t, http.MethodPost, "http://"+at+path, body, nil)
		return resp.StatusCode
	}
	call("/busy_threshold", `{"model":"sim","active_prefill_tokens_threshold":1}`)
	call("/v1/best_worker", `{"model":"sim","request_id":"a","token_ids":[1,2,3,4,5]}`)
	for i := range 10 {
		if status := call("/v1/best_worker", fmt.Sprintf(`{"model":"sim","request_id":"b%d","token_ids":[1]}`, i)); status != http.StatusTooManyRequests {
			t.Errorf("a request above the threshold gets %d", status)
		}
	}
	refused := scrape(t, at)
	call("/v1/free", `{"request_id":"a"}`)
	call("/busy_threshold", `{"model":"sim","active_prefill_tokens_threshold":null}`)
	ended := scrape(t, at)
	all.add(story{"RequestsRefused", open, []step{{sample: refused}}, ended, 0})
}

// indexDeparts has kvroute forget the blocks of a worker by a forged event, and sends an event that
// contradicts itself.
func indexDeparts(t *testing.T, all *stories) {
	d := newStack(t, 1, []string{"--speed", "50", "--enable-local-indexer"})
	d.Core = true
	d.begin(t, "--audit-share", "1", "--router-predicted-ttl-secs", "0")
	at := d.Router.At.HTTP
	prompt := strings.Repeat("The same long beginning of many questions. ", 100)
	chats := func(n int) sample {
		t.Helper()
		for range n {
			before := d.counter(t, "kvroute_audit_responses_total", "")
			body := strings.Replace(chatBody(prompt, 4, true), "{", `{"stream_options":{"include_usage":true},`, 1)
			if resp, text := reply(t, d, http.MethodPost, chatPath, body, nil); resp.StatusCode != http.StatusOK {
				t.Fatal(text)
			}
			eventually(t, "a response is not audited", func() bool { return d.counter(t, "kvroute_audit_responses_total", "") > before })
		}
		return scrape(t, at)
	}
	chats(1)
	indexed := func() bool { n := workers(t, d)[0].CachedBlocks; return n > 20 && n == cachedBlocks(t, d.Engines[0]) }
	eventually(t, "the blocks of the first prompt are not known", indexed)
	before := chats(4)
	forgeClear(t, d)
	eventually(t, "the forged event is not applied", func() bool { return workers(t, d)[0].CachedBlocks == 0 })
	during := chats(4)
	eventually(t, "the index is not read again", indexed)
	after := chats(4)
	all.add(story{"IndexDeparts", before, []step{{sample: during}}, after, 0})
	after = slowFirstTokens(t, d, after, all)

	nc, err := nats.Connect(d.Bus.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	id := wire.WorkerID(d.Engines[0].Name)
	m, err := nc.Request(wire.Scope{}.Own("query", wire.WorkerKey(id), "0"), events.AppendQuery(nil, events.Query{WorkerID: id}), process.Patience)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := events.DecodeAnswer(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	twice := indexer.Block{External: 77, Local: 7}
	forged := events.RouterEvent{WorkerID: id, EventID: answer.LastEventID + 1, Event: indexer.Event{
		Kind: indexer.Stored, HasParent: true, Parent: 77, Blocks: []indexer.Block{twice},
	}}
	if err := nc.Publish(wire.Scope{}.Topic(events.Topic), events.AppendEnvelope(nil, events.Envelope{
		PublisherID: publisherOf(t, nc, d.Engines[0].Name), Topic: events.Topic, Payload: events.AppendEvents(nil, []events.RouterEvent{forged}),
	})); err != nil {
		t.Fatal(err)
	}
	invalid := awaitMetric(t, at, `^kvroute_router_event_blocks_total\{.*outcome="invalid"`, above(0))
	all.add(story{"EventsInvalid", after, []step{{sample: invalid}}, invalid, 0})
}

// slowFirstTokens stops the process of an engine for 6 s, above the limit of the rule, while requests wait.
func slowFirstTokens(t *testing.T, d *demonstration, before sample, all *stories) (after sample) {
	t.Helper()
	const count = `gen_ai_server_time_to_first_token_seconds_count{instance="a",gen_ai_operation_name="chat",gen_ai_request_model="sim"}`
	seen := func(more float64) sample {
		return awaitMetric(t, d.Router.At.HTTP, regexp.QuoteMeta(count), above(before[count]+more))
	}
	engine := d.Engines[0].Cmd.Process
	if err := engine.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// long has a prompt that is not cached, and more tokens than kvroute infers first tokens for.
	long := func(i int) string { return chatBody(strings.Repeat(fmt.Sprintf("%d words ", i), 400), 200, true) }
	var waiting sync.WaitGroup
	for i := range 4 {
		waiting.Go(func() {
			if resp, text := reply(t, d, http.MethodPost, chatPath, long(i), nil); resp.StatusCode != http.StatusOK {
				t.Error(text)
			}
		})
	}
	<-time.After(6 * time.Second)
	if err := engine.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	waiting.Wait()
	during := seen(3)
	reply(t, d, http.MethodPost, chatPath, long(4), nil)
	after = seen(4)
	all.add(story{"SlowFirstToken", before, []step{{sample: during}}, after, 0})
	return after
}

// envoyBypasses starts an Envoy whose configuration has a wrong address of kvroute.
func envoyBypasses(t *testing.T, all *stories) {
	d := newStack(t, 1, []string{"--speed", "20"})
	d.Unrouted = true
	right := d.EnvoyConfig
	d.EnvoyConfig.ExtProc = []string{held(t)}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Stop)
	if err := d.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.StartRouter(t.Context(), "--envoy-admin", d.Envoy.AdminURL()); err != nil {
		t.Fatal(err)
	}
	at := d.Router.At.HTTP
	before := scrape(t, at)
	fault := `^kvroute_envoy_faults\{.*fault="bypassed"`
	var during sample
	eventually(t, "no fault is noticed", func() bool {
		d.send(t, "hello", false)
		during = scrape(t, at)
		for key, value := range during {
			if regexp.MustCompile(fault).MatchString(key) && value == 1 {
				return true
			}
		}
		return false
	})
	if err := d.Envoy.Stop(); err != nil {
		t.Fatal(err)
	}
	d.EnvoyConfig = right
	if err := d.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.StartRouter(t.Context(), "--envoy-admin", d.Envoy.AdminURL()); err != nil {
		t.Fatal(err)
	}
	d.send(t, "hello", false)
	all.add(story{"KvrouteBypassed", before, []step{{sample: during}}, scrape(t, d.Router.At.HTTP), 0})
}

// filesFail has folders in the place of the files of --state-dir.
func filesFail(t *testing.T, all *stories) {
	dir := filepath.Join(t.TempDir(), "state")
	k := serveAt(t, 0, "--nats-url", startBus(t).URL(), "--state-dir", dir, "--state-interval", "1s")
	saved := `^kvroute_state_files_total\{.*outcome="saved"`
	before := awaitMetric(t, k.At.HTTP, saved, above(0))
	var names []string
	eventually(t, "no state is saved", func() bool {
		found, err := filepath.Glob(dir + "/*" + sourceFile)
		names = found
		return err == nil && len(found) == 1
	})
	eventually(t, "the file cannot be replaced", func() bool { // a save may put it back in between
		return os.Remove(names[0]) == nil && os.Mkdir(names[0], 0o700) == nil
	})
	if err := os.WriteFile(filepath.Join(names[0], "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	during := awaitMetric(t, k.At.HTTP, `^kvroute_state_files_total\{.*outcome="failed"`, above(0))
	if err := os.RemoveAll(names[0]); err != nil {
		t.Fatal(err)
	}
	var after sample
	eventually(t, "the state is not saved again", func() bool {
		_, err := os.Stat(names[0])
		after = scrape(t, k.At.HTTP)
		return err == nil
	})
	all.add(story{"StateNotWritten", before, []step{{sample: during, once: true}}, after, 20})
}

// eventsAreLost has an engine drop events, which it cannot send again; then the engine dies.
func eventsAreLost(t *testing.T, all *stories) {
	b := startBus(t)
	address, socket := held(t), "tcp://"+held(t)
	start := func(flags ...string) *demo.Child {
		return child(t, "lossy", append([]string{
			"engine", "--name", "lossy", "--nats-url", "", "--listen", address, "--speed", "50", "--kv-events", "zmq", "--kv-events-endpoint", socket, "--kv-events-replay-endpoint", "",
		}, flags...)...)
	}
	e := start("--kv-events-drop-every", "3")
	file := writeFile(t, fmt.Sprintf("version: 1\nworkers:\n- {name: lossy, address: %q, models: [sim], block_size: 16, health: {interval: 500ms}, events: {transport: zmq, endpoint: %q}}\n", address, socket))
	k := serveAt(t, 1, "--config", file, "--nats-url", b.URL(), "--degraded-after", "3s", "--unhealthy-after", "3s", "--expired-after", "4s")
	awaitRank := func(state string) sample {
		return awaitMetric(t, k.At.HTTP, `^kvroute_events_ranks\{.*feed="zmq",.*state="`+state+`"`, above(0))
	}
	before := awaitRank("ok")
	for i := range 12 {
		resp, text := whole(t, http.MethodPost, "http://"+address+chatPath, chatBody(fmt.Sprint(i, strings.Repeat(" a prompt of several blocks", 40)), 2, false), nil)
		if resp.StatusCode != http.StatusOK {
			t.Fatal(text)
		}
	}
	suspect := awaitRank("suspect")
	kill(t, e)
	fault := `^kvroute_worker_faults\{.*fault="silent"`
	silent := awaitMetric(t, k.At.HTTP, fault, above(0))
	awaitMetric(t, k.At.HTTP, `^kvroute_worker_state\{.*health="expired"`, above(0)) // it has noticed the closed port, too
	start()
	awaitHealthy(t, k, 1)
	after := awaitRank("ok")
	all.add(
		story{"EventsLost", before, []step{{sample: suspect}}, after, 0},
		story{"WorkerFault", before, []step{{sample: silent}}, after, 0},
	)
}

// replicaEnds stops one of two replicas.
func replicaEnds(t *testing.T, all *stories) {
	b := startBus(t)
	flags := []string{"--nats-url", b.URL(), "--router-replica-sync", "--replica"}
	first, second := serveAt(t, 0, append(flags, "first")...), serveAt(t, 0, append(flags, "second")...)
	peers := func(n float64) sample {
		return awaitMetric(t, first.At.HTTP, `^kvroute_sync_peers\{`, func(v float64) bool { return v == n })
	}
	before := peers(1)
	kill(t, second)
	during := peers(0)
	serveAt(t, 0, append(flags, "second")...)
	all.add(story{"ReplicaSilent", before, []step{{sample: during}}, peers(1), 20})
}

// tokenizerDrifts gives kvroute another chat template than the engine's.
func tokenizerDrifts(t *testing.T, all *stories) {
	d := newStack(t, 1, []string{"--speed", "50"})
	dir := t.TempDir()
	if err := os.CopyFS(dir, enginesim.ModelFiles()); err != nil {
		t.Fatal(err)
	}
	right := t.TempDir()
	if err := os.CopyFS(right, enginesim.ModelFiles()); err != nil {
		t.Fatal(err)
	}
	template, err := os.ReadFile(dir + "/chat_template.jinja")
	if err == nil {
		err = os.WriteFile(dir+"/chat_template.jinja", append([]byte("another beginning of each prompt, which the engine does not have: "), template...), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	config := func(folder string) string {
		return writeFile(t, fmt.Sprintf("version: 1\nmodels:\n- {name: sim, tokenizer: %q}\n", folder))
	}
	n := 0
	chats := func() {
		for range 8 {
			n++
			reply(t, d, http.MethodPost, chatPath, chatBody(fmt.Sprint(n, strings.Repeat(" a prompt of several blocks", 40)), 2, false), nil)
		}
	}
	d.begin(t, "--config", config(right), "--verify-tokenizer")
	before := scrape(t, d.Router.At.HTTP)
	if err := d.StartRouter(t.Context(), "--config", config(dir), "--verify-tokenizer"); err != nil {
		t.Fatal(err)
	}
	var during sample
	eventually(t, "the drift is not found", func() bool {
		chats() // again: Envoy may have bypassed a kvroute that has just started
		during = scrape(t, d.Router.At.HTTP)
		for series, value := range during {
			if value == 1 && strings.HasPrefix(series, "kvroute_tokenize_models{") && strings.Contains(series, `reason="drift"`) {
				return true
			}
		}
		return false
	})
	if err := d.StartRouter(t.Context(), "--config", config(right), "--verify-tokenizer"); err != nil {
		t.Fatal(err)
	}
	chats()
	all.add(story{"TokenizerDrift", before, []step{{sample: during}}, scrape(t, d.Router.At.HTTP), 0})
}

// snapshotIsDamaged replaces the snapshot of the index by nonsense, which a new replica reads.
func snapshotIsDamaged(t *testing.T, all *stories) {
	b := startBus(t)
	e := child(t, "gpu", "engine", "--name", "gpu", "--listen", "127.0.0.1:0", "--nats-url", b.URL(), "--speed", "50")
	flags := []string{"--nats-url", b.URL(), "--router-snapshot-threshold", "1"}
	k := serveAt(t, 1, flags...)
	chat := func() {
		if resp, text := whole(t, http.MethodPost, "http://"+e.At.HTTP+chatPath, chatBody(strings.Repeat("a prompt of several blocks ", 40), 2, false), nil); resp.StatusCode != http.StatusOK {
			t.Fatal(text)
		}
	}
	chat()
	before := awaitMetric(t, k.At.HTTP, `^kvroute_worker_cached_blocks`, above(0))
	k.Stop() // writes a snapshot
	nc, err := nats.Connect(b.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for name := range js.ObjectStoreNames(t.Context()).Name() {
		store, err := js.ObjectStore(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		list, err := store.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range list {
			if _, err := store.PutBytes(t.Context(), o.Name, []byte("nonsense")); err != nil {
				t.Fatal(err)
			}
		}
	}
	k = serveAt(t, 1, flags...)
	during := awaitMetric(t, k.At.HTTP, `^kvroute_events_snapshots_total\{.*outcome="damaged"`, above(0))
	// The failure happened once, when the process began: the alert ends after half an hour.
	all.add(story{"SnapshotsFail", before, []step{{sample: during, once: true}}, scrape(t, k.At.HTTP), 20})
}
