# SPDX-License-Identifier: Apache-2.0
"""Asks an OpenAI server in the ways that clients do, and prints what the client made of
each answer as a JSON object, by scenario. The same must come out at an engine and
through Envoy: nothing but the base URL differs.

    python clients.py openai|openai-async|litellm|curl BASE_URL MODEL direct|envoy
"""
import asyncio
import json
import os
import subprocess
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from elsewhere

kind, base_url, model, way = sys.argv[1:5]
LONG = "Every block of a cache is named by all that stands before it. " * 12
TOOLS = [{
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a city, e.g. Zürich.",
        "parameters": {"type": "object", "properties": {"sky": {"type": "string", "enum": ["☀", "☁"]}}, "required": ["sky"]},
    },
}]
CHAT = {"model": model, "temperature": 0, "max_tokens": 12, "seed": 1}


def messages(text):
    return [{"role": "system", "content": LONG}, {"role": "user", "content": text}]


# What is asked: name, arguments of a chat.
CHATS = {
    "chat": {"messages": messages("Why? 👩‍💻 naïve 中文")},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "and so on"}]}]},
    "turns": {"messages": messages("a") + [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]},
    "tools": {"messages": messages("What is the weather?"), "tools": TOOLS},
    "calls": {"messages": messages("What is the weather?") + [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"sky": "☀"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ], "tools": TOOLS},
    "stop and limits": {"messages": messages("Stop."), "stop": ["qqqq"], "top_p": 0.5, "user": "me"},
}


def whole(r):
    c = r.choices[0]
    calls = [(t.function.name, t.function.arguments) for t in c.message.tool_calls or []]
    return [r.model, c.message.role, c.message.content, calls, c.finish_reason, r.usage.prompt_tokens, r.usage.completion_tokens]


def joined(chunks):
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    finish = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    usage = [(c.usage.prompt_tokens, c.usage.completion_tokens) for c in chunks if getattr(c, "usage", None)]
    return [text, finish, usage[-1:]]


def failure(e):
    return [type(e).__name__, getattr(e, "status_code", None)]


