# SPDX-License-Identifier: Apache-2.0
"""Writes what a front like that of vLLM and SGLang reads in odd bodies: python front_golden.py FILE

The front is FastAPI with a pydantic model that has the fields of an engine's chat request. It needs no server: the
script calls the application itself. Each line has a body in base64 and what the front reads in it: null if it refuses
the body. Each body has a field that steers.
"""
import asyncio, base64, codecs, contextlib, json, sys
from typing import Any

import fastapi, pydantic
from pydantic import BaseModel, ConfigDict

app = fastapi.FastAPI()


class StreamOptions(BaseModel):
    include_usage: bool | None = False


class Chat(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str | None = None
    messages: list[Any]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = None
    temperature: float | None = None
    cache_salt: list[str] | str | None = None
    priority: int = 0


reads = []


@app.post("/v1/chat/completions")
async def chat(r: Chat):
    reads.append({
        "model": r.model or "", "stream": bool(r.stream), "usage": bool(r.stream_options and r.stream_options.include_usage),
        "n": r.n or 0, "max_tokens": r.max_tokens or 0,
    })


def post(body, content_type="application/json"):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        pass

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions", "query_string": b"", "headers": [(b"content-type", content_type.encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "root_path": "",
    }
    asyncio.run(app(scope, receive, send))


REST = '"priority":7,"messages":[{"role":"user","content":"x"}]'
bodies = [b"", b"null", b"[]", b"{", b'{"messages":[1]} x']


def add(members):
    bodies.append(("{%s,%s}" % (members, REST)).encode("utf-8", "surrogatepass"))


booleans = ["true", "false", "null", "0", "1", "2", "-1", "-0", "1.0", "0.0", "-0.0", "1e0", "10e-1", "0.5", "NaN", "Infinity", "[]", "{}"]
booleans += [json.dumps(s) for s in "True TRUE tRuE False true false t T f F y Y n N yes YES no NO on ON On off OFF 1 0 2 01 1.0 maybe null none".split()]
booleans += ['""', '" true"', '"true "', '"\\u0074rue"', '"\u0131"', '"t\\u0000"', '"o\u017f"']
for v in booleans:
    add('"model":"m","stream":%s' % v)
    add('"model":"m","stream_options":{"include_usage":%s}' % v)
integers = "0 1 2 -2 2.0 2.5 2e0 20e-1 2e1 1e3 -0.0 1e400 4294967295 4294967296 9223372036854775808 true false null NaN Infinity -Infinity [] {}".split()
integers += ["9" * 400, "2." + "0" * 30, "1" + "0" * 25 + "e-25"]
integers += [json.dumps(s) for s in ["2", "+2", "-2", " 2", "2 ", "\t2\n", "\u00a02", "2.0", "2.00", "2.", ".0", "2.5", "2e0", "02", "0002", "1_0", "1__0", "_10", "10_", "1_0.0",
             "0x2", "\u0662", "", " ", "+", "--2", "+-2", "+ 2", "0", "-0", "true", "NaN", "9" * 30, "00", "2.0_0", "+02.0", "\u2003 2", "\x1c2", "\x0b2", "2\u200b", "_", "0_1"]]
for v in integers:
    add('"model":"m","n":%s' % v)
    add('"model":"m","max_tokens":%s' % v)
for v in ['"m"', "null", '""', "5", "true", '["m"]', '"\\ud800"', '"a\\u0000"']:
    add('"model":%s' % v)
for members in [
    '"model":"a","model":"m"', '"model":5,"model":"m"', '"stream":"maybe","stream":1', '"m\\u006fdel":"m","temperature":NaN', '"x":[NaN,-Infinity,Infinity,{"y":NaN}]',
    '"x":nan', '"x":+1', '"x":01', '"x":1.', '"x":.5', '"x":-', '"x":-NaN', '"x":"a\tb"', '"x":"\\x41"', "'x':1", '"x":1,', '"x":"\ud800"', '"x":"\\ud800\\ud800"', '"x":1e999',
    '"x":"\x7f\u0085"', '"x":/* */1', '"x":Inf', '"x":None', '"x":True', '"x":-Infinit', '"x":NaNN', '"x":' + "[" * 400 + "]" * 400, '"x":' + "[" * 960 + "]" * 960, '"x":' + '{"a":' * 960 + "1" + "}" * 960, '"x":' + "9" * 4000, '"cache_salt":5', '"cache_salt":["a","b"]', '"cache_salt":[]', '"cache_salt":""', '"\\u0070riority":9',
    '"model":"m","\u2028":1', '"":1',
]:
    add(members)
text = '{"model":"m\u00e9\u4e2d\U0001f600","stream":1,"n":"2",%s}' % REST
for coding in ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]:
    bodies.append(text.encode(coding))
bodies += [codecs.BOM_UTF16_BE + text.encode("utf-16-be"), codecs.BOM_UTF32_BE + text.encode("utf-32-be"), codecs.BOM_UTF8 * 2 + text.encode(), codecs.BOM_UTF16_LE * 2 + text.encode("utf-16-le")]
bodies += [text.encode("utf-16-le")[:-1], text.encode("utf-32-be")[:-2], text.encode("utf-16-le") + b"\0", b" " + text.encode("utf-8-sig"), text.encode("latin-1", "replace"), text.encode("utf-7")]
lone = ('{"model":"m\ud800","x":"\udc00\ud800",%s}' % REST)
bodies += [lone.encode(c, "surrogatepass") for c in ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le"]]
bodies += [("\t\n\r " + text + "\n").encode("utf-16-be"), ("\u00a0" + text).encode(), text.encode("utf-32-le")[:-4] + b"\0\0\x11\0", b"\0{", b"{\0", b"{}\0\0", b"\xff\xfe", b"\0\0\xfe\xff"]

types = ["", "; charset=utf-8", "; charset=UTF-8", '; charset="utf-8"', "; charset='utf-8'", '; charset=""', "; charset=", "; charset", ";charset = utf-8", "; charset=utf-8;", ";;charset=utf8",
         "; charset=utf-8; charset=utf-8", "; charset=utf-16", "; charset=us-ascii", '; boundary="x"', "; version=1", ' ; charset="UTF-8" ', "; charset*=utf-8", "; charset=latin-1", "; charset=cp037"]

with open(sys.argv[1], "w") as out:
    print(json.dumps({"fastapi": fastapi.__version__, "pydantic": pydantic.VERSION, "python": ".".join(map(str, sys.version_info[:2]))}), file=out)
    for body in bodies:
        reads.clear()
        with contextlib.suppress(ValueError):  # an error that has a NaN, or half a surrogate pair, has no reply
            post(body)
        print(json.dumps({"body": base64.b64encode(body).decode(), "reads": reads[0] if reads else None}), file=out)
    for t in types:
        reads.clear()
        post(b'{"model":"m",%s}' % REST.encode(), "application/json" + t)
        print(json.dumps({"type": "application/json" + t, "reads": reads[0] if reads else None}), file=out)
