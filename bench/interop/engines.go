// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/zmtp"
	"github.com/kvroute/kvroute/router"
)

const (
	modelName   = "tiny"
	adapterName = "my-lora"
	// blockSize is the smallest that vLLM takes on a CPU.
	blockSize = 32
	// engineBlocks makes a cache of some 5,000 tokens, so that it evicts soon; an
	// engine must have room for one prompt of maxLen.
	engineBlocks = 160
	maxLen       = 4096
	// engineStart bounds the start of an engine: 35 s on an idle machine, five minutes
	// were seen on one with ten times the work that it can do.
	engineStart = 8 * time.Minute
)

// vllmEngine is a running vLLM.
type vllmEngine struct {
	name        string
	id          uint64 // as kvroute's configuration says
	address     string
	role        router.Role // empty for an engine that transfers no blocks
	ranks       int
	args        []string
	environment []string // beside that of all engines
	process     *process.Process
	ledger      *ledger  // of the fleet
	stops       []func() // of the subscriptions to its events
}

func (v *vllmEngine) rank(i int) events.RankName {
	return events.RankName{WorkerID: v.id, DPRank: uint32(i)}
}

// vllmFleet has the two engines and the model's files that the checks of vLLM share.
type vllmFleet struct {
	model, adapter string
	tokenizer      string   // of which kind, for the record
	flags          []string // of the engines, in place of an adapter
	engines        []*vllmEngine
	ledger         *ledger
}

// fleet starts the engines when they are needed first: both at once, since each uses
// one core to start.
func (e *env) fleet(ctx context.Context) *vllmFleet {
	if e.vllms == nil {
		e.vllms = e.files()
		e.atGroupEnd(func() { e.vllms = nil })
		for _, name := range []string{"a", "b"} {
			e.atGroupEnd(e.launch(e.vllms, name, 1, "").stop)
		}
	}
	for _, v := range e.vllms.engines {
		if len(v.stops) == 0 {
			v.ready(ctx) // after an error the next check waits for it again
		}
	}
	return e.vllms
}

func (f *vllmFleet) addresses() (all []string) {
	for _, v := range f.engines {
		all = append(all, v.address)
	}
	return all
}

func (f *vllmFleet) ranks() (n int) {
	for _, v := range f.engines {
		n += v.ranks
	}
	return n
}

// config is kvroute's configuration. In events, NAME stands for the engine's name.
func (f *vllmFleet) config(events string) string {
	var b strings.Builder
	adapter := adapterName
	if f.adapter == "" {
		adapter = ""
	}
	fmt.Fprintf(&b, "version: 1\nmodels:\n- {name: %s, lora: [%s], tokenizer: %q}\nworkers:\n", modelName, adapter, f.model)
	for _, v := range f.engines {
		fmt.Fprintf(&b, "- {worker_id: %d, name: %s, address: %q, role: %q, models: [%s], lora: [%s], events: %s}\n",
			v.id, v.name, v.address, cmp.Or(v.role, router.Aggregated), modelName, adapter, strings.ReplaceAll(events, "NAME", v.name))
	}
	return b.String()
}

// launch starts an engine without waiting. Its sockets are files where that is
// possible, so that no other process can subscribe.
func (e *env) launch(f *vllmFleet, name string, ranks int, role router.Role) *vllmEngine {
	live, replay := "ipc://"+filepath.Join(e.dir, name+".events"), "ipc://"+filepath.Join(e.dir, name+".replay")
	if ranks > 1 {
		// Ranks have ports in a row, and vLLM binds no port of one address only.
		base := bench.Must(process.FreePorts(2 * ranks))
		live, replay = fmt.Sprintf("tcp://*:%d", base), fmt.Sprintf("tcp://127.0.0.1:%d", base+ranks)
	}
	kvEvents := bench.Must(json.Marshal(map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": live, "replay_endpoint": replay, "topic": "kv-events",
	}))
	port := fmt.Sprint(bench.Must(process.FreePorts(1)))
	v := &vllmEngine{name: name, id: uint64(len(f.engines) + 1), address: "127.0.0.1:" + port, role: role, ranks: ranks, ledger: f.ledger}
	f.engines = append(f.engines, v)
	v.args = []string{
		"serve", f.model, "--host", "127.0.0.1", "--port", port, "--served-model-name", modelName,
		"--enforce-eager", "--block-size", fmt.Sprint(blockSize), "--enable-prefix-caching", "--enable-prompt-tokens-details",
		"--max-model-len", fmt.Sprint(maxLen), "--max-num-seqs", "8", "--num-gpu-blocks-override", fmt.Sprint(engineBlocks),
		"--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--kv-events-config", string(kvEvents),
	}
	switch {
	case f.flags != nil:
		v.args = append(v.args, f.flags...)
	case role != "":
		var config string
		config, v.environment = transferConfig()
		v.args = append(v.args, "--kv-transfer-config", config)
	case ranks > 1:
		v.args = append(v.args, "--load-format", "dummy", "--data-parallel-size", fmt.Sprint(ranks), "--api-server-count", "1")
	default:
		e.writeAdapter(f.adapter)
		v.args = append(v.args, "--load-format", "dummy", "--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapterName+"="+f.adapter)
	}
	e.begin(v)
	return v
}

