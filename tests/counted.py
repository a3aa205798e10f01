"""A function in the place of a model's own, that is no other code of the model."""

from __future__ import annotations

from types import FunctionType


def as_ours(call: FunctionType) -> FunctionType:
    """The function as one of the product, which counts in a model's key as its ``original``.

    Tests that count tokens replace a model's ``__call__``: its key must stay what it is.
    """
    space = {**call.__globals__, "__name__": "pion_vllm_mlx.counting"}
    made = FunctionType(call.__code__, space, call.__name__, call.__defaults__, call.__closure__)
    made.counts = True  # type: ignore[attr-defined]
    return made
