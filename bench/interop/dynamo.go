// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/process"
)

//go:embed dynamo_tree.py
var dynamoTree string

const (
	// dynamoBlock and dynamoBlocks are the mock engines': a cache of 1,280 tokens a rank,
	// so that it evicts soon.
	dynamoBlock  = 16
	dynamoBlocks = 80
	dynamoStart  = 3 * time.Minute
)

// dynamoChecks hold kvroute against Dynamo's mock workers: what it makes of their
// discovery, their events and their local indexers, and where it sends requests behind
// their frontend.
func dynamoChecks() []check {
	return []check{
		{"where the indexes differ", 2 * time.Minute, dynamoDiffers},
		{"the stand-alone indexer", 5 * time.Minute, dynamoIndexer},
		{"events over ZMQ", 8 * time.Minute, func(ctx context.Context, e *env) (result, error) { return dynamoEvents(ctx, e, "zmq") }},
		{"events over NATS", 8 * time.Minute, func(ctx context.Context, e *env) (result, error) { return dynamoEvents(ctx, e, "nats") }},
		{"events lost, asked for", 6 * time.Minute, dynamoLoss},
		{"workers that stop, die and come", 8 * time.Minute, dynamoWorkers},
		{"the example", 5 * time.Minute, func(ctx context.Context, e *env) (result, error) {
			return runExample(ctx, e, "dynamo", "DYNAMO", filepath.Join(e.dynamo, "bin/python"), dynamoBlock)
		}},
	}
}

// dynamoFleet is Dynamo's processes: two mock workers of two ranks each, and a frontend
// in direct mode, all on the loopback.
type dynamoFleet struct {
	e           *env
	name        string
	store       string // of discovery
	environment []string
	flags       []string // of the mock workers, besides
	nats        string   // URL of the server for events, if they go by one
	mocker      *process.Process
	frontend    *process.Process
	address     string // of the frontend
	plane       *listenedPlane
	index       dynamoIndex
}

func (f *dynamoFleet) python() string { return filepath.Join(f.e.dynamo, "bin", "python") }

// model writes the files that Dynamo wants of a model, whose tokenizer is the simulated
// engine's.
func (e *env) dynamoModel() (string, error) {
	dir := filepath.Join(e.dir, "dynamo-model")
	if _, err := os.Stat(filepath.Join(dir, "config.json")); err == nil {
		return dir, nil
	}
	if err := os.CopyFS(dir, enginesim.ModelFiles()); err != nil {
		return "", err
	}
	template, err := os.ReadFile(filepath.Join(dir, "chat_template.jinja"))
	if err != nil {
		return "", err
	}
	const begin, end = 1500, 1501
	return dir, errors.Join(
		writeJSON(filepath.Join(dir, "tokenizer_config.json"), map[string]any{
			"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": string(template), "eos_token": "<|im_end|>", "model_max_length": 131072,
		}),
		writeJSON(filepath.Join(dir, "generation_config.json"), map[string]any{"eos_token_id": end, "bos_token_id": begin}),
		writeJSON(filepath.Join(dir, "config.json"), map[string]any{
			"architectures": []string{"Qwen3ForCausalLM"}, "model_type": "qwen3", "vocab_size": end + 1, "hidden_size": hidden, "num_hidden_layers": layers,
			"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": headSize, "intermediate_size": 2 * hidden, "max_position_embeddings": 131072,
			"eos_token_id": end, "bos_token_id": begin, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
		}),
	)
}

// newDynamo returns one that is not started.
func (e *env) newDynamo(name string) (*dynamoFleet, error) {
	port, err := process.FreePorts(1)
	return &dynamoFleet{e: e, name: name, store: filepath.Join(e.dir, name+"-store"), address: fmt.Sprintf("127.0.0.1:%d", port)}, err
}

// start starts the processes without waiting for them. Their event plane is zmq, or nats
// at a server.
func (f *dynamoFleet) start(plane, server string) (err error) {
	f.environment = []string{
		"DYN_FILE_KV=" + f.store, "DYN_DISCOVERY_BACKEND=file", "DYN_TCP_RPC_HOST=127.0.0.1", "DYN_EVENT_PLANE_HOST=127.0.0.1",
		"DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1", "HF_HUB_OFFLINE=1", "DYN_EVENT_PLANE=" + plane, "DYN_NAMESPACE=dynamo",
	}
	if f.nats = server; server != "" {
		at, err := url.Parse(server)
		if err != nil {
			return err
		}
		// Dynamo ignores a name and a password in the URL.
		password, _ := at.User.Password()
		f.environment = append(f.environment, "NATS_SERVER=nats://"+at.Host, "NATS_AUTH_USERNAME="+at.User.Username(), "NATS_AUTH_PASSWORD="+password)
	}
	if err := f.startMocker(); err != nil {
		return err
	}
	_, port, _ := strings.Cut(f.address, ":")
	f.frontend, err = f.e.start(f.name+"-frontend", f.environment, f.python(), "-m", "dynamo.frontend", "--router-mode", "direct",
		"--http-host", "127.0.0.1", "--http-port", port)
	return err
}

