# SPDX-License-Identifier: Apache-2.0
"""Writes a LoRA adapter for the small model of make test-interop. Its weights are all zero: it changes the
engine's block hashes of a prompt, and no reply.

    python adapter.py FOLDER HIDDEN LAYERS HEAD
"""
import json
import sys

import numpy
from safetensors.numpy import save_file

folder, (hidden, layers, head), rank = sys.argv[1], map(int, sys.argv[2:]), 8
weights = {}
for layer in range(layers):
    for name, out in ("q_proj", 2 * head), ("v_proj", head):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[prefix + ".lora_A.weight"] = numpy.zeros((rank, hidden), numpy.float32)
        weights[prefix + ".lora_B.weight"] = numpy.zeros((out, rank), numpy.float32)
save_file(weights, folder + "/adapter_model.safetensors")
with open(folder + "/adapter_config.json", "w") as f:
    json.dump({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"], "bias": "none"}, f)
