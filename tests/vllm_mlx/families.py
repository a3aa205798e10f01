"""The families the backend is proved on, and the prompts that are asked of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.models import tiny_model, token_ids


def _quantized() -> Any:
    import mlx.core as mx
    import mlx.nn as nn

    model = tiny_model("llama")
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


#: every family that vllm-mlx batches; float32, so that equal tokens are no accident
FAMILIES: dict[str, Callable[[], Any]] = {
    "plain": lambda: tiny_model("llama"),
    "plain, 4-bit weights": _quantized,
    "latent": lambda: tiny_model("deepseek_v3"),
    "sliding window": lambda: tiny_model("gemma3_text"),
    "gated delta": lambda: tiny_model("qwen3_next"),
    "gated delta 3.5": lambda: tiny_model("qwen3_5"),
    "mamba and attention": lambda: tiny_model("falcon_h1"),
    "mamba": lambda: tiny_model("mamba"),
    "rwkv": lambda: tiny_model("rwkv7"),
}
#: caches that give any shorter prefix
SLICEABLE = ("plain", "plain, 4-bit weights", "latent")

LONG = 620
MIDDLE = 300


#: caches of which a state exists only where it was taken
RECURRENT = ("gated delta", "gated delta 3.5", "mamba and attention", "mamba", "rwkv")


@dataclass(frozen=True)
class Turn:
    """One prompt of a script, and how many of its tokens must not be computed again.

    ``reuse`` in one process; ``stored`` by an engine that knows only what the store has.
    """

    what: str
    prompt: list[int]
    reuse: int
    stored: int


def script(reply_to: Callable[[list[int]], list[int]], family: str) -> list[Turn]:
    """A cold prompt, then every way in which a later one can relate to it.

    ``reply_to`` gives the reply that a run without a cache gives.
    """

    def guard(cut: bool) -> int:
        return LONG - (16 if cut else 10)

    sliceable, recurrent = family in SLICEABLE, family in RECURRENT
    first = token_ids(LONG)
    reply = reply_to(first)
    extended = LONG + len(reply)
    second = [*first, *reply, *token_ids(40, seed=11)]
    edited = [*first[:MIDDLE], *token_ids(LONG - MIDDLE, seed=12)]
    again = [*first[:MIDDLE], *token_ids(LONG - MIDDLE, seed=13)]
    suffix = [*first[: LONG - 10], *token_ids(20, seed=14)]
    # A state exists only where it was taken: at the guard, and where an edit has parted before.
    # The store keeps no state of a reply.  It has the rows of a window wherever it was filled.
    return [
        Turn("cold", first, 0, 0),
        Turn("exact repeat", first, LONG - 1, LONG - 1),
        Turn("regenerate", first, LONG - 1, LONG - 1),
        Turn("another suffix", suffix, guard(not sliceable), guard(recurrent)),
        Turn("extension by the reply", second, extended, LONG - 1 if recurrent else extended),
        Turn("edit in the middle", edited, MIDDLE if sliceable else 0, 0 if recurrent else MIDDLE),
        Turn("another edit there", again, MIDDLE, MIDDLE),
        Turn("back to the first", first, LONG - 1, LONG - 1),
    ]
