// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// named returns the engine with a name.
func (d *demonstration) named(t *testing.T, name string) *demo.Child {
	t.Helper()
	for _, e := range d.Engines {
		if e != nil && e.Name == name {
			return e
		}
	}
	t.Fatalf("there is no engine %q", name)
	return nil
}

// newest returns the latest decision.
func newest(t *testing.T, d *demonstration) router.Decision {
	t.Helper()
	var list struct{ Decisions []router.Decision }
	if err := process.GetJSON(t.Context(), "http://"+d.Router.At.HTTP+"/v1/decisions?limit=1", &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Decisions) == 0 {
		t.Fatal("there are no decisions")
	}
	return list.Decisions[0]
}

func idle(t *testing.T, d *demonstration) {
	t.Helper()
	eventually(t, "slots stay taken", func() bool {
		requests, pend, blocks := inFlight(t, d)
		return requests+pend+blocks == 0
	})
}

// A dead worker is chosen because it has the prefix; the second choice serves the request, and the
// dead worker gets no more requests.
func TestTheSecondChoiceServes(t *testing.T) {
	t.Parallel() // mostly waits
	for failover, choice := range map[envoy.Failover]string{envoy.Composite: "header", envoy.List: "list"} {
		t.Run(failover, func(t *testing.T) {
			d := newStack(t, 3, []string{"--speed", "20"})
			d.EnvoyConfig.Failover, d.EnvoyConfig.PoolFile = failover, filepath.Join(d.Dir, "pool.json")
			d.begin(t, "--second-choice", choice, "--endpoint-file", d.EnvoyConfig.PoolFile, "--avoid-failing", "1m")
			content := strings.Repeat("a prefix to be found again ", 50)
			first, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, true), nil)
			settle(t, d)
			dead := first.Header.Get("X-Sim-Worker")
			kill(t, d.named(t, dead))

			resp, body := reply(t, d, "POST", chatPath, chatBody(content, 4, true), nil)
			if resp.StatusCode != 200 || resp.Header.Get("X-Sim-Worker") == dead {
				t.Fatalf("status %d from %q: %s", resp.StatusCode, resp.Header.Get("X-Sim-Worker"), body)
			}
			eventually(t, "the decision does not say who served", func() bool { return newest(t, d).Served.IsValid() })
			if got := newest(t, d); got.WorkerName != dead || got.Served != got.Second.Address || got.Second.WorkerName != resp.Header.Get("X-Sim-Worker") {
				t.Errorf("decision for %s, second %+v, served by %v, answer from %s", got.WorkerName, got.Second, got.Served, resp.Header.Get("X-Sim-Worker"))
			}
			idle(t, d)
			again, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
			if got := newest(t, d); again.StatusCode != 200 || got.WorkerName == dead || got.Served.IsValid() {
				t.Errorf("status %d, decision for %s, served by %v: the dead worker is not avoided", again.StatusCode, got.WorkerName, got.Served)
			}
			for _, w := range workers(t, d) {
				if w.Failing != (w.Name == dead) {
					t.Errorf("%s: failing %v", w.Name, w.Failing)
				}
			}
		})
	}
}

// Two workers die at once: the request goes to the third choice, and neither of the two gets another one.
func TestTheThirdChoiceServes(t *testing.T) {
	t.Parallel() // mostly waits
	for failover, choice := range map[envoy.Failover]string{envoy.Composite: "header", envoy.List: "list"} {
		t.Run(failover, func(t *testing.T) {
			d := newStack(t, 3, []string{"--speed", "20"})
			d.EnvoyConfig.Failover, d.EnvoyConfig.PoolFile = failover, filepath.Join(d.Dir, "pool.json")
			d.begin(t, "--second-choice", choice, "--endpoint-file", d.EnvoyConfig.PoolFile, "--avoid-failing", "1m")
			content := strings.Repeat("a prefix to be found again ", 50)
			reply(t, d, "POST", chatPath, chatBody(content, 4, true), nil)
			settle(t, d)
			reply(t, d, "POST", chatPath, chatBody(content, 4, true), nil)
			idle(t, d)
			chosen := newest(t, d)
			kill(t, d.named(t, chosen.WorkerName))
			kill(t, d.named(t, chosen.Second.WorkerName))
			resp, body := reply(t, d, "POST", chatPath, chatBody(content, 4, true), nil)
			if got := resp.Header.Get("X-Sim-Worker"); resp.StatusCode != 200 || got != chosen.Third.WorkerName {
				t.Fatalf("status %d from %q, want %q: %s", resp.StatusCode, got, chosen.Third.WorkerName, body)
			}
			eventually(t, "the decision does not say who served", func() bool { return newest(t, d).Served == chosen.Third.Address })
			for _, w := range workers(t, d) {
				if w.Failing != (w.Name != chosen.Third.WorkerName) {
					t.Errorf("%s: failing %v", w.Name, w.Failing)
				}
			}
		})
	}
}

