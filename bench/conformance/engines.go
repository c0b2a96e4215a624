// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// engineRequests is the number of requests to compare for each model of an engine.
const engineRequests = 200

// engineModel is a model of these comparisons: a folder of the reference data, and the config.json that the
// reference data lack.
type engineModel struct {
	name, config string

	only  string     // the engine to compare with; empty is all
	args  []string   // of the engine
	flags chat.Flags // the same, for kvroute
}

// engineModels are the models of these comparisons.
//
//nolint:gochecknoglobals // a table
var engineModels = []engineModel{
	{name: "qwen3", config: qwen3Config},
	{
		name: "qwen3", config: qwen3Config, only: "vllm",
		args: []string{
			"--default-chat-template-kwargs", `{"enable_thinking": false}`, "--exclude-tools-when-tool-choice-none",
			"--reasoning-effort-map", `{"low": "none"}`, "--chat-template-content-format", "string", "--anthropic-disabled-thinking-effort", "medium",
		},
		flags: chat.Flags{
			DefaultKwargs: []byte(`{"enable_thinking": false}`), ExcludeTools: true, EffortMap: map[string]string{"low": "none"},
			ContentFormat: "string", DisabledEffort: "medium",
		},
	},
	{
		name: "qwen3", config: qwen3Config, only: "sglang",
		args:  []string{"default_chat_template_kwargs", `{"enable_thinking": false, "reasoning_effort": "low"}`},
		flags: chat.Flags{DefaultKwargs: []byte(`{"enable_thinking": false, "reasoning_effort": "low"}`)},
	},
	{name: "gpt-oss", config: `{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 201088, "max_position_embeddings": 131072, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128, "dtype": "float32", "eos_token_id": 200002}`},
}

const qwen3Config = `{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "float32", "eos_token_id": 151645}`

// engineCall is a request for the engine, and for kvroute.
type engineCall struct {
	path string
	body []byte // with a model
}

// askEngine returns the engine's ids of a request, or nil if the engine refuses it.
type askEngine func(c engineCall) []uint32

// startEngine starts what makes an engine's prompts of the model in a folder.
type startEngine func(o options, release, model string, args []string) (ask askEngine, stop func())

// engines are the engines that make their prompts without a GPU, by the name of the package.
//
//nolint:gochecknoglobals // a table
var engines = map[string]startEngine{
	"sglang": startSGLang,
	"vllm":   startVLLM,
}

// compareEngines compares requests of all paths with the released code of engines: each release is a folder
// of tools/engines.sh.
func compareEngines(o options) (figures []bench.Figure) {
	for release := range strings.FieldsSeq(o.engines) {
		name, version, _ := strings.Cut(filepath.Base(release), "-")
		start := engines[name]
		if start == nil || !strings.Contains("engine "+filepath.Base(release), o.only) {
			continue
		}
		for _, m := range engineModels {
			if m.only != "" && m.only != name {
				continue
			}
			dir, label := filepath.Join(o.work, "engines", m.name), filepath.Base(release)+" "+m.name
			if m.args != nil {
				label += " with flags"
			}
			if !writeEngineModel(o, dir, m.name, m.config) {
				fmt.Printf("no %s under %s: not compared with %s\n", m.name, o.shared, filepath.Base(release))
				continue
			}
			ask, stop := start(o, release, dir, m.args)
			figures = append(figures, compareEngine(label, version, dir, tokenizer.ModelConfig{Profile: chat.Profile(name), Flags: m.flags}, ask))
			stop()
		}
	}
	return figures
}

// writeEngineModel writes the files of a model without compression. It reports whether there are any.
func writeEngineModel(o options, dir, name, config string) bool {
	files := map[string][]byte{"config.json": []byte(config)}
	all, _ := filepath.Glob(filepath.Join(o.shared, "tokenizers", name, "*"))
	for _, f := range all {
		files[strings.TrimSuffix(filepath.Base(f), ".gz")] = bench.Must(readFile(f))
	}
	delete(files, "o200k_base.tiktoken")
	writeFolder(dir, files)
	return len(all) > 0
}

// compareEngine compares random requests. A request that the engine refuses counts as equal. A request that
// kvroute knows not to be exact counts as a fallback.
func compareEngine(name, version, dir string, conf tokenizer.ModelConfig, ask askEngine) bench.Figure {
	m := bench.Must(tokenizer.LoadModel(os.DirFS(dir), conf))
	m.SetEngineVersion(version)
	g := chats.Requests{R: random(11), Strange: 15}
	refused, fallbacks := 0, map[string]int{}
	f := comparison[engineCall, engineIDs]{
		name: "engine " + name, cases: engineRequests,
		random: func() engineCall {
			path, q := g.Any()
			q["model"] = "model"
			return engineCall{path, bench.Must(json.Marshal(q))}
		},
		theirs: func(all []engineCall) []engineIDs {
			out := make([]engineIDs, len(all))
			for i, c := range all {
				out[i].ids = ask(c)
			}
			return out
		},
		ours: func(c engineCall) engineIDs { return idsFor(m, c) },
		equal: func(ours, theirs engineIDs) bool {
			switch {
			case theirs.ids == nil:
				refused++
			case ours.ids == nil:
				fallbacks[ours.reason]++
			default:
				return slices.Equal(ours.ids, theirs.ids)
			}
			return true
		},
		show: func(c engineCall, ours, theirs engineIDs) string {
			return c.path + " " + difference(m, ours.ids, theirs.ids, c.body)
		},
	}.run()
	f.What += fmt.Sprintf(" (%d refused by the engine, fallbacks: %v)", refused, fallbacks)
	return f
}

// engineIDs are the ids of a request: nil if the engine refuses it, or if kvroute has no exact ids, for a reason.
type engineIDs struct {
	ids    []uint32
	reason string
}

// idsFor returns kvroute's ids of a request.
func idsFor(m *tokenizer.Model, c engineCall) engineIDs {
	endpoint, _ := openai.Classify(http.MethodPost, c.path)
	b, bad := openai.Parse(endpoint, c.body)
	if bad != nil {
		return engineIDs{reason: bad.Message}
	}
	if b.Tokens != nil {
		return engineIDs{ids: b.Tokens}
	}
	p, err := m.Encode(context.Background(), nil, b.Request, time.Now())
	switch {
	case err != nil:
		return engineIDs{reason: err.Error()}
	case p.Mode != tokenizer.Exact:
		return engineIDs{reason: p.Reason}
	}
	return engineIDs{ids: p.IDs}
}

// post sends a body and returns the body of the response, nil for another status than 200.
func post(url string, body []byte) []byte {
	r := bench.Must(http.Post(url, "application/json", bytes.NewReader(body))) //nolint:noctx // the engine answers or its end is an error
	defer r.Body.Close()
	var out bytes.Buffer
	_ = bench.Must(out.ReadFrom(r.Body))
	if r.StatusCode != http.StatusOK {
		return nil
	}
	return out.Bytes()
}
