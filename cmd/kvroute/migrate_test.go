// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/kubetest"
	"github.com/kvroute/kvroute/router"
)

// The tests of this file serve requests with each configuration of examples/migrate, through a real Envoy. Simulated
// engines stand for the workers, and a small proxy for Dynamo's frontend.

// migrated is a configuration of examples/migrate that serves.
type migrated struct {
	*demonstration
	folder  string                      // with the model's tokenizer
	api     *kubetest.Server            // nil without Kubernetes
	config  map[string]any              // settings of kvroute's configuration file
	engines map[string]*demo.Child      // of Dynamo's workers, by id
	last    atomic.Pointer[http.Header] // of the request that Dynamo's frontend got last
}

// readMigration reads a file of examples/migrate: kvroute's configuration, or values of its chart. Before that it
// replaces texts that belong to a real machine: old and new ones in turn.
func readMigration(t *testing.T, file, model string, replace ...string) *migrated {
	t.Helper()
	m := &migrated{demonstration: newStack(t, 0, nil), folder: modelFolder(t), engines: map[string]*demo.Child{}}
	m.Model = model
	data, err := os.ReadFile("../../examples/migrate/" + file)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for i := 0; i < len(replace); i += 2 {
		if !strings.Contains(text, replace[i]) {
			t.Fatalf("%s has no %s", file, replace[i])
		}
		text = strings.ReplaceAll(text, replace[i], replace[i+1])
	}
	var values struct {
		Config     map[string]any
		Kubernetes map[string]any
		Tokenizers struct{ Models []map[string]any }
	}
	if err := yaml.Unmarshal([]byte(text), &values); err != nil {
		t.Fatal(err)
	}
	if m.config = values.Config; m.config == nil { // no values of the chart
		if err := yaml.Unmarshal([]byte(text), &m.config); err != nil {
			t.Fatal(err)
		}
		return m
	}
	// The rest is what the chart makes of its values; tools/helm renders the same files.
	m.config["version"] = 1
	m.api = kubetest.New(t)
	access := map[string]any{
		"server": m.api.URL, "ca-file": m.api.CAFile, "token-file": m.api.TokenFile, "namespace": "llm",
	}
	if values.Kubernetes != nil {
		access["sources"] = values.Kubernetes["sources"]
		m.config["kubernetes"] = access
	} else {
		dynamo, _ := m.config["dynamo"].(map[string]any)
		dynamo["kubernetes"] = access
	}
	for _, one := range values.Tokenizers.Models {
		one["tokenizer"] = m.folder
	}
	m.config["models"] = values.Tokenizers.Models
	return m
}

// engine starts a simulated vLLM with the model.
func (m *migrated) engine(t *testing.T, name, listen string, flags ...string) *demo.Child {
	t.Helper()
	return spawn(t, name, append([]string{
		"engine", "--name", name, "--engine", "vllm", "--model", m.Model, "--tokenizer", m.folder,
		"--listen", listen, "--nats-url", "", "--speed", "50",
	}, flags...)...)
}

// pod starts an engine at an address, as the process of a pod with these labels.
func (m *migrated) pod(t *testing.T, name, address, labels string, flags ...string) *demo.Child {
	t.Helper()
	e := m.engine(t, name, address, flags...)
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	const ready = `"status":{"phase":"Running","podIP":%q,"conditions":[{"type":"Ready","status":"True"}]}`
	m.api.Put("/api/v1/namespaces/llm/pods",
		fmt.Sprintf(`{"metadata":{"name":%q,"uid":%q,"labels":{%s}},`+ready+`}`, name, name, labels, host))
	return e
}

// serve checks the configuration, and starts kvroute with it, and Envoy with a pool. It returns when kvroute knows the
// workers.
func (m *migrated) serve(t *testing.T, workersWanted int, pool ...string) {
	t.Helper()
	text, err := yaml.Marshal(m.config)
	if err != nil {
		t.Fatal(err)
	}
	file := writeFile(t, string(text))
	if status, _, stderr := runs(t, "config", "check", "--config", file); status != 0 {
		t.Fatalf("config check ends with %d: %s\n%s", status, stderr, text)
	}
	m.EnvoyConfig.Pool = pool
	m.begin(t, "--config", file)
	eventually(t, "kvroute does not know all workers", func() bool {
		healthy := map[uint64]bool{}
		for _, w := range workers(t, m.demonstration) { // one for each rank
			if w.Health == "healthy" {
				healthy[w.ID] = true
			}
		}
		return len(healthy) == workersWanted
	})
}