// A worker that answers 503 has not begun the request, so another one may serve it.
func TestA503IsServedByAnother(t *testing.T) {
	d := newStack(t, 2, []string{"--speed", "20"})
	var mu sync.Mutex
	asked := 0
	faulty := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			mu.Lock()
			asked++
			mu.Unlock()
		}
		http.Error(w, "not yet", http.StatusServiceUnavailable)
	})
	d.begin(t, append(staticFlags(t, d, "faulty", faulty), "--router-mode", "round-robin", "--avoid-failing", "0")...)
	for i := range 9 {
		got := d.send(t, fmt.Sprint(i), i%2 == 0)
		outcomeOf(t, "the worker answers 429 or 503").check(t, got)
		if got.header.Get("X-Sim-Worker") == "" {
			t.Fatalf("request %d: %s", i, got.body)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if asked < 2 {
		t.Errorf("the faulty worker was asked %d times, want every third", asked)
	}
	idle(t, d)
}

// A worker that answers 429 with Retry-After gets no request for that time, though Envoy sends the request to the
// second choice and clients never see the 429. Then a request tries it again.
func TestRetryAfterOfARepeatedAttempt(t *testing.T) {
	t.Parallel()                  // mostly waits
	const pause = 6 * time.Second // much longer than the first period of --avoid-failing
	for proxy, choice := range map[string]string{envoy.Composite: "header", envoy.List: "list", "Envoy Gateway": "header"} {
		t.Run(proxy, func(t *testing.T) {
			t.Parallel()
			d := newStack(t, 2, []string{"--speed", "20"})
			var mu sync.Mutex
			var asked []time.Time
			full := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodPost {
					mu.Lock()
					asked = append(asked, time.Now())
					mu.Unlock()
				}
				w.Header().Set("Retry-After", "6")
				http.Error(w, "full", http.StatusTooManyRequests)
			})
			flags := append(staticFlags(t, d, "full", full), "--second-choice", choice)
			if proxy == "Envoy Gateway" {
				d.Bootstrap = gatewayBootstrap(t, "original-destination")
				flags = append(flags, "--mode-override")
			} else {
				d.EnvoyConfig.Failover, d.EnvoyConfig.PoolFile = proxy, filepath.Join(d.Dir, "pool.json")
				flags = append(flags, "--endpoint-file", d.EnvoyConfig.PoolFile)
			}
			d.begin(t, append(flags, "--router-mode", "round-robin", "--avoid-failing", "1s", "--verify-tokenizer=false")...)
			n := 0
			eventually(t, "the worker is not asked twice", func() bool {
				if got := d.send(t, fmt.Sprint(n), n%2 == 0); got.status != http.StatusOK || got.header.Get("X-Sim-Worker") == "" {
					t.Fatalf("request %d: status %d, %s", n, got.status, got.body)
				}
				n++
				mu.Lock()
				defer mu.Unlock()
				return len(asked) > 1
			})
			if got := asked[1].Sub(asked[0]); got < pause {
				t.Errorf("of %d requests, the worker got another one %v after it had asked for a pause of %v", n, got, pause)
			}
			if _, text := get(t, "http://"+d.Router.At.HTTP+"/metrics"); !strings.Contains(text, `kvroute_extproc_attempts_total{status="429"}`) {
				t.Error("the attempts are not counted")
			}
		})
	}
}

