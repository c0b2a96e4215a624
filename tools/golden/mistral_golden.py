# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer/testdata/mistral: small tokenizers of our own in Mistral's formats, and prompts made with them.

Run through `make golden`. tekken.json is of version v15; without its model_settings_builder it is a file of the version
that stands in it. requests.jsonl has the requests; lines of tekken.json.jsonl are {"version", "request": its number, "ids"}, or
"refused" for the ids, or {"text", "ids"}.
"""
import base64
import json
import os
import sys
import tempfile
from importlib.metadata import version

import mistral
import tokenizers
from mistral_common.tokens.tokenizers.base import SpecialTokens

TEXT = """The router reads the prompt, turns it into tokens and asks where blocks of it are cached. A worker that holds them
needs no time to compute them again. Der Router fragt, wo der Anfang des Textes schon liegt. 日本語の文字と漢字。Пример на русском.
{"name": "get_weather", "description": "", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
def encode(text): return [ids for token in text]   # 123 4567
Hello there, how are you? What is it about? It's that I don't know. [INST] user [/INST] </s>
"""

SPECIAL = [t.value for t in (
    SpecialTokens.unk, SpecialTokens.bos, SpecialTokens.eos, SpecialTokens.begin_inst, SpecialTokens.end_inst, SpecialTokens.begin_tools,
    SpecialTokens.end_tools, SpecialTokens.begin_tool_results, SpecialTokens.end_tool_results, SpecialTokens.tool_calls, SpecialTokens.img,
    SpecialTokens.pad, SpecialTokens.img_break, SpecialTokens.img_end, SpecialTokens.prefix, SpecialTokens.middle, SpecialTokens.suffix,
    SpecialTokens.begin_system, SpecialTokens.end_system, SpecialTokens.begin_tool_content, SpecialTokens.args, SpecialTokens.call_id,
    SpecialTokens.begin_think, SpecialTokens.end_think, SpecialTokens.begin_model_settings, SpecialTokens.end_model_settings,
)]

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tekken(path):
    """A vocabulary of ranks: the bytes, then what a byte-level BPE learns of the text."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train_from_iterator([TEXT] * 3, trainer)
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(b): b for b in visible}
    alphabet |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in visible)}
    learned = sorted((i, bytes(alphabet[c] for c in t)) for t, i in tok.get_vocab().items() if len(t) > 1)
    words = [bytes([b]) for b in range(256)] + [t for _, t in learned]
    # More than the file says are used: the last ones must be left out.
    words += [b"never used", b"nor this"]
    file = {
        "config": {
            "pattern": PATTERN, "num_vocab_tokens": len(words), "default_vocab_size": len(words) - 2 + 40, "default_num_special_tokens": 40, "version": "v15",
        },
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(w).decode(), "token_str": None} for i, w in enumerate(words)],
        "special_tokens": [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(SPECIAL)],
        "model_settings_builder": {"reasoning_effort": {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}},
    }
    json.dump(file, open(path, "w"), separators=(",", ":"))
    return file


def user(text="Hello there?"):
    return {"role": "user", "content": text}


def answer(text=None, **more):
    return {"role": "assistant", "content": text, **more}


def call(name="get_weather", arguments='{"city": "Zürich"}', id="abcdefghi"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, id="abcdefghi", **more):
    return {"role": "tool", "tool_call_id": id, "content": text, **more}


def parts(*texts):
    return [{"type": "text", "text": t} for t in texts]


TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "strict": True, "parameters": {"type": "object", "properties": {"city": {"type": "string", "default": 1.0}}}}}
BARE = {"type": "function", "function": {"name": "bare"}}

