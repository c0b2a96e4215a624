# SPDX-License-Identifier: Apache-2.0

"""A client of a running kvroute router. Its methods have the names, the order of arguments
and the return values of NVIDIA Dynamo's KvRouter (earlier: KvPushRouter).

Differences:

- The router is named by url and model.
- The events of generate are those of the worker's OpenAI endpoint, with text in choices. They
  also have token_ids if the engine returns them: vLLM does.
- dp_rank needs a worker_id beside it.
- More keyword arguments are fields of the HTTP API.

Requests go straight to url. The client ignores the proxies of the environment (http_proxy and
others): a proxy would see the token and the prompts.

The client needs the standard library only. Its methods are coroutines. Each HTTP request runs
in a thread of asyncio's pool. The methods *_sync do the same without asyncio.

    router = KvPushRouter("http://127.0.0.1:9003", model="llama")
    worker_id, dp_rank, overlap_blocks = await router.best_worker(token_ids)
    async for event in await router.generate(token_ids):
        ...
"""

import asyncio
import datetime
import email.utils
import http.client
import itertools
import json
import random
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
import uuid
import warnings
from types import TracebackType
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Type, TypeVar, Union

__all__ = ["AsyncEventStream", "EventStream", "KvPushRouter", "KvRouter", "OverlapScores", "RouterError"]


# The default one would take proxies from the environment.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


_T = TypeVar("_T")
_Options = Optional[Mapping[str, Any]]


