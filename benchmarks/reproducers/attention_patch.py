"""A forward of the patched model beside the unpatched one that holds the prefix itself.

The bar: with the prefix in this process, a warm forward takes at most 1.05 times as long as
with caches of mlx-lm's own that hold it. Stated beside it: the same forward with the prefix
at a server on this host, over the binary lane and over RESP. Each forward is one token; each
turn of a side is ``STEPS`` of them, and gives back its tokens afterwards.

The logits of all sides are compared before anything is timed. Model: a Llama of random
float32 weights, ``--shape`` of models.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx

from pion_vllm_mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)

from .common import (
    alternate,
    arguments,
    check,
    fresh_folder,
    milliseconds,
    paired_ratio,
    pion_server,
    report,
)
from .models import SHAPES, random_ids, random_llama

NATIVE, HERE, BINARY, RESP = "native", "in-process", "binary", "resp"
STEPS, SUFFIX = 4, 16
BAR = 1.05


def options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prefix")
    parser.add_argument("--shape", default="small", choices=sorted(set(SHAPES) - {"thin"}))
    parser.add_argument("--cuda", action="store_true", help="the server attends on the GPU")
    return parser.parse_args()


def forward(model: Any, cache: list[Any], tokens: list[int]) -> mx.array:
    """The logits of ``tokens``, evaluated."""
    logits: mx.array = model(mx.array([tokens]), cache=cache)
    mx.eval(logits)
    return logits


def side(model: Any, cache: list[Any]) -> Callable[[], None]:
    """A turn: single tokens, taken back again."""

    def run() -> None:
        for _ in range(STEPS):
            forward(model, cache, [1])
        for entry in cache:
            entry.trim(STEPS)

    return run


def caches(model: Any, ids: list[int], port: int, stack: ExitStack) -> dict[str, list[Any]]:
    """A cache for every side, all with the same prefix and suffix."""
    made: dict[str, list[Any]] = {}
    for lane in (NATIVE, HERE, BINARY, RESP):
        switches = lane_switches(lane)
        with environment_of(switches):
            pc = stack.enter_context(PionPromptCache(model, port=port, deadline_seconds=60))
        held = pc.get_or_prefill(ids, "prefix")
        made[lane] = (
            held if lane == NATIVE else make_pion_prompt_cache(model, "prefix", pc, len(ids))
        )
    return made


def lane_switches(lane: str) -> Mapping[str, str]:
    """The environment under which a prompt cache uses one lane."""
    found = {"PION_PROMPT_CACHE_NO_INPROC": "1"} if lane in (BINARY, RESP) else {}
    return {**found, "PION_PROMPT_CACHE_NO_BINARY": "1"} if lane == RESP else found


@contextmanager
def environment_of(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for one block."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


def main() -> None:
    given = options()
    model = random_llama(given.shape, mx.float32)
    ids = random_ids(given.tokens, SHAPES[given.shape]["vocab_size"], 1)
    suffix = random_ids(SUFFIX, SHAPES[given.shape]["vocab_size"], 2)
    with ExitStack() as stack:
        folder = stack.enter_context(fresh_folder(given.dir))
        flags = ("--cuda-attention",) if given.cuda else ()
        server = stack.enter_context(pion_server(folder, *flags))
        install_pion_attention_patch()
        stack.callback(uninstall_pion_attention_patch)
        made = caches(model, ids, server.port, stack)
        wanted = forward(model, made[NATIVE], suffix)
        for lane, cache in made.items():
            found = wanted if lane == NATIVE else forward(model, cache, suffix)
            differs = float(mx.abs(found - wanted).max())
            if differs > 1e-4:
                largest = float(mx.abs(wanted).max())
                raise SystemExit(f"{lane}: logits differ by {differs:.2g}, of {largest:.2g}")
        sides = {lane: side(model, cache) for lane, cache in made.items()}
        seconds = alternate(sides, given.pairs, given.patience)
    per_step = {lane: [value / STEPS for value in values] for lane, values in seconds.items()}
    ratios = {lane: paired_ratio(seconds[lane], seconds[NATIVE]) for lane in (HERE, BINARY, RESP)}
    figures = {
        "shape": given.shape,
        "tokens": given.tokens,
        "server_flags": flags,
        "forward_ms": {lane: milliseconds(values) for lane, values in per_step.items()},
        "ratio_to_native": ratios,
        "in_process": check(ratios[HERE]["median"], BAR, at_least=False),
    }
    report("attention_patch", given, figures, "mlx", "mlx-lm")


if __name__ == "__main__":
    main()
