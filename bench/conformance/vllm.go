// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/tokenizer"
)

// startWithin bounds the time that a render server takes to start: 25 s on an idle
// machine.
const startWithin = 5 * time.Minute

// renderServer is `vllm launch render`: request, template and tokenizer of a real
// engine, without a model.
type renderServer struct {
	*process.Process
	url string
}

func startRenderServer(o options, dir string, args ...string) *renderServer {
	port := bench.Must(process.FreePorts(1))
	cmd := exec.Command(o.vllm, append([]string{
		"launch", "render", dir, "--host", "127.0.0.1", "--port", fmt.Sprint(port), "--served-model-name", "model", "--max-model-len", "32768",
	}, args...)...)
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "OMP_NUM_THREADS=1", "VLLM_SYSTEM_START_DATE="+day)
	p := bench.Must(process.Start(o.work, "vllm", cmd))
	s := &renderServer{p, fmt.Sprintf("http://127.0.0.1:%d", port)}
	if err := p.Await(context.Background(), startWithin, "it serves", func(context.Context) bool {
		resp, err := http.Get(s.url + "/health")
		if err != nil {
			return false
		}
		_ = resp.Body.Close() // it has none
		return resp.StatusCode == http.StatusOK
	}); err != nil {
		s.Stop()
		bench.NoError(err)
	}
	return s
}

// render returns the ids of a chat request, nil if the server refuses it.
func (s *renderServer) render(body []byte) []uint32 {
	resp := bench.Must(http.Post(s.url+"/v1/chat/completions/render", "application/json", bytes.NewReader(body)))
	defer func() { _ = resp.Body.Close() }() // it was read
	b := bench.Must(io.ReadAll(resp.Body))
	if resp.StatusCode != http.StatusOK {
		return nil
	}
	var answer struct {
		IDs []uint32 `json:"token_ids"`
	}
	bench.NoError(json.Unmarshal(b, &answer))
	return answer.IDs
}

// side is one model as both sides have it.
type side struct {
	name     string
	m        *tokenizer.Model
	template string    // sent along
	now      time.Time // of the server; zero: the same as here
	strict   bool
}

// encode returns our ids of a request that the server rendered after begin. A
// template may print the second.
func (x side) encode(body []byte, theirs []uint32, begin time.Time) []uint32 {
	if !x.now.IsZero() {
		return encodeRequest(x.m, body, x.now)
	}
	got := encodeRequest(x.m, body, begin)
	if now := time.Now(); !slices.Equal(got, theirs) && now.Truncate(time.Second) != begin.Truncate(time.Second) {
		return encodeRequest(x.m, body, now)
	}
	return got
}

// compare sends n random requests to the server, and counts.
func (s *renderServer) compare(x side, n int) bench.Figure {
	g := chats.Requests{R: random(5), Strange: 5, Strict: x.strict}
	equal, refused, only, different := 0, 0, 0, 0
	for range n {
		q := g.Request()
		ours := bench.Must(json.Marshal(q))
		if q["model"] = "model"; x.template != "" {
			q["chat_template"] = x.template
		}
		body := bench.Must(json.Marshal(q))
		begin := time.Now()
		theirs := s.render(body)
		got := x.encode(ours, theirs, begin)
		switch {
		case got == nil && theirs == nil:
			refused++
		case theirs == nil:
			only++ // the client gets the engine's error, wherever kvroute sends the request
		case slices.Equal(got, theirs):
			equal++
		default:
			if different++; different <= 3 {
				fmt.Println(difference(x.m, x.name, got, theirs, ours))
			}
		}
	}
	fmt.Printf("%s: %d cases, %d equal, %d refused by both, %d by vLLM alone, %d different\n", x.name, n, equal, refused, only, different)
	what := fmt.Sprintf("vLLM's render server, %s: different of %d requests (%d equal, %d refused by both, %d by it alone)", x.name, n, equal, refused, only)
	return bench.NewFigure(what, "", bench.Exactly(0), float64(different))
}

// served is a model folder that a render server is started with.
type served struct {
	name   string
	config map[string]any    // of config.json
	files  map[string]string // from where each comes
	args   []string          // of the server

	templates map[string]string // to send along, by name; none: the model's own
	strict    bool
}