// ask sends a chat, and returns the name of the engine that answered, and kvroute's decision.
func (m *migrated) ask(t *testing.T, question string) (engine string, d router.Decision) {
	t.Helper()
	prompt := strings.Repeat("Each block of a cache is named by all that stands before it. ", 20) + question
	resp, body := reply(t, m.demonstration, "POST", chatPath,
		fmt.Sprintf(`{"model":%q,"max_tokens":4,"messages":[{"role":"user","content":%q}]}`, m.Model, prompt), nil)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d: %s", resp.StatusCode, body)
	}
	d = newest(t, m.demonstration)
	if id := resp.Header.Get("x-dynamo-worker-instance-id"); id != fmt.Sprint(d.Worker.ID) {
		t.Fatalf("the response is of the worker %s, the newest decision of %d", id, d.Worker.ID)
	}
	if d.TokenMode != "exact" {
		t.Errorf("the prompt's ids are %s: %s", d.TokenMode, d.TokenReason)
	}
	return resp.Header.Get("x-sim-worker"), d
}

// sticks checks that the workers take whole requests, that a prompt goes to the worker that has it cached, and that
// this engine is the decision's worker.
func (m *migrated) sticks(t *testing.T) {
	t.Helper()
	for _, w := range workers(t, m.demonstration) {
		if w.Role != router.Aggregated {
			t.Errorf("%s has the role %s", w.Name, w.Role)
		}
	}
	for _, question := range []string{"One?", "Two?"} {
		first, d := m.ask(t, question)
		if !strings.HasSuffix(d.WorkerName, first) || first == "" {
			t.Errorf("%s answers, and kvroute chose %s", first, d.WorkerName)
		}
		idle(t, m.demonstration)
		again, d := m.ask(t, question)
		if again != first || d.OverlapBlocks == 0 || d.Reason != router.ReasonKV {
			t.Errorf("a prompt that %s has went to %s, with %d cached blocks: %s", first, again, d.OverlapBlocks, d.Reason)
		}
	}
}

// learns checks that kvroute has the blocks of an engine from its events.
func (m *migrated) learns(t *testing.T) {
	t.Helper()
	eventually(t, "no events arrive", func() bool {
		for _, w := range workers(t, m.demonstration) {
			if w.CachedBlocks > 0 && w.KVEvents == "ok" {
				return true
			}
		}
		return false
	})
}

func TestMigrateDynamosLaunchScript(t *testing.T) {
	t.Parallel() // mostly waits
	ports := make([]string, 4)
	for i := range ports {
		ports[i] = fmt.Sprint("127.0.0.1:", fixtures.HoldPort(t))
	}
	m := readMigration(t, "dynamo-agg-router.yaml", "Qwen/Qwen3-0.6B", "/models/Qwen3-0.6B", "MODEL",
		"127.0.0.1:8001", ports[0], "127.0.0.1:8002", ports[1], "127.0.0.1:20080", ports[2], "127.0.0.1:20081", ports[3])
	m.config["models"] = []map[string]any{{"name": m.Model, "tokenizer": m.folder}}
	for i := range 2 {
		m.engine(t, fmt.Sprint("gpu-", i), ports[i], "--block-size", "64",
			"--kv-events", "zmq", "--kv-events-endpoint", "tcp://"+ports[2+i])
	}
	m.serve(t, 2, ports[0], ports[1])
	m.sticks(t)
	m.learns(t)
}

