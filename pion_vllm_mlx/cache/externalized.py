"""Attention over keys and values that live at the server: scores, softmax, merge.

The index finds the keys at the smallest L2 distance. Keys get one more coordinate,
``sqrt(R² − |k|²)``, and queries a zero there: all stored keys then have the length R,
so that the nearest key is the one of the largest product, and the distance d that
comes back gives the product itself: ``q·k = (|q|² + R² − d²) / 2``. With at most k
keys stored the result is softmax attention over all of them; with more it is that
over the k best.

H_q and H_kv are query and KV heads, D and Dv a head's width of keys and values, n
tokens. Each KV head of a layer is a layer of its own at the server.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pion_vllm_mlx.cache.attention_client import PionAttentionClient
from pion_vllm_mlx.errors import ConfigError

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]

#: R is so many times the longest key of the first store, for keys that are longer later.
_RADIUS_MARGIN = 4.0


@dataclass(frozen=True)
class ExternalizedAttentionConfig:
    """What is kept at which server, and how it is attended to.

    ``key_dim`` and ``value_dim`` are widths over all KV heads. ``scale`` 0 is
    1/sqrt(D). ``key_radius`` 0 is derived from the first keys of a layer; a key longer
    than it is refused.
    """

    pion_host: str = "127.0.0.1"
    pion_port: int = 1974
    external_layers: tuple[int, ...] = ()
    k: int = 128
    key_dim: int = 1024
    value_dim: int = 1024
    session_id: str = field(default_factory=lambda: f"attn_{time.time_ns() // 1_000_000}")
    timeout: float = 10.0
    fallback_to_local: bool = True
    store_batch_size: int = 4096
    num_heads: int = 1
    num_kv_heads: int = 1
    v_format: str = "fp16"
    scale: float = 0.0
    key_radius: float = 0.0

    def __post_init__(self) -> None:
        divides = self.num_kv_heads > 0 and not (
            self.key_dim % self.num_kv_heads or self.value_dim % self.num_kv_heads
        )
        if not divides or self.num_heads % self.num_kv_heads:
            raise ConfigError("key_dim, value_dim and num_heads are multiples of num_kv_heads")

    @property
    def head_key_dim(self) -> int:
        return self.key_dim // self.num_kv_heads

    @property
    def head_value_dim(self) -> int:
        return self.value_dim // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        return self.scale or 1.0 / math.sqrt(self.head_key_dim)


class Partial(NamedTuple):
    """Attention over some keys: output ``[H_q, Dv]`` and log-sum-exp ``[H_q]``, float32.

    −inf means no key was seen; the output is 0 then.
    """

    out: Floats
    lse: Floats


def local_attention(
    query: Floats, keys: Floats, values: Floats, scale: float, mask: ArrayLike | None = None
) -> Partial:
    """Attention of ``query [H_q, D]`` over ``keys [n, H_kv, D]``, ``values [n, H_kv, Dv]``.

    ``mask [n]`` is added to the scores. Computed in float32.
    """
    heads = query.shape[0] // max(1, keys.shape[1])
    k = np.repeat(keys, heads, axis=1)
    v = np.repeat(values, heads, axis=1)
    scores = np.einsum("hd,nhd->hn", query, k).astype(np.float32) * np.float32(scale)
    if mask is not None:
        scores = scores + np.asarray(mask, np.float32)
    return _partial(scores, v.transpose(1, 0, 2))


def _partial(scores: Floats, values: Floats) -> Partial:
    """Softmax of ``scores [H, n]`` over ``values [H, n, Dv]``."""
    if not scores.shape[1]:
        shape = (values.shape[0], values.shape[2])
        return Partial(np.zeros(shape, np.float32), np.full(shape[0], -np.inf, np.float32))
    top = scores.max(axis=1, keepdims=True)
    top = np.where(np.isfinite(top), top, np.float32(0))
    weights = np.exp(scores - top)
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top[:, 0]
    out = np.einsum("hn,hnd->hd", weights, values) / np.where(total > 0, total, 1)[:, None]
    return Partial(out.astype(np.float32), lse.astype(np.float32))


def merge(parts: list[Partial]) -> Partial:
    """Attention over the keys of all parts together, by their log-sum-exps."""
    lses = np.stack([part.lse for part in parts])
    top = lses.max(axis=0)
    top = np.where(np.isfinite(top), top, np.float32(0))
    weights = np.exp(lses - top)
    total = weights.sum(axis=0)
    out = sum(
        part.out * (weight / np.where(total > 0, total, 1))[:, None]
        for part, weight in zip(parts, weights, strict=True)
    )
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return Partial(np.asarray(out, np.float32), lse.astype(np.float32))


class ExternalizedAttentionManager:
    """Stores keys and values at the server and attends to them there."""

    def __init__(self, config: ExternalizedAttentionConfig) -> None:
        self.config = config
        self._client: PionAttentionClient | None = None
        self._tokens: dict[int, int] = {}
        self._radius: dict[int, float] = {}
        self._created = False
        self._queries = 0
        self._failures = 0

    @property
    def client(self) -> PionAttentionClient:
        """The connection, opened when used."""
        if self._client is None:
            config = self.config
            self._client = PionAttentionClient(config.pion_host, config.pion_port, config.timeout)
        return self._client

    def create_session(self) -> bool:
        """Open the index at the server, once; whether it is open."""
        if not self._created:
            config = self.config
            slot = self.client.create_session(
                config.session_id,
                config.head_key_dim + 1,
                config.head_value_dim,
                v_format=config.v_format,
                boundary_v_format=config.v_format,
            )
            self._created = slot >= 0
        return self._created

    def store_prefill_kv(self, layer_id: int, keys: ArrayLike, values: ArrayLike) -> bool:
        """Append keys ``[n, key_dim]`` and values ``[n, value_dim]`` to a layer.

        False when the server did not take all of them: the layer is not attended to from
        then on. Raises ConfigError for other shapes, and for a key longer than the radius.
        """
        config = self.config
        heads = config.num_kv_heads
        k = np.asarray(keys, np.float32).reshape(-1, heads, config.head_key_dim)
        v = np.asarray(values, np.float32).reshape(-1, heads, config.head_value_dim)
        if len(k) != len(v):
            raise ConfigError(f"{len(k)} keys and {len(v)} values")
        if not len(k):
            return True
        extended = self._with_length(layer_id, k)
        whole = self._tokens.get(layer_id, 0) >= 0 and self.create_session()
        for at in range(0, len(k), config.store_batch_size):
            part = slice(at, at + config.store_batch_size)
            for head in range(heads):
                whole = whole and self.client.store_tokens(
                    config.session_id,
                    self._index_layer(layer_id, head),
                    extended[part, head],
                    v[part, head],
                )
        self._tokens[layer_id] = self._tokens.get(layer_id, 0) + len(k) if whole else -1
        self._failures += not whole
        return whole

    def query(self, layer_id: int, query_vector: ArrayLike, k: int | None = None) -> Partial | None:
        """Attention of a query ``[H_q, D]`` over a layer's stored keys; None without an answer."""
        config = self.config
        if not self.get_layer_token_count(layer_id):
            return None
        q = np.asarray(query_vector, np.float32).reshape(config.num_heads, config.head_key_dim)
        group = config.num_heads // config.num_kv_heads
        layers = [self._index_layer(layer_id, head // group) for head in range(config.num_heads)]
        extended = np.concatenate([q, np.zeros((len(q), 1), np.float32)], axis=1)
        self._queries += 1
        found = self.client.query_with_distances(
            config.session_id, layers, extended, k or config.k, config.head_value_dim
        )
        if found is None:
            self._failures += 1
            return None
        length = np.square(q, dtype=np.float64).sum(axis=1) + self._radius[layer_id] ** 2
        distances = np.stack([d for _, d in found]).astype(np.float64)
        products = (length[:, None] - np.square(distances)) / 2
        scores = (products * config.score_scale).astype(np.float32)
        return _partial(scores, np.stack([rows for rows, _ in found]))

    def get_layer_token_count(self, layer_id: int) -> int:
        """Tokens of a layer that can be attended to; 0 once a store went wrong."""
        return max(0, self._tokens.get(layer_id, 0))

    def get_stats(self) -> dict[str, Any]:
        """What was stored and asked, and what the server says."""
        return {
            "session_id": self.config.session_id,
            "external_layers": list(self.config.external_layers),
            "tokens": {n: count for n, count in self._tokens.items() if count > 0},
            "queries": self._queries,
            "failures": self._failures,
            "server": self.client.info(),
        }

    def close(self) -> None:
        """Close the connection; what is stored stays at the server."""
        if self._client is not None:
            self._client.close()

    def _index_layer(self, layer_id: int, head: int) -> int:
        return layer_id * self.config.num_kv_heads + head

    def _with_length(self, layer_id: int, keys: Floats) -> Floats:
        """Keys ``[n, H_kv, D + 1]`` that all have the layer's radius as their length."""
        squares = np.square(keys, dtype=np.float64).sum(axis=2)
        longest = math.sqrt(float(squares.max()))
        radius = self._radius.setdefault(
            layer_id, self.config.key_radius or _RADIUS_MARGIN * max(longest, 1e-3)
        )
        if not longest <= radius:
            raise ConfigError(
                f"layer {layer_id}: a key of length {longest:.3g} is longer than the radius "
                f"{radius:.3g}; set key_radius"
            )
        rest = np.sqrt(radius**2 - squares)[:, :, None].astype(np.float32)
        return np.concatenate([keys, rest], axis=2)
