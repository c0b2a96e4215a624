# SPDX-License-Identifier: Apache-2.0

"""A client of a running kvroute router, with the method names, the order of arguments
and the return values of NVIDIA Dynamo's KvRouter, which it called KvPushRouter.

Differences: the router is named by url and model. The events of generate are those of
the worker's OpenAI endpoint, with text in choices. They have token_ids, too, where the
engine returns them: vLLM does. dp_rank needs a worker_id beside it. More arguments are fields of the HTTP API, by keyword.

Requests go straight to url. Proxies that the environment names (http_proxy and the like,
NO_PROXY or not) are not used: a router is inside of a cluster, and they would see its
token and the prompts.

Nothing but the standard library is needed. Methods are coroutines, as there; each
HTTP request runs in a thread of asyncio's pool, so any number may be under way at
once. The *_sync methods are the same without asyncio.

    router = KvPushRouter("http://127.0.0.1:9003", model="llama")
    worker_id, dp_rank, overlap_blocks = await router.best_worker(token_ids)
    async for event in await router.generate(token_ids):
        ...
"""

import asyncio
import datetime
import email.utils
import http.client
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
import uuid
import warnings

__all__ = ["KvPushRouter", "KvRouter", "RouterError"]


# The default one would take proxies from the environment.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RouterError(Exception):
    """What the router, or the worker behind it, answered instead of a result.

    status is the HTTP status, code the machine-readable reason or None, param the
    field that is wrong or None, retry_after the seconds, 0 or more, after which to come
    again or None.
    """

    def __init__(self, status, message, code=None, param=None, retry_after=None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after


def _error(answer):
    """The RouterError for an HTTP answer that is none of success."""
    text = answer.read(1 << 20)
    message, code, param = text.decode("utf-8", "replace"), None, None
    try:
        detail = json.loads(text)["error"]
        message, code, param = detail["message"], detail.get("code"), detail.get("param")
    except (ValueError, KeyError, TypeError):
        pass  # no JSON of ours; the text will do
    return RouterError(answer.status, message, code, param, _seconds(answer.headers.get("Retry-After")))


def _seconds(retry):
    """The seconds that a Retry-After says, which is a number of them or a date; None if
    it says neither."""
    retry = (retry or "").strip()
    if retry.isascii() and retry.isdigit() and len(retry) < 10:
        return float(retry)
    try:
        then = email.utils.parsedate_to_datetime(retry)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if then.tzinfo is None:  # "-0000": UTC
        then = then.replace(tzinfo=datetime.timezone.utc)
    return max(0.0, (then - datetime.datetime.now(datetime.timezone.utc)).total_seconds())


class KvPushRouter:
    """The router at url, for one model.

    url is that of kvroute's --http-address. timeout is in seconds, for an answer
    and between two events of a stream. token is one of kvroute's --api-token-file, if
    it has one; it is sent to url only, whatever that redirects to.
    """

    def __init__(self, url, model, timeout=60.0, token=None):
        self.url = url.rstrip("/")
        self.model = model
        self.timeout = timeout
        self.token = token

    # --- requests ---------------------------------------------------------

    def _open(self, path, body):
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        if self.token:
            request.add_unredirected_header("Authorization", "Bearer " + self.token)
        try:
            return _opener.open(request, timeout=self.timeout)
        except urllib.error.HTTPError as answer:
            with answer:
                raise _error(answer) from None

    def _post(self, path, body):
        with self._open(path, body) as answer:
            return json.load(answer)

    def _question(self, token_ids, router_config_override, **more):
        body = {"model": self.model, "token_ids": list(token_ids)}
        if router_config_override:
            body["router_config_override"] = router_config_override
        body.update({name: value for name, value in more.items() if value is not None})
        return body

    # --- without asyncio --------------------------------------------------

    def decide_sync(self, token_ids, router_config_override=None, request_id=None, **more):
        return self._post(
            "/v1/best_worker",
            self._question(token_ids, router_config_override, request_id=request_id, **more),
        )

    def best_worker_sync(self, token_ids, router_config_override=None, request_id=None, **more):
        answer = self.decide_sync(token_ids, router_config_override, request_id, **more)
        return answer["worker_id"], answer["dp_rank"], answer["overlap_blocks"]

    def get_potential_loads_sync(self, token_ids, *, router_config_override=None, **more):
        return self._post("/v1/potential_loads", self._question(token_ids, router_config_override, **more))["loads"]

    def mark_prefill_complete_sync(self, request_id):
        self._post("/v1/mark_prefill_complete", {"request_id": request_id})

    def free_sync(self, request_id):
        self._post("/v1/free", {"request_id": request_id})

    def dump_events_sync(self):
        with self._open("/v1/dump_events", {}) as answer:
            return answer.read().decode()

    def generate_sync(
        self,
        token_ids,
        stop_conditions=None,
        sampling_options=None,
        output_options=None,
        router_config_override=None,
        worker_id=None,
        dp_rank=None,
        request_id=None,
        **more,
    ):
        """An iterator over the worker's events as dicts. It has a connection of its
        own; close, or the end of a with block, frees that and the request's slot."""
        options = {}
        for given in (stop_conditions, sampling_options, output_options):
            options.update({name: value for name, value in (given or {}).items() if value is not None})
        body = self._question(
            token_ids,
            router_config_override,
            request_id=request_id or str(uuid.uuid4()),
            worker_id=worker_id,
            dp_rank=dp_rank,
            body=options,
            **more,
        )
        return _Events(self.url + "/v1/generate", body, self.timeout, self.token)

    # --- the names of the original ----------------------------------------

    async def best_worker(self, token_ids, router_config_override=None, request_id=None, **more):
        """(worker_id, dp_rank, overlap_blocks). With a request_id the decision is
        booked, and mark_prefill_complete and free are owed. more are fields of
        /v1/best_worker: worker_id, dp_rank, session_id, priority and so on.

        In a model with prefill workers the worker is the decode worker: see decide."""
        return await asyncio.to_thread(self.best_worker_sync, token_ids, router_config_override, request_id, **more)

    async def decide(self, token_ids, router_config_override=None, request_id=None, **more):
        """The whole answer to best_worker, as a dict: worker_id, dp_rank, overlap_blocks,
        address, decision, and for a request with a prefill leg prefill: a dict with the
        first four of the prefill worker, and request_id, which is to be freed when the
        leg has ended. free of the request itself also frees the leg. more may have
        prefill_worker_id, prefill_dp_rank, and routing_mode: "aggregated" for a request
        without a leg, "disaggregated" for an error if it can have none. Dynamo's KvRouter
        has no such method."""
        return await asyncio.to_thread(self.decide_sync, token_ids, router_config_override, request_id, **more)

    async def best_worker_id(self, token_ids, router_config_override=None, request_id=None, **more):
        """(worker_id, overlap_blocks). Deprecated: see best_worker."""
        warnings.warn("best_worker_id is deprecated, use best_worker", DeprecationWarning, stacklevel=2)
        worker_id, _, overlap = await self.best_worker(token_ids, router_config_override, request_id, **more)
        return worker_id, overlap

    async def get_potential_loads(self, token_ids, **more):
        """A list of dicts, one for each worker and rank: worker_id, dp_rank,
        potential_prefill_tokens, potential_decode_blocks, active_requests and more."""
        return await asyncio.to_thread(self.get_potential_loads_sync, token_ids, **more)

    async def mark_prefill_complete(self, request_id):
        """Notes the first token. Unknown ids are no error."""
        await asyncio.to_thread(self.mark_prefill_complete_sync, request_id)

    async def free(self, request_id):
        """Gives the slot back. Unknown ids are no error."""
        await asyncio.to_thread(self.free_sync, request_id)

    async def dump_events(self):
        """The index as the text of a JSON array of stored events."""
        return await asyncio.to_thread(self.dump_events_sync)

    async def generate(self, token_ids, model=None, *options, **more):
        """An asynchronous iterator over the worker's events, once the request is
        routed. Behind model, which must be the client's own if it is given, the
        arguments are those of generate_sync behind token_ids. Who leaves the loop early must call aclose, or use async with:
        that frees the connection and the request's slot. A task that is cancelled
        while it waits for an event has done so."""
        if model not in (None, self.model):
            raise ValueError(f"this client is for the model {self.model!r}, not {model!r}")
        return _Stream(await _in_thread(lambda: self.generate_sync(token_ids, *options, **more), lambda events: events.close()))


KvRouter = KvPushRouter


class _Events:
    """The events of one /v1/generate. close may be called at any time, by any thread,
    also while another one waits for the next event: that one gets StopIteration."""

    def __init__(self, url, body, timeout, token):
        self._lock = threading.Lock()
        self._closed = False
        self._socket = None
        self._answer = None
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if token:
                headers["Authorization"] = "Bearer " + token
            connection.request("POST", parts.path, json.dumps(body).encode(), headers)
            # The answer takes the socket over, which is needed to wake who reads it.
            self._socket = connection.sock
            self._answer = connection.getresponse()
            if self._answer.status != 200:
                raise _error(self._answer)
        except BaseException:
            self.close()
            connection.close()
            raise

    def __iter__(self):
        return self

    def __next__(self):
        try:
            while not self._closed:
                line = self._answer.readline()
                if not line:
                    break
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    break
                event = json.loads(data)
                if "error" in event and "choices" not in event:
                    detail = event["error"]
                    raise RouterError(502, detail.get("message", ""), detail.get("code"))
                choices = event.get("choices") or [{}]
                if choices[0].get("token_ids") is not None:
                    event.setdefault("token_ids", choices[0]["token_ids"])
                return event
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            if not self._closed:  # or the socket was closed under us, which these say
                self.close()
                raise
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self):
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes who reads
            except OSError:
                pass  # the other side was first
            self._socket.close()
        if self._answer is not None:
            self._answer.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()


async def _in_thread(work, undo):
    """The result of work, done in a thread. If the caller is cancelled meanwhile, what
    comes of it is undone."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception() or undo(done.result()))
        raise


class _Stream:
    """Iterates in threads over events. Its end, aclose, close, or the cancellation of
    who waits for an event frees the connection and the request's slot."""

    def __init__(self, events):
        self._events = events

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            event = await asyncio.to_thread(next, self._events, None)
        except asyncio.CancelledError:
            self._events.close()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self):
        self._events.close()

    async def aclose(self):
        self._events.close()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self._events.close()
