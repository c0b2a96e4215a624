# SPDX-License-Identifier: Apache-2.0
"""The reference's side of `make conformance`: answers one JSON request a line. Seconds are of CPU time.

load   {"path"}                    a tokenizer.json or a file of Mistral's, which later requests speak of
files                              the files of Mistral's that the package mistral-common has inside
encode {"texts", "special"}        the ids of each text, and the seconds
time   {"texts"}                   seconds to encode all of them, one after the other
parse  {"template"}                a chat template, which later requests speak of
harmony {"requests", "date"}       for each chat request the ids of its gpt-oss prompt, or null if it is refused; and the seconds
mistral {"requests"}               the same, of its prompt with the loaded file of Mistral's
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
import mistral  # noqa: E402
import mistral_common  # noqa: E402
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


class Encoding:
    def __init__(self, ids):
        self.ids = ids


class Mistral:
    """A file of Mistral's in the place of a tokenizer.json."""

    def __init__(self, path):
        self.model = mistral.load(path)
        self.text = self.model.instruct_tokenizer.tokenizer

    def encode(self, text, add_special_tokens):
        return Encoding(self.text.encode(text, bos=add_special_tokens, eos=False))


def prompts(render, requests):
    """The ids of each request, None for those that are refused; and the seconds."""
    out = []
    start = time.process_time()
    for r in requests:
        try:
            out.append(render(r))
        except ValueError:
            out.append(None)
    return {"ids": out, "seconds": time.process_time() - start}


def main() -> None:
    tok = template = None
    env = environment(datetime.datetime(2026, 8, 22, 12))
    for line in sys.stdin:
        r = json.loads(line)
        op = r["op"]
        if op == "load":
            if os.path.basename(r["path"]) == "tokenizer.json":
                tok = tokenizers.Tokenizer.from_file(r["path"])
                tok.no_truncation()
                tok.no_padding()
            else:
                tok = Mistral(r["path"])
            out = {"version": tokenizers.__version__}
        elif op == "encode":
            start = time.process_time()
            encoded = [tok.encode(t, add_special_tokens=r["special"]) for t in r["texts"]]
            out = {"seconds": time.process_time() - start, "ids": [e.ids for e in encoded]}
        elif op == "time":
            start = time.process_time()
            for t in r["texts"]:
                tok.encode(t, add_special_tokens=False)
            out = {"seconds": time.process_time() - start}
        elif op == "parse":
            template = env.from_string(r["template"])
            out = {"version": jinja2.__version__}
        elif op == "render":
            start = time.process_time()
            outcomes = [render(template, v) for v in r["vars"]]
            out = {"outcomes": outcomes, "seconds": time.process_time() - start}
        elif op == "files":
            data = os.path.join(os.path.dirname(mistral_common.__file__), "data")
            out = {"files": [os.path.join(data, f) for f in sorted(os.listdir(data))]}
        elif op == "mistral":
            out = prompts(lambda q: mistral.render(tok.model, q), r["requests"])
        elif op == "harmony":
            out = prompts(lambda q: harmony.render(q, r["date"]), r["requests"])
        else:
            out = {"error": f"unknown operation {op}"}
        print(json.dumps(out), flush=True)


main()