def openai_sync():
    import openai
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as c:
        yield "models", lambda: [m.id for m in c.models.list()]
        for name, args in CHATS.items():
            yield name, lambda: whole(c.chat.completions.create(**CHAT, **args))
            yield name + ", streamed", lambda: joined(list(c.chat.completions.create(**CHAT, **args, stream=True, stream_options={"include_usage": True})))
        yield "completion", lambda: c.completions.create(model=model, prompt=LONG, max_tokens=5, temperature=0, seed=1).choices[0].text
        yield "completion of ids", lambda: c.completions.create(model=model, prompt=[7] * 70, max_tokens=5, temperature=0, seed=1).choices[0].text
        yield "completion, streamed", lambda: "".join(x.choices[0].text for x in c.completions.create(model=model, prompt=LONG, max_tokens=5, temperature=0, seed=1, stream=True) if x.choices)
        # A call that is asked for by name. Simulated engines make none.
        forced = {**CHAT, "messages": messages("The weather, please."), "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 60}
        yield "forced call", lambda: [(t.function.name, t.function.arguments) for t in c.chat.completions.create(**forced).choices[0].message.tool_calls or []]
        yield "forced call, streamed", lambda: sorted({t.function.name for x in c.chat.completions.create(**forced, stream=True) if x.choices for t in x.choices[0].delta.tool_calls or [] if t.function.name})
        yield "raw response", lambda: c.chat.completions.with_raw_response.create(**CHAT, messages=messages("raw")).status_code
        yield "own headers", lambda: whole(c.chat.completions.create(**CHAT, messages=messages("headers"), extra_headers={"x-request-id": "mine", "x-session-id": "s"}, extra_body={"ignore_eos": True}))
        yield "large", lambda: c.chat.completions.create(model=model, max_tokens=1, messages=messages("word " * 600), user="u" * 100_000).usage.prompt_tokens
        yield "unknown model", lambda: c.chat.completions.create(model="nobody's", messages=messages("a"))
        yield "no messages", lambda: c.chat.completions.create(model=model, messages=[])
        yield "cancelled", lambda: cancel(c)


def cancel(c):
    stream = c.chat.completions.create(**{**CHAT, "max_tokens": 2000}, messages=messages("go on"), stream=True, extra_body={"ignore_eos": True})
    n = 0
    for _ in stream:
        n += 1
        if n == 3:
            break
    stream.close()
    return n


async def openai_async():
    import openai
    out = {}
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as c:
        async def stream(args):
            return joined([x async for x in await c.chat.completions.create(**CHAT, **args, stream=True, stream_options={"include_usage": True})])

        async def one(args):
            return whole(await c.chat.completions.create(**CHAT, **args))
        # All at once, on connections of one pool.
        for name, r in zip(CHATS, await asyncio.gather(*(one(a) for a in CHATS.values()), return_exceptions=True)):
            out[name] = failure(r) if isinstance(r, Exception) else r
        for name, r in zip(CHATS, await asyncio.gather(*(stream(a) for a in CHATS.values()), return_exceptions=True)):
            out[name + ", streamed"] = failure(r) if isinstance(r, Exception) else r
        try:
            await asyncio.wait_for(c.chat.completions.create(**{**CHAT, "max_tokens": 2000}, messages=messages("slowly"), extra_body={"ignore_eos": True}), 0.3)
            out["given up"] = "it was faster"
        except asyncio.TimeoutError:
            out["given up"] = "cancelled"
        out["after that"] = await one(CHATS["chat"])
    return out


def litellm_sync():
    import litellm
    litellm.telemetry = False
    common = {**CHAT, "model": "openai/" + model, "api_base": base_url, "api_key": "none", "num_retries": 0, "timeout": 120}
    for name, args in CHATS.items():
        yield name, lambda: whole(litellm.completion(**common, **args))
        yield name + ", streamed", lambda: joined(list(litellm.completion(**common, **args, stream=True, stream_options={"include_usage": True})))
    yield "async", lambda: whole(asyncio.run(litellm.acompletion(**common, messages=messages("async"))))
    yield "unknown model", lambda: litellm.completion(**{**common, "model": "openai/nobody"}, messages=messages("a"))


def curl():
    # HTTP/1.1, with the offer of HTTP/2, and HTTP/2 from the start. An engine has HTTP/1.1 only, so all requests to it use that.
    chats = {"chat": {"messages": messages("HTTP")}, "stream": {"messages": messages("HTTP"), "stream": True, "max_tokens": 4}, "wrong": {"messages": messages("a"), "model": "nobody's"}}
    for version in "--http1.1", "--http2", "--http2-prior-knowledge":
        flag = version if way == "envoy" else "--http1.1"
        for name, args in chats.items():
            yield f"{name} {version}", lambda: curl_once(flag, name, {**CHAT, **args})


def curl_once(flag, name, body):
    out = "\n%{http_code} %{content_type} %{http_version}"
    command = ["curl", "-sS", "-N", "--noproxy", "*", flag, "-w", out, "-H", "Content-Type: application/json", "-d", json.dumps(body), base_url + "/chat/completions"]
    text, _, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rpartition("\n")
    code, *content_type, version = status.split()
    if flag == "--http2-prior-knowledge" and version != "2":
        raise RuntimeError(f"HTTP {version}")
    if name == "wrong":  # kvroute and the engine have different texts
        return [code, content_type]
    return [code, content_type, [settled(line) for line in text.replace("data: ", "").split("\n") if line.strip()]]


def settled(line):
    """A line without the fields that differ in each response: ids, times, and cached tokens."""
    try:
        return {k: v for k, v in json.loads(line).items() if k not in ("id", "created", "usage", "system_fingerprint")}
    except ValueError:
        return line


def run(scenarios):
    out = {}
    for name, do in scenarios:
        try:
            out[name] = do()
        except Exception as e:  # what a client makes of an error is compared, too
            out[name] = failure(e)
    return out


out = asyncio.run(openai_async()) if kind == "openai-async" else run({"openai": openai_sync, "litellm": litellm_sync, "curl": curl}[kind]())
print(json.dumps(out))
