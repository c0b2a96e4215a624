# SPDX-License-Identifier: Apache-2.0

"""Tests the client against a running kvroute with two workers of a model without a
tokenizer in blocks of 16: python3 test_client.py URL MODEL."""

import asyncio
import json
import os
import sys
import unittest
import warnings

from kvroute.client import KvPushRouter, KvRouter, RouterError

URL, MODEL = sys.argv.pop(1), sys.argv.pop(1)
PROMPT = list(range(1000, 1064))
OWN = list(range(5000, 5064))  # of the test that wants it unknown


class ClientTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.router = KvPushRouter(URL + "/", MODEL, timeout=20)

    def test_names(self):
        self.assertIs(KvRouter, KvPushRouter)

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
            self.assertEqual(len([i for event in events for i in event["token_ids"]]), 3, events)
            # The order of arguments is the original's.
            stream = await self.router.generate(PROMPT, MODEL, {"max_tokens": 2}, {"temperature": 0}, None, None, worker_id, dp_rank)
            self.assertEqual(sum([1 for event in [event async for event in stream] if event["choices"][0]["text"]]), 2)
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
        matches = await self.router.find_matches_for_request(PROMPT)
        self.assertEqual(matches.scores, {worker_id: len(PROMPT) // 16 for worker_id, _ in workers})
        self.assertEqual((await self.router.find_matches_for_request([99999] * 64)).scores, {})
        with self.assertRaises(RouterError) as caught:
            await self.router.find_matches_for_request(PROMPT, "no-such-adapter")
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(ValueError):
            await self.router.generate(PROMPT, "another")

    async def test_operations_of_a_client(self):
        r = self.router
        workers = [worker_id for worker_id, _ in await self.loads()]

        async def serves(events):
            """The worker of a request."""
            async with events as stream:
                async for _ in stream:
                    return [w["worker_id"] for w in (await self.loads()).values() if w["active_requests"]]

        request = {"token_ids": PROMPT, "model": MODEL, "stop_conditions": {"max_tokens": 100_000}, "sampling_options": {"temperature": 0.7}}
        served = []
        for _ in range(4):
            served += await serves(await r.round_robin(request))
            await self.ends("round_robin")
        self.assertEqual(served, workers * 2)
        for worker_id in reversed(workers):
            self.assertEqual(await serves(await r.direct(request, worker_id)), [worker_id])
            await self.ends("direct")
        served = set()
        for _ in range(200):
            served.update(await serves(await r.random(request)))
            await self.ends("random")
            if len(served) == len(workers):
                break
        self.assertEqual(served, set(workers))
        with self.assertRaises(RouterError) as caught:
            await r.direct(request, 1)
        self.assertEqual(caught.exception.param, "worker_id")

    async def active(self):
        return sum(w["active_requests"] for w in (await self.loads()).values())

    async def ends(self, what):
        """Waits until no request holds a slot."""
        for _ in range(400):
            if await self.active() == 0:
                return
            await asyncio.sleep(0.05)
        self.fail(f"{what}: the request goes on")

    def connections(self):
        """Connections of this process to the router."""
        port = f":{int(URL.rsplit(':', 1)[1]):04X}"
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in table][1:]
        own = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                own.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                pass  # the one of the listing itself
        return sum(row[2].endswith(port) and f"socket:[{row[9]}]" in own for row in rows)

    async def test_leaving_early(self):
        async def leave(stream):
            await stream.aclose()

        async def close(stream):
            stream.close()

        async def manage(stream):
            async with stream:
                pass

        async def cancel(stream):
            # The reader is inside of a wait for the next event.
            async def read():
                async for _ in stream:
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.05)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task

        for name, leaves in {"aclose": leave, "close": close, "async with": manage, "cancel": cancel}.items():
            stream = await self.router.generate(PROMPT, stop_conditions={"max_tokens": 100_000}, request_id="early " + name)
            self.assertEqual(await self.active(), 1, name)
            async for _ in stream:
                break
            self.assertEqual(self.connections(), 1, name)
            await leaves(stream)
            await leaves(stream) if name != "cancel" else await stream.aclose()
            with self.assertRaises(StopAsyncIteration):
                await stream.__anext__()
            self.assertEqual(self.connections(), 0, name)
            await self.ends(name)

    async def test_closing_wakes_the_reader(self):
        stream = await self.router.generate(PROMPT, stop_conditions={"max_tokens": 100_000})

        async def read():
            return sum([1 async for _ in stream])

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        await stream.aclose()
        self.assertGreaterEqual(await asyncio.wait_for(task, 10), 0)
        await self.ends("a reader")

    async def test_cancelled_before_it_is_routed(self):
        task = asyncio.create_task(self.router.generate(PROMPT, stop_conditions={"max_tokens": 100_000}))
        await asyncio.sleep(0)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        await self.ends("a cancelled question")

    def test_leaving_early_without_asyncio(self):
        with self.router.generate_sync(PROMPT, {"max_tokens": 100_000}) as events:
            self.assertTrue(next(events))
            self.assertEqual(self.connections(), 1)
        self.assertEqual(list(events), [])
        self.assertEqual(self.connections(), 0)
        del events
        events = self.router.generate_sync(PROMPT, {"max_tokens": 100_000})
        next(events)
        del events  # nobody knows of it any more
        self.assertEqual(self.connections(), 0)
        asyncio.run(self.ends("without asyncio"))

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
