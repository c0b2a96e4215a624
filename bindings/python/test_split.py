# SPDX-License-Identifier: Apache-2.0

"""Tests the client against a running kvroute with a prefill worker and a decode worker:
python3 test_split.py URL MODEL."""

import sys
import unittest

from kvroute.client import KvPushRouter, RouterError

URL, MODEL = sys.argv.pop(1), sys.argv.pop(1)
PROMPT = list(range(1000, 1064))
OTHER = list(range(5000, 5064))
PREFILL, DECODE = 1, 2


class SplitTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.router = KvPushRouter(URL, MODEL, timeout=20)

    async def test_both_workers(self):
        r = self.router
        self.assertEqual(await r.best_worker(PROMPT), (DECODE, 0, 0))
        answer = await r.decide(PROMPT, request_id="both", worker_id=DECODE, prefill_worker_id=PREFILL, prefill_dp_rank=0)
        leg = answer["prefill"]
        self.assertEqual((answer["worker_id"], leg["worker_id"], leg["dp_rank"], leg["overlap_blocks"]), (DECODE, PREFILL, 0, 0))
        self.assertNotEqual(answer["address"], leg["address"])
        self.assertEqual(await self.pending(), 0, "the decode worker computes the prompt")
        await r.free(leg["request_id"])
        await r.mark_prefill_complete("both")
        await r.free("both")
        whole = await r.decide(OTHER, request_id="whole", routing_mode="aggregated")
        self.assertEqual((whole["worker_id"], whole.get("prefill")), (DECODE, None))
        self.assertEqual(await self.pending(), len(OTHER))
        await r.free("whole")

    async def pending(self):
        """Prefill tokens of the decode worker."""
        loads = {w["worker_id"]: w for w in await self.router.get_potential_loads([])}
        return loads[DECODE]["potential_prefill_tokens"]

    async def test_errors(self):
        for fields, status, param in (
            ({"prefill_dp_rank": 0}, 400, "prefill_dp_rank"),
            ({"prefill_worker_id": 9}, 400, "worker_id"),
            ({"routing_mode": "both"}, 400, "routing_mode"),
            ({"routing_mode": "disaggregated", "allowed_worker_ids": [DECODE]}, 503, None),
        ):
            with self.assertRaises(RouterError) as caught:
                await self.router.decide(PROMPT, **fields)
            self.assertEqual((caught.exception.status, caught.exception.param), (status, param))

    async def test_generate(self):
        for fields, text in (
            ({}, "of the decode worker after a leg"),
            ({"routing_mode": "disaggregated", "worker_id": DECODE, "prefill_worker_id": PREFILL}, "of the decode worker after a leg"),
            ({"routing_mode": "aggregated"}, "of the decode worker"),
            ({"stop_conditions": {"n": 2}}, "of the decode worker"),
        ):
            events = [event async for event in await self.router.generate([7, 8], **fields)]
            self.assertEqual(events[0]["choices"][0]["text"], text, fields)


if __name__ == "__main__":
    unittest.main()