class RouterError(Exception):
    """An error response of the router, or of the worker behind it. Its text is the message.

    Attributes:
        status: the HTTP status. 502 if a stream of events ends with an error.
        code: the machine-readable reason, or None.
        param: the name of the wrong field, or None.
        retry_after: seconds until the request may be repeated, 0 or more, or None.
    """

    status: int
    code: Optional[str]
    param: Optional[str]
    retry_after: Optional[float]

    def __init__(
        self,
        status: int,
        message: str,
        code: Optional[str] = None,
        param: Optional[str] = None,
        retry_after: Optional[float] = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after


def _error(answer: Union[http.client.HTTPResponse, urllib.error.HTTPError]) -> RouterError:
    """Returns the RouterError of an HTTP response whose status is not 200."""
    text = answer.read(1 << 20)
    message, code, param = text.decode("utf-8", "replace"), None, None
    try:
        detail = json.loads(text)["error"]
        message, code, param = detail["message"], detail.get("code"), detail.get("param")
    except (ValueError, KeyError, TypeError):
        pass  # no JSON of ours; the text will do
    return RouterError(answer.status or 0, message, code, param, _seconds(answer.headers.get("Retry-After")))


def _seconds(retry: Optional[str]) -> Optional[float]:
    """Returns the seconds of a Retry-After, which is a number or a date; None if it is neither."""
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


class OverlapScores:
    """The answer of find_matches_for_request, as of Dynamo's KvIndexer.

    Attributes:
        scores: for each worker with cached blocks of the prompt, by worker_id: the number of leading blocks. Of
            several ranks the one with the most blocks counts.
        frequencies: an empty list, because kvroute does not count uses of blocks.
    """

    scores: Dict[int, int]
    frequencies: List[int]

    def __init__(self, scores: Dict[int, int]) -> None:
        self.scores = scores
        self.frequencies = []


class KvPushRouter:
    """The router at url, for one model. It may be used by any number of threads and tasks.

    It also has the operations of Dynamo's Client (random, round_robin, direct) and of its KvIndexer
    (find_matches_for_request).

    Args:
        url: that of kvroute's --http-address, such as "http://127.0.0.1:9003".
        model: the name of the model in all requests.
        timeout: seconds until a response must come, and between two events of a stream.
        token: one of kvroute's --api-token-file, if it has one. The client sends it to url only,
            never to an address that url redirects to.

    All methods raise RouterError for an error response, and OSError (such as
    urllib.error.URLError or TimeoutError) if the router cannot be reached in time.
    """

    def __init__(self, url: str, model: str, timeout: float = 60.0, token: Optional[str] = None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.timeout = timeout
        self.token = token
        self._turns = itertools.count()

    # --- requests ---------------------------------------------------------

    def _open(self, path: str, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        if self.token:
            request.add_unredirected_header("Authorization", "Bearer " + self.token)
        try:
            answer: http.client.HTTPResponse = _opener.open(request, timeout=self.timeout)
            return answer
        except urllib.error.HTTPError as failure:
            with failure:
                raise _error(failure) from None

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        with self._open(path, body) as answer:
            return json.load(answer)

    def _question(self, token_ids: Iterable[int], router_config_override: _Options, **more: Any) -> Dict[str, Any]:
        body: Dict[str, Any] = {"model": self.model, "token_ids": list(token_ids)}
        if router_config_override:
            body["router_config_override"] = router_config_override
        body.update({name: value for name, value in more.items() if value is not None})
        return body

    # --- without asyncio --------------------------------------------------

    def decide_sync(
        self, token_ids: Iterable[int], router_config_override: _Options = None, request_id: Optional[str] = None, **more: Any
    ) -> Dict[str, Any]:
        """decide without asyncio."""
        answer: Dict[str, Any] = self._post(
            "/v1/best_worker",
            self._question(token_ids, router_config_override, request_id=request_id, **more),
        )
        return answer

    def best_worker_sync(
        self, token_ids: Iterable[int], router_config_override: _Options = None, request_id: Optional[str] = None, **more: Any
    ) -> Tuple[int, int, int]:
        """best_worker without asyncio."""
        answer = self.decide_sync(token_ids, router_config_override, request_id, **more)
        return answer["worker_id"], answer["dp_rank"], answer["overlap_blocks"]

    def get_potential_loads_sync(
        self, token_ids: Iterable[int], *, router_config_override: _Options = None, **more: Any
    ) -> List[Dict[str, Any]]:
        """get_potential_loads without asyncio."""
        loads: List[Dict[str, Any]] = self._post("/v1/potential_loads", self._question(token_ids, router_config_override, **more))["loads"]
        return loads

    def mark_prefill_complete_sync(self, request_id: str) -> None:
        """mark_prefill_complete without asyncio."""
        self._post("/v1/mark_prefill_complete", {"request_id": request_id})

    def free_sync(self, request_id: str) -> None:
        """free without asyncio."""
        self._post("/v1/free", {"request_id": request_id})

    def dump_events_sync(self) -> str:
        """dump_events without asyncio."""
        with self._open("/v1/dump_events", {}) as answer:
            return answer.read().decode()

    def generate_sync(
        self,
        token_ids: Iterable[int],
        stop_conditions: _Options = None,
        sampling_options: _Options = None,
        output_options: _Options = None,
        router_config_override: _Options = None,
        worker_id: Optional[int] = None,
        dp_rank: Optional[int] = None,
        request_id: Optional[str] = None,
        **more: Any,
    ) -> "EventStream":
        """Routes a request and returns an iterator over the worker's events, which are dicts.

        The iterator has a connection of its own. close, or the end of a with block, frees the
        connection and the request's slot.

        Args:
            token_ids: the prompt.
            stop_conditions, sampling_options, output_options: fields of the engine's request, such
                as {"max_tokens": 16}. Entries that are None are left out.
            router_config_override: settings of the router for this request.
            worker_id, dp_rank: the wanted worker and rank.
            request_id: default: a new UUID.
            more: further fields of /v1/generate.
        """
        options: Dict[str, Any] = {}
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
        return EventStream(self.url + "/v1/generate", body, self.timeout, self.token)

    def find_matches_for_request_sync(
        self, token_ids: Iterable[int], lora_name: Optional[str] = None, is_eagle: Optional[bool] = None
    ) -> OverlapScores:
        """find_matches_for_request without asyncio."""
        scores: Dict[int, int] = {}
        for load in self.get_potential_loads_sync(token_ids, model=lora_name):
            if load["overlap_blocks"] > 0:
                scores[load["worker_id"]] = max(load["overlap_blocks"], scores.get(load["worker_id"], 0))
        return OverlapScores(scores)

    def _generate_at(self, request: Mapping[str, Any], choose: Callable[[List[Dict[str, Any]]], Dict[str, Any]]) -> "EventStream":
        """Sends a request to the rank that choose takes from those that may take requests, in a fixed order."""
        model = request.get("model") or self.model
        rank = choose(self.get_potential_loads_sync([0], model=model))
        return self._generate_request(request, rank["worker_id"], rank["dp_rank"])

    def _generate_request(self, request: Mapping[str, Any], worker_id: int, dp_rank: Optional[int]) -> "EventStream":
        return self.generate_sync(**{**request, "worker_id": worker_id, "dp_rank": dp_rank})

    # --- the names of the original ----------------------------------------

    async def best_worker(
        self, token_ids: Iterable[int], router_config_override: _Options = None, request_id: Optional[str] = None, **more: Any
    ) -> Tuple[int, int, int]:
        """Returns (worker_id, dp_rank, overlap_blocks): the best worker for a prompt, and how many
        leading blocks of the prompt it has cached.

        In a model with prefill workers the worker is the decode worker: see decide.

        Args:
            token_ids: the prompt.
            router_config_override: settings of the router for this request.
            request_id: books the decision. The caller must then call mark_prefill_complete at the
                first token, and free at the end. Default: nothing is booked.
            more: further fields of /v1/best_worker: worker_id, dp_rank, session_id, priority and others.
        """
        return await asyncio.to_thread(self.best_worker_sync, token_ids, router_config_override, request_id, **more)

    async def decide(
        self, token_ids: Iterable[int], router_config_override: _Options = None, request_id: Optional[str] = None, **more: Any
    ) -> Dict[str, Any]:
        """Returns the whole answer of best_worker as a dict: worker_id, dp_rank, overlap_blocks,
        address and decision. Dynamo's KvRouter has no such method.

        A request with a prefill leg also has prefill: a dict with worker_id, dp_rank,
        overlap_blocks and address of the prefill worker, and request_id. free of that id ends
        the leg; free of the request's own id ends both.

        Args: those of best_worker. more may also have prefill_worker_id, prefill_dp_rank and
        routing_mode: "aggregated" for a request without a leg, "disaggregated" for an error
        if the request can have none.
        """
        return await asyncio.to_thread(self.decide_sync, token_ids, router_config_override, request_id, **more)

    async def best_worker_id(
        self, token_ids: Iterable[int], router_config_override: _Options = None, request_id: Optional[str] = None, **more: Any
    ) -> Tuple[int, int]:
        """Returns (worker_id, overlap_blocks). Deprecated: use best_worker."""
        warnings.warn("best_worker_id is deprecated, use best_worker", DeprecationWarning, stacklevel=2)
        worker_id, _, overlap = await self.best_worker(token_ids, router_config_override, request_id, **more)
        return worker_id, overlap

    async def get_potential_loads(self, token_ids: Iterable[int], **more: Any) -> List[Dict[str, Any]]:
        """Returns a dict for each worker and rank: worker_id, dp_rank, potential_prefill_tokens
        (tokens that the worker would have to compute), potential_decode_blocks, active_requests
        and others. Nothing is booked."""
        return await asyncio.to_thread(lambda: self.get_potential_loads_sync(token_ids, **more))

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Reports the first token of a booked request. Unknown ids are no error."""
        await asyncio.to_thread(self.mark_prefill_complete_sync, request_id)

    async def free(self, request_id: str) -> None:
        """Frees the slot of a booked request. Unknown ids are no error."""
        await asyncio.to_thread(self.free_sync, request_id)

    async def dump_events(self) -> str:
        """Returns the index as the text of a JSON array of stored events."""
        return await asyncio.to_thread(self.dump_events_sync)

    async def generate(
        self, token_ids: Iterable[int], model: Optional[str] = None, *options: Any, **more: Any
    ) -> "AsyncEventStream":
        """Routes a request and returns an asynchronous iterator over the worker's events.

        A caller that leaves the loop early must call aclose or use async with: this frees
        the connection and the request's slot. Cancelling a task that waits for an event frees them, too.

        Args:
            token_ids: the prompt.
            model: the client's own model, or None. Another one is a ValueError.
            options, more: the arguments of generate_sync after token_ids.
        """
        if model not in (None, self.model):
            raise ValueError(f"this client is for the model {self.model!r}, not {model!r}")
        return await self._events(lambda: self.generate_sync(token_ids, *options, **more))

    async def find_matches_for_request(
        self, token_ids: Iterable[int], lora_name: Optional[str] = None, is_eagle: Optional[bool] = None
    ) -> OverlapScores:
        """Returns how many leading blocks of a prompt each worker that may take the request has cached. Nothing is booked.

        Args:
            token_ids: the prompt.
            lora_name: the adapter, a model name of the router. Default: the client's model.
            is_eagle: has no effect.
        """
        return await asyncio.to_thread(self.find_matches_for_request_sync, token_ids, lora_name, is_eagle)

    # The operations of Dynamo's Client. kvroute's own choice is generate.

    async def random(self, request: Mapping[str, Any], annotated: Optional[bool] = True, context: Any = None) -> "AsyncEventStream":
        """Sends a request to a random worker and rank of those that may take requests, and returns its events as generate does.

        Args:
            request: a dict with the arguments of generate, of which token_ids is required.
            annotated, context: have no effect.
        """
        return await self._events(lambda: self._generate_at(request, random.choice))

    async def round_robin(self, request: Mapping[str, Any], annotated: Optional[bool] = True, context: Any = None) -> "AsyncEventStream":
        """random, but each request of this client goes to the next worker and rank."""
        return await self._events(lambda: self._generate_at(request, lambda ranks: ranks[next(self._turns) % len(ranks)]))

    async def direct(
        self, request: Mapping[str, Any], instance_id: int, annotated: Optional[bool] = True, context: Any = None
    ) -> "AsyncEventStream":
        """random, but the request goes to the worker with the worker_id instance_id. Its dp_rank may be in request."""
        return await self._events(lambda: self._generate_request(request, instance_id, request.get("dp_rank")))

    async def _events(self, generate: Callable[[], "EventStream"]) -> "AsyncEventStream":
        return AsyncEventStream(await _in_thread(generate, lambda events: events.close()))


KvRouter = KvPushRouter


class EventStream:
    """The events of one request, as KvPushRouter.generate_sync returns them: an iterator over dicts.

    Any thread may call close at any time. A thread that waits for the next event then gets
    StopIteration. An error event of the worker raises RouterError with the status 502.
    """

    def __init__(self, url: str, body: Mapping[str, Any], timeout: float, token: Optional[str]) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._socket: Optional[socket.socket] = None
        self._answer: Optional[http.client.HTTPResponse] = None
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if token:
                headers["Authorization"] = "Bearer " + token
            connection.request("POST", parts.path, json.dumps(body).encode(), headers)
            # The response takes over the socket. close shuts the socket down to wake a reader.
            self._socket = connection.sock
            self._answer = connection.getresponse()
            if self._answer.status != 200:
                raise _error(self._answer)
        except BaseException:
            self.close()
            connection.close()
            raise

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        return self

    def __next__(self) -> Dict[str, Any]:
        try:
            while not self._closed and self._answer is not None:
                line = self._answer.readline()
                if not line:
                    break
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    break
                event: Dict[str, Any] = json.loads(data)
                if "error" in event and "choices" not in event:
                    detail = event["error"]
                    raise RouterError(502, detail.get("message", ""), detail.get("code"))
                choices = event.get("choices") or [{}]
                if choices[0].get("token_ids") is not None:
                    event.setdefault("token_ids", choices[0]["token_ids"])
                return event
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            if not self._closed:  # otherwise close has caused the error
                self.close()
                raise
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the request and frees its connection and slot. Further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a reader
            except OSError:
                pass  # the worker was first
            self._socket.close()
        if self._answer is not None:
            self._answer.close()

    def __enter__(self) -> "EventStream":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


async def _in_thread(work: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
    """Runs work in a thread and returns its result. If the caller is cancelled meanwhile, undo
    gets the result."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:

        def ended(done: "asyncio.Future[_T]") -> None:
            if not done.cancelled() and not done.exception():
                undo(done.result())

        task.add_done_callback(ended)
        raise


class AsyncEventStream:
    """The events of one request, as KvPushRouter.generate returns them: an asynchronous iterator
    over dicts. It reads in threads of asyncio's pool.

    Its end, close, aclose, the end of an async with block, and the cancellation of a task that waits
    for an event free the connection and the request's slot.
    """

    def __init__(self, events: EventStream) -> None:
        self._events = events

    def __aiter__(self) -> "AsyncEventStream":
        return self

    async def __anext__(self) -> Dict[str, Any]:
        try:
            event = await asyncio.to_thread(next, self._events, None)
        except asyncio.CancelledError:
            self._events.close()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        """Ends the request and frees its connection and slot. Further calls do nothing."""
        self._events.close()

    async def aclose(self) -> None:
        """close, as Python's asynchronous generators have it."""
        self._events.close()

    async def __aenter__(self) -> "AsyncEventStream":
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._events.close()
