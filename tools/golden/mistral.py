# SPDX-License-Identifier: Apache-2.0
"""Prompts as vLLM 0.32 makes them in mistral tokenizer mode, from the package that it uses for that (mistral-common).

What happens to a request before the package sees it is written here anew, since vLLM itself is too large to have at
hand; `make test-interop` compares with the real one.
"""
import json

from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer


class Refused(ValueError):
    pass


def load(path):
    return MistralTokenizer.from_file(path, mode=ValidationMode.test)


def arguments(text):
    """The arguments of a call as the object that their text is, {} if it is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def message(m):
    m = dict(m)
    if m["role"] != "assistant" and m["role"] != "tool" and m.get("content") is None:
        raise Refused("no content")
    thought = m.pop("reasoning_content", None)
    if m.get("reasoning") is None and thought is not None:
        m["reasoning"] = thought
    if m["role"] == "assistant":
        calls = []
        for c in m.get("tool_calls") or []:
            f = c["function"]
            calls.append({**c, "id": c["id"][-9:], "function": {**f, "arguments": arguments(f["arguments"])}})
        m["tool_calls"] = calls
    if m["role"] == "tool" and m.get("tool_call_id") is not None:
        m["tool_call_id"] = m["tool_call_id"][-9:]
    return m


def tool(t):
    f = t["function"]
    return {"type": "function", "function": {"name": f["name"], "description": f.get("description"), "parameters": f.get("parameters")}}


def render(tokenizer, request):
    """The ids of a chat request's prompt."""
    if request.get("chat_template_kwargs") is not None:
        raise Refused("chat_template_kwargs")
    messages = [message(m) for m in request["messages"]]
    tools = request.get("tools")
    resume = request.get("continue_final_message", False)
    generate = request.get("add_generation_prompt", True)
    if resume and generate or generate and messages[-1]["role"] == "assistant" or resume and messages[-1]["role"] != "assistant":
        raise Refused("the last message")
    more = {}
    if tokenizer.instruct_tokenizer.tokenizer.version.version_num >= 15:
        more["reasoning_effort"] = request.get("reasoning_effort")
    try:
        r = ChatCompletionRequest.from_openai(messages=messages, tools=None if tools is None else [tool(t) for t in tools], continue_final_message=resume, **more)
        return tokenizer.encode_chat_completion(r).tokens
    except (AssertionError, MistralCommonException, ValueError, KeyError) as e:
        raise Refused(f"{type(e).__name__}: {str(e)[:60]}") from e


def names(tokenizer):
    """The control tokens by their ids."""
    t = tokenizer.instruct_tokenizer.tokenizer
    return {i: t.id_to_piece(i) for i in range(t.n_words) if t.is_special(i)}


def pieces(tokenizer, ids):
    """The prompt as control tokens (by their texts, in a list of their own) and the number of ids between them."""
    control, out = names(tokenizer), []
    for i in ids:
        if i in control:
            out.append([control[i]])
        elif out and isinstance(out[-1], int):
            out[-1] += 1
        else:
            out.append(1)
    return out
