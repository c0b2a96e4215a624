# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer/chat/testdata/deepseek.jsonl: chat requests, and the prompts of DeepSeek V3.2 and V4 that vLLM makes of them.

Run it with a Python that has vLLM: `.cache/vllm/bin/python tools/golden/deepseek_golden.py` (tools/vllm.sh installs it). The
encoders of vLLM 0.32.0 and 0.33.0 are equal. A prompt is null if vLLM refuses the request.
"""

import json
import os
from importlib.metadata import version
from types import SimpleNamespace

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.tokenizers import deepseek_v4, deepseek_v32


class Tokenizer:
    """What the wrappers of vLLM need of a tokenizer."""

    def get_added_vocab(self):
        return {}


MODELS = {
    "deepseek_v32": (deepseek_v32.get_deepseek_v32_tokenizer(Tokenizer()), "string"),
    "deepseek_v4": (deepseek_v4.get_deepseek_v4_tokenizer(Tokenizer()), "openai"),
}


def user(content, **more):
    return {"role": "user", "content": content, **more}


def answer(content, *calls, **more):
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": a}} for i, a in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {}), **more}


def result(content, call):
    return {"role": "tool", "tool_call_id": call, "content": content}


TOOLS = [{"type": "function", "function": {"name": "f", "description": "Finds é.", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
ARGUMENTS = '{"a": 1.50, "b": "x\\ny", "c": [1, null, true], "d": {"z": 1e5, "e": "é"}, "n": 12345678901234567890}'
AGENT = [user("hi"), answer("yo", ("1", ARGUMENTS), ("2", "{}"), reasoning="Why?"), result("second", "2"), result(PARTS, "1")]

REQUESTS = [
    {"messages": [user("hi")]},
    {"messages": [SYSTEM, user(PARTS), answer("yo", reasoning="Why?"), user("x <think> </think>")]},
    {"messages": [user("hi"), answer("yo", reasoning_content="Why?")]},
    {"messages": [user("hi"), answer("yo")], "reasoning_effort": "high"},
    *[{"messages": [SYSTEM, user("hi")], "reasoning_effort": e} for e in ("none", "low", "medium", "high", "max")],
    *[{"messages": [user("a"), answer("b", reasoning="r"), user("c")], "chat_template_kwargs": k} for k in (
        {"thinking": True}, {"thinking": False}, {"enable_thinking": True}, {"thinking": None}, {"thinking": "auto"},
        {"thinking": True, "drop_thinking": False}, {"thinking": True, "reasoning_effort": "max"}, {"thinking": 1, "enable_thinking": 0},
    )],
    {"messages": AGENT, "tools": TOOLS},
    {"messages": AGENT, "tools": TOOLS, "chat_template_kwargs": {"thinking": True}},
    {"messages": [*AGENT, user("go on")], "tools": TOOLS, "reasoning_effort": "low"},
    {"messages": [*AGENT, answer("done", reasoning="r"), user("go on")], "chat_template_kwargs": {"thinking": True}},
    {"messages": [SYSTEM, *AGENT[:3]], "tools": TOOLS},
    {"messages": [*AGENT, result("of no call", "3")], "tools": TOOLS},
    {"messages": [user("hi"), SYSTEM, user("x")], "tools": TOOLS},
    {"messages": [user("hi"), SYSTEM, answer("y"), user("x"), user("z")]},
    {"messages": [user("hi"), SYSTEM]},
    {"messages": [{"role": "developer", "content": "Dev", "tools": TOOLS}, user("hi")]},
    {"messages": [{"role": "developer", "content": "Dev"}, user("hi")], "chat_template_kwargs": {"thinking": True}},
    {"messages": [{"role": "developer", "content": ""}, user("hi")]},
    {"messages": [user("hi", task="title")]},
    {"messages": [user("hi", task="action"), answer("x"), user("y", task="query"), user("z")]},
    {"messages": [user("hi", task="unknown")]},
    {"messages": [user("hi"), {"role": "latest_reminder", "content": "now"}, answer("x"), user("y")]},
    {"messages": [{"role": "critic", "content": "no"}, user("hi")]},
    {"messages": [user("hi"), answer(None, ("1", "no JSON")), result("", "1")], "tools": TOOLS, "tool_choice": "none"},
]


def prompt(model, body):
    tokenizer, content = MODELS[model]
    try:
        q = ChatCompletionRequest.model_validate(json.loads(json.dumps({"model": "m", **body})))
        config = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False, hf_config=SimpleNamespace(model_type=model))
        conversation, _, _ = parse_chat_messages(q.messages, config, content_format=content)
        tools = [t.model_dump() for t in q.tools] if q.tools else None
        params = q.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False})
        return tokenizer.apply_chat_template(conversation=conversation, messages=q.messages, **params.get_apply_chat_template_kwargs())
    except (ValueError, TypeError):
        return None


def main():
    folder = os.path.join(os.path.dirname(__file__), "../../tokenizer/chat/testdata")
    with open(os.path.join(folder, "deepseek.jsonl"), "w", encoding="utf-8") as out:
        out.write(json.dumps({"made by": "tools/golden/deepseek_golden.py", "vllm": version("vllm")}) + "\n")
        for body in REQUESTS:
            line = {"request": body, "prompts": {m: prompt(m, body) for m in MODELS}}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


main()
