# SPDX-License-Identifier: Apache-2.0
"""Answers each request with the token ids that SGLang's own classes make of it.

Arguments: the folder with SGLang's Python files, the folder of the model, names of SGLang's settings and their values in JSON. A question is a line {"path": ..., "body": ...}, an
answer {"ids": [...]} or {"error": ...}. The modules that make prompts are SGLang's; stand-ins replace all others, which need a GPU.
"""

import asyncio
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import types
from unittest.mock import MagicMock

root, model, *flags = sys.argv[1:]
REAL = tuple(
    "sglang.srt." + name
    for name in (
        "entrypoints.openai",
        "entrypoints.anthropic",
        "entrypoints.request_headers",
        "entrypoints.harmony_utils",
        "parser",
        "function_call",
        "environ",
    )
)
PACKAGES = ("sglang", "sglang.srt", "sglang.srt.entrypoints")


class StandInClass(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class StandIn(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value = StandInClass(name, (), {"__init__": lambda self, *a, **k: None})
        else:
            value = MagicMock(name=name)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] != "sglang":
            return None
        if any(name == r or name.startswith(r + ".") for r in REAL):
            return importlib.machinery.PathFinder.find_spec(name, [os.path.join(root, *name.split(".")[:-1])])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        if spec.name not in PACKAGES:
            return StandIn(spec.name)
        module = types.ModuleType(spec.name)
        module.__path__ = [os.path.join(root, *spec.name.split("."))]
        return module

    def exec_module(self, module):
        pass


class Settings:
    """Settings that are None unless they are given."""

    def __init__(self, **given):
        self.__dict__.update(given)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


sys.meta_path.insert(0, Finder())
logging.disable(logging.CRITICAL)
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.template_manager import TemplateManager
from transformers import AutoTokenizer

settings = Settings(disaggregation_mode="null", **dict(zip(flags[::2], map(json.loads, flags[1::2]))))
for name, module in list(sys.modules.items()):
    if name.startswith("sglang."):
        for getter in ("get_serving", "get_model", "get_disagg"):
            if getter in vars(module) or name == "sglang.srt.runtime_context":
                setattr(module, getter, lambda: settings)
tokenizer = AutoTokenizer.from_pretrained(model)
with open(os.path.join(model, "config.json")) as f:
    config = Settings(**json.load(f))
manager = Settings(
    tokenizer=tokenizer,
    model_path=model,
    served_model_name="model",
    server_args=settings,
    config_value=lambda name: None,
    model_config=Settings(hf_config=config, is_multimodal=False, get_default_sampling_params=lambda: {}),
)
templates = TemplateManager()
templates.initialize_templates(manager, model)
chat = OpenAIServingChat(manager, templates)
responses = OpenAIServingResponses(manager, templates)
messages = AnthropicServing(chat)


def chat_ids(request):
    error = chat._validate_request(request)
    if error:
        raise ValueError(error)
    # The part of _convert_to_internal_request that stands before _process_messages.
    effort = request.chat_template_kwargs.pop("reasoning_effort", None) if request.chat_template_kwargs else None
    if chat.is_gpt_oss and effort == "none":
        raise ValueError(effort)
    if effort is not None:
        request.reasoning_effort = effort
    return chat._process_messages(request, False).prompt_ids


def ids(path, body):
    if path == "/v1/chat/completions":
        return chat_ids(protocol.ChatCompletionRequest(**body))
    if path == "/v1/messages":
        return chat_ids(messages._convert_to_chat_completion_request(AnthropicMessagesRequest(**body)))
    if path == "/v1/responses":
        request = protocol.ResponsesRequest(**body)
        if responses.use_harmony:
            return responses._make_request_with_harmony(request, None)[2][0]
        return asyncio.run(responses._make_request(request, None, tokenizer))[2][0]
    prompt = protocol.CompletionRequest(**body).prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):  # the longest, as kvroute
        prompt = max(prompt, key=lambda p: len(p.encode()) if isinstance(p, str) else len(p))
    return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


for line in sys.stdin:
    question = json.loads(line)
    try:
        answer = {"ids": list(ids(question["path"], question["body"]))}
    except Exception as e:
        answer = {"error": f"{type(e).__name__}: {e}"[:300]}
    print(json.dumps(answer), flush=True)
