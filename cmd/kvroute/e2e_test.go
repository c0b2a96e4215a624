// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// The tests of this file start everything as processes, including a real Envoy, and check it from
// outside. `go test -short` skips them.

// startStack starts workers, kvroute and Envoy. flags are kvroute's.
func startStack(t *testing.T, workers int, engine []string, flags ...string) *demonstration {
	t.Helper()
	return startStackIn(t, envoy.Buffered, workers, engine, flags...)
}

// startStackIn is startStack with a mode in which Envoy sends bodies.
func startStackIn(t *testing.T, mode envoy.BodyMode, workers int, engine []string, flags ...string) *demonstration {
	t.Helper()
	d := newStack(t, workers, engine)
	d.EnvoyConfig.BodyMode = mode
	d.begin(t, flags...)
	return d
}

// demonstration is a stack with methods for tests.
type demonstration struct{ demo.Stack }

// newStack returns a stack that [demonstration.begin] starts.
func newStack(t *testing.T, workers int, engine []string) *demonstration {
	t.Helper()
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	path, err := envoytest.Find()
	if err != nil {
		t.Fatal(err)
	}
	return &demonstration{demo.Stack{Dir: t.TempDir(), EnvoyPath: path, Workers: workers, EngineFlags: engine, Model: "sim"}}
}

func (d *demonstration) begin(t *testing.T, flags ...string) {
	t.Helper()
	t.Cleanup(func() {
		d.Stop()
		if t.Failed() && d.Router != nil {
			t.Logf("kvroute's log:\n%s", d.Router.LastLines())
		}
		http.DefaultClient.CloseIdleConnections()
	})
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
}

// restartEnvoy starts Envoy again with the present configuration, and before it kvroute if there are flags for it.
func (d *demonstration) restartEnvoy(t *testing.T, flags ...string) {
	t.Helper()
	if err := d.Envoy.Stop(); err != nil {
		t.Fatal(err)
	}
	if flags != nil {
		if err := d.StartRouter(t.Context(), flags...); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// chatBody is a chat request; the engine needs long for long prompts.
func chatBody(content string, maxTokens int, stream bool) string {
	return fmt.Sprintf(`{"model":"sim","max_tokens":%d,"stream":%v,"messages":[{"role":"user","content":%q}]}`, maxTokens, stream, content)
}

func send(t *testing.T, ctx context.Context, method, url, body string, header http.Header) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	maps.Copy(req.Header, header)
	return http.DefaultClient.Do(req)
}

// reply sends a request through Envoy and reads the whole response.
func reply(t *testing.T, d *demonstration, method, path, body string, header http.Header) (*http.Response, string) {
	t.Helper()
	return whole(t, method, d.Envoy.URL()+path, body, header)
}

func get(t *testing.T, url string) (*http.Response, string) {
	t.Helper()
	return whole(t, http.MethodGet, url, "", nil)
}

func whole(t *testing.T, method, url, body string, header http.Header) (*http.Response, string) {
	t.Helper()
	resp, err := send(t, t.Context(), method, url, body, header)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(text)
}

const chatPath = "/v1/chat/completions"

// eventually waits until ok returns true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	if err := process.Until(t.Context(), process.Patience, what, func(context.Context) bool { return ok() }); err != nil {
		t.Fatal(err)
	}
}

func workers(t *testing.T, d *demonstration) []router.WorkerState {
	t.Helper()
	var response struct{ Workers []router.WorkerState }
	if err := process.GetJSON(t.Context(), "http://"+d.Router.At.HTTP+"/v1/workers", &response); err != nil {
		t.Fatal(err)
	}
	return response.Workers
}

// inFlight returns the sum of the load that the router has booked on all workers.
func inFlight(t *testing.T, d *demonstration) (requests, pend, blocks int) {
	for _, w := range workers(t, d) {
		requests, pend, blocks = requests+w.ActiveRequests, pend+w.PendTokens, blocks+w.ActiveBlocks
	}
	return requests, pend, blocks
}

