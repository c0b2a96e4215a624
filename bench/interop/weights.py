# SPDX-License-Identifier: Apache-2.0
"""Writes random weights for the model in the given folder. They are large enough for the output to
depend on the whole prompt; with vLLM's dummy weights all tokens are equally likely.
"""
import sys

import safetensors.torch
import torch
import transformers

folder = sys.argv[1]
torch.manual_seed(1)
config = transformers.AutoConfig.from_pretrained(folder)
config.initializer_range = 1.0
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
# lm_head is tied to the embedding.
weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
safetensors.torch.save_file(weights, folder + "/model.safetensors", {"format": "pt"})
