// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/zmtp"
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

// dynamoFleet is Dynamo's processes: two mock workers of two ranks each, and a frontend
// in direct mode, all on the loopback. They end with the check.
type dynamoFleet struct {
	e           *env
	name        string
	store       string // of discovery
	environment []string
	flags       []string // more ones of the mock workers
	nats        string   // URL of the server for events, "" for ZMQ
	mocker      *process.Process
	frontend    *process.Process
	address     string // of the frontend
	plane       *eventPlane
	index       dynamoIndex
}

func (f *dynamoFleet) python() string { return filepath.Join(f.e.dynamo, "bin", "python") }

// newDynamo returns a fleet that is not started. The mock workers get the flags.
func (e *env) newDynamo(name string, flags ...string) *dynamoFleet {
	return &dynamoFleet{e: e, name: name, flags: flags, store: filepath.Join(e.dir, name+"-store"), address: fmt.Sprintf("127.0.0.1:%d", bench.Must(process.FreePorts(1)))}
}

// start starts the processes without waiting for them. Their event plane is zmq, or nats
// with the URL of a server.
func (f *dynamoFleet) start(plane, server string) {
	f.environment = []string{
		"DYN_FILE_KV=" + f.store, "DYN_DISCOVERY_BACKEND=file", "DYN_TCP_RPC_HOST=127.0.0.1", "DYN_EVENT_PLANE_HOST=127.0.0.1",
		"DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1", "HF_HUB_OFFLINE=1", "DYN_EVENT_PLANE=" + plane, "DYN_NAMESPACE=dynamo",
	}
	if f.nats = server; server != "" {
		at := bench.Must(url.Parse(server))
		// Dynamo ignores a name and a password in the URL.
		password, _ := at.User.Password()
		f.environment = append(f.environment, "NATS_SERVER=nats://"+at.Host, "NATS_AUTH_USERNAME="+at.User.Username(), "NATS_AUTH_PASSWORD="+password)
	}
	f.startMocker()
	_, port, _ := strings.Cut(f.address, ":")
	f.frontend = f.e.start(f.name+"-frontend", f.environment, f.python(), "-m", "dynamo.frontend", "--router-mode", "direct",
		"--http-host", "127.0.0.1", "--http-port", port)
	f.e.atEnd(f.frontend.Stop)
}

func (f *dynamoFleet) startMocker() {
	f.mocker = f.e.start(f.name+"-mocker", f.environment, f.python(), append([]string{
		"-m", "dynamo.mocker", "--model-path", f.e.dynamoModel(), "--model-name", modelName,
		"--block-size", fmt.Sprint(dynamoBlock), "--num-gpu-blocks-override", fmt.Sprint(dynamoBlocks), "--num-workers", "2", "--data-parallel-size", "2",
		"--speedup-ratio", "1000",
	}, f.flags...)...)
	f.e.atEnd(f.mocker.Stop)
}

// ready waits for the workers' records and the frontend's model, and subscribes to
// the workers' publishers before their first event.
func (f *dynamoFleet) ready(ctx context.Context) {
	await(ctx, f.mocker, dynamoStart, "the records of 2 workers and 4 publishers", func(ctx context.Context) string {
		v := f.records()
		workers, channels, indexers := len(v.Workers), len(v.Plane.Channels), len(v.Plane.Indexers)
		return missingUnless(workers == 2 && channels == 4 && indexers == 4, "%d workers, %d publishers, %d indexers", workers, channels, indexers)
	})
	f.index = f.startIndex()
	f.plane = f.listen(ctx, f.records().Plane)
	await(ctx, f.frontend, dynamoStart, "its model", func(ctx context.Context) string {
		models := string(bench.Must(process.Get(ctx, "http://"+f.address+"/v1/models")))
		return missingUnless(strings.Contains(models, `"`+modelName+`"`), "it has %s", models)
	})
}

// records reads the store.
func (f *dynamoFleet) records() (v fleet.DynamoView) {
	d := bench.Must(fleet.NewDynamo(fleet.DynamoConfig{
		Dir: f.store, Rules: fleet.DynamoRules{Namespace: "dynamo", Frontend: f.address}, Networks: bench.Must(fleet.ParseNetworks(workerNetworks)),
		Changed: func(now fleet.DynamoView) { v = now },
	}))
	d.Read()
	return v
}

// config is kvroute's, for workers in a store behind the frontend.
func (f *dynamoFleet) config(store string) string {
	return fmt.Sprintf("version: 1\ndynamo: {dir: %q, namespace: dynamo, frontend: %q}\nmodels: [{name: %s, tokenizer: %q}]\n", store, f.address, modelName, f.e.dynamoModel())
}

// dynamoModel writes the files that Dynamo wants of a model, whose tokenizer is the simulated
// engine's, and returns their folder.
func (e *env) dynamoModel() string {
	dir := filepath.Join(e.dir, "dynamo-model")
	err := os.CopyFS(dir, enginesim.ModelFiles())
	if errors.Is(err, fs.ErrExist) {
		return dir
	}
	bench.NoError(err)
	template := string(bench.Must(os.ReadFile(filepath.Join(dir, "chat_template.jinja"))))
	const begin, end = 1500, 1501
	for name, fields := range map[string]map[string]any{
		"tokenizer_config.json": {
			"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<|im_end|>", "model_max_length": 131072,
		},
		"generation_config.json": {"eos_token_id": end, "bos_token_id": begin},
		"config.json": {
			"architectures": []string{"Qwen3ForCausalLM"}, "model_type": "qwen3", "vocab_size": end + 1, "hidden_size": hidden, "num_hidden_layers": layers,
			"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": headSize, "intermediate_size": 2 * hidden, "max_position_embeddings": 131072,
			"eos_token_id": end, "bos_token_id": begin, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
		},
	} {
		writeJSON(filepath.Join(dir, name), fields)
	}
	return dir
}

