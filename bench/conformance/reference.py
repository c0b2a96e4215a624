# SPDX-License-Identifier: Apache-2.0
"""The reference's side of `make conformance`: answers one JSON request a line.

load   {"path", "auto"}            a tokenizer.json or a file of Mistral's, which later requests speak of; with auto
                                   what transformers.AutoTokenizer makes of the file's folder, or {"error"}
files                              the files of Mistral's that the package mistral-common has inside
encode {"texts", "special"}        the ids of each text
time   {"others", "texts"}         seconds of CPU time to encode all texts, one after the other, after the others; also of a new fastokens,
                                   the first time and the second time, null if it cannot read the file
documents {"size", "count"}        parts of prose and of Python and Go code, from installed packages
parse  {"template"}                a chat template in the environment of transformers, which later requests speak of, or {"error"}
harmony {"requests", "date"}       for each chat request the ids of its gpt-oss prompt, or null if it is refused
mistral {"requests"}               the same, of its prompt with the loaded file of Mistral's
render {"vars"}                    for each set of variables {"out"} or {"err": "Class: message"}
"""
import datetime
import json
import os
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../tools/golden"))

import harmony  # noqa: E402
import mistral  # noqa: E402
import mistral_common  # noqa: E402
import tokenizers  # noqa: E402  (reads the environment)
import transformers.utils.chat_template_utils  # noqa: E402


def compiled(text, now):
    """A template in the environment of transformers, with a fixed time."""
    template = transformers.utils.chat_template_utils._compile_jinja_template(text)
    template.environment.globals["strftime_now"] = now.strftime
    return template


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


class Auto:
    """What engines load of a Hugging Face folder."""

    def __init__(self, path):
        self.model = transformers.AutoTokenizer.from_pretrained(os.path.dirname(path))

    def encode(self, text, add_special_tokens):
        return Encoding(self.model(text, add_special_tokens=add_special_tokens)["input_ids"])


def fastokens(path):
    """The file as fastokens reads it, False if it cannot."""
    import fastokens

    try:
        tok = fastokens.Tokenizer.from_file(path)
        tok.encode("a", add_special_tokens=False)  # the first text takes up to 200 ms
        return tok
    except ValueError as e:
        print(f"fastokens cannot read {os.path.basename(os.path.dirname(path))}: {e}", file=sys.stderr)
        return False


def encode_all(tok, texts):
    """The seconds that it takes."""
    start = time.process_time()
    for t in texts:
        tok.encode(t, add_special_tokens=False)
    return time.process_time() - start


def documents(size, count):
    """Parts of texts that people wrote: the Python reference, and the sources of Python's and Go's standard libraries."""
    import pydoc_data.topics

    def sources(folder, ending):
        found = []
        for root, folders, files in os.walk(folder):
            folders.sort()
            found += [os.path.join(root, f) for f in sorted(files) if f.endswith(ending)]
        # Some of all folders, and enough for all parts.
        out = []
        for f in found[:: max(1, len(found) // (2 * count))]:
            with open(f, encoding="utf-8", errors="ignore") as text:
                out.append(text.read(size))
        return "".join(out)

    goroot = subprocess.run(["go", "env", "GOROOT"], capture_output=True, text=True, check=True).stdout.strip()
    texts = {
        "prose": "\n\n".join(pydoc_data.topics.topics.values()),
        "Python": sources(os.path.dirname(os.__file__), ".py"),
        "Go": sources(os.path.join(goroot, "src"), ".go"),
    }
    return {kind: [t[k : k + size] for k in range(0, len(t) - size, size)][:count] for kind, t in texts.items()}


class Mistral:
    """A file of Mistral's in the place of a tokenizer.json."""

    def __init__(self, path):
        self.model = mistral.load(path)
        self.text = self.model.instruct_tokenizer.tokenizer

    def encode(self, text, add_special_tokens):
        return Encoding(self.text.encode(text, bos=add_special_tokens, eos=False))


def prompts(render, requests):
    """The ids of each request, None for those that are refused."""
    out = []
    for r in requests:
        try:
            out.append(render(r))
        except ValueError:
            out.append(None)
    return {"ids": out}


def main() -> None:
    tok = template = path = fast = None
    now = datetime.datetime(2026, 8, 22, 12)
    for line in sys.stdin:
        r = json.loads(line)
        op = r["op"]
        if op == "load":
            path, fast = r["path"], None
            out = {"version": tokenizers.__version__}
            if r.get("auto"):
                try:
                    tok = Auto(path)
                except Exception as e:  # whatever it does not load is the answer
                    out = {"error": f"{type(e).__name__}: {e}"}
            elif os.path.basename(path) == "tokenizer.json":
                tok = tokenizers.Tokenizer.from_file(path)
                tok.no_truncation()
                tok.no_padding()
            else:
                tok = Mistral(path)
        elif op == "encode":
            out = {"ids": [tok.encode(t, add_special_tokens=r["special"]).ids for t in r["texts"]]}
        elif op == "time":
            if fast is not False:
                fast = fastokens(path)
            encode_all(tok, r["others"])
            out = {"seconds": encode_all(tok, r["texts"]), "fast": None}
            if fast:
                encode_all(fast, r["others"])
                out["fast"] = encode_all(fast, r["texts"])
                out["fastWarm"] = encode_all(fast, r["texts"])
        elif op == "documents":
            out = documents(r["size"], r["count"])
        elif op == "parse":
            out = {}
            try:
                template = compiled(r["template"], now)
            except Exception as e:  # Jinja2 or Python cannot compile it
                out = {"error": str(e)}
        elif op == "render":
            out = {"outcomes": [render(template, v) for v in r["vars"]]}
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
