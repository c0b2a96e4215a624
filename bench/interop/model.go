// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/tokenizer"
)

// ownTemplate renders all fields of requests, so that the ids depend on each of them.
const ownTemplate = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}" +
	"{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content or m.reasoning %}<think>{{ m.reasoning_content or m.reasoning }}</think>{% endif %}{{ m.content or '' }}" +
	"{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}" +
	"{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

// The sizes of the small model.
const hidden, layers, headSize = 64, 2, 32

// writeModel writes the files of a small model with dummy weights into a new folder. It has the
// tokenizer of a real model if one is given, else the simulated engine's with a template of the
// project's own. Its configuration has the given fields, too.
func writeModel(dir, tokenizerFrom string, more map[string]any) {
	config := map[string]any{
		"architectures": []string{"Qwen3ForCausalLM"}, "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
		"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": headSize, "vocab_size": 151936, "max_position_embeddings": 40960,
		"torch_dtype": "bfloat16", "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
		"transformers_version": "4.51.0", // a newer one brings a warning about the tokenizer
	}
	write := func(name string, data []byte) { bench.NoError(os.WriteFile(filepath.Join(dir, name), data, 0o644)) }
	if tokenizerFrom != "" {
		bench.NoError(os.MkdirAll(dir, 0o755))
		for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
			write(name, bench.Must(tokenizer.ReadFile(os.DirFS(tokenizerFrom), name)))
		}
	} else {
		bench.NoError(os.CopyFS(dir, enginesim.ModelFiles()))
		write("chat_template.jinja", []byte(ownTemplate)) // in the place of the simulated engine's
		write("tokenizer_config.json", bench.Must(json.Marshal(map[string]any{
			// Without an end the engine cannot hold a model to a form.
			"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 131072, "chat_template": ownTemplate,
		})))
		ids := map[string]any{"bos_token_id": 1500, "eos_token_id": 1501}
		write("generation_config.json", bench.Must(json.Marshal(ids)))
		maps.Copy(config, ids)
		config["vocab_size"] = 1502
	}
	maps.Copy(config, more)
	write("config.json", bench.Must(json.Marshal(config)))
}