// dynamoIndex is Dynamo's own index, in a process. Any number of goroutines may use it.
type dynamoIndex struct{ *process.Lines }

func (f *dynamoFleet) startIndex() dynamoIndex {
	x := dynamoIndex{bench.Must(process.StartLines(exec.Command(f.python(), "-c", dynamoTree)))}
	f.e.atEnd(x.Stop)
	x.dump() // it has started
	return x
}

func (x dynamoIndex) apply(envelope []byte) error { return x.Tell(hex.EncodeToString(envelope)) }

func (x dynamoIndex) dump() []blockAt {
	var evs []routerEvent
	bench.NoError(x.Ask("", &evs))
	return appendBlocks(nil, evs...)
}

// match returns how many leading blocks rank 0 of a worker has.
func (x dynamoIndex) match(locals []uint64, worker uint64) int {
	var scores map[string]int
	bench.NoError(x.Ask("?"+string(bench.Must(json.Marshal(locals))), &scores))
	return scores[fmt.Sprintf("%d/0", worker)]
}

// eventPlane receives what the workers publish, beside kvroute, and forwards it to Dynamo's
// index.
type eventPlane struct {
	index dynamoIndex

	mu sync.Mutex
	// mu guards the fields below.
	stored, removed map[engines.WorkerRank]int // blocks
	err             error
}

// listen subscribes to all publishers. It returns before the first event, and ends with the
// check.
func (f *dynamoFleet) listen(ctx context.Context, plane engines.Plane) *eventPlane {
	p := &eventPlane{index: f.index, stored: make(map[engines.WorkerRank]int), removed: make(map[engines.WorkerRank]int)}
	if f.nats != "" {
		nc := bench.Must(nats.Connect(f.nats))
		f.e.atEnd(nc.Close)
		subjects := make(map[string]bool)
		for _, c := range plane.Channels {
			if !subjects[c.Subject] {
				subjects[c.Subject] = true
				bench.Must(nc.Subscribe(c.Subject, func(m *nats.Msg) { p.take(m.Data) }))
			}
		}
		bench.NoError(nc.FlushWithContext(ctx))
		return p
	}
	var readers sync.WaitGroup
	f.e.atEnd(readers.Wait)
	for _, c := range plane.Channels {
		conn := bench.Must(zmtp.Dial(ctx, bench.Must(zmtp.ParseEndpoint(c.Endpoint, 0, 0)), zmtp.Sub))
		f.e.atEnd(func() { _ = conn.Close() }) // Read then ends
		bench.NoError(conn.Subscribe(events.Topic))
		readers.Go(func() {
			for {
				frames, err := conn.Read()
				if err != nil {
					return // the check notices missing blocks
				}
				if s, err := engines.SplitFrames(frames); err == nil && s.Topic == events.Topic {
					p.take(s.Body)
				}
			}
		})
	}
	// The publishers do not confirm a subscription.
	at := time.Now().Add(500 * time.Millisecond)
	await(ctx, nil, process.Patience, "a pause", func(context.Context) string { return missingUnless(time.Now().After(at), "time") })
	return p
}

// take receives a message.
func (p *eventPlane) take(envelope []byte) {
	m, err := events.DecodeMessage(envelope)
	if err == nil && m.Bad > 0 {
		err = fmt.Errorf("a message with %d bad events", m.Bad)
	}
	err = errors.Join(err, p.index.apply(envelope))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = errors.Join(p.err, err)
	for _, ev := range m.Events {
		at := engines.WorkerRank{WorkerID: ev.WorkerID, DPRank: ev.DPRank}
		switch ev.Event.Kind {
		case indexer.Stored:
			p.stored[at] += len(ev.Event.Blocks)
		case indexer.Removed:
			p.removed[at] += len(ev.Event.Externals)
		case indexer.Cleared:
		}
	}
}

// mirror keeps a copy of the store until the check ends. In the copy the publishers'
// sockets are valves that lead to the real ones.
func (f *dynamoFleet) mirror(store string) (valves []*valve) {
	var replace []string
	for _, ch := range f.records().Plane.Channels {
		v := bench.Must(openValve("tcp", "127.0.0.1:0", strings.TrimPrefix(ch.Endpoint, "tcp://")))
		f.e.atEnd(v.stop)
		valves = append(valves, v)
		replace = append(replace, ch.Endpoint+`"`, "tcp://"+v.l.Addr().String()+`"`)
	}
	copyAll := func() error { return copyStore(f.store, store, strings.NewReplacer(replace...)) }
	bench.NoError(copyAll())
	tick := time.NewTicker(2 * time.Second) // Dynamo removes records that are not renewed for 10 s
	done := make(chan struct{})
	f.e.atEnd(func() { done <- struct{}{} })
	go func() {
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				_ = copyAll() // a file may be removed meanwhile; the next copy is right
			}
		}
	}()
	return valves
}

// copyStore copies a folder with replacements in its files. Each file is there as a whole,
// as Dynamo writes it.
func copyStore(from, to string, replace *strings.Replacer) error {
	return filepath.WalkDir(from, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), ".") {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		half := filepath.Join(filepath.Dir(target), ".tmp_"+filepath.Base(target))
		if err := os.WriteFile(half, []byte(replace.Replace(string(data))), 0o644); err != nil {
			return err
		}
		return os.Rename(half, target)
	})
}
