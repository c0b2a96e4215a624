# SPDX-License-Identifier: Apache-2.0

"""Tests the client against a running kvroute with two workers of a model without a
tokenizer in blocks of 16: python3 test_client.py URL MODEL."""

import asyncio
import json
import sys
import unittest
import warnings

from kvroute.client import KvPushRouter, RouterError

URL, MODEL = sys.argv.pop(1), sys.argv.pop(1)
PROMPT = list(range(1000, 1064))
OWN = list(range(5000, 5064))  # of the test that wants it unknown


class ClientTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.router = KvPushRouter(URL + "/", MODEL, timeout=20)

    async def loads(self, prompt=PROMPT):
        return {(w["worker_id"], w["dp_rank"]): w for w in await self.router.get_potential_loads(prompt)}

    async def test_manual(self):
        r = self.router
        idle = await self.loads(OWN)
        self.assertEqual(len(idle), 2)
        worker_id, dp_rank, overlap = await r.best_worker(OWN)
        self.assertIn((worker_id, dp_rank), idle)
        self.assertEqual(await self.loads(OWN), idle, "a question changes nothing")

        worker_id, dp_rank, overlap = await r.best_worker(OWN, request_id="manual")
        self.assertEqual(overlap, 0)
        busy = (await self.loads(OWN))[worker_id, dp_rank]
        self.assertEqual(busy["active_requests"], 1)
        with self.assertRaises(RouterError) as caught:
            await r.best_worker(OWN, request_id="manual")
        self.assertEqual((caught.exception.status, caught.exception.param), (409, "request_id"))
        await r.mark_prefill_complete("manual")
        done = (await self.loads(OWN))[worker_id, dp_rank]
        self.assertEqual(busy["potential_prefill_tokens"] - done["potential_prefill_tokens"], len(OWN))
        await r.free("manual")
        await r.free("manual")
        await r.mark_prefill_complete("nobody")
        self.assertEqual((await self.loads(OWN))[worker_id, dp_rank]["active_requests"], 0)

    async def test_best_worker_id(self):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            worker_id, overlap = await self.router.best_worker_id(PROMPT)
        self.assertIn(DeprecationWarning, [w.category for w in seen])
        self.assertIn((worker_id, 0), await self.loads())

    async def test_pins_and_overrides(self):
        for worker_id, dp_rank in await self.loads():
            got = await self.router.best_worker(PROMPT, worker_id=worker_id, dp_rank=dp_rank)
            self.assertEqual(got[:2], (worker_id, dp_rank))
        await self.router.best_worker(PROMPT, {"overlap_score_weight": 2.0, "router_temperature": 0.0})
        for override in {"overlap_score_weight": -1}, {"weight": 1}:
            with self.assertRaises(RouterError) as caught:
                await self.router.best_worker(PROMPT, router_config_override=override)
            self.assertEqual(caught.exception.status, 400)
            self.assertIn(next(iter(override)), str(caught.exception))
        with self.assertRaises(RouterError) as caught:
            await self.router.best_worker(PROMPT, worker_id=1)
        self.assertEqual(caught.exception.param, "worker_id")
        with self.assertRaises(RouterError) as caught:
            await KvPushRouter(URL, "no-such-model").best_worker(PROMPT)
        self.assertEqual((caught.exception.status, caught.exception.code), (404, "model_not_found"))

    async def test_generate(self):
        workers = await self.loads()
        for worker_id, dp_rank in workers:
            events = [
                event
                async for event in await self.router.generate(
                    PROMPT + [worker_id % 1000], MODEL, stop_conditions={"max_tokens": 3}, worker_id=worker_id
                )
            ]
            text = "".join(choice["text"] for event in events for choice in event["choices"])
            self.assertTrue(text, events)
        self.assertEqual({w["active_requests"] for w in (await self.loads()).values()}, {0})
        # What was computed is known after a moment, and dumped.
        for _ in range(200):
            dumped = json.loads(await self.router.dump_events())
            if {event["worker_id"] for event in dumped} >= {worker_id for worker_id, _ in workers}:
                break
            await asyncio.sleep(0.05)
        self.assertEqual([event["event"]["event_id"] for event in dumped], list(range(len(dumped))))
        self.assertTrue(all("stored" in event["event"]["data"] for event in dumped))
        self.assertEqual((await self.router.best_worker(PROMPT))[2], len(PROMPT) // 16)
        with self.assertRaises(ValueError):
            await self.router.generate(PROMPT, "another")

    async def test_leaving_early(self):
        stream = await self.router.generate(PROMPT, stop_conditions={"max_tokens": 2000}, request_id="early")
        async for _ in stream:
            break
        self.assertEqual(sum(w["active_requests"] for w in (await self.loads()).values()), 1)
        await stream.aclose()
        for _ in range(200):
            if sum(w["active_requests"] for w in (await self.loads()).values()) == 0:
                return
            await asyncio.sleep(0.05)
        self.fail("the request goes on")

    async def test_errors_of_the_connection(self):
        with self.assertRaises(OSError):
            await KvPushRouter("http://127.0.0.1:1", MODEL).best_worker(PROMPT)

    def test_without_asyncio(self):
        worker_id, _, _ = self.router.best_worker_sync(PROMPT)
        self.assertIn(worker_id, [w["worker_id"] for w in self.router.get_potential_loads_sync(PROMPT)])
        events = list(self.router.generate_sync(PROMPT, {"max_tokens": 1}))
        self.assertTrue(events)
        self.assertTrue(json.loads(self.router.dump_events_sync()))


if __name__ == "__main__":
    unittest.main(verbosity=2)
