# SPDX-License-Identifier: Apache-2.0
"""kvroute for Python: KvEventPublisher publishes the events of an engine's KV cache, and
kvroute.client asks a running router.

The publisher needs the C library, which is in the wheel of a platform. The client and the wheel
"py3-none-any" need Python only.

    publisher = kvroute.KvEventPublisher(
        name="gpu-1", kv_block_size=16, address="10.0.0.7:8000", models=["llama"])
    publisher.publish_stored(token_ids=[...], num_block_tokens=[16, 16], block_hashes=[1, 2])
    publisher.publish_removed([2])
    publisher.publish_cleared()
    publisher.shutdown()

The class takes the arguments of Dynamo's KvEventPublisher under the same names, and
further ones for NATS and for the registration of the worker.
"""

import atexit
import ctypes
import json
import os
import sys
import threading
import weakref
from types import TracebackType
from typing import Any, Dict, List, Optional, Sequence, Type

__all__ = ["KvEventPublisher", "PublisherError"]


class PublisherError(RuntimeError):
    """An error of the C library, such as a closed publisher or blocks that have the wrong number of tokens."""


def _load() -> ctypes.CDLL:
    name = "libkvroute_publisher" + (".dylib" if sys.platform == "darwin" else ".so")
    path = os.environ.get("KVROUTE_PUBLISHER_LIBRARY") or os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    try:
        lib = ctypes.CDLL(path)
    except OSError as err:
        raise ImportError(
            "kvroute: %s; this installation has the client only: install a wheel for this platform, or with Go and a C compiler "
            "from a checkout (pip install ./bindings/python), or set KVROUTE_PUBLISHER_LIBRARY to a built %s" % (err, name)
        ) from err
    u32, u64, size, text = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_char_p
    u32s, u64s, failure = ctypes.POINTER(u32), ctypes.POINTER(u64), ctypes.POINTER(ctypes.c_void_p)
    function: Any
    arguments: List[Any]
    for function, result, arguments in (
        (lib.kvroute_publisher_open, u64, [text, failure]),
        (lib.kvroute_publisher_stored, ctypes.c_int64, [u64, u32, u32s, size, u32s, u64s, size, u64s, text, text, failure]),
        (lib.kvroute_publisher_removed, ctypes.c_int, [u64, u32, u64s, size, failure]),
        (lib.kvroute_publisher_cleared, ctypes.c_int, [u64, u32, failure]),
        (lib.kvroute_publisher_load, ctypes.c_int, [u64, u32, u32, u32, ctypes.c_double, failure]),
        (lib.kvroute_publisher_close, ctypes.c_int, [u64, failure]),
        (lib.kvroute_free, None, [ctypes.c_void_p]),
    ):
        function.restype, function.argtypes = result, arguments
    return lib


_lock = threading.Lock()
_library: Optional[ctypes.CDLL] = None
_open: "weakref.WeakSet[KvEventPublisher]" = weakref.WeakSet()


def _lib() -> ctypes.CDLL:
    # Loaded at first use, not at import, so that a process can fork after the import.
    global _library
    with _lock:
        if _library is None:
            _library = _load()
        return _library


def _u64(value: int) -> int:
    """Returns a hash, which may be signed, as an unsigned number."""
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError("%d does not fit into 64 bits" % value)
    return value & 0xFFFFFFFFFFFFFFFF


def _u32s(values: Sequence[int], what: str) -> "ctypes.Array[ctypes.c_uint32]":
    for v in values:
        if not 0 <= v < 1 << 32:
            raise ValueError("%s: %d is not an unsigned number of 32 bits" % (what, v))
    return (ctypes.c_uint32 * len(values))(*values)


def _u64s(values: Sequence[int]) -> "ctypes.Array[ctypes.c_uint64]":
    return (ctypes.c_uint64 * len(values))(*(_u64(v) for v in values))


def _text(value: Optional[str]) -> Optional[bytes]:
    return value.encode() if value else None


