"""Rows that the server quantized as mlx4g32 are what MLX and mlx-lm call a quantized cache."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from tests.conftest import RunningServer
from tests.server.wire import Wire

HEADS, DIM, TOKENS = 2, 64, 70
WIDTH = HEADS * DIM
Triple = tuple[mx.array, mx.array, mx.array]


@pytest.fixture
def sides(pion_server: RunningServer) -> tuple[list[Triple], list[mx.array]]:
    """K and V as the three exported tensors, and their values as the server reads them."""
    with Wire.tcp(pion_server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "mlx4g32")
        values = []
        for seed, sid in enumerate(("n_pk", "n_pv")):
            rows = np.random.default_rng(seed).standard_normal((TOKENS, WIDTH)).astype(np.float32)
            wire.ok("V.STOREBATCH", sid, 0, 0, TOKENS, rows.tobytes())
            blob = wire.ask("V.FETCH", sid, 0, "RANGE", 0, TOKENS)
            table = np.frombuffer(blob, np.float32).reshape(1, TOKENS, HEADS, DIM)
            values.append(mx.array(table).transpose(0, 2, 1, 3))
        words = ("V.EXPORT", "n_pk", "n_pv", 0, TOKENS, 1, HEADS, DIM, "FMT", "STORED")
        path = Path(wire.ask(*words).decode())
        tensors = mx.load(str(path))
        assert isinstance(tensors, dict)
        mx.eval(*tensors.values())
    names = [[f"{side}.0.{part}" for part in "wsb"] for side in "kv"]
    return [(tensors[w], tensors[s], tensors[b]) for w, s, b in names], values


def test_mlx_dequantizes_the_codes_to_the_values_of_the_server(
    sides: tuple[list[Triple], list[mx.array]],
) -> None:
    for (w, s, b), values in zip(*sides, strict=True):
        assert (w.dtype, s.dtype, b.dtype) == (mx.uint32, mx.float16, mx.float16)
        scale, bias = s.astype(mx.float32), b.astype(mx.float32)
        found = mx.dequantize(w, scale, bias, group_size=32, bits=4)
        # a code of 4 bits times a scale of 11 is exact in float32: nothing to win by fusing them
        assert mx.array_equal(found, values)
        half = mx.dequantize(w, s, b, group_size=32, bits=4)
        assert half.dtype == mx.float16
        # MLX rounds to float16 where the server's values are float32
        assert mx.abs(half.astype(mx.float32) - values).max().item() <= 4e-3


def test_the_tensors_go_into_a_quantized_cache_as_they_are(
    sides: tuple[list[Triple], list[mx.array]],
) -> None:
    (keys, values), (plain_keys, plain_values) = sides
    quantized = QuantizedKVCache(group_size=32, bits=4)
    quantized.keys, quantized.values, quantized.offset = keys, values, TOKENS
    fresh = mx.random.normal((1, HEADS, 1, DIM), key=mx.random.key(1)).astype(mx.float16)
    k, v = quantized.update_and_fetch(fresh, fresh)
    assert quantized.offset == TOKENS + 1
    for stored, got in zip((*keys, *values), (*k, *v), strict=True):
        assert got.dtype == stored.dtype
        assert mx.array_equal(got[:, :, :TOKENS], stored)
    plain = KVCache()
    dense_k, dense_v = plain.update_and_fetch(plain_keys, plain_values)
    new = mx.dequantize(
        *(
            part[:, :, TOKENS : TOKENS + 1].astype(dtype)
            for part, dtype in zip(k, _DTYPES, strict=True)
        ),
        group_size=32,
        bits=4,
    )
    dense_k, dense_v = plain.update_and_fetch(new, new)
    queries = mx.random.normal((1, 2 * HEADS, 1, DIM), key=mx.random.key(2))
    ours = scaled_dot_product_attention(
        queries.astype(mx.float16), k, v, cache=quantized, scale=DIM**-0.5, mask=None
    )
    exact = scaled_dot_product_attention(
        queries, dense_k, dense_v, cache=plain, scale=DIM**-0.5, mask=None
    )
    assert mx.abs(ours.astype(mx.float32) - exact).max().item() < 5e-3


_DTYPES = (mx.uint32, mx.float32, mx.float32)
