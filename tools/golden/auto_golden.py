# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer/testdata/auto/transformersN.jsonl: folders of small models, and the ids of transformers' AutoTokenizer.

Run through `make golden`, with transformers 5 (vLLM, SGLang) and with transformers 4 (TensorRT-LLM). A line is a folder
{"name": …, "base": the golden tokenizer that is its tokenizer.json, "files": the other files},
and {"cases": [[text, ids], …], "special": ids of "a b" with special tokens around it}. With a number as the third
argument, so many random folders are made instead, for comparisons that are not committed.
"""
import json
import logging
import os
import pathlib
import random
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

import transformers
from transformers import AutoTokenizer

GOLDEN = pathlib.Path("tokenizer/testdata/golden")
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
TEXTS = [
    "a b", " Hello  world", "a<|new_tok|>b <|x|> c", "<|pad_new|>hi", "<s>hi</s> there", "éz e\u0301z", "it's 1234 <|im_start|>user\n", "x <|strip|> y", "<|named|><|im_end|> <|legacy|>z", "<unk> \x00\n\n▁a",
    "<|endoftext|>a<pad>b<bos>", "▁<PRE> d", "\u0301e中文 ", "def f():\n\treturn 1",
]


def token(content, **flags):
    return {**FLAGS, "content": content, **flags}


def folders():
    qwen = {"config.json": {"model_type": "qwen3"}}
    llama = {"config.json": {"model_type": "llama"}}
    generic = {"tokenizer_class": "PreTrainedTokenizerFast"}
    yield "decoder", "bytelevel-qwen2-nfc", {**qwen, "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"400": token("<|im_start|>"), "401": token("<|im_end|>"), "500": token("<|new_tok|>"), "450": token("<|x|>", special=False)}}}
    yield "decoder that lacks a token", "bytelevel-qwen2-nfc", {**qwen, "tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast", "added_tokens_decoder": {"7": token("<|new_tok|>")}}}
    yield "special", "bytelevel-qwen2-nfc", {**llama, "tokenizer_config.json": {**generic, "additional_special_tokens": ["<|x|>", "<|im_end|>"], "pad_token": "<|pad_new|>", "eos_token": "<|im_end|>", "bos_token": None}}
    yield "extra", "bytelevel-gpt2", {**llama, "tokenizer_config.json": {**generic, "extra_special_tokens": {"b_token": "<|x|>", "a_token": "<|new_tok|>"}, "unk_token": {"__type": "AddedToken", **token("<|strip|>", lstrip=True, rstrip=True)}}}
    yield "own names", "bytelevel-qwen2-nfc", {**qwen, "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|pad_new|>", "additional_special_tokens": ["<|new_tok|>", "<|x|>"]}}
    yield "flags", "bytelevel-qwen2-nfc", {**llama, "tokenizer_config.json": {**generic, "added_tokens_decoder": {"401": token("<|im_end|>", rstrip=True), "402": token("éz", normalized=True, special=False), "9": {"content": "e\u0301 "}}}}
    yield "flags of Qwen2", "bytelevel-gpt2", {**qwen, "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": {"401": token("<|im_end|>", rstrip=True), "400": token("<|im_start|>", rstrip=True)}}}
    yield "legacy files", "bytelevel-gpt2", {**llama, "tokenizer_config.json": generic, "special_tokens_map.json": {"pad_token": token("<|pad_new|>", lstrip=True), "eos_token": "<|x|>"}, "added_tokens.json": {"<|legacy|>": 700, "<|x|>": 600, "e\u0301z": 650}}
    yield "legacy files of Qwen2", "bytelevel-qwen2-nfc", {**qwen, "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}, "special_tokens_map.json": {"pad_token": "<|pad_new|>"}, "added_tokens.json": {"<|legacy|>": 700, "e\u0301z": 650}}
    yield "nothing but a kind", "bytelevel-gpt2", {"config.json": {"model_type": "qwen3"}}
    for legacy in (False, True):
        for name in ("LlamaTokenizer", "LlamaTokenizerFast"):
            yield f"{name} {legacy}", "prepend-replace", {**llama, "tokenizer_config.json": {"tokenizer_class": name, "legacy": legacy, "bos_token": "<s>", "eos_token": {"__type": "AddedToken", **token("</s>")}, "unk_token": "<unk>", "pad_token": None, "add_bos_token": True}}
    yield "Llama without a prefix", "metaspace-first", {**llama, "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}}
    yield "Llama of Mistral", "prepend-replace", {"config.json": {"model_type": "mistral"}, "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}}
    yield "no class", "metaspace-always-split", {**llama, "tokenizer_config.json": {"pad_token": "<pad>"}}
    yield "CodeLlama", "metaspace-first", {"config.json": {"model_type": "code_llama"}, "tokenizer_config.json": {"tokenizer_class": "CodeLlamaTokenizer"}}
    yield "Gemma", "replace-only", {"config.json": {"model_type": "gemma2"}, "tokenizer_config.json": {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "pad_token": "<pad>"}}
    yield "Gemma of a file", "metaspace-never", {"config.json": {"model_type": "gemma3"}, "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    yield "GPT-2", "bytelevel-digits", {"config.json": {"model_type": "gpt2"}, "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}
    yield "StarCoder", "starcoder", {"config.json": {"model_type": "starcoder2"}, "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "additional_special_tokens": ["<|new_tok|>"]}}
    yield "GPT-NeoX", "neox", {"config.json": {"model_type": "gpt_neox"}, "tokenizer_config.json": {"tokenizer_class": "GPTNeoXTokenizerFast"}}
    yield "Cohere", "bytelevel-gpt2", {"config.json": {"model_type": "cohere"}, "tokenizer_config.json": {"tokenizer_class": "CohereTokenizerFast", "pad_token": "<pad>"}}
    yield "Qwen3.5", "bytelevel-gpt2", {"config.json": {"model_type": "qwen3_5"}, "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}}
    yield "a text twice", "added-flags", {**llama, "tokenizer_config.json": {**generic, "added_tokens_decoder": {"67": token("éz", lstrip=True, rstrip=True, special=False)}}}
    yield "a special token twice", "prepend-replace", {**llama, "tokenizer_config.json": {**generic, "added_tokens_decoder": {"841": token("<|strip|>", normalized=True), "39": token("<|strip|>", lstrip=True), "829": token("<unk>", normalized=True, special=False)}}}
    yield "Cohere with a prefix", "added-flags", {**llama, "tokenizer_config.json": {"tokenizer_class": "CohereTokenizer", "add_prefix_space": True}}
    yield "Qwen2's own token", "added-flags", {**llama, "tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast", "added_tokens_decoder": {"444": token("<|endoftext|>", single_word=True, special=False)}}}
    yield "a legacy token's flags", "added-flags", {**llama, "tokenizer_config.json": {**generic, "eos_token": {"__type": "AddedToken", **token("<pad>", single_word=True)}}, "added_tokens.json": {"<pad>": 680}}
    yield "DeepSeek", "bytelevel-deepseek", {"config.json": {"model_type": "deepseek_v3"}, "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "legacy": True, "bos_token": {"__type": "AddedToken", **token("<|x|>")}}}


def random_folders(count):
    rng = random.Random(int(sys.argv[4]) if len(sys.argv) > 4 else 1)
    bases = ["bytelevel-qwen2-nfc", "bytelevel-gpt2", "bytelevel-o200k", "neox", "starcoder", "prepend-replace", "metaspace-first", "replace-only", "metaspace-never", "added-flags"]
    contents = ["<|new_tok|>", "<|x|>", "<|pad_new|>", "<|im_start|>", "<|im_end|>", "<|strip|>", "<s>", "</s>", "<unk>", "<pad>", "éz", "a", "<|endoftext|>", "<|named|>"]
    kinds = ["llama", "qwen3", "qwen2", "mistral", "gpt2", "gemma2", "gpt_neox", "cohere", "phi3", "starcoder2", "deepseek_v3", "falcon", "code_llama", "qwen3_5"]
    classes = ["LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", "GPT2Tokenizer", "GemmaTokenizer", "GPTNeoXTokenizerFast", "CohereTokenizer", None, "OwnTokenizer"]
    flags = lambda: {k: rng.random() < 0.15 for k in ("lstrip", "rstrip", "single_word")} | {"normalized": rng.random() < 0.4, "special": rng.random() < 0.6}
    for k in range(count):
        conf = {}
        if c := rng.choice(classes):
            conf["tokenizer_class"] = c
        if rng.random() < 0.5:
            conf["added_tokens_decoder"] = {str(rng.randint(0, 900)): {"content": rng.choice(contents), **flags()} for _ in range(rng.randint(0, 4))}
        for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "image_token", "mask_token"):
            if rng.random() < 0.25:
                x = rng.choice(contents)
                conf[key] = rng.choice([None, x, x, {"__type": "AddedToken", "content": x, **flags()}])
        if rng.random() < 0.3:
            conf[rng.choice(["additional_special_tokens", "extra_special_tokens"])] = rng.sample(contents, rng.randint(0, 3))
        if rng.random() < 0.2:
            conf["add_prefix_space"] = rng.choice([True, False, None])
        if rng.random() < 0.3:
            conf["legacy"] = rng.choice([True, False])
        files = {"config.json": {"model_type": rng.choice(kinds)}, "tokenizer_config.json": conf}
        if rng.random() < 0.2:
            files["special_tokens_map.json"] = {rng.choice(["pad_token", "eos_token"]): rng.choice([rng.choice(contents), {"content": rng.choice(contents), **flags()}])}
        if rng.random() < 0.2:
            files["added_tokens.json"] = {rng.choice(contents): rng.randint(0, 900)}
        yield f"random {k}", rng.choice(bases), files


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    many = random_folders(int(sys.argv[2])) if len(sys.argv) > 2 else folders()
    with open(out, "w") as f:
        f.write(json.dumps({"transformers": transformers.__version__}) + "\n")
        for name, base, files in many:
            with tempfile.TemporaryDirectory() as folder:
                spec = json.loads((GOLDEN / f"{base}.json").read_text())
                for n, content in {"tokenizer.json": spec, **files}.items():
                    pathlib.Path(folder, n).write_text(json.dumps(content))
                row = {"name": name, "base": base, "files": files}
                try:
                    t = AutoTokenizer.from_pretrained(folder)
                    row["cases"] = [[x, t.encode(x, add_special_tokens=False)] for x in TEXTS]
                    row["special"] = t.encode("a b")
                except Exception as e:
                    row["error"] = type(e).__name__
                    if len(sys.argv) <= 2:
                        print(name, repr(e)[:200], file=sys.stderr)
                f.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


main()
