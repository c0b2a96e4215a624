# SPDX-License-Identifier: Apache-2.0
"""Dynamo's own index, fed with the messages of its event plane: a line with an envelope
in hex is applied and not answered, an empty line is answered by the tree as JSON. An event
that the tree refuses is dropped, as Dynamo's routers do."""
import json
import sys

import msgspec
from dynamo.llm import RadixTree

tree = RadixTree()
for line in sys.stdin:
    if line.strip():
        envelope = msgspec.msgpack.decode(bytes.fromhex(line))
        payload = msgspec.msgpack.decode(envelope["payload"])
        for event in payload if isinstance(payload, list) else [payload]:
            try:
                tree.apply_event(event["worker_id"], json.dumps(event["event"]).encode())
            except RuntimeError as refused:
                print(refused, file=sys.stderr)
    else:
        print("[" + ",".join(tree.dump_tree_as_events()) + "]", flush=True)