// begin starts the engine's process.
func (e *env) begin(v *vllmEngine) {
	program := bench.Must(filepath.Abs(filepath.Join(e.vllm, "bin/vllm")))
	v.process = e.start("vllm-"+v.name, append([]string{
		"HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "VLLM_SERVER_DEV_MODE=1", "VLLM_CPU_KVCACHE_SPACE=1",
		"VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_CACHE_ROOT=" + filepath.Join(e.dir, "vllm-cache"),
	}, v.environment...), "nice", append([]string{"-n", "15", program}, v.args...)...)
}

// ready waits until the engine serves, and begins to listen to all its ranks. Their blocks are
// counted from here.
func (v *vllmEngine) ready(ctx context.Context) {
	await(ctx, v.process, engineStart, "it serves", func(ctx context.Context) string {
		bench.Must(process.Get(ctx, "http://"+v.address+"/health"))
		return ""
	})
	v.stopListening()
	for i, at := range v.sources(ctx) {
		v.stops = append(v.stops, v.ledger.hear(ctx, v.rank(i), at.live, at.replay))
		v.ledger.with(v.rank(i), func(a *account) { a.expected = a.stored })
	}
}

// sockets are where a rank's events are.
type sockets struct{ live, replay zmtp.Endpoint }

// sources requests the endpoints of all ranks from the engine.
func (v *vllmEngine) sources(ctx context.Context) (all []sockets) {
	var ranks map[string]struct {
		Endpoint string `json:"endpoint"`
		Replay   string `json:"replay_endpoint"`
	}
	bench.NoError(process.GetJSON(ctx, "http://"+v.address+"/kv_event_sources", &ranks))
	if len(ranks) != v.ranks {
		bench.NoError(fmt.Errorf("engine %s names %d ranks, want %d", v.name, len(ranks), v.ranks))
	}
	for rank := range v.ranks {
		at := ranks[fmt.Sprint(rank)]
		live, replay := bench.Must(zmtp.ParseEndpoint(at.Endpoint, 0, 0)), bench.Must(zmtp.ParseEndpoint(at.Replay, 0, 0))
		all = append(all, sockets{live.At("127.0.0.1"), replay.At("127.0.0.1")})
	}
	return all
}

func (v *vllmEngine) stopListening() {
	for i, stop := range v.stops {
		stop()
		v.ledger.forget(v.rank(i))
	}
	v.stops = nil
}

func (v *vllmEngine) stop() {
	v.stopListening()
	v.process.Stop()
}

// reset asks the engine to empty its cache. It announces that with its next step only.
func (v *vllmEngine) reset(ctx context.Context) {
	if r := ask(ctx, "http://"+v.address+"/reset_prefix_cache", "", nil); r.status != http.StatusOK {
		bench.NoError(&refusal{r.status, r.body})
	}
}

// empty empties the engine's cache and waits until it has announced that, and with that all
// that came before: blocks are counted from here.
func (v *vllmEngine) empty(ctx context.Context) {
	before := make([]int, v.ranks)
	for i := range before {
		v.ledger.with(v.rank(i), func(a *account) { before[i] = a.cleared })
	}
	await(ctx, v.process, process.Patience, "it announces a reset", func(ctx context.Context) (missing string) {
		// While a request runs that its client gave up, nothing is emptied.
		v.reset(ctx)
		for i := range before { // each rank announces it with its next step
			var header map[string]string
			if v.ranks > 1 {
				header = map[string]string{"X-Data-Parallel-Rank": fmt.Sprint(i)}
			}
			ask(ctx, "http://"+v.address+chatPath, chat("Hi", nil), header).read()
		}
		for i, cleared := range before {
			v.ledger.with(v.rank(i), func(a *account) {
				a.expected = a.stored
				if a.cleared == cleared || len(a.copies) > 0 {
					missing += fmt.Sprintf("rank %d has %d blocks; ", i, len(a.copies))
				}
			})
		}
		return missing
	})
}

// files makes the folder of the model: with a real model's tokenizer if the reference data has it.
func (e *env) files() *vllmFleet {
	f := &vllmFleet{model: filepath.Join(e.dir, "model"), adapter: filepath.Join(e.dir, "adapter"), ledger: newLedger()}
	folder := filepath.Join(e.shared, "tokenizers/qwen3")
	f.tokenizer = "Qwen3's tokenizer and template"
	if _, err := os.Stat(folder); err != nil {
		folder, f.tokenizer = "", "the simulated engine's tokenizer and a template of the project's own"
	}
	if _, err := os.Stat(f.model); err != nil { // no check before made it
		writeModel(f.model, folder, nil)
	}
	return f
}

//go:embed adapter.py
var adapterScript string

// writeAdapter makes the folder of the adapter, with vLLM's Python.
func (e *env) writeAdapter(dir string) {
	bench.NoError(os.MkdirAll(dir, 0o755))
	e.runPython(adapterScript, dir, fmt.Sprint(hidden), fmt.Sprint(layers), fmt.Sprint(headSize))
}

// runPython runs a script with vLLM's Python.
func (e *env) runPython(script string, args ...string) {
	cmd := exec.Command(filepath.Join(e.vllm, "bin/python"), append([]string{"-"}, args...)...)
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		bench.NoError(fmt.Errorf("run a script in Python: %w\n%s", err, out))
	}
}
