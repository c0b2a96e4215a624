# SPDX-License-Identifier: Apache-2.0
"""The reference's side of `make conformance`: answers one JSON request a line.

load   {"path"}                    a tokenizer.json, which later requests speak of
encode {"texts", "special"}        the ids of each text
time   {"texts"}                   seconds to encode all of them, one after the other
"""
import json
import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tokenizers  # noqa: E402  (reads the environment)


def main() -> None:
    tok = None
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
        else:
            out = {"error": f"unknown operation {op}"}
        print(json.dumps(out), flush=True)


main()
