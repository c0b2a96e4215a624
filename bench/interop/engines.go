// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/zmtp"
	"github.com/kvroute/kvroute/tokenizer"
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
	name    string
	id      uint64 // kvroute's
	address string
	ranks   int
	args    []string
	process *process.Process
	heard   []*listener
	// expected is how many blocks each rank must have announced.
	expected []int
}

// vllmFleet has the two engines and the model's files that the checks of vLLM share.
type vllmFleet struct {
	model, adapter string
	tokenizer      string // of which kind, for the record
	engines        []*vllmEngine
}

// fleet starts the engines when they are needed first: both at once, since each uses
// one core to start.
func (e *env) fleet(ctx context.Context) *vllmFleet {
	if e.vllms == nil {
		e.vllms = e.files()
		e.atGroupEnd(func() { e.vllms = nil })
		for _, name := range []string{"a", "b"} {
			v := e.launch(e.vllms, name, 1)
			e.vllms.engines = append(e.vllms.engines, v)
			e.atGroupEnd(v.stop)
		}
	}
	for _, v := range e.vllms.engines {
		if len(v.heard) == 0 {
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

// config is kvroute's configuration. In events, NAME stands for the engine's name.
func (f *vllmFleet) config(events string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "version: 1\nmodels:\n- {name: %s, lora: [%s], tokenizer: %q}\nworkers:\n", modelName, adapterName, f.model)
	for _, v := range f.engines {
		fmt.Fprintf(&b, "- {name: %s, address: %q, models: [%s], lora: [%s], events: %s}\n",
			v.name, v.address, modelName, adapterName, strings.ReplaceAll(events, "NAME", v.name))
	}
	return b.String()
}

// launch starts an engine without waiting. Its sockets are files where that is
// possible, so that no other process can subscribe.
func (e *env) launch(f *vllmFleet, name string, ranks int) *vllmEngine {
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
	v := &vllmEngine{name: name, address: "127.0.0.1:" + port, ranks: ranks}
	v.args = []string{
		"serve", f.model, "--host", "127.0.0.1", "--port", port, "--load-format", "dummy", "--served-model-name", modelName,
		"--enforce-eager", "--block-size", fmt.Sprint(blockSize), "--enable-prefix-caching", "--enable-prompt-tokens-details",
		"--max-model-len", fmt.Sprint(maxLen), "--max-num-seqs", "8", "--num-gpu-blocks-override", fmt.Sprint(engineBlocks),
		"--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--kv-events-config", string(kvEvents),
	}
	if ranks > 1 {
		v.args = append(v.args, "--data-parallel-size", fmt.Sprint(ranks), "--api-server-count", "1")
	} else {
		v.args = append(v.args, "--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapterName+"="+f.adapter)
	}
	e.begin(v)
	return v
}

// begin starts the engine's process.
func (e *env) begin(v *vllmEngine) {
	program := bench.Must(filepath.Abs(filepath.Join(e.vllm, "bin/vllm")))
	v.process = e.start("vllm-"+v.name, []string{
		"HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "VLLM_SERVER_DEV_MODE=1", "VLLM_CPU_KVCACHE_SPACE=1",
		"VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_CACHE_ROOT=" + filepath.Join(e.dir, "vllm-cache"),
	}, "nice", append([]string{"-n", "15", program}, v.args...)...)
}

// ready waits until the engine serves, and begins to listen to all its ranks.
func (v *vllmEngine) ready(ctx context.Context) {
	await(ctx, v.process, engineStart, "it serves", func(ctx context.Context) string {
		bench.Must(process.Get(ctx, "http://"+v.address+"/health"))
		return ""
	})
	v.stopListening()
	for _, at := range v.sources(ctx) {
		l := listen(ctx, at.live, at.replay)
		v.heard, v.expected = append(v.heard, l), append(v.expected, l.heard().stored)
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
	for _, l := range v.heard {
		l.stop()
	}
	v.heard, v.expected = nil, nil
}

func (v *vllmEngine) stop() {
	v.stopListening()
	v.process.Stop()
}

// empty empties the engine's cache and waits until it has announced that, and with that all
// that came before: blocks are counted from here.
func (v *vllmEngine) empty(ctx context.Context) {
	before := make([]int, v.ranks)
	for rank, l := range v.heard {
		before[rank] = l.heard().cleared
	}
	await(ctx, v.process, process.Patience, "it announces a reset", func(ctx context.Context) string {
		// While a request runs that its client gave up, nothing is emptied.
		bench.NoError(v.post(ctx, "/reset_prefix_cache"))
		for rank := range v.ranks { // each announces it with its next step
			var header map[string]string
			if v.ranks > 1 {
				header = map[string]string{"X-Data-Parallel-Rank": fmt.Sprint(rank)}
			}
			ask(ctx, "http://"+v.address+chatPath, chat("Hi", nil), header).read()
		}
		for rank, l := range v.heard {
			h := l.heard()
			if h.cleared == before[rank] || len(h.hashes) > 0 {
				return fmt.Sprintf("rank %d has %d blocks", rank, len(h.hashes))
			}
			v.expected[rank] = h.stored
		}
		return ""
	})
}

// files makes the folders of a small model with dummy weights and of an adapter.
func (e *env) files() *vllmFleet {
	f := &vllmFleet{model: filepath.Join(e.dir, "model"), adapter: filepath.Join(e.dir, "adapter")}
	for _, dir := range []string{f.model, f.adapter} {
		bench.NoError(os.MkdirAll(dir, 0o755))
	}
	// The tokenizer of a real model if it is there, else one of the project's own.
	own, theirs := "tokenizer/testdata/golden", filepath.Join(e.shared, "tokenizers/qwen3")
	f.tokenizer = "Qwen3's tokenizer and template"
	vocabulary := 151936
	write := func(name, dir, from string) error {
		data, err := tokenizer.ReadFile(os.DirFS(dir), from)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(f.model, name), data, 0o644)
	}
	if write("tokenizer.json", theirs, "tokenizer.json") == nil {
		bench.NoError(write("tokenizer_config.json", theirs, "tokenizer_config.json"))
	} else {
		f.tokenizer = "a tokenizer and a template of the project's own"
		vocabulary = 512
		bench.NoError(write("tokenizer.json", own, "bytelevel-qwen2-nfc.json"))
		writeJSON(filepath.Join(f.model, "tokenizer_config.json"), map[string]any{
			// Without an end the engine cannot hold a model to a form.
			"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": ownTemplate,
		})
	}
	writeJSON(filepath.Join(f.model, "config.json"), map[string]any{
		"architectures": []string{"Qwen3ForCausalLM"}, "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": layers,
		"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": headSize, "vocab_size": vocabulary, "max_position_embeddings": 40960,
		"torch_dtype": "bfloat16", "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
		"transformers_version": "4.51.0", // a newer one brings a warning about the tokenizer
	})
	writeAdapter(f.adapter)
	return f
}

// ownTemplate renders all fields of requests, so that the ids depend on each of them.
const ownTemplate = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}" +
	"{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content or m.reasoning %}<think>{{ m.reasoning_content or m.reasoning }}</think>{% endif %}{{ m.content or '' }}" +
	"{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}" +
	"{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