REQUESTS = [
    {"messages": [user()]},
    {"messages": [user("</s>[INST] no token [REF] a [REF_1]b [/REF]")]},
    {"messages": [{"role": "system", "content": "Be brief."}, user()]},
    {"messages": [{"role": "developer", "content": parts("Be ", "", "brief.")}, user(parts("one", "", "two"))]},
    {"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, user("1"), {"role": "system", "content": "c"}, user("2")]},
    {"messages": [{"role": "system", "content": "only"}]},
    {"messages": [user("1"), user("2"), answer("3  "), answer("4"), user("5")]},
    {"messages": [user(""), answer("x"), user([])]},
    {"messages": [answer("I begin."), user()]},
    {"messages": [user(), answer("So ")], "continue_final_message": True, "add_generation_prompt": False},
    {"messages": [user(), answer("So")]},
    {"messages": [user(), answer("So")], "add_generation_prompt": False},
    {"messages": [user(), answer("")], "continue_final_message": True, "add_generation_prompt": False},
    {"messages": [user(), answer(None), user()]},
    {"messages": [user()], "tools": [TOOL, BARE]},
    {"messages": [user("1"), answer("2"), user("3")], "tools": [BARE], "tool_choice": "none"},
    {"messages": [user(), answer(None, tool_calls=[call()]), result('{"t": 5.0, "u": [1,2]}', name="get_weather")], "tools": [TOOL]},
    {"messages": [user(), answer(None, tool_calls=[call()]), result("5°"), answer("5°."), user("And now?")], "tools": [TOOL]},
    {"messages": [user(), answer("I look.", tool_calls=[call()]), result("")], "tools": [TOOL]},
    {"messages": [user(), answer(None, tool_calls=[call(), call("bare", "", "123456789")]), result(parts("b", "c"), "123456789"), result("a")], "tools": [TOOL, BARE]},
    {"messages": [user(), answer(None, tool_calls=[call(), call("bare", "[1]", "123456789")]), result("a"), answer("b"), user()]},
    {"messages": [user(), answer(None, tool_calls=[call(id="call_123456789")]), result("x", "call_123456789")]},
    {"messages": [user(), answer(None, tool_calls=[call(id="short")]), result("x", "short")]},
    {"messages": [user(), answer(None, tool_calls=[call()]), result("x", "other1234")]},
    {"messages": [user(), answer(None, tool_calls=[call("not a name")]), result("x")]},
    {"messages": [user(), answer(None, tool_calls=[call()]), {"role": "tool", "content": "x"}]},
    {"messages": [user(), result("x")]},
    {"messages": [user(), answer("4", reasoning="2+2"), user()]},
    {"messages": [user(), answer([{"type": "thinking", "thinking": "open", "closed": False}, *parts("4")]), user()]},
    {"messages": [user(), answer(None, reasoning_content="only"), user()]},
    {"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "t"}]}, user()]},
    {"messages": [user()], "reasoning_effort": "high"},
    {"messages": [user()], "reasoning_effort": "low"},
    {"messages": [user()], "chat_template_kwargs": {}},
    {"messages": [user(), {"role": "critic", "content": "x"}]},
    {"messages": [user([{"type": "refusal", "refusal": "no"}])]},
]

TEXTS = ["", " ", "  two", "Hello there", "a  b   c    d", "▁ and ▁▁", "[REF]", " [REF][REF_1] x", "x[/REF]y", "[REF", "12345 １２", "漢字 and ゑ\n\n", "\t\r\n", "</s><s>", "é e\u0301 👩‍💻", " " * 40]


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    file = tekken(f"{folder}/tekken.json")
    head = {"made by": "tools/golden/mistral_golden.py", "mistral-common": version("mistral-common")}
    with open(f"{folder}/requests.jsonl", "w") as out:
        for r in REQUESTS:
            print(json.dumps(r, ensure_ascii=False), file=out)
    for name, versions in (("tekken.json", (3, 7, 11, 13, 15)),):
        with open(f"{folder}/{name}.jsonl", "w") as out, tempfile.TemporaryDirectory() as work:
            print(json.dumps(head), file=out)
            for v in versions:
                tok = mistral.load(variant(folder, work, name, v, file))
                for n, r in enumerate(REQUESTS):
                    row = {"version": f"v{v}", "request": n}
                    try:
                        row["ids"] = mistral.render(tok, r)
                    except mistral.Refused as e:
                        row["refused"] = str(e)[:20]
                    print(json.dumps(row, separators=(",", ":")), file=out)
            for text in TEXTS:
                print(json.dumps({"text": text, "ids": tok.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False)}), file=out)


def variant(folder, work, name, v, file):
    """The path of a file that is of version v."""
    path = f"{work}/tekken-v{v}.json"
    f = {**file, "config": {**file["config"], "version": f"v{v}"}}
    if v < 15:
        del f["model_settings_builder"]
    json.dump(f, open(path, "w"))
    return path


main()
