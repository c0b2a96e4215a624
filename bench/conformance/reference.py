# SPDX-License-Identifier: Apache-2.0
"""The reference's side of `make conformance`: answers one JSON request a line.

load   {"path"}                    a tokenizer.json, which later requests speak of
encode {"texts", "special"}        the ids of each text
time   {"texts"}                   seconds to encode all of them, one after the other
parse  {"template"}                a chat template, which later requests speak of
harmony {"requests", "date"}       for each chat request the ids of its gpt-oss prompt, or null if it is refused
render {"vars"}                    for each set of variables {"out"} or {"err": "Class: message"}; and the seconds
"""
import datetime
import json
import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../tools/golden"))

import harmony  # noqa: E402
import jinja2  # noqa: E402
import jinja2.ext  # noqa: E402
import tokenizers  # noqa: E402  (reads the environment)
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402


class Generation(jinja2.ext.Extension):
    """The block "generation", as if it were not there."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def environment(now):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = now.strftime
    return env


def render(template, variables):
    try:
        return {"out": template.render(**variables)}
    except RecursionError:
        return {"err": "RecursionError: "}
    except Exception as e:  # whatever the template does wrong is the answer
        return {"err": f"{type(e).__name__}: {e}"}


def prompts(render, requests):
    """The ids of each request, None for those that are refused."""
    out = []
    for r in requests:
        try:
            out.append(render(r))
        except ValueError:
            out.append(None)
    return out


def main() -> None:
    tok = template = None
    env = environment(datetime.datetime(2026, 8, 22, 12))
    for line in sys.stdin:
        r = json.loads(line)
        op = r["op"]
        if op == "load":
            tok = tokenizers.Tokenizer.from_file(r["path"])
            tok.no_truncation()
            tok.no_padding()
            out = {"version": tokenizers.__version__}
        elif op == "encode":
            out = {"ids": [tok.encode(t, add_special_tokens=r["special"]).ids for t in r["texts"]]}
        elif op == "time":
            start = time.perf_counter()
            for t in r["texts"]:
                tok.encode(t, add_special_tokens=False)
            out = {"seconds": time.perf_counter() - start}
        elif op == "parse":
            template = env.from_string(r["template"])
            out = {"version": jinja2.__version__}
        elif op == "render":
            start = time.perf_counter()
            outcomes = [render(template, v) for v in r["vars"]]
            out = {"outcomes": outcomes, "seconds": time.perf_counter() - start}
        elif op == "harmony":
            out = {"ids": prompts(lambda q: harmony.render(q, r["date"]), r["requests"])}
        else:
            out = {"error": f"unknown operation {op}"}
        print(json.dumps(out), flush=True)


main()