func (f *dynamoFleet) startMocker() error {
	model, err := f.e.dynamoModel()
	if err != nil {
		return err
	}
	f.mocker, err = f.e.start(f.name+"-mocker", f.environment, f.python(), append([]string{
		"-m", "dynamo.mocker", "--model-path", model, "--model-name", modelName,
		"--block-size", fmt.Sprint(dynamoBlock), "--num-gpu-blocks-override", fmt.Sprint(dynamoBlocks), "--num-workers", "2", "--data-parallel-size", "2",
		"--speedup-ratio", "1000",
	}, f.flags...)...)
	return err
}

// ready waits for the workers' records and the frontend's model, and begins to listen to
// the workers' publishers, before their first event.
func (f *dynamoFleet) ready(ctx context.Context) error {
	if err := f.mocker.Await(ctx, dynamoStart, "the records of 2 workers and 4 publishers", func(ctx context.Context) bool {
		v := f.records(ctx)
		return len(v.Workers) == 2 && len(v.Plane.Channels) == 4 && len(v.Plane.Indexers) == 4
	}); err != nil {
		return err
	}
	var err error
	if f.index, err = f.startIndex(); err != nil {
		return err
	}
	if f.plane, err = f.listen(ctx, f.records(ctx).Plane); err != nil {
		return err
	}
	return f.frontend.Await(ctx, dynamoStart, "its model", func(ctx context.Context) bool {
		data, err := process.Get(ctx, "http://"+f.address+"/v1/models")
		return err == nil && strings.Contains(string(data), `"`+modelName+`"`)
	})
}

func (f *dynamoFleet) stop() {
	if f.plane != nil {
		f.plane.stop()
	}
	if f.index.Lines != nil {
		f.index.Stop()
	}
	for _, p := range []*process.Process{f.frontend, f.mocker} {
		if p != nil {
			p.Stop()
		}
	}
}

// config is kvroute's, for workers in a store behind a frontend.
func (f *dynamoFleet) config(store string) (string, error) {
	model, err := f.e.dynamoModel()
	return fmt.Sprintf("version: 1\ndynamo: {dir: %q, namespace: dynamo, frontend: %q}\nmodels: [{name: %s, tokenizer: %q}]\n", store, f.address, modelName, model), err
}

// openDynamo starts Dynamo's processes and kvroute behind Envoy.
func (e *env) openDynamo(ctx context.Context, name, plane string) (*dynamoFleet, *stack, error) {
	f, s, err := e.beginDynamo(ctx, name, plane)
	if err != nil {
		return nil, nil, err
	}
	return f, s, s.waitRouted(ctx, chat("Hi", nil))
}

// beginDynamo is openDynamo up to the first request. The mock workers get the flags.
func (e *env) beginDynamo(ctx context.Context, name, plane string, flags ...string) (*dynamoFleet, *stack, error) {
	f, err := e.newDynamo(name)
	if err != nil {
		return nil, nil, err
	}
	f.flags = flags
	config, err := f.config(f.store)
	if err != nil {
		return nil, nil, err
	}
	// With NATS as the bus kvroute has the server, so it is there first.
	s, err := e.startStack(ctx, name, config, []string{f.address}, "--router-temperature", "0.5")
	if err != nil {
		return nil, nil, err
	}
	e.atEnd(s.stop)
	e.atEnd(f.stop)
	if err := f.start(plane, s.router.At.NATS); err != nil {
		return nil, nil, err
	}
	if err := f.ready(ctx); err != nil {
		return nil, nil, err
	}
	return f, s, s.waitWorkers(ctx, 4)
}