class KvEventPublisher:
    """Publishes the cache events of one worker.

    Args:
        endpoint: "namespace/component/endpoint", "namespace.component.endpoint", or None for the
            default "kvroute/workers/generate".
        worker_id: number of the worker. Default: derived from name. One of the two is required.
        kv_block_size: tokens in a block, 1 to 65,536. Required.
        dp_rank: default rank of the publish methods.
        enable_local_indexer: answer routers that missed events.
        durable: publish into a JetStream stream, which stores the events.
        nats_url: URL of NATS. Default: "nats://127.0.0.1:4222".
        name: the worker's name.
        address: "ip:port" of its OpenAI endpoint. Registers the worker, and keeps it registered until
            shutdown. models is then required. Default: the worker is not registered.
        image_token_id: the model's token for an image, if it has one.
        further: access to NATS (nats_creds, nats_nkey, nats_ca, nats_cert, nats_key: paths of files;
            nats_inbox_prefix: a subject), nats_replicas (servers of a NATS cluster that keep new streams
            and buckets, default 1), set_like (one removal removes all copies of a block; default False),
            log_level ("debug", "info", "warn" or "error", to standard error; default: no log), and the
            fields of the worker's record in docs/workers.md: models, lora, role, bootstrap, dp_start, dp_size,
            total_kv_blocks, max_num_seqs, max_num_batched_tokens, model_card, engine and others.

    Any thread may call the methods. No method waits for NATS: while NATS is not available, a limited
    number of events waits.

    Raises:
        ImportError: the C library is not installed.
        PublisherError: the library refuses a value, or the publisher is closed.
        ValueError, TypeError: an argument has the wrong length or type, or does not fit into its number of bits.
    """

    def __init__(
        self,
        endpoint: Optional[str] = None,
        worker_id: Optional[int] = None,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,
        *,
        durable: bool = False,
        nats_url: Optional[str] = None,
        name: Optional[str] = None,
        address: Optional[str] = None,
        image_token_id: Optional[int] = None,
        **further: Any
    ) -> None:
        self._handle = 0
        config: Dict[str, Any] = dict(further)
        if endpoint:
            parts = str(endpoint).replace("/", ".").split(".")
            if len(parts) != 3:
                raise ValueError("endpoint is %r, want namespace/component/endpoint" % (endpoint,))
            config.update(zip(("namespace", "component", "endpoint"), parts))
        for key, value in (
            ("worker_id", worker_id), ("kv_block_size", kv_block_size), ("enable_local_indexer", enable_local_indexer),
            ("durable", durable), ("nats_url", nats_url), ("name", name), ("address", address), ("image_token_id", image_token_id),
        ):
            if value:
                config[key] = value
        self._rank = dp_rank
        failure = ctypes.c_void_p()
        self._handle = _lib().kvroute_publisher_open(json.dumps(config).encode(), ctypes.byref(failure))
        self._check(self._handle or -1, failure)
        _open.add(self)

    @staticmethod
    def _check(status: int, failure: ctypes.c_void_p) -> int:
        if status >= 0:
            return status
        text = ctypes.string_at(failure.value).decode(errors="replace") if failure.value else "unknown"
        if failure.value:
            _lib().kvroute_free(failure)
        raise PublisherError(text)

    def publish_stored(
        self,
        token_ids: List[int],
        num_block_tokens: List[int],
        block_hashes: List[int],
        parent_hash: Optional[int] = None,
        block_mm_infos: Optional[List[Optional[Dict[str, Any]]]] = None,
        lora_name: Optional[str] = None,
        is_eagle: Optional[bool] = None,
        cache_salt: Optional[str] = None,
        *,
        lora_id: int = 0,
        dp_rank: Optional[int] = None
    ) -> int:
        """Publishes that consecutive blocks of one sequence were stored.

        Args:
            token_ids: the tokens of all blocks.
            num_block_tokens: the number of tokens of each block.
            block_hashes: the engine's hash of each block, 64 bits, signed or not.
            parent_hash: the hash of the block before the first one. Default: the first block begins
                the sequence.
            block_mm_infos: of each block the objects in it, such as images, or None. The first block with
                "mm_objects", and all blocks after it, are not published.
            lora_name, cache_salt: the adapter and the salt of the sequence. Default: those of the parent.
            is_eagle: no effect. The router's prompts have the same blocks without it.
            lora_id: the number of the adapter. Blocks of a lora_id without lora_name are not published:
                they would match the prompts of other adapters.
            dp_rank: default: that of the publisher.

        Returns:
            The number of published blocks.
        """
        if lora_id and not lora_name:
            return 0
        blocks = len(block_hashes)
        if len(num_block_tokens) != blocks:
            raise ValueError("num_block_tokens has %d elements, block_hashes %d" % (len(num_block_tokens), blocks))
        for i, info in enumerate(block_mm_infos or ()):
            if info and info.get("mm_objects"):
                blocks = min(blocks, i)
        tokens = _u32s(token_ids, "token_ids")
        parent = None if parent_hash is None else ctypes.byref(ctypes.c_uint64(_u64(parent_hash)))
        failure = ctypes.c_void_p()
        return self._check(
            _lib().kvroute_publisher_stored(
                self._handle, self._rank if dp_rank is None else dp_rank, tokens, len(token_ids),
                _u32s(num_block_tokens[:blocks], "num_block_tokens"), _u64s(block_hashes[:blocks]), blocks,
                parent, _text(lora_name), _text(cache_salt), ctypes.byref(failure),
            ),
            failure,
        )

    def publish_removed(self, block_hashes: List[int], *, dp_rank: Optional[int] = None) -> None:
        """Publishes that the engine removed blocks, which it stored before."""
        failure = ctypes.c_void_p()
        rank = self._rank if dp_rank is None else dp_rank
        status = _lib().kvroute_publisher_removed(self._handle, rank, _u64s(block_hashes), len(block_hashes), ctypes.byref(failure))
        self._check(status, failure)

    def publish_cleared(self, *, dp_rank: Optional[int] = None) -> None:
        """Publishes that the cache of a rank is empty."""
        failure = ctypes.c_void_p()
        self._check(_lib().kvroute_publisher_cleared(self._handle, self._rank if dp_rank is None else dp_rank, ctypes.byref(failure)), failure)

    def set_load(self, running: int = 0, waiting: int = 0, kv_used_blocks: int = 0, kv_utilization: float = 0.0) -> None:
        """Sets the load that the worker's heartbeats contain.

        Args:
            running: requests that the engine computes.
            waiting: requests in its queue.
            kv_used_blocks: blocks of its cache that requests use.
            kv_utilization: share of the cache in use, 0 to 1.
        """
        failure = ctypes.c_void_p()
        status = _lib().kvroute_publisher_load(self._handle, running, waiting, kv_used_blocks, kv_utilization, ctypes.byref(failure))
        self._check(status, failure)

    def shutdown(self) -> None:
        """Publishes the waiting events, removes the registration and closes the publisher. Further calls
        do nothing. At the end of the process all publishers are shut down."""
        handle, self._handle = self._handle, 0
        if handle:
            failure = ctypes.c_void_p()
            self._check(_lib().kvroute_publisher_close(handle, ctypes.byref(failure)), failure)

    def __enter__(self) -> "KvEventPublisher":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.shutdown()


@atexit.register
def _end() -> None:
    for publisher in list(_open):
        try:
            publisher.shutdown()
        except PublisherError:
            pass  # the process ends