// dynamoPods stands for a DynamoGraphDeployment. It puts the objects of workers with these roles into Kubernetes' API,
// and starts an engine for each of them, and a frontend.
func (m *migrated) dynamoPods(t *testing.T, blockSize, ranks int, roles ...string) (frontend string) {
	t.Helper()
	var endpoints []string
	for i, role := range roles {
		id, name := 1943803597606491+i, fmt.Sprint(role, "-", i)
		m.engines[fmt.Sprint(id)] = m.engine(t, name, "127.0.0.1:0", "--block-size", fmt.Sprint(blockSize), "--kv-events", "none")
		card := fmt.Sprintf(`"display_name":%q,"kv_cache_block_size":%d,"worker_type":%q,`+
			`"runtime_config":{"data_parallel_size":%d,"kv_event_publishing_enabled":false}`, m.Model, blockSize, role, ranks)
		record := fmt.Sprintf(`"llm-graph/%s/generate/%x":{"type":"Model","namespace":"llm-graph","component":%q,`+
			`"endpoint":"generate","instance_id":%d,"card_json":{%s}}`, role, id, role, id, card)
		m.api.Put("/apis/nvidia.com/v1alpha1/namespaces/llm/dynamoworkermetadatas", fmt.Sprintf(
			`{"metadata":{"name":%q},"spec":{"data":{"endpoints":{},"event_channels":{},"event_sources":{},"model_cards":{%s}}}}`,
			name, record))
		endpoints = append(endpoints, fmt.Sprintf(
			`{"addresses":["10.0.0.%d"],"conditions":{"ready":true},"targetRef":{"kind":"Pod","name":%q}}`, i+1, name))
	}
	const meta = `"metadata":{"name":"graph","labels":{"nvidia.com/dynamo-discovery-enabled":"true"}}`
	m.api.Put("/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices", `{`+meta+`,"endpoints":[`+strings.Join(endpoints, ",")+`]}`)
	frontend = startHTTP(t, m.frontend)
	dynamo, _ := m.config["dynamo"].(map[string]any)
	dynamo["frontend"] = frontend
	return frontend
}

// frontend stands for a Dynamo frontend in direct mode: it sends a request to the prefill worker, if one is named, and
// then to the worker that is named.
func (m *migrated) frontend(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != chatPath {
		http.NotFound(w, r) // it has no path that makes token ids
		return
	}
	m.last.Store(&r.Header)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client left
	}
	for _, header := range []string{"x-dynamo-prefill-instance-id", "x-dynamo-worker-instance-id"} {
		e := m.engines[r.Header.Get(header)]
		if e == nil {
			continue
		}
		req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, "http://"+e.At.HTTP+chatPath, bytes.NewReader(body))
		if err != nil {
			break
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			break
		}
		answer, _ := io.ReadAll(resp.Body) // a part of it is no answer
		_ = resp.Body.Close()              // it is read
		if header == "x-dynamo-worker-instance-id" {
			w.Header().Set("x-sim-worker", resp.Header.Get("x-sim-worker"))
			_, _ = w.Write(answer) // the client left
			return
		}
	}
	http.Error(w, "the worker is not named, or does not answer", http.StatusBadRequest)
}

// named returns the name of the worker that a header named to Dynamo's frontend; empty if none.
func (m *migrated) named(header string) string {
	if e := m.engines[m.last.Load().Get(header)]; e != nil {
		return e.Name
	}
	return ""
}

func TestMigrateDynamosDeployment(t *testing.T) {
	t.Parallel() // mostly waits
	m := readMigration(t, "dynamo-agg-router-kubernetes.yaml", "Qwen/Qwen3-0.6B")
	m.serve(t, 2, m.dynamoPods(t, 16, 1, "aggregated", "aggregated"))
	for _, question := range []string{"One?", "Two?"} {
		first, _ := m.ask(t, question)
		idle(t, m.demonstration)
		again, d := m.ask(t, question)
		named, id := m.named("x-dynamo-worker-instance-id"), m.last.Load().Get("x-dynamo-worker-instance-id")
		if id != fmt.Sprint(d.Worker.ID) || named != again || again != first || d.OverlapBlocks == 0 {
			t.Errorf("kvroute chose %d with %d cached blocks, and named %s", d.Worker.ID, d.OverlapBlocks, id)
			t.Errorf("that is %q; %s and then %s answered", named, first, again)
		}
	}
}

func TestMigrateDynamosDeepSeekRecipe(t *testing.T) {
	t.Parallel() // mostly waits
	m := readMigration(t, "dynamo-deepseek-v32.yaml", "nvidia/DeepSeek-V3.2-NVFP4")
	m.serve(t, 4, m.dynamoPods(t, 64, 8, "prefill", "prefill", "decode", "decode"))
	m.splits(t, func(*router.Decision) string {
		if h := m.last.Load(); h.Get("x-dynamo-dp-rank") == "" || h.Get("x-dynamo-prefill-dp-rank") == "" {
			t.Errorf("the frontend got no ranks: %v", h)
		}
		return m.named("x-dynamo-prefill-instance-id")
	})
}

