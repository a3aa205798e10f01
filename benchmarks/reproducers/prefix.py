"""A prefix of random rows, and how a client stores and fetches it over the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.wire.resp import Part

SIDES = ("_pk", "_pv")
VALUE_BYTES = 2

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """L layers of fp16 rows, ``H_kv`` heads of D values, N tokens."""

    layers: int = 16
    heads: int = 8
    dim: int = 64
    tokens: int = 4096

    @property
    def layer_bytes(self) -> int:
        """Bytes of one side of one layer."""
        return self.tokens * self.heads * self.dim * VALUE_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole prefix."""
        return 2 * self.layers * self.layer_bytes

    def random_layer(self, seed: int = 1) -> Bytes:
        """One layer's rows, head-major."""
        random = np.random.default_rng(seed)
        return np.frombuffer(random.bytes(self.layer_bytes), np.uint8)

    def buffers(self) -> list[Bytes]:
        """Memory for one side, one array a layer; every page touched."""
        return [np.ones(self.layer_bytes, np.uint8) for _ in range(self.layers)]


def register(connection: RespConnection, namespace: str, shape: Shape) -> None:
    """Create the namespace, head-major."""
    width = shape.heads * shape.dim
    connection.command("KV.PREFIX.REGISTER", namespace, width, "fp16", "HEADS", shape.heads)


def store(
    connection: RespConnection, namespace: str, shape: Shape, layers: Sequence[Bytes]
) -> None:
    """Store every layer of both sides, pipelined, until all are acknowledged.

    ``layers`` repeat when they are fewer than the shape's.
    """
    commands: list[list[Part]] = [
        [
            *("V.STOREBATCH", namespace + side, number, 0, shape.tokens),
            *(layers[number % len(layers)], "FMT", "STORED", "LAYOUT", "HND"),
        ]
        for side in SIDES
        for number in range(shape.layers)
    ]
    for reply in connection.pipeline(commands):
        if isinstance(reply, CommandError):
            raise reply


def fetch_words(namespace: str, side: str, shape: Shape) -> list[Part]:
    """The command that fetches one side as it is stored."""
    words: list[Part] = ["V.FETCH", namespace + side, "BATCH", 0, shape.tokens]
    return [*words, "FMT", "STORED", "LAYOUT", "HND"]


def fetch(
    connection: RespConnection, namespace: str, shape: Shape, buffers: Sequence[Bytes]
) -> None:
    """Fetch both sides, one after the other, into the same memory."""
    for side in SIDES:
        connection.fetch_into(fetch_words(namespace, side, shape), buffers)
