"""The attention kernels of the processor: beside bare numpy, batched, sparse, and stored types.

8 heads of 128 values, random. ``fused``: M queries over a prefix of 2,048 tokens and a suffix of
16, one softmax, against the same in bare numpy (two products, softmax, two products; numpy's BLAS
with its own threads). ``batched``: 16 queries at once against 16 queries one by one. ``sparse``:
8 of 1,024 blocks of 64 tokens, selected by block means that the prefix keeps, against all 65,536
tokens. ``stored``: the time of a query over 2,048 tokens held in other types. ``mlx``: mlx's own
attention on its default device against the kernel chosen for mlx arrays there, one query.
``--device cuda`` measures the CUDA kernels instead: ``kernels_cuda`` says what.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.reproducers import kernels_cuda
from benchmarks.reproducers.common import (
    alternate,
    arguments,
    check,
    milliseconds,
    paired_ratio,
    report,
)
from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.api import Affine, Prefix, Selection, Suffix

HEADS, DIM = 8, 128
TOKENS, SUFFIX = 2048, 16
LONG, BLOCK, TOP = 65_536, 64, 8
BATCH = 16
CALLS = 10  # of a short side in a turn: one call is shorter than the clock of a busy machine

Floats = NDArray[np.float32]
Side = Callable[[], Any]


def random(*shape: int) -> Floats:
    """Standard normal values, float32."""
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def repeated(side: Side, calls: int = CALLS) -> Side:
    """``calls`` calls of a side."""

    def run() -> None:
        for _ in range(calls):
            side()

    return run


def bare(q: Floats, parts: list[tuple[Floats, Floats]]) -> Floats:
    """One softmax over all parts, every query seeing every token, in numpy alone."""
    scores = np.concatenate([q @ keys.transpose(0, 2, 1) for keys, _ in parts], axis=-1)
    scores *= np.float32(DIM**-0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    at = parts[0][0].shape[1]
    out: Floats = scores[..., :at] @ parts[0][1] + scores[..., at:] @ parts[1][1]
    return out


def fused(options: argparse.Namespace, num_queries: int) -> dict[str, Any]:
    """The fused kernel against bare numpy."""
    prefix = random(2, HEADS, TOKENS, DIM)
    suffix = random(2, HEADS, SUFFIX, DIM)
    q = random(HEADS, num_queries, DIM)
    held, behind = api.dense_prefix(*prefix), Suffix(*suffix)
    parts = [(prefix[0], prefix[1]), (suffix[0], suffix[1])]
    sides = {
        "kernel": repeated(lambda: api.attend_fused(q, held, behind)),
        "numpy": repeated(lambda: bare(q, parts)),
    }
    seconds = alternate(sides, options.pairs, options.patience)
    ratio = paired_ratio(seconds["kernel"], seconds["numpy"])
    return {
        "ms": {name: milliseconds([x / CALLS for x in times]) for name, times in seconds.items()},
        "ratio": ratio,
        "check": check(ratio["median"], 1.5, at_least=False),
    }


def batched(options: argparse.Namespace) -> dict[str, Any]:
    """16 queries in one call against 16 calls."""
    held, q = api.dense_prefix(*random(2, HEADS, TOKENS, DIM)), random(HEADS, BATCH, DIM)
    one_by_one = [np.ascontiguousarray(q[:, number]) for number in range(BATCH)]
    sides = {
        "singles": lambda: [api.attend(one, held) for one in one_by_one],
        "batch": lambda: api.attend(q, held),
    }
    seconds = alternate(sides, options.pairs, options.patience)
    ratio = paired_ratio(seconds["singles"], seconds["batch"])
    return {
        "ms": {name: milliseconds(times) for name, times in seconds.items()},
        "ratio": ratio,
        "check": check(ratio["median"], 4, at_least=True),
    }


def sparse(options: argparse.Namespace) -> dict[str, Any]:
    """Selected blocks against the whole of a long prefix."""
    held, q = api.dense_prefix(*random(2, HEADS, LONG, DIM)), random(HEADS, DIM)
    selection = Selection(BLOCK, TOP)
    sides = {
        "dense": lambda: api.attend(q, held),
        "sparse": lambda: api.attend_sparse_auto(q, held, selection),
    }
    seconds = alternate(sides, options.pairs, options.patience)
    ratio = paired_ratio(seconds["dense"], seconds["sparse"])
    return {
        "ms": {name: milliseconds(times) for name, times in seconds.items()},
        "ratio": ratio,
        "check": check(ratio["median"], 20, at_least=True),
    }


def quantized(bits: int) -> Affine:
    """Random codes in groups of 32, ``[HEADS, TOKENS, DIM]``."""
    codes = np.random.default_rng(bits).integers(
        0, 2**32, (HEADS, TOKENS, DIM * bits // 32), dtype=np.uint32
    )
    groups = np.full((HEADS, TOKENS, DIM // 32), 2.0**-bits, np.float16)
    return Affine(codes, groups, groups, bits, 32)


def stored(options: argparse.Namespace) -> dict[str, Any]:
    """The same queries over other types, in ms."""
    keys, values = random(2, HEADS, TOKENS, DIM)
    prefixes = {name: api.dense_prefix(keys, values, name) for name in ("fp32", "fp16", "bf16")}
    for bits in (4, 8):
        prefixes[f"{bits} bits of 32"] = Prefix(quantized(bits), quantized(bits), TOKENS)
    found: dict[str, Any] = {}
    for num_queries in (1, BATCH):
        q = random(HEADS, num_queries, DIM)
        sides = {name: partial(api.attend, q, prefix) for name, prefix in prefixes.items()}
        seconds = alternate(sides, options.pairs, options.patience)
        found[f"M={num_queries}"] = {name: milliseconds(x) for name, x in seconds.items()}
    return found


def beside_mlx(options: argparse.Namespace) -> dict[str, Any]:
    """``mx.fast.scaled_dot_product_attention`` against the chosen kernel, in ms."""
    import mlx.core as mx

    keys, values = (mx.array(side) for side in random(2, HEADS, TOKENS, DIM))
    held, q = api.dense_prefix(keys, values), mx.array(random(HEADS, 1, DIM))
    mx.eval(keys, values, q)
    attention = mx.fast.scaled_dot_product_attention

    def theirs() -> None:
        mx.eval(attention(q[None], keys[None], values[None], scale=DIM**-0.5))

    sides = {
        "kernel": repeated(lambda: mx.eval(api.attend(q, held).out)),
        "mlx": repeated(theirs),
    }
    seconds = alternate(sides, options.pairs, options.patience)
    return {
        "device": str(mx.default_device()),
        "ms": {name: milliseconds([x / CALLS for x in times]) for name, times in seconds.items()},
        "ratio": paired_ratio(seconds["kernel"], seconds["mlx"]),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: see there")
    parser.add_argument("--sweep", action="store_true", help="cuda: try other launch sizes only")
    parser.add_argument("--only", choices=kernels_cuda.PARTS, help="cuda: measure one part only")
    options = parser.parse_args()
    if options.device == "cuda":
        kernels_cuda.main(options)
        return
    figures = {
        "fused_1_query": fused(options, 1),
        "fused_16_queries": fused(options, BATCH),
        "batched": batched(options),
        "sparse": sparse(options),
        "stored_ms": stored(options),
        "beside_mlx": beside_mlx(options),
    }
    report("kernels", options, figures, "mlx")


if __name__ == "__main__":
    main()