// The ranks of two nodes differ, and a third worker has one rank. If the first worker is dead, the second
// choice gets the request with its own rank.
func TestEachAttemptNamesItsRank(t *testing.T) {
	d := newStack(t, 0, nil)
	var mu sync.Mutex
	served := map[string]int{}
	node := func(name string, ranks ...string) string {
		return startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost && !slices.Contains(ranks, r.Header.Get("X-Data-Parallel-Rank")) {
				http.Error(w, "another node's rank", http.StatusBadRequest)
				return
			}
			mu.Lock()
			served[name]++
			mu.Unlock()
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[]}`)
		})
	}
	second, single := node("second", "2", "3"), node("single", "")
	file := filepath.Join(d.Dir, "kvroute.yaml")
	text := fmt.Sprintf(`version: 1
workers:
- {name: first, address: %q, models: [sim], block_size: 16, dp_size: 2, engine: vllm}
- {name: second, address: %q, models: [sim], block_size: 16, dp_start: 2, dp_size: 2, engine: vllm}
- {name: single, address: %q, models: [sim], block_size: 16, engine: vllm}
`, heldAddress(t), second, single)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	d.begin(t, "--config", file, "--router-mode", "round-robin", "--avoid-failing", "0")
	for i := range 15 {
		if resp, body := reply(t, d, "POST", chatPath, chatBody(fmt.Sprint(i), 2, false), nil); resp.StatusCode != http.StatusOK {
			t.Fatalf("request %d: status %d: %s", i, resp.StatusCode, body)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if served["second"] < 6 || served["single"] < 3 {
		t.Errorf("the workers served %v", served)
	}
}

// While kvroute is dead, Envoy uses the current workers: those that came after its start, and not
// those that left.
func TestThePoolIsKeptUpToDate(t *testing.T) {
	d := newStack(t, 2, []string{"--speed", "20"})
	d.EnvoyConfig.PoolFile = filepath.Join(d.Dir, "pool.json")
	d.begin(t, "--endpoint-file", d.EnvoyConfig.PoolFile)
	late, err := demo.Start(t.Context(), d.Dir, "late", "engine", "--name", "late", "--listen", "127.0.0.1:0", "--nats-url", d.Bus.URL(), "--model", "sim", "--speed", "20")
	if err != nil {
		t.Fatal(err)
	}
	d.Engines = append(d.Engines, late)
	gone := d.Engines[0]
	gone.Stop()
	eventually(t, "the endpoint file does not follow the fleet", func() bool {
		text, err := os.ReadFile(d.EnvoyConfig.PoolFile)
		port := func(c *demo.Child) string {
			return fmt.Sprintf(": %s\n", c.At.HTTP[strings.LastIndex(c.At.HTTP, ":")+1:])
		}
		return err == nil && strings.Contains(string(text), port(late)) && !strings.Contains(string(text), port(gone))
	})
	kill(t, d.Router)
	served := map[string]int{}
	err = process.Until(t.Context(), process.Patience, "Envoy does not go on with today's workers", func(context.Context) bool {
		resp, _ := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil)
		if resp.StatusCode != 200 {
			t.Errorf("status %d", resp.StatusCode)
		}
		served[resp.Header.Get("X-Sim-Worker")]++
		return served["late"] > 0 && served["worker-2"] > 0
	})
	if err != nil || served["worker-1"] > 0 {
		t.Errorf("%v; requests served: %v", err, served)
	}
}

// A request that names its worker, or its allowed workers, is served by these workers or fails,
// whatever else is in Envoy's pool.
func TestOnlyAllowedWorkersServe(t *testing.T) {
	for failover, choice := range map[envoy.Failover]string{envoy.Composite: "header", envoy.List: "list"} {
		t.Run(failover, func(t *testing.T) {
			d := newStack(t, 4, []string{"--speed", "20"})
			d.EnvoyConfig.Failover = failover
			d.begin(t, "--second-choice", choice, "--allow-direct", "--endpoint-picker", "--avoid-failing", "0")
			all := workers(t, d)
			dead, other := all[0], all[1]
			kill(t, d.named(t, dead.Name))
			sendWith := func(name, value string) sight {
				t.Helper()
				return look(send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("hello", 2, false), http.Header{name: {value}}))
			}
			for range 8 { // Envoy draws the worker of such a request at random
				for name, value := range map[string]string{"X-Dynamo-Worker-Instance-Id": fmt.Sprint(dead.ID), "Test-Epp-Endpoint-Selection": dead.Address.String()} {
					got := sendWith(name, value)
					outcomeOf(t, "the only worker that a request allows refuses it").check(t, got)
					if by := got.header.Get("X-Sim-Worker"); by != "" || newest(t, d).WorkerName != dead.Name {
						t.Errorf("%s: decided for %s, answered by %q", name, newest(t, d).WorkerName, by)
					}
				}
				got := sendWith("Test-Epp-Endpoint-Selection", dead.Address.String()+","+other.Address.String())
				if by := got.header.Get("X-Sim-Worker"); got.status != 200 || by != other.Name {
					t.Errorf("of two one is dead: status %d from %q, want %s: %.200s", got.status, by, other.Name, got.body)
				}
			}
			idle(t, d)
		})
	}
}

// Without another worker to try, the failed worker is still counted as failing.
func TestTheOnlyChoiceIsBlamed(t *testing.T) {
	t.Parallel() // mostly waits
	for failover, choice := range map[envoy.Failover]string{envoy.Composite: "header", envoy.List: "list", envoy.NoFailover: "none"} {
		blamed := func(t *testing.T, d *demonstration) {
			t.Helper()
			got := d.send(t, "hello", false)
			if got.status != 503 || got.header.Get("X-Dynamo-Reason") == "" {
				t.Errorf("status %d, reason %q: %.200s", got.status, got.header.Get("X-Dynamo-Reason"), got.body)
			}
			eventually(t, "the only worker is not blamed", func() bool { w := workers(t, d); return len(w) == 1 && w[0].Failing })
			idle(t, d)
		}
		flags := []string{"--second-choice", choice, "--avoid-failing", "1m"}
		t.Run(failover+" refuses", func(t *testing.T) {
			d := newStack(t, 1, []string{"--speed", "20"})
			d.EnvoyConfig.Failover = failover
			d.begin(t, flags...)
			kill(t, d.Engines[0])
			blamed(t, d)
		})
		t.Run(failover+" answers 503", func(t *testing.T) {
			d := newStack(t, 0, nil)
			d.EnvoyConfig.Failover = failover
			address, bad := startRefusing(t, http.StatusServiceUnavailable)
			d.EnvoyConfig.Pool = []string{address}
			d.begin(t, append(staticFlags(t, d, "a", address), flags...)...)
			bad.Store(true)
			blamed(t, d)
		})
		if failover != envoy.Composite {
			continue
		}
		t.Run("answers 429", func(t *testing.T) {
			d := newStack(t, 0, nil)
			address, bad := startRefusing(t, http.StatusTooManyRequests)
			d.EnvoyConfig.Pool = []string{address}
			d.begin(t, append(staticFlags(t, d, "a", address), flags...)...)
			bad.Store(true)
			for i := range 3 { // also while it is avoided
				got := d.send(t, fmt.Sprint(i), false)
				outcomeOf(t, "the only worker that a request allows answers 429 or 503").check(t, got)
				if after := got.header.Get("Retry-After"); after != "17" {
					t.Errorf("the client sees Retry-After %q, want the worker's", after)
				}
			}
			idle(t, d)
		})
	}
}

// startRefusing starts a worker that answers each request, or, while bad is set, refuses it with a status and
// Retry-After.
func startRefusing(t *testing.T, status int) (address string, bad *atomic.Bool) {
	t.Helper()
	bad = new(atomic.Bool)
	return startHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		if bad.Load() {
			w.Header().Set("Retry-After", "17")
			http.Error(w, "not now", status)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[]}`)
	}), bad
}