func TestAPrefixGoesToTheWorkerThatHasIt(t *testing.T) {
	d := startStack(t, 4, []string{"--speed", "20"})
	system := strings.Repeat("You know all about caches. ", 40)
	for i := range 6 {
		content := fmt.Sprintf("%d %s", i, system)
		first, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
		if got := first.Header.Get("X-Dynamo-Overlap-Blocks"); first.StatusCode != 200 || got != "0" {
			t.Fatalf("first time: status %d, overlap %s", first.StatusCode, got)
		}
		settle(t, d)
		again, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
		if again.Header.Get("X-Dynamo-Overlap-Blocks") == "0" {
			t.Errorf("conversation %d: no overlap the second time", i)
		}
		if a, b := first.Header.Get("X-Sim-Worker"), again.Header.Get("X-Sim-Worker"); a != b || again.Header.Get("X-Dynamo-Reason") != "kv" {
			t.Errorf("conversation %d went to %s, then to %s for reason %s", i, a, b, again.Header.Get("X-Dynamo-Reason"))
		}
	}
}

// The router's prediction of cached tokens matches the engine's own count, except for the last
// token, which the engine always computes.
func TestPredictedOverlapIsTheEnginesOwn(t *testing.T) {
	d := startStack(t, 2, []string{"--speed", "50"})
	for i := range 20 {
		content := strings.Repeat(fmt.Sprintf("Topic %d. ", i%4), 10+i)
		resp, body := reply(t, d, "POST", chatPath, chatBody(content, 2, false), nil)
		var response struct {
			Usage struct {
				Prompt  int `json:"prompt_tokens"`
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(body), &response); err != nil {
			t.Fatal(err)
		}
		var overlap int
		if _, err := fmt.Sscan(resp.Header.Get("X-Dynamo-Overlap-Blocks"), &overlap); err != nil {
			t.Fatal(err)
		}
		want := min(overlap, (response.Usage.Prompt-1)/16) * 16
		if response.Usage.Details.Cached != want {
			t.Errorf("request %d of %d tokens: predicted %d blocks, the engine found %d tokens, want %d", i, response.Usage.Prompt, overlap, response.Usage.Details.Cached, want)
		}
		settle(t, d)
	}
}

// settle waits until the router has received the events of all blocks that the workers cache.
func settle(t *testing.T, d *demonstration) {
	t.Helper()
	eventually(t, "the router does not hear of all blocks", func() bool {
		indexed := map[string]int{}
		for _, w := range workers(t, d) {
			indexed[w.Name] = w.CachedBlocks
		}
		for _, e := range d.Engines {
			_, metrics := get(t, "http://"+e.At.HTTP+"/metrics")
			_, value, ok := strings.Cut(metrics, "\nsim:cached_blocks{")
			_, value, _ = strings.Cut(value, "} ")
			value, _, _ = strings.Cut(value, "\n")
			if !ok || value != fmt.Sprint(indexed[e.Name]) {
				return false
			}
		}
		return true
	})
}

func TestADecisionCanBeExplained(t *testing.T) {
	d := startStack(t, 2, []string{"--speed", "20"})
	resp, _ := reply(t, d, "POST", chatPath, chatBody(strings.Repeat("why? ", 50), 200, true), http.Header{"X-Request-Id": {"client-1"}})
	for _, id := range []string{resp.Header.Get("X-Dynamo-Request-Id"), "client-1"} {
		if status, out, stderr := runs(t, "explain", "--url", "http://"+d.Router.At.HTTP, id); status != 0 || !strings.Contains(out, "request      "+resp.Header.Get("X-Dynamo-Request-Id")) {
			t.Errorf("explain %q: status %d, %s%s", id, status, out, stderr)
		}
	}
	var list struct{ Decisions []router.Decision }
	eventually(t, "the newest decision has no end", func() bool {
		if err := process.GetJSON(t.Context(), "http://"+d.Router.At.HTTP+"/v1/decisions?limit=1", &list); err != nil {
			t.Fatal(err)
		}
		return len(list.Decisions) == 1 && !list.Decisions[0].Freed.IsZero()
	})
	var one router.Decision
	if err := process.GetJSON(t.Context(), "http://"+d.Router.At.HTTP+"/v1/decisions?id="+list.Decisions[0].ID, &one); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(one.Worker.ID) != resp.Header.Get("X-Dynamo-Worker-Instance-Id") || len(one.Candidates) != 2 || one.PromptTokens < 40 {
		t.Errorf("decision %+v for worker %s", one, resp.Header.Get("X-Dynamo-Worker-Instance-Id"))
	}
	if one.FirstToken.IsZero() || !one.Freed.After(one.FirstToken) {
		t.Errorf("the observer saw the first token at %v, the end was at %v", one.FirstToken, one.Freed)
	}
}

// The first token is noticed during the response, and not at its headers.
func TestTheFirstTokenEndsThePrefill(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 1, []string{"--num-gpu-blocks", "16384"})
	resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody(strings.Repeat("a long prompt ", 14_000), 200, true), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	// The headers have arrived, and the prompt of 42,000 tokens takes two seconds.
	if _, pend, _ := inFlight(t, d); pend < 40_000 {
		t.Errorf("after the headers %d prefill tokens are pending, want all", pend)
	}
	lines := bufio.NewReader(resp.Body)
	if _, err := lines.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first token is not noticed", func() bool {
		requests, pend, _ := inFlight(t, d)
		return requests == 1 && pend == 0
	})
	if _, err := io.Copy(io.Discard, lines); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the slot is not freed at the end", func() bool {
		requests, pend, blocks := inFlight(t, d)
		return requests+pend+blocks == 0
	})
}

