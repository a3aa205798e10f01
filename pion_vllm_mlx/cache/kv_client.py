"""Blobs found by embedding, and tensors by layer: two small clients.

Neither breaks generation: what the server refuses, or cannot be asked, is a miss or
a False, with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from pion_vllm_mlx.cache.frame_connection import FrameConnection
from pion_vllm_mlx.cache.resp_client import RespClient, info_fields
from pion_vllm_mlx.errors import ConfigError, ServerRefused, StoreUnavailable
from pion_vllm_mlx.wire.resp import Part

log = logging.getLogger(__name__)

T = TypeVar("T")


def or_else(fallback: T, ask: Callable[[], T], what: str) -> T:
    """What the server says, or ``fallback`` when it refuses or cannot be reached."""
    try:
        return ask()
    except (ServerRefused, StoreUnavailable) as error:
        log.warning("%s: %s", what, error)
        return fallback


class PionKVClient:
    """KV.STORE, KV.FETCH and KV.INFO. ``client``, with a password say, replaces its own."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        timeout: float = 10.0,
        client: RespClient | None = None,
    ) -> None:
        self._client = client or RespClient(host, port, timeout)

    def __enter__(self) -> PionKVClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def connect(self) -> None:
        """Open the connection now. Raises ServerRefused, StoreUnavailable."""
        self._client.cmd("PING")

    def close(self) -> None:
        self._client.close()

    def kv_store(
        self, cache_id: str, embedding: ArrayLike, blob: Part, ttl: int = 0, model: str = ""
    ) -> bool:
        """Keep a blob under an embedding, for ``ttl`` seconds (0: as long as there is room)."""
        parts: list[Part] = ["KV.STORE", cache_id, np.ascontiguousarray(embedding, "<f4"), blob]
        parts += ["TTL", ttl] if ttl else []
        parts += ["MODEL", model] if model else []
        return or_else(False, lambda: self._client.cmd(*parts) == b"OK", "KV.STORE")

    def kv_fetch(
        self, embedding: ArrayLike, threshold: float = 0.0, model: str = ""
    ) -> bytes | None:
        """The blob whose embedding is nearest; ``threshold`` 0: the server's own."""
        parts: list[Part] = ["KV.FETCH", np.ascontiguousarray(embedding, "<f4")]
        parts += ["THRESHOLD", f"{threshold:.9f}"] if threshold else []
        parts += ["MODEL", model] if model else []

        def ask() -> bytes | None:
            reply = self._client.cmd(*parts)
            return reply if isinstance(reply, bytes) else None

        return or_else(None, ask, "KV.FETCH")

    def kv_info(self) -> dict[str, int | str]:
        """The fields of KV.INFO, numbers as ints; empty when there is no answer."""
        nothing: dict[str, int | str] = {}
        return or_else(nothing, lambda: info_fields(self._client.cmd("KV.INFO")), "KV.INFO")


class PionLayerClient:
    """Tensors of a session by layer, as bytes.

    ``mode`` "resp": durable, under plain keys ``layer:<session>:<layer>``; "binary": in
    the server's memory, over the binary lane on ``port`` + 1. ``embed_dim`` is accepted and
    means nothing here: a layer is found by its name, never by similarity.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        mode: str = "resp",
        embed_dim: int = 768,
        timeout: float = 10.0,
    ) -> None:
        if mode not in ("resp", "binary"):
            raise ConfigError(f"mode is resp or binary, not {mode!r}")
        self.embed_dim = embed_dim
        self._resp = RespClient(host, port, timeout) if mode == "resp" else None
        self._frames = FrameConnection(host, port + 1, timeout) if mode == "binary" else None

    def __enter__(self) -> PionLayerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in (self._resp, self._frames):
            if connection is not None:
                connection.close()

    def store_layer(self, session_id: str, layer_id: int, tensor: Any) -> bool:
        """Store one layer; True once the server has it."""
        return self.store_layers_batch(session_id, {layer_id: tensor})

    def fetch_layer(self, session_id: str, layer_id: int) -> bytes | None:
        """One layer's bytes, None when it is not there."""
        return self.fetch_layers_batch(session_id, [layer_id])[0]

    def store_layers_batch(self, session_id: str, tensors: Mapping[int, Any]) -> bool:
        """Store several layers; True once the server has all of them."""
        blobs = {layer: _octets(tensor) for layer, tensor in tensors.items()}

        def ask() -> bool:
            if self._resp is not None:
                commands = [("SET", _key(session_id, n), blob) for n, blob in blobs.items()]
                return all(answer == b"OK" for answer in self._resp.pipeline(commands))
            assert self._frames is not None
            for layer, blob in blobs.items():
                self._frames.layer_store(session_id.encode(), layer, blob)
            return True

        return or_else(False, ask, "storing layers")

    def fetch_layers_batch(self, session_id: str, layer_ids: Sequence[int]) -> list[bytes | None]:
        """The bytes of several layers, in order."""

        def ask() -> list[bytes | None]:
            if self._resp is not None:
                return self._resp.pipeline([("GET", _key(session_id, n)) for n in layer_ids])
            assert self._frames is not None
            session = session_id.encode()
            return [self._frames.layer_fetch(session, layer) for layer in layer_ids]

        nothing: list[bytes | None] = [None] * len(layer_ids)
        return or_else(nothing, ask, "fetching layers")


def _key(session_id: str, layer_id: int) -> str:
    return f"layer:{session_id}:{layer_id}"


def _octets(tensor: Any) -> memoryview:
    """The bytes of an array, or of bytes."""
    if isinstance(tensor, (bytes, bytearray, memoryview)):
        return memoryview(tensor)
    array = np.ascontiguousarray(tensor).reshape(-1)
    return array.view(np.uint8).data if array.size else memoryview(b"")