// splits checks that a decode worker answers, after a prefill worker that the second request finds again: it has the
// prompt cached. prefillOf returns the name of the prefill worker of the newest request.
func (m *migrated) splits(t *testing.T, prefillOf func(*router.Decision) string) {
	t.Helper()
	before := ""
	for range 2 {
		idle(t, m.demonstration)
		engine, d := m.ask(t, "")
		if d.Prefill == nil {
			t.Fatalf("the request is not split: %s", d.NoLeg)
		}
		prefill := prefillOf(&d)
		if !strings.HasPrefix(engine, "decode-") || !strings.HasPrefix(prefill, "prefill-") {
			t.Errorf("%q computed the prompt, and %q answered; kvroute chose %s and %s", prefill, engine, d.Prefill.WorkerName, d.WorkerName)
		}
		if before != "" && (prefill != before || d.Prefill.OverlapBlocks == 0) {
			t.Errorf("the prompt that %s has went to %s, with %d cached blocks", before, prefill, d.Prefill.OverlapBlocks)
		}
		before = prefill
	}
}

func TestMigrateLLMDsOptimizedBaseline(t *testing.T) {
	t.Parallel() // mostly waits
	port := fmt.Sprint(fixtures.HoldPort(t))
	m := readMigration(t, "llm-d-optimized-baseline.yaml", "Qwen/Qwen3-32B", "8000", port)
	var pool []string
	for i := range 2 {
		at := fmt.Sprintf("127.0.0.%d:%s", 2+i, port)
		pool = append(pool, at)
		const labels = `"llm-d.ai/guide":"optimized-baseline","llm-d.ai/role":"decode"`
		m.pod(t, fmt.Sprint("decode-", i), at, labels, "--kv-events", "none")
	}
	m.serve(t, 2, pool...)
	m.sticks(t)
}

func TestMigrateLLMDsPrecisePrefixCacheRouting(t *testing.T) {
	t.Parallel() // mostly waits
	port, events := fmt.Sprint(fixtures.HoldPort(t)), fmt.Sprint(fixtures.HoldPort(t))
	m := readMigration(t, "llm-d-precise-prefix-cache-routing.yaml", "Qwen/Qwen3-32B", "8000", port, "5556", events)
	const labels = `"llm-d.ai/guide":"precise-prefix-cache-routing","llm-d.ai/role":"decode"`
	var pool []string
	for i := range 2 {
		host := fmt.Sprint("127.0.0.", 2+i)
		at := host + ":" + port
		pool = append(pool, at)
		m.pod(t, fmt.Sprint("decode-", i), at, labels, "--block-size", "64", "--kv-events", "zmq",
			"--kv-events-endpoint", "tcp://"+host+":"+events, "--kv-events-replay-endpoint", "",
			"--kv-events-topic", "kv@"+at+"@Qwen/Qwen3-32B")
	}
	m.serve(t, 2, pool...)
	m.sticks(t)
	m.learns(t)
}

func TestMigrateLLMDsPDDisaggregation(t *testing.T) {
	t.Parallel() // mostly waits
	ports := map[string]string{"prefill": fmt.Sprint(fixtures.HoldPort(t)), "decode": fmt.Sprint(fixtures.HoldPort(t))}
	m := readMigration(t, "llm-d-pd-disaggregation.yaml", "openai/gpt-oss-120b",
		"[8000]", "["+ports["prefill"]+"]", "[8200]", "["+ports["decode"]+"]")
	engines, pool := map[string]*demo.Child{}, []string{}
	for i, role := range []string{"prefill", "prefill", "decode", "decode"} {
		name, at := fmt.Sprint(role, "-", i), fmt.Sprintf("127.0.0.%d:%s", 2+i, ports[role])
		labels := fmt.Sprintf(`"llm-d.ai/guide":"pd-disaggregation","llm-d.ai/role":%q`, role)
		engines[name] = m.pod(t, name, at, labels, "--role", role, "--block-size", "128", "--kv-events", "none")
		if role == "decode" {
			pool = append(pool, at)
		}
	}
	m.serve(t, 4, pool...)
	m.splits(t, func(d *router.Decision) string {
		prefill := strings.TrimPrefix(d.Prefill.WorkerName, "llm/")
		if e := engines[prefill]; e == nil || cachedBlocks(t, e) == 0 {
			t.Errorf("%s did not compute the prompt", prefill)
		}
		return prefill
	})
}