func TestAClientThatLeavesFreesItsSlot(t *testing.T) {
	d := startStack(t, 2, []string{"--num-gpu-blocks", "16384"})
	for name, content := range map[string]string{"in prefill": strings.Repeat("long ", 12000), "in the response": "short"} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			resp, err := send(t, ctx, "POST", d.Envoy.URL()+chatPath, chatBody(content, 4000, true), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			eventually(t, "no slot is taken", func() bool { n, _, _ := inFlight(t, d); return n == 1 })
			cancel()
			eventually(t, "the slot is not freed", func() bool {
				requests, pend, blocks := inFlight(t, d)
				return requests+pend+blocks == 0
			})
		})
	}
}

// A client must not choose the worker, whether kvroute decides, does not see the request, or is
// dead.
func TestAClientCannotNameAWorker(t *testing.T) {
	d := startStack(t, 2, []string{"--speed", "20"})
	var mu sync.Mutex
	reached := 0
	victim := startHTTP(t, func(http.ResponseWriter, *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		reached++
	})
	header := http.Header{}
	for _, name := range []string{"X-Dynamo-Worker", "x-dynamo-worker", "X-Dynamo-Worker-Fallback"} {
		header[name] = []string{victim}
	}
	check := func(when string) {
		t.Helper()
		for _, c := range []struct{ method, path, body string }{
			{"POST", chatPath, chatBody("hello", 2, false)},
			{"HEAD", "/v1/models", ""},
		} {
			resp, body := reply(t, d, c.method, c.path, c.body, header)
			if resp.StatusCode != 200 || resp.Header.Get("X-Sim-Worker") == "" {
				t.Errorf("%s: %s: status %d from %q: %s", when, c.path, resp.StatusCode, resp.Header.Get("X-Sim-Worker"), body)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if reached > 0 {
			t.Errorf("%s: the client's choice was reached", when)
		}
	}
	check("kvroute decides")
	kill(t, d.Router)
	check("kvroute is dead")
}

// kill ends a child like a crash.
func kill(t *testing.T, c *demo.Child) {
	t.Helper()
	if err := c.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-c.Done
}

func startHTTP(t *testing.T, h http.HandlerFunc) (address string) {
	t.Helper()
	s := newLoopback(t, h)
	return strings.TrimPrefix(s, "http://")
}

func TestADeadRouterFailsOpen(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 3, []string{"--speed", "20"})
	// A response in progress continues to its end.
	resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("tell me a long story", 1500, true), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	if _, err := lines.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	kill(t, d.Router)
	rest, err := io.ReadAll(lines)
	outcomeOf(t, "kvroute dies after the decision").check(t, sight{resp.StatusCode, resp.Header, string(rest), err})
	if err != nil || !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) {
		t.Errorf("after the router's death the response ended with %q, %v", rest[max(0, len(rest)-80):], err)
	}
	if n := bytes.Count(rest, []byte("data: ")); n < 1500 {
		t.Errorf("%d events, want all 1,500 tokens", n)
	}
	// New requests are served by the pool.
	served := map[string]bool{}
	for range 30 {
		got := d.send(t, "hello", false)
		if outcomeOf(t, "kvroute is not there").check(t, got); got.header.Get("X-Dynamo-Reason") != "" {
			t.Errorf("a dead router decided")
		}
		served[got.header.Get("X-Sim-Worker")] = true
	}
	if len(served) < 2 {
		t.Errorf("the pool served from %v, want several workers", served)
	}
	// The pool also serves when one of its workers is dead.
	kill(t, d.Engines[0])
	for range 12 {
		if resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil); resp.StatusCode != 200 {
			t.Fatalf("with a dead worker: status %d: %s", resp.StatusCode, body)
		}
	}
	// A router that was restarted decides again.
	d.Engines[0] = restart(t, d.Engines[0], d.Dir)
	if err := d.StartRouter(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// During a shutdown responses continue and no request gets a wrong answer, in each mode in which
// Envoy sends bodies.
func TestADrainHarmsNoResponse(t *testing.T) {
	t.Parallel() // mostly waits
	for _, mode := range []envoy.BodyMode{envoy.Buffered, envoy.StreamedAhead, envoy.FullDuplex} {
		t.Run(mode, func(t *testing.T) {
			d := startStackIn(t, mode, 2, []string{"--speed", "20"}, "--drain-timeout", "1m")
			resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("tell me a long story", 1500, true), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			lines := bufio.NewReader(resp.Body)
			if _, err := lines.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if err := d.Router.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if mode != envoy.FullDuplex { // this mode does not wait for the response
				<-d.Router.Done
			}
			rest, err := io.ReadAll(lines)
			<-d.Router.Done
			if n := bytes.Count(rest, []byte("data: ")); err != nil || n < 1500 || !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) {
				t.Errorf("the response ended after %d events with %q, %v", n, rest[max(0, len(rest)-80):], err)
			}
			if mode == envoy.FullDuplex { // see docs/envoy.md
				eventually(t, "Envoy does not notice that kvroute is not there", func() bool {
					n, err := d.Envoy.Stat(t.Context(), "cluster.kvroute.membership_healthy")
					return err == nil && n == 0
				})
			}
			outcomeOf(t, "kvroute drains").check(t, d.send(t, "hello", false))
		})
	}
}