// dynamoIndexer lets Dynamo's stand-alone indexer and a kvroute hear the same sockets, the
// mock engines' own: their indexes must be equal. The requests go by another kvroute, which
// hears the event plane.
func dynamoIndexer(ctx context.Context, e *env) (result, error) {
	r := result{what: "kvroute's index with that of the stand-alone indexer, which hears the same sockets of engines"}
	engines, err := process.FreePorts(4)
	if err != nil {
		return r, err
	}
	port, err := process.FreePorts(1)
	if err != nil {
		return r, err
	}
	f, s, err := e.beginDynamo(ctx, "dynamo-sockets", "zmq", "--zmq-kv-events-ports", fmt.Sprintf("%d,%d", engines, engines+2))
	if err != nil {
		return r, err
	}
	var ranks, workers []string
	for i := range 2 {
		at := engines + 2*i
		ranks = append(ranks, fmt.Sprintf("%d:0=tcp://127.0.0.1:%d,%d:1=tcp://127.0.0.1:%d", i+1, at, i+1, at+1))
		workers = append(workers, fmt.Sprintf("- {worker_id: %d, name: engine-%d, address: %q, models: [%s], model_card: kvroute-sim, block_size: %d, dp_size: 2, events: {transport: zmq, endpoint: \"tcp://127.0.0.1:%d\"}}\n",
			i+1, i+1, f.address, modelName, dynamoBlock, at))
	}
	theirs, err := e.start("dynamo-indexer", f.environment, f.python(), "-m", "dynamo.indexer", "--port", fmt.Sprint(port), "--block-size", fmt.Sprint(dynamoBlock),
		"--model-name", modelName, "--workers", strings.Join(ranks, ","))
	if err != nil {
		return r, err
	}
	defer theirs.Stop()
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	if err := theirs.Await(ctx, dynamoStart, "it hears 4 ranks", func(ctx context.Context) bool {
		data, err := process.Get(ctx, url+"/workers")
		return err == nil && strings.Count(string(data), `"status":"active"`) == 2+4 // of the workers and their ranks
	}); err != nil {
		return r, err
	}
	ours, err := e.startStack(ctx, "dynamo-beside", "version: 1\nworkers:\n"+strings.Join(workers, ""), []string{f.address})
	if err != nil {
		return r, err
	}
	defer ours.stop()
	if err := errors.Join(ours.waitWorkers(ctx, 4), s.waitRouted(ctx, chat("Hi", nil))); err != nil {
		return r, err
	}
	w := &dynamoWorld{dynamoFleet: f, stack: s, rng: rand.New(rand.NewPCG(3, 1))}
	seen := 0
	for round := range 10 {
		if err := w.talk(ctx, &r, 6); err != nil {
			return r, err
		}
		r.cases++
		if err := equalBlocks(ctx, ours, func(ctx context.Context) ([]blockAt, error) {
			var dump map[string]struct {
				Events []routerEvent `json:"events"`
			}
			err := process.GetJSON(ctx, url+"/dump", &dump)
			var all []blockAt
			for _, group := range dump {
				all = appendBlocks(all, group.Events...)
			}
			seen = len(all)
			return all, err
		}); err != nil || seen == 0 {
			r.differ("round %d: %d blocks there, %v", round, seen, err)
		}
	}
	r.notes = append(r.notes, fmt.Sprintf("%s; %d blocks in the end", w.summary(), seen))
	return r, nil
}

// dynamoEvents has conversations through Envoy, kvroute and the frontend. Of each response
// it compares the worker that answered with the one that was chosen, and the tokens that
// it had cached with those foretold; then kvroute's index with Dynamo's own, fed with the
// same messages. At the end another kvroute comes late, which has to ask.
func dynamoEvents(ctx context.Context, e *env, plane string) (result, error) {
	r := result{what: "workers chosen with those that answered, overlap with cached_tokens, index with Dynamo's"}
	f, s, err := e.openDynamo(ctx, "dynamo-"+plane, plane)
	if err != nil {
		return r, err
	}
	w := &dynamoWorld{dynamoFleet: f, stack: s, rng: rand.New(rand.NewPCG(1, 1))}
	if err := w.talk(ctx, &r, 100); err != nil {
		return r, err
	}
	config, err := f.config(f.store)
	if err != nil {
		return r, err
	}
	var flags []string
	if plane == "nats" {
		flags = []string{"--nats-url", s.router.At.NATS}
	}
	late, err := e.startStack(ctx, "dynamo-late-"+plane, config, []string{f.address}, flags...)
	if err != nil {
		return r, err
	}
	defer late.stop()
	if err := late.waitWorkers(ctx, 4); err != nil {
		return r, err
	}
	r.cases++
	if err := w.equal(ctx, late); err != nil {
		r.differ("a kvroute that comes late: %v", err)
	}
	// It goes on from what the indexers told it.
	w.stack = late
	if err := late.waitRouted(ctx, chat("Hi", nil)); err != nil {
		return r, err
	}
	err = w.talk(ctx, &r, 20)
	r.notes = append(r.notes, w.summary())
	return r, err
}

