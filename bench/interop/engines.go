// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/zmtp"
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
	address string
	ranks   int
	args    []string
	process *process.Process
	heard   []*listener
	// expected is how many blocks each rank must have announced.
	expected []int
}

// vllmFleet is what the checks of vLLM share: two engines, and the model's files.
type vllmFleet struct {
	model, adapter string
	tokenizer      string // of which kind, for the record
	engines        []*vllmEngine
}

// fleet starts the engines when they are needed first: both at once, since each uses
// one core to start.
func (e *env) fleet(ctx context.Context) (*vllmFleet, error) {
	if e.vllms == nil {
		f, err := e.files()
		if err != nil {
			return nil, err
		}
		e.vllms = f
		e.atEnd(func() { e.vllms = nil })
		for _, name := range []string{"a", "b"} {
			v, err := e.launch(f, name, 1)
			if err != nil {
				return nil, err
			}
			f.engines = append(f.engines, v)
			e.atEnd(v.stop)
		}
	}
	for _, v := range e.vllms.engines {
		if len(v.heard) > 0 {
			continue
		}
		if err := v.ready(ctx); err != nil {
			return nil, err // the next check waits for it again
		}
	}
	return e.vllms, nil
}

// launch starts an engine without waiting. Its sockets are files where that is
// possible, so that nobody else hears them.
func (e *env) launch(f *vllmFleet, name string, ranks int) (*vllmEngine, error) {
	port, err := process.FreePorts(1)
	if err != nil {
		return nil, err
	}
	live, replay := "ipc://"+filepath.Join(e.dir, name+".events"), "ipc://"+filepath.Join(e.dir, name+".replay")
	if ranks > 1 {
		// Ranks have ports in a row, and vLLM binds no port of one address only.
		base, err := process.FreePorts(2 * ranks)
		if err != nil {
			return nil, err
		}
		live, replay = fmt.Sprintf("tcp://*:%d", base), fmt.Sprintf("tcp://127.0.0.1:%d", base+ranks)
	}
	kvEvents, err := json.Marshal(map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": live, "replay_endpoint": replay, "topic": "kv-events",
	})
	if err != nil {
		return nil, err
	}
	v := &vllmEngine{name: name, address: fmt.Sprintf("127.0.0.1:%d", port), ranks: ranks}
	v.args = []string{
		"serve", f.model, "--host", "127.0.0.1", "--port", fmt.Sprint(port), "--load-format", "dummy", "--served-model-name", modelName,
		"--enforce-eager", "--block-size", fmt.Sprint(blockSize), "--enable-prefix-caching", "--enable-prompt-tokens-details",
		"--max-model-len", fmt.Sprint(maxLen), "--max-num-seqs", "8", "--num-gpu-blocks-override", fmt.Sprint(engineBlocks),
		"--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--kv-events-config", string(kvEvents),
	}
	if ranks > 1 {
		v.args = append(v.args, "--data-parallel-size", fmt.Sprint(ranks), "--api-server-count", "1")
	} else {
		v.args = append(v.args, "--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapterName+"="+f.adapter)
	}
	return v, e.begin(v)
}

// begin starts the engine's process.
func (e *env) begin(v *vllmEngine) (err error) {
	program, err := filepath.Abs(filepath.Join(e.vllm, "bin/vllm"))
	if err != nil {
		return err
	}
	v.process, err = e.start("vllm-"+v.name, []string{
		"HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "VLLM_SERVER_DEV_MODE=1", "VLLM_CPU_KVCACHE_SPACE=1",
		"VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_CACHE_ROOT=" + filepath.Join(e.dir, "vllm-cache"),
	}, "nice", append([]string{"-n", "15", program}, v.args...)...)
	return err
}

// ready waits until the engine serves, and begins to hear it.
func (v *vllmEngine) ready(ctx context.Context) error {
	if err := v.process.Await(ctx, engineStart, "it serves", func(ctx context.Context) bool {
		_, err := process.Get(ctx, "http://"+v.address+"/health")
		return err == nil
	}); err != nil {
		return err
	}
	return v.hear(ctx)
}

// sockets are where a rank's events are.
type sockets struct{ live, replay zmtp.Endpoint }

// sources asks the engine for the places of all ranks.
func (v *vllmEngine) sources(ctx context.Context) (all []sockets, err error) {
	var said map[string]struct {
		Endpoint string `json:"endpoint"`
		Replay   string `json:"replay_endpoint"`
	}
	if err := process.GetJSON(ctx, "http://"+v.address+"/kv_event_sources", &said); err != nil {
		return nil, err
	}
	if len(said) != v.ranks {
		return nil, fmt.Errorf("engine %s names %d ranks, want %d", v.name, len(said), v.ranks)
	}
	for rank := range v.ranks {
		at := said[fmt.Sprint(rank)]
		live, err1 := zmtp.ParseEndpoint(at.Endpoint, 0, 0)
		replay, err2 := zmtp.ParseEndpoint(at.Replay, 0, 0)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		all = append(all, sockets{live.At("127.0.0.1"), replay.At("127.0.0.1")})
	}
	return all, nil
}

