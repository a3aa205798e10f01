"""Declaring commands on what one name holds in memory, and reading where they point to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import command
from pion_vllm_mlx.wire.resp import Arg

MAX_INDEX_LAYER = 65_535

Handler = Callable[..., Any]


def on_name(name: str, arity: int, summary: str, **options: Any) -> Callable[[Handler], Handler]:
    """Declare a command on the slot or index that its first argument names."""
    options |= {"kvcache": True, "keys": (1, 1), "tenant": True, "any_prefix": True}
    return command(name, arity, summary, **options)


def layer_of(args: list[Arg]) -> tuple[bytes, int]:
    """The session and the layer that the first two arguments name. Raises CommandError."""
    return arguments.sid(args[1]), arguments.integer(args[2], "layer", 0, MAX_INDEX_LAYER)
