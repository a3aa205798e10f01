"""The CUDA kernels beside mlx's own attention on one NVIDIA GPU: ``kernels --device cuda``.

Keys and values are random bf16, prefixes of 2,048 to 65,536 tokens. A side is a chain of calls,
each of which takes the output of the one before as its queries: the chain is built first, then
evaluated against the clock, so a time is what the device and mlx's launching take, not Python's
building. ``dense``: one query token; ``rate`` is the bytes of K and V over the time, ``of_copy``
that over the bytes that a copy of 1 GB reads and writes in its time. ``batched``: 16 and more
query tokens, ours, mlx's and the expression in mlx operations that gives the lse too. ``fused``:
suffix and prefix under one softmax, beside mlx's attention over the joined arrays. ``sparse``: 8 of
1,024 blocks of 64 tokens, given (``blocks``), as 512 listed tokens a head (``listed``) and selected
by block means (``auto``), beside all 65,536 tokens.  Two sides say what is out of reach here:
``one_operation`` is mlx's least operation, ``empty_call`` a kernel of ours that copies its queries
and writes the two outputs of attention; ``dense_over`` of it is what no kernel of one call gets
beyond.  ``--only NAME`` measures one of these parts.  ``batched`` is what the rules of
``choices.json`` are read from: after a run with ``--save``, ``tests/kernels/test_choice.py`` names
the rows that they decide otherwise.

As in a server that attends, mlx does not round to TF32, unless MLX_ENABLE_TF32=1 says so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.reproducers.common import alternate, check, paired_ratio, report
from benchmarks.reproducers.kernels_floor import empty_call
from pion_vllm_mlx.config import set_up_products
from pion_vllm_mlx.kernels.cuda_kernels import CudaKernels
from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.device_source import CUDA
from pion_vllm_mlx.kernels.mlx_expression import MlxKernels
from pion_vllm_mlx.kernels.mlx_runner import MlxRunner
from pion_vllm_mlx.kernels.problem import (
    BestBlocksJob,
    BlocksJob,
    DenseJob,
    Kernels,
    Prefix,
    Suffix,
)

TOKENS = (2048, 4096, 8192, 16_384, 32_768, 65_536)
LONG, BLOCK, TOP = 65_536, 64, 8
CHAIN_SECONDS = 0.02
COPY_BYTES = 1 << 30
PARTS = ("dense", "batched", "fused", "sparse")

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads and head dimension of a model."""

    name: str
    q_heads: int
    kv_heads: int
    dim: int

    @property
    def head_map(self) -> Any:
        """u8 ``[H_q]``: groups of neighbours."""
        return np.repeat(np.arange(self.kv_heads), self.q_heads // self.kv_heads).astype(np.uint8)

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of K and V in bf16."""
        return 4 * self.kv_heads * num_tokens * self.dim


SHAPES = (
    Shape("32/8x128", 32, 8, 128),
    Shape("32/8x64", 32, 8, 64),
    Shape("32/32x128", 32, 32, 128),
)
# Query heads, KV heads, then of each row of ``batched``: D, type, N, M.
BATCHED_HEADS = (32, 8)
BATCHED = (
    *((128, "bfloat16", n, m) for n in (2048, 16_384, 65_536) for m in (16, 64)),
    (128, "bfloat16", 2048, 512),
    *((dim, "bfloat16", n, 16) for dim in (160, 192, 256, 512) for n in (2048, 8192)),
    *((dim, "bfloat16", 16_384, 16) for dim in (192, 256)),
    *((128, "float32", n, 16) for n in (2048, 8192, 16_384)),
    *((dim, "float32", 8192, 16) for dim in (64, 192, 256)),
    (256, "bfloat16", 1024, 16),
)


@dataclass
class Chain:
    """Calls that wait for each other; returns seconds of one."""

    step: Step
    first: Any
    calls: int = 4

    def settle(self) -> Chain:
        """Warm up and choose how many calls make a measurable time."""
        for _ in range(2):
            self()
        self.calls = int(min(200, max(4, CHAIN_SECONDS / self())))
        self()
        return self

    def __call__(self) -> float:
        import mlx.core as mx

        value = self.first
        for _ in range(self.calls):
            value = self.step(value)
        mx.synchronize()
        started = time.perf_counter()
        mx.eval(value)
        mx.synchronize()
        return (time.perf_counter() - started) / self.calls


def microseconds(times: list[float]) -> float:
    """The median in us."""
    return round(1e6 * float(np.median(times)), 2)


def compare(sides: dict[str, Chain], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a call of every side, in turn."""
    settled: dict[str, Callable[[], Any]] = {n: chain.settle() for n, chain in sides.items()}
    return alternate(settled, options.pairs, options.patience)


def random(*shape: int) -> Any:
    """Standard normal values in bf16, evaluated."""
    import mlx.core as mx

    drawn = mx.random.normal(shape).astype(mx.bfloat16)
    mx.eval(drawn)
    return drawn


def widened(q: Any) -> Any:
    """Queries in the type of our outputs, which the next call of a chain takes: one program."""
    import mlx.core as mx

    wide = q.astype(mx.float32)
    mx.eval(wide)
    return wide


def held(shape: Shape, num_tokens: int, dtype: Any = None) -> Prefix:
    """A random prefix, in bf16 or another type."""
    import mlx.core as mx

    sides = [random(shape.kv_heads, num_tokens, shape.dim) for _ in range(2)]
    if dtype is not None:
        sides = [side.astype(dtype) for side in sides]
        mx.eval(sides)
    return Prefix(sides[0], sides[1], num_tokens)


def ours(kernels: Kernels, shape: Shape, prefix: Prefix, suffix: Suffix | None = None) -> Step:
    """Dense attention by ``kernels``; queries ``[H_q, M, D]``."""
    return lambda q: kernels.attend(DenseJob(q, prefix, shape.head_map, 0, suffix)).out


def theirs(shape: Shape, keys: Any, values: Any, mask: Any = None) -> Step:
    """mlx's own attention; queries ``[1, H_q, M, D]``."""
    import mlx.core as mx

    attention, scale = mx.fast.scaled_dot_product_attention, shape.dim**-0.5
    return lambda q: attention(q, keys[None], values[None], scale=scale, mask=mask)


def copy_rate(options: argparse.Namespace) -> float:
    """Bytes read and written a second by a copy of 1 GB."""
    import mlx.core as mx

    source = mx.zeros((COPY_BYTES // 4,), mx.float32)
    mx.eval(source)
    seconds = compare({"copy": Chain(lambda x: x + 1, source)}, options)["copy"]
    return 2 * COPY_BYTES / float(np.median(seconds))


def dense(kernels: Kernels, copied: float, options: argparse.Namespace) -> dict[str, Any]:
    """One query token over every length and shape."""
    found: dict[str, Any] = {}
    for shape in SHAPES:
        for num_tokens in TOKENS:
            prefix, q = held(shape, num_tokens), random(shape.q_heads, 1, shape.dim)
            seconds = compare(
                {
                    "kernel": Chain(ours(kernels, shape, prefix), widened(q)),
                    "mlx": Chain(theirs(shape, prefix.keys, prefix.values), q[None]),
                },
                options,
            )
            ratio = paired_ratio(seconds["kernel"], seconds["mlx"])
            rate = shape.nbytes(num_tokens) / float(np.median(seconds["kernel"]))
            found[f"{shape.name} N={num_tokens}"] = {
                "us": {name: microseconds(times) for name, times in seconds.items()},
                "ratio": ratio["median"],
                "check": check(ratio["median"], 1.2, at_least=False),
                "rate_GB_s": round(rate / 1e9),
                "of_copy": round(rate / copied, 3),
            }
    return found


def batched(kernels: Kernels, options: argparse.Namespace) -> dict[str, Any]:
    """Many query tokens: three ways, and which is fastest."""
    import mlx.core as mx

    found: dict[str, Any] = {}
    for dim, name, num_tokens, num_queries in BATCHED:
        heads, kv_heads = BATCHED_HEADS
        shape, dtype = Shape(f"{heads}/{kv_heads}x{dim}", heads, kv_heads, dim), getattr(mx, name)
        prefix = held(shape, num_tokens, dtype)
        q = random(shape.q_heads, num_queries, shape.dim).astype(dtype)
        seconds = compare(
            {
                "kernel": Chain(ours(kernels, shape, prefix), widened(q)),
                "expression": Chain(ours(MlxKernels(), shape, prefix), q),
                "mlx": Chain(theirs(shape, prefix.keys, prefix.values), q[None]),
            },
            options,
        )
        times = {name: microseconds(one) for name, one in seconds.items()}
        found[f"{shape.name} {name} N={num_tokens} M={num_queries}"] = {
            "us": times,
            "ratio": paired_ratio(seconds["kernel"], seconds["mlx"])["median"],
            "with_lse": min(("kernel", "expression"), key=times.__getitem__),
        }
    return found


def fused(kernels: Kernels, options: argparse.Namespace) -> dict[str, Any]:
    """Prefix and suffix under one softmax, beside mlx on the joined arrays."""
    import mlx.core as mx

    found: dict[str, Any] = {}
    shape = SHAPES[0]
    for num_tokens in (2048, 16_384, 65_536):
        for num_queries, num_suffix in ((1, 64), (16, 16)):
            prefix, q = held(shape, num_tokens), random(shape.q_heads, num_queries, shape.dim)
            suffix = Suffix(*(random(shape.kv_heads, num_suffix, shape.dim) for _ in range(2)))
            keys = mx.concatenate([prefix.keys, suffix.keys], axis=1)
            values = mx.concatenate([prefix.values, suffix.values], axis=1)
            mask = "causal" if num_queries > 1 else None
            mx.eval(keys, values)
            seconds = compare(
                {
                    "kernel": Chain(ours(kernels, shape, prefix, suffix), widened(q)),
                    "mlx": Chain(theirs(shape, keys, values, mask), q[None]),
                },
                options,
            )
            found[f"{shape.name} N={num_tokens} M={num_queries} S={num_suffix}"] = {
                "us": {name: microseconds(times) for name, times in seconds.items()},
                "ratio": paired_ratio(seconds["kernel"], seconds["mlx"])["median"],
            }
    return found


def sparse(kernels: DeviceKernels, options: argparse.Namespace) -> dict[str, Any]:
    """8 of 1,024 blocks beside the whole prefix."""
    return {shape.name: sparse_of(kernels, shape, options) for shape in SHAPES}


def sparse_of(kernels: DeviceKernels, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Sparse attention of one shape in three ways; times, and dense over each."""
    import mlx.core as mx

    prefix, head_map = held(shape, LONG), shape.head_map
    statistics = kernels.block_statistics(prefix, BLOCK, 0, "mean")
    chosen = np.sort(np.random.default_rng(0).permutation(LONG // BLOCK)[:TOP]).astype(np.int32)
    tokens = (chosen[:, None] * BLOCK + np.arange(BLOCK)).reshape(1, -1).astype(np.int32)
    indices = np.repeat(tokens, shape.q_heads, axis=0)
    counts = np.full(shape.q_heads, TOP * BLOCK, np.int32)
    given_lists = kernels.token_lists(indices, counts)
    lists = replace(given_lists, lists=given_lists.lists + 0)  # in the GPU's memory, as blocks are
    blocks = mx.array(chosen) + 0
    mx.eval(statistics.high, blocks, lists.lists)

    def given(q: Any) -> Any:
        return kernels.attend_blocks(BlocksJob(q, prefix, head_map, blocks, BLOCK)).out

    def auto(q: Any) -> Any:
        job = BestBlocksJob(q, prefix, head_map, statistics, BLOCK, TOP)
        return kernels.attend_best_blocks(job).out

    def listed(q: Any) -> Any:
        return kernels.attend_listed(q, prefix, head_map, lists).out

    q = random(shape.q_heads, shape.dim)
    wide = widened(q)
    seconds = compare(
        {
            "dense": Chain(ours(kernels, shape, prefix), wide[:, None]),
            "mlx dense": Chain(theirs(shape, prefix.keys, prefix.values), q[None, :, None]),
            "blocks": Chain(given, wide),
            "listed": Chain(listed, wide),
            "auto": Chain(auto, wide),
            "one_operation": Chain(lambda value: -value, q),
            "empty_call": Chain(empty_call(), wide),
        },
        options,
    )
    ways = ("blocks", "listed", "auto")
    ratios = {
        name: paired_ratio(seconds["dense"], seconds[name])["median"]
        for name in (*ways, "empty_call")
    }
    return {
        "us": {name: microseconds(times) for name, times in seconds.items()},
        "dense_over": ratios,
        "checks": {name: check(ratios[name], 10, at_least=True) for name in ways},
    }


def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One query token under other numbers of the dialect, in us: what to choose them from."""
    rows = []
    sizes = itertools.product((8, 24), (8, 16), (4, 8), (264, 396, 528, 1056))
    for thread_values, unroll, simdgroups, threadgroups in sizes:
        numbers: dict[str, Any] = {
            "thread_values": thread_values,
            "unroll": unroll,
            "simdgroups": simdgroups,
            "threadgroups": threadgroups,
        }
        kernels = DeviceKernels(MlxRunner(replace(CUDA, **numbers)))
        for shape in (SHAPES[0], SHAPES[2]):
            times = {}
            for num_tokens in (2048, 8192, 65_536):
                prefix, q = held(shape, num_tokens), random(shape.q_heads, 1, shape.dim)
                chain = Chain(ours(kernels, shape, prefix), q).settle()
                times[str(num_tokens)] = microseconds([chain() for _ in range(3)])
            rows.append({"shape": shape.name, **numbers, "us": times})
            print(rows[-1], flush=True)
    return rows


def device_name() -> str:
    """What mlx says about the device."""
    import mlx.core as mx

    return str(mx.device_info().get("device_name", mx.default_device()))


def main(options: argparse.Namespace) -> None:
    """Measure and report; with ``--sweep`` only the sweep."""
    set_up_products()
    kernels = CudaKernels()
    reason = kernels.unavailable()
    if reason is not None:
        raise SystemExit(f"no CUDA kernels here: {reason}")
    if options.sweep:
        best = sorted(sweep(options), key=lambda row: sum(row["us"].values()))
        print("best:", *best[:10], sep="\n")
        return
    copied = copy_rate(options)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "dense": lambda: dense(kernels, copied, options),
        "batched": lambda: batched(kernels, options),
        "fused": lambda: fused(kernels, options),
        "sparse": lambda: sparse(kernels, options),
    }
    wanted = [options.only] if options.only else PARTS
    figures: dict[str, Any] = {
        "device": device_name(),
        "tf32": os.environ["MLX_ENABLE_TF32"] != "0",
        "copy_GB_s": round(copied / 1e9),
    }
    figures |= {name: parts[name]() for name in wanted}
    name = f"kernels_cuda-{options.only}" if options.only else "kernels_cuda"
    report(name, options, figures, "mlx")