// dynamoLoss cuts kvroute's connections to the workers' publishers while they publish: it
// has to notice, to ask the workers' indexers, and to know the caches again.
func dynamoLoss(ctx context.Context, e *env) (result, error) {
	r := result{what: "the index with Dynamo's after the connections were cut"}
	f, err := e.newDynamo("dynamo-loss")
	if err != nil {
		return r, err
	}
	e.atEnd(f.stop)
	if err := f.start("zmq", ""); err != nil {
		return r, err
	}
	if err := f.ready(ctx); err != nil {
		return r, err
	}
	store := filepath.Join(e.dir, "dynamo-loss-store-cut")
	sockets, err := f.mirror(ctx, store)
	if err != nil {
		return r, err
	}
	defer sockets.stop()
	config, err := f.config(store)
	if err != nil {
		return r, err
	}
	s, err := e.startStack(ctx, "dynamo-loss", config, []string{f.address})
	if err != nil {
		return r, err
	}
	e.atEnd(s.stop)
	if err := s.waitWorkers(ctx, 4); err != nil {
		return r, err
	}
	if err := s.waitRouted(ctx, chat("Hi", nil)); err != nil {
		return r, err
	}
	w := &dynamoWorld{dynamoFleet: f, stack: s, rng: rand.New(rand.NewPCG(2, 1))}
	for round := range 4 {
		if err := w.talk(ctx, &r, 6); err != nil {
			return r, err
		}
		sockets.cut()
		// What is foretold is wrong meanwhile, so nothing is compared.
		for range 8 {
			if _, err := w.send(ctx, w.body()); err != nil {
				return r, err
			}
		}
		if err := w.heard(ctx); err != nil {
			return r, err
		}
		if err := sockets.join(ctx); err != nil {
			return r, err
		}
		r.cases++
		if err := w.equal(ctx, s); err != nil {
			r.differ("after cut %d: %v", round, err)
		}
	}
	asked, err := s.counter(ctx, "kvroute_events_query_ends_total")
	r.notes = append(r.notes, fmt.Sprintf("queries: %s", asked), w.summary())
	return r, err
}

// dynamoWorkers looks at kvroute's workers while Dynamo's come and go.
func dynamoWorkers(ctx context.Context, e *env) (result, error) {
	r := result{what: "kvroute's workers with Dynamo's"}
	f, s, err := e.openDynamo(ctx, "dynamo-fleet", "zmq")
	if err != nil {
		return r, err
	}
	ids := func(ctx context.Context) (string, error) {
		all, err := s.states(ctx)
		var text []string
		for _, w := range all {
			text = append(text, fmt.Sprintf("%d/%d of %d blocks of %d at %s", w.ID, w.DPRank, w.TotalKVBlocks, w.BlockSize, w.Address))
		}
		return strings.Join(text, ", "), err
	}
	want := func(ctx context.Context) string {
		var text []string
		for _, w := range f.records(ctx).Workers {
			for rank := range w.DPSize {
				text = append(text, fmt.Sprintf("%d/%d of %d blocks of %d at %s", w.WorkerID, w.DPStart+rank, dynamoBlocks, dynamoBlock, f.address))
			}
		}
		return strings.Join(text, ", ")
	}
	compare := func(what string, n int) error {
		r.cases++
		var got, wanted string
		err := process.Until(ctx, dynamoStart, what, func(ctx context.Context) bool {
			var err error
			got, err = ids(ctx)
			wanted = want(ctx)
			return err == nil && got == wanted && strings.Count(got, "/") == n
		})
		if err != nil && ctx.Err() == nil {
			r.differ("%s: kvroute has %s, Dynamo %s", what, got, wanted)
			return nil
		}
		return err
	}
	if err := compare("at the start", 4); err != nil {
		return r, err
	}
	f.mocker.Stop()
	if err := compare("after they stopped", 0); err != nil {
		return r, err
	}
	r.cases++
	if answer, err := ask(ctx, s.envoy.URL()+chatPath, chat("Hi", nil), nil); err != nil || answer.status != http.StatusServiceUnavailable && answer.status != http.StatusNotFound {
		r.differ("without workers: status %d, %v", answer.status, err)
	}
	if err := f.startMocker(); err != nil {
		return r, err
	}
	if err := compare("after they came", 4); err != nil {
		return r, err
	}
	f.mocker.Kill()
	err = compare("after they died", 0)
	return r, err
}