func TestManyStreamsAtOnce(t *testing.T) {
	d := newStack(t, 4, []string{"--speed", "5"})
	// On a busy machine some of these requests would fail open, which is not the subject of this
	// test.
	d.EnvoyConfig.MessageTimeout, d.EnvoyConfig.MaxMessageTimeout = 30*time.Second, 40*time.Second
	d.begin(t, "--decision-timeout", "25s")
	var wg sync.WaitGroup
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2000}}
	defer client.CloseIdleConnections()
	const streams = 2000
	errs := make(chan error, streams)
	var undecided, refused atomic.Int64
	for i := range streams {
		wg.Go(func() {
			req, err := http.NewRequestWithContext(t.Context(), "POST", d.Envoy.URL()+chatPath, strings.NewReader(chatBody(fmt.Sprint("stream ", i), 30, true)))
			if err != nil {
				errs <- err
				return
			}
			resp, err := client.Do(req)
			if err != nil {
				errs <- err
				return
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			switch {
			case err != nil:
				errs <- err
			case resp.StatusCode == http.StatusServiceUnavailable:
				refused.Add(1)
			case resp.StatusCode != 200 || !bytes.HasSuffix(body, []byte("data: [DONE]\n\n")):
				errs <- fmt.Errorf("stream %d: status %d, end %q", i, resp.StatusCode, body[max(0, len(body)-40):])
			case resp.Header.Get("X-Dynamo-Reason") == "":
				undecided.Add(1)
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	eventually(t, "slots are left", func() bool {
		requests, pend, blocks := inFlight(t, d)
		return requests+pend+blocks == 0
	})
	for _, w := range workers(t, d) {
		if w.Routed < streams/10 || w.Routed > streams*4/10 {
			t.Errorf("worker %s got %d of %d equal streams", w.Name, w.Routed, streams)
		}
	}
	stat := func(name string) int64 {
		n, err := d.Envoy.Stat(t.Context(), name)
		if err != nil {
			t.Error(err)
		}
		return n
	}
	if n := stat("cluster.kvroute.upstream_cx_protocol_error"); n > 0 {
		t.Errorf("Envoy closed %d connections to kvroute for what it took for an attack", n)
	}
	// Where the machine is too busy to accept a connection, or to answer a health check, within
	// Envoy's time for that, the streams fail open.
	unconnected := stat("cluster.kvroute.upstream_cx_none_healthy")
	if stat("cluster.kvroute.upstream_cx_connect_timeout") > 0 {
		unconnected += stat("cluster.kvroute.upstream_rq_pending_failure_eject")
	}
	// A stream gets a 503 only if neither of its two choices accepts a connection in time.
	if most := stat("cluster.worker-second.upstream_rq_pending_failure_eject"); refused.Load() > most {
		t.Errorf("%d streams got a 503, %d found no connection to their second choice", refused.Load(), most)
	}
	if failed := stat("http.llm.ext_proc.kvroute.streams_failed"); failed > unconnected || undecided.Load() > failed {
		t.Errorf("%d streams are not decided, Envoy counts %d failed ones, and %d without a connection", undecided.Load(), failed, unconnected)
	}
}

func TestBadInputThroughEnvoy(t *testing.T) {
	d := startStack(t, 1, []string{"--speed", "50"}, "--max-body-bytes", "1000000")
	large := chatBody(strings.Repeat("x", 1_000_001), 2, false)
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		want                     string
	}{
		{"malformed JSON", "POST", chatPath, `{"model":"sim","messages":[`, 400, `"type":"invalid_request_error"`},
		{"no model, and there is one", "POST", chatPath, `{"messages":[{"role":"user","content":"a"}],"stream":"False","n":"1","max_tokens":"2"}`, 200, `"choices"`},
		{"no messages", "POST", chatPath, `{"model":"sim"}`, 400, `"param":"messages"`},
		{"empty body", "POST", chatPath, ``, 400, `no body`},
		{"wrong method", "GET", chatPath, ``, 405, `use POST`},
		{"too large", "POST", chatPath, large, 413, `"code":"`},
		{"unknown model", "POST", chatPath, `{"model":"x","messages":[{"role":"user","content":"a"}]}`, 404, `"code":"model_not_found"`},
		{"not ours: models", "GET", "/v1/models", ``, 200, `"id":"sim"`},
		{"not ours: nothing", "POST", "/v1/models/nothing", `{}`, 405, `use GET`},
		{"completions", "POST", "/v1/completions", `{"model":"sim","prompt":"hello","max_tokens":2}`, 200, `text_completion`},
		{"an odd prompt is the engine's to refuse", "POST", chatPath, `{"model":"sim","messages":[{"role":"user","content":5}]}`, 400, `messages[0].content`},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, body := reply(t, d, c.method, c.path, c.body, nil)
			if resp.StatusCode != c.status || !strings.Contains(body, c.want) {
				t.Errorf("status %d, want %d; body %s, want %s", resp.StatusCode, c.status, body[:min(len(body), 300)], c.want)
			}
			if c.status >= 400 {
				var e struct {
					Error struct{ Message, Type string }
				}
				if err := json.Unmarshal([]byte(body), &e); err != nil || e.Error.Message == "" || e.Error.Type == "" {
					t.Errorf("%s is no error of OpenAI's form: %v", body, err)
				}
			}
			if allow := resp.Header.Get("Allow"); c.status == 405 && (allow == "" || !strings.Contains(body, "use "+allow)) {
				t.Errorf("allow is %q: %s", allow, body)
			}
		})
	}
	// A body of unknown length is limited by Envoy itself.
	req, err := http.NewRequestWithContext(t.Context(), "POST", d.Envoy.URL()+chatPath, io.MultiReader(strings.NewReader(`{"model":"sim","x":"`), strings.NewReader(strings.Repeat("x", 17<<20))))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(string(body), `"code":"body_too_large"`) {
		t.Errorf("17 MiB in chunks: status %d, %s, %v", resp.StatusCode, body, err)
	}
	eventually(t, "slots are left", func() bool { requests, _, _ := inFlight(t, d); return requests == 0 })
}

func TestWithoutWorkersClientsAreToldToComeBack(t *testing.T) {
	d := startStack(t, 1, []string{"--speed", "50"})
	if err := d.Engines[0].Cmd.Process.Signal(syscall.SIGTERM); err != nil { // the engine deregisters
		t.Fatal(err)
	}
	eventually(t, "the worker does not leave", func() bool { return len(workers(t, d)) == 0 })
	resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil)
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, `"code":"no_worker"`) {
		t.Errorf("status %d, retry-after %q, body %s", resp.StatusCode, resp.Header.Get("Retry-After"), body)
	}
	if status, _, stderr := runs(t, "healthcheck", "--url", "http://"+d.Router.At.HTTP+"/readyz"); status != 1 || !strings.Contains(stderr, `"workers":false`) {
		t.Errorf("healthcheck: status %d, %s", status, stderr)
	}
}

