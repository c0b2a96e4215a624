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

// served is a model folder that a render server is started with.
type served struct {
	name, architecture, modelType string
	config                        map[string]any    // more fields of config.json
	files                         map[string]string // the path of each file's contents
	args                          []string          // of the server

	templates map[string]string // to send along, by name; none: the model's own
	strict    bool              // the requests, for an engine that refuses more
}

// vllm compares whole prompts with a real vLLM's: with each template of the reference
// data, for gpt-oss, and in mistral mode.
func vllm(o options) (figures []bench.Figure) {
	for _, s := range servedModels(o) {
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

// servedModels are the models that are compared.
func servedModels(o options) []served {
	templates := templateTexts(o)
	templates["own"] = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
	all := []served{
		{
			name: "templates", architecture: "Qwen3ForCausalLM", modelType: "qwen3", files: map[string]string{"tokenizer.json": golden + "/bytelevel-qwen2-nfc.json"},
			templates: templates, args: []string{"--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"},
		},
		{
			// Without a parser of calls: that of this version does not work with its own mistral-common.
			name: "mistral own tekken.json", architecture: "MistralForCausalLM", modelType: "mistral", files: map[string]string{"tekken.json": golden + "/../mistral/tekken.json"},
			args: []string{"--tokenizer-mode", "mistral"}, strict: true,
		},
	}
	folder := filepath.Join(o.shared, "tokenizers/gpt-oss")
	if _, err := os.Stat(folder); err == nil {
		all = append(all, served{
			name: "gpt-oss", architecture: "GptOssForCausalLM", modelType: "gpt_oss", args: []string{"--enable-auto-tool-choice", "--tool-call-parser", "openai"},
			files:  map[string]string{"tokenizer.json": folder + "/tokenizer.json", "tokenizer_config.json": folder + "/tokenizer_config.json"},
			config: map[string]any{"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128, "layer_types": []string{"sliding_attention", "full_attention"}},
		})
	}
	return all
}

// compare starts vLLM's render server and compares its token ids with kvroute's, once for each name:
// the names of s.templates, or of the model if the model's own template is compared.
func (s *served) compare(o options, names []string) (figures []bench.Figure) {
	dir := filepath.Join(o.work, "vllm", s.name)
	s.writeModel(dir)
	server, url := startRenderServer(o, dir, s.args...)
	defer server.Stop()
	for _, name := range names {
		fields, n := `"model":"model"`, 5*conversations
		if s.templates != nil {
			fields, n = fmt.Sprintf(`"model":"model","chat_template":%s`, bench.Must(json.Marshal(s.templates[name]))), conversations/4
		}
		m := bench.Must(tokenizer.LoadModel(os.DirFS(dir), tokenizer.ModelConfig{ChatTemplate: s.templates[name]}))
		g := chats.Requests{Strange: 5, Strict: s.strict}
		figures = append(figures, prompts("vLLM's render server, "+name, n, g, m, true, func(all []*prompt) (ids [][]uint32) {
			for _, p := range all {
				ids = append(ids, s.render(url, with(fields, p.body), &p.now))
			}
			return ids
		}))
	}
	return figures
}

// writeModel makes the folder of the model for the server.
func (s *served) writeModel(dir string) {
	// The sizes do not matter.
	config := map[string]any{
		"architectures": []string{s.architecture}, "model_type": s.modelType, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
		"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 262144, "max_position_embeddings": 65536,
		"torch_dtype": "bfloat16", "transformers_version": "4.57.0", "rms_norm_eps": 1e-6, "rope_theta": 10000,
	}
	maps.Copy(config, s.config)
	files := map[string][]byte{"config.json": bench.Must(json.Marshal(config))}
	for name, path := range s.files {
		data, err := readFile(path)
		if !errors.Is(err, os.ErrNotExist) || name == "tokenizer.json" {
			bench.NoError(err)
		}
		files[name] = data
	}
	writeFolder(dir, files)
}

// startRenderServer starts `vllm launch render`: request, template and tokenizer of a real
// engine, without a model.
func startRenderServer(o options, dir string, args ...string) (server *process.Process, url string) {
	port := bench.Must(process.FreePorts(1))
	cmd := exec.Command(o.vllm, append([]string{
		"launch", "render", dir, "--host", "127.0.0.1", "--port", fmt.Sprint(port), "--served-model-name", "model", "--max-model-len", "32768",
	}, args...)...)
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "OMP_NUM_THREADS=1", "VLLM_SYSTEM_START_DATE="+day)
	server, url = bench.Must(process.Start(o.work, "vllm", cmd)), fmt.Sprintf("http://127.0.0.1:%d", port)
	if err := server.Await(context.Background(), startWithin, "it serves", func(ctx context.Context) bool {
		_, err := process.Get(ctx, url+"/health")
		return err == nil
	}); err != nil {
		server.Stop()
		bench.NoError(err)
	}
	return server, url
}

// render returns the ids of a chat request, nil if the server refuses it, and the time that a
// template sees: the server's clock, or a fixed day for a model's own template. It repeats a
// request during which a second ended, since a template may print the second.
func (s *served) render(url string, body []byte, now *time.Time) []uint32 {
	for range 10 {
		*now = time.Now()
		resp := bench.Must(http.Post(url+"/v1/chat/completions/render", "application/json", bytes.NewReader(body)))
		text := bench.Must(io.ReadAll(resp.Body))
		_ = resp.Body.Close() // it was read
		if resp.StatusCode != http.StatusOK {
			return nil
		}
		var answer struct {
			IDs []uint32 `json:"token_ids"`
		}
		bench.NoError(json.Unmarshal(text, &answer))
		if s.templates == nil {
			*now = today()
			return answer.IDs
		}
		if now.Unix() == time.Now().Unix() {
			return answer.IDs
		}
	}
	return nil
}