// A worker that is missing from Envoy's pool is not counted as failing. The second choice serves its
// requests, and a metric counts them.
func TestAWorkerThatEnvoyDoesNotKnowIsNotBlamed(t *testing.T) {
	d := newStack(t, 0, nil)
	startWorker := func(name string) string {
		return startHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("X-Sim-Worker", name)
			fmt.Fprint(w, `{"choices":[]}`)
		})
	}
	known, unknown := startWorker("known"), startWorker("unknown")
	d.EnvoyConfig.Failover, d.EnvoyConfig.Pool = envoy.List, []string{known}
	d.begin(t, append(staticFlags(t, d, "known", known, "unknown", unknown), "--second-choice", "list", "--router-mode", "round-robin", "--avoid-failing", "1m")...)
	moved := 0
	for i := range 6 {
		if got := d.send(t, fmt.Sprint(i), false); got.status != 200 || got.header.Get("X-Sim-Worker") != "known" {
			t.Errorf("status %d from %q: %.200s", got.status, got.header.Get("X-Sim-Worker"), got.body)
		}
		if one := newest(t, d); one.WorkerName == "unknown" && one.Served == one.Second.Address {
			moved++
		}
		for _, w := range workers(t, d) {
			if w.Failing {
				t.Errorf("%s is blamed", w.Name)
			}
		}
	}
	if _, text := get(t, "http://"+d.Router.At.HTTP+"/metrics"); moved < 2 || !regexp.MustCompile(`(?m)^kvroute_extproc_unreached\S* [1-9]`).MatchString(text) {
		t.Errorf("%d of 6 were meant for the other one, want every second, and counted", moved)
	}
	idle(t, d)
}

// However many requests a worker refuses at the same time, each is served by its second
// choice: Envoy's default limit of retries at a time is 3.
func TestManyRequestsFailOverAtOnce(t *testing.T) {
	const requests = 32
	d := newStack(t, 0, nil)
	var served atomic.Int64
	release := make(chan struct{})
	sound := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), "at once") {
			served.Add(1)
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[]}`)
	})
	d.begin(t, append(staticFlags(t, d, "refuses", heldAddress(t), "sound", sound), "--router-mode", "round-robin", "--avoid-failing", "0")...)
	var failed atomic.Int64
	var all sync.WaitGroup
	for i := range requests {
		all.Go(func() {
			if got := d.send(t, fmt.Sprint("at once ", i), false); got.status != http.StatusOK {
				failed.Add(1)
			}
		})
	}
	// All requests are in progress before any is answered, so the retries overlap.
	eventually(t, "requests are missing", func() bool { return served.Load()+failed.Load() >= requests })
	close(release)
	all.Wait()
	if n := failed.Load(); n > 0 {
		t.Errorf("%d of %d requests failed, half of them were to go to their second choice", n, requests)
	}
}