// Without the options responses contain nothing about workers.
func TestHeadersTellNothingUnlessAsked(t *testing.T) {
	d := startStack(t, 1, []string{"--speed", "50"}, "--decision-headers=false")
	resp, _ := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil)
	for name := range resp.Header {
		if strings.HasPrefix(strings.ToLower(name), "x-dynamo") {
			t.Errorf("the response tells %s: %s", name, resp.Header.Get(name))
		}
	}
}

func TestMetricsAreThere(t *testing.T) {
	d := startStack(t, 1, []string{"--speed", "50"})
	reply(t, d, "POST", chatPath, chatBody("hello, is there anybody in there?", 100, true), nil)
	eventually(t, "no events arrive", func() bool { return workers(t, d)[0].CachedBlocks > 0 })
	eventually(t, "no first token is seen", func() bool {
		resp, body := get(t, "http://"+d.Router.At.HTTP+"/metrics")
		return resp.StatusCode == http.StatusOK && strings.Contains(body, `kvroute_router_first_tokens_total{model="sim",source="observer"}`)
	})
	_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
	for _, want := range []string{
		`kvroute_router_decisions_total{model="sim",reason="load"}`, "kvroute_router_decision_duration_seconds_bucket",
		"kvroute_router_overlap_ratio_bucket", `kvroute_router_index_blocks{model="sim",source="events"}`, `kvroute_router_index_size_bytes{model="sim",source="events"}`, `kvroute_router_index_evicted_total{model="sim",source="history"} 0`, `kvroute_router_slots{model="sim"}`,
		`kvroute_extproc_streams{kind="main"}`, `kvroute_router_first_tokens_total{model="sim",source="observer"}`,
		`kvroute_events_received_total{feed="stream",outcome="accepted"}`, `kvroute_fleet_news_total{kind="record"}`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
}

// Neither Ctrl-C at any moment nor a crash leaves a process behind.
func TestTheDemoLeavesNothingBehind(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	if _, err := envoytest.Find(); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name      string
		processes int // number to wait for; together they are the demo, kvroute serve, four engines and Envoy
		after     time.Duration
		sig       syscall.Signal
	}{
		{"at once", 0, 20 * time.Millisecond, syscall.SIGINT},
		{"while it starts", 2, 100 * time.Millisecond, syscall.SIGINT},
		{"in the load", 7, 3 * time.Second, syscall.SIGINT},
		{"by a crash in the load", 7, 3 * time.Second, syscall.SIGKILL},
	} {
		t.Run(c.name, func(t *testing.T) {
			mark := fmt.Sprint("leak-", time.Now().UnixNano())
			cmd := exec.Command(self, "demo", "--model", mark)
			cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir(), "KVROUTE_TEST_MARK="+mark)
			cmd.SysProcAttr = process.OwnGroup()
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the demo's processes are not found by their mark", func() bool { return len(marked(t, mark)) >= c.processes })
			select {
			case <-time.After(c.after):
			case <-t.Context().Done():
			}
			if err := cmd.Process.Signal(c.sig); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			_ = cmd.Wait() // its status is checked below
			if c.sig == syscall.SIGINT && cmd.ProcessState.ExitCode() != 130 && c.processes > 0 {
				t.Errorf("status %d, want 130", cmd.ProcessState.ExitCode())
			}
			if took := time.Since(start); took > process.Patience {
				t.Errorf("it took %v to end", took)
			}
			eventually(t, "processes are left", func() bool { return len(marked(t, mark)) == 0 })
		})
	}
}

