"""Where K/V are kept: on the host, or in the memory of MLX's device."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.kernels import paging
from pion_vllm_mlx.kernels.prefix import Prefix
from pion_vllm_mlx.server.attention import placement
from pion_vllm_mlx.server.attention.cache import AttentionCache, AttentionSettings
from pion_vllm_mlx.server.attention.requests import Auto, Dense, Request, Sizes, Sparse
from pion_vllm_mlx.server.attention.resident import Resident, Shape
from pion_vllm_mlx.server.attention.slots import Key
from tests.server.attention import oracle
from tests.server.attention.asking import normal

KEYS, VALUES = normal(1, 2, 130, 64), normal(2, 2, 130, 64)
KEY = Key(b"s", 0)


async def here(work: Callable[[], Any]) -> Any:
    return work()


async def answers(cache: AttentionCache, requests: list[Request]) -> list[Any]:
    await cache.store(KEY, Shape(2, 130, 64), KEYS.tobytes(), VALUES.tobytes())
    return list(await asyncio.gather(*(cache.query(KEY, request) for request in requests)))


@pytest.mark.parametrize("device", ["cpu", "mlx"])
def test_blocks_are_shared_wherever_k_and_v_are_kept(device: str) -> None:
    pytest.importorskip("mlx.core")
    more = [normal(seed, 2, 70, 64) for seed in range(6, 10)]
    sides = [
        (KEYS, VALUES),
        *(
            (np.concatenate(pair, axis=1) for pair in zip((KEYS, VALUES), own, strict=True))
            for own in (more[:2], more[2:])
        ),
    ]
    whole = [(np.ascontiguousarray(k), np.ascontiguousarray(v)) for k, v in sides]

    async def work() -> tuple[list[int], list[Any]]:
        cache = AttentionCache(AttentionSettings(), here)
        cache.device = device
        sizes, found = [], []
        for number, (keys, values) in enumerate(whole):
            prefix = Prefix(keys, values, keys.shape[1])
            made = Resident(prefix, family=paging.first_block(prefix))
            await cache.put_shared(Key(b"%d" % number, 0), made, [b"ns"], lambda laid: None)
            sizes.append(cache.slots.nbytes)
        for number in range(3):
            asked = Dense(Sizes("X", 2, 2, 64, 0), normal(3, 2, 2, 64), None)
            found += await cache.query(Key(b"%d" % number, 0), asked)
        hosts = {cache.slots.find(Key(b"%d" % n, 0)).held.prefix.is_host for n in range(3)}
        assert hosts == {device == "cpu"}
        # the second one goes, and takes two blocks along
        cache.put(Key(b"1", 0), cache.slots.find(Key(b"0", 0)).held)
        sizes.append(cache.slots.nbytes)
        cache.close()
        return sizes, found

    sizes, found = asyncio.run(work())
    block = 2 * 2 * 64 * 64 * 4
    assert sizes == [130 * block // 64, 3 * block + 2 * block, 5 * block + 2 * block, 5 * block]
    for (keys, values), out in zip(whole, found, strict=True):
        wanted, _ = oracle.dense(normal(3, 2, 2, 64), keys, values)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_k_and_v_in_mlx_memory_answer_in_bytes_that_can_be_sent(dtype: str) -> None:
    mx = pytest.importorskip("mlx.core")
    from pion_vllm_mlx.kernels import api

    sizes = Sizes("X", 2, 2, 64, 100)
    q = normal(3, 2, 1, 64)
    suffix = api.Suffix(normal(4, 2, 5, 64), normal(5, 2, 5, 64))
    every = np.tile(np.arange(130, dtype="<i4"), (2, 1))
    requests: list[Request] = [
        Dense(sizes, q, None, with_lse=True),
        Dense(sizes, q, None, suffix),
        Sparse(sizes, q[:, 0], every, np.array([130, 130], "<u4")),
        Auto(sizes, q[:, 0], None, api.Selection(16, 99)),
    ]

    async def work() -> tuple[AttentionCache, list[Any]]:
        cache = AttentionCache(AttentionSettings(dtype=dtype), here)
        cache.device = "mlx"
        found = await answers(cache, requests)
        cache.close()
        return cache, found

    cache, found = asyncio.run(work())
    held = cache.slots.find(KEY).held
    assert isinstance(held.prefix.keys, mx.array)
    assert held.nbytes >= 2 * KEYS.nbytes // (1 if dtype == "fp32" else 2)
    wanted, _ = oracle.dense(q, KEYS, VALUES, window=100)
    fused = oracle.fused(q, (KEYS, VALUES), (suffix.keys, suffix.values), window=100)
    error = 1e-5 if dtype == "fp32" else 3e-2
    for (out, *_), right in zip(found, (wanted, fused, wanted[:, 0], wanted[:, 0]), strict=True):
        assert isinstance(out, np.ndarray) and out.dtype == np.float32
        np.testing.assert_allclose(out.reshape(right.shape), right, rtol=0, atol=error)


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PION_KERNEL", raising=False)
    if placement.find_device("cuda") != placement.HOST:
        pytest.skip("there is a GPU")

    async def work() -> list[str]:
        caches = [AttentionCache(AttentionSettings(device=d), here) for d in ("cpu", "cuda")]
        notices = [await cache.start() for cache in caches]
        assert [cache.device for cache in caches] == ["cpu", "cpu"]
        for cache in caches:
            cache.close()
        return notices

    nothing, notice = asyncio.run(work())
    assert not nothing and "cuda" in notice and "cpu" in notice


def test_a_kernel_that_is_forced_and_unknown_is_named_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PION_KERNEL", "magic")
    with pytest.raises(ConfigError, match="magic.*reference"):
        placement.find_device(placement.HOST)


def test_a_server_does_not_start_with_a_kernel_that_it_has_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pion_vllm_mlx", "server", "--kvcache", "-p", "0"]
    environ = {**os.environ, "PION_KERNEL": "magic"}
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "FATAL" in done.stderr and "magic" in done.stderr and "reference" in done.stderr
