"""Equal queries are answered with equal bytes, whoever else asks at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.server.attention.asking import Asking, connected, flagged, normal

CLIENTS, TIMES = 8, 6
HEADS, KV_HEADS = 4, 2
HEAD_MAP = bytes([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("tokens", "dim", "dtype", "rows", "suffix"),
    [
        (2048, 128, "fp32", 1, 1),
        (9000, 64, "fp32", 1, 40),
        (9000, 64, "fp16", 1, 1),
        (9000, 64, "fp32", 3, 0),
        (2048, 64, "fp16", 3, 5),
    ],
)
def test_replies_to_many_at_once_are_those_to_one_alone(
    tmp_path: Path, tokens: int, dim: int, dtype: str, rows: int, suffix: int
) -> None:
    keys, values = normal(1, KV_HEADS, tokens, dim), normal(2, KV_HEADS, tokens, dim)
    queries = [normal(10 + n, HEADS, rows, dim) for n in range(CLIENTS)]
    # suffixes of several lengths: who is beside whom depends on the moment
    tails = [
        (
            normal(50 + n, KV_HEADS, suffix + n % 2, dim),
            normal(80 + n, KV_HEADS, suffix + n % 2, dim),
        )
        for n in range(CLIENTS)
    ]
    together = threading.Barrier(CLIENTS)
    with flagged(tmp_path / "data", "--attend-dtype", dtype) as server:
        with connected(server) as ask:
            ask.store(keys, values)
            alone = [ask.fused(q, *tail, HEAD_MAP) for q, tail in zip(queries, tails, strict=True)]
            lse = [ask.query(q[:KV_HEADS]) for q in queries]

        def client(number: int) -> None:
            with connected(server) as mine:
                for turn in range(TIMES):
                    at = (number + turn * (turn % 2)) % CLIENTS
                    together.wait(60)
                    assert one(mine, at, number) == (alone[at], lse[at])

        def one(mine: Asking, at: int, number: int) -> tuple[bytes, bytes]:
            if number % 2:
                out = mine.framed_ok(queries[at], tails[at], HEAD_MAP)
            else:
                out = mine.fused(queries[at], *tails[at], HEAD_MAP)
            return out, mine.query(queries[at][:KV_HEADS])

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))
        with connected(server) as ask:
            assert ask.info()["sdpa_shared_passes"] > 0
            assert np.isfinite(np.frombuffer(alone[0], "<f4")).all()