// marked lists the processes that carry a mark in their environment: all processes started below the
// marked one, whoever their parent is now.
func marked(t *testing.T, mark string) (found []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil || len(all) == 0 {
		t.Fatalf("no processes: %v", err)
	}
	for _, name := range all {
		// Processes may end during the loop, and processes of other users are not readable.
		if env, err := os.ReadFile(name); err == nil && bytes.Contains(env, []byte(mark)) {
			found = append(found, name)
		}
	}
	return found
}

// Each example is a script that succeeds, also while another one runs: its ports are free ones.
func TestExamples(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	if _, err := envoytest.Find(); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	scripts, err := filepath.Glob("../../examples/*/run.sh")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	// A simulated engine that accepts vLLM's arguments.
	vllm := filepath.Join(t.TempDir(), "vllm")
	if err := os.WriteFile(vllm, []byte(`#!/bin/sh
exec "$KVROUTE" engine --nats-url "" --kv-events zmq --engine vllm --block-hash vllm --block-size 32 --model tiny --tokenizer "$2" --listen "127.0.0.1:$6"
`), 0o700); err != nil {
		t.Fatal(err)
	}
	// A script that accepts the arguments of Dynamo's mock workers and frontend. The frontend is a
	// simulated engine; the workers are two records, which the script touches every second.
	dynamo := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(dynamo, []byte(`#!/bin/bash
if [ "$2" = dynamo.frontend ]; then
	until [ -e "$DYN_FILE_KV/v1/mdc" ]; do read -rt 0.1 <> <(:); done
	exec "$KVROUTE" engine --nats-url "" --kv-events none --model tiny --tokenizer "$(dirname "$DYN_FILE_KV")/model" --listen "127.0.0.1:$8"
fi
for id in 1 2; do
	mkdir -p "$DYN_FILE_KV/v1/mdc"
	echo '{"namespace":"dynamo","component":"backend","endpoint":"generate","instance_id":'$id',"card_json":{"display_name":"tiny","kv_cache_block_size":16,"worker_type":"aggregated","runtime_config":{"kv_event_publishing_enabled":false}}}' >"$DYN_FILE_KV/v1/mdc/dynamo%2Fbackend%2Fgenerate%2F$id"
done
while touch "$DYN_FILE_KV/v1/mdc/"*; do read -rt 1 <> <(:); done
`), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, script := range scripts {
		t.Run(filepath.Base(filepath.Dir(script)), func(t *testing.T) {
			text, err := os.ReadFile(script)
			if err != nil {
				t.Fatal(err)
			}
			if port := regexp.MustCompile(`(127\.0\.0\.1:|--port )[0-9]+`).Find(text); port != nil {
				t.Errorf("%s has the port %s, so two runs at the same time fail: use free_ports of lib.sh", script, port)
			}
			cmd := exec.CommandContext(t.Context(), script)
			cmd.Env = append(os.Environ(), "KVROUTE="+self, "VLLM="+vllm, "DYNAMO="+dynamo)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