// vllm compares whole prompts with a real vLLM's: with each template of the reference
// data, for gpt-oss, and in mistral mode.
func vllm(o options) (figures []bench.Figure) {
	all := servedModels(o)
	for _, s := range all {
		names := []string{s.name}
		if s.templates != nil {
			names = slices.Sorted(maps.Keys(s.templates))
		}
		names = slices.DeleteFunc(names, func(name string) bool { return !strings.Contains(name, o.only) })
		if len(names) > 0 {
			bench.Within(s.name, func() { figures = append(figures, s.compare(o, names)...) })
		}
	}
	return figures
}

// compare starts a server and compares with it the model's own template or those of names.
func (s *served) compare(o options, names []string) (figures []bench.Figure) {
	dir := modelFolder(o, s.name, s.config, s.files)
	server := startRenderServer(o, dir, s.args...)
	defer server.Stop()
	for _, name := range names {
		x, n := side{name: name, template: s.templates[name], strict: s.strict}, conversations/4
		if s.templates == nil {
			x.now, n = today(), 5*conversations
		}
		x.m = bench.Must(tokenizer.LoadModel(os.DirFS(dir), tokenizer.ModelConfig{ChatTemplate: x.template}))
		f := server.compare(x, n)
		figures = append(figures, f)
	}
	return figures
}

const ownTemplate = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

// servedModels are the models that are compared.
func servedModels(o options) (all []served) {
	ofReference := func(name string) map[string]string {
		folder := filepath.Join(o.shared, "tokenizers", name)
		if _, err := os.Stat(folder); err != nil {
			return nil
		}
		return map[string]string{"tokenizer.json": folder + "/tokenizer.json", "tokenizer_config.json": folder + "/tokenizer_config.json"}
	}
	templates := served{
		name: "templates", files: ofReference("qwen3"), config: map[string]any{"architectures": []string{"Qwen3ForCausalLM"}, "model_type": "qwen3"},
		args: []string{"--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"},
	}
	if templates.files == nil {
		templates.files, templates.templates = map[string]string{"tokenizer.json": golden + "/bytelevel-qwen2-nfc.json"}, map[string]string{"own": ownTemplate}
	} else {
		templates.templates = templateTexts(o)
	}
	all = append(all, templates)
	if files := ofReference("gpt-oss"); files != nil {
		all = append(all, served{
			name: "gpt-oss", files: files, args: []string{"--enable-auto-tool-choice", "--tool-call-parser", "openai"}, config: map[string]any{
				"architectures": []string{"GptOssForCausalLM"}, "model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128,
				"layer_types": []string{"sliding_attention", "full_attention"},
			},
		})
	}
	// Without a parser of calls: that of this version does not work with its own mistral-common.
	files := map[string]string{"own tekken.json v15": golden + "/../mistral/tekken.json", "own tokenizer.model.v2": golden + "/../mistral/tokenizer.model"}
	inside, _ := filepath.Glob(filepath.Join(filepath.Dir(o.vllm), "../lib/python3*/site-packages/mistral_common/data/*"))
	for _, f := range inside {
		if name := filepath.Base(f); name == "tekken_240911.json" || strings.HasSuffix(name, ".v7") {
			files[name] = f
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		to := "tekken.json"
		if k := strings.Index(name, ".model"); k >= 0 {
			to = "tokenizer" + name[k:]
		}
		all = append(all, served{
			name: "mistral " + name, files: map[string]string{to: files[name]}, args: []string{"--tokenizer-mode", "mistral"}, strict: true,
			config: map[string]any{"architectures": []string{"MistralForCausalLM"}, "model_type": "mistral"},
		})
	}
	return all
}

// modelFolder makes the folder of a model for the server.
func modelFolder(o options, name string, config map[string]any, files map[string]string) (dir string) {
	dir = filepath.Join(o.work, "vllm", name)
	bench.NoError(os.MkdirAll(dir, 0o755))
	for to, from := range files {
		b, err := readMaybeGzip(from)
		if errors.Is(err, os.ErrNotExist) && to != "tokenizer.json" {
			continue
		}
		bench.NoError(err)
		bench.NoError(os.WriteFile(filepath.Join(dir, to), b, 0o644))
	}
	// Its sizes do not matter.
	for key, value := range map[string]any{
		"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 262144,
		"max_position_embeddings": 65536, "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "rms_norm_eps": 1e-6, "rope_theta": 10000,
	} {
		if _, ok := config[key]; !ok {
			config[key] = value
		}
	}
	b := bench.Must(json.Marshal(config))
	bench.NoError(os.WriteFile(filepath.Join(dir, "config.json"), b, 0o644))
	return dir
}
