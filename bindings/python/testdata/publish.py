# SPDX-License-Identifier: Apache-2.0
"""Publishes the blocks of a prompt as it is told to on standard input, as publish.c of the C library does."""

import json
import sys

from kvroute import KvEventPublisher, PublisherError


def main() -> None:
    config, size = json.loads(sys.argv[1]), int(sys.argv[2])
    with open(sys.argv[3]) as file:
        ids = [int(line) for line in file]
    blocks = len(ids) // size
    hashes = [-1 - i for i in range(blocks)]  # signed, as engines write them
    publisher = KvEventPublisher(**config)
    print("ok", blocks, flush=True)
    for line in sys.stdin:
        word = line.strip()
        try:
            told = 0
            if word == "stored":
                half = blocks // 2  # in two calls: the second one names its parent
                told = publisher.publish_stored(ids[: half * size], [size] * half, hashes[:half], None)
                told += publisher.publish_stored(ids[half * size : blocks * size], [size] * (blocks - half), hashes[half:], hashes[half - 1])
            elif word == "removed":
                publisher.publish_removed([hashes[-1]])
            elif word == "cleared":
                publisher.publish_cleared()
            elif word == "wrong":
                publisher.publish_stored([1] * (size - 1), [size], [1])
            elif word == "quit":
                publisher.set_load(running=1, waiting=2, kv_used_blocks=3, kv_utilization=0.5)
                publisher.shutdown()
                publisher.shutdown()
            print("ok", told, flush=True)
        except (PublisherError, ValueError) as err:
            print("error", err, flush=True)
        if word == "quit":
            return


main()