// hear begins to hear all ranks.
func (v *vllmEngine) hear(ctx context.Context) error {
	all, err := v.sources(ctx)
	if err != nil {
		return err
	}
	v.deaf()
	for _, at := range all {
		l, err := listen(ctx, at.live, at.replay)
		if err != nil {
			return err
		}
		h, err := l.heard()
		if err != nil {
			return err
		}
		v.heard, v.expected = append(v.heard, l), append(v.expected, h.stored)
	}
	return nil
}

// deaf ends the listeners.
func (v *vllmEngine) deaf() {
	for _, l := range v.heard {
		l.stop()
	}
	v.heard, v.expected = nil, nil
}

func (v *vllmEngine) stop() {
	v.deaf()
	v.process.Stop()
}

// post asks the engine itself.
func (v *vllmEngine) post(ctx context.Context, path string) error {
	r, err := ask(ctx, "http://"+v.address+path, "", nil)
	if err == nil && r.status != http.StatusOK {
		err = fmt.Errorf("%s: status %d: %.300s", path, r.status, r.body)
	}
	return err
}

// empty empties the engine's cache and waits until it has told so, and with that all that
// came before: what it announces is counted from here.
func (v *vllmEngine) empty(ctx context.Context) error {
	before := make([]int, v.ranks)
	for rank, l := range v.heard {
		h, err := l.heard()
		if err != nil {
			return err
		}
		before[rank] = h.cleared
	}
	return process.Until(ctx, process.Patience, "engine "+v.name+" tells of a reset", func(ctx context.Context) bool {
		// While a request runs that its client gave up, nothing is emptied.
		if v.post(ctx, "/reset_prefix_cache") != nil {
			return false
		}
		for rank := range v.ranks { // each tells it with its next step
			r, err := ask(ctx, "http://"+v.address+chatPath, chat("Hi", nil), v.rank(rank))
			if err != nil || r.status != http.StatusOK {
				return false
			}
		}
		for rank, l := range v.heard {
			h, err := l.heard()
			if err != nil || h.cleared == before[rank] || len(h.hashes) > 0 {
				return false
			}
			v.expected[rank] = h.stored
		}
		return true
	})
}

// rank is the header that names a rank, where there are several.
func (v *vllmEngine) rank(rank int) map[string]string {
	if v.ranks == 1 {
		return nil
	}
	return map[string]string{"X-Data-Parallel-Rank": strconv.Itoa(rank)}
}

// files makes the folders of a small model with dummy weights and of an adapter.
func (e *env) files() (*vllmFleet, error) {
	f := &vllmFleet{model: filepath.Join(e.dir, "model"), adapter: filepath.Join(e.dir, "adapter")}
	for _, dir := range []string{f.model, f.adapter} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	// The tokenizer of a real model if it is at hand, else one of the project's own.
	own, theirs := "tokenizer/testdata/golden/bytelevel-qwen2-nfc.json", filepath.Join(e.shared, "tokenizers/qwen3")
	f.tokenizer = "Qwen3's tokenizer and template"
	vocabulary := 151936
	if err := unpack(filepath.Join(f.model, "tokenizer.json"), filepath.Join(theirs, "tokenizer.json")); err == nil {
		if err := unpack(filepath.Join(f.model, "tokenizer_config.json"), filepath.Join(theirs, "tokenizer_config.json")); err != nil {
			return nil, err
		}
	} else {
		f.tokenizer = "a tokenizer and a template of the project's own"
		vocabulary = 512
		if err := unpack(filepath.Join(f.model, "tokenizer.json"), own); err != nil {
			return nil, err
		}
		if err := writeJSON(filepath.Join(f.model, "tokenizer_config.json"), map[string]any{
			// Without an end the engine cannot hold a model to a form.
			"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": ownTemplate,
		}); err != nil {
			return nil, err
		}
	}
	if err := writeJSON(filepath.Join(f.model, "config.json"), map[string]any{
		"architectures": []string{"Qwen3ForCausalLM"}, "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": layers,
		"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": headSize, "vocab_size": vocabulary, "max_position_embeddings": 40960,
		"torch_dtype": "bfloat16", "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
		"transformers_version": "4.51.0", // a newer one brings a warning about the tokenizer
	}); err != nil {
		return nil, err
	}
	return f, writeAdapter(f.adapter)
}

// ownTemplate renders all that requests have, so that the ids tell of all of it.
const ownTemplate = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}" +
	"{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content or m.reasoning %}<think>{{ m.reasoning_content or m.reasoning }}</think>{% endif %}{{ m.content or '' }}" +
	"{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}" +
	"{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

// has tells whether a URL is that of one of the engines.
func (f *vllmFleet) has(url string) bool {
	return f != nil && slices.ContainsFunc(f.engines, func(v *vllmEngine) bool { return "http://"+v.address == url })
}
