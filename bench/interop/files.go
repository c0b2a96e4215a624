// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvroute/kvroute/bench"
)

// Sizes of the small model.
const (
	hidden, layers, headSize = 64, 2, 32
	adapterRank              = 8
)

func writeJSON(path string, v any) {
	bench.NoError(os.WriteFile(path, bench.Must(json.Marshal(v)), 0o644))
}

// writeAdapter writes a LoRA adapter whose weights are all zero: it changes the engine's
// block hashes of a prompt, and no reply.
func writeAdapter(dir string) {
	type tensor struct {
		Type    string `json:"dtype"`
		Shape   [2]int `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	head, size := map[string]tensor{}, 0
	add := func(name string, shape [2]int) {
		n := 4 * shape[0] * shape[1]
		head[name] = tensor{"F32", shape, [2]int{size, size + n}}
		size += n
	}
	for l := range layers {
		for _, m := range []struct {
			name string
			out  int
		}{{"q_proj", 2 * headSize}, {"v_proj", headSize}} {
			name := fmt.Sprintf("base_model.model.model.layers.%d.self_attn.%s", l, m.name)
			add(name+".lora_A.weight", [2]int{adapterRank, hidden})
			add(name+".lora_B.weight", [2]int{m.out, adapterRank})
		}
	}
	text := bench.Must(json.Marshal(head))
	data := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	bench.NoError(os.WriteFile(filepath.Join(dir, "adapter_model.safetensors"), append(data, make([]byte, size)...), 0o644))
	writeJSON(filepath.Join(dir, "adapter_config.json"), map[string]any{
		"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": adapterRank, "lora_alpha": adapterRank, "target_modules": []string{"q_proj", "v_proj"}, "bias": "none",
	})
}
